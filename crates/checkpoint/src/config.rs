//! config.json, as transformers writes it for the known families, read and written.

mod gemma3;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::description::{
    AttentionConfig, DeltaConfig, DenseLayers, ExpertsConfig, Family, Mixer, ModelConfig,
    SlidingConfig,
};
use crate::error::Error;
use crate::fields::{Fields, shortest};

const MAX_WIDTH: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;
const MAX_HEADS: usize = 1 << 14;
const MAX_HEAD_DIM: usize = 1 << 14;
const MAX_POSITION: usize = 1 << 40;
const MAX_EXPERTS: usize = 1 << 12;

/// What config.json says: the model's shape, and its token ids.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ConfigFile {
    pub model: ModelConfig,
    pub eos: Option<Vec<u32>>,
    pub bos: Option<u32>,
}

impl ConfigFile {
    /// Read the JSON of a config.json; `path` is for errors.
    pub fn from_object(path: &Path, map: &Map<String, Value>) -> Result<ConfigFile, Error> {
        let top = Fields::new(path, map);
        // Multimodal models keep the language model's settings one level down.
        let inner = top.object("text_config")?;
        let text = inner.unwrap_or(top);
        let family = family(&top, &text)?;
        // Class default of transformers.
        let usual = family.0 == Family::Gemma3;
        let tied = match (top.flag("tie_word_embeddings")?, inner) {
            (Some(tied), _) => tied,
            (None, Some(text)) => text.flag("tie_word_embeddings")?.unwrap_or(usual),
            (None, None) => usual,
        };
        let eos = match text.token_ids("eos_token_id")? {
            Some(ids) => Some(ids),
            None => top.token_ids("eos_token_id")?,
        };
        let bos = text
            .token_ids("bos_token_id")?
            .and_then(|ids| ids.first().copied());
        Ok(ConfigFile {
            model: model(family, tied, &text)?,
            eos,
            bos,
        })
    }
}

/// The family, and whether it is of the form with experts.
fn family(top: &Fields, text: &Fields) -> Result<(Family, bool), Error> {
    let name = match text.text("model_type")? {
        Some(name) => name,
        None => top.text("model_type")?.ok_or_else(|| {
            top.error(
                "model_type",
                "is missing; not a config.json of transformers",
            )
        })?,
    };
    match name {
        "qwen3_5" | "qwen3_5_text" => Ok((Family::Qwen35, false)),
        "qwen3_5_moe" | "qwen3_5_moe_text" => Ok((Family::Qwen35, true)),
        "qwen3" => Ok((Family::Qwen3, false)),
        "qwen3_moe" => Ok((Family::Qwen3, true)),
        "qwen2" => Ok((Family::Qwen2, false)),
        "llama" => Ok((Family::Llama, false)),
        "mistral" => Ok((Family::Mistral, false)),
        "gemma3" | "gemma3_text" => Ok((Family::Gemma3, false)),
        other => Err(text.error(
            "model_type",
            format!(
                "{other:?} is not supported; Kozue runs qwen3_5, qwen3_5_moe, qwen3, qwen3_moe, qwen2, \
                 llama, mistral and gemma3"
            ),
        )),
    }
}

