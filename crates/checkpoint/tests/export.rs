//! Other programs' formats, written and read back: what they can hold comes back bit by bit.
#![allow(missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use half::bf16;
use kozue_checkpoint::description::TokenizerSource;
use kozue_checkpoint::{
    Checkpoint, Error, ExportOptions, Floats, Format, Options, Report, Size, export, quantize,
};
use kozue_kernels::{Cpu, Matrix};
use serde_json::json;
use support::{Dir, Model, Tensor};
use tokenizers::Tokenizer;

fn packed(dir: &Dir, source: &Path, name: &str, size: Size, group: usize) -> PathBuf {
    let target = dir.root.path().join(name);
    let options = Options {
        size,
        head: None,
        group,
        force: false,
    };
    let cpu = Cpu::new(Some(2));
    quantize(&cpu, source, &target, options, &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
    target
}

fn exported(source: &Path, target: &Path, format: Format, floats: Floats) -> Result<Report, Error> {
    let options = ExportOptions {
        format,
        floats,
        force: false,
    };
    export(&Cpu::new(Some(2)), source, target, options, &mut |_| {
        ControlFlow::Continue(())
    })
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"))
}

/// Matrices as they run, all else as values.
fn contents(path: &Path) -> BTreeMap<String, (Vec<u8>, Vec<f32>)> {
    let checkpoint = open(path);
    let tensors = checkpoint.tensors();
    let read = |name: &str, shape: &[usize]| {
        if let &[n, k] = shape
            && let Ok(Matrix::Packed(matrix)) = checkpoint.matrix(name, n, k)
        {
            let signs = matrix.rotation().expect("rotated").signs().to_vec();
            return (matrix.bytes().to_vec(), signs);
        }
        let len = shape.iter().product();
        (Vec::new(), checkpoint.vector(name, len).unwrap())
    };
    let used = tensors.iter().filter(|info| !info.aside);
    used.map(|info| (info.name.clone(), read(&info.name, &info.shape)))
        .collect()
}

fn is_rounded(name: &str) -> bool {
    name.ends_with("in_proj_a.weight") || name.ends_with("in_proj_b.weight")
}

#[test]
fn packed_models_go_through_lalamo_and_back_without_a_change() {
    let models = [
        (Model::llama(), 32),
        (Model::qwen2(), 64),
        (Model::qwen3(), 32),
        (Model::qwen35(), 64),
    ];
    for (model, group) in models {
        for size in [Size::M, Size::L] {
            let dir = model.write();
            dir.put("chat_template.jinja", "{{ messages }}\n");
            let ours = packed(&dir, &dir.path, "ours", size, group);
            let theirs = dir.root.path().join("theirs");
            let report = exported(&ours, &theirs, Format::Lalamo, Floats::F32)
                .unwrap_or_else(|error| panic!("{error}"));
            let (before, mut after) = (contents(&ours), contents(&theirs));
            assert_eq!(
                before.keys().collect::<Vec<_>>(),
                after.keys().collect::<Vec<_>>()
            );
            for (name, (bytes, values)) in &before {
                let found = after.remove(name).unwrap();
                if is_rounded(name) {
                    // Heads' rows are floats in ours, and share a matrix of codes in theirs.
                    let square = |x: f32| f64::from(x) * f64::from(x);
                    let lost: f64 = values
                        .iter()
                        .zip(&found.1)
                        .map(|(a, b)| square(a - b))
                        .sum();
                    let all: f64 = values.iter().map(|&x| square(x)).sum();
                    let bound = if size == Size::M { 0.12 } else { 0.01 };
                    assert!((lost / all).sqrt() < bound, "{name}: {}", lost / all);
                } else {
                    assert!(*bytes == found.0, "{name}: other codes");
                    assert!(*values == found.1, "{name}: other values");
                }
            }
            let noted: Vec<_> = report
                .tensors
                .iter()
                .filter_map(|t| t.note.clone())
                .collect();
            let deltas = if model.config["model_type"] == "qwen3_5_text" {
                3
            } else {
                0
            };
            assert_eq!(noted.len(), deltas, "{noted:?}");
            assert!(
                noted
                    .iter()
                    .all(|note| note.starts_with("in_proj_b, in_proj_a rounded"))
            );
            assert!(
                report
                    .tensors
                    .iter()
                    .all(|tensor| tensor.relative_error.is_none())
            );

            // Codes are moved, not chosen again.
            let again = packed(&dir, &theirs, "again", size, group);
            let after = contents(&again);
            let same = |(name, value): (&String, &_)| is_rounded(name) || after[name] == *value;
            assert!(before.iter().all(same), "other codes");
        }
    }
}

#[test]
fn scales_in_bfloat16_say_what_they_lose() {
    let dir = Model::qwen2().write();
    let ours = packed(&dir, &dir.path, "ours", Size::M, 64);
    let target = dir.root.path().join("theirs");
    let report = exported(&ours, &target, Format::Lalamo, Floats::Bf16).unwrap();
    for tensor in &report.tensors {
        let lost = tensor
            .relative_error
            .expect("f16 has more digits than bf16");
        assert!((1e-4..4e-3).contains(&lost), "{}: {lost}", tensor.name);
    }
    // Nor in half precision, which our scales have.
    let half = dir.root.path().join("half");
    let report = exported(&ours, &half, Format::Lalamo, Floats::F16).unwrap();
    let scales = report.tensors.iter().filter(|t| !t.name.contains("qkvg"));
    assert!(scales.clone().count() > 2 && scales.into_iter().all(|t| t.relative_error.is_none()));
}

#[test]
fn groups_that_do_not_end_with_a_row_become_smaller_ones() {
    // 160 inputs are two and a half groups of 64, and 64 are half a group of 128.
    let (down, up) = (
        ("model.layers.1.mlp.down_proj.weight", 64, 160),
        ("model.layers.1.mlp.up_proj.weight", 160, 64),
    );
    for (size, group, groups) in [
        (Size::L, 64, [32, 64]),
        (Size::M, 64, [32, 64]),
        (Size::M, 128, [32, 64]),
    ] {
        let dir = Model::llama().write();
        let ours = packed(&dir, &dir.path, "ours", size, group);
        let theirs = dir.root.path().join("theirs");
        exported(&ours, &theirs, Format::Lalamo, Floats::F32).unwrap();
        let (before, after) = (open(&ours), open(&theirs));
        for ((name, n, k), group) in [down, up].into_iter().zip(groups) {
            let Matrix::Packed(matrix) = after.matrix(name, n, k).unwrap() else {
                panic!("{name} is packed")
            };
            assert_eq!(matrix.spec().group, group, "{name}");
            let (before, after) = (before.vector(name, n * k), after.vector(name, n * k));
            assert_eq!(before.unwrap(), after.unwrap(), "{name}");
        }
    }
}

#[test]
fn models_of_floats_go_through_lalamo_and_back() {
    for model in [Model::llama(), Model::qwen35()] {
        let dir = model.write();
        let theirs = dir.root.path().join("theirs");
        let report = exported(&dir.path, &theirs, Format::Lalamo, Floats::Bf16).unwrap();
        assert!(
            report
                .tensors
                .iter()
                .all(|tensor| tensor.to == "BF16" && tensor.relative_error.is_none())
        );
        assert_eq!(contents(&dir.path), contents(&theirs));
    }
}

#[test]
fn packed_models_become_plain_ones() {
    let models = [Model::llama(), Model::qwen2(), Model::qwen35()];
    for (model, size) in models.iter().zip([Size::M, Size::L, Size::M]) {
        let dir = model.write();
        dir.put(
            "generation_config.json",
            r#"{"eos_token_id": [2, 5], "top_p": 0.8, "top_k": 20}"#,
        );
        let ours = packed(&dir, &dir.path, "ours", size, 64);
        let source = open(&ours);
        for floats in [Floats::F32, Floats::Bf16] {
            let target = dir.root.path().join(format!("{floats:?}"));
            let report = exported(&ours, &target, Format::HuggingFace, floats).unwrap();
            assert_eq!(report.notes, [""; 0]);
            let plain = open(&target);
            assert_eq!(plain.description().config, source.description().config);
            assert_eq!(
                plain.description().generation,
                source.description().generation
            );
            for info in source.tensors() {
                let len = info.shape.iter().product();
                let before = source.vector(&info.name, len).unwrap();
                let after = plain.vector(&info.name, len).unwrap();
                let rounded = |x: &f32| match floats {
                    Floats::F32 => *x,
                    _ => bf16::from_f32(*x).to_f32(),
                };
                let expected: Vec<f32> = before.iter().map(rounded).collect();
                let kept = info.format == "F32" && info.shape.len() != 2;
                assert!(
                    after == if kept { before } else { expected },
                    "{}",
                    info.name
                );
            }
            let config = fs::read_to_string(target.join("config.json")).unwrap();
            let name = if floats == Floats::F32 {
                "float32"
            } else {
                "bfloat16"
            };
            assert!(
                config.contains(name) && !config.contains("kozue"),
                "{config}"
            );
        }
    }
}

#[test]
fn a_prediction_head_is_named_where_it_is_left_out() {
    let dir = Model::qwen35_multimodal().write();
    let theirs = dir.root.path().join("theirs");
    let report = exported(&dir.path, &theirs, Format::Lalamo, Floats::Bf16).unwrap();
    assert_eq!(
        report.notes,
        ["the multi-token prediction head: left out, as lalamo has none"]
    );
    // It is a part of the source all the same.
    let plain = dir.root.path().join("plain");
    let all = exported(&dir.path, &plain, Format::HuggingFace, Floats::Bf16).unwrap();
    assert_eq!(report.bytes_before, all.bytes_before);
    assert!(report.weights < all.weights);
}

#[test]
fn what_cannot_be_exported_is_one_line() {
    let refused = |source: &Path, target: &Path, format, expected: &str| {
        let text = exported(source, target, format, Floats::Bf16)
            .expect_err("exported")
            .to_string();
        assert!(text.contains(expected) && !text.contains('\n'), "{text}");
    };
    let dir = Model::qwen2().write();
    let target = dir.root.path().join("out");
    exported(&dir.path, &target, Format::HuggingFace, Floats::Bf16).unwrap();
    refused(
        &dir.path,
        &target,
        Format::Lalamo,
        "out: exists; use --force",
    );
    let force = ExportOptions {
        format: Format::Lalamo,
        floats: Floats::Bf16,
        force: true,
    };
    let cpu = Cpu::new(Some(1));
    export(&cpu, &dir.path, &target, force, &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    // A model that Kozue did not write stays.
    let other = Model::qwen2().write();
    let error = export(&cpu, &dir.path, &other.path, force, &mut |_| {
        ControlFlow::Continue(())
    });
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("was not written by Kozue")
    );
    let stopped = dir.root.path().join("stopped");
    let error = export(
        &cpu,
        &dir.path,
        &stopped,
        ExportOptions {
            force: false,
            ..force
        },
        &mut |_| ControlFlow::Break(()),
    );
    assert!(matches!(error, Err(Error::Stopped)));
    assert_eq!(Dir::names(dir.root.path()), ["out", "tiny"]);

    let mut drafter = Model::qwen3();
    drafter.config["block_size"] = json!(16);
    drafter.config["dflash_config"] = json!({"mask_token_id": 7, "target_layer_ids": [0]});
    drafter.tensors = vec![Tensor::filled("fc.weight", "BF16", &[64, 64])];
    let drafter = drafter.write();
    refused(
        &drafter.path,
        &stopped,
        Format::HuggingFace,
        "is a drafter's folder",
    );

    let mut scaled = Model::llama();
    scaled.config["rope_scaling"] =
        json!({"rope_type": "kozue_factors", "factors": [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]});
    let scaled = scaled.write();
    refused(
        &scaled.path,
        &stopped,
        Format::Lalamo,
        "divided by a list of numbers",
    );
}

#[test]
fn values_that_a_type_does_not_hold_are_named() {
    let root = tempfile::tempdir().unwrap();
    let (source, out) = (root.path().join("source"), root.path().join("out"));
    fs::create_dir(&source).unwrap();
    for entry in fs::read_dir(tiny("qwen2")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, source.join(path.file_name().unwrap())).unwrap();
    }
    let weights = source.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let length = u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let refused = |name: &str, value: f32, format, floats, expected: &str| {
        assert_eq!(header[name]["dtype"], "F32");
        let at = 8 + length + header[name]["data_offsets"][0].as_u64().unwrap() as usize + 28;
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        fs::write(&weights, bytes).unwrap();
        let error = exported(&source, &out, format, floats).expect_err("exported");
        let error = error.to_string();
        assert!(error.contains(name) && error.contains(expected), "{error}");
        assert_eq!(Dir::names(root.path()), ["source"]);
    };
    let (matrix, norm) = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight");
    let bias = "model.layers.0.self_attn.k_proj.bias";
    for name in [matrix, norm, bias] {
        for format in [Format::HuggingFace, Format::Lalamo, Format::Gguf] {
            let damaged = "has a value that is NaN; the checkpoint is damaged";
            refused(name, f32::NAN, format, Floats::F32, damaged);
            refused(name, f32::NEG_INFINITY, format, Floats::Bf16, "is -inf;");
        }
    }
    for format in [Format::HuggingFace, Format::Lalamo, Format::Gguf] {
        let large = "has a value of 70000, too large for F16";
        refused(matrix, 70000.0, format, Floats::F16, large);
    }
    let blocks = Floats::Q8_0;
    refused(matrix, f32::NAN, Format::Gguf, blocks, "that is NaN;");
    refused(
        matrix,
        1e8,
        Format::Gguf,
        blocks,
        "has a value of 100000000, too large for Q8_0",
    );
}

