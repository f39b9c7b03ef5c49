//! GGUF files: the tiny ones of tests/reference against transformers on their dequantised weights,
//! the real ones (in the folder that KOZUE_REAL_MODELS names) against llama.cpp.

mod tiny;

use std::path::{Path, PathBuf};

use kozue_checkpoint::Checkpoint;
use kozue_kernels::{Cpu, KvType};
use kozue_model::Model;
use safetensors::SafeTensors;
use serde_json::Value;
use tiny::{argmax, floats, reference};

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn load(path: &Path, kv: KvType) -> Model {
    Model::load(&Checkpoint::open(path).unwrap(), kv).unwrap()
}

/// Files of floats give transformers' tokens. Quantised files, whose activations are quantised too,
/// stay within 6 per cent of its logits; where a recurrent state carries the error of a random
/// model over a long prompt, within 30.
#[test]
fn tiny_files_agree_with_transformers_on_their_weights() {
    let cpu = Cpu::new(Some(2));
    let mut files: Vec<PathBuf> = std::fs::read_dir(reference().join("gguf"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "gguf")
        })
        .collect();
    files.sort();
    assert!(files.len() >= 14, "{files:?}");
    for path in files {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let floating = ["f32", "f16", "bf16"]
            .iter()
            .any(|kind| name.ends_with(kind));
        let model = load(&path, KvType::F32);
        let expected = read_json(&path.with_extension("json"));
        let tensors = std::fs::read(path.with_extension("safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&tensors).unwrap();
        for key in ["short", "long"] {
            let prompt = &expected["prompts"][key];
            let theirs = floats(&tensors, &format!("{key}.last_logits"));
            let mut state = model.new_state();
            let mut last = model
                .advance(&cpu, &mut state, &ids(&prompt["prompt"]), 1)
                .unwrap();
            let square = |v: f32| f64::from(v) * f64::from(v);
            let error: f64 = last.iter().zip(&theirs).map(|(a, b)| square(a - b)).sum();
            let error = (error / theirs.iter().copied().map(square).sum::<f64>()).sqrt();
            println!("{name}, {key}: {error:.6}");
            let bound = match (floating, name.starts_with("qwen3_5") && key == "long") {
                (true, _) => 1e-5,
                (false, false) => 0.06,
                (false, true) => 0.3,
            };
            assert!(error < bound, "{name}, {key}: {error}");
            if floating {
                for (step, theirs) in ids(&prompt["greedy"]).into_iter().enumerate() {
                    let ours = argmax(&last);
                    assert_eq!(ours, theirs, "{name}, {key}, greedy token {step}");
                    last = model.advance(&cpu, &mut state, &[ours], 1).unwrap();
                }
            }
        }
    }
}

/// 64 greedy tokens of five prompts each, as llama.cpp gives them in one of its two ways, or as the
/// dequantised weights give them in f32; a first difference must be a near-tie of the reference.
#[test]
fn real_files_agree_with_llama_cpp() {
    let Some(folder) = std::env::var_os("KOZUE_REAL_MODELS").map(PathBuf::from) else {
        println!("KOZUE_REAL_MODELS is not set: skipped");
        return;
    };
    let cpu = Cpu::new(None);
    let mut compared = 0;
    for name in ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"] {
        let texts = reference().join("llama_cpp");
        let expected = read_json(&texts.join(format!("{name}.json")));
        let path = folder.join(expected["file"].as_str().unwrap());
        if !path.exists() {
            println!("{} is not there: skipped", path.display());
            continue;
        }
        let exact = texts.join(format!("{name}.exact.json"));
        let exact = exact.exists().then(|| read_json(&exact));
        let model = load(&path, KvType::F16);
        for (index, run) in expected["runs"].as_array().unwrap().iter().enumerate() {
            let ours = greedy(&model, &cpu, &ids(&run["prompt"]), 64);
            // (name, tokens, the two best of every step)
            let mut references = vec![("llama.cpp", &run["greedy"], &run["top2"])];
            if let Some(plain) = run.get("plain") {
                references.push(("llama.cpp, plain", &plain["greedy"], &plain["top2"]));
            }
            if let Some(exact) = &exact {
                let run = &exact["runs"][index];
                references.push(("exact", &run["greedy"], &run["top2"]));
            }
            let mut reports = Vec::new();
            let mut explained = false;
            for (who, theirs, top2) in references {
                let theirs = ids(theirs);
                let first = ours
                    .iter()
                    .zip(&theirs)
                    .position(|((ours, _), theirs)| ours != theirs);
                let Some(step) = first else {
                    reports.push(format!("{who}: {} tokens equal", theirs.len()));
                    explained = true;
                    continue;
                };
                let gap = top2[step][1].as_f64().unwrap() - top2[step][3].as_f64().unwrap();
                let (token, ours_top2) = &ours[step];
                reports.push(format!(
                    "{who}: parts at {step}, theirs {} gap {gap:.3}, ours {token} {ours_top2:?}",
                    top2[step]
                ));
                // As far apart as the two ways of llama.cpp are from each other.
                explained |= gap < 0.7;
            }
            println!("{name}, prompt {index}:\n  {}", reports.join("\n  "));
            assert!(explained, "{name}, prompt {index}: {reports:#?}");
            compared += 1;
        }
    }
    assert!(compared > 0, "no real model in {}", folder.display());
}

