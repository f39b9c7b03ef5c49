//! Layouts that llama.cpp's converter can write and the tiny references do not have.
#![allow(missing_docs)]

mod gguf_file;

use gguf_file::{F16, File, Meta, llama, text, value};
use half::f16;
use kozue_checkpoint::Checkpoint;
use kozue_checkpoint::description::RopeScaling;
use kozue_kernels::Matrix;

fn open(file: &File) -> Checkpoint {
    let written = file.write();
    // The mapping outlives the directory entry.
    Checkpoint::open(&written.path).unwrap_or_else(|error| panic!("{error}"))
}

fn matrix(checkpoint: &Checkpoint, name: &str, n: usize, k: usize) -> Matrix {
    checkpoint
        .matrix(name, n, k)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn rows(matrix: &Matrix) -> Vec<Vec<f32>> {
    let row = |index| {
        let mut out = vec![0.0; matrix.k()];
        matrix.row_into(index, &mut out);
        out
    };
    (0..matrix.n()).map(row).collect()
}

/// The rows of a tensor written by [`File::f32`].
fn stored(name: &str, n: usize, k: usize) -> Vec<Vec<f32>> {
    let row = |index| {
        (0..k)
            .map(|column| value(name, index * k + column))
            .collect()
    };
    (0..n).map(row).collect()
}

#[test]
fn fused_projections_are_cut_apart() {
    let mut file = llama();
    let name = "blk.1.attn_qkv.weight";
    file.tensors.retain(|tensor| {
        !["q", "k", "v"]
            .iter()
            .any(|part| tensor.name == format!("blk.1.attn_{part}.weight"))
    });
    file.f32(name, &[128, 64]);
    let checkpoint = open(&file);
    let all = stored(name, 128, 64);
    let at = "model.layers.1.self_attn";
    let q = rows(&matrix(&checkpoint, &format!("{at}.q_proj.weight"), 64, 64));
    let k = rows(&matrix(&checkpoint, &format!("{at}.k_proj.weight"), 32, 64));
    let v = rows(&matrix(&checkpoint, &format!("{at}.v_proj.weight"), 32, 64));
    // Heads of 32: the first halves of the pairs, then the second.
    for head in 0..2 {
        for row in 0..32 {
            let from = 32 * head + 2 * (row % 16) + row / 16;
            assert_eq!(q[32 * head + row], all[from], "head {head} row {row}");
        }
    }
    assert_eq!((&k[1], &k[16], &k[31]), (&all[66], &all[65], &all[95]));
    assert_eq!(v, all[96..]);
    let bytes: u64 = checkpoint.tensors().iter().map(|info| info.bytes).sum();
    let expected: usize = file.tensors.iter().map(|tensor| tensor.bytes.len()).sum();
    assert_eq!(bytes as usize, expected);
}

#[test]
fn rotary_frequencies() {
    let scaling = |file: &File| {
        open(file)
            .description()
            .config
            .attention
            .rope
            .scaling
            .clone()
    };
    let mut file = llama();
    assert_eq!(scaling(&file), RopeScaling::None);
    file.set("llama.rope.scaling.factor", Meta::F32(4.0));
    assert_eq!(scaling(&file), RopeScaling::Linear { factor: 4.0 });
    file.set("llama.rope.scaling.type", text("none"));
    assert_eq!(scaling(&file), RopeScaling::None);
    file.f32("rope_freqs.weight", &[16]);
    let factors = (0..16).map(|at| value("rope_freqs.weight", at)).collect();
    assert_eq!(scaling(&file), RopeScaling::Factors(factors));
    assert!(
        open(&file)
            .tensors()
            .iter()
            .any(|info| info.name == "rope_freqs.weight" && info.aside)
    );
    file.f32("rope_freqs.weight", &[15]);
    gguf_file::assert_says(&file, "rope_freqs.weight must hold 16 positive divisors");
    file.f32("rope_freqs.weight", &[16])
        .unset("llama.rope.scaling.type");
    gguf_file::assert_says(&file, "not supported together with rope_freqs.weight");
}

#[test]
fn floats_in_another_order_are_copied_and_others_mapped() {
    let mut file = llama();
    let values: Vec<f16> = (0..64 * 64)
        .map(|at| f16::from_f32(value("q", at)))
        .collect();
    let bytes = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    file.put("blk.0.attn_q.weight", &[64, 64], F16, bytes);
    let checkpoint = open(&file);
    let q = rows(&matrix(
        &checkpoint,
        "model.layers.0.self_attn.q_proj.weight",
        64,
        64,
    ));
    let expected: Vec<f32> = values[64 * 2..64 * 3]
        .iter()
        .map(|value| value.to_f32())
        .collect();
    assert_eq!(q[1], expected);
    let name = "blk.0.attn_v.weight";
    let v = rows(&matrix(
        &checkpoint,
        "model.layers.0.self_attn.v_proj.weight",
        32,
        64,
    ));
    assert_eq!(v, stored(name, 32, 64));
}

/// Qwen3.5 of one Gated DeltaNet layer: 2 key heads of 16, 6 value heads of `width`.
fn qwen35(width: u64) -> File {
    let mut file = llama();
    file.tensors
        .retain(|tensor| !tensor.name.starts_with("blk."));
    for (_, value) in file
        .meta
        .iter_mut()
        .filter(|(key, _)| key == "general.architecture")
    {
        *value = text("qwen35");
    }
    for (key, _) in &mut file.meta {
        *key = key.replace("llama.", "qwen35.");
    }
    let values = 6 * width;
    for (key, value) in [
        ("block_count", 1),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 16),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 6),
        ("ssm.inner_size", values as u32),
    ] {
        file.set(&format!("qwen35.{key}"), Meta::U32(value));
    }
    file.f32("blk.0.attn_norm.weight", &[64]);
    file.f32("blk.0.post_attention_norm.weight", &[64]);
    file.f32("blk.0.attn_qkv.weight", &[64 + values, 64]);
    file.f32("blk.0.attn_gate.weight", &[values, 64]);
    file.f32("blk.0.ssm_alpha.weight", &[6, 64]);
    file.f32("blk.0.ssm_beta.weight", &[6, 64]);
    file.f32("blk.0.ssm_conv1d.weight", &[64 + values, 4]);
    file.f32("blk.0.ssm_dt.bias", &[6]);
    file.f32("blk.0.ssm_norm.weight", &[width]);
    let decay = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].map(|a| -a.exp());
    let bytes = decay.iter().flat_map(|value| value.to_le_bytes()).collect();
    file.put("blk.0.ssm_a", &[6], gguf_file::F32, bytes);
    file.q8_0("blk.0.ssm_out.weight", &[64, values]);
    for (name, shape) in [("gate", [96, 64]), ("up", [96, 64]), ("down", [64, 96])] {
        file.f32(&format!("blk.0.ffn_{name}.weight"), &shape);
    }
    file
}

