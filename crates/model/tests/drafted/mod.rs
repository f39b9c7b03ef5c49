//! The tiny drafters of tests/reference and what their formulas give in f64.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};

use kozue_checkpoint::{Checkpoint, Drafter, Network};
use kozue_kernels::{Cpu, KvType, linear};
use kozue_model::Model;
use safetensors::SafeTensors;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::tiny::{floats, folder, reference};

pub struct Drafted {
    pub path: PathBuf,
    described: Value,
    tensors: Vec<u8>,
}

impl Drafted {
    pub fn open(name: &str) -> Self {
        let path = reference().join("drafters").join(name);
        let described = std::fs::read(path.join("expected.json")).unwrap();
        Self {
            described: serde_json::from_slice(&described).unwrap(),
            tensors: std::fs::read(path.join("expected.safetensors")).unwrap(),
            path,
        }
    }

    pub fn drafter(&self) -> Drafter {
        Drafter::open(&self.path, network(&self.path)).unwrap()
    }

    pub fn get<T: DeserializeOwned>(&self, field: &str) -> T {
        serde_json::from_value(self.described[field].clone()).unwrap()
    }

    pub fn tensor(&self, name: &str) -> Vec<f32> {
        floats(&SafeTensors::deserialize(&self.tensors).unwrap(), name)
    }

    /// The target that it was made for.
    pub fn target(&self, kv: KvType) -> Model {
        target(&self.get::<String>("target"), kv)
    }

    /// Where each round's newly committed tokens lie.
    pub fn rounds(&self) -> Vec<std::ops::Range<usize>> {
        let mut end = 0;
        let committed: Vec<usize> = self.get("committed");
        committed
            .into_iter()
            .map(|more| {
                end += more;
                end - more..end
            })
            .collect()
    }
}

/// What a folder of tests/reference holds, by its name.
pub fn network(path: &Path) -> Network {
    let name = path.file_name().unwrap().to_str().unwrap();
    if name.starts_with("dflash") {
        Network::DFlash
    } else {
        Network::Weaver
    }
}

pub fn target(name: &str, kv: KvType) -> Model {
    Model::load(&Checkpoint::open(&folder().join(name)).unwrap(), kv).unwrap()
}

/// Logits of rows that are ready for the head.
pub fn logits(cpu: &Cpu, target: &Model, rows: &[f32]) -> Vec<f32> {
    let count = rows.len() / target.config().hidden_size;
    let mut logits = vec![0.0; count * target.config().vocab_size];
    linear(cpu, target.head(), rows, &mut logits);
    logits
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Fails unless all values are within what rounding to f32 may cause.
pub fn assert_close(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let apart = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
    let worst = apart.fold(0.0, f32::max);
    assert!(worst < 1e-4, "{what}: differs by {worst}");
}

/// Root mean square of a difference, relative to that of the reference.
pub fn relative_error(ours: &[f32], reference: &[f32]) -> f64 {
    let square = |v: f32| f64::from(v) * f64::from(v);
    let error: f64 = ours.iter().zip(reference).map(|(a, b)| square(a - b)).sum();
    (error / reference.iter().copied().map(square).sum::<f64>()).sqrt()
}