fn model((family, moe): (Family, bool), tied: bool, text: &Fields) -> Result<ModelConfig, Error> {
    let hidden_size = text.required_size("hidden_size", MAX_WIDTH)?;
    let layers = layers(family, text)?;
    let gemma = family == Family::Gemma3;
    let (field, known) = if gemma {
        gemma3::refuse_unsupported(text)?;
        ("hidden_activation", ["gelu_pytorch_tanh"; 2])
    } else {
        ("hidden_act", ["silu", "swish"])
    };
    if let Some(act) = text.text(field)?.filter(|act| !known.contains(act)) {
        let what = format!("{act:?} is not supported; only {} is", known[0]);
        return Err(text.error(field, what));
    }
    if text.flag("use_sliding_window")? == Some(true) {
        return Err(text.error("use_sliding_window", "sliding windows are not supported"));
    }
    if text.flag("attn_output_gate")? == Some(false) {
        return Err(text.error(
            "attn_output_gate",
            "attention without its gate is not supported",
        ));
    }
    let attention = attention(family, hidden_size, &layers, text)?;
    let experts = if moe {
        Some(experts(family, layers.len(), text)?)
    } else {
        None
    };
    let delta = match family {
        Family::Qwen35 if layers.contains(&Mixer::Delta) => Some(delta(text)?),
        _ => None,
    };
    Ok(ModelConfig {
        family,
        vocab_size: match text.size("vocab_size", MAX_VOCAB)? {
            None if gemma => gemma3::VOCAB_SIZE,
            _ => text.required_size("vocab_size", MAX_VOCAB)?,
        },
        hidden_size,
        intermediate_size: match experts {
            None => text.required_size("intermediate_size", MAX_WIDTH)?,
            Some(_) => text.required_size("moe_intermediate_size", MAX_WIDTH)?,
        },
        experts,
        layers,
        attention,
        delta,
        norm_eps: text.positive_f32("rms_norm_eps")?.unwrap_or(1e-6),
        norm_plus_one: family == Family::Qwen35 || gemma,
        tied,
        max_position: match text.size("max_position_embeddings", MAX_POSITION)? {
            Some(n) => n,
            // Class defaults of transformers.
            None => match family {
                Family::Llama => 2048,
                Family::Mistral | Family::Gemma3 => 131_072,
                Family::Qwen35 | Family::Qwen3 | Family::Qwen2 => 32768,
            },
        },
        mlp_bias: family == Family::Llama && text.flag("mlp_bias")?.unwrap_or(false),
        gelu: gemma,
        sandwich_norms: gemma,
        scaled_embedding: gemma,
    })
}

/// The shapes of a DFlash drafter, whose layers are Qwen3's.
pub(crate) fn draft_shape(top: &Fields) -> Result<ModelConfig, Error> {
    let hidden_size = top.required_size("hidden_size", MAX_WIDTH)?;
    let layers = vec![Mixer::Attention; top.required_size("num_hidden_layers", MAX_LAYERS)?];
    Ok(ModelConfig {
        family: Family::Qwen3,
        vocab_size: top.required_size("vocab_size", MAX_VOCAB)?,
        hidden_size,
        intermediate_size: top.required_size("intermediate_size", MAX_WIDTH)?,
        experts: None,
        attention: attention(Family::Qwen3, hidden_size, &layers, top)?,
        layers,
        delta: None,
        norm_eps: top.positive_f32("rms_norm_eps")?.unwrap_or(1e-6),
        norm_plus_one: false,
        tied: false,
        max_position: top
            .size("max_position_embeddings", MAX_POSITION)?
            .unwrap_or(32768),
        mlp_bias: false,
        gelu: false,
        sandwich_norms: false,
        scaled_embedding: false,
    })
}

fn layers(family: Family, text: &Fields) -> Result<Vec<Mixer>, Error> {
    let count = text.required_size("num_hidden_layers", MAX_LAYERS)?;
    if let Some(types) = text.list("layer_types")? {
        if types.len() != count {
            return Err(text.error(
                "layer_types",
                format!(
                    "names {} layers, but num_hidden_layers is {count}",
                    types.len()
                ),
            ));
        }
        let mixer = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Ok(Mixer::Attention),
            Some("sliding_attention") if matches!(family, Family::Mistral | Family::Gemma3) => {
                Ok(Mixer::Sliding)
            }
            Some("linear_attention") if family == Family::Qwen35 => Ok(Mixer::Delta),
            _ => Err(text.error("layer_types", format!("{kind} is not supported"))),
        };
        return types.iter().map(mixer).collect();
    }
    match family {
        Family::Qwen35 => {}
        Family::Gemma3 => return gemma3::layers(count, text),
        Family::Mistral if !text.is_null("sliding_window") => {
            return Ok(vec![Mixer::Sliding; count]);
        }
        _ => return Ok(vec![Mixer::Attention; count]),
    }
    let interval = text
        .size("full_attention_interval", MAX_LAYERS)?
        .unwrap_or(4);
    let mixer = |index: usize| {
        if (index + 1).is_multiple_of(interval) {
            Mixer::Attention
        } else {
            Mixer::Delta
        }
    };
    Ok((0..count).map(mixer).collect())
}

