//! The model's own multi-token prediction head as a drafter.

use kozue_engine::sampling::Sampling;
use kozue_engine::speculation::{DraftKind, SpeculationOptions};
use kozue_engine::{Answer, Loaded, Request};
use kozue_kernels::{Cpu, KvType};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

fn tiny(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/reference/tiny/{name}"))
}

fn options(budget: Option<usize>) -> SpeculationOptions {
    SpeculationOptions {
        kind: Some(DraftKind::Mtp),
        budget,
        ..SpeculationOptions::default()
    }
}

/// Three turns of one session; the last goes back to an earlier point of the text.
fn answers(loaded: &Loaded, sampling: &Sampling) -> Vec<Answer> {
    let mut session = loaded.session(None);
    let mut prompt: Vec<u32> = (0..30).map(|i| i * 37 % 300).collect();
    let mut all = Vec::new();
    for turn in 0..3 {
        if turn == 2 {
            prompt.truncate(45);
            prompt.extend([9, 8, 7]);
        }
        let request = Request {
            prompt: prompt.clone(),
            sampling: sampling.clone(),
            max_tokens: Some(40),
            stop: Vec::new(),
            grammar: None,
            logprobs: None,
            ignore_eos: true,
            trace: false,
        };
        let answer = session
            .generate(&request, &AtomicBool::new(false), &mut |_| ())
            .unwrap();
        prompt.extend(&answer.token_ids);
        prompt.extend([3, 1, 4]);
        all.push(answer);
    }
    all
}

#[test]
fn the_head_never_changes_an_answer() {
    let path = tiny("qwen3_5-multimodal");
    let mut loaded = Loaded::open(&path, Cpu::new(Some(2)), KvType::F16).unwrap();
    let samplings = [
        Sampling::greedy(),
        Sampling {
            temperature: 0.8,
            top_p: 0.9,
            seed: 3,
            ..Sampling::greedy()
        },
    ];
    let tokens = |answers: &[Answer]| -> Vec<Vec<u32>> {
        answers.iter().map(|a| a.token_ids.clone()).collect()
    };
    for sampling in samplings {
        let plain = {
            let loaded = Loaded::open(&path, Cpu::new(Some(2)), KvType::F16).unwrap();
            tokens(&answers(&loaded, &sampling))
        };
        for budget in [Some(2), Some(8), Some(32), None] {
            loaded.speculate(&path, &options(budget)).unwrap();
            assert_eq!(loaded.draft_kind(), DraftKind::Mtp);
            let speculated = answers(&loaded, &sampling);
            assert_eq!(tokens(&speculated), plain, "{budget:?}");
            if budget.is_some() {
                let stats = speculated[0].stats.speculation.as_ref().unwrap();
                assert!(
                    stats.mean_tree_size > 1.5,
                    "{budget:?}: {}",
                    stats.mean_tree_size
                );
            }
        }
    }
}

#[test]
fn the_best_that_is_there_drafts_where_nothing_is_asked_for() {
    let auto = SpeculationOptions {
        budget: Some(4),
        ..SpeculationOptions::default()
    };
    for (name, kind) in [
        ("qwen3_5-multimodal", DraftKind::Mtp),
        ("qwen3_5", DraftKind::Lookup),
    ] {
        let path = tiny(name);
        let mut loaded = Loaded::open(&path, Cpu::new(Some(1)), KvType::F16).unwrap();
        loaded.speculate(&path, &auto).unwrap();
        assert_eq!(loaded.draft_kind(), kind, "{name}");
    }
}

#[test]
fn a_model_without_the_head_is_told_so() {
    let path = tiny("qwen3_5");
    let mut loaded = Loaded::open(&path, Cpu::new(Some(1)), KvType::F16).unwrap();
    let error = loaded.speculate(&path, &options(None)).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("qwen3_5 has no multi-token prediction head"),
        "{error}"
    );
}
