//! Damaged drafters, and drafters of other targets: one clear line each.

mod drafted;
mod tiny;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use drafted::{Drafted, network, target};
use kozue_checkpoint::Drafter;
use kozue_kernels::KvType;
use kozue_model::{DFlash, Weaver};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

/// Tensors by name: type, shape and bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// What loading the drafter `name` for `of` says, after its settings or tensors were changed.
fn error(name: &str, of: &str, damage: impl FnOnce(&mut Value, &mut Tensors)) -> String {
    let source = Drafted::open(name).path;
    let mut config: Value =
        serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    let bytes = fs::read(source.join("model.safetensors")).unwrap();
    let mut tensors: Tensors = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, view)| {
            let parts = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name.to_owned(), parts)
        })
        .collect();
    damage(&mut config, &mut tensors);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(
        dir.path().join("model.safetensors"),
        safetensors::serialize(views, None).unwrap(),
    )
    .unwrap();
    let of = target(of, KvType::F16);
    let drafter = match Drafter::open(dir.path(), network(Path::new(name))) {
        Ok(drafter) => drafter,
        Err(error) => return error.to_string(),
    };
    let loaded = if name.starts_with("dflash") {
        DFlash::load(&drafter, &of).map(drop)
    } else {
        Weaver::load(&drafter, &of).map(drop)
    };
    let error = match loaded {
        Ok(()) => return String::new(),
        Err(error) => error.to_string(),
    };
    let place = dir.path().display().to_string();
    assert!(error.starts_with(&place), "says where: {error}");
    assert!(!error.contains('\n'), "one line: {error}");
    error
}

#[track_caller]
fn assert_says(error: &str, part: &str) {
    assert!(error.contains(part), "{error:?} does not say {part:?}");
}

/// A tensor with its last row missing.
fn cut(tensors: &mut Tensors, name: &str) {
    let (_, shape, bytes) = tensors.get_mut(name).unwrap();
    let rows = shape[0];
    shape[0] -= 1;
    bytes.truncate(bytes.len() / rows * (rows - 1));
}

#[test]
fn undamaged_copies_load() {
    for (name, of) in [
        ("dflash-qwen3", "qwen3"),
        ("dflash-qwen3_5", "qwen3_5"),
        ("weaver-learned", "qwen3"),
        ("weaver-rotary", "qwen3_5"),
    ] {
        assert_eq!(error(name, of, |_, _| ()), "");
    }
}

#[test]
fn tensors_of_dflash() {
    let missing = error("dflash-qwen3", "qwen3", |_, tensors| {
        tensors.remove("layers.1.self_attn.k_norm.weight").unwrap();
    });
    assert_says(
        &missing,
        "tensor layers.1.self_attn.k_norm.weight is missing",
    );
    let bias = error("dflash-qwen3_5", "qwen3_5", |_, tensors| {
        tensors.remove("layers.0.self_attn.v_proj.bias").unwrap();
    });
    assert_says(&bias, "tensor layers.0.self_attn.v_proj.bias is missing");
    let shape = error("dflash-qwen3", "qwen3", |_, tensors| {
        cut(tensors, "layers.0.self_attn.q_proj.weight");
    });
    assert_says(
        &shape,
        "layers.0.self_attn.q_proj.weight has shape [63, 64], but the model's settings ask for [64, 64]",
    );
    // One tap fewer than fc was made for.
    let taps = error("dflash-qwen3", "qwen3", |config, _| {
        config["dflash_config"]["target_layer_ids"] = json!([0]);
    });
    assert_says(&taps, "fc.weight has shape [64, 128]");
    let norm = error("dflash-qwen3", "qwen3", |_, tensors| {
        cut(tensors, "hidden_norm.weight");
    });
    assert_says(&norm, "hidden_norm.weight");
    let extra = error("dflash-qwen3", "qwen3", |config, _| {
        config["num_hidden_layers"] = json!(1);
    });
    assert_says(
        &extra,
        "11 unexpected tensors, the first layers.1.input_layernorm.weight",
    );
}

