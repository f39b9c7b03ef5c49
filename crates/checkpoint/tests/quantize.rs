//! Kozue's own format: what is written reads back, says what was lost, and appears whole or not
//! at all.
#![allow(missing_docs)]

mod support;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use kozue_checkpoint::description::{Description, TokenizerSource};
use kozue_checkpoint::{Checkpoint, EMBED, Error, HEAD, Options, Report, Size, quantize};
use kozue_kernels::{Cpu, Matrix};
use serde_json::{Value, json};
use support::{Dir, Model, Tensor};

const M64: Options = Options {
    size: Size::M,
    head: None,
    group: 64,
    force: false,
};

fn convert(dir: &Dir, options: Options) -> Result<(PathBuf, Report), Error> {
    let target = dir.root.path().join("packed");
    let cpu = Cpu::new(Some(2));
    quantize(&cpu, &dir.path, &target, options, &mut |_| {
        ControlFlow::Continue(())
    })
    .map(|report| (target, report))
}

fn convert_well(dir: &Dir, options: Options) -> (PathBuf, Report) {
    convert(dir, options).unwrap_or_else(|error| panic!("{error}"))
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn assert_fails(result: Result<(PathBuf, Report), Error>, expected: &str) {
    let text = result.expect_err("no error").to_string();
    assert!(!text.contains('\n'), "more than one line: {text}");
    assert!(text.contains(expected), "expected {expected:?} in {text:?}");
}

fn assert_same_description(a: &Description, b: &Description) {
    let tokenizer = |description: &Description| match &description.tokenizer {
        TokenizerSource::Json(text) | TokenizerSource::Gguf(text) => text.clone(),
    };
    assert_eq!(a.config, b.config);
    assert_eq!(tokenizer(a), tokenizer(b));
    assert_eq!(a.chat_template, b.chat_template);
    assert_eq!(a.bos_token, b.bos_token);
    assert_eq!(a.eos_token, b.eos_token);
    assert_eq!(a.generation, b.generation);
}

/// The values of a tensor, whatever it is stored as.
fn values(checkpoint: &Checkpoint, name: &str, shape: &[usize]) -> Vec<f32> {
    checkpoint.vector(name, shape.iter().product()).unwrap()
}

fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (error / b.iter().map(|b| square(*b)).sum::<f64>()).sqrt()
}

#[test]
fn every_family_and_size_reads_back() {
    let models = [
        Model::llama(),
        Model::qwen2(),
        Model::qwen3(),
        Model::qwen35_multimodal(),
    ];
    let sizes = [(Size::M, 32), (Size::M, 64), (Size::M, 128), (Size::L, 64)];
    for (model, (size, group)) in models
        .iter()
        .flat_map(|model| sizes.map(|size| (model, size)))
    {
        let dir = model.write();
        dir.put(
            "tokenizer_config.json",
            r#"{"bos_token": "<s>", "eos_token": "<|im_end|>"}"#,
        );
        dir.put(
            "generation_config.json",
            r#"{"eos_token_id": [2, 5], "top_p": 0.8, "top_k": 20}"#,
        );
        dir.put("chat_template.jinja", "{{ messages }}\n");
        dir.put("LICENSE.txt", "free\n");
        let (path, report) = convert_well(
            &dir,
            Options {
                size,
                head: None,
                group,
                force: false,
            },
        );
        let (source, packed) = (open(&dir.path), open(&path));
        assert_same_description(source.description(), packed.description());
        assert_eq!(
            fs::read_to_string(path.join("LICENSE.txt")).unwrap(),
            "free\n"
        );

        let mut sizes = 0;
        for tensor in &report.tensors {
            let before = values(&source, &tensor.name, &tensor.shape);
            let after = values(&packed, &tensor.name, &tensor.shape);
            sizes += before.len() as u64;
            match tensor.relative_error {
                None => assert_eq!(before, after, "{}", tensor.name),
                Some(told) => {
                    let bound = if size == Size::M { 0.12 } else { 0.01 };
                    let measured = relative_error(&after, &before);
                    assert!(measured < bound, "{}: {measured}", tensor.name);
                    // The rotation keeps lengths: what was lost behind it is lost in front.
                    assert!(
                        (measured / told - 1.0).abs() < 1e-3,
                        "{measured} but told {told}"
                    );
                }
            }
        }
        packed.finish().unwrap();
        assert_eq!(report.weights, sizes);
    }
}

