//! The model's shape out of GGUF metadata, with llama.cpp's keys and defaults.

use crate::description::{
    AttentionConfig, DeltaConfig, ExpertsConfig, Family, Mixer, ModelConfig, RopeConfig,
    RopeScaling, SlidingConfig,
};
use crate::error::Error;

use super::metadata::Metadata;

/// What the tensor table tells beyond the metadata.
pub(super) trait Table {
    /// Whether the file has this tensor.
    fn has(&self, name: &str) -> bool;
    /// Rows of the embedding.
    fn vocab_size(&self) -> Result<usize, Error>;
    /// Divisors of the rotary frequencies, where the file has them.
    fn rope_factors(&self) -> Result<Option<Vec<f32>>, Error>;
}

/// Read the shape; every size in it is checked to be possible.
pub(super) fn model_config(meta: &Metadata, table: &impl Table) -> Result<ModelConfig, Error> {
    let name = meta.needed("general.architecture", meta.text("general.architecture")?)?;
    let (family, moe) = match name {
        "llama" => (Family::Llama, false),
        "qwen2" => (Family::Qwen2, false),
        "qwen3" => (Family::Qwen3, false),
        "qwen3moe" => (Family::Qwen3, true),
        "qwen35" => (Family::Qwen35, false),
        "qwen35moe" => (Family::Qwen35, true),
        "gemma3" => (Family::Gemma3, false),
        other => {
            let what = format!(
                "{other} is not supported; Kozue runs llama, qwen2, qwen3, qwen3moe, qwen35, \
                 qwen35moe, gemma3"
            );
            return Err(meta.wrong("general.architecture", what));
        }
    };
    let keys = Keys { meta, prefix: name };
    keys.refuse_unsupported(moe)?;
    let gemma = family == Family::Gemma3;
    let hidden_size = keys.needed("embedding_length")?;
    let layers = layers(&keys, family)?;
    let attention = attention(&keys, family, hidden_size, &layers, table)?;
    let norm_eps = keys.float("attention.layer_norm_rms_epsilon")?;
    let norm_eps = meta.needed(&keys.key("attention.layer_norm_rms_epsilon"), norm_eps)?;
    if !(0.0..1.0).contains(&norm_eps) {
        let key = keys.key("attention.layer_norm_rms_epsilon");
        return Err(meta.wrong(&key, format!("{norm_eps} is absurd")));
    }
    Ok(ModelConfig {
        family,
        vocab_size: table.vocab_size()?,
        hidden_size,
        intermediate_size: keys.needed(if moe {
            "expert_feed_forward_length"
        } else {
            "feed_forward_length"
        })?,
        experts: if moe {
            Some(experts(&keys, family)?)
        } else {
            None
        },
        attention,
        delta: if layers.contains(&Mixer::Delta) {
            Some(delta(&keys)?)
        } else {
            None
        },
        layers,
        norm_eps: norm_eps as f32,
        norm_plus_one: family == Family::Qwen35 || gemma,
        tied: !table.has("output.weight"),
        max_position: keys.needed("context_length")?,
        mlp_bias: table.has("blk.0.ffn_down.bias"),
        gelu: gemma,
        sandwich_norms: gemma,
        scaled_embedding: gemma,
    })
}

/// Blocks of the main model and, behind them, those of multi-token prediction.
pub(super) fn block_counts(meta: &Metadata, prefix: &str) -> Result<(usize, usize), Error> {
    let keys = Keys { meta, prefix };
    let all = keys.needed("block_count")?;
    let ahead = keys.size("nextn_predict_layers")?.unwrap_or(0);
    match all.checked_sub(ahead) {
        // Every block has tensors of its own, so a count beyond this is damage.
        Some(main @ 1..=4096) => Ok((main, ahead)),
        _ => Err(keys.wrong(
            "block_count",
            format!("{all} blocks, {ahead} of them ahead"),
        )),
    }
}

/// Keys of one architecture.
struct Keys<'a> {
    meta: &'a Metadata,
    prefix: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn size(&self, name: &str) -> Result<Option<usize>, Error> {
        self.meta.size(&self.key(name))
    }

    fn float(&self, name: &str) -> Result<Option<f64>, Error> {
        self.meta.float(&self.key(name))
    }

    fn wrong(&self, name: &str, what: impl Into<String>) -> Error {
        self.meta.wrong(&self.key(name), what)
    }

    /// A size that must be there and not be 0.
    fn needed(&self, name: &str) -> Result<usize, Error> {
        match self.meta.needed(&self.key(name), self.size(name)?)? {
            0 => Err(self.wrong(name, "0 is too little")),
            size => Ok(size),
        }
    }

    fn refuse_unsupported(&self, moe: bool) -> Result<(), Error> {
        if !moe && self.size("expert_count")?.is_some_and(|count| count > 0) {
            let what = "this architecture is not supported with a mixture of experts";
            return Err(self.wrong("expert_count", what));
        }
        let cap = "final_logit_softcapping";
        if self.float(cap)?.is_some_and(|cap| cap != 0.0) {
            return Err(self.wrong(cap, "capped logits are not supported"));
        }
        if self.meta.bool(&self.key("attention.causal"))? == Some(false) {
            return Err(self.wrong("attention.causal", "only causal attention is supported"));
        }
        if self
            .meta
            .uint("split.count")?
            .is_some_and(|count| count > 1)
        {
            let what = "a model split into several files is not supported; join them with \
                        llama-gguf-split --merge";
            return Err(self.meta.wrong("split.count", what));
        }
        Ok(())
    }
}

