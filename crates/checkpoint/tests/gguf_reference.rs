//! Files that llama.cpp's own converter and quantiser made of the tiny checkpoints
//! (tests/reference/make_gguf.py), against those checkpoints.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};

use kozue_checkpoint::Checkpoint;
use kozue_checkpoint::description::{Mixer, RopeScaling, TokenizerSource};
use serde_json::Value;
use tokenizers::Tokenizer;

fn reference(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/reference")
        .join(part)
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"))
}

/// All values of a tensor of a model, as the engine reads them.
fn values(checkpoint: &Checkpoint, name: &str, shape: &[usize]) -> Vec<f32> {
    match shape[..] {
        [n, k] if !name.contains("conv1d") => {
            let matrix = checkpoint
                .matrix(name, n, k)
                .unwrap_or_else(|e| panic!("{e}"));
            let mut all = vec![0.0; n * k];
            for (row, out) in all.chunks_mut(k).enumerate() {
                matrix.row_into(row, out);
            }
            all
        }
        _ => {
            let len = shape.iter().product();
            checkpoint
                .vector(name, len)
                .unwrap_or_else(|e| panic!("{e}"))
        }
    }
}

/// Largest relative RMS change that storing values this way may cause.
fn bound(format: &str) -> f64 {
    match format {
        // Norms lose a few bits when 1 is added to them and taken off again.
        "F32" => 3e-6,
        "F16" => 5e-4,
        "BF16" => 3e-3,
        "Q8_0" => 1e-2,
        "Q5_0" | "Q5_1" => 7e-2,
        "Q4_0" | "Q4_1" => 0.15,
        other => panic!("no bound for {other}"),
    }
}

const PAIRS: [(&str, &str); 11] = [
    ("qwen3_5-gva-f32", "qwen3_5-gva"),
    ("qwen3_5-gva-q8_0", "qwen3_5-gva"),
    ("qwen3_5-mtp-f16", "qwen3_5-multimodal"),
    ("qwen3_5-q4_0", "qwen3_5"),
    ("qwen3-bf16", "qwen3"),
    ("qwen3-q5_0", "qwen3"),
    ("qwen2-f16", "qwen2"),
    ("qwen2-q5_1", "qwen2"),
    ("llama-q4_0", "llama"),
    ("llama-q4_1", "llama"),
    ("llama3-rope-f16", "llama3-rope"),
];