#[test]
fn what_is_packed_and_what_is_kept() {
    let dir = Model::qwen35().write();
    let (path, report) = convert_well(&dir, M64);
    let of = |name: &str| {
        let found = report
            .tensors
            .iter()
            .find(|tensor| tensor.name.ends_with(name));
        found.map(|tensor| tensor.to.clone()).unwrap()
    };
    for packed in [
        "embed_tokens.weight",
        "0.linear_attn.in_proj_qkv.weight",
        "3.mlp.down_proj.weight",
    ] {
        assert_eq!(of(packed), "int4 group 64");
    }
    assert_eq!(of("0.linear_attn.A_log"), "F32");
    for kept in [
        "in_proj_a.weight",
        "in_proj_b.weight",
        "conv1d.weight",
        "dt_bias",
        "model.norm.weight",
    ] {
        assert_eq!(of(kept), "BF16");
    }
    let checkpoint = open(&path);
    let Matrix::Packed(embedding) = checkpoint
        .matrix("model.embed_tokens.weight", 96, 64)
        .unwrap()
    else {
        panic!("not packed")
    };
    let Matrix::Packed(gate) = checkpoint
        .matrix("model.layers.0.mlp.gate_proj.weight", 128, 64)
        .unwrap()
    else {
        panic!("not packed")
    };
    assert_eq!(
        embedding.rotation(),
        gate.rotation(),
        "one rotation for each width"
    );
    assert!(embedding.rotation().unwrap().signs().contains(&-1.0));
    let Matrix::Dense(_) = checkpoint
        .matrix("model.layers.0.linear_attn.in_proj_a.weight", 4, 64)
        .unwrap()
    else {
        panic!("not dense")
    };
    let told: Value =
        serde_json::from_str(&fs::read_to_string(path.join("quantization.json")).unwrap()).unwrap();
    assert_eq!(told["tensors"]["model.embed_tokens.weight"]["from"], "BF16");
    assert_eq!(
        told["tensors"]["model.embed_tokens.weight"]["to"],
        "int4 group 64"
    );
}

