//! Answers in progress.

use crate::app::App;
use crate::calls::Piece;
use crate::error::ApiError;
use crate::output::Output;
use axum::http::StatusCode;
use kozue_engine::scheduler::{Finished, Progress, Token};
use kozue_engine::speculation::Round;
use kozue_engine::{FinishReason, Request};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// An answer to be made.
pub struct Wanted {
    /// What the engine is asked.
    pub request: Request,
    /// What takes its text apart.
    pub output: Output,
    /// Whether the answer ends after its first call.
    pub single_call: bool,
}

/// Why an answer ended, in the terms of a chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it, or a stop text came.
    Stop,
    /// The token limit or the context is used up.
    Length,
    /// The model waits for the results of its calls.
    ToolCalls,
}

/// What is told of an answer.
#[derive(Debug)]
pub enum Happening {
    /// It goes on. The tokens belong to the first text among the pieces.
    Pieces(Vec<Piece>, Vec<Token>),
    /// A draft was verified.
    Round(Round),
    /// It is whole.
    Ended(Ended),
}

/// How an answer ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// Why.
    pub finish: Finish,
    /// What it took.
    pub finished: Finished,
    /// How many of its tokens were a thought.
    pub reasoning_tokens: usize,
}

/// The answers to one request. Dropping this gives up what is not finished.
pub struct Answering {
    app: Arc<App>,
    receiver: UnboundedReceiver<(usize, Progress)>,
    /// What came while the answers were started.
    first: Option<(usize, Progress)>,
    answers: Vec<One>,
    open: usize,
    cached_tokens: usize,
}

struct One {
    output: Output,
    single_call: bool,
    /// Nothing more is wanted.
    enough: Arc<AtomicBool>,
    calls: usize,
    /// Whether the last call is not whole.
    call_open: bool,
    /// Tokens whose text has not been handed out.
    pending: Vec<Token>,
    reasoning_tokens: usize,
    /// Gives the request up when it is dropped.
    _ticket: Box<dyn Any + Send>,
}

impl Answering {
    /// Asks the engine and waits for the first answer's turn, so that a request that cannot be
    /// answered is refused with its own status.
    pub async fn start(app: Arc<App>, wanted: Vec<Wanted>) -> Result<Answering, ApiError> {
        let (sender, receiver) = unbounded_channel();
        let mut answers = Vec::with_capacity(wanted.len());
        for (index, wanted) in wanted.into_iter().enumerate() {
            let enough = Arc::new(AtomicBool::new(false));
            let (sender, stop) = (sender.clone(), Arc::clone(&enough));
            let listener = move |progress| {
                sender.send((index, progress)).is_ok() && !stop.load(Ordering::Relaxed)
            };
            let ticket = app
                .served
                .backend()
                .submit(wanted.request, Box::new(listener))?;
            answers.push(One {
                output: wanted.output,
                single_call: wanted.single_call,
                enough,
                calls: 0,
                call_open: false,
                pending: Vec::new(),
                reasoning_tokens: 0,
                _ticket: ticket,
            });
        }
        drop(sender);
        let mut answering = Answering {
            app,
            receiver,
            first: None,
            open: answers.len(),
            answers,
            cached_tokens: 0,
        };
        match answering.receiver.recv().await {
            Some((_, Progress::Failed(error))) => Err(error.into()),
            Some(first) => {
                if let (_, Progress::Started { cached_tokens }) = first {
                    answering.cached_tokens = cached_tokens;
                }
                answering.first = Some(first);
                Ok(answering)
            }
            None => Err(stopped()),
        }
    }

    /// How many answers there are.
    pub fn count(&self) -> usize {
        self.answers.len()
    }

    /// Tokens of the first answer's prompt that need no computing.
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// What happens next, and to which answer; `None` when all are whole.
    pub async fn next(&mut self) -> Option<Result<(usize, Happening), ApiError>> {
        while self.open > 0 {
            let next = match self.first.take() {
                Some(first) => Some(first),
                None => self.receiver.recv().await,
            };
            let Some((index, progress)) = next else {
                self.open = 0;
                return Some(Err(stopped()));
            };
            match progress {
                Progress::Started { .. } => {}
                Progress::Round(round) => return Some(Ok((index, Happening::Round(round)))),
                Progress::Token(token) => self.answers[index].pending.push(token),
                Progress::Text(text) => {
                    let (pieces, tokens) = self.answers[index].text(&text);
                    if !pieces.is_empty() {
                        return Some(Ok((index, Happening::Pieces(pieces, tokens))));
                    }
                }
                Progress::Failed(error) => {
                    self.open = 0;
                    return Some(Err(error.into()));
                }
                Progress::Finished(finished) => {
                    let (rest, tokens) = self.answers[index].rest(finished.by_token);
                    if !rest.is_empty() {
                        self.first = Some((index, Progress::Finished(finished)));
                        return Some(Ok((index, Happening::Pieces(rest, tokens))));
                    }
                    self.open -= 1;
                    self.app.metrics.answered(&finished);
                    let Some(finish) = self.answers[index].finish(finished.reason) else {
                        self.open = 0;
                        return Some(Err(stopped()));
                    };
                    let ended = Ended {
                        finish,
                        finished,
                        reasoning_tokens: self.answers[index].reasoning_tokens,
                    };
                    return Some(Ok((index, Happening::Ended(ended))));
                }
            }
        }
        None
    }