fn tiny(name: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/tiny");
    root.join(name)
}

/// How a checkpoint's tokenizer cuts a text.
fn cut(path: &Path) -> Vec<u32> {
    let checkpoint = open(path);
    let (TokenizerSource::Json(json) | TokenizerSource::Gguf(json)) =
        &checkpoint.description().tokenizer;
    let tokenizer: Tokenizer = json.parse().unwrap();
    let text = "Hello, world! 12345 naïve\n\n  def f(x):\n\treturn x'll <|im_end|> über";
    let encoding = tokenizer.encode_fast(text, false).unwrap();
    encoding.get_ids().to_vec()
}

#[test]
fn models_go_through_gguf_and_back() {
    for name in [
        "llama",
        "llama3-rope",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5-gva",
        "qwen3_5-multimodal",
        "qwen3_moe",
        "qwen3_5_moe",
    ] {
        let root = tempfile::tempdir().unwrap();
        let source = tiny(name);
        for floats in [Floats::F32, Floats::Q8_0] {
            let target = root.path().join(format!("{floats:?}.gguf"));
            let report = exported(&source, &target, Format::Gguf, floats)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(report.notes, [""; 0], "{name}");
            assert_eq!(cut(&source), cut(&target), "{name}");
            let (before, after) = (open(&source), open(&target));
            assert_eq!(
                before.description().chat_template,
                after.description().chat_template
            );
            assert_eq!(
                before.description().generation.bos,
                after.description().generation.bos
            );
            for info in before.tensors() {
                if !after.holds(&info.name) {
                    assert!(
                        info.aside && !info.name.starts_with("mtp."),
                        "{}",
                        info.name
                    );
                    continue;
                }
                let len = info.shape.iter().product();
                let stored = before.vector(&info.name, len).unwrap();
                let found = after.vector(&info.name, len).unwrap();
                let most = stored.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let bound = match floats {
                    // 1 is added to norms and taken off again, decays go through exp and ln.
                    Floats::F32 if info.shape.len() == 1 => 1e-6 * most.max(1.0),
                    Floats::F32 => 0.0,
                    _ => most / 200.0,
                };
                for (a, b) in stored.iter().zip(&found) {
                    assert!((a - b).abs() <= bound, "{name} {}: {a} {b}", info.name);
                }
            }
        }
        assert_eq!(Dir::names(root.path()), ["F32.gguf", "Q8_0.gguf"]);
    }
}

