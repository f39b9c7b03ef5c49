//! What every family keeps: the same tokens with every drafter and with none, from a prefix that was
//! read before, beside other requests, whatever the keys and values are kept in. `speculation.rs` and
//! `prefix_cache.rs` ask more of two of them.
//!
//! `KOZUE_PROMPTS=200 cargo test --release -p kozue-engine --test families` runs over that many
//! prompts instead of one, with trees of more sizes.

#[path = "support/promise.rs"]
mod promise;

use kozue_engine::scheduler::{CacheSize, Progress, Scheduler, SchedulerOptions};
use kozue_engine::speculation::DraftKind;
use kozue_engine::{Loaded, Request};
use kozue_kernels::KvType;
use promise::{Pair, prompts, tokens, two_turns, ways};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Sizes and widths of trees, those of a short run first.
const TREES: [(Option<usize>, Option<usize>); 5] = [
    (Some(12), None),
    (Some(2), None),
    (Some(8), Some(1)),
    (Some(32), None),
    (None, None),
];

fn open(name: &str, kv: KvType) -> Pair {
    // A drafter reads after layers that the target has.
    let dflash = match name {
        "gemma3" => "dflash-qwen3_5",
        _ => "dflash-qwen3",
    };
    Pair::open(name, dflash, "weaver-learned", kv)
}

/// Two turns in all ways, with each drafter, against plain decoding.
fn drafts_change_nothing(name: &str, kv: KvType, kinds: &[DraftKind]) {
    let mut pair = open(name, kv);
    let trees = match std::env::var_os("KOZUE_PROMPTS") {
        Some(_) => &TREES[..],
        None => &TREES[..1],
    };
    let prompts = prompts(1);
    let mut plain = Vec::new();
    for (n, prompt) in prompts.iter().enumerate() {
        for (_, way) in ways(n, &pair.loaded) {
            plain.push(two_turns(&mut pair.loaded.session(None), prompt, &way));
        }
    }
    for &kind in kinds {
        let mut accepted = 0.0;
        for &(budget, width) in trees {
            pair.speculate(kind, budget, width);
            let mut expected = plain.iter();
            for (n, prompt) in prompts.iter().enumerate() {
                for (way_name, way) in ways(n, &pair.loaded) {
                    let answers = two_turns(&mut pair.loaded.session(None), prompt, &way);
                    assert_eq!(
                        tokens(&answers),
                        tokens(expected.next().unwrap()),
                        "{name}, {kv:?}, {kind}, {budget:?} nodes, prompt {n}, {way_name}"
                    );
                    let stats = answers.iter().filter_map(|a| a.stats.speculation.as_ref());
                    accepted += stats.map(|s| s.mean_accepted).sum::<f64>();
                }
            }
        }
        println!(
            "{name}, {kv:?}, {kind}: {} prompts equal, {accepted} accepted",
            prompts.len()
        );
        // The target as its own drafter is right nearly always.
        assert!(
            kind != DraftKind::Model || accepted > 5.0,
            "{name}: {accepted}"
        );
    }
}

/// Tokens of requests that are all asked for at once, and how many tokens of their prompts were not
/// read again.
fn answers(
    loaded: &Arc<Loaded>,
    options: SchedulerOptions,
    asked: &[Request],
) -> (Vec<Vec<u32>>, usize) {
    let scheduler = Scheduler::start(Arc::clone(loaded), options).unwrap();
    let heard: Vec<_> = asked
        .iter()
        .map(|request| {
            let (sender, heard) = channel();
            let listener = Box::new(move |progress| sender.send(progress).is_ok());
            (scheduler.submit(request.clone(), listener).unwrap(), heard)
        })
        .collect();
    let mut cached = 0;
    let all = heard.iter().map(|(_ticket, heard)| {
        let mut tokens = Vec::new();
        loop {
            match heard.recv_timeout(Duration::from_secs(120)).unwrap() {
                Progress::Token(token) => tokens.push(token.token),
                Progress::Started { cached_tokens } => cached += cached_tokens,
                Progress::Failed(error) => panic!("{error}"),
                Progress::Finished(_) => break tokens,
                _ => {}
            }
        }
    });
    (all.collect(), cached)
}

/// Conversations with common beginnings: alone without a cache, against one after another and beside
/// each other with one, with drafts too.
fn company_and_caches_change_nothing(name: &str, kv: KvType) {
    let mut pair = open(name, kv);
    let mut asked = Vec::new();
    for n in 0..6u32 {
        // Longer than the windows; the first ones share most of their text.
        let common = 70 - 11 * (n / 3);
        let prompt = (0..common)
            .map(|i| 20 + i % 90)
            .chain((0..9).map(|i| 150 + (n * 31 + i * 7) % 100));
        let prompt: Vec<u32> = prompt.collect();
        let (_, mut way) = ways(n as usize, &pair.loaded).swap_remove(n as usize % 3);
        way.prompt = prompt;
        asked.push(way);
    }
    pair.speculate(DraftKind::None, None, None);
    let plain = Arc::new(pair.loaded);
    let options = |parallel, cache| SchedulerOptions {
        parallel,
        cache,
        ..SchedulerOptions::default()
    };
    let alone: Vec<_> = asked
        .iter()
        .flat_map(|request| {
            let one = std::slice::from_ref(request);
            answers(&plain, options(1, CacheSize::Off), one).0
        })
        .collect();
    let room = CacheSize::Bytes(1 << 30);
    let mut drafting = open(name, kv);
    drafting.speculate(DraftKind::Lookup, Some(5), None);
    for loaded in [&plain, &Arc::new(drafting.loaded)] {
        for parallel in [1, 4] {
            let (together, cached) = answers(loaded, options(parallel, room), &asked);
            assert_eq!(together, alone, "{name}, {kv:?}, {parallel} at a time");
            assert!(cached > 0, "{name}: nothing came out of the cache");
        }
    }
}

/// Tests of every family, so that they run beside each other.
macro_rules! families {
    ($($test:ident: $name:literal;)*) => {
        $(mod $test {
            use super::*;

            #[test]
            fn drafts_change_nothing() {
                let all = [DraftKind::Lookup, DraftKind::Dflash, DraftKind::Weaver, DraftKind::Model];
                super::drafts_change_nothing($name, KvType::F16, &all);
            }

            #[test]
            fn drafts_change_nothing_with_keys_in_eight_bits() {
                super::drafts_change_nothing($name, KvType::Int8, &[DraftKind::Model]);
            }

            #[test]
            fn company_and_caches_change_nothing() {
                for kv in [KvType::F16, KvType::Int8] {
                    super::company_and_caches_change_nothing($name, kv);
                }
            }
        })*
    };
}

families! {
    mistral: "mistral";
    llama3: "llama3-rope";
    qwen3_with_experts: "qwen3_moe";
    qwen3_5_with_experts: "qwen3_5_moe";
    gemma3: "gemma3";
}
