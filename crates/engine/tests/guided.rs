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
