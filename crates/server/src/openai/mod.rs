//! OpenAI's API.

pub mod chat;
mod chat_request;
pub mod completions;
mod fields;
mod logprobs;
pub mod models;
pub mod responses;
mod responses_request;

pub(crate) use fields::{call_json, tool};

use crate::answering::{Cost, Finish};
use serde_json::{Value as Json, json};

/// Version of the program, as a fingerprint of what made an answer.
const FINGERPRINT: &str = concat!("kozue-", env!("CARGO_PKG_VERSION"));

fn usage(cost: Cost) -> Json {
    json!({
        "prompt_tokens": cost.prompt,
        "completion_tokens": cost.completion,
        "total_tokens": cost.prompt + cost.completion,
        "prompt_tokens_details": {"cached_tokens": cost.cached},
        "completion_tokens_details": {"reasoning_tokens": cost.reasoning},
        "spec_verify_ct": cost.passes,
    })
}

fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::ToolCalls => "tool_calls",
    }
}
