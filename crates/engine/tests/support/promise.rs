//! What tests of equal answers share: tiny targets with drafters, prompts, ways to draw, turns.

use kozue_engine::grammar::{Grammar, Thought, Vocabulary};
use kozue_engine::sampling::Sampling;
use kozue_engine::speculation::{DraftKind, SpeculationOptions};
use kozue_engine::{Answer, LanguageModel, Loaded, Request, Session};
use kozue_kernels::{Cpu, KvType};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

fn reference(parts: &[&str]) -> PathBuf {
    let mut path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference");
    path.extend(parts);
    path
}

/// A tiny target with the folder of its drafters.
pub struct Pair {
    pub loaded: Loaded,
    pub path: PathBuf,
    drafters: tempfile::TempDir,
}

impl Pair {
    /// Random drafters beside it; they fit any target of their width, vocabulary and layers.
    pub fn open(target: &str, dflash: &str, weaver: &str, kv: KvType) -> Pair {
        let path = reference(&["tiny", target]);
        let drafters = tempfile::tempdir().unwrap();
        copy(
            &reference(&["drafters", dflash]),
            &drafters.path().join("dflash"),
        );
        copy(
            &reference(&["drafters", weaver]),
            &drafters.path().join("weaver"),
        );
        Pair {
            loaded: Loaded::open(&path, Cpu::new(Some(1)), kv).unwrap(),
            path,
            drafters,
        }
    }

    pub fn speculate(&mut self, kind: DraftKind, budget: Option<usize>, width: Option<usize>) {
        let path = match kind {
            DraftKind::Dflash | DraftKind::Weaver => Some(self.drafters.path().to_path_buf()),
            // The target as its own drafter is right most of the time.
            DraftKind::Model => Some(self.path.clone()),
            _ => None,
        };
        let options = SpeculationOptions {
            kind: Some(kind),
            path,
            budget,
            width,
            tables: None,
        };
        self.loaded.speculate(&self.path.clone(), &options).unwrap();
        assert_eq!(self.loaded.draft_kind(), kind);
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

pub fn prompts(default: u64) -> Vec<Vec<u32>> {
    let asked = std::env::var("KOZUE_PROMPTS").unwrap_or(default.to_string());
    let (first, end) = asked.split_once("..").unwrap_or(("0", &asked));
    let number = |text: &str| -> u64 { text.parse().expect("KOZUE_PROMPTS is N or A..B") };
    (number(first)..number(end))
        .map(|n| {
            let random = |i: u64| (n * 1000 + i).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            // Some repeat themselves, so that lookup has something to find.
            let period = 3 + n % 7;
            let len = 4 + random(999) % 60;
            (0..len)
                .map(|i| (random(if n % 2 == 0 { i % period } else { i }) % 300) as u32)
                .collect()
        })
        .collect()
}

/// Every way to draw that the promise covers, as requests whose prompt is still to come.
pub fn ways(n: usize, loaded: &Loaded) -> Vec<(&'static str, Request)> {
    let sampled = Sampling {
        temperature: 0.7,
        seed: n as u64,
        ..Sampling::greedy()
    };
    let nucleus = Sampling {
        temperature: 1.0,
        top_p: 0.9,
        ..sampled.clone()
    };
    let penalties = Sampling {
        repetition_penalty: 1.2,
        frequency_penalty: 0.2,
        penalty_window: Some(20),
        logit_bias: vec![(7, 1.5), (8, f32::NEG_INFINITY)],
        ..sampled.clone()
    };
    let eos = &loaded.description().generation.eos;
    let vocabulary = Vocabulary::new(&loaded.tokenizer, eos, loaded.model.vocab_size()).unwrap();
    let json = Request {
        grammar: Some(Grammar::json_object(&vocabulary, Thought::None).unwrap()),
        ..request(&[], &nucleus)
    };
    vec![
        ("greedy", request(&[], &Sampling::greedy())),
        ("temperature", request(&[], &sampled)),
        ("nucleus", request(&[], &nucleus)),
        ("penalties", request(&[], &penalties)),
        ("json", json),
    ]
}

pub fn request(prompt: &[u32], sampling: &Sampling) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: sampling.clone(),
        max_tokens: Some(30),
        stop: Vec::new(),
        grammar: None,
        logprobs: None,
        ignore_eos: true,
        trace: false,
    }
}

/// Two turns in one session: the second goes on from the state that the first left behind.
pub fn two_turns<M: LanguageModel>(
    session: &mut Session<M>,
    prompt: &[u32],
    way: &Request,
) -> [Answer; 2] {
    let cancel = AtomicBool::new(false);
    let mut ask = |prompt: &[u32]| {
        let request = Request {
            prompt: prompt.to_vec(),
            ..way.clone()
        };
        session.generate(&request, &cancel, &mut |_| ()).unwrap()
    };
    let first = ask(prompt);
    let mut longer = prompt.to_vec();
    longer.extend(&first.token_ids);
    longer.extend([3, 1, 4]);
    [first, ask(&longer)]
}

pub fn tokens(answers: &[Answer; 2]) -> [&[u32]; 2] {
    [&answers[0].token_ids, &answers[1].token_ids]
}
