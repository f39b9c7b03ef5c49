//! lalamo's config.json and the tokenizer beside it.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::Checkpoint;
use crate::description::{
    Description, Mixer, ModelConfig, RopeConfig, RopeScaling, TokenizerSource,
};
use crate::destination::write_file;
use crate::error::Error;
use crate::fields::{pretty, shortest};

/// An error where lalamo has no word for a setting.
pub(super) fn check(checkpoint: &Checkpoint) -> Result<(), Error> {
    let config = &checkpoint.description().config;
    if config.experts.is_some() || config.attention.sliding.is_some() || config.sandwich_norms {
        let what = "models with experts, windows or norms around are not written in lalamo's format; \
                    export to hf";
        return Err(Error::file(checkpoint.path(), what));
    }
    match config.attention.rope.scaling {
        RopeScaling::Factors(_) => Err(Error::file(
            checkpoint.path(),
            "its rotary positions are divided by a list of numbers, which lalamo's settings cannot say; \
             export the model that this file was made from",
        )),
        _ => Ok(()),
    }
}

/// config.json and tokenizer.json.
pub(crate) fn write_texts(checkpoint: &Checkpoint, dir: &Path) -> Result<(), Error> {
    let description = checkpoint.description();
    let config = settings(description);
    write_file(&dir.join("config.json"), &pretty(config))?;
    let (TokenizerSource::Json(tokenizer) | TokenizerSource::Gguf(tokenizer)) =
        &description.tokenizer;
    write_file(&dir.join("tokenizer.json"), tokenizer)
}

fn settings(description: &Description) -> Map<String, Value> {
    let config = &description.config;
    let generation = &description.generation;
    let number = |value: Option<f32>| value.map(shortest);
    let thinks = description
        .chat_template
        .as_ref()
        .is_some_and(|template| template.contains("</think>"));
    let codec = json!({
        "type": "ChatCodecConfig",
        "prompt_template": description.chat_template,
        "output_parser_regex": null,
        "system_role_name": "system",
        "user_role_name": "user",
        "assistant_role_name": "assistant",
        "eos_token": description.eos_token,
        "bos_token": description.bos_token,
        "end_of_thinking_tag": thinks.then_some("</think>"),
        "default_system_prompt": null,
    });
    let decoder = json!({
        "embedding_config": {
            "type": if config.tied { "TiedEmbeddingConfig" } else { "UntiedEmbeddingConfig" },
            "input_scale": null,
            "logit_soft_cap": null,
            "logit_scale": null,
        },
        "transformer_config": {
            "layer_configs": config.layers.iter().map(|mixer| layer(config, *mixer)).collect::<Vec<_>>(),
            "output_norm_config": block_norm(config),
            "model_dim": config.hidden_size,
            "hidden_dim": config.intermediate_size,
        },
        "vocab_size": config.vocab_size,
        "ple_model_config": null,
        "embedding_norm_config": null,
    });
    let sampling = json!({
        "stop_token_ids": generation.eos,
        "temperature": number(generation.temperature),
        "top_k": generation.top_k,
        "top_p": number(generation.top_p),
        "min_p": number(generation.min_p),
        "banned_tokens": null,
        "repetition_penalty": number(generation.repetition_penalty),
        "presence_penalty": null,
        "frequency_penalty": null,
        "suffix_repetition_length": null,
    });
    let all = [
        ("type", json!("LanguageModelConfig")),
        ("token_codec_config", codec),
        ("decoder_config", decoder),
        ("generation_config", sampling),
    ];
    all.map(|(name, value)| (name.to_owned(), value))
        .into_iter()
        .collect()
}

/// A norm of the residual stream or of heads.
fn block_norm(config: &ModelConfig) -> Value {
    norm(config, config.norm_plus_one.then_some(1.0))
}

fn norm(config: &ModelConfig, offset: Option<f32>) -> Value {
    json!({
        "epsilon": shortest(config.norm_eps),
        "scale_offset": offset,
        "upcast_mode": "only_normalization",
        "subtract_mean": false,
        "has_scale": true,
        "has_biases": false,
    })
}

fn layer(config: &ModelConfig, mixer: Mixer) -> Value {
    let (mixer, rope) = match (mixer, &config.delta) {
        (Mixer::Delta, Some(delta)) => {
            let mixer = json!({
                "type": "DeltaNetConfig",
                "in_proj_config": {},
                "conv_config": {"has_biases": false},
                "out_proj_config": {},
                "norm_config": norm(config, None),
                "num_heads": delta.value_heads,
                "num_groups": delta.key_heads,
                "head_dim": delta.key_dim,
                "value_head_dim": delta.value_dim,
                "kernel_size": delta.conv_kernel,
            });
            (mixer, Value::Null)
        }
        _ => (attention(config), rope(config)),
    };
    json!({
        "pre_mixer_norm_config": block_norm(config),
        "mixer_config": mixer,
        "post_mixer_norm_config": null,
        "pre_mlp_norm_config": block_norm(config),
        "mlp_config": {
            "type": "DenseMLPConfig",
            "linear_config": {},
            "activation": {"type": "SiLU", "alpha": 1.0},
            "has_up_biases": config.mlp_bias,
            "has_down_biases": config.mlp_bias,
            "gate_clipping": null,
            "up_clipping": null,
        },
        "post_mlp_norm_config": null,
        "hidden_dim": null,
        "ple_config": null,
        "has_post_layer_scalar": false,
        "kv_source_layer_index": null,
        "rope_config": rope,
    })
}

fn attention(config: &ModelConfig) -> Value {
    let attention = &config.attention;
    let head_norm = attention.qk_norm.then(|| block_norm(config));
    json!({
        "type": "AttentionConfig",
        "qkvg_projection_config": {},
        "out_projection_config": {},
        "query_norm_config": head_norm,
        "key_norm_config": head_norm,
        "num_heads": attention.heads,
        "num_groups": attention.kv_heads,
        "head_dim": attention.head_dim,
        "is_causal": true,
        "scale": null,
        "sliding_window_size": null,
        "logit_soft_cap": null,
        "has_sinks": false,
        "has_qkvg_biases": attention.qkv_bias,
        "has_out_biases": attention.output_bias,
        "has_gate": attention.gated,
        "normalize_values": false,
        "is_kv_sharing": false,
    })
}

fn rope(config: &ModelConfig) -> Value {
    let RopeConfig {
        theta,
        rotary_dim,
        scaling,
    } = &config.attention.rope;
    let mut rope = json!({
        "type": "UnscaledRoPEConfig",
        "base": theta,
        "max_sequence_length": config.max_position,
        "head_dim": rotary_dim,
    });
    match scaling {
        // `check` let no list of factors through.
        RopeScaling::None | RopeScaling::Factors(_) => {}
        RopeScaling::Linear { factor } => {
            rope["type"] = json!("LinearScalingRoPEConfig");
            rope["scaling_factor"] = json!(factor);
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            rope["type"] = json!("LlamaRoPEConfig");
            rope["scaling_factor"] = json!(factor);
            rope["original_context_length"] = json!(original_max_position);
            rope["low_frequency_factor"] = json!(low_freq_factor);
            rope["high_frequency_factor"] = json!(high_freq_factor);
        }
    }
    rope
}