fn attention(
    family: Family,
    hidden: usize,
    layers: &[Mixer],
    text: &Fields,
) -> Result<AttentionConfig, Error> {
    let heads = match text.size("num_attention_heads", MAX_HEADS)? {
        None if family == Family::Gemma3 => gemma3::HEADS,
        _ => text.required_size("num_attention_heads", MAX_HEADS)?,
    };
    let kv_heads = match text.size("num_key_value_heads", MAX_HEADS)? {
        Some(kv_heads) => kv_heads,
        // Class defaults of transformers.
        None if family == Family::Gemma3 => gemma3::KV_HEADS,
        None if family == Family::Mistral && !text.is_null("num_key_value_heads") => 8,
        None => heads,
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(text.error(
            "num_key_value_heads",
            format!("{kv_heads} does not divide num_attention_heads, {heads}"),
        ));
    }
    let head_dim = match (text.size("head_dim", MAX_HEAD_DIM)?, family) {
        (Some(dim), _) => dim,
        // Class defaults of transformers.
        (None, Family::Qwen35 | Family::Gemma3) => 256,
        (None, Family::Qwen3) => 128,
        (None, _) if hidden.is_multiple_of(heads) => hidden / heads,
        (None, _) => {
            return Err(text.error(
                "num_attention_heads",
                format!("{heads} does not divide hidden_size, {hidden}, and head_dim is missing"),
            ));
        }
    };
    let bias = family != Family::Mistral && text.flag("attention_bias")?.unwrap_or(false);
    let (rope, local) = if family == Family::Gemma3 {
        gemma3::ropes(head_dim, text)?
    } else {
        let rope = rope::read(head_dim, text)?;
        (rope.clone(), rope)
    };
    let sliding = match layers.contains(&Mixer::Sliding) {
        false => None,
        true => Some(SlidingConfig {
            // Class default of transformers.
            window: text.size("sliding_window", MAX_POSITION)?.unwrap_or(4096),
            rope: local,
        }),
    };
    Ok(AttentionConfig {
        heads,
        kv_heads,
        head_dim,
        query_scalar: match family {
            Family::Gemma3 => text.positive("query_pre_attn_scalar")?.unwrap_or(256.0),
            _ => head_dim as f64,
        },
        qkv_bias: family == Family::Qwen2 || bias,
        output_bias: family != Family::Qwen2 && bias,
        qk_norm: matches!(family, Family::Qwen35 | Family::Qwen3 | Family::Gemma3),
        gated: family == Family::Qwen35,
        rope,
        sliding,
    })
}

/// Which of Qwen3-MoE's `count` layers have no experts: those that it names, and all but every so many.
fn dense_layers(count: usize, text: &Fields) -> Result<Option<DenseLayers>, Error> {
    const NAMED: &str = "mlp_only_layers";
    let named: Option<Vec<u64>> = text
        .list(NAMED)?
        .unwrap_or_default()
        .iter()
        .map(Value::as_u64)
        .collect();
    let named = named.ok_or_else(|| text.error(NAMED, "must hold numbers of layers"))?;
    let step = text.size("decoder_sparse_step", MAX_LAYERS)?.unwrap_or(1);
    let dense =
        |&layer: &usize| named.contains(&(layer as u64)) || !(layer + 1).is_multiple_of(step);
    let layers: Vec<usize> = (0..count).filter(dense).collect();
    if layers.is_empty() {
        return Ok(None);
    }
    Ok(Some(DenseLayers {
        layers,
        intermediate_size: text.required_size("intermediate_size", MAX_WIDTH)?,
    }))
}

fn experts(family: Family, layers: usize, text: &Fields) -> Result<ExpertsConfig, Error> {
    let count = match text.size("num_local_experts", MAX_EXPERTS)? {
        Some(count) => count,
        None => text.required_size("num_experts", MAX_EXPERTS)?,
    };
    let chosen = text.required_size("num_experts_per_tok", MAX_EXPERTS)?;
    if chosen > count {
        let what = format!("{chosen} is more than num_experts, {count}");
        return Err(text.error("num_experts_per_tok", what));
    }
    let qwen35 = family == Family::Qwen35;
    Ok(ExpertsConfig {
        count,
        chosen,
        normalised: qwen35 || text.flag("norm_topk_prob")?.unwrap_or(false),
        shared: if qwen35 {
            Some(text.required_size("shared_expert_intermediate_size", MAX_WIDTH)?)
        } else {
            None
        },
        dense: if qwen35 {
            None
        } else {
            dense_layers(layers, text)?
        },
    })
}

