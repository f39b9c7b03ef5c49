//! Snapshots of sequences, to go on from where a prompt begins like an earlier one.

use crate::speculation::Drafter;

/// A sequence as it was after its first tokens.
pub struct Snapshot<'a, S> {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The state after them.
    pub state: S,
    /// The drafter after them.
    pub drafter: Option<Box<dyn Drafter<'a> + 'a>>,
    /// Bytes that the state holds.
    pub bytes: usize,
}

impl<S> Snapshot<'_, S> {
    fn bytes(&self) -> usize {
        let drafter = self.drafter.as_ref().map_or(0, |drafter| drafter.bytes());
        self.bytes + drafter + self.tokens.len() * size_of::<u32>()
    }
}

/// Snapshots up to a number of bytes; the ones that were not used for longest go first.
pub struct PrefixCache<'a, S> {
    /// The last used come last.
    snapshots: Vec<Snapshot<'a, S>>,
    budget: usize,
}

impl<'a, S> PrefixCache<'a, S> {
    /// A cache of up to `budget` bytes. The newest snapshot is kept whatever its size.
    pub fn new(budget: usize) -> Self {
        PrefixCache {
            snapshots: Vec::new(),
            budget,
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.snapshots.clear();
    }

    /// The snapshot inserted last, unless another was used since.
    pub fn newest(&self) -> Option<(&[u32], &S)> {
        let newest = self.snapshots.last()?;
        Some((&newest.tokens, &newest.state))
    }

    /// The longest snapshot that `prompt` goes on from, by one token at least.
    pub fn longest(&mut self, prompt: &[u32]) -> Option<&Snapshot<'a, S>> {
        let index = (0..self.snapshots.len())
            .filter(|&index| {
                let tokens = &self.snapshots[index].tokens;
                tokens.len() < prompt.len() && prompt.starts_with(tokens)
            })
            .max_by_key(|&index| self.snapshots[index].tokens.len())?;
        let snapshot = self.snapshots.remove(index);
        self.snapshots.push(snapshot);
        self.snapshots.last()
    }

    /// Adds a snapshot; one of the same tokens is replaced.
    pub fn insert(&mut self, snapshot: Snapshot<'a, S>) {
        self.snapshots.retain(|old| old.tokens != snapshot.tokens);
        self.snapshots.push(snapshot);
        let mut bytes: usize = self.snapshots.iter().map(Snapshot::bytes).sum();
        while bytes > self.budget && self.snapshots.len() > 1 {
            bytes -= self.snapshots.remove(0).bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(tokens: &[u32], bytes: usize) -> Snapshot<'static, usize> {
        Snapshot {
            tokens: tokens.to_vec(),
            state: tokens.len(),
            drafter: None,
            bytes,
        }
    }

    #[test]
    fn the_longest_proper_beginning_is_found() {
        let mut cache = PrefixCache::new(1 << 20);
        for tokens in [&[1][..], &[1, 2, 3], &[1, 2], &[1, 9, 9, 9], &[1, 2, 3, 4]] {
            cache.insert(snapshot(tokens, 10));
        }
        let mut found = |prompt: &[u32]| cache.longest(prompt).map(|s| s.state);
        assert_eq!(found(&[1, 2, 3, 5, 6]), Some(3));
        assert_eq!(found(&[1, 2, 3, 4]), Some(3));
        assert_eq!(found(&[1, 7]), Some(1));
        assert_eq!(found(&[1]), None);
        assert_eq!(found(&[]), None);
    }

    #[test]
    fn what_was_not_used_for_longest_goes_first() {
        let mut cache = PrefixCache::new(1000);
        cache.insert(snapshot(&[1], 400));
        cache.insert(snapshot(&[2], 400));
        assert!(cache.longest(&[1, 1]).is_some());
        cache.insert(snapshot(&[3], 400));
        assert!(cache.longest(&[2, 2]).is_none());
        assert!(cache.longest(&[1, 1]).is_some());
        // Too large for the budget, but the newest.
        cache.insert(snapshot(&[4], 4000));
        assert!(cache.longest(&[1, 1]).is_none());
        assert_eq!(cache.newest(), Some((&[4][..], &1)));
    }
}