fn layers(keys: &Keys, family: Family) -> Result<Vec<Mixer>, Error> {
    let (count, _) = block_counts(keys.meta, keys.prefix)?;
    match family {
        Family::Qwen35 => {}
        Family::Gemma3 => return gemma3_layers(keys, count),
        _ => return Ok(vec![Mixer::Attention; count]),
    }
    if let Some(each) = keys.meta.ints(&keys.key("attention.recurrent_layers"))? {
        if each.len() < count {
            let what = format!("{} entries for {count} layers", each.len());
            return Err(keys.wrong("attention.recurrent_layers", what));
        }
        let mixer = |&value: &i64| {
            if value == 0 {
                Mixer::Attention
            } else {
                Mixer::Delta
            }
        };
        return Ok(each[..count].iter().map(mixer).collect());
    }
    let interval = match keys.size("full_attention_interval")? {
        Some(0) => return Err(keys.wrong("full_attention_interval", "0 is too little")),
        interval => interval.unwrap_or(4),
    };
    let mixer = |layer| {
        if (layer + 1) % interval == 0 {
            Mixer::Attention
        } else {
            Mixer::Delta
        }
    };
    Ok((0..count).map(mixer).collect())
}

/// Gemma 3's layers: where there is a window, every sixth sees everything, if the file does not say
/// otherwise by a number or a list.
fn gemma3_layers(keys: &Keys, count: usize) -> Result<Vec<Mixer>, Error> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    if keys.size(WINDOW)?.is_none_or(|window| window == 0) {
        return Ok(vec![Mixer::Attention; count]);
    }
    let mixer = |sliding| {
        if sliding {
            Mixer::Sliding
        } else {
            Mixer::Attention
        }
    };
    if let Ok(Some(each)) = keys.meta.ints(&keys.key(PATTERN)) {
        if each.len() < count {
            let what = format!("{} entries for {count} layers", each.len());
            return Err(keys.wrong(PATTERN, what));
        }
        return Ok(each[..count].iter().map(|&each| mixer(each != 0)).collect());
    }
    let pattern = match keys.size(PATTERN)? {
        Some(0) => return Err(keys.wrong(PATTERN, "0 is too little")),
        pattern => pattern.unwrap_or(6),
    };
    let layers = (1..=count).map(|layer| mixer(layer % pattern != 0));
    Ok(layers.collect())
}

/// What every row sees of the layers that have a window, in positions.
const WINDOW: &str = "attention.sliding_window";

fn experts(keys: &Keys, family: Family) -> Result<ExpertsConfig, Error> {
    let (count, chosen) = (
        keys.needed("expert_count")?,
        keys.needed("expert_used_count")?,
    );
    if count > 4096 || chosen > count {
        let what = format!("{chosen} of {count} experts for a token");
        return Err(keys.wrong("expert_used_count", what));
    }
    Ok(ExpertsConfig {
        count,
        chosen,
        normalised: true,
        shared: match family {
            Family::Qwen35 => Some(keys.needed("expert_shared_feed_forward_length")?),
            _ => None,
        },
        dense: None,
    })
}

fn attention(
    keys: &Keys,
    family: Family,
    hidden_size: usize,
    layers: &[Mixer],
    table: &impl Table,
) -> Result<AttentionConfig, Error> {
    let heads = keys.needed("attention.head_count")?;
    let kv_heads = match keys.size("attention.head_count_kv")? {
        None => heads,
        Some(count) if count > 0 && heads % count == 0 => count,
        Some(count) => {
            let what = format!("{count} does not divide the {heads} query heads");
            return Err(keys.wrong("attention.head_count_kv", what));
        }
    };
    let head_dim = match keys.size("attention.key_length")? {
        Some(0) => return Err(keys.wrong("attention.key_length", "0 is too little")),
        Some(width) => width,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let what = format!("{heads} heads do not divide the width {hidden_size}");
            return Err(keys.wrong("attention.head_count", what));
        }
    };
    if keys
        .size("attention.value_length")?
        .is_some_and(|width| width != head_dim)
    {
        let what = format!("only values as wide as keys ({head_dim}) are supported");
        return Err(keys.wrong("attention.value_length", what));
    }
    if let Some(scale) = keys.float("attention.scale")?
        && (scale * (head_dim as f64).sqrt() - 1.0).abs() > 1e-5
    {
        let what = format!("{scale} is not supported, only 1 / sqrt({head_dim})");
        return Err(keys.wrong("attention.scale", what));
    }
    let first = layers.iter().position(|&mixer| mixer != Mixer::Delta);
    let has =
        |name: &str| first.is_some_and(|layer| table.has(&format!("blk.{layer}.{name}.bias")));
    Ok(AttentionConfig {
        heads,
        kv_heads,
        head_dim,
        query_scalar: match family {
            Family::Gemma3 => gemma3_scalar(layers.len(), hidden_size, heads, head_dim),
            _ => head_dim as f64,
        },
        qkv_bias: has("attn_q") || has("attn_qkv"),
        output_bias: has("attn_output"),
        qk_norm: matches!(family, Family::Qwen3 | Family::Qwen35 | Family::Gemma3),
        gated: family == Family::Qwen35,
        rope: rope(keys, head_dim, table)?,
        sliding: if layers.contains(&Mixer::Sliding) {
            Some(SlidingConfig {
                window: keys.needed(WINDOW)?,
                rope: RopeConfig {
                    theta: keys.float("rope.freq_base_swa")?.unwrap_or(10_000.0),
                    rotary_dim: head_dim,
                    scaling: RopeScaling::None,
                },
            })
        } else {
            None
        },
    })
}

