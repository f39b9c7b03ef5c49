//! Drafters' directories are quantised like models, with their settings kept as they are.
#![allow(missing_docs)]

mod support;

use std::fs;
use std::ops::ControlFlow;

use kozue_checkpoint::{Drafter, DrafterKind, Network, Options, Size, Tensors, quantize};
use kozue_kernels::{Cpu, Matrix};
use serde_json::{Value, json};
use support::{Dir, Model, Tensor, value};

fn dflash() -> Dir {
    let mut model = Model::qwen3();
    model.config["architectures"] = json!(["DFlashDraftModel"]);
    model.config["block_size"] = json!(16);
    model.config["dflash_config"] = json!({"mask_token_id": 7, "target_layer_ids": [0, 2]});
    model.tensors = vec![
        Tensor::filled("fc.weight", "BF16", &[64, 128]),
        Tensor::filled("hidden_norm.weight", "BF16", &[64]),
        Tensor::filled("layers.0.self_attn.q_proj.weight", "BF16", &[128, 64]),
        Tensor::filled("layers.0.mlp.narrow.weight", "BF16", &[64, 40]),
    ];
    model.write()
}

#[test]
fn a_dflash_directory() {
    let dir = dflash();
    let target = dir.root.path().join("packed");
    let options = Options {
        size: Size::L,
        head: None,
        group: 32,
        force: false,
    };
    let cpu = Cpu::new(Some(2));
    let report = quantize(&cpu, &dir.path, &target, options, &mut |_| {
        ControlFlow::Continue(())
    });
    let report = report.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.tensors.len(), 4);
    assert_eq!(report.weights, 64 * 128 + 64 + 128 * 64 + 64 * 40);

    let (before, after) = (
        Drafter::open(&dir.path, Network::DFlash).unwrap(),
        Drafter::open(&target, Network::DFlash).unwrap(),
    );
    assert!(matches!(after.kind(), DrafterKind::DFlash(_)));
    assert_eq!(before.kind(), after.kind());
    assert_eq!(
        after.vector("hidden_norm.weight", 64).unwrap()[5],
        value("hidden_norm.weight", 5)
    );
    let Matrix::Packed(fc) = after.matrix("fc.weight", 64, 128).unwrap() else {
        panic!("not packed")
    };
    let mut row = vec![0.0; 128];
    fc.row_into(63, &mut row);
    for (at, found) in row.into_iter().enumerate() {
        let expected = value("fc.weight", 63 * 128 + at);
        assert!((found - expected).abs() < 0.005, "{found}, {expected}");
    }
    let Matrix::Packed(_) = after
        .matrix("layers.0.self_attn.q_proj.weight", 128, 64)
        .unwrap()
    else {
        panic!("not packed")
    };
    let Matrix::Dense(_) = after.matrix("layers.0.mlp.narrow.weight", 64, 40).unwrap() else {
        panic!("40 inputs cannot be rotated")
    };
    after.finish().unwrap();
    let text = fs::read_to_string(target.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(config["kozue"]["source"], "tiny");
    assert_eq!(config["dflash_config"]["mask_token_id"], 7);
}

#[test]
fn a_drafter_that_cannot_be_opened_is_not_converted() {
    let dir = dflash();
    let text = fs::read_to_string(dir.path.join("config.json")).unwrap();
    dir.put(
        "config.json",
        &text.replace("\"mask_token_id\":7", "\"mask_token_id\":[1,2]"),
    );
    let target = dir.root.path().join("packed");
    let options = Options {
        size: Size::M,
        head: None,
        group: 64,
        force: false,
    };
    let cpu = Cpu::new(Some(1));
    let error = quantize(&cpu, &dir.path, &target, options, &mut |_| {
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("dflash_config.mask_token_id: must be one token id"),
        "{error}"
    );
    assert!(!target.exists());
}

#[test]
fn a_drafter_has_no_head_to_choose_bits_for() {
    let dir = dflash();
    let options = Options {
        size: Size::M,
        head: Some(Size::L),
        group: 64,
        force: false,
    };
    let target = dir.root.path().join("packed");
    let error = quantize(&Cpu::new(Some(1)), &dir.path, &target, options, &mut |_| {
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.ends_with("is a drafter, which has no embedding table of its own; leave --head out"),
        "{error}"
    );
}
