//! `/v1/completions`: plain text, continued.

use super::chat_request::StreamOptions;
use super::{FINGERPRINT, finish_reason, logprobs, usage};
use crate::answering::{Answering, Cost, Ended, Finish, Wanted, Whole};
use crate::app::App;
use crate::body::{self, OneOrMany};
use crate::calls::Piece;
use crate::chat_answers::check_length;
use crate::error::{ApiError, Dialect};
use crate::ids::{new_id, new_seed};
use crate::output::Output;
use crate::preparing::prepare;
use crate::question::Options;
use crate::sampling_fields::SamplingFields;
use crate::served::{Served, now};
use crate::sse::{self, Events, Writer};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use kozue_engine::sampling::Sampling;
use kozue_engine::scheduler::Token;
use kozue_engine::{Error, LanguageModel, Request};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Most prompts of one request.
const MOST_PROMPTS: usize = 16;

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    model: Option<String>,
    prompt: Prompts,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<usize>,
    stop: Option<OneOrMany>,
    n: Option<usize>,
    best_of: Option<usize>,
    echo: Option<bool>,
    suffix: Option<String>,
    logprobs: Option<usize>,
    ignore_eos: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, a list of texts, a list of token ids or a list of such lists"
)]
enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// OpenAI's default for plain text.
const DEFAULT_TOKENS: usize = 16;

/// Continues text.
pub async fn answer(
    State(app): State<Arc<App>>,
    body::Whole(bytes): body::Whole,
) -> Result<Response, ApiError> {
    let Prepared {
        wanted,
        echoes,
        n,
        with_logprobs,
        stream,
        include_usage,
    } = prepare(&app, bytes, |served, bytes| {
        let (request, sampling): (CompletionRequest, _) = body::parse(bytes)?;
        served.check_name(request.model.as_deref())?;
        read(served, request, sampling)
    })
    .await?;
    let answering = Answering::start(Arc::clone(&app), wanted).await?;
    let head = Head {
        id: new_id("cmpl-"),
        created: now(),
        with_logprobs,
        app,
        n,
        echoes,
    };
    if stream {
        let writer = Chunks {
            offsets: head
                .echoes
                .iter()
                .map(|echo| echo.chars().count())
                .collect(),
            head,
            include_usage,
            tokens: Vec::new(),
            cost: Cost::default(),
        };
        return Ok(sse::response(answering, writer));
    }
    let answers = answering.collect().await?;
    Ok(Json(head.whole(&answers)).into_response())
}

/// What is asked.
struct Prepared {
    wanted: Vec<Wanted>,
    /// The text before each answer.
    echoes: Vec<String>,
    n: usize,
    with_logprobs: bool,
    stream: bool,
    include_usage: bool,
}

fn read(
    served: &Served,
    request: CompletionRequest,
    sampling: SamplingFields,
) -> Result<Prepared, ApiError> {
    let n = request.n.unwrap_or(1);
    if request.best_of.is_some_and(|best_of| best_of != n) {
        return Err(ApiError::field(
            "best_of",
            "best_of must be n: all answers are returned",
        ));
    }
    if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::field("suffix", "suffix is not supported"));
    }
    let options = Options {
        max_tokens: Some(request.max_tokens.unwrap_or(DEFAULT_TOKENS)),
        stop: request.stop.map(Vec::from).unwrap_or_default(),
        n,
        logprobs: request.logprobs,
        ..sampling.options()?
    };
    options.check()?;
    let prompts: Vec<Prompt> = match request.prompt {
        Prompts::Text(text) => vec![Prompt::Text(text)],
        Prompts::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
        Prompts::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
        Prompts::TokenLists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
    };
    if prompts.is_empty() || prompts.len() > MOST_PROMPTS {
        let message = format!(
            "prompt may hold 1 to {MOST_PROMPTS} prompts, not {}",
            prompts.len()
        );
        return Err(ApiError::field("prompt", message));
    }
    let seed = options.seed.unwrap_or_else(new_seed);
    let recommended = Sampling::recommended(&served.loaded.description().generation, seed);
    let vocab_size = served.loaded.model.vocab_size();
    let mut wanted = Vec::new();
    let mut echoes = Vec::new();
    for prompt in prompts {
        let tokens = match &prompt {
            Prompt::Text(text) => served.loaded.raw_prompt(text)?,
            Prompt::Tokens(tokens) => tokens.clone(),
        };
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt.into());
        }
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab_size) {
            let error = Error::UnknownToken { token, vocab_size };
            return Err(ApiError::field("prompt", error.to_string()));
        }
        check_length(served, tokens.len()).map_err(|error| ApiError {
            param: Some("prompt".to_string()),
            ..error
        })?;
        for index in 0..n {
            wanted.push(Wanted {
                request: Request {
                    prompt: tokens.clone(),
                    sampling: options.sampling(recommended.clone(), seed, index),
                    max_tokens: options.max_tokens,
                    stop: options.stop.clone(),
                    grammar: None,
                    logprobs: options.logprobs,
                    ignore_eos: request.ignore_eos.unwrap_or(false),
                    trace: false,
                },
                output: Output::raw(),
                single_call: false,
            });
            let echo = request.echo.unwrap_or(false).then(|| match &prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Tokens(tokens) => served.loaded.tokenizer.decode(tokens),
            });
            echoes.push(echo.unwrap_or_default());
        }
    }
    Ok(Prepared {
        wanted,
        echoes,
        n,
        with_logprobs: request.logprobs.is_some(),
        stream: request.stream.unwrap_or(false),
        include_usage: request
            .stream_options
            .and_then(|options| options.include_usage)
            .unwrap_or(false),
    })
}

