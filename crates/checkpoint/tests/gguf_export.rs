//! What GGUF files say in other ways than Hugging Face's directories: SentencePiece's tokenizers by
//! scores, windows by layers, experts in one tensor; and what they cannot say.
#![allow(missing_docs)]

mod gguf_file;

use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use gguf_file::{File, Meta, llama, text};
use kozue_checkpoint::description::{Mixer, TokenizerSource};
use kozue_checkpoint::{Checkpoint, ExportOptions, Floats, Format, Report, export};
use kozue_kernels::Cpu;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

fn exported(source: &Path, target: &Path, format: Format) -> Result<Report, String> {
    let options = ExportOptions {
        format,
        floats: Floats::F32,
        force: false,
    };
    let cpu = Cpu::new(Some(1));
    export(&cpu, source, target, options, &mut |_| {
        ControlFlow::Continue(())
    })
    .map_err(|error| error.to_string())
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"))
}

fn tokenizer(path: &Path) -> Tokenizer {
    let description = open(path).description().clone();
    let (TokenizerSource::Json(json) | TokenizerSource::Gguf(json)) = description.tokenizer;
    json.parse().unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).unwrap().get_ids().to_vec()
}

fn array<T>(value: &Value, each: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().unwrap().iter().map(each).collect()
}

/// The vocabulary that tests/gguf_sentencepiece.py trained, in a file of two layers.
fn sentencepiece(prefix: bool) -> (File, Value) {
    let json: Value = serde_json::from_str(include_str!("gguf_sentencepiece.json")).unwrap();
    let tokens = array(&json["tokens"], |text| text.as_str().unwrap().to_owned());
    let number = |value: &Value| value.as_f64().unwrap();
    let mut file = llama();
    file.f32("token_embd.weight", &[tokens.len() as u64, 64])
        .set("tokenizer.ggml.model", text("llama"))
        .unset("tokenizer.ggml.merges");
    file.set("tokenizer.ggml.pre", text("default"))
        .set("tokenizer.ggml.tokens", Meta::Texts(tokens))
        .set("tokenizer.ggml.add_space_prefix", Meta::Bool(prefix))
        .set(
            "tokenizer.ggml.scores",
            Meta::F32s(array(&json["scores"], |score| number(score) as f32)),
        )
        .set(
            "tokenizer.ggml.token_type",
            Meta::I32s(array(&json["types"], |kind| number(kind) as i32)),
        )
        .set("tokenizer.ggml.bos_token_id", Meta::U32(1))
        .set("tokenizer.ggml.eos_token_id", Meta::U32(2));
    (file, json)
}

#[test]
fn sentencepiece_goes_from_scores_to_pairs_and_back() {
    for prefix in [true, false] {
        let (file, json) = sentencepiece(prefix);
        let written = file.write();
        let root = tempfile::tempdir().unwrap();
        let (pairs, scores) = (root.path().join("hf"), root.path().join("again.gguf"));
        exported(&written.path, &pairs, Format::HuggingFace).unwrap();
        let report = exported(&pairs, &scores, Format::Gguf).unwrap();
        assert_eq!(report.notes, [""; 0]);
        let (before, after) = (tokenizer(&pairs), tokenizer(&scores));
        assert_eq!(
            before.to_string(false).unwrap(),
            after.to_string(false).unwrap()
        );
        for pair in json["texts"].as_array().unwrap() {
            let text = pair[0].as_str().unwrap();
            let expected = array(&pair[1], |id| id.as_u64().unwrap() as u32);
            assert_eq!(ids(&before, text), ids(&after, text));
            assert!(!prefix || ids(&after, text) == expected, "{text:?}");
        }
        let kept = open(&scores).description().generation.clone();
        assert_eq!((kept.bos, &kept.eos[..]), (Some(1), &[2][..]));
    }
}