#[test]
fn files_that_stand_at_the_target_are_safe() {
    let root = tempfile::tempdir().unwrap();
    let target = root.path().join("model.gguf");
    let make = |force, floats| {
        let options = ExportOptions {
            format: Format::Gguf,
            floats,
            force,
        };
        let cpu = Cpu::new(Some(1));
        export(&cpu, &tiny("qwen2"), &target, options, &mut |_| {
            ControlFlow::Continue(())
        })
        .map(drop)
        .map_err(|error| error.to_string())
    };
    let says = |result: Result<(), String>, expected: &str| {
        let text = result.expect_err("written");
        assert!(text.contains(expected) && !text.contains('\n'), "{text}");
    };
    fs::write(&target, "years of work").unwrap();
    says(make(true, Floats::F16), "another kind of file");
    fs::remove_file(&target).unwrap();
    make(false, Floats::F32).unwrap();
    let before = fs::metadata(&target).unwrap().len();
    says(make(false, Floats::F16), "use --force");
    make(true, Floats::F16).unwrap();
    assert!(fs::metadata(&target).unwrap().len() < before);
    assert_eq!(Dir::names(root.path()), ["model.gguf"]);
    let dir = root.path().join("hf");
    let wrong = exported(&tiny("qwen2"), &dir, Format::HuggingFace, Floats::Q8_0);
    assert!(
        wrong
            .unwrap_err()
            .to_string()
            .contains("only --format gguf has q8_0")
    );
    // A tokenizer that llama.cpp has no name for.
    let unnamed = Model::qwen2().write();
    let wrong = exported(&unnamed.path, &dir, Format::Gguf, Floats::F16);
    assert!(
        wrong
            .unwrap_err()
            .to_string()
            .contains("has no name in GGUF")
    );
}
