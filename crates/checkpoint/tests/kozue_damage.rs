//! Damaged directories of Kozue's own format: each kind of damage is one clear line.
#![allow(missing_docs)]

mod support;

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;

use kozue_checkpoint::{Checkpoint, Options, Size, quantize};
use kozue_kernels::Cpu;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use support::{Dir, Model};

/// A packed Qwen2 in a directory of its own.
fn packed() -> (Dir, PathBuf) {
    let dir = Model::qwen2().write();
    let target = dir.root.path().join("packed");
    let options = Options {
        size: Size::M,
        head: None,
        group: 64,
        force: false,
    };
    let cpu = Cpu::new(Some(1));
    quantize(&cpu, &dir.path, &target, options, &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    (dir, target)
}

/// A packed Qwen2 whose header was changed.
fn with_changed_header(change: impl FnOnce(&mut Value)) -> String {
    let (_dir, path) = packed();
    let weights = path.join("model.safetensors");
    let file = fs::read(&weights).unwrap();
    let length = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    change(&mut header);
    fs::write(
        &weights,
        support::with_header(&header.to_string(), &file[8 + length..]),
    )
    .unwrap();
    Checkpoint::open(&path).err().expect("opened").to_string()
}

#[test]
fn information_that_no_conversion_writes_is_refused() {
    for (name, value, expected) in [
        (
            "size",
            json!("S"),
            "kozue.size: \"S\" is neither \"M\" nor \"L\"",
        ),
        ("size", json!(4), "kozue.size: expected a string, found 4"),
        (
            "head",
            json!("S"),
            "kozue.head: \"S\" is neither \"M\" nor \"L\"",
        ),
        ("group", json!(48), "kozue.group: 48 is not 32, 64 or 128"),
        ("group", json!("64"), "kozue.group: expected a whole number"),
        (
            "bits_per_weight",
            json!(-1),
            "kozue.bits_per_weight: expected a number above 0",
        ),
    ] {
        let (_dir, path) = packed();
        let config = path.join("config.json");
        let mut map: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
        map["kozue"][name] = value;
        fs::write(&config, map.to_string()).unwrap();
        let text = Checkpoint::open(&path).err().expect("opened").to_string();
        assert!(text.contains(expected), "expected {expected:?} in {text:?}");
    }
}

#[test]
fn damaged_packed_tensors_are_one_clear_error_each() {
    let embedding = "model.embed_tokens.weight";
    let says = |change: &dyn Fn(&mut Value), expected: &str| {
        let text = with_changed_header(change);
        assert!(text.contains(expected), "expected {expected:?} in {text:?}");
        assert!(!text.contains('\n'), "more than one line: {text}");
    };
    let entry = |change: &'static dyn Fn(&mut Value)| {
        move |header: &mut Value| {
            let text = header["__metadata__"][embedding]
                .as_str()
                .unwrap()
                .to_owned();
            let mut entry: Value = serde_json::from_str(&text).unwrap();
            change(&mut entry);
            header["__metadata__"][embedding] = json!(entry.to_string());
        }
    };
    says(
        &entry(&|entry| entry["group"] = json!(48)),
        "tensor model.embed_tokens.weight: packed groups are of 32, 64 or 128 inputs, not 48",
    );
    says(
        &entry(&|entry| entry["bits"] = json!(5)),
        "packed codes have 4 or 8 bits, not 5",
    );
    says(
        &entry(&|entry| entry["bits"] = json!(8)),
        "bits in groups of 64 takes",
    );
    says(
        &entry(&|entry| entry["zero"] = json!("maximum")),
        "its metadata are damaged: unknown variant `maximum`",
    );
    says(
        &entry(&|entry| entry["signs"] = json!("hadamard.96")),
        "its signs, hadamard.96, are missing",
    );
    says(
        &entry(&|entry| entry["signs"] = json!("hadamard.128")),
        "a rotation of width 128 does not fit a matrix of 64 inputs",
    );
    says(
        &entry(&|entry| entry["shape"] = json!([1u64 << 40, 64])),
        "1099511627776 is an absurd size",
    );
    says(
        &entry(&|entry| entry["shape"] = json!([90, 64])),
        "has shape [90, 64], but the model's settings ask for [96, 64]",
    );
    says(
        &|header| {
            drop(
                header["__metadata__"]
                    .as_object_mut()
                    .unwrap()
                    .remove(embedding),
            )
        },
        "tensor model.embed_tokens.weight: is stored as U8, but F32, F16 or BF16 is needed",
    );
    says(
        &|header| {
            header["__metadata__"]["lm_head.weight"] = header["__metadata__"][embedding].clone()
        },
        "tensor lm_head.weight is missing",
    );
    says(
        &|header| {
            header["__metadata__"]["model.norm.weight"] = header["__metadata__"][embedding].clone()
        },
        "tensor model.norm.weight: is packed, but stored as BF16, not U8",
    );
    says(
        &|header| header["hadamard.64"]["dtype"] = json!("U8"),
        "tensor hadamard.64: is stored as U8, but I8 is needed",
    );
}

#[test]
fn damaged_signs_and_unknown_versions() {
    let (_dir, path) = packed();
    let weights = path.join("model.safetensors");
    let mut file = fs::read(&weights).unwrap();
    let last = file.len() - 1;
    file[last] = 3;
    fs::write(&weights, &file).unwrap();
    let text = Checkpoint::open(&path).err().unwrap().to_string();
    assert!(
        text.contains("tensor hadamard.64: Hadamard sign 63 is 3, it must be 1 or -1"),
        "{text}"
    );

    let config = path.join("config.json");
    let mut map: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    map["kozue"]["version"] = json!(2);
    fs::write(&config, map.to_string()).unwrap();
    let text = Checkpoint::open(&path).err().unwrap().to_string();
    assert!(text.contains("config.json: kozue.version: 2 is not the version that this Kozue reads, 1; quantise the model again"), "{text}");
}

#[test]
fn flipped_bytes_in_packed_files_never_panic() {
    let (_dir, path) = packed();
    let weights = path.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let flips = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(384));
    let outcome = runner.run(&(flips, any::<bool>()), |(flips, anywhere)| {
        let mut file = whole.clone();
        for (index, byte) in flips {
            file[index.index(if anywhere { whole.len() } else { header })] = byte;
        }
        fs::write(&weights, file).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(&path) {
            for info in checkpoint.tensors() {
                let _ = checkpoint.vector(&info.name, info.shape.iter().product());
                if let [n, k] = info.shape[..] {
                    let _ = checkpoint.matrix(&info.name, n, k);
                }
            }
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}