struct Head {
    id: String,
    created: u64,
    with_logprobs: bool,
    app: Arc<App>,
    n: usize,
    echoes: Vec<String>,
}

impl Head {
    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.app.served.id,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        })
    }

    fn whole(&self, answers: &[Whole]) -> Value {
        let choices = answers.iter().zip(&self.echoes).enumerate();
        let choices = choices
            .map(|(index, (answer, echo))| {
                let text = format!("{echo}{}", answer.text);
                let mut choice = choice(index, &text, Some(answer.finish()));
                let mut offset = echo.chars().count();
                choice["logprobs"] = self.logprobs(&answer.tokens, &mut offset);
                choice
            })
            .collect();
        let mut object = self.object(choices);
        object["usage"] = usage(Cost::of(answers, self.n));
        object
    }

    fn logprobs(&self, tokens: &[Token], offset: &mut usize) -> Value {
        match self.with_logprobs {
            true => logprobs::plain(&self.app.served, tokens, offset),
            false => Value::Null,
        }
    }
}

fn choice(index: usize, text: &str, finish: Option<Finish>) -> Value {
    json!({
        "index": index,
        "text": text,
        "logprobs": null,
        "finish_reason": finish.map(finish_reason),
    })
}

/// Writes a stream of `text_completion`s.
struct Chunks {
    head: Head,
    include_usage: bool,
    /// Tokens of the next text.
    tokens: Vec<Token>,
    /// Characters that each answer has so far.
    offsets: Vec<usize>,
    cost: Cost,
}

impl Chunks {
    fn chunk(&self, choices: Value, usage: Value, events: &mut Events) {
        let mut object = self.head.object(choices);
        if self.include_usage {
            object["usage"] = usage;
        }
        events.data(object.to_string());
    }
}

impl Writer for Chunks {
    fn begin(&mut self, events: &mut Events) {
        for (index, echo) in self.head.echoes.iter().enumerate() {
            if !echo.is_empty() {
                self.chunk(json!([choice(index, echo, None)]), Value::Null, events);
            }
        }
    }

    fn piece(&mut self, index: usize, piece: Piece, events: &mut Events) {
        if let Piece::Text(text) = piece {
            let tokens = std::mem::take(&mut self.tokens);
            let mut choice = choice(index, &text, None);
            choice["logprobs"] = self.head.logprobs(&tokens, &mut self.offsets[index]);
            self.chunk(json!([choice]), Value::Null, events);
        }
    }

    fn tokens(&mut self, tokens: Vec<Token>) {
        self.tokens = tokens;
    }

    fn ended(&mut self, index: usize, ended: &Ended, events: &mut Events) {
        self.cost.add(ended, index.is_multiple_of(self.head.n));
        let choice = choice(index, "", Some(ended.finish));
        self.chunk(json!([choice]), Value::Null, events);
    }

    fn end(&mut self, events: &mut Events) {
        if self.include_usage {
            self.chunk(json!([]), usage(self.cost), events);
        }
        events.data("[DONE]");
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.data(error.body(Dialect::OpenAi).to_string());
    }
}
