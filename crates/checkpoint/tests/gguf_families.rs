//! GGUF files with experts and with windows, in the layouts that llama.cpp documents by its loaders.
#![allow(missing_docs)]

mod gguf_file;

use gguf_file::{File, Meta, llama, text, value};
use kozue_checkpoint::Checkpoint;
use kozue_checkpoint::description::{ExpertsConfig, Family, Mixer, RopeScaling};

fn open(file: &File) -> Checkpoint {
    let written = file.write();
    Checkpoint::open(&written.path).unwrap_or_else(|error| panic!("{error}"))
}

/// The two layers of [`llama`] under the name of another architecture, with norms of queries and keys.
fn as_family(name: &str) -> File {
    let mut file = llama();
    for (key, _) in &mut file.meta {
        *key = key.replace("llama.", &format!("{name}."));
    }
    file.set("general.architecture", text(name));
    for layer in 0..2 {
        file.f32(&format!("blk.{layer}.attn_q_norm.weight"), &[32]);
        file.f32(&format!("blk.{layer}.attn_k_norm.weight"), &[32]);
    }
    file
}

/// Three experts of 32, of which a token takes two.
fn qwen3moe() -> File {
    let mut file = as_family("qwen3moe");
    file.tensors.retain(|tensor| !tensor.name.contains(".ffn_"));
    file.unset("qwen3moe.feed_forward_length");
    for (key, value) in [
        ("expert_count", 3),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 32),
    ] {
        file.set(&format!("qwen3moe.{key}"), Meta::U32(value));
    }
    for layer in 0..2 {
        let at = format!("blk.{layer}");
        file.f32(&format!("{at}.ffn_norm.weight"), &[64]);
        file.f32(&format!("{at}.ffn_gate_inp.weight"), &[3, 64]);
        file.q8_0(&format!("{at}.ffn_gate_exps.weight"), &[3, 32, 64]);
        file.f32(&format!("{at}.ffn_up_exps.weight"), &[3, 32, 64]);
        file.f32(&format!("{at}.ffn_down_exps.weight"), &[3, 64, 32]);
    }
    file
}

/// What the matrix `name` of `n` x `k` holds, and rows `first ..` of the stored f32 tensor.
fn assert_rows(
    checkpoint: &Checkpoint,
    name: &str,
    [n, k]: [usize; 2],
    stored: &str,
    first: usize,
) {
    let matrix = checkpoint
        .matrix(&format!("model.layers.1.mlp.{name}.weight"), n, k)
        .unwrap_or_else(|error| panic!("{error}"));
    let mut row = vec![0.0; k];
    for index in [0, 1, n - 1] {
        matrix.row_into(index, &mut row);
        let expected: Vec<f32> = (0..k)
            .map(|column| value(stored, (first + index) * k + column))
            .collect();
        assert_eq!(row, expected, "{name}, row {index}");
    }
}