#[test]
fn embedding_and_head_may_have_other_bits() {
    for (model, tied) in [(Model::qwen2(), true), (Model::llama(), false)] {
        let dir = model.write();
        let (target, _) = convert_well(
            &dir,
            Options {
                head: Some(Size::L),
                ..M64
            },
        );
        let checkpoint = open(&target);
        let config = &checkpoint.description().config;
        assert_eq!(config.tied, tied);
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        let bits = |name: &str, n: usize, k: usize| match checkpoint.matrix(name, n, k).unwrap() {
            Matrix::Packed(matrix) => matrix.spec().bits,
            _ => panic!("{name} is not packed"),
        };
        assert_eq!(bits(EMBED, vocabulary, hidden), 8);
        if !tied {
            assert_eq!(bits(HEAD, vocabulary, hidden), 8);
        }
        let intermediate = config.intermediate_size;
        let down = "model.layers.0.mlp.down_proj.weight";
        assert_eq!(bits(down, hidden, intermediate), 4);
        let text = fs::read_to_string(target.join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(config["kozue"]["size"], "M");
        assert_eq!(config["kozue"]["head"], "L");
    }
}

#[test]
fn packed_tensors_keep_to_cache_lines() {
    let dir = Model::qwen35().write();
    let (path, _) = convert_well(&dir, M64);
    let file = fs::read(path.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    assert!((8 + length).is_multiple_of(64));
    let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    for (name, entry) in header.as_object().unwrap() {
        let begin = entry["data_offsets"][0].as_u64().unwrap_or(0);
        let alignment = match entry["dtype"].as_str() {
            Some("U8") => 64,
            Some("F32") => 4,
            Some("BF16" | "F16") => 2,
            _ => 1,
        };
        assert!(begin.is_multiple_of(alignment), "{name} at {begin}");
    }
}

#[test]
fn widths_that_cannot_be_rotated_stay_dense() {
    let mut model = Model::llama();
    model.config["intermediate_size"] = json!(80);
    for layer in 0..2 {
        for (name, shape) in [("gate", [80, 64]), ("up", [80, 64]), ("down", [64, 80])] {
            let name = format!("model.layers.{layer}.mlp.{name}_proj.weight");
            *model.tensor(&name) = Tensor::filled(&name, "F32", &shape);
        }
    }
    let dir = model.write();
    let (path, report) = convert_well(&dir, M64);
    let name = "model.layers.1.mlp.down_proj.weight";
    let down = report
        .tensors
        .iter()
        .find(|tensor| tensor.name == name)
        .unwrap();
    assert_eq!(down.to, "BF16");
    assert_eq!(
        down.note.as_deref(),
        Some("kept dense: 80 inputs are no multiple of 32")
    );
    assert_eq!(
        values(&open(&path), name, &[64, 80]),
        values(&open(&dir.path), name, &[64, 80])
    );
    let text = fs::read_to_string(path.join("quantization.json")).unwrap();
    assert!(text.contains("kept dense: 80 inputs are no multiple of 32"));
}

#[test]
fn what_stands_at_the_target_is_safe() {
    let dir = Model::qwen2().write();
    let target = dir.root.path().join("packed");
    let force = Options { force: true, ..M64 };

    // The source, which --force would replace, under another name too.
    let link = dir.root.path().join("link");
    std::os::unix::fs::symlink(&dir.path, &link).unwrap();
    let cpu = Cpu::new(Some(1));
    for same in [&dir.path, &link] {
        let error = quantize(&cpu, &dir.path, same, force, &mut |_| {
            ControlFlow::Continue(())
        });
        let error = error.unwrap_err().to_string();
        assert!(
            error.ends_with("is the source itself; name another place"),
            "{error}"
        );
    }
    fs::remove_file(&link).unwrap();

    fs::write(&target, "a file").unwrap();
    assert_fails(
        convert(&dir, force),
        "packed: exists and is no directory; name another place",
    );
    fs::remove_file(&target).unwrap();

    fs::create_dir(&target).unwrap();
    fs::write(target.join("thesis.txt"), "years of work").unwrap();
    assert_fails(
        convert(&dir, force),
        "packed: exists, is not empty and was not written by Kozue; name another place",
    );
    assert_eq!(
        fs::read_to_string(target.join("thesis.txt")).unwrap(),
        "years of work"
    );
    fs::remove_file(target.join("thesis.txt")).unwrap();

    convert_well(&dir, M64);
    assert_fails(
        convert(&dir, M64),
        "packed: exists; use --force to replace this checkpoint",
    );
    // What its user put into it stays.
    let drafter = target.join("dflash");
    fs::create_dir(&drafter).unwrap();
    assert_fails(
        convert(&dir, force),
        "packed: dflash in it was not written by a conversion and would be lost; move it away or name another place",
    );
    fs::remove_dir(&drafter).unwrap();
    convert_well(
        &dir,
        Options {
            size: Size::L,
            head: None,
            ..force
        },
    );
    let Matrix::Packed(matrix) = open(&target)
        .matrix("model.embed_tokens.weight", 96, 64)
        .unwrap()
    else {
        panic!("not packed")
    };
    assert_eq!(matrix.spec().bits, 8, "replaced");
    assert_eq!(
        Dir::names(dir.root.path()),
        ["packed", "tiny"],
        "nothing else is left"
    );

    let cpu = Cpu::new(Some(1));
    let again = dir.root.path().join("again");
    let error = quantize(&cpu, &target, &again, M64, &mut |_| {
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.ends_with("is already quantised by Kozue; quantise the model that it was made from"),
        "{error}"
    );
}

#[test]
fn a_failure_on_the_way_leaves_nothing_behind() {
    let mut model = Model::qwen2();
    let mut broken = vec![0.25; 64 * 128];
    broken[70 * 64 + 3] = f32::NAN;
    let name = "model.layers.0.mlp.down_proj.weight";
    *model.tensor(name) = Tensor::of(name, "F32", &[64, 128], &broken);
    let dir = model.write();
    assert_fails(
        convert(&dir, M64),
        "tensor model.layers.0.mlp.down_proj.weight: weight 3 of row 35 is NaN",
    );
    assert_eq!(Dir::names(dir.root.path()), ["tiny"]);

    // The same when an older checkpoint was to be replaced: it stays.
    let good = Model::qwen2().write();
    let (path, _) = convert_well(&good, M64);
    let before = fs::read(path.join("model.safetensors")).unwrap();
    let cpu = Cpu::new(Some(1));
    let options = Options {
        size: Size::L,
        head: None,
        group: 64,
        force: true,
    };
    let failed = quantize(&cpu, &dir.path, &path, options, &mut |_| {
        ControlFlow::Continue(())
    });
    assert!(failed.is_err());
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), before);
    assert_eq!(Dir::names(good.root.path()), ["packed", "tiny"]);
}

#[test]
fn progress_counts_up_and_can_stop_the_work() {
    let dir = Model::qwen35().write();
    let target = dir.root.path().join("packed");
    let cpu = Cpu::new(Some(1));
    let (mut last, mut calls) = (0, 0);
    let stopped = quantize(&cpu, &dir.path, &target, M64, &mut |progress| {
        assert!(progress.done > last && progress.done <= progress.total);
        (last, calls) = (progress.done, calls + 1);
        if calls == 3 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    assert_eq!(
        stopped.unwrap_err().to_string(),
        "stopped; nothing was written"
    );
    assert_eq!(calls, 3);
    assert_eq!(Dir::names(dir.root.path()), ["tiny"]);

    let mut end = (0, 0);
    let report = quantize(&cpu, &dir.path, &target, M64, &mut |progress| {
        end = (progress.done, progress.total);
        ControlFlow::Continue(())
    });
    assert_eq!(end, (report.unwrap().weights, end.1));
    assert_eq!(end.0, end.1);
}

#[test]
fn a_target_that_cannot_be_made_is_one_line() {
    let dir = Model::qwen2().write();
    let file = dir.root.path().join("file");
    fs::write(&file, "").unwrap();
    let cpu = Cpu::new(Some(1));
    let failed = quantize(&cpu, &dir.path, &file.join("packed"), M64, &mut |_| {
        ControlFlow::Continue(())
    });
    let text = failed.unwrap_err().to_string();
    assert!(
        text.contains("file") && text.contains("Not a directory"),
        "{text}"
    );
    assert_fails(
        convert(&dir, Options { group: 48, ..M64 }),
        "packed groups are of 32, 64 or 128 inputs, not 48",
    );
}

#[test]
fn bits_do_not_depend_on_threads() {
    let dir = Model::qwen3().write();
    let file = |threads: usize| {
        let target = dir.root.path().join(threads.to_string());
        let cpu = Cpu::new(Some(threads));
        quantize(&cpu, &dir.path, &target, M64, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        fs::read(target.join("model.safetensors")).unwrap()
    };
    assert_eq!(file(1), file(3));
}

#[test]
fn what_a_killed_conversion_left_is_removed() {
    let dir = Model::qwen2().write();
    let left = dir.root.path().join(".packed.0.tmp");
    fs::create_dir(&left).unwrap();
    convert_well(&dir, M64);
    assert_eq!(Dir::names(dir.root.path()), ["packed", "tiny"]);
}

#[test]
fn gguf_files_convert_too() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/gguf");
    let root = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(Some(2));
    for family in ["llama", "qwen2", "qwen3", "qwen35"] {
        let (path, target) = (seeds.join(family), root.path().join(family));
        let options = Options {
            size: Size::L,
            head: None,
            group: 32,
            force: false,
        };
        quantize(&cpu, &path, &target, options, &mut |_| {
            ControlFlow::Continue(())
        })
        .map(|report| {
            let (source, packed) = (open(&path), open(&target));
            assert_same_description(source.description(), packed.description());
            for tensor in &report.tensors {
                let before = values(&source, &tensor.name, &tensor.shape);
                let after = values(&packed, &tensor.name, &tensor.shape);
                let measured = relative_error(&after, &before);
                let told = tensor.relative_error.unwrap_or(0.0);
                assert!(
                    (measured - told).abs() < 1e-5,
                    "{family}: {}: {measured}, told {told}",
                    tensor.name
                );
                assert!(measured < 0.01, "{family}: {}: {measured}", tensor.name);
            }
        })
        .unwrap_or_else(|error| panic!("{error}"));
    }
}
