//! Prompt lookup: what followed the last few tokens when they stood in the text before.
//!
//! No weights and next to no time, for any model; it pays where an answer repeats its prompt, as
//! code edits do (Saxena, "Prompt Lookup Decoding", 2023).

use std::collections::HashMap;

use super::draft::{Candidate, Draft};
use super::drafter::{Drafter, Growth, Read};
use crate::error::Error;
use std::collections::BinaryHeap;

/// Longest run of tokens that is looked up, and the shortest.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;
/// Places that one draft is made from, the newest ones.
const PLACES: usize = 4;
/// Deepest draft.
const DEPTH: usize = 24;

/// The text so far, indexed by runs of tokens, and how well its drafts have done.
#[derive(Clone, Default)]
pub struct Lookup {
    tokens: Vec<u32>,
    /// For each run length, run -> ends of its occurrences (index of the token after it).
    places: [HashMap<[u32; LONGEST], Vec<u32>>; LONGEST + 1 - SHORTEST],
    /// Per run length: how often the next drafted token was right, and how often one was drafted.
    hits: [(f64, f64); LONGEST + 1 - SHORTEST],
    /// Run length of the last draft.
    drafted_by: Option<usize>,
}

impl Lookup {
    fn read(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.tokens.push(token);
            let end = self.tokens.len();
            for length in SHORTEST..=LONGEST.min(end) {
                let run = run(&self.tokens[end - length..]);
                self.places[length - SHORTEST]
                    .entry(run)
                    .or_default()
                    .push(end as u32);
            }
        }
    }

    /// Estimated chance that one more token of a draft by runs of `length` is right.
    fn chance(&self, length: usize) -> f64 {
        let (right, seen) = self.hits[length - SHORTEST];
        // Before anything is known: a longer run is likelier to go on as before.
        let (prior, strength) = (0.4 + 0.1 * (length - SHORTEST) as f64, 4.0);
        ((right + prior * strength) / (seen + strength)).clamp(0.02, 0.98)
    }

    /// Follows all places at once; a token's edge is the chance of a right draft, shared among
    /// the places by how many go on with it.
    fn grow(&self, draft: &mut Draft, ends: &[usize], edge: f32, growth: &Growth) {
        let mut heap = BinaryHeap::new();
        let mut offered = 0;
        let mut offer = |heap: &mut BinaryHeap<_>, log_chance: f32, parent: usize, at: &[usize]| {
            let mut next: Vec<(u32, Vec<usize>)> = Vec::new();
            for &place in at {
                let Some(&token) = self.tokens.get(place) else {
                    continue;
                };
                match next.iter_mut().find(|(seen, _)| *seen == token) {
                    Some((_, places)) => places.push(place + 1),
                    None => next.push((token, vec![place + 1])),
                }
            }
            for (token, places) in next.into_iter().take(growth.width) {
                let share = (places.len() as f32 / at.len() as f32).ln();
                offered += 1;
                let edge = edge + share;
                let log_chance = log_chance + edge;
                if log_chance < growth.least {
                    continue;
                }
                heap.push(Candidate {
                    log_chance,
                    offered,
                    what: (parent, token, edge, places),
                });
            }
        };
        offer(&mut heap, 0.0, 0, ends);
        while draft.len() < growth.nodes {
            let Some(Candidate {
                log_chance,
                what: (parent, token, edge, places),
                ..
            }) = heap.pop()
            else {
                break;
            };
            let node = draft.push(parent, token, edge);
            if (draft.tree.depths()[node] as usize) < DEPTH.min(growth.depth) {
                offer(&mut heap, log_chance, node, &places);
            }
        }
    }
}

impl<'a> Drafter<'a> for Lookup {
    fn resume(&mut self, tokens: &[u32]) {
        self.read(tokens);
    }

    fn observe(&mut self, read: Read<'_>) -> Result<(), Error> {
        self.read(read.tokens);
        Ok(())
    }

