//! Hugging Face directories of several families: every setting and tensor arrives as meant.
#![allow(missing_docs)]

mod support;

use kozue_checkpoint::description::*;
use kozue_checkpoint::{Checkpoint, Error};
use serde_json::json;
use support::{Dir, Model, value};

fn open(dir: &Dir) -> Checkpoint {
    Checkpoint::open(&dir.path).unwrap_or_else(|error| panic!("{error}"))
}

fn fails(dir: &Dir) -> String {
    match Checkpoint::open(&dir.path) {
        Ok(_) => panic!("opened"),
        Err(error) => text(error),
    }
}

fn text(error: Error) -> String {
    let text = error.to_string();
    assert!(!text.contains('\n'), "more than one line: {text}");
    text
}

#[test]
fn llama_with_old_rope_settings() {
    let dir = Model::llama().write();
    let checkpoint = open(&dir);
    let description = checkpoint.description();
    assert_eq!(description.name, "tiny");
    assert_eq!(
        description.config,
        ModelConfig {
            family: Family::Llama,
            vocab_size: 96,
            hidden_size: 64,
            intermediate_size: 160,
            experts: None,
            layers: vec![Mixer::Attention; 2],
            attention: AttentionConfig {
                heads: 4,
                kv_heads: 2,
                head_dim: 16,
                query_scalar: 16.0,
                qkv_bias: false,
                output_bias: false,
                qk_norm: false,
                gated: false,
                rope: RopeConfig {
                    theta: 500_000.0,
                    rotary_dim: 16,
                    scaling: RopeScaling::Llama3 {
                        factor: 32.0,
                        low_freq_factor: 1.0,
                        high_freq_factor: 4.0,
                        original_max_position: 8192,
                    },
                },
                sliding: None,
            },
            delta: None,
            norm_eps: 1e-5,
            norm_plus_one: false,
            tied: false,
            max_position: 512,
            mlp_bias: false,
            gelu: false,
            sandwich_norms: false,
            scaled_embedding: false,
        }
    );
    assert_eq!(description.generation.eos, [2]);
    assert_eq!(description.generation.bos, None, "its tokenizer adds none");
}

#[test]
fn qwen35_alone_and_inside_a_multimodal_model() {
    let plain = Model::qwen35().write();
    let nested = Model::qwen35_multimodal().write_sharded();
    let (plain, nested) = (open(&plain), open(&nested));
    let config = &plain.description().config;
    assert_eq!(config, &nested.description().config);
    assert_eq!(config.family, Family::Qwen35);
    assert_eq!(
        config.layers,
        [Mixer::Delta, Mixer::Delta, Mixer::Delta, Mixer::Attention]
    );
    assert_eq!(config.attention.rope.rotary_dim, 8);
    assert_eq!(config.attention.rope.scaling, RopeScaling::None);
    assert!(config.attention.gated && config.attention.qk_norm && config.norm_plus_one);
    assert!(config.tied);
    let delta = DeltaConfig {
        key_heads: 2,
        value_heads: 4,
        key_dim: 16,
        value_dim: 16,
        conv_kernel: 4,
    };
    assert_eq!(config.delta, Some(delta));
    assert!(nested.has("model.layers.3.self_attn.q_proj.weight"));
    assert!(!nested.has("mtp.fc.weight"), "set aside");
    assert!(
        !nested.has("model.visual.patch_embed.proj.weight"),
        "set aside"
    );
    assert_eq!(nested.description().generation.eos, [2]);
}

#[test]
fn layer_types_follow_the_interval_where_they_are_not_listed() {
    let mut model = Model::qwen35();
    model.config.as_object_mut().unwrap().remove("layer_types");
    let layers = open(&model.write()).description().config.layers.clone();
    assert_eq!(
        layers,
        [Mixer::Delta, Mixer::Delta, Mixer::Delta, Mixer::Attention]
    );
}

