//! The promise of speculation: the same tokens as plain decoding, whatever is drafted.
//!
//! `KOZUE_PROMPTS=200 cargo test --release -p kozue-engine --test speculation` runs over that
//! many prompts instead of a few; `KOZUE_PROMPTS=50..100` over a part of them.

#[path = "support/drafters.rs"]
mod adversaries;
#[path = "support/promise.rs"]
mod promise;
mod support;

use adversaries::{Adversary, SCHEMES, Scheme};
use kozue_engine::sampling::Sampling;
use kozue_engine::speculation::{DraftKind, Pace, RowCosts, Speculator};
use kozue_engine::{LanguageModel, Request, Session};
use kozue_kernels::KvType;
use promise::{Pair, prompts, request, tokens, two_turns, ways};
use std::sync::atomic::AtomicBool;
use support::{Scripted, encode, tokenizer};

fn hybrid() -> Pair {
    Pair::open("qwen3_5", "dflash-qwen3_5", "weaver-rotary", KvType::F16)
}

fn attention() -> Pair {
    Pair::open("qwen3", "dflash-qwen3", "weaver-learned", KvType::F16)
}

/// Two turns in all ways, drafted by `kind` in trees of all sizes, against plain decoding.
fn never_changes_an_answer(mut pair: Pair, kind: DraftKind) {
    let prompts = prompts(2);
    let mut plain = Vec::new();
    for (n, prompt) in prompts.iter().enumerate() {
        for (_, way) in ways(n, &pair.loaded) {
            let mut session = pair.loaded.session(None);
            plain.push(two_turns(&mut session, prompt, &way));
        }
    }
    let mut accepted = 0.0;
    for (budget, width) in [
        (Some(2), None),
        (Some(8), Some(1)),
        (Some(16), None),
        (Some(32), None),
        (None, None),
    ] {
        pair.speculate(kind, budget, width);
        let mut expected = plain.iter();
        for (n, prompt) in prompts.iter().enumerate() {
            for (name, way) in ways(n, &pair.loaded) {
                let mut session = pair.loaded.session(None);
                let answers = two_turns(&mut session, prompt, &way);
                assert_eq!(
                    tokens(&answers),
                    tokens(expected.next().unwrap()),
                    "{kind}, {budget:?} nodes, prompt {n}, {name}"
                );
                let stats = answers.iter().filter_map(|a| a.stats.speculation.as_ref());
                accepted += stats.map(|s| s.mean_accepted).sum::<f64>();
            }
        }
        println!("{kind}, {budget:?} nodes: {} prompts equal", prompts.len());
    }
    // A test in which nothing is ever accepted would show little.
    println!("{kind}: {accepted} accepted");
    assert!(accepted > 1.0, "{accepted}");
}

/// A test for each drafter, so that they run beside each other.
macro_rules! drafters {
    ($($name:ident: $target:ident, $kind:ident;)*) => {
        mod speculation_never_changes_an_answer {
            use super::*;
            $(#[test]
            fn $name() {
                never_changes_an_answer($target(), DraftKind::$kind);
            })*
        }
    };
}

drafters! {
    lookup: hybrid, Lookup;
    dflash: hybrid, Dflash;
    weaver: hybrid, Weaver;
    smaller_model: hybrid, Model;
    lookup_for_attention: attention, Lookup;
    dflash_for_attention: attention, Dflash;
    weaver_for_attention: attention, Weaver;
    smaller_model_for_attention: attention, Model;
}

/// Sessions of a pair with an adversary that knows `text`.
fn adversarial<'a>(
    pair: &'a Pair,
    ends: &'a [u32],
    adversary: &Adversary,
    nodes: usize,
) -> Session<'a, kozue_engine::loaded::CpuModel> {
    let adversary = adversary.clone();
    let loaded = &pair.loaded;
    Session::new(&loaded.model, &loaded.tokenizer, ends, 4096, 1 << 24).speculating(move || {
        Some(Speculator {
            drafter: Box::new(adversary.clone()),
            pace: Pace::new(RowCosts::unknown(), Some(nodes)),
            width: usize::MAX,
        })
    })
}