    fn propose(&mut self, growth: &Growth) -> Result<Draft, Error> {
        let mut draft = Draft::root(growth.root);
        self.drafted_by = None;
        let end = self.tokens.len();
        let before = &self.tokens[end.saturating_sub(LONGEST - 1)..];
        let newest: Vec<u32> = before.iter().copied().chain([growth.root]).collect();
        for length in (SHORTEST..=LONGEST.min(newest.len())).rev() {
            let places = &self.places[length - SHORTEST];
            let Some(ends) = places.get(&run(&newest[newest.len() - length..])) else {
                continue;
            };
            let ends: Vec<usize> = ends
                .iter()
                .rev()
                .map(|&e| e as usize)
                .filter(|&e| e < end)
                .take(PLACES)
                .collect();
            if ends.is_empty() {
                continue;
            }
            self.drafted_by = Some(length);
            let edge = self.chance(length).ln() as f32;
            self.grow(&mut draft, &ends, edge, growth);
            break;
        }
        Ok(draft)
    }

    fn judged(&mut self, draft: &Draft, path: &[usize], _: f64) {
        if let Some(length) = self.drafted_by.take()
            && !draft.is_empty()
        {
            let (right, seen) = &mut self.hits[length - SHORTEST];
            let accepted = path.len().saturating_sub(1);
            // The walk stops at the first wrong token, so one failure at most is seen.
            let last = path.last().copied().unwrap_or(0);
            let failed = usize::from(draft.tree.children(last).next().is_some());
            *right = *right * 0.95 + accepted as f64;
            *seen = *seen * 0.95 + (accepted + failed) as f64;
        }
    }

    fn fork(&self) -> Box<dyn Drafter<'a> + 'a> {
        Box::new(Lookup {
            hits: self.hits,
            ..Lookup::default()
        })
    }
}

fn run(tokens: &[u32]) -> [u32; LONGEST] {
    let mut run = [u32::MAX; LONGEST];
    run[..tokens.len()].copy_from_slice(tokens);
    run
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lookup that has read all of `tokens` but the last, and its draft below that one.
    fn drafted(tokens: &[u32], nodes: usize) -> (Lookup, Draft) {
        let mut lookup = Lookup::default();
        let (root, read) = tokens.split_last().unwrap();
        lookup.read(read);
        let draft = lookup.propose(&Growth::of(*root, nodes)).unwrap();
        (lookup, draft)
    }

    #[test]
    fn it_proposes_what_followed_before() {
        let (_, draft) = drafted(&[1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 4);
        assert_eq!(draft.tree.tokens(), &[3, 4, 5, 6]);
        assert_eq!(draft.tree.parents(), &[-1, 0, 1, 2]);
    }

    #[test]
    fn places_that_differ_become_branches() {
        let (_, draft) = drafted(&[1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 8, 0, 1, 2], 3);
        // Runs of four ([0, 1, 2] preceded by 8) are the longest match and end twice before.
        assert_eq!(draft.tree.tokens()[0], 2);
        assert!(draft.tree.tokens()[1..].contains(&8));
        let (_, draft) = drafted(&[5, 1, 2, 7, 6, 1, 2, 8, 9, 1, 2], 3);
        assert_eq!(draft.tree.parents(), &[-1, 0, 0]);
        assert_eq!(draft.tree.tokens(), &[2, 8, 7]);
    }

    #[test]
    fn nothing_known_means_the_root_alone() {
        assert!(drafted(&[1], 8).1.is_empty());
        assert!(drafted(&[1, 2, 3], 8).1.is_empty());
    }

    #[test]
    fn a_fork_that_read_the_prefix_again_drafts_the_same() {
        let text = [1, 2, 3, 4, 1, 2, 3, 9, 1, 2];
        let (lookup, draft) = drafted(&text, 6);
        let mut fork: Box<dyn Drafter<'_>> = lookup.fork();
        fork.resume(&text[..text.len() - 1]);
        let again = fork.propose(&Growth::of(2, 6)).unwrap();
        assert_eq!(again.tree, draft.tree);
    }

    #[test]
    fn failures_lower_the_estimate_and_successes_raise_it() {
        let (mut lookup, draft) = drafted(&[1, 2, 3, 1, 2], 2);
        let before = draft.log_chances[1];
        lookup.judged(&draft, &[0], 1.0);
        let worse = lookup.propose(&Growth::of(2, 2)).unwrap();
        assert!(worse.log_chances[1] < before);
        for _ in 0..20 {
            let draft = lookup.propose(&Growth::of(2, 2)).unwrap();
            lookup.judged(&draft, &[0, 1], 1.0);
        }
        let better = lookup.propose(&Growth::of(2, 2)).unwrap();
        assert!(better.log_chances[1] > before);
    }
}
