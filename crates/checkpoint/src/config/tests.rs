//! Settings as published models have them.

use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::description::{RopeConfig, RopeScaling};
use crate::layout::layout;

fn read(config: Value) -> ModelConfig {
    let map = config.as_object().unwrap();
    let path = Path::new("config.json");
    let config = ConfigFile::from_object(path, map).unwrap().model;
    let again = ConfigFile::from_object(path, &config_json(&config)).unwrap();
    assert_eq!(again.model, config, "written and read again");
    config
}

fn says(config: Value) -> String {
    let map = config.as_object().unwrap();
    let read = ConfigFile::from_object(Path::new("config.json"), map);
    read.unwrap_err().to_string()
}

/// Weights of a model, and those that a token uses.
fn weights(config: &ModelConfig) -> (u64, u64) {
    let slots = layout(config);
    let sizes = slots.iter().map(|slot| {
        let all = slot.shape.iter().map(|&n| n as u64).product();
        (all, config.read_by_a_token(&slot.name, all))
    });
    sizes.fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1))
}

fn qwen3_30b_a3b() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
        "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936,
    })
}

fn qwen35_35b_a3b() -> Value {
    json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": {
            "attn_output_gate": true, "full_attention_interval": 4, "head_dim": 256,
            "hidden_act": "silu", "hidden_size": 2048, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_value_head_dim": 128, "max_position_embeddings": 262144,
            "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512,
            "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 40, "num_key_value_heads": 2,
            "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
            },
            "shared_expert_intermediate_size": 512, "vocab_size": 248320,
        },
        "tie_word_embeddings": false,
    })
}

#[test]
fn qwen3_with_experts() {
    let config = read(qwen3_30b_a3b());
    assert_eq!(config.family, Family::Qwen3);
    let experts = ExpertsConfig {
        count: 128,
        chosen: 8,
        normalised: true,
        shared: None,
        dense: None,
    };
    assert_eq!(config.experts, Some(experts));
    assert_eq!(config.intermediate_size, 768);
    // The model card: 30.5 billion, 3.3 billion of them active.
    assert_eq!(weights(&config), (30_532_122_624, 3_353_032_704));
    for (field, value, what) in [
        (
            "mlp_only_layers",
            json!([0, "1"]),
            "mlp_only_layers: must hold numbers of layers",
        ),
        (
            "decoder_sparse_step",
            json!(0),
            "decoder_sparse_step: must not be 0",
        ),
        (
            "num_experts_per_tok",
            json!(129),
            "129 is more than num_experts, 128",
        ),
        ("num_experts", json!(5000), "num_experts: 5000 is absurd"),
        (
            "moe_intermediate_size",
            json!(null),
            "moe_intermediate_size: is missing",
        ),
    ] {
        let mut config = qwen3_30b_a3b();
        config[field] = value;
        let said = says(config);
        assert!(said.contains(what), "{said}");
    }
}

#[test]
fn layers_without_experts_among_others() {
    let dense = |named: Value, step: u64| {
        let mut config = qwen3_30b_a3b();
        config["num_hidden_layers"] = json!(6);
        config["mlp_only_layers"] = named;
        config["decoder_sparse_step"] = json!(step);
        let config = read(config);
        let widths = (0..6).filter_map(|layer| Some((layer, config.feed_forward(layer).err()?)));
        widths.collect::<Vec<_>>()
    };
    assert_eq!(dense(json!([]), 1), []);
    assert_eq!(dense(json!([4, 0, 99]), 1), [(0, 6144), (4, 6144)]);
    assert_eq!(
        dense(json!([1]), 2),
        [(0, 6144), (1, 6144), (2, 6144), (4, 6144)]
    );
    let mut without = qwen3_30b_a3b();
    without["intermediate_size"] = json!(null);
    read(without.clone());
    without["mlp_only_layers"] = json!([2]);
    let said = says(without);
    assert!(said.contains("intermediate_size: is missing"), "{said}");
}