/// Greedy tokens, each with the two best tokens and logits.
fn greedy(model: &Model, cpu: &Cpu, prompt: &[u32], count: usize) -> Vec<(u32, [(u32, f32); 2])> {
    let mut state = model.new_state();
    let mut logits = model.advance(cpu, &mut state, prompt, 1).unwrap();
    let mut tokens = Vec::new();
    while tokens.len() < count {
        let best = argmax(&logits);
        let mut rest = logits.clone();
        rest[best as usize] = f32::NEG_INFINITY;
        let second = argmax(&rest);
        let top2 = [
            (best, logits[best as usize]),
            (second, logits[second as usize]),
        ];
        tokens.push((best, top2));
        logits = model.advance(cpu, &mut state, &[best], 1).unwrap();
    }
    tokens
}

/// Files that Kozue writes are the model that they were written of: in all bits where the format
/// keeps all, else in the tokens.
#[test]
fn written_files_say_what_their_source_says() {
    use kozue_checkpoint::{ExportOptions, Floats, Format, export};
    let cpu = Cpu::new(Some(2));
    let root = tempfile::tempdir().unwrap();
    for (name, floats) in [
        ("qwen3_moe", Floats::Bf16),
        ("qwen3_5_moe", Floats::F32),
        ("qwen3_moe", Floats::Q8_0),
    ] {
        let source = reference().join("tiny").join(name);
        let target = root.path().join(format!("{name}-{floats:?}.gguf"));
        let options = ExportOptions {
            format: Format::Gguf,
            floats,
            force: false,
        };
        export(&cpu, &source, &target, options, &mut |_| {
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
        let (before, after) = (load(&source, KvType::F32), load(&target, KvType::F32));
        let (mut ours, mut theirs) = (before.new_state(), after.new_state());
        let expected = read_json(&source.join("expected.json"));
        let prompt = ids(&expected["prompts"]["long"]["prompt"]);
        let mut last = before.advance(&cpu, &mut ours, &prompt, 1).unwrap();
        let mut written = after.advance(&cpu, &mut theirs, &prompt, 1).unwrap();
        let steps = match floats {
            // Rounded weights go their own way in the end.
            Floats::Q8_0 => 1,
            _ => 60,
        };
        for step in 0..steps {
            if floats == Floats::Bf16 {
                assert!(last[..] == written[..], "{name}, step {step}");
            }
            let token = argmax(&last);
            assert_eq!(token, argmax(&written), "{name}, {floats:?}, step {step}");
            last = before.advance(&cpu, &mut ours, &[token], 1).unwrap();
            written = after.advance(&cpu, &mut theirs, &[token], 1).unwrap();
        }
    }
}
