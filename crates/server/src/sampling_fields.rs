//! The fields of a body that say how tokens are drawn, in every API alike.

use crate::body::Seed;
use crate::error::ApiError;
use crate::question::Options;
use serde::Deserialize;
use std::collections::BTreeMap;

/// What is not given follows the model's recommendation.
#[derive(Debug, Default, Deserialize)]
pub struct SamplingFields {
    /// 0 always takes the best token.
    pub temperature: Option<f32>,
    /// Keep only the best tokens with this share of the probability.
    pub top_p: Option<f32>,
    /// Keep only this many best tokens; -1 and 0: all.
    top_k: Option<i64>,
    /// Keep only tokens with this share of the best one's probability.
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repetition_penalty: Option<f32>,
    /// By token id, which is text because keys of JSON are.
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<Seed>,
}

impl SamplingFields {
    /// As options for one answer. Errors: a `top_k` below -1, a key of `logit_bias` that is no
    /// token id; ranges are checked with all the options.
    pub fn options(self) -> Result<Options, ApiError> {
        Ok(Options {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: top_k(self.top_k)?,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias: logit_bias(self.logit_bias)?,
            seed: self.seed.map(u64::from),
            n: 1,
            ..Options::default()
        })
    }
}

/// -1 means all tokens, as 0 does.
fn top_k(top_k: Option<i64>) -> Result<Option<usize>, ApiError> {
    match top_k {
        None => Ok(None),
        Some(-1) => Ok(Some(0)),
        Some(k) => usize::try_from(k).map(Some).map_err(|_| {
            let message = format!("top_k must be 0 or more (0 or -1: all tokens), not {k}");
            ApiError::field("top_k", message)
        }),
    }
}

fn logit_bias(bias: Option<BTreeMap<String, f32>>) -> Result<Vec<(u32, f32)>, ApiError> {
    bias.unwrap_or_default()
        .into_iter()
        .map(|(token, bias)| match token.parse() {
            Ok(id) => Ok((id, bias)),
            Err(_) => {
                let message = format!("logit_bias: {token:?} is no token id");
                Err(ApiError::field("logit_bias", message))
            }
        })
        .collect()
}
