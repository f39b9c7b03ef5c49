use super::*;
use kozue_model::Footprint;
use proptest::prelude::*;

type Cache = PrefixCache<'static, usize>;

/// A snapshot whose state is its length, with `own` bytes and these pages of 100 bytes.
fn snapshot(tokens: &[u32], own: usize, pages: &[usize]) -> Snapshot<'static, usize> {
    let page = |&id: &usize| kozue_kernels::Page { id, bytes: 100 };
    Snapshot {
        tokens: tokens.to_vec(),
        state: Arc::new(tokens.len()),
        drafter: None,
        footprint: Footprint {
            own,
            pages: pages.iter().map(page).collect(),
        },
        lasting: true,
    }
}

/// The state that a prompt goes on from, and how much it shares.
fn found(cache: &mut Cache, prompt: &[u32]) -> (Option<usize>, usize) {
    let (hit, shared) = cache.longest(prompt);
    if let Some(hit) = &hit {
        assert_eq!(hit.read, **hit.state);
    }
    (hit.map(|hit| hit.read), shared)
}

/// Bytes of the tree alone.
fn tree(edges: &[usize]) -> usize {
    edges.iter().map(|&edge| Cache::size(edge)).sum()
}

#[test]
fn the_longest_proper_beginning_is_found() {
    let mut cache = PrefixCache::new(1 << 20);
    for tokens in [&[1][..], &[1, 2, 3], &[1, 2], &[1, 9, 9, 9], &[1, 2, 3, 4]] {
        cache.insert(snapshot(tokens, 10, &[]));
    }
    for (prompt, expected) in [
        (&[1, 2, 3, 5, 6][..], (Some(3), 3)),
        // Never all of a prompt: its last token is read for the logits.
        (&[1, 2, 3, 4], (Some(3), 4)),
        (&[1, 2, 3, 4, 5], (Some(4), 4)),
        (&[1, 7], (Some(1), 1)),
        // Shared with a snapshot, but there is none where they part.
        (&[1, 9, 9, 8], (Some(1), 3)),
        (&[1], (None, 1)),
        (&[4], (None, 0)),
        (&[], (None, 0)),
    ] {
        assert_eq!(found(&mut cache, prompt), expected, "{prompt:?}");
    }
    let (tokens, state) = cache.newest().unwrap();
    assert_eq!((&tokens[..], *state), (&[1][..], 1));
}

/// ml-explore/mlx-lm#1390, #1392, #1395, #1409: limits of prompt caches were ignored, and what
/// entries share was copied.
#[test]
fn pages_count_once_and_the_budget_holds() {
    let mut cache = PrefixCache::new(1200);
    cache.insert(snapshot(&[1, 2], 50, &[7, 8]));
    cache.insert(snapshot(&[1, 2, 3], 50, &[7, 8, 9]));
    assert_eq!(cache.bytes(), 2 * 50 + 3 * 100 + tree(&[2, 1]));
    // The same tokens again replace what was there.
    cache.insert(snapshot(&[1, 2, 3], 60, &[7, 8, 10]));
    assert_eq!(cache.bytes(), 110 + 300 + tree(&[2, 1]));
    cache.limit(110 + 300 + tree(&[2, 1]) - 1);
    // The shorter one is gone; the pages are still held by the other.
    assert_eq!(found(&mut cache, &[1, 2, 9]), (None, 2));
    assert_eq!(cache.bytes(), 60 + 300 + tree(&[3]));
    // What is larger than the budget is not kept, and nothing goes for it.
    cache.insert(snapshot(&[4], 5000, &[]));
    cache.insert(snapshot(&[], 1, &[]));
    assert_eq!(cache.len(), 1);
    cache.clear();
    assert!(cache.is_empty());
    assert_eq!(cache.bytes(), 0);
}

#[test]
fn what_was_not_used_for_longest_goes_first() {
    let room = 800 + tree(&[1, 1]);
    let mut cache = PrefixCache::new(room);
    cache.insert(snapshot(&[1], 400, &[]));
    cache.insert(snapshot(&[2], 400, &[]));
    assert_eq!(found(&mut cache, &[1, 1]).0, Some(1));
    cache.insert(snapshot(&[3], 400, &[]));
    assert_eq!(found(&mut cache, &[2, 2]).0, None);
    assert_eq!(found(&mut cache, &[1, 1]).0, Some(1));
    // A snapshot in passing gives way to one that lasts, although it is newer...
    let passing = |tokens: &[u32]| Snapshot {
        lasting: false,
        ..snapshot(tokens, 400, &[])
    };
    cache.limit(room + 400 + tree(&[1]));
    cache.insert(passing(&[4]));
    cache.limit(room);
    assert_eq!(found(&mut cache, &[4, 4]).0, None);
    assert_eq!(cache.len(), 2);
    // ... unless it was used.
    cache.limit(room + 400 + tree(&[1]));
    cache.insert(passing(&[4]));
    assert_eq!(found(&mut cache, &[4, 4]).0, Some(1));
    cache.limit(400 + tree(&[1]));
    assert_eq!(found(&mut cache, &[4, 4]).0, Some(1));
}

proptest! {
    /// The tree against a list of snapshots: what is found, what is shared, and that nothing is
    /// left of it when all have gone.
    #[test]
    fn the_tree_does_as_a_list_does(
        texts in prop::collection::vec((prop::collection::vec(0u32..3, 1..9), 1usize..50), 1..40),
        prompts in prop::collection::vec(prop::collection::vec(0u32..3, 0..10), 1..20),
        budget in 0usize..4000,
    ) {
        let mut cache = Cache::new(usize::MAX);
        let mut list: Vec<Vec<u32>> = Vec::new();
        for (text, own) in &texts {
            cache.insert(snapshot(text, *own, &[text.len(), 100 + text[0] as usize]));
            list.retain(|old| old != text);
            list.push(text.clone());
        }
        prop_assert_eq!(cache.len(), list.len());
        for prompt in &prompts {
            let fits = |text: &&Vec<u32>| text.len() < prompt.len() && prompt.starts_with(text);
            let longest = list.iter().filter(fits).map(Vec::len).max();
            let shared = list.iter().map(|text| common(text, prompt)).max().unwrap_or(0);
            prop_assert_eq!(found(&mut cache, prompt), (longest, shared));
        }
        cache.limit(budget);
        prop_assert!(cache.bytes() <= budget);
        cache.limit(0);
        prop_assert_eq!((cache.len(), cache.bytes()), (0, 0));
        prop_assert_eq!(cache.nodes.len() - cache.free.len(), 1);
        prop_assert!(cache.pages.is_empty());
    }
}