#[test]
fn qwen35_with_experts() {
    let config = read(qwen35_35b_a3b());
    assert_eq!(config.family, Family::Qwen35);
    assert_eq!(config.count(Mixer::Delta), 30);
    let experts = config.experts.as_ref().unwrap();
    assert!(experts.normalised && experts.shared == Some(512));
    let (all, active) = weights(&config);
    assert_eq!((all / 1_000_000_000, active / 1_000_000_000), (34, 3));
}

#[test]
fn mistral_with_and_without_a_window() {
    let with = |window: Value| {
        let mut config = json!({
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "tie_word_embeddings": false, "vocab_size": 32768,
        });
        config["sliding_window"] = window;
        read(config)
    };
    let old = with(json!(4096));
    assert_eq!(old.layers, [Mixer::Sliding; 32]);
    let sliding = old.attention.sliding.unwrap();
    assert_eq!((sliding.window, sliding.rope), (4096, old.attention.rope));
    let new = with(json!(null));
    assert_eq!(new.layers, [Mixer::Attention; 32]);
    assert_eq!((new.attention.sliding, new.attention.head_dim), (None, 128));
    // A settings file of transformers leaves out what is the class's default.
    let mut left_out = json!({
        "hidden_size": 64, "intermediate_size": 64, "model_type": "mistral",
        "num_attention_heads": 16, "num_hidden_layers": 1, "vocab_size": 96,
    });
    let config = read(left_out.clone());
    assert_eq!(config.attention.sliding.unwrap().window, 4096);
    assert_eq!(
        (config.attention.kv_heads, config.max_position),
        (8, 131_072)
    );
    left_out["num_key_value_heads"] = json!(null);
    assert_eq!(read(left_out).attention.kv_heads, 16);
}

#[test]
fn gemma3_alone_and_inside_a_multimodal_model() {
    let rope = |theta: f64, scaling: RopeScaling| RopeConfig {
        theta,
        rotary_dim: 256,
        scaling,
    };
    let small = read(json!({
        "attention_bias": false, "attn_logit_softcapping": null, "final_logit_softcapping": null,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    }));
    assert!(small.tied && small.gelu && small.sandwich_norms && small.scaled_embedding);
    assert!(small.norm_plus_one && small.attention.qk_norm);
    assert_eq!(
        (small.count(Mixer::Sliding), small.count(Mixer::Attention)),
        (22, 4)
    );
    assert_eq!(small.layers[5], Mixer::Attention);
    assert_eq!(small.attention.rope, rope(1e6, RopeScaling::None));
    let sliding = small.attention.sliding.as_ref().unwrap();
    assert_eq!(
        (sliding.window, &sliding.rope),
        (512, &rope(1e4, RopeScaling::None))
    );
    assert_eq!(weights(&small).0, 999_885_952);
    // What the settings of the 4B leave to the class.
    let nested = read(json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }));
    let attention = &nested.attention;
    assert_eq!(
        (attention.heads, attention.kv_heads, attention.head_dim),
        (8, 4, 256)
    );
    assert_eq!((nested.vocab_size, nested.max_position), (262_208, 131_072));
    assert_eq!(
        attention.rope,
        rope(1e6, RopeScaling::Linear { factor: 8.0 })
    );
    assert_eq!(
        attention.sliding.as_ref().unwrap().rope,
        rope(1e4, RopeScaling::None)
    );
    assert!(nested.tied);
    let said = says(json!({
        "hidden_size": 64, "intermediate_size": 64, "model_type": "gemma3_text",
        "num_hidden_layers": 1, "attn_logit_softcapping": 50.0,
    }));
    assert!(
        said.contains("attn_logit_softcapping: capped logits"),
        "{said}"
    );
    let said = says(json!({
        "hidden_size": 64, "intermediate_size": 64, "model_type": "gemma3_text",
        "num_hidden_layers": 1, "rope_parameters": {"rope_type": "yarn", "factor": 8.0},
    }));
    assert!(
        said.contains("rope_parameters: Gemma 3 has one object"),
        "{said}"
    );
    let written = read(json!({
        "hidden_size": 64, "intermediate_size": 64, "model_type": "gemma3_text",
        "num_hidden_layers": 4, "_sliding_window_pattern": 2,
    }));
    assert_eq!(written.count(Mixer::Attention), 2);
}
