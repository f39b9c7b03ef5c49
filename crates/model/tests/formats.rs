//! A tiny model as other programs quantise it (tests/reference/make_formats.py): greedy tokens equal
//! those that transformers computes in f64 from the dequantised weights.

mod tiny;

use std::fs;
use std::ops::ControlFlow;

use kozue_checkpoint::{Checkpoint, ExportOptions, Floats, Format, export};
use kozue_kernels::{Cpu, KvType};
use kozue_model::Model;
use serde_json::Value;
use tiny::{Tiny, argmax, folder, reference};

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A directory of `formats`, with the tokenizer that all of them share.
fn open(name: &str) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let files = [
        ("formats", name, "config.json"),
        ("formats", name, "model.safetensors"),
        ("tiny", "qwen2", "tokenizer.json"),
    ];
    for (root, folder, file) in files {
        let from = reference().join(root).join(folder).join(file);
        fs::copy(from, dir.path().join(file)).unwrap();
    }
    Model::load(&Checkpoint::open(dir.path()).unwrap(), KvType::F32).unwrap()
}

/// The logits that choose each of the greedy tokens, after the tokens that were chosen before.
fn logits(model: &Model, prompt: &[u32], greedy: &[u32]) -> Vec<Vec<f32>> {
    let cpu = Cpu::new(Some(1));
    let mut state = model.new_state();
    let mut all = vec![model.advance(&cpu, &mut state, prompt, 1).unwrap()];
    for token in &greedy[..greedy.len() - 1] {
        all.push(model.advance(&cpu, &mut state, &[*token], 1).unwrap());
    }
    all
}

/// Weights that are floats when the model runs give every token. Where they are codes, activations are
/// rounded to 8 bits: then tokens may part only where the two largest logits are closer than that
/// rounding moves them, three tenths of the logits' root mean square in this model.
#[test]
fn greedy_tokens_are_those_of_the_dequantised_weights() {
    let text = fs::read(reference().join("formats/expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let mut directories = 0;
    for (set, described) in expected.as_object().unwrap() {
        let bound = if set == "fp8" { 0.0 } else { 0.3 };
        let mut first: Option<(String, Vec<Vec<f32>>)> = None;
        for name in described["directories"].as_array().unwrap() {
            let name = name.as_str().unwrap();
            let model = open(name);
            let mut all = Vec::new();
            for (key, run) in described["prompts"].as_object().unwrap() {
                let greedy = ids(&run["greedy"]);
                let found = logits(&model, &ids(&run["prompt"]), &greedy);
                let mut same = 0;
                for (step, theirs) in greedy.iter().enumerate() {
                    let gap = run["gaps"][step].as_f64().unwrap();
                    let ours = argmax(&found[step]);
                    same += usize::from(ours == *theirs);
                    assert!(
                        ours == *theirs || gap < bound,
                        "{name}, {key}: token {step} is {ours}, theirs {theirs} by {gap}"
                    );
                }
                println!("{name}, {key}: {same} of {} tokens", greedy.len());
                assert!(same * 5 >= greedy.len() * 4, "{name}, {key}: {same}");
                all.extend(found);
            }
            directories += 1;
            // MLX has minima where the others have zero points.
            match &first {
                Some((other, bits)) if name != "mlx" => {
                    assert!(all == *bits, "{name} is not {other} to the bit");
                }
                Some(_) => {}
                None => first = Some((name.to_owned(), all)),
            }
        }
    }
    assert_eq!(directories, 8);
}

/// GGUF files of 32 bits that `export` makes: transformers' greedy tokens on the source.
#[test]
fn exported_gguf_files_write_what_their_source_writes() {
    let cpu = Cpu::new(Some(1));
    for name in [
        "llama",
        "llama3-rope",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5-deep",
        "qwen3_5-gva",
        "qwen3_5-multimodal",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model.gguf");
        let options = ExportOptions {
            format: Format::Gguf,
            floats: Floats::F32,
            force: false,
        };
        export(&cpu, &folder().join(name), &target, options, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap_or_else(|error| panic!("{name}: {error}"));
        let model = Model::load(&Checkpoint::open(&target).unwrap(), KvType::F32).unwrap();
        let expected = Tiny::open(name).prompt("short");
        let greedy = &expected.greedy[..40];
        let ours: Vec<u32> = logits(&model, &expected.prompt, greedy)
            .iter()
            .map(|logits| argmax(logits))
            .collect();
        assert_eq!(ours, greedy, "{name}");
    }
}
