//! `/v1/chat/completions`.

use super::chat_request::ChatRequest;
use super::fields::call_json;
use super::{FINGERPRINT, finish_reason, logprobs, usage};
use crate::answering::{Answering, Cost, Ended, Finish, Whole};
use crate::app::App;
use crate::body;
use crate::calls::Piece;
use crate::chat_answers::answers;
use crate::error::{ApiError, Dialect};
use crate::ids::new_id;
use crate::preparing::prepare;
use crate::served::now;
use crate::sse::{self, Events, Writer};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use kozue_engine::scheduler::Token;
use kozue_engine::speculation::Round;
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers a chat.
pub async fn answer(
    State(app): State<Arc<App>>,
    body::Whole(bytes): body::Whole,
) -> Result<Response, ApiError> {
    let (wanted, stream, options, with_logprobs) = prepare(&app, bytes, |served, bytes| {
        let (request, sampling): (ChatRequest, _) = body::parse(bytes)?;
        served.check_name(request.model.as_deref())?;
        let stream = request.stream.unwrap_or(false);
        let options = request.stream_options.clone().unwrap_or_default();
        let question = request.question(sampling)?;
        let with_logprobs = question.options.logprobs.is_some();
        let wanted = answers(served, &question)?;
        Ok((wanted, stream, options, with_logprobs))
    })
    .await?;
    let answering = Answering::start(Arc::clone(&app), wanted).await?;
    let head = Head {
        id: new_id("chatcmpl-"),
        created: now(),
        with_logprobs,
        app,
    };
    if stream {
        let writer = Chunks {
            head,
            include_usage: options.include_usage.unwrap_or(false),
            include_passes: options.include_passes.unwrap_or(false),
            tokens: Vec::new(),
            cost: Cost::default(),
            calls: vec![0; answering.count()],
        };
        return Ok(sse::response(answering, writer));
    }
    let answers = answering.collect().await?;
    Ok(Json(head.whole(&answers)).into_response())
}

struct Head {
    id: String,
    created: u64,
    with_logprobs: bool,
    app: Arc<App>,
}

impl Head {
    fn object(&self, kind: &str) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.app.served.id,
            "system_fingerprint": FINGERPRINT,
        })
    }

    fn whole(&self, answers: &[Whole]) -> Value {
        let mut object = self.object("chat.completion");
        let choices = answers.iter().enumerate();
        object["choices"] = choices
            .map(|(index, answer)| self.choice(index, answer))
            .collect();
        object["usage"] = usage(Cost::of(answers, answers.len()));
        object
    }

    fn logprobs(&self, tokens: &[Token]) -> Value {
        match self.with_logprobs {
            true => logprobs::chat(&self.app.served, tokens),
            false => Value::Null,
        }
    }

    fn choice(&self, index: usize, answer: &Whole) -> Value {
        let mut message = json!({"role": "assistant", "content": answer.text, "refusal": null});
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = answer.reasoning.as_str().into();
        }
        if !answer.calls.is_empty() {
            if answer.text.is_empty() {
                message["content"] = Value::Null;
            }
            let calls = answer.calls.iter();
            message["tool_calls"] = calls
                .map(|call| call_json(&new_id("call_"), &call.name, &call.arguments))
                .collect();
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": self.logprobs(&answer.tokens),
            "finish_reason": finish_reason(answer.finish()),
        })
    }
}

/// Writes a stream of `chat.completion.chunk`s.
struct Chunks {
    head: Head,
    include_usage: bool,
    /// Whether chunks tell which forward pass made their text.
    include_passes: bool,
    /// Tokens of the next text.
    tokens: Vec<Token>,
    cost: Cost,
    /// Calls begun, by answer.
    calls: Vec<usize>,
}

impl Chunks {
    fn chunk(&self, choices: Value, events: &mut Events) {
        let mut object = self.head.object("chat.completion.chunk");
        object["choices"] = choices;
        if self.include_usage {
            object["usage"] = Value::Null;
        }
        events.data(object.to_string());
    }

    fn delta(&mut self, index: usize, delta: Value, finish: Option<Finish>, events: &mut Events) {
        let tokens = match delta.get("content") {
            Some(_) => std::mem::take(&mut self.tokens),
            None => Vec::new(),
        };
        let logprobs = match tokens.is_empty() {
            true => Value::Null,
            false => self.head.logprobs(&tokens),
        };
        let mut choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish.map(finish_reason),
        });
        if self.include_passes
            && let Some(token) = tokens.last()
        {
            choice["pass"] = token.pass.into();
        }
        self.chunk(json!([choice]), events);
    }
}

impl Writer for Chunks {
    fn begin(&mut self, events: &mut Events) {
        for index in 0..self.calls.len() {
            let delta = json!({"role": "assistant", "content": ""});
            self.delta(index, delta, None, events);
        }
    }

    fn piece(&mut self, index: usize, piece: Piece, events: &mut Events) {
        let delta = match piece {
            Piece::Text(text) => json!({"content": text}),
            Piece::Reasoning(text) => json!({"reasoning_content": text}),
            Piece::Call { name } => {
                self.calls[index] += 1;
                let mut call = call_json(&new_id("call_"), &name, "");
                call["index"] = (self.calls[index] - 1).into();
                json!({"tool_calls": [call]})
            }
            Piece::Arguments(text) => json!({"tool_calls": [
                {"index": self.calls[index].saturating_sub(1), "function": {"arguments": text}},
            ]}),
            Piece::CallEnd => return,
        };
        self.delta(index, delta, None, events);
    }

    fn tokens(&mut self, tokens: Vec<Token>) {
        self.tokens = tokens;
    }

    fn round(&mut self, index: usize, round: &Round, events: &mut Events) {
        let tokenizer = &self.head.app.served.loaded.tokenizer;
        let text = |token: &u32| {
            let bytes = tokenizer.token_bytes(*token).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let draft = json!({
            "tokens": round.tokens.iter().map(text).collect::<Vec<_>>(),
            "parents": round.parents,
            "log_chances": round.log_chances,
            "path": round.path,
            "next": text(&round.next),
        });
        let choice = json!({"index": index, "delta": {}, "finish_reason": null, "draft": draft});
        self.chunk(json!([choice]), events);
    }

    fn ended(&mut self, index: usize, ended: &Ended, events: &mut Events) {
        self.cost.add(ended, index == 0);
        self.delta(index, json!({}), Some(ended.finish), events);
    }

    fn end(&mut self, events: &mut Events) {
        if self.include_usage {
            let mut object = self.head.object("chat.completion.chunk");
            object["choices"] = json!([]);
            object["usage"] = usage(self.cost);
            events.data(object.to_string());
        }
        events.data("[DONE]");
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.data(error.body(Dialect::OpenAi).to_string());
    }
}
