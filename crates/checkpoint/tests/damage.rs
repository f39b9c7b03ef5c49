//! Damaged checkpoints: each kind of damage is one clear line, and never a panic.
#![allow(missing_docs)]

mod support;

use std::fs;
use std::path::Path;

use kozue_checkpoint::Checkpoint;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use support::{Dir, Model, Tensor, safetensors, with_header};

/// The error of opening `path`, which must be one line.
fn error(path: &Path) -> String {
    let text = match Checkpoint::open(path) {
        Ok(_) => panic!("{} opened", path.display()),
        Err(error) => error.to_string(),
    };
    assert!(!text.contains('\n'), "more than one line: {text}");
    assert!(
        text.starts_with(&path.display().to_string()),
        "does not say where: {text}"
    );
    text
}

#[track_caller]
fn assert_says(dir: &Dir, expected: &str) {
    let text = error(&dir.path);
    assert!(text.contains(expected), "expected {expected:?} in {text:?}");
}

fn damaged(damage: impl FnOnce(&mut Model)) -> Dir {
    let mut model = Model::llama();
    damage(&mut model);
    model.write()
}

fn config(changes: &[(&str, Value)]) -> Dir {
    damaged(|model| {
        for (name, value) in changes {
            model.config[name] = value.clone();
        }
    })
}

/// Llama with these bytes as its weights.
fn weights(bytes: &[u8]) -> Dir {
    let dir = Model::llama().write();
    fs::write(dir.path.join("model.safetensors"), bytes).unwrap();
    dir
}

fn whole() -> Vec<u8> {
    safetensors(&Model::llama().tensors)
}

#[test]
fn nothing_or_something_else_at_the_path() {
    let root = tempfile::tempdir().unwrap();
    assert!(
        error(&root.path().join("none"))
            .ends_with("cannot open: No such file or directory (os error 2)")
    );
    assert!(error(root.path()).contains("not a model: there is no config.json"));
    let file = root.path().join("notes.txt");
    fs::write(&file, "hello").unwrap();
    assert!(
        error(&file).contains("not a model: a file that is no GGUF"),
        "{}",
        error(&file)
    );
}

#[test]
fn tensors_missing_extra_misshapen() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let dir = damaged(|model| drop(model.remove(name)));
    assert_says(
        &dir,
        "tensor model.layers.1.mlp.up_proj.weight is missing; fetch or convert",
    );
    let dir = damaged(|model| {
        model.tensors.push(Tensor::filled(
            "model.layers.2.input_layernorm.weight",
            "F32",
            &[64],
        ));
        model.tensors.push(Tensor::filled(
            "model.layers.2.self_attn.q_proj.bias",
            "F32",
            &[64],
        ));
    });
    assert_says(
        &dir,
        "2 unexpected tensors, the first model.layers.2.input_layernorm.weight;",
    );
    let dir = damaged(|model| model.tensor(name).shape = vec![64, 160]);
    assert_says(
        &dir,
        "model.layers.1.mlp.up_proj.weight has shape [64, 160], but the model's settings ask for [160, 64]",
    );
    let dir = damaged(|model| model.tensor(name).shape = vec![160 * 64]);
    assert_says(&dir, "has shape [10240], but");
    let dir = damaged(|model| {
        *model.tensor("model.norm.weight") = Tensor::filled("model.norm.weight", "F32", &[63])
    });
    assert_says(
        &dir,
        "tensor model.norm.weight has shape [63], but the model's settings ask for [64]",
    );
}

#[test]
fn wrong_dtypes() {
    let dir = damaged(|model| {
        *model.tensor("model.norm.weight") = Tensor::filled("model.norm.weight", "I64", &[64]);
    });
    assert_says(
        &dir,
        "tensor model.norm.weight: is stored as I64, but F32, F16 or BF16 is needed",
    );
    let header = r#"{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#;
    assert_says(
        &weights(&with_header(header, &[0])),
        "tensor a: unknown dtype \"F4\"",
    );
}

