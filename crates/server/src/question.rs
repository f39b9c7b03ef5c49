//! A request in the server's own terms, whichever API it came by.

use crate::error::ApiError;
use crate::tools::{Tool, ToolChoice};
use kozue_engine::chat::Message;
use kozue_engine::sampling::Sampling;
use serde_json::{Map, Value as Json};

/// What a chat asks.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// The conversation; its last message is to be answered.
    pub messages: Vec<Message>,
    /// What the model may call.
    pub tools: Vec<Tool>,
    /// Whether it may, must or must not.
    pub tool_choice: ToolChoice,
    /// Whether it may call several tools at once.
    pub single_call: bool,
    /// What the answer must look like.
    pub format: Format,
    /// Whether to think first; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// Further variables of the template.
    pub variables: Map<String, Json>,
    /// The beginning of the answer, which the client has written.
    pub prefill: Option<String>,
    /// How tokens are drawn.
    pub options: Options,
}

/// What an answer must look like.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Format {
    /// Any text.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema(Json),
}

/// Options that all APIs share; what is not given follows the model's recommendation.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// See [`Sampling`].
    pub temperature: Option<f32>,
    /// See [`Sampling`].
    pub top_p: Option<f32>,
    /// 0 = all.
    pub top_k: Option<usize>,
    /// See [`Sampling`].
    pub min_p: Option<f32>,
    /// See [`Sampling`].
    pub presence_penalty: Option<f32>,
    /// See [`Sampling`].
    pub frequency_penalty: Option<f32>,
    /// See [`Sampling`].
    pub repetition_penalty: Option<f32>,
    /// By token id, as JSON has no other keys than text.
    pub logit_bias: Vec<(u32, f32)>,
    /// `None` = a new one.
    pub seed: Option<u64>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Number of answers.
    pub n: usize,
    /// Whether verified drafts are told.
    pub drafts: bool,
    /// Whether log-probabilities are wanted, and with how many alternatives.
    pub logprobs: Option<usize>,
}

/// Most answers of one request.
const MOST_ANSWERS: usize = 16;
/// Most alternatives of a token.
const MOST_ALTERNATIVES: usize = 20;
/// Most texts that end an answer.
const MOST_STOPS: usize = 16;

impl Options {
    /// Errors: a value outside its range, with the name of its field.
    pub fn check(&self) -> Result<(), ApiError> {
        between("temperature", self.temperature, 0.0, 2.0)?;
        between("top_p", self.top_p, 0.0, 1.0)?;
        between("min_p", self.min_p, 0.0, 1.0)?;
        between("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        if let Some(value) = self.repetition_penalty
            && !(value > 0.0 && value <= 10.0)
        {
            let message = format!("repetition_penalty must be above 0 and at most 10, not {value}");
            return Err(ApiError::field("repetition_penalty", message));
        }
        if self.max_tokens == Some(0) {
            return Err(ApiError::field(
                "max_tokens",
                "max_tokens must be at least 1",
            ));
        }
        if !(1..=MOST_ANSWERS).contains(&self.n) {
            let message = format!("n must be between 1 and {MOST_ANSWERS}, not {}", self.n);
            return Err(ApiError::field("n", message));
        }
        if self.stop.len() > MOST_STOPS {
            let message = format!("stop may hold {MOST_STOPS} texts, not {}", self.stop.len());
            return Err(ApiError::field("stop", message));
        }
        if self.stop.iter().any(String::is_empty) {
            let message = "stop must not hold an empty text: every answer would end at once";
            return Err(ApiError::field("stop", message));
        }
        if let Some(top) = self.logprobs.filter(|top| *top > MOST_ALTERNATIVES) {
            let message =
                format!("top_logprobs must be between 0 and {MOST_ALTERNATIVES}, not {top}");
            return Err(ApiError::field("top_logprobs", message));
        }
        if let Some((token, bias)) = self
            .logit_bias
            .iter()
            .find(|(_, bias)| !(-100.0..=100.0).contains(bias))
        {
            let message =
                format!("logit_bias of token {token} must be between -100 and 100, not {bias}");
            return Err(ApiError::field("logit_bias", message));
        }
        Ok(())
    }

    /// How the tokens of answer `index` are drawn; `seed` is that of the first.
    pub fn sampling(&self, recommended: Sampling, seed: u64, index: usize) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(recommended.temperature),
            top_k: self
                .top_k
                .map_or(recommended.top_k, |k| Some(k).filter(|k| *k > 0)),
            // 0 keeps the best token, which the smallest share does too.
            top_p: self
                .top_p
                .unwrap_or(recommended.top_p)
                .max(f32::MIN_POSITIVE),
            min_p: self.min_p.unwrap_or(recommended.min_p),
            repetition_penalty: self
                .repetition_penalty
                .unwrap_or(recommended.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            // -100 bans a token.
            logit_bias: self
                .logit_bias
                .iter()
                .map(|&(token, bias)| {
                    (
                        token,
                        if bias <= -100.0 {
                            f32::NEG_INFINITY
                        } else {
                            bias
                        },
                    )
                })
                .collect(),
            seed: seed.wrapping_add(index as u64),
            ..recommended
        }
    }
}

fn between(name: &'static str, value: Option<f32>, low: f32, high: f32) -> Result<(), ApiError> {
    match value {
        Some(value) if !(low..=high).contains(&value) => Err(ApiError::field(
            name,
            format!("{name} must be between {low} and {high}, not {value}"),
        )),
        _ => Ok(()),
    }
}
