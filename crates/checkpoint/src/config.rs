//! config.json, as transformers writes it for the four families, read and written.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::description::{
    AttentionConfig, DeltaConfig, Family, Mixer, ModelConfig, RopeConfig, RopeScaling,
};
use crate::error::Error;
use crate::fields::{Fields, shortest};

const MAX_WIDTH: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;
const MAX_HEADS: usize = 1 << 14;
const MAX_HEAD_DIM: usize = 1 << 14;
const MAX_POSITION: usize = 1 << 40;

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
        let tied = match (top.flag("tie_word_embeddings")?, inner) {
            (Some(tied), _) => tied,
            (None, Some(text)) => text.flag("tie_word_embeddings")?.unwrap_or(false),
            (None, None) => false,
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

fn family(top: &Fields, text: &Fields) -> Result<Family, Error> {
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
        "qwen3_5" | "qwen3_5_text" => Ok(Family::Qwen35),
        "qwen3" => Ok(Family::Qwen3),
        "qwen2" => Ok(Family::Qwen2),
        "llama" => Ok(Family::Llama),
        other => Err(text.error(
            "model_type",
            format!(
                "{other:?} is not supported; Kozue runs qwen3_5 (dense), qwen3, qwen2 and llama"
            ),
        )),
    }
}

fn model(family: Family, tied: bool, text: &Fields) -> Result<ModelConfig, Error> {
    let hidden_size = text.required_size("hidden_size", MAX_WIDTH)?;
    let layers = layers(family, text)?;
    if let Some(act) = text
        .text("hidden_act")?
        .filter(|act| !matches!(*act, "silu" | "swish"))
    {
        return Err(text.error(
            "hidden_act",
            format!("{act:?} is not supported; only silu is"),
        ));
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
    let attention = attention(family, hidden_size, text)?;
    let delta = match family {
        Family::Qwen35 if layers.contains(&Mixer::Delta) => Some(delta(text)?),
        _ => None,
    };
    Ok(ModelConfig {
        family,
        vocab_size: text.required_size("vocab_size", MAX_VOCAB)?,
        hidden_size,
        intermediate_size: text.required_size("intermediate_size", MAX_WIDTH)?,
        layers,
        attention,
        delta,
        norm_eps: text.positive_f32("rms_norm_eps")?.unwrap_or(1e-6),
        norm_plus_one: family == Family::Qwen35,
        tied,
        max_position: match text.size("max_position_embeddings", MAX_POSITION)? {
            Some(n) => n,
            // Class defaults of transformers.
            None if family == Family::Llama => 2048,
            None => 32768,
        },
        mlp_bias: family == Family::Llama && text.flag("mlp_bias")?.unwrap_or(false),
    })
}

/// The shapes of a DFlash drafter, whose layers are Qwen3's.
pub(crate) fn draft_shape(top: &Fields) -> Result<ModelConfig, Error> {
    let hidden_size = top.required_size("hidden_size", MAX_WIDTH)?;
    let count = top.required_size("num_hidden_layers", MAX_LAYERS)?;
    Ok(ModelConfig {
        family: Family::Qwen3,
        vocab_size: top.required_size("vocab_size", MAX_VOCAB)?,
        hidden_size,
        intermediate_size: top.required_size("intermediate_size", MAX_WIDTH)?,
        layers: vec![Mixer::Attention; count],
        attention: attention(Family::Qwen3, hidden_size, top)?,
        delta: None,
        norm_eps: top.positive_f32("rms_norm_eps")?.unwrap_or(1e-6),
        norm_plus_one: false,
        tied: false,
        max_position: top
            .size("max_position_embeddings", MAX_POSITION)?
            .unwrap_or(32768),
        mlp_bias: false,
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
            Some("linear_attention") if family == Family::Qwen35 => Ok(Mixer::Delta),
            _ => Err(text.error("layer_types", format!("{kind} is not supported"))),
        };
        return types.iter().map(mixer).collect();
    }
    if family != Family::Qwen35 {
        return Ok(vec![Mixer::Attention; count]);
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

fn attention(family: Family, hidden: usize, text: &Fields) -> Result<AttentionConfig, Error> {
    let heads = text.required_size("num_attention_heads", MAX_HEADS)?;
    let kv_heads = text
        .size("num_key_value_heads", MAX_HEADS)?
        .unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(text.error(
            "num_key_value_heads",
            format!("{kv_heads} does not divide num_attention_heads, {heads}"),
        ));
    }
    let head_dim = match (text.size("head_dim", MAX_HEAD_DIM)?, family) {
        (Some(dim), _) => dim,
        // Class defaults of transformers.
        (None, Family::Qwen35) => 256,
        (None, Family::Qwen3) => 128,
        (None, Family::Qwen2 | Family::Llama) if hidden.is_multiple_of(heads) => hidden / heads,
        (None, Family::Qwen2 | Family::Llama) => {
            return Err(text.error(
                "num_attention_heads",
                format!("{heads} does not divide hidden_size, {hidden}, and head_dim is missing"),
            ));
        }
    };
    let bias = text.flag("attention_bias")?.unwrap_or(false);
    Ok(AttentionConfig {
        heads,
        kv_heads,
        head_dim,
        qkv_bias: family == Family::Qwen2 || bias,
        output_bias: family != Family::Qwen2 && bias,
        qk_norm: matches!(family, Family::Qwen35 | Family::Qwen3),
        gated: family == Family::Qwen35,
        rope: rope(head_dim, text)?,
    })
}

/// Rotary settings, in `rope_parameters` (transformers 5) or in `rope_theta`, `rope_scaling` and
/// `partial_rotary_factor` (before).
fn rope(head_dim: usize, text: &Fields) -> Result<RopeConfig, Error> {
    let nested = match text.object("rope_parameters")? {
        Some(nested) => Some(nested),
        None => text.object("rope_scaling")?,
    };
    let either = |name: &str| -> Result<Option<f64>, Error> {
        match nested
            .map(|nested| nested.positive(name))
            .transpose()?
            .flatten()
        {
            Some(value) => Ok(Some(value)),
            None => text.positive(name),
        }
    };
    let theta = either("rope_theta")?.unwrap_or(10_000.0);
    let partial = either("partial_rotary_factor")?.unwrap_or(1.0);
    // transformers truncates; the small term keeps a third of 6 from becoming 1.
    let rotary_dim = (head_dim as f64 * partial + 1e-6) as usize;
    if partial > 1.0 || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(text.error(
            "partial_rotary_factor",
            format!("{partial} of head_dim {head_dim} is not an even width within the head"),
        ));
    }
    let scaling = match nested {
        Some(nested) => scaling(&nested, rotary_dim)?,
        None => RopeScaling::None,
    };
    Ok(RopeConfig {
        theta,
        rotary_dim,
        scaling,
    })
}

fn scaling(nested: &Fields, rotary_dim: usize) -> Result<RopeScaling, Error> {
    let field = if nested.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    let required = |name: &str| {
        nested
            .positive(name)?
            .ok_or_else(|| nested.error(name, "is missing"))
    };
    match nested.text(field)?.unwrap_or("default") {
        // On text alone, all sections of mrope rotate by the same position: plain rotation.
        "default" | "mrope" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear {
            factor: required("factor")?,
        }),
        "llama3" => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if high <= low {
                return Err(nested.error("high_freq_factor", "must be above low_freq_factor"));
            }
            Ok(RopeScaling::Llama3 {
                factor: required("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position: nested
                    .required_size("original_max_position_embeddings", MAX_POSITION)?,
            })
        }
        FACTORS => {
            let list = nested.list("factors")?.unwrap_or_default();
            let positive = |value: &Value| {
                value
                    .as_f64()
                    .map(|x| x as f32)
                    .filter(|x| x.is_finite() && *x > 0.0)
            };
            let factors: Option<Vec<f32>> = list.iter().map(positive).collect();
            match factors.filter(|factors| factors.len() == rotary_dim / 2) {
                Some(factors) => Ok(RopeScaling::Factors(factors)),
                None => Err(nested.error(
                    "factors",
                    format!("expected {} numbers above 0", rotary_dim / 2),
                )),
            }
        }
        other => Err(nested.error(
            field,
            format!("{other:?} is not supported; Kozue knows default, linear and llama3"),
        )),
    }
}

