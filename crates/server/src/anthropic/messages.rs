//! `/v1/messages`.

use super::messages_request::MessagesRequest;
use crate::answering::{Answering, Ended, Finish, Whole};
use crate::app::App;
use crate::body;
use crate::calls::Piece;
use crate::chat_answers::answers;
use crate::error::{ApiError, Dialect};
use crate::ids::new_id;
use crate::preparing::prepare;
use crate::prompt::render;
use crate::sse::{self, Events, Writer};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use kozue_engine::FinishReason;
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers a conversation.
pub async fn answer(
    State(app): State<Arc<App>>,
    body::Whole(bytes): body::Whole,
) -> Result<Response, ApiError> {
    let (wanted, stream, stops) = prepare(&app, bytes, |served, bytes| {
        let (request, sampling): (MessagesRequest, _) = body::parse(bytes)?;
        served.check_name(request.model.as_deref())?;
        let stream = request.stream.unwrap_or(false);
        let stops = request.stop_sequences.clone().unwrap_or_default();
        let question = request.question(sampling, true)?;
        Ok((answers(served, &question)?, stream, stops))
    })
    .await?;
    let prompt = wanted
        .first()
        .map_or(0, |wanted| wanted.request.prompt.len());
    let answering = Answering::start(Arc::clone(&app), wanted).await?;
    let head = Head {
        id: new_id("msg_"),
        model: app.served.id.clone(),
        stops,
    };
    if stream {
        let writer = Stream {
            input: input_usage(prompt, answering.cached_tokens()),
            head,
            block: None,
            index: 0,
        };
        return Ok(sse::response(answering, writer));
    }
    let answer = answering.collect().await?.pop().unwrap_or_default();
    Ok(Json(head.whole(&answer)).into_response())
}

/// Number of tokens of a prompt.
pub async fn count(
    State(app): State<Arc<App>>,
    body::Whole(bytes): body::Whole,
) -> Result<Json<Value>, ApiError> {
    let tokens = prepare(&app, bytes, |served, bytes| {
        let (request, sampling): (MessagesRequest, _) = body::parse(bytes)?;
        served.check_name(request.model.as_deref())?;
        let question = request.question(sampling, false)?;
        Ok(render(served, &question)?.tokens.len())
    })
    .await?;
    Ok(Json(json!({"input_tokens": tokens})))
}

struct Head {
    id: String,
    model: String,
    stops: Vec<String>,
}

impl Head {
    fn message(&self, content: Value, usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage,
        })
    }

    fn whole(&self, answer: &Whole) -> Value {
        let mut content = Vec::new();
        if !answer.reasoning.is_empty() {
            content.push(json!({
                "type": "thinking", "thinking": answer.reasoning, "signature": "",
            }));
        }
        if !answer.text.is_empty() {
            content.push(json!({"type": "text", "text": answer.text}));
        }
        for call in &answer.calls {
            // Arguments that are no JSON can only be shown.
            let input: Value = serde_json::from_str(&call.arguments)
                .unwrap_or_else(|_| json!({"invalid_json": call.arguments}));
            content.push(json!({
                "type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": input,
            }));
        }
        let mut message = self.message(content.into(), Value::Null);
        if let Some(ended) = &answer.end {
            let finished = &ended.finished;
            let (reason, sequence) = self.stop_reason(ended);
            message["stop_reason"] = reason.into();
            message["stop_sequence"] = sequence;
            message["usage"] = input_usage(finished.prompt_tokens, finished.cached_tokens);
            message["usage"]["output_tokens"] = finished.completion_tokens.into();
        }
        message
    }

    fn stop_reason(&self, ended: &Ended) -> (&'static str, Value) {
        let finished = &ended.finished;
        let by_text = finished.reason == FinishReason::Stop && !finished.by_token;
        match ended.finish {
            Finish::ToolCalls => ("tool_use", Value::Null),
            Finish::Length => ("max_tokens", Value::Null),
            // Which one it was is known where there is only one.
            Finish::Stop if by_text => match &self.stops[..] {
                [only] => ("stop_sequence", only.as_str().into()),
                _ => ("stop_sequence", Value::Null),
            },
            Finish::Stop => ("end_turn", Value::Null),
        }
    }
}

/// Anthropic counts cached tokens apart.
fn input_usage(prompt: usize, cached: usize) -> Value {
    json!({
        "input_tokens": prompt.saturating_sub(cached),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    ToolUse,
}

/// Writes a message's events.
struct Stream {
    head: Head,
    input: Value,
    block: Option<Block>,
    index: usize,
}

impl Stream {
    fn open(&mut self, block: Block, start: Value, events: &mut Events) {
        self.close(events);
        let data = json!({
            "type": "content_block_start", "index": self.index, "content_block": start,
        });
        events.named("content_block_start", &data);
        self.block = Some(block);
    }

    fn close(&mut self, events: &mut Events) {
        let Some(block) = self.block.take() else {
            return;
        };
        if block == Block::Thinking {
            // Clients expect one; this server signs nothing.
            self.delta(json!({"type": "signature_delta", "signature": ""}), events);
        }
        let data = json!({"type": "content_block_stop", "index": self.index});
        events.named("content_block_stop", &data);
        self.index += 1;
    }

    fn delta(&self, delta: Value, events: &mut Events) {
        let data = json!({"type": "content_block_delta", "index": self.index, "delta": delta});
        events.named("content_block_delta", &data);
    }
}

impl Writer for Stream {
    fn begin(&mut self, events: &mut Events) {
        let message = self.head.message(json!([]), self.input.clone());
        let data = json!({"type": "message_start", "message": message});
        events.named("message_start", &data);
        events.named("ping", &json!({"type": "ping"}));
    }

    fn piece(&mut self, _: usize, piece: Piece, events: &mut Events) {
        match piece {
            Piece::Text(text) => {
                if self.block != Some(Block::Text) {
                    self.open(Block::Text, json!({"type": "text", "text": ""}), events);
                }
                self.delta(json!({"type": "text_delta", "text": text}), events);
            }
            Piece::Reasoning(text) => {
                if self.block != Some(Block::Thinking) {
                    let start = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.open(Block::Thinking, start, events);
                }
                self.delta(json!({"type": "thinking_delta", "thinking": text}), events);
            }
            Piece::Call { name } => {
                let start = json!({
                    "type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {},
                });
                self.open(Block::ToolUse, start, events);
            }
            Piece::Arguments(text) => {
                self.delta(
                    json!({"type": "input_json_delta", "partial_json": text}),
                    events,
                );
            }
            Piece::CallEnd => self.close(events),
        }
    }

    fn ended(&mut self, _: usize, ended: &Ended, events: &mut Events) {
        self.close(events);
        let finished = &ended.finished;
        let (reason, sequence) = self.head.stop_reason(ended);
        let mut usage = input_usage(finished.prompt_tokens, finished.cached_tokens);
        usage["output_tokens"] = finished.completion_tokens.into();
        let data = json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage,
        });
        events.named("message_delta", &data);
    }

    fn end(&mut self, events: &mut Events) {
        events.named("message_stop", &json!({"type": "message_stop"}));
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.named("error", &error.body(Dialect::Anthropic));
    }
}
