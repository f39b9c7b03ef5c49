//! Log-probabilities in the shapes of chat and plain completions.

use crate::served::Served;
use kozue_engine::scheduler::Token;
use serde_json::{Value as Json, json};

/// JSON has no infinities; this is what OpenAI gives for tokens out of the question.
const LEAST: f32 = -9999.0;

/// Those of a chat: `{"content": [...]}`.
pub fn chat(served: &Served, tokens: &[Token]) -> Json {
    let content: Vec<Json> = tokens
        .iter()
        .filter_map(|token| {
            let mut entry = entry(served, token.token, token.logprob?);
            let top = token.top.iter();
            entry["top_logprobs"] = top
                .map(|(id, logprob)| self::entry(served, *id, *logprob))
                .collect();
            Some(entry)
        })
        .collect();
    json!({"content": content, "refusal": null})
}

fn entry(served: &Served, token: u32, logprob: f32) -> Json {
    let bytes = served
        .loaded
        .tokenizer
        .token_bytes(token)
        .unwrap_or_default();
    json!({
        "token": String::from_utf8_lossy(&bytes),
        "logprob": logprob.max(LEAST),
        "bytes": bytes,
    })
}

/// Those of plain text: lists side by side. `offset` is the place of the text's first character,
/// and moves on.
pub fn plain(served: &Served, tokens: &[Token], offset: &mut usize) -> Json {
    let text = |id: u32| {
        let bytes = served.loaded.tokenizer.token_bytes(id).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut lists = [const { Vec::new() }; 4];
    for token in tokens {
        let top: serde_json::Map<String, Json> = token
            .top
            .iter()
            .map(|(id, logprob)| (text(*id), logprob.max(LEAST).into()))
            .collect();
        let shown = text(token.token);
        lists[3].push(Json::from(*offset));
        *offset += shown.chars().count();
        lists[0].push(shown.into());
        lists[1].push(token.logprob.map(|logprob| logprob.max(LEAST)).into());
        lists[2].push(top.into());
    }
    let [texts, logprobs, top, offsets] = lists;
    json!({
        "tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets,
    })
}
