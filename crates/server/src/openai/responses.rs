//! `/v1/responses`.

use super::responses_request::ResponsesRequest;
use crate::answering::{Answering, Cost, Ended, Finish, Whole};
use crate::app::App;
use crate::body;
use crate::calls::Piece;
use crate::chat_answers::answers;
use crate::error::ApiError;
use crate::ids::new_id;
use crate::preparing::prepare;
use crate::sampling_fields::SamplingFields;
use crate::served::{Served, now};
use crate::sse::{self, Events, Writer};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers a conversation given as items.
pub async fn answer(
    State(app): State<Arc<App>>,
    body::Whole(bytes): body::Whole,
) -> Result<Response, ApiError> {
    let (wanted, stream, head) = prepare(&app, bytes, |served, bytes| {
        let (request, sampling): (ResponsesRequest, _) = body::parse(bytes)?;
        served.check_name(request.model.as_deref())?;
        let stream = request.stream.unwrap_or(false);
        let head = Head::new(served, &request, &sampling);
        let question = request.question(sampling)?;
        Ok((answers(served, &question)?, stream, head))
    })
    .await?;
    let answering = Answering::start(Arc::clone(&app), wanted).await?;
    if stream {
        return Ok(sse::response(answering, Stream::new(head)));
    }
    let mut answers = answering.collect().await?;
    let cost = Cost::of(&answers, 1);
    let answer = answers.pop().unwrap_or_default();
    let finish = answer.finish();
    Ok(Json(head.ended(finish, items(answer, finish), cost)).into_response())
}

/// All of a response but what the model makes.
struct Head(Value);

impl Head {
    fn new(served: &Served, request: &ResponsesRequest, sampling: &SamplingFields) -> Head {
        Head(json!({
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now(),
            "status": "in_progress",
            "error": null,
            "incomplete_details": null,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": served.id,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": null,
            "store": false,
            "temperature": sampling.temperature,
            "tool_choice": request.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "tools": request.tools(),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "metadata": request.metadata.clone().unwrap_or_else(|| json!({})),
            "usage": null,
        }))
    }

    fn ended(&self, finish: Finish, output: Vec<Value>, cost: Cost) -> Value {
        let mut response = self.0.clone();
        response["status"] = status(finish).into();
        if finish == Finish::Length {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["output"] = output.into();
        response["usage"] = json!({
            "input_tokens": cost.prompt,
            "input_tokens_details": {"cached_tokens": cost.cached},
            "output_tokens": cost.completion,
            "output_tokens_details": {"reasoning_tokens": cost.reasoning},
            "total_tokens": cost.prompt + cost.completion,
            "spec_verify_ct": cost.passes,
        });
        response
    }
}

fn status(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "incomplete",
        Finish::Stop | Finish::ToolCalls => "completed",
    }
}

fn items(answer: Whole, finish: Finish) -> Vec<Value> {
    let mut parts = Vec::new();
    if !answer.reasoning.is_empty() {
        parts.push((Kind::Reasoning, answer.reasoning));
    }
    if !answer.text.is_empty() {
        parts.push((Kind::Message, answer.text));
    }
    let last_is_whole = answer.cut.is_none() && !answer.calls.is_empty();
    for call in answer.calls.into_iter().chain(answer.cut) {
        parts.push((Kind::Call { name: call.name }, call.arguments));
    }
    if parts.is_empty() {
        // An empty answer is an empty message.
        parts.push((Kind::Message, String::new()));
    }
    let whole = parts.len() - usize::from(!last_is_whole);
    let items = parts.into_iter().enumerate();
    items
        .map(|(place, (kind, text))| {
            let mut item = Item::new(kind);
            item.text = text;
            // Only the last one can have been cut off.
            item.whole(match place < whole {
                true => "completed",
                false => status(finish),
            })
        })
        .collect()
}

#[derive(Clone, PartialEq)]
enum Kind {
    Reasoning,
    Message,
    Call { name: String },
}

/// One item of the output.
struct Item {
    kind: Kind,
    id: String,
    call_id: String,
    text: String,
}

impl Item {
    fn new(kind: Kind) -> Item {
        let prefix = match kind {
            Kind::Reasoning => "rs_",
            Kind::Message => "msg_",
            Kind::Call { .. } => "fc_",
        };
        Item {
            id: new_id(prefix),
            call_id: new_id("call_"),
            kind,
            text: String::new(),
        }
    }

    fn whole(&self, status: &str) -> Value {
        let content = match self.text.is_empty() && status == "in_progress" {
            true => json!([]),
            false => json!([self.part(&self.text)]),
        };
        match &self.kind {
            Kind::Reasoning => json!({
                "type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status,
            }),
            Kind::Message => json!({
                "type": "message", "id": self.id, "role": "assistant", "content": content, "status": status,
            }),
            Kind::Call { name } => json!({
                "type": "function_call", "id": self.id, "call_id": self.call_id, "name": name,
                "arguments": self.text, "status": status,
            }),
        }
    }

    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
            _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        }
    }

    fn delta_name(&self) -> &'static str {
        match self.kind {
            Kind::Reasoning => "response.reasoning_text",
            Kind::Message => "response.output_text",
            Kind::Call { .. } => "response.function_call_arguments",
        }
    }
}