/// A tiny checkpoint of tests/reference with another config.json, and with a tokenizer whose list of
/// pairs is complete, as one made of SentencePiece's scores is.
fn tiny(root: &Path, name: &str, change: impl Fn(&mut Value)) -> PathBuf {
    let from = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/reference/tiny")
        .join(name);
    let to = root.join(name);
    fs::create_dir(&to).unwrap();
    for file in fs::read_dir(&from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
    let edit = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut value = serde_json::from_slice(&fs::read(to.join(name)).unwrap()).unwrap();
        change(&mut value);
        fs::write(to.join(name), value.to_string()).unwrap();
    };
    edit("config.json", &change);
    edit("tokenizer.json", &|tokenizer| {
        let model = &mut tokenizer["model"];
        let vocabulary: HashMap<String, u64> =
            serde_json::from_value(model["vocab"].clone()).unwrap();
        let mut all = Vec::new();
        for pair in model["merges"].as_array().unwrap() {
            let [left, right] = [0, 1].map(|n| pair[n].as_str().unwrap());
            let union = format!("{left}{right}");
            let cuts = union
                .char_indices()
                .skip(1)
                .map(|(at, _)| union.split_at(at));
            all.extend(
                cuts.filter(|(a, b)| vocabulary.contains_key(*a) && vocabulary.contains_key(*b))
                    .map(|(a, b)| json!([a, b])),
            );
        }
        model["merges"] = all.into();
    });
    to
}

#[test]
fn families_with_pieces_go_through_gguf_and_back() {
    let root = tempfile::tempdir().unwrap();
    let gemma = tiny(root.path(), "gemma3", |config| {
        config["query_pre_attn_scalar"] = json!(32);
    });
    let mistral = tiny(root.path(), "mistral", |config| {
        config["sliding_window"] = Value::Null;
    });
    for source in [gemma, mistral] {
        let target = source.with_extension("gguf");
        let report = exported(&source, &target, Format::Gguf).unwrap();
        assert_eq!(report.notes, [""; 0]);
        let (before, after) = (open(&source), open(&target));
        let (a, b) = (&before.description().config, &after.description().config);
        assert_eq!(a.layers, b.layers);
        assert_eq!(a.attention, b.attention);
        for info in before.tensors() {
            let len = info.shape.iter().product();
            let stored = before.vector(&info.name, len).unwrap();
            let found = after.vector(&info.name, len).unwrap();
            // 1 is added to norms and taken off again.
            let bound = if info.shape.len() == 1 { 2e-7 } else { 0.0 };
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= bound;
            assert!(stored.iter().zip(&found).all(near), "{}", info.name);
        }
        let (before, after) = (tokenizer(&source), tokenizer(&target));
        for text in [
            "The dog's dog, and  two  spaces",
            " \n\n[INST] thé 12 🦙 <end_of_turn>x</s>the",
        ] {
            assert_eq!(ids(&before, text), ids(&after, text), "{text:?}");
        }
    }
    let layers = open(&root.path().join("gemma3.gguf"))
        .description()
        .config
        .layers
        .clone();
    let window = Mixer::Sliding;
    assert_eq!(layers, [window, window, Mixer::Attention, window]);
}

#[test]
fn what_gguf_cannot_say_is_one_line() {
    #[track_caller]
    fn refused(name: &str, change: impl Fn(&mut Value), expected: &str) {
        let root = tempfile::tempdir().unwrap();
        let source = tiny(root.path(), name, change);
        let said = exported(&source, &root.path().join("x.gguf"), Format::Gguf).unwrap_err();
        assert!(said.contains(expected) && !said.contains('\n'), "{said}");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
    refused(
        "gemma3",
        |_| (),
        "by the root of 24 (query_pre_attn_scalar)",
    );
    refused("mistral", |_| (), "sees a window only");
    refused(
        "qwen3_moe",
        |config| config["norm_topk_prob"] = json!(false),
        "experts' weights add up to 1",
    );
    // A pair is missing, which scores would join all the same.
    let root = tempfile::tempdir().unwrap();
    let source = tiny(root.path(), "gemma3", |config| {
        config["query_pre_attn_scalar"] = json!(32);
    });
    let file = source.join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let merges = json["model"]["merges"].as_array_mut().unwrap();
    merges.remove(5);
    fs::write(&file, json.to_string()).unwrap();
    let said = exported(&source, &root.path().join("x.gguf"), Format::Gguf).unwrap_err();
    assert!(said.contains("SentencePiece's scores cannot say"), "{said}");
}