#[test]
fn experts_are_cut_apart() {
    let file = qwen3moe();
    let checkpoint = open(&file);
    let config = &checkpoint.description().config;
    assert_eq!(config.family, Family::Qwen3);
    assert_eq!(config.intermediate_size, 32);
    let experts = ExpertsConfig {
        count: 3,
        chosen: 2,
        normalised: true,
        shared: None,
        dense: None,
    };
    assert_eq!(config.experts, Some(experts));
    assert_rows(&checkpoint, "gate", [3, 64], "blk.1.ffn_gate_inp.weight", 0);
    for expert in 0..3 {
        let at = format!("experts.{expert}");
        let (up, down) = ("blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight");
        assert_rows(
            &checkpoint,
            &format!("{at}.up_proj"),
            [32, 64],
            up,
            32 * expert,
        );
        assert_rows(
            &checkpoint,
            &format!("{at}.down_proj"),
            [64, 32],
            down,
            64 * expert,
        );
        let name = format!("model.layers.1.mlp.{at}.gate_proj.weight");
        let gate = checkpoint.matrix(&name, 32, 64).unwrap();
        let mut row = [0.0; 64];
        gate.row_into(5, &mut row);
        // Blocks of 32 codes; two a row.
        let block = 2 * (32 * expert + 5) + 1;
        let scale = half::f16::from_f32(value("blk.1.ffn_gate_exps.weight", block) / 64.0);
        let code = (block as u64 * 57 + 3 * 31) as u8 as i8;
        assert_eq!(row[32 + 3], scale.to_f32() * f32::from(code));
    }
    let bytes: u64 = checkpoint.tensors().iter().map(|info| info.bytes).sum();
    let expected: usize = file.tensors.iter().map(|tensor| tensor.bytes.len()).sum();
    assert_eq!(bytes as usize, expected);

    let mut more = qwen3moe();
    more.set("qwen3moe.expert_used_count", Meta::U32(4));
    gguf_file::assert_says(&more, "4 of 3 experts for a token");
    let mut fewer = qwen3moe();
    fewer.f32("blk.0.ffn_up_exps.weight", &[2, 32, 64]);
    gguf_file::assert_says(&fewer, "64 rows, but its parts take 96");
}

#[test]
fn gates_and_ups_may_be_one_tensor() {
    let mut file = qwen3moe();
    let fused = "blk.1.ffn_gate_up_exps.weight";
    let apart = ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"];
    file.tensors
        .retain(|tensor| !apart.contains(&&*tensor.name));
    file.f32(fused, &[3, 64, 64]);
    let checkpoint = open(&file);
    for expert in 0..3 {
        for (part, name) in ["gate_proj", "up_proj"].iter().enumerate() {
            let name = format!("experts.{expert}.{name}");
            assert_rows(&checkpoint, &name, [32, 64], fused, 64 * expert + 32 * part);
        }
    }
}

fn gemma3() -> File {
    let mut file = as_family("gemma3");
    for layer in 0..2 {
        file.f32(&format!("blk.{layer}.post_attention_norm.weight"), &[64]);
        file.f32(&format!("blk.{layer}.post_ffw_norm.weight"), &[64]);
    }
    file.set("gemma3.attention.sliding_window", Meta::U32(40));
    file.set("gemma3.rope.scaling.factor", Meta::F32(8.0));
    file
}

#[test]
fn gemma3_has_windows_and_norms_around() {
    let layers = |file: &File| open(file).description().config.layers.clone();
    let file = gemma3();
    let checkpoint = open(&file);
    let config = &checkpoint.description().config;
    assert!(config.sandwich_norms && config.gelu && config.scaled_embedding && config.tied);
    assert_eq!(
        config.layers,
        [Mixer::Sliding; 2],
        "every sixth sees everything"
    );
    let rope = &config.attention.rope;
    assert_eq!(
        (rope.theta, &rope.scaling),
        (500_000.0, &RopeScaling::Linear { factor: 8.0 })
    );
    let sliding = config.attention.sliding.as_ref().unwrap();
    assert_eq!((sliding.window, sliding.rope.theta), (40, 10_000.0));
    assert_eq!(sliding.rope.scaling, RopeScaling::None);
    for (name, stored) in [
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ] {
        let norm = checkpoint
            .vector(&format!("model.layers.1.{name}.weight"), 64)
            .unwrap();
        assert_eq!(
            norm[7] + 1.0,
            value(&format!("blk.1.{stored}.weight"), 7),
            "{name}"
        );
    }

    let mut file = gemma3();
    file.set("gemma3.attention.sliding_window_pattern", Meta::U32(2));
    assert_eq!(layers(&file), [Mixer::Sliding, Mixer::Attention]);
    file.unset("gemma3.attention.sliding_window_pattern");
    file.unset("gemma3.attention.sliding_window");
    assert_eq!(layers(&file), [Mixer::Attention; 2]);
    file.set("gemma3.final_logit_softcapping", Meta::F32(30.0));
    gguf_file::assert_says(&file, "capped logits are not supported");
}
