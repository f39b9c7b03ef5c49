//! One question to a model's chat template, as a request.

use crate::failure::Failure;
use kozue_engine::chat::ChatOptions;
use kozue_engine::conversation::Conversation;
use kozue_engine::sampling::Sampling;
use kozue_engine::{Loaded, Request};

/// The request that asks `text` and nothing before it. Errors: an empty text; no chat template.
pub fn request(
    loaded: &Loaded,
    text: &str,
    sampling: Sampling,
    max_tokens: usize,
) -> Result<Request, Failure> {
    if text.trim().is_empty() {
        return Err(Failure::Usage("the prompt is empty".into()));
    }
    let template = loaded.chat_template()?;
    let mut chat = Conversation::new(&template, &loaded.tokenizer, ChatOptions::default(), None);
    Ok(Request {
        prompt: chat.ask(text)?,
        sampling,
        max_tokens: Some(max_tokens),
        stop: Vec::new(),
        grammar: None,
        logprobs: None,
        ignore_eos: false,
        trace: false,
    })
}