    /// All answers, whole.
    pub async fn collect(mut self) -> Result<Vec<Whole>, ApiError> {
        let mut answers: Vec<Whole> = (0..self.count()).map(|_| Whole::default()).collect();
        while let Some(next) = self.next().await {
            let (index, happening) = next?;
            let answer = &mut answers[index];
            match happening {
                Happening::Pieces(pieces, tokens) => {
                    pieces.into_iter().for_each(|piece| answer.add(piece));
                    answer.tokens.extend(tokens);
                }
                Happening::Round(_) => {}
                Happening::Ended(ended) => answer.end = Some(ended),
            }
        }
        Ok(answers)
    }
}

impl One {
    fn text(&mut self, text: &str) -> (Vec<Piece>, Vec<Token>) {
        if self.enough.load(Ordering::Relaxed) {
            return (Vec::new(), Vec::new());
        }
        let thinking = self.output.in_thought();
        let pieces = self.output.push(text);
        if thinking || self.output.in_thought() {
            self.reasoning_tokens += self.pending.len();
            self.pending.clear();
        }
        let pieces = self.counted(pieces);
        let tokens = self.tokens_of(&pieces);
        (pieces, tokens)
    }

    /// The pending tokens, if `pieces` hand out their text. Those of calls are of no interest.
    fn tokens_of(&mut self, pieces: &[Piece]) -> Vec<Token> {
        if pieces.is_empty() {
            return Vec::new();
        }
        let tokens = std::mem::take(&mut self.pending);
        match pieces.iter().any(|piece| matches!(piece, Piece::Text(_))) {
            true => tokens,
            false => Vec::new(),
        }
    }

    /// What was held back; nothing when asked again.
    fn rest(&mut self, by_token: bool) -> (Vec<Piece>, Vec<Token>) {
        if self.enough.load(Ordering::Relaxed) {
            return (Vec::new(), Vec::new());
        }
        if by_token {
            // An end token has no text.
            self.pending.pop();
        }
        // Anything else than an end token came before the model had said all.
        let pieces = self.output.finish(!by_token);
        // The second time there is nothing left to say.
        self.output = Output::raw();
        let pieces = self.counted(pieces);
        let tokens = self.tokens_of(&pieces);
        (pieces, tokens)
    }

    fn counted(&mut self, mut pieces: Vec<Piece>) -> Vec<Piece> {
        for place in 0..pieces.len() {
            match pieces[place] {
                Piece::Call { .. } => {
                    self.calls += 1;
                    self.call_open = true;
                }
                Piece::CallEnd => {
                    self.call_open = false;
                    if self.single_call {
                        self.enough.store(true, Ordering::Relaxed);
                        pieces.truncate(place + 1);
                        break;
                    }
                }
                _ => {}
            }
        }
        pieces
    }

    /// `None`: the engine gave the answer up.
    fn finish(&self, reason: FinishReason) -> Option<Finish> {
        let enough = self.enough.load(Ordering::Relaxed);
        match reason {
            FinishReason::Cancelled if !enough => None,
            FinishReason::Length if !enough => Some(Finish::Length),
            // A call that was cut off is not one to be run.
            _ if self.calls > 0 && !self.call_open => Some(Finish::ToolCalls),
            _ => Some(Finish::Stop),
        }
    }
}

fn stopped() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping").code("stopping")
}

/// A whole answer.
#[derive(Debug, Default)]
pub struct Whole {
    /// The thought.
    pub reasoning: String,
    /// The text.
    pub text: String,
    /// The calls that are whole.
    pub calls: Vec<Call>,
    /// A call that was cut off; the last, where there is one.
    pub cut: Option<Call>,
    /// The tokens of the text.
    pub tokens: Vec<Token>,
    /// How it ended; there whenever the answer is whole.
    pub end: Option<Ended>,
}

/// A call of a tool.
#[derive(Debug)]
pub struct Call {
    /// Name of the tool.
    pub name: String,
    /// JSON text.
    pub arguments: String,
}

impl Whole {
    fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Text(text) => self.text.push_str(&text),
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::Call { name } => {
                self.cut = Some(Call {
                    name,
                    arguments: String::new(),
                });
            }
            Piece::Arguments(text) => {
                if let Some(call) = &mut self.cut {
                    call.arguments.push_str(&text);
                }
            }
            Piece::CallEnd => self.calls.extend(self.cut.take()),
        }
    }

    /// Why it ended.
    pub fn finish(&self) -> Finish {
        self.end.map_or(Finish::Stop, |ended| ended.finish)
    }
}

/// What answers took, together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Tokens of the prompts.
    pub prompt: usize,
    /// Those of them that needed no computing.
    pub cached: usize,
    /// Tokens of the answers.
    pub completion: usize,
    /// Those of them that were thoughts.
    pub reasoning: usize,
    /// Forward passes after the prompts'.
    pub passes: usize,
}

impl Cost {
    /// Adds an answer. Several answers to one prompt count its tokens once: `first` says that
    /// this one brings its prompt.
    pub fn add(&mut self, ended: &Ended, first: bool) {
        let finished = &ended.finished;
        self.reasoning += ended.reasoning_tokens;
        if first {
            self.prompt += finished.prompt_tokens;
            self.cached += finished.cached_tokens;
        }
        self.completion += finished.completion_tokens;
        self.passes += finished.forward_passes;
    }

    /// Of whole answers; every `n`th brings a prompt.
    pub fn of(answers: &[Whole], n: usize) -> Cost {
        let mut cost = Cost::default();
        for (index, answer) in answers.iter().enumerate() {
            if let Some(ended) = &answer.end {
                cost.add(ended, index.is_multiple_of(n));
            }
        }
        cost
    }
}
