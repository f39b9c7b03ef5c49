//! Answers that follow grammars, with drafts and without.

use kozue_engine::grammar::{Grammar, Thought, Vocabulary};
use kozue_engine::sampling::Sampling;
use kozue_engine::speculation::{DraftKind, SpeculationOptions};
use kozue_engine::{Answer, Event, FinishReason, LanguageModel, Loaded, Request};
use kozue_kernels::{Cpu, KvType};
use serde_json::{Value as Json, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/tiny/qwen3_5")
}

/// The tiny model, with trees of a fixed size by prompt lookup or with none.
fn loaded(drafts: bool) -> Loaded {
    let mut loaded = Loaded::open(&path(), Cpu::new(Some(1)), KvType::F32).unwrap();
    let options = SpeculationOptions {
        kind: Some(match drafts {
            true => DraftKind::Lookup,
            false => DraftKind::None,
        }),
        budget: drafts.then_some(6),
        ..SpeculationOptions::default()
    };
    loaded.speculate(&path(), &options).unwrap();
    loaded
}

fn vocabulary(loaded: &Loaded) -> Arc<Vocabulary> {
    let eos = &loaded.description().generation.eos;
    Vocabulary::new(&loaded.tokenizer, eos, loaded.model.vocab_size()).unwrap()
}

fn answer(loaded: &Loaded, grammar: &Grammar, seed: u64) -> Answer {
    let request = Request {
        prompt: loaded.raw_prompt("a tree, a tree, a tree, a ").unwrap(),
        sampling: Sampling {
            temperature: 1.5,
            seed,
            ..Sampling::greedy()
        },
        max_tokens: Some(300),
        stop: Vec::new(),
        grammar: Some(grammar.clone()),
        logprobs: Some(2),
        ignore_eos: false,
        trace: false,
    };
    let mut drawn = Vec::new();
    let answer = loaded
        .session(None)
        .generate(&request, &AtomicBool::new(false), &mut |event| {
            if let Event::Token(token) = event {
                assert!(token.logprob.unwrap() <= 0.0);
                assert!(token.top[0].1 >= token.top[1].1);
                drawn.push(token.token);
            }
        })
        .unwrap();
    assert_eq!(drawn, answer.token_ids);
    answer
}

/// Grammars with drafts: vllm-project/vllm#15554, #11484, #52620; sgl-project/sglang#17576, #16541.
#[test]
fn answers_follow_their_schema_whatever_drafts() {
    let [plain, drafting] = [false, true].map(loaded);
    let schema = json!({
        "type": "object", "required": ["trees", "kind"], "additionalProperties": false,
        "properties": {
            "trees": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
            "kind": {"enum": ["fir", "oak"]},
        },
    });
    let [a, b] = [&plain, &drafting]
        .map(|loaded| Grammar::json_schema(&vocabulary(loaded), &schema, Thought::None).unwrap());
    for seed in 0..6 {
        let answer_plain = answer(&plain, &a, seed);
        assert_eq!(answer_plain.finish_reason, FinishReason::Stop);
        let value: Json = serde_json::from_str(&answer_plain.text).expect(&answer_plain.text);
        assert!(["fir", "oak"].contains(&value["kind"].as_str().unwrap()));
        assert!(value["trees"].as_array().unwrap().len() <= 3);
        let answer_drafted = answer(&drafting, &b, seed);
        assert_eq!(answer_drafted.token_ids, answer_plain.token_ids);
    }
}

#[test]
fn forced_text_takes_few_passes() {
    let loaded = loaded(false);
    let text = "the quick brown fox jumps over the lazy dog";
    let grammar =
        Grammar::regex(&vocabulary(&loaded), &format!("(a|b){text}"), Thought::None).unwrap();
    let canonical = loaded.raw_prompt(text).unwrap().len();
    let mut fewest = usize::MAX;
    for seed in 0..4 {
        let answer = answer(&loaded, &grammar, seed);
        assert_eq!(&answer.text[1..], text);
        assert!(answer.token_ids.len() > canonical);
        fewest = fewest.min(answer.stats.forward_passes * 100 / answer.token_ids.len());
    }
    // A random model cuts the text in ways of its own, so not every forced token is taken.
    assert!(fewest < 95, "{fewest} passes for 100 tokens");
}

#[test]
fn the_answer_waits_for_the_thought() {
    let loaded = loaded(true);
    let grammar = Grammar::regex(&vocabulary(&loaded), "yes|no", Thought::Open).unwrap();
    for seed in 0..20 {
        let answer = answer(&loaded, &grammar, seed);
        if let Some((_, rest)) = answer.text.split_once("</think>") {
            assert!(["yes", "no"].contains(&rest), "{rest}");
            assert!(answer.ended_by_token);
        } else {
            assert_eq!(answer.finish_reason, FinishReason::Length);
        }
    }
}

/// The grammar begins where the thought ends, also in the midst of a draft:
/// vllm-project/vllm#36138, #44993.
#[test]
fn a_thought_may_end_inside_a_draft() {
    let [plain, drafting] = [false, true].map(loaded);
    let close = plain.tokenizer.id("</think>").unwrap();
    let word = plain.raw_prompt("a").unwrap()[0];
    // What follows the end of a thought here is what the answer must not say.
    let wrong = plain.raw_prompt("maybe").unwrap();
    let mut prompt = Vec::new();
    for length in 1..5 {
        prompt.extend(std::iter::repeat_n(word, length));
        prompt.push(close);
        prompt.extend(&wrong);
    }
    prompt.push(word);
    let mut ended_inside = 0;
    for seed in 0..20 {
        let [a, b] = [&plain, &drafting].map(|loaded| {
            let grammar = Grammar::regex(&vocabulary(loaded), "yes|no", Thought::Open).unwrap();
            let request = Request {
                prompt: prompt.clone(),
                sampling: Sampling {
                    temperature: 1.0,
                    seed,
                    logit_bias: vec![(word, 60.0), (close, 60.0)],
                    ..Sampling::greedy()
                },
                max_tokens: Some(60),
                stop: Vec::new(),
                grammar: Some(grammar),
                logprobs: None,
                ignore_eos: false,
                trace: true,
            };
            let mut session = loaded.session(None);
            session
                .generate(&request, &AtomicBool::new(false), &mut |_| ())
                .unwrap()
        });
        assert_eq!(a.token_ids, b.token_ids, "seed {seed}");
        if let Some(end) = b.token_ids.iter().position(|token| *token == close) {
            let said = drafting.tokenizer.decode(&b.token_ids[end + 1..]);
            assert!(["yes", "no"].contains(&said.as_str()), "{said:?}");
        }
        let inside = b.trace.iter().any(|round| {
            let accepted = round.path.iter().filter(|node| **node > 0);
            accepted.clone().any(|node| round.tokens[*node] == close)
        });
        ended_inside += usize::from(inside);
    }
    assert!(ended_inside > 0, "no thought ended inside a draft");
}