#[test]
fn qwen2_has_biases_and_qwen3_head_norms() {
    let qwen2 = Model::qwen2().write();
    let attention = open(&qwen2).description().config.attention.clone();
    assert!(attention.qkv_bias && !attention.output_bias && !attention.qk_norm);
    let checkpoint = open(&qwen2);
    assert_eq!(checkpoint.description().generation.eos, [2, 3]);
    let name = "model.layers.0.self_attn.k_proj.bias";
    let expected: Vec<f32> = (0..32).map(|at| value(name, at)).collect();
    assert_eq!(checkpoint.vector(name, 32).unwrap(), expected);

    let qwen3 = open(&Model::qwen3().write())
        .description()
        .config
        .attention
        .clone();
    assert!(!qwen3.qkv_bias && qwen3.qk_norm);
    assert_eq!((qwen3.head_dim, qwen3.rope.rotary_dim), (32, 32));
    assert_eq!(qwen3.rope.theta, 1e6);
}

#[test]
fn matrices_keep_their_values_and_places() {
    for dir in [
        Model::qwen35_multimodal().write(),
        Model::qwen35_multimodal().write_sharded(),
    ] {
        let checkpoint = open(&dir);
        let matrix = checkpoint
            .matrix("model.layers.0.mlp.up_proj.weight", 128, 64)
            .unwrap();
        assert_eq!((matrix.n(), matrix.k()), (128, 64));
        let mut row = vec![0.0; 64];
        matrix.row_into(77, &mut row);
        let stored = "model.layers.0.mlp.up_proj.weight";
        let expected: Vec<f32> = (0..64).map(|at| value(stored, 77 * 64 + at)).collect();
        assert_eq!(row, expected);
        let taps = checkpoint
            .vector("model.layers.1.linear_attn.conv1d.weight", 512)
            .unwrap();
        let stored = "model.layers.1.linear_attn.conv1d.weight";
        assert_eq!(taps[511], value(stored, 511));
    }
}

#[test]
fn a_head_beside_a_tied_embedding_is_set_aside() {
    let mut model = Model::qwen2();
    model
        .tensors
        .push(support::Tensor::filled("lm_head.weight", "BF16", &[96, 64]));
    model.tensors.push(support::Tensor::filled(
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "F32",
        &[8],
    ));
    let checkpoint = open(&model.write());
    assert!(!checkpoint.has("lm_head.weight"));
}

#[test]
fn finish_names_what_was_not_read() {
    let model = Model::qwen2();
    let dir = model.write();
    let checkpoint = open(&dir);
    for tensor in &model.tensors {
        if tensor.name != "model.norm.weight" {
            checkpoint
                .vector(&tensor.name, tensor.shape.iter().product())
                .unwrap();
        }
    }
    let error = text(checkpoint.finish().unwrap_err());
    assert!(
        error.ends_with(
            "1 unexpected tensor, the first model.norm.weight; the settings describe another model"
        ),
        "{error}"
    );
    checkpoint.vector("model.norm.weight", 64).unwrap();
    checkpoint.finish().unwrap();
}

#[test]
fn asking_for_another_shape_is_an_error() {
    let dir = Model::qwen2().write();
    let checkpoint = open(&dir);
    let error = text(
        checkpoint
            .matrix("model.embed_tokens.weight", 64, 96)
            .err()
            .unwrap(),
    );
    assert!(
        error.contains("model.embed_tokens.weight has shape [96, 64]"),
        "{error}"
    );
    assert!(error.contains("[64, 96]"), "{error}");
    let error = text(checkpoint.vector("model.norm.weight", 65).err().unwrap());
    assert!(
        error.contains("model.norm.weight has shape [64]"),
        "{error}"
    );
    let error = text(checkpoint.vector("model.norm.scale", 64).err().unwrap());
    assert!(
        error.contains("tensor model.norm.scale is missing"),
        "{error}"
    );
}

#[test]
fn rope_styles() {
    let rope = |changes: &[(&str, serde_json::Value)]| {
        let mut model = Model::llama();
        model.config.as_object_mut().unwrap().remove("rope_scaling");
        for (name, value) in changes {
            model.config[name] = value.clone();
        }
        open(&model.write())
            .description()
            .config
            .attention
            .rope
            .clone()
    };
    let linear = RopeScaling::Linear { factor: 4.0 };
    assert_eq!(
        rope(&[("rope_scaling", json!({"type": "linear", "factor": 4.0}))]).scaling,
        linear
    );
    let both = rope(&[(
        "rope_parameters",
        json!({"rope_type": "linear", "factor": 4, "rope_theta": 7000}),
    )]);
    assert_eq!((both.theta, both.scaling), (7000.0, linear));
    assert_eq!(rope(&[("rope_theta", json!(null))]).theta, 10_000.0);
    assert_eq!(rope(&[("partial_rotary_factor", json!(0.5))]).rotary_dim, 8);
    let mrope = json!({"type": "mrope", "mrope_section": [2, 3, 3]});
    assert_eq!(rope(&[("rope_scaling", mrope)]).scaling, RopeScaling::None);
}