#[test]
fn adversaries_never_change_an_answer() {
    for pair in [hybrid(), attention()] {
        for (n, prompt) in prompts(3).iter().enumerate() {
            for (name, way) in ways(n, &pair.loaded) {
                let mut session = pair.loaded.session(None);
                let plain = two_turns(&mut session, prompt, &way);
                let mut text = prompt.clone();
                text.extend(&plain[0].token_ids);
                text.extend([3, 1, 4]);
                text.extend(&plain[1].token_ids);
                for scheme in SCHEMES {
                    for nodes in [2, 8, 32] {
                        let adversary = Adversary {
                            scheme,
                            text: text.clone(),
                            vocab_size: pair.loaded.model.vocab_size(),
                            random: n as u64 + nodes as u64,
                        };
                        let mut session = adversarial(&pair, &[], &adversary, nodes);
                        let answers = two_turns(&mut session, prompt, &way);
                        let context = format!("{scheme:?}, {nodes} nodes, prompt {n}, {name}");
                        assert_eq!(tokens(&answers), tokens(&plain), "{context}");
                        let stats = answers[0].stats.speculation.as_ref();
                        let by_pass = answers[0].stats.tokens_per_forward_pass.unwrap();
                        match scheme {
                            Scheme::Wrong if name != "json" => {
                                assert_eq!(by_pass, 1.0, "{context}")
                            }
                            // Every pass accepts its whole chain, but perhaps the last.
                            Scheme::Right if name != "json" => {
                                assert_eq!(
                                    answers[0].stats.forward_passes,
                                    29usize.div_ceil(nodes),
                                    "{context}"
                                );
                            }
                            Scheme::WrongRoot if name != "json" => {
                                assert_eq!(stats.unwrap().rounds, 0)
                            }
                            _ => {}
                        }
                    }
                }
            }
        }
    }
}

/// Stop strings, end tokens and limits cut where plain decoding cuts, in the midst of what was
/// accepted, and the state is that of plain decoding.
#[test]
fn an_answer_ends_in_the_midst_of_an_accepted_run() {
    let tokenizer = tokenizer();
    let model = Scripted::new(&tokenizer);
    let prompt = encode(&tokenizer, "a question");
    let end = tokenizer.id("<|im_end|>").unwrap();
    let mut script = encode(&tokenizer, "one two three four five six seven");
    let whole = script.len();
    script.push(end);
    script.extend(encode(&tokenizer, "beyond the end"));
    model.answer_at(prompt.len(), &script);
    let mut text = prompt.clone();
    text.extend(&script);
    let ends = [end];
    let cancel = AtomicBool::new(false);
    for scheme in [
        Scheme::Right,
        Scheme::Wrong,
        Scheme::Endless,
        Scheme::Duplicates,
    ] {
        for nodes in 1..20 {
            let open = || {
                let adversary = Adversary {
                    scheme,
                    text: text.clone(),
                    vocab_size: model.vocab_size(),
                    random: 1,
                };
                Session::new(&model, &tokenizer, &ends, 4096, 1 << 20).speculating(move || {
                    Some(Speculator {
                        drafter: Box::new(adversary.clone()),
                        pace: Pace::new(RowCosts::unknown(), Some(nodes)),
                        width: usize::MAX,
                    })
                })
            };
            let cases: [(Option<usize>, &[&str]); 5] = [
                (None, &[]),
                (Some(5), &[]),
                (Some(1), &[]),
                (None, &["four"]),
                (None, &["e f", "zzz"]),
            ];
            for (max_tokens, stop) in cases {
                let request = Request {
                    max_tokens,
                    stop: stop.iter().map(|s| s.to_string()).collect(),
                    grammar: None,
                    logprobs: None,
                    ignore_eos: false,
                    ..request(&prompt, &Sampling::greedy())
                };
                let mut plain = Session::new(&model, &tokenizer, &ends, 4096, 1 << 20);
                let expected = plain.generate(&request, &cancel, &mut |_| ()).unwrap();
                let mut session = open();
                let answer = session.generate(&request, &cancel, &mut |_| ()).unwrap();
                let context = format!("{scheme:?}, {nodes} nodes, {max_tokens:?}, {stop:?}");
                assert_eq!(answer.text, expected.text, "{context}");
                assert_eq!(answer.token_ids, expected.token_ids, "{context}");
                assert_eq!(answer.finish_reason, expected.finish_reason, "{context}");
                assert_eq!(support::read(&session), support::read(&plain), "{context}");
                if max_tokens.is_none() && stop.is_empty() {
                    assert_eq!(answer.token_ids.len(), whole + 1);
                }
            }
        }
    }
}