fn delta(text: &Fields) -> Result<DeltaConfig, Error> {
    let delta = DeltaConfig {
        key_heads: text.required_size("linear_num_key_heads", MAX_HEADS)?,
        value_heads: text.required_size("linear_num_value_heads", MAX_HEADS)?,
        key_dim: text.required_size("linear_key_head_dim", MAX_HEAD_DIM)?,
        value_dim: text.required_size("linear_value_head_dim", MAX_HEAD_DIM)?,
        conv_kernel: text.required_size("linear_conv_kernel_dim", 64)?,
    };
    if !delta.value_heads.is_multiple_of(delta.key_heads) {
        return Err(text.error(
            "linear_num_value_heads",
            format!(
                "{} is no multiple of linear_num_key_heads, {}",
                delta.value_heads, delta.key_heads
            ),
        ));
    }
    Ok(delta)
}

/// The config.json that [`ConfigFile::from_object`] reads back as `config`; transformers reads it too,
/// save for per-frequency rotary divisors.
pub(crate) fn config_json(config: &ModelConfig) -> Map<String, Value> {
    let (attention, moe) = (&config.attention, config.experts.is_some());
    let (model_type, architecture) = match config.family {
        Family::Qwen35 if moe => ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        Family::Qwen35 => ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        Family::Qwen3 if moe => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        Family::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
        Family::Llama => ("llama", "LlamaForCausalLM"),
        Family::Mistral => ("mistral", "MistralForCausalLM"),
        Family::Gemma3 => ("gemma3_text", "Gemma3ForCausalLM"),
    };
    let mut map = Map::new();
    let mut put = |name: &str, value: Value| map.insert(name.to_owned(), value);
    put("architectures", json!([architecture]));
    put("model_type", json!(model_type));
    put("vocab_size", json!(config.vocab_size));
    put("hidden_size", json!(config.hidden_size));
    match &config.experts {
        None => {
            put("intermediate_size", json!(config.intermediate_size));
        }
        Some(experts) => {
            put("moe_intermediate_size", json!(config.intermediate_size));
            put("num_experts", json!(experts.count));
            put("num_experts_per_tok", json!(experts.chosen));
            put("norm_topk_prob", json!(experts.normalised));
            put("shared_expert_intermediate_size", json!(experts.shared));
            if let Some(dense) = &experts.dense {
                put("mlp_only_layers", json!(dense.layers));
                put("intermediate_size", json!(dense.intermediate_size));
            }
        }
    }
    put("num_hidden_layers", json!(config.layers.len()));
    put("num_attention_heads", json!(attention.heads));
    put("num_key_value_heads", json!(attention.kv_heads));
    put("head_dim", json!(attention.head_dim));
    if !config.gelu {
        put("hidden_act", json!("silu"));
    }
    put("rms_norm_eps", json!(shortest(config.norm_eps)));
    put("max_position_embeddings", json!(config.max_position));
    put("tie_word_embeddings", json!(config.tied));
    let rope = match config.family {
        Family::Gemma3 => gemma3::rope_json(attention),
        _ => rope::json(&attention.rope, attention.head_dim),
    };
    put("rope_parameters", rope.into());
    match config.family {
        Family::Gemma3 => {
            put("attention_bias", json!(attention.qkv_bias));
            put("hidden_activation", json!("gelu_pytorch_tanh"));
            put("query_pre_attn_scalar", json!(attention.query_scalar));
            let window = attention.sliding.as_ref().map(|sliding| sliding.window);
            put("sliding_window", json!(window));
        }
        Family::Qwen35 | Family::Qwen3 => {
            put("attention_bias", json!(attention.qkv_bias));
        }
        Family::Llama => {
            put("attention_bias", json!(attention.qkv_bias));
            put("mlp_bias", json!(config.mlp_bias));
        }
        Family::Mistral => {
            let window = attention.sliding.as_ref().map(|sliding| sliding.window);
            put("sliding_window", json!(window));
        }
        Family::Qwen2 => {}
    }
    if matches!(config.family, Family::Qwen35 | Family::Gemma3) {
        let kind = |mixer: &Mixer| match mixer {
            Mixer::Attention => "full_attention",
            Mixer::Sliding => "sliding_attention",
            Mixer::Delta => "linear_attention",
        };
        put("layer_types", config.layers.iter().map(kind).collect());
    }
    if config.family == Family::Qwen35 {
        put("attn_output_gate", json!(true));
    }
    if let Some(delta) = &config.delta {
        put("linear_num_key_heads", json!(delta.key_heads));
        put("linear_num_value_heads", json!(delta.value_heads));
        put("linear_key_head_dim", json!(delta.key_dim));
        put("linear_value_head_dim", json!(delta.value_dim));
        put("linear_conv_kernel_dim", json!(delta.conv_kernel));
    }
    map
}