/// Writes the typed events of a response.
struct Stream {
    head: Head,
    number: u64,
    item: Option<Item>,
    output: Vec<Value>,
    end: Option<(Finish, Cost)>,
}

impl Stream {
    fn new(head: Head) -> Stream {
        Stream {
            head,
            number: 0,
            item: None,
            output: Vec::new(),
            end: None,
        }
    }

    fn event(&mut self, name: &str, mut data: Value, events: &mut Events) {
        data["type"] = name.into();
        data["sequence_number"] = self.number.into();
        self.number += 1;
        events.named(name, &data);
    }

    /// An event about the item in progress.
    fn item_event(&mut self, item: &Item, name: &str, mut data: Value, events: &mut Events) {
        data["item_id"] = item.id.as_str().into();
        data["output_index"] = self.output.len().into();
        if !matches!(item.kind, Kind::Call { .. }) {
            data["content_index"] = 0.into();
        }
        self.event(name, data, events);
    }

    fn open(&mut self, kind: Kind, events: &mut Events) {
        self.close("completed", events);
        let item = Item::new(kind);
        let data = json!({"output_index": self.output.len(), "item": item.whole("in_progress")});
        self.event("response.output_item.added", data, events);
        if !matches!(item.kind, Kind::Call { .. }) {
            let data = json!({"part": item.part("")});
            self.item_event(&item, "response.content_part.added", data, events);
        }
        self.item = Some(item);
    }

    fn close(&mut self, status: &str, events: &mut Events) {
        let Some(item) = self.item.take() else {
            return;
        };
        let done = format!("{}.done", item.delta_name());
        let data = match &item.kind {
            Kind::Call { name } => json!({"arguments": item.text, "name": name}),
            Kind::Message => json!({"text": item.text, "logprobs": []}),
            Kind::Reasoning => json!({"text": item.text}),
        };
        self.item_event(&item, &done, data, events);
        if !matches!(item.kind, Kind::Call { .. }) {
            let data = json!({"part": item.part(&item.text)});
            self.item_event(&item, "response.content_part.done", data, events);
        }
        let whole = item.whole(status);
        let data = json!({"output_index": self.output.len(), "item": whole});
        self.event("response.output_item.done", data, events);
        self.output.push(whole);
    }

    fn add(&mut self, kind: Kind, text: String, events: &mut Events) {
        let same = |item: &Item| {
            item.kind == kind
                || matches!((&item.kind, &kind), (Kind::Call { .. }, Kind::Call { .. }))
        };
        if !self.item.as_ref().is_some_and(same) {
            self.open(kind, events);
        }
        if let Some(mut item) = self.item.take() {
            item.text.push_str(&text);
            let mut data = json!({"delta": text});
            if item.kind == Kind::Message {
                data["logprobs"] = json!([]);
            }
            let name = format!("{}.delta", item.delta_name());
            self.item_event(&item, &name, data, events);
            self.item = Some(item);
        }
    }
}

impl Writer for Stream {
    fn begin(&mut self, events: &mut Events) {
        for name in ["response.created", "response.in_progress"] {
            let data = json!({"response": self.head.0});
            self.event(name, data, events);
        }
    }

    fn piece(&mut self, _: usize, piece: Piece, events: &mut Events) {
        match piece {
            Piece::Text(text) => self.add(Kind::Message, text, events),
            Piece::Reasoning(text) => self.add(Kind::Reasoning, text, events),
            Piece::Call { name } => self.open(Kind::Call { name }, events),
            Piece::Arguments(text) => {
                let name = String::new();
                self.add(Kind::Call { name }, text, events);
            }
            Piece::CallEnd => self.close("completed", events),
        }
    }

    fn ended(&mut self, _: usize, ended: &Ended, events: &mut Events) {
        if self.item.is_none() && self.output.is_empty() {
            // An empty answer is an empty message.
            self.open(Kind::Message, events);
        }
        self.close(status(ended.finish), events);
        let mut cost = Cost::default();
        cost.add(ended, true);
        self.end = Some((ended.finish, cost));
    }

    fn end(&mut self, events: &mut Events) {
        let Some((finish, cost)) = self.end else {
            return;
        };
        let response = self
            .head
            .ended(finish, std::mem::take(&mut self.output), cost);
        let name = format!("response.{}", status(finish));
        self.event(&name, json!({"response": response}), events);
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        let mut response = self.head.0.clone();
        response["status"] = "failed".into();
        response["error"] = json!({"code": "server_error", "message": error.message});
        response["output"] = std::mem::take(&mut self.output).into();
        self.event("response.failed", json!({"response": response}), events);
    }
}
