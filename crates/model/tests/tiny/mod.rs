//! The tiny checkpoints of tests/reference and what is known of them.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::PathBuf;

use kozue_checkpoint::Checkpoint;
use kozue_kernels::KvType;
use kozue_model::Model;
use safetensors::SafeTensors;
use serde_json::Value;

pub struct Tiny {
    pub model: Model,
    described: Value,
    tensors: Vec<u8>,
}

pub struct Prompt {
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    pub logit_positions: Vec<usize>,
    pub prompt_logits: Vec<f32>,
    pub logit_steps: Vec<usize>,
    pub step_logits: Vec<f32>,
}

/// What other programs compute, see tests/reference/README.md.
pub fn reference() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference")
}

pub fn folder() -> PathBuf {
    reference().join("tiny")
}

/// An f32 tensor of a safetensors file.
pub fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = file.tensor(name).unwrap().data();
    let value = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
    bytes.chunks_exact(4).map(value).collect()
}

/// Names of all checkpoints that have expected results.
pub fn all() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("expected.json").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 7, "found only {names:?}");
    names
}

/// The same with keys and values in full, and some with keys and values in eight bits.
pub fn all_kept() -> Vec<(String, KvType)> {
    let eight = ["qwen3_5", "qwen2"].map(|name| (name.to_string(), KvType::Int8));
    let full = all().into_iter().map(|name| (name, KvType::F32));
    full.chain(eight).collect()
}

impl Tiny {
    pub fn open(name: &str) -> Self {
        Self::open_kept(name, KvType::F32)
    }

    pub fn open_kept(name: &str, kv: KvType) -> Self {
        let path = folder().join(name);
        let checkpoint = Checkpoint::open(&path).unwrap();
        Self {
            model: Model::load(&checkpoint, kv).unwrap(),
            described: serde_json::from_slice(&std::fs::read(path.join("expected.json")).unwrap())
                .unwrap(),
            tensors: std::fs::read(path.join("expected.safetensors")).unwrap(),
        }
    }

    pub fn tensor(&self, name: &str) -> Vec<f32> {
        floats(&SafeTensors::deserialize(&self.tensors).unwrap(), name)
    }

    pub fn prompt(&self, key: &str) -> Prompt {
        let described = &self.described["prompts"][key];
        let ids =
            |field: &str| -> Vec<u32> { serde_json::from_value(described[field].clone()).unwrap() };
        let places = |field: &str| {
            ids(field)
                .into_iter()
                .map(|id| id as usize)
                .collect::<Vec<usize>>()
        };
        Prompt {
            prompt: ids("prompt"),
            greedy: ids("greedy"),
            logit_positions: places("logit_positions"),
            prompt_logits: self.tensor(&format!("{key}.prompt_logits")),
            logit_steps: places("logit_steps"),
            step_logits: self.tensor(&format!("{key}.step_logits")),
        }
    }
}

pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}
