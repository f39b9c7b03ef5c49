//! What comes back for a prompt.

use crate::speculation::Round;
use crate::stats::Stats;
use serde::Serialize;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model ended it, or a stop string came.
    Stop,
    /// The token limit or the context is used up.
    Length,
    /// The caller gave up.
    Cancelled,
}

/// Tokens in and out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens drawn for the answer, the one that ended it included.
    pub completion_tokens: usize,
}

/// An answer. Serializes as the object that `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The text, up to a stop string where one came.
    pub text: String,
    /// Every token drawn, the one that ended the answer included.
    pub token_ids: Vec<u32>,
    /// Why the answer ended.
    pub finish_reason: FinishReason,
    /// Whether the last token was one of the model's end tokens.
    #[serde(skip)]
    pub ended_by_token: bool,
    /// Tokens in and out.
    pub usage: Usage,
    /// What it cost.
    pub stats: Stats,
    /// The drafts, where the request asked for them.
    #[serde(skip)]
    pub trace: Vec<Round>,
}