#[test]
fn value_heads_return_to_their_key_heads() {
    // Stored A0 B0 A1 B1 A2 B2, wanted A0 A1 A2 B0 B1 B2.
    const FROM: [usize; 6] = [0, 2, 4, 1, 3, 5];
    let at = "model.layers.0.linear_attn";
    for width in [32, 16] {
        let file = qwen35(width as u64);
        let checkpoint = open(&file);
        let config = &checkpoint.description().config;
        assert!(config.norm_plus_one);
        let delta = config.delta.clone().unwrap();
        assert_eq!(
            (delta.key_heads, delta.value_heads, delta.key_dim),
            (2, 6, 16)
        );
        assert_eq!((delta.value_dim, delta.conv_kernel), (width, 4));

        let qkv = rows(&matrix(
            &checkpoint,
            &format!("{at}.in_proj_qkv.weight"),
            64 + 6 * width,
            64,
        ));
        let all = stored("blk.0.attn_qkv.weight", 64 + 6 * width, 64);
        assert_eq!(qkv[..64], all[..64]);
        let conv = checkpoint
            .vector(&format!("{at}.conv1d.weight"), (64 + 6 * width) * 4)
            .unwrap();
        let taps = stored("blk.0.ssm_conv1d.weight", 64 + 6 * width, 4);
        for (head, stored_head) in FROM.into_iter().enumerate() {
            for i in 0..width {
                let (to, from) = (64 + head * width + i, 64 + stored_head * width + i);
                assert_eq!(qkv[to], all[from]);
                assert_eq!(conv[4 * to..4 * to + 4], taps[from]);
            }
        }
        let decay = checkpoint.vector(&format!("{at}.A_log"), 6).unwrap();
        for (found, expected) in decay.iter().zip([1.0, 3.0, 5.0, 2.0, 4.0, 6.0]) {
            assert!((found - expected).abs() < 1e-6, "{decay:?}");
        }
        let bias = checkpoint.vector(&format!("{at}.dt_bias"), 6).unwrap();
        assert_eq!(bias, FROM.map(|from| value("blk.0.ssm_dt.bias", from)));
        let norm = checkpoint.vector("model.norm.weight", 64).unwrap();
        assert_eq!(norm[3] + 1.0, value("output_norm.weight", 3));
        let inner = checkpoint
            .vector(&format!("{at}.norm.weight"), width)
            .unwrap();
        assert_eq!(inner[3], value("blk.0.ssm_norm.weight", 3));

        // Columns: whole groups of 32 are moved in the packed form, others as f32.
        let out = matrix(&checkpoint, &format!("{at}.out_proj.weight"), 64, 6 * width);
        assert_eq!(matches!(out, Matrix::Packed(_)), width == 32);
        let plain = &file
            .tensors
            .iter()
            .find(|t| t.name == "blk.0.ssm_out.weight")
            .unwrap()
            .bytes;
        let value = |row: usize, column: usize| {
            let block = &plain[(row * 6 * width + column) / 32 * 34..][..34];
            let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
            scale * f32::from(block[2 + column % 32] as i8)
        };
        for (row, found) in rows(&out).iter().enumerate() {
            for (column, found) in found.iter().enumerate() {
                let from = FROM[column / width] * width + column % width;
                assert_eq!(*found, value(row, from), "{row} {column}");
            }
        }
        let notes = checkpoint.source_notes();
        let expected = match width {
            32 => "Q8_0: 1 tensor as int8 groups of 32 symmetric, without loss",
            _ => "1 tensor kept as f32: model.layers.0.linear_attn.out_proj.weight",
        };
        assert_eq!(notes.len(), 1);
        assert_eq!(notes[0].text, expected);
        assert!(!notes[0].lossy);
    }
}

#[test]
fn layers_are_mixed_by_list_or_by_interval() {
    use kozue_checkpoint::description::Mixer::Delta;
    let mut file = qwen35(16);
    let said = |file: &File| open(file).description().config.layers.clone();
    assert_eq!(said(&file), [Delta]);
    file.set(
        "qwen35.attention.recurrent_layers",
        Meta::Bools(vec![false, true]),
    );
    gguf_file::assert_says(&file, "160 rows, but its parts take 192");
    file.set("qwen35.attention.recurrent_layers", Meta::Bools(vec![]));
    gguf_file::assert_says(&file, "recurrent_layers: 0 entries for 1 layers");
    file.unset("qwen35.attention.recurrent_layers");
    file.set("qwen35.full_attention_interval", Meta::U32(1));
    gguf_file::assert_says(&file, "160 rows, but its parts take 192");
    file.unset("qwen35.full_attention_interval");
    // A block that predicts ahead is no layer.
    file.set("qwen35.block_count", Meta::U32(2));
    file.set("qwen35.nextn_predict_layers", Meta::U32(1));
    file.f32("blk.1.nextn.eh_proj.weight", &[64, 128]);
    assert_eq!(said(&file), [Delta]);
}