#[test]
fn chat_template_in_every_place() {
    let template = |files: &[(&str, &str)]| {
        let dir = Model::qwen2().write();
        for (name, text) in files {
            dir.put(name, text);
        }
        open(&dir).description().chat_template.clone()
    };
    assert_eq!(template(&[]), None);
    let config = ("tokenizer_config.json", r#"{"chat_template": "config"}"#);
    let json = ("chat_template.json", r#"{"chat_template": "json"}"#);
    let jinja = ("chat_template.jinja", "jinja\n");
    assert_eq!(template(&[config]).as_deref(), Some("config"));
    assert_eq!(template(&[config, json]).as_deref(), Some("json"));
    assert_eq!(template(&[config, json, jinja]).as_deref(), Some("jinja\n"));
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"}]}"#;
    assert_eq!(
        template(&[("tokenizer_config.json", list)]).as_deref(),
        Some("plain")
    );
}

#[test]
fn a_template_list_without_default_is_an_error() {
    let dir = Model::qwen2().write();
    dir.put(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "a"}, {"name": "b"}]}"#,
    );
    let error = fails(&dir);
    assert!(
        error.ends_with("chat_template: its list has no template named \"default\""),
        "{error}"
    );
}

#[test]
fn special_tokens_and_generation_defaults() {
    let dir = Model::llama().write();
    dir.put(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "<|im_end|>",
            "add_bos_token": true}"#,
    );
    let description = open(&dir).description().clone();
    assert_eq!(description.bos_token.as_deref(), Some("<s>"));
    assert_eq!(description.eos_token.as_deref(), Some("<|im_end|>"));
    // Without generation_config.json, config.json's end of text and the tokenizer's end of turn.
    assert_eq!(description.generation.eos, [2, 5]);
    assert_eq!(description.generation.bos, Some(1));

    dir.put(
        "generation_config.json",
        r#"{"eos_token_id": [7, 8], "do_sample": true, "temperature": 0.6, "top_p": 0.95,
            "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}"#,
    );
    let generation = open(&dir).description().generation.clone();
    assert_eq!(
        generation,
        GenerationDefaults {
            eos: vec![7, 8],
            bos: Some(1),
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            min_p: Some(0.0),
            repetition_penalty: Some(1.05),
        }
    );
    dir.put(
        "generation_config.json",
        r#"{"do_sample": false, "temperature": 0.6}"#,
    );
    assert_eq!(open(&dir).description().generation.temperature, Some(0.0));
}

#[test]
fn bos_comes_from_the_tokenizers_own_template() {
    let dir = Model::llama().write();
    dir.put(
        "tokenizer.json",
        r#"{"added_tokens": [], "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel"},
            {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<b>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
             "special_tokens": {"<b>": {"id": "<b>", "ids": [77], "tokens": ["<b>"]}}}]}}"#,
    );
    assert_eq!(open(&dir).description().generation.bos, Some(77));
    dir.put("tokenizer_config.json", r#"{"add_bos_token": false}"#);
    assert_eq!(open(&dir).description().generation.bos, None);
}

#[test]
fn the_name_in_a_download_cache_is_the_repositorys() {
    let dir = Model::qwen2().write();
    let snapshots = dir
        .root
        .path()
        .join("models--Owner--Some-Model-1B/snapshots");
    std::fs::create_dir_all(&snapshots).unwrap();
    let cached = snapshots.join("0123abcd");
    std::fs::rename(&dir.path, &cached).unwrap();
    let checkpoint = Checkpoint::open(&cached).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(checkpoint.description().name, "Some-Model-1B");
}
