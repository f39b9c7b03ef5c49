//! What config.json says of Gemma 3 and of no other family. The settings of published models leave
//! out what is a default of transformers' class, so those defaults are here.

use serde_json::{Map, Value};

use super::{MAX_LAYERS, rope};
use crate::description::{AttentionConfig, Mixer, RopeConfig, RopeScaling};
use crate::error::Error;
use crate::fields::Fields;

pub(super) const VOCAB_SIZE: usize = 262_208;
pub(super) const HEADS: usize = 8;
pub(super) const KV_HEADS: usize = 4;
const THETA: f64 = 1e6;
const LOCAL_THETA: f64 = 1e4;

/// Settings that other models of the class may have.
pub(super) fn refuse_unsupported(text: &Fields) -> Result<(), Error> {
    for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if text.get(cap).is_some() {
            return Err(text.error(cap, "capped logits are not supported"));
        }
    }
    let both_ways = "use_bidirectional_attention";
    if text.flag(both_ways)? == Some(true) {
        return Err(text.error(both_ways, "only causal attention is supported"));
    }
    Ok(())
}

/// The layers where `layer_types` does not list them: every so many sees everything.
pub(super) fn layers(count: usize, text: &Fields) -> Result<Vec<Mixer>, Error> {
    let mut pattern = text.size("sliding_window_pattern", MAX_LAYERS)?;
    if pattern.is_none() {
        // As transformers 5 writes it.
        pattern = text.size("_sliding_window_pattern", MAX_LAYERS)?;
    }
    let pattern = pattern.unwrap_or(6);
    let mixer = |layer: usize| {
        if (layer + 1).is_multiple_of(pattern) {
            Mixer::Attention
        } else {
            Mixer::Sliding
        }
    };
    Ok((0..count).map(mixer).collect())
}

/// The rotations of layers that see everything and of those with a window: in `rope_parameters` by
/// the kind of layer (transformers 5), or in `rope_theta`, `rope_scaling` and
/// `rope_local_base_freq` (before).
pub(super) fn ropes(head_dim: usize, text: &Fields) -> Result<(RopeConfig, RopeConfig), Error> {
    let mut full = RopeConfig {
        theta: THETA,
        rotary_dim: head_dim,
        scaling: RopeScaling::None,
    };
    let mut local = RopeConfig {
        theta: LOCAL_THETA,
        ..full.clone()
    };
    if let Some(nested) = text.object("rope_parameters")? {
        if nested.get("rope_type").is_some() || nested.get("rope_theta").is_some() {
            return Err(text.error(
                "rope_parameters",
                "Gemma 3 has one object for full_attention and one for sliding_attention in it",
            ));
        }
        for (name, rope) in [
            ("full_attention", &mut full),
            ("sliding_attention", &mut local),
        ] {
            if let Some(settings) = nested.object(name)? {
                rope.theta = settings.positive("rope_theta")?.unwrap_or(rope.theta);
                rope.scaling = rope::scaling(&settings, head_dim)?;
            }
        }
        return Ok((full, local));
    }
    full.theta = text.positive("rope_theta")?.unwrap_or(full.theta);
    if let Some(settings) = text.object("rope_scaling")? {
        full.scaling = rope::scaling(&settings, head_dim)?;
    }
    local.theta = text
        .positive("rope_local_base_freq")?
        .unwrap_or(local.theta);
    Ok((full, local))
}

/// What [`ropes`] reads back, with transformers' names.
pub(super) fn rope_json(attention: &AttentionConfig) -> Map<String, Value> {
    let one = |rope: &RopeConfig| Value::Object(rope::json(rope, attention.head_dim));
    let mut map = Map::new();
    map.insert("full_attention".to_owned(), one(&attention.rope));
    if let Some(sliding) = &attention.sliding {
        map.insert("sliding_attention".to_owned(), one(&sliding.rope));
    }
    map
}