/// What llama.cpp divides Gemma 3's scores by the root of: it knows the 27B by its layers.
fn gemma3_scalar(layers: usize, hidden: usize, heads: usize, head_dim: usize) -> f64 {
    let scalar = if layers == 62 {
        hidden / heads
    } else {
        head_dim
    };
    scalar as f64
}

/// What a file of this model of Gemma 3 is read back with as its `query_scalar`.
pub(super) fn gemma3_query_scalar(config: &ModelConfig) -> f64 {
    let shape = &config.attention;
    gemma3_scalar(
        config.layers.len(),
        config.hidden_size,
        shape.heads,
        shape.head_dim,
    )
}

fn rope(keys: &Keys, head_dim: usize, table: &impl Table) -> Result<RopeConfig, Error> {
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    if !(1.0..=1e12).contains(&theta) {
        return Err(keys.wrong("rope.freq_base", format!("{theta} is absurd")));
    }
    let rotary_dim = keys.size("rope.dimension_count")?.unwrap_or(head_dim);
    if rotary_dim == 0 || rotary_dim % 2 != 0 || rotary_dim > head_dim {
        let what = format!("{rotary_dim} of {head_dim} values cannot be rotated in pairs");
        return Err(keys.wrong("rope.dimension_count", what));
    }
    Ok(RopeConfig {
        theta,
        rotary_dim,
        scaling: scaling(keys, rotary_dim, table)?,
    })
}

fn scaling(keys: &Keys, rotary_dim: usize, table: &impl Table) -> Result<RopeScaling, Error> {
    const TYPE: &str = "rope.scaling.type";
    let kind = keys.meta.text(&keys.key(TYPE))?.unwrap_or("linear");
    let factor = match keys.float("rope.scaling.factor")? {
        None => keys.float("rope.scale_linear")?,
        factor => factor,
    };
    // llama.cpp reads 0 as "not scaled" too.
    let factor = factor.filter(|&factor| kind != "none" && factor != 0.0 && factor != 1.0);
    if kind != "none" && kind != "linear" {
        let what = format!("{kind} is not supported, only linear and rope_freqs");
        return Err(keys.wrong(TYPE, what));
    }
    match (factor, table.rope_factors()?) {
        (None, None) => Ok(RopeScaling::None),
        (Some(factor), None) if factor > 0.0 => Ok(RopeScaling::Linear { factor }),
        (Some(factor), None) => {
            Err(keys.wrong("rope.scaling.factor", format!("{factor} is absurd")))
        }
        (None, Some(factors)) => {
            let sound = |&factor: &f32| factor.is_finite() && factor > 0.0;
            if factors.len() != rotary_dim / 2 || !factors.iter().all(sound) {
                let what = format!(
                    "rope_freqs.weight must hold {} positive divisors",
                    rotary_dim / 2
                );
                return Err(keys.wrong("rope.dimension_count", what));
            }
            Ok(RopeScaling::Factors(factors))
        }
        (Some(_), Some(_)) => Err(keys.wrong(
            "rope.scaling.factor",
            "not supported together with rope_freqs.weight",
        )),
    }
}

fn delta(keys: &Keys) -> Result<DeltaConfig, Error> {
    let key_heads = keys.needed("ssm.group_count")?;
    let value_heads = keys.needed("ssm.time_step_rank")?;
    let width = keys.needed("ssm.inner_size")?;
    if value_heads % key_heads != 0 {
        let what = format!("{value_heads} value heads are no multiple of {key_heads} key heads");
        return Err(keys.wrong("ssm.time_step_rank", what));
    }
    if width % value_heads != 0 {
        let what = format!("{width} values are no multiple of {value_heads} value heads");
        return Err(keys.wrong("ssm.inner_size", what));
    }
    Ok(DeltaConfig {
        key_heads,
        value_heads,
        key_dim: keys.needed("ssm.state_size")?,
        value_dim: width / value_heads,
        conv_kernel: keys.needed("ssm.conv_kernel")?,
    })
}
