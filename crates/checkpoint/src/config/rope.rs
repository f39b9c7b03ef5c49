//! Rotary settings of config.json, read and written.

use serde_json::{Map, Value, json};

use super::MAX_POSITION;
use crate::description::{RopeConfig, RopeScaling};
use crate::error::Error;
use crate::fields::{Fields, shortest};

/// Rotary settings, in `rope_parameters` (transformers 5) or in `rope_theta`, `rope_scaling` and
/// `partial_rotary_factor` (before).
pub(super) fn read(head_dim: usize, text: &Fields) -> Result<RopeConfig, Error> {
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

pub(super) fn scaling(nested: &Fields, rotary_dim: usize) -> Result<RopeScaling, Error> {
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

/// What [`read`] reads back, with transformers' names.
pub(super) fn json(rope: &RopeConfig, head_dim: usize) -> Map<String, Value> {
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
    map
}