#[test]
fn values_are_the_checkpoint_s() {
    for (file, model) in PAIRS {
        let gguf = open(&reference(&format!("gguf/{file}.gguf")));
        let original = open(&reference(&format!("tiny/{model}")));
        for info in original.tensors().into_iter().filter(|info| !info.aside) {
            let expected = values(&original, &info.name, &info.shape);
            let found = values(&gguf, &info.name, &info.shape);
            let square = |value: f32| f64::from(value) * f64::from(value);
            let error: f64 = found
                .iter()
                .zip(&expected)
                .map(|(a, b)| square(a - b))
                .sum();
            let norm: f64 = expected.iter().map(|&b| square(b)).sum();
            let tensors = gguf.tensors();
            let ours = tensors
                .iter()
                .find(|other| other.name == info.name)
                .expect(&info.name);
            let relative = (error / norm.max(1e-12)).sqrt();
            assert!(
                relative <= bound(&ours.format),
                "{file}: {} ({}) is off by {relative:.2e}",
                info.name,
                ours.format
            );
        }
        gguf.finish().unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn descriptions_are_the_checkpoint_s() {
    for (file, model) in PAIRS {
        let gguf = open(&reference(&format!("gguf/{file}.gguf")));
        let original = open(&reference(&format!("tiny/{model}")));
        let (found, mut expected) = (
            gguf.description().config.clone(),
            original.description().config.clone(),
        );
        if let RopeScaling::Llama3 { .. } = expected.attention.rope.scaling {
            // The converter stores what the rule makes of each frequency.
            let RopeScaling::Factors(factors) = &found.attention.rope.scaling else {
                panic!("{file}: {:?}", found.attention.rope.scaling);
            };
            assert_eq!(factors.len(), expected.attention.rope.rotary_dim / 2);
            assert_eq!((factors[0], factors.last()), (1.0, Some(&8.0)));
            expected.attention.rope.scaling = found.attention.rope.scaling.clone();
        }
        assert_eq!(found, expected, "{file}");
        let (ours, theirs) = (gguf.description(), original.description());
        assert_eq!(ours.chat_template, theirs.chat_template, "{file}");
        assert_eq!(ours.generation.bos, theirs.generation.bos, "{file}");
        for end in &theirs.generation.eos {
            assert!(ours.generation.eos.contains(end), "{file}: {end}");
        }
    }
}

#[test]
fn tokenizers_are_the_checkpoint_s() {
    for (file, model) in PAIRS {
        let of = |checkpoint: &Checkpoint| {
            let (TokenizerSource::Json(text) | TokenizerSource::Gguf(text)) =
                &checkpoint.description().tokenizer;
            text.parse::<Tokenizer>()
                .unwrap_or_else(|error| panic!("{file}: {error}"))
        };
        let ours = of(&open(&reference(&format!("gguf/{file}.gguf"))));
        let theirs = of(&open(&reference(&format!("tiny/{model}"))));
        for text in [
            "The quick brown fox's 22/7, isn't it?\n\n  It'S 3.14159 e\u{301}",
            "<|im_start|>user\nПривет, мир! 你好<|im_end|>\n<think>\n\n</think>",
        ] {
            let ids =
                |tokenizer: &Tokenizer| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
            assert_eq!(ids(&ours), ids(&theirs), "{file}: {text:?}");
            let shown = |tokenizer: &Tokenizer| tokenizer.decode(&ids(tokenizer), true).unwrap();
            assert_eq!(shown(&ours), shown(&theirs), "{file}: {text:?}");
        }
    }
}

/// What ggml calls the tensors of which the references keep two rows.
fn hugging_face(stored: &str) -> String {
    let name = match stored.strip_suffix(".weight").expect(stored) {
        "token_embd" => "model.embed_tokens",
        "output" => "lm_head",
        "blk.0.ssm_conv1d" => "model.layers.0.linear_attn.conv1d",
        "blk.0.attn_k" => "model.layers.0.self_attn.k_proj",
        "blk.0.attn_v" => "model.layers.0.self_attn.v_proj",
        "blk.0.attn_norm" => "model.layers.0.input_layernorm",
        other => panic!("no name for {other}"),
    };
    format!("{name}.weight")
}

#[test]
fn rows_are_dequantised_as_the_gguf_package_does() {
    let mut formats = Vec::new();
    for entry in std::fs::read_dir(reference("gguf")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        let gguf = open(&path);
        let bytes = std::fs::read(path.with_extension("safetensors")).unwrap();
        let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
        for (key, entry) in header.as_object().unwrap() {
            let Some(stored) = key.strip_prefix("rows.") else {
                continue;
            };
            let place = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize;
            let data = &bytes[8 + size + place(0)..8 + size + place(1)];
            let expected: Vec<f32> = data
                .as_chunks()
                .0
                .iter()
                .map(|&b| f32::from_le_bytes(b))
                .collect();
            // First and last rows are in place in every order.
            let tensors = gguf.tensors();
            let name = hugging_face(stored);
            let info = tensors.iter().find(|info| info.name == name).expect(&name);
            let all = values(&gguf, &name, &info.shape);
            let k = expected.len() / 2;
            let found = [&all[..k], &all[all.len() - k..]].concat();
            let most = expected
                .iter()
                .fold(0.0f32, |most, value| most.max(value.abs()));
            let bound = match &*info.format {
                "Q4_K" | "Q5_K" => 2e-3 * most,
                "Q6_K" => 1e-2 * most,
                _ => 0.0,
            };
            for (a, b) in found.iter().zip(&expected) {
                assert!(
                    (a - b).abs() <= bound,
                    "{}: {name}: {a} {b}",
                    path.display()
                );
            }
            formats.push(info.format.clone());
        }
    }
    formats.sort();
    formats.dedup();
    let all = [
        "BF16", "F16", "F32", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0",
    ];
    assert_eq!(formats, all);
}

#[test]
fn blocks_that_predict_ahead_are_set_aside() {
    let gguf = open(&reference("gguf/qwen3_5-mtp-f16.gguf"));
    let config = &gguf.description().config;
    use Mixer::{Attention, Delta};
    assert_eq!(config.layers, [Delta, Delta, Delta, Attention]);
    // They have Hugging Face's names and values all the same.
    let original = open(&reference("tiny/qwen3_5-multimodal"));
    let theirs = original.tensors();
    let ahead: Vec<_> = theirs
        .iter()
        .filter(|info| info.name.starts_with("mtp."))
        .collect();
    assert_eq!(ahead.len(), 15);
    let aside: Vec<String> = gguf
        .tensors()
        .iter()
        .filter(|info| info.aside)
        .map(|info| info.name.clone())
        .collect();
    let names: Vec<String> = ahead.iter().map(|info| info.name.clone()).collect();
    assert_eq!(aside, names);
    for info in ahead {
        assert!(!gguf.has(&info.name) && gguf.holds(&info.name));
        let len = info.shape.iter().product();
        let ours = gguf.vector(&info.name, len).unwrap();
        for (a, b) in ours.iter().zip(original.vector(&info.name, len).unwrap()) {
            assert!(
                (a - b).abs() <= 5e-4 * b.abs().max(1.0),
                "{}: {a} {b}",
                info.name
            );
        }
    }
}

/// What the listing says of memory is what the matrices take.
#[test]
fn memory_is_known_before_anything_is_read() {
    let mut formats = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir(reference("gguf")).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        let checkpoint = open(&file);
        for info in checkpoint.tensors().into_iter().filter(|info| !info.aside) {
            let taken = match info.shape[..] {
                [n, k] if !info.name.contains("conv1d") => {
                    let matrix = checkpoint.matrix(&info.name, n, k).unwrap();
                    matrix.bytes().len()
                }
                _ => 4 * info.shape.iter().product::<usize>(),
            };
            assert_eq!(info.memory.bytes, taken as u64, "{file:?}: {}", info.name);
            assert_eq!(
                info.memory.lossy,
                info.format.contains("_K"),
                "{}",
                info.format
            );
            formats.insert(format!("{} {}", info.format, info.memory.format));
        }
    }
    for expected in [
        "Q8_0 int8 group 32",
        "Q4_0 int4 group 32",
        "F32 F32",
        "BF16 BF16",
    ] {
        assert!(
            formats.contains(expected),
            "{expected} is not in {formats:?}"
        );
    }
}