/// Our own name for one divisor per frequency, which config.json has no word for.
const FACTORS: &str = "kozue_factors";

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
    let attention = &config.attention;
    let (model_type, architecture) = match config.family {
        Family::Qwen35 => ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        Family::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
        Family::Llama => ("llama", "LlamaForCausalLM"),
    };
    let mut map = Map::new();
    let mut put = |name: &str, value: Value| map.insert(name.to_owned(), value);
    put("architectures", json!([architecture]));
    put("model_type", json!(model_type));
    put("vocab_size", json!(config.vocab_size));
    put("hidden_size", json!(config.hidden_size));
    put("intermediate_size", json!(config.intermediate_size));
    put("num_hidden_layers", json!(config.layers.len()));
    put("num_attention_heads", json!(attention.heads));
    put("num_key_value_heads", json!(attention.kv_heads));
    put("head_dim", json!(attention.head_dim));
    put("hidden_act", json!("silu"));
    put("rms_norm_eps", json!(shortest(config.norm_eps)));
    put("max_position_embeddings", json!(config.max_position));
    put("tie_word_embeddings", json!(config.tied));
    put(
        "rope_parameters",
        rope_json(&attention.rope, attention.head_dim),
    );
    match config.family {
        Family::Qwen35 | Family::Qwen3 => {
            put("attention_bias", json!(attention.qkv_bias));
        }
        Family::Llama => {
            put("attention_bias", json!(attention.qkv_bias));
            put("mlp_bias", json!(config.mlp_bias));
        }
        Family::Qwen2 => {}
    }
    if config.family == Family::Qwen35 {
        let kind = |mixer: &Mixer| match mixer {
            Mixer::Attention => "full_attention",
            Mixer::Delta => "linear_attention",
        };
        put("layer_types", config.layers.iter().map(kind).collect());
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

fn rope_json(rope: &RopeConfig, head_dim: usize) -> Value {
    let mut map = Map::new();
    let mut put = |name: &str, value: Value| map.insert(name.to_owned(), value);
    put("rope_theta", json!(rope.theta));
    if rope.rotary_dim != head_dim {
        put(
            "partial_rotary_factor",
            json!(rope.rotary_dim as f64 / head_dim as f64),
        );
    }
    match &rope.scaling {
        RopeScaling::None => {
            put("rope_type", json!("default"));
        }
        RopeScaling::Linear { factor } => {
            put("rope_type", json!("linear"));
            put("factor", json!(factor));
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            put("rope_type", json!("llama3"));
            put("factor", json!(factor));
            put("low_freq_factor", json!(low_freq_factor));
            put("high_freq_factor", json!(high_freq_factor));
            put(
                "original_max_position_embeddings",
                json!(original_max_position),
            );
        }
        RopeScaling::Factors(factors) => {
            put("rope_type", json!(FACTORS));
            put(
                "factors",
                factors.iter().map(|&factor| shortest(factor)).collect(),
            );
        }
    }
    Value::Object(map)
}