#[test]
fn truncated_or_overlong_files() {
    let file = whole();
    assert_says(&weights(&[]), "0 bytes are too few for a safetensors file");
    assert_says(
        &weights(&file[..7]),
        "7 bytes are too few for a safetensors file",
    );
    assert_says(&weights(&file[..100]), "truncated: the header takes");
    assert_says(&weights(&file[..file.len() - 1]), "does not fit the");
    let longer = [&file[..], &[0; 3]].concat();
    assert_says(
        &weights(&longer),
        "wrong length: 3 bytes after the last tensor belong to nothing",
    );
}

#[test]
fn absurd_and_damaged_headers() {
    let mut file = whole();
    file[7] = 0x7f;
    assert_says(&weights(&file), "header length 9151314442816");
    assert_says(
        &weights(&with_header("no json", &[])),
        "the header is damaged: expected ident",
    );
    assert_says(
        &weights(&with_header("[]", &[])),
        "the header is damaged: invalid type: sequence, expected an object of tensors",
    );
    assert_says(
        &weights(&with_header(r#"{"a":{"dtype":"F32"}}"#, &[])),
        "the header is damaged: a: missing field `shape`",
    );
    assert_says(
        &weights(&with_header(
            r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
            &[0; 4],
        )),
        "a: invalid value: integer `-1`",
    );
    let deep = "[".repeat(100_000);
    assert_says(&weights(&with_header(&deep, &[])), "the header is damaged");
}

#[test]
fn offsets_that_overlap_leave_gaps_or_leave_the_file() {
    let entry = |name: &str, shape: &str, begin: u64, end: u64| {
        format!(r#""{name}":{{"dtype":"U8","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
    };
    let two = |a: String, b: String| weights(&with_header(&format!("{{{a},{b}}}"), &[0; 8]));
    assert_says(
        &two(entry("a", "[5]", 0, 5), entry("b", "[4]", 4, 8)),
        "tensor b: its data overlaps",
    );
    assert_says(
        &two(entry("a", "[3]", 0, 3), entry("b", "[4]", 4, 8)),
        "1 bytes before tensor b belong to no tensor",
    );
    assert_says(
        &two(entry("a", "[4]", 0, 4), entry("a", "[4]", 4, 8)),
        "tensor a is there twice",
    );
    assert_says(
        &two(entry("a", "[4]", 0, 4), entry("b", "[5]", 4, 9)),
        "tensor b: data at 4..9 does not fit the 8 bytes",
    );
    assert_says(
        &two(entry("a", "[4]", 4, 0), entry("b", "[4]", 4, 8)),
        "tensor a: data at 4..0",
    );
    assert_says(
        &two(entry("a", "[3]", 0, 4), entry("b", "[4]", 4, 8)),
        "tensor a: U8 [3] does not take the 4 bytes",
    );
    let huge = "[4294967296,4294967296,2]";
    assert_says(
        &two(entry("a", huge, 0, 4), entry("b", "[4]", 4, 8)),
        "tensor a: U8 [4294967296",
    );
    let max = u64::MAX;
    assert_says(
        &two(entry("a", "[4]", max - 1, max), entry("b", "[4]", 4, 8)),
        "tensor a: data at",
    );
    assert_says(
        &two(
            entry("a", "[1,1,1,1,1,1,1,1,4]", 0, 4),
            entry("b", "[4]", 4, 8),
        ),
        "tensor a: 9 dimensions are too many",
    );
}

#[test]
fn one_name_twice_after_the_prefix_is_taken_off() {
    let dir = damaged(|model| {
        model.tensors.push(Tensor::filled(
            "model.language_model.norm.weight",
            "BF16",
            &[64],
        ));
    });
    assert_says(&dir, "is there twice");
}

#[test]
fn shards_and_index_that_disagree() {
    let shard = "model-00002-of-00002.safetensors";
    let dir = Model::llama().write_sharded();
    fs::remove_file(dir.path.join(shard)).unwrap();
    assert_says(
        &dir,
        "model-00002-of-00002.safetensors: is missing, but the index names it",
    );

    let index = "model.safetensors.index.json";
    let edit = |edit: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let dir = Model::llama().write_sharded();
        let text = fs::read_to_string(dir.path.join(index)).unwrap();
        let mut map: Value = serde_json::from_str(&text).unwrap();
        edit(map["weight_map"].as_object_mut().unwrap());
        dir.put(index, &map.to_string());
        dir
    };
    let dir = edit(&|map| drop(map.insert("extra.weight".into(), json!(shard))));
    assert_says(
        &dir,
        &format!("tensor extra.weight: the index places it in {shard}, which does not have it"),
    );
    let dir = edit(&|map| drop(map.remove("lm_head.weight")));
    assert_says(
        &dir,
        "tensor lm_head.weight: is in this file, but the index does not place it here",
    );
    for wrong in [
        json!("../tiny/model.safetensors"),
        json!("/etc/passwd"),
        json!(".."),
        json!(""),
        json!(3),
    ] {
        let dir = edit(&|map| drop(map.insert("lm_head.weight".into(), wrong.clone())));
        assert_says(&dir, "tensor lm_head.weight:");
        assert_says(&dir, "is no name of a file beside the index");
    }
    let dir = Model::llama().write_sharded();
    dir.put(index, r#"{"metadata": {}}"#);
    assert_says(
        &dir,
        "model.safetensors.index.json: weight_map: is missing or no object",
    );
    fs::remove_file(dir.path.join(index)).unwrap();
    assert_says(
        &dir,
        "neither model.safetensors nor model.safetensors.index.json; fetch the index too",
    );
    for shard in ["model-00001-of-00002.safetensors", shard] {
        fs::remove_file(dir.path.join(shard)).unwrap();
    }
    assert_says(&dir, "it has a config.json, but no weights");
    dir.put("pytorch_model.bin", "");
    assert_says(
        &dir,
        "its weights are PyTorch pickles; save the model as safetensors",
    );
}

#[test]
fn settings_of_wrong_type_or_size() {
    let says = |changes: &[(&str, Value)], expected: &str| assert_says(&config(changes), expected);
    says(
        &[("hidden_size", json!("64"))],
        "config.json: hidden_size: expected a whole number above 0, found \"64\"",
    );
    says(
        &[("hidden_size", json!(64.5))],
        "hidden_size: expected a whole number above 0, found 64.5",
    );
    says(
        &[("hidden_size", json!(-64))],
        "hidden_size: expected a whole number above 0, found -64",
    );
    says(&[("hidden_size", json!(null))], "hidden_size: is missing");
    says(&[("vocab_size", json!(0))], "vocab_size: must not be 0");
    says(
        &[("vocab_size", json!(1u64 << 60))],
        "vocab_size: 1152921504606846976 is absurd (limit 16777216)",
    );
    says(
        &[("num_hidden_layers", json!(1_000_000_000))],
        "num_hidden_layers: 1000000000 is absurd",
    );
    says(
        &[("num_key_value_heads", json!(3))],
        "num_key_value_heads: 3 does not divide num_attention_heads, 4",
    );
    says(
        &[
            ("num_attention_heads", json!(6)),
            ("num_key_value_heads", json!(2)),
        ],
        "6 does not divide hidden_size, 64, and head_dim is missing",
    );
    says(
        &[("rms_norm_eps", json!("small"))],
        "rms_norm_eps: expected a number above 0, found \"small\"",
    );
    says(
        &[("hidden_act", json!("gelu"))],
        "hidden_act: \"gelu\" is not supported; only silu is",
    );
    says(
        &[("tie_word_embeddings", json!(1))],
        "tie_word_embeddings: expected true or false, found 1",
    );
    says(
        &[("eos_token_id", json!("</s>"))],
        "eos_token_id: expected a token id or a list of them",
    );
    says(
        &[("rope_scaling", json!({"rope_type": "yarn", "factor": 4}))],
        "rope_scaling.rope_type: \"yarn\" is not supported",
    );
    says(
        &[("rope_scaling", json!({"rope_type": "linear"}))],
        "rope_scaling.factor: is missing",
    );
    says(
        &[("rope_scaling", json!("linear"))],
        "rope_scaling: expected an object, found \"linear\"",
    );
    says(
        &[("partial_rotary_factor", json!(0.2))],
        "partial_rotary_factor: 0.2 of head_dim 16 is not an even width",
    );
    says(
        &[("layer_types", json!(["full_attention"]))],
        "layer_types: names 1 layers, but num_hidden_layers is 2",
    );
    says(
        &[(
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
        )],
        "layer_types: \"sliding_attention\" is not supported",
    );
    says(
        &[("use_sliding_window", json!(true))],
        "use_sliding_window: sliding windows are not supported",
    );
    says(
        &[("model_type", json!("mixtral"))],
        "model_type: \"mixtral\" is not supported; Kozue runs",
    );
    says(
        &[("model_type", json!(null))],
        "model_type: is missing; not a config.json of transformers",
    );
    says(&[("hidden_size", json!("x".repeat(500)))], "xxx...");
}

#[test]
fn files_that_are_no_json_or_not_there() {
    let dir = Model::llama().write();
    dir.put("config.json", "{");
    assert_says(
        &dir,
        "config.json: not valid JSON: EOF while parsing an object",
    );
    dir.put("config.json", "[1]");
    assert_says(&dir, "config.json: not a JSON object");
    fs::write(dir.path.join("config.json"), [b'"', 0xff, b'"']).unwrap();
    assert_says(&dir, "config.json: not UTF-8 text");
    let dir = Model::llama().write();
    dir.put("tokenizer.json", "3");
    assert_says(
        &dir,
        "tokenizer.json: not a tokenizer.json: invalid type: integer `3`",
    );
    fs::remove_file(dir.path.join("tokenizer.json")).unwrap();
    assert_says(
        &dir,
        "tokenizer.json: is missing; fetch the model's tokenizer.json too",
    );
    let dir = Model::llama().write();
    dir.put("generation_config.json", r#"{"temperature": "hot"}"#);
    assert_says(
        &dir,
        "generation_config.json: temperature: expected a number, at least 0, found \"hot\"",
    );
    let dir = Model::llama().write();
    dir.put("tokenizer_config.json", r#"{"eos_token": 3}"#);
    assert_says(
        &dir,
        "tokenizer_config.json: eos_token: expected a string or an object with `content`",
    );
    fs::remove_file(dir.path.join("model.safetensors")).unwrap();
    fs::create_dir(dir.path.join("model.safetensors")).unwrap();
    dir.put("tokenizer_config.json", "{}");
    assert_says(&dir, "model.safetensors: not a regular file");
}

/// Open and, if that works, read every tensor: errors are fine, panics are not.
fn read_all(path: &Path) {
    let Ok(checkpoint) = Checkpoint::open(path) else {
        return;
    };
    for info in checkpoint.tensors() {
        let _ = checkpoint.vector(&info.name, info.shape.iter().product());
        if let [n, k] = info.shape[..] {
            let _ = checkpoint.matrix(&info.name, n, k);
        }
    }
    let _ = checkpoint.finish();
}

/// A value to replace a byte by, and where.
fn flips() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)
}

#[test]
fn flipped_bytes_never_panic() {
    let dir = Model::qwen2().write();
    let path = dir.path.join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let mut runner = TestRunner::new(ProptestConfig::with_cases(512));
    let outcome = runner.run(&flips(), |flips| {
        let mut file = whole.clone();
        // The data are numbers, of which every one is allowed.
        for (index, byte) in flips {
            file[index.index(header)] = byte;
        }
        fs::write(&path, file).unwrap();
        read_all(&dir.path);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn flipped_settings_never_panic() {
    let model = Model::qwen35();
    let dir = model.write();
    let whole = model.config.to_string().into_bytes();
    let mut runner = TestRunner::new(ProptestConfig::with_cases(512));
    let outcome = runner.run(&flips(), |flips| {
        let mut text = whole.clone();
        for (index, byte) in flips {
            text[index.index(whole.len())] = byte;
        }
        fs::write(dir.path.join("config.json"), text).unwrap();
        read_all(&dir.path);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}