/// The context is filled to its last token and not beyond, whatever the drafts ask for.
#[test]
fn drafts_stay_inside_the_context() {
    let tokenizer = tokenizer();
    let model = Scripted {
        max_position: 30,
        ..Scripted::new(&tokenizer)
    };
    let prompt = encode(&tokenizer, "a question");
    let adversary = Adversary {
        scheme: Scheme::Endless,
        text: vec![0; 100],
        vocab_size: model.vocab_size(),
        random: 1,
    };
    let mut session = Session::new(&model, &tokenizer, &[], 30, 1 << 20).speculating(move || {
        Some(Speculator {
            drafter: Box::new(adversary.clone()),
            pace: Pace::new(RowCosts::unknown(), Some(16)),
            width: usize::MAX,
        })
    });
    let request = Request {
        max_tokens: None,
        ..request(&prompt, &Sampling::greedy())
    };
    let answer = session
        .generate(&request, &AtomicBool::new(false), &mut |_| ())
        .unwrap();
    assert_eq!(prompt.len() + answer.token_ids.len(), 30);
    assert_eq!(support::read(&session).len(), 29);
}

/// Frequencies of the third token against the target's probabilities, summed over all that can
/// come before: it does not matter here that the noise is that of plain decoding.
#[test]
fn drawn_tokens_have_the_targets_distribution() {
    const KEPT: usize = 6;
    const DRAWS: usize = 3000;
    let mut pair = hybrid();
    let sampling = Sampling {
        temperature: 1.3,
        top_k: Some(KEPT),
        ..Sampling::greedy()
    };
    let prompt: Vec<u32> = vec![5, 72, 261, 36, 263, 77];
    let model = &pair.loaded.model;
    let mut expected = vec![0.0; model.vocab_size()];
    let next = |context: &[u32]| -> Vec<(u32, f64)> {
        let logits = model.advance(&mut model.new_state(), context, 1).unwrap();
        let mut best: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|l| f64::from(*l))).collect();
        best.sort_by(|a, b| b.1.total_cmp(&a.1));
        best.truncate(KEPT);
        let weight = |logit: f64| (logit / f64::from(sampling.temperature)).exp();
        let total: f64 = best.iter().map(|(_, logit)| weight(*logit)).sum();
        best.iter()
            .map(|&(token, logit)| (token, weight(logit) / total))
            .collect()
    };
    for (first, chance) in next(&prompt) {
        let mut context = prompt.clone();
        context.push(first);
        for (second, and) in next(&context) {
            context.push(second);
            for (third, then) in next(&context) {
                expected[third as usize] += DRAWS as f64 * chance * and * then;
            }
            context.pop();
        }
    }
    for kind in [DraftKind::Model, DraftKind::Weaver] {
        pair.speculate(kind, Some(12), None);
        let mut counts = vec![0.0; expected.len()];
        let mut saved = 0;
        for seed in 0..DRAWS as u64 {
            let request = Request {
                max_tokens: Some(4),
                ..request(
                    &prompt,
                    &Sampling {
                        seed: 77_000 + seed,
                        ..sampling.clone()
                    },
                )
            };
            let mut session = pair.loaded.session(None);
            let answer = session
                .generate(&request, &AtomicBool::new(false), &mut |_| ())
                .unwrap();
            counts[answer.token_ids[2] as usize] += 1.0;
            saved += 3 - answer.stats.forward_passes;
        }
        assert!(saved > 20, "{kind}: only {saved} passes saved");
        // Rare tokens share a bin.
        let mut bins = vec![(0.0, 0.0)];
        for (&count, &expected) in counts.iter().zip(&expected) {
            if expected < 10.0 {
                bins[0].0 += count;
                bins[0].1 += expected;
            } else {
                bins.push((count, expected));
            }
        }
        bins.retain(|bin| bin.1 > 0.0);
        let statistic: f64 = bins.iter().map(|(count, e)| (count - e).powi(2) / e).sum();
        let freedom = (bins.len() - 1) as f64;
        // Wilson and Hilferty's approximation of the quantile at 99.9%.
        let spread = 2.0 / (9.0 * freedom);
        let limit = freedom * (1.0 - spread + 3.09 * spread.sqrt()).powi(3);
        assert!(freedom > 5.0, "{freedom}");
        assert!(
            statistic < limit,
            "{kind}: {statistic} of {limit} at {freedom}"
        );
    }
}