#[test]
fn settings_of_dflash() {
    let says = |field: &str, value: Value, part: &str| {
        let error = error(
            "dflash-qwen3_5",
            "qwen3_5",
            |config, _| match config["dflash_config"].get(field) {
                Some(_) => config["dflash_config"][field] = value,
                None => config[field] = value,
            },
        );
        assert_says(&error, part);
    };
    says("block_size", json!(1), "block_size: must be at least 2");
    says("block_size", json!(-3), "block_size");
    says("mask_token_id", json!([1, 2]), "must be one token id");
    says("mask_token_id", json!(320), "mask token 320 is outside");
    says(
        "target_layer_ids",
        json!([]),
        "must name some of the target's layers",
    );
    says(
        "target_layer_ids",
        json!([1, 4]),
        "reads layer 4 of a target that has 4 layers",
    );
    says("sliding_window", Value::Null, "sliding_window: is missing");
    says("sliding_window", json!(0), "sliding_window");
    says(
        "layer_types",
        json!(["full_attention"]),
        "names 1 layers, not num_hidden_layers, 3",
    );
    says(
        "layer_types",
        json!(["linear_attention", "full_attention", "full_attention"]),
        "\"linear_attention\" is not supported",
    );
    says("is_causal", json!("yes"), "is_causal");
    says("num_key_value_heads", json!(3), "num_key_value_heads");
}

#[test]
fn a_dflash_of_another_target() {
    let says = |of: &str, field: &str, value: Value, part: &str| {
        let error = error("dflash-qwen3", of, |config, _| {
            config[field] = value;
        });
        assert_says(&error, part);
    };
    says(
        "llama",
        "dtype",
        json!("bfloat16"),
        "made for a target of width 64, this one has 96",
    );
    says(
        "qwen3",
        "vocab_size",
        json!(999),
        "made for a vocabulary of 999, this target has one of 320",
    );
    says(
        "qwen3_5",
        "dtype",
        json!("bfloat16"),
        "made for a target of 3 layers, this one has 4",
    );
}

#[test]
fn weaver() {
    // Without its positions it is not taken for one of the other generation.
    let positions = error("weaver-learned", "qwen3", |_, tensors| {
        tensors.remove("pos_emb").unwrap();
    });
    assert_says(&positions, "tensor pos_emb is missing");
    let depth = error("weaver-learned", "qwen3", |config, _| {
        config["K"] = json!(8);
    });
    assert_says(&depth, "pos_emb");
    let bias = error("weaver-rotary", "qwen3_5", |_, tensors| {
        tensors.remove("blocks.1.norm_mlp.bias").unwrap();
    });
    assert_says(&bias, "tensor blocks.1.norm_mlp.bias is missing");
    let shape = error("weaver-rotary", "qwen3_5", |_, tensors| {
        cut(tensors, "blocks.0.qkv_proj.weight");
    });
    assert_says(&shape, "blocks.0.qkv_proj.weight has shape [95, 32]");
    let heads = error("weaver-rotary", "qwen3_5", |config, _| {
        config["num_heads"] = json!(3);
    });
    assert_says(&heads, "3 heads of even width do not make up d_rank, 32");
    let pool = error("weaver-rotary", "qwen3_5", |config, _| {
        config["candidate_pool_size"] = json!(512);
    });
    assert_says(&pool, "chooses among 512 tokens");
    let width = error("weaver-rotary", "llama", |_, _| ());
    assert_says(&width, "made for a target of width 64, this one has 96");
    let blocks = error("weaver-rotary", "qwen3_5", |config, _| {
        config["num_layers"] = json!(1);
    });
    assert_says(&blocks, "unexpected tensors, the first blocks.1.");
}

#[test]
fn one_kind_for_the_other() {
    let target = target("qwen3", KvType::F16);
    let weaver = Drafted::open("weaver-learned").drafter();
    let error = DFlash::load(&weaver, &target).err().unwrap().to_string();
    assert_says(&error, "is no DFlash drafter");
    let dflash = Drafted::open("dflash-qwen3").drafter();
    let error = Weaver::load(&dflash, &target).err().unwrap().to_string();
    assert_says(&error, "is no Weaver");
}
