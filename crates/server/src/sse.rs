//! Answers as server-sent events.

use crate::answering::{Answering, Ended, Happening};
use crate::calls::Piece;
use crate::error::ApiError;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use kozue_engine::scheduler::Token;
use serde_json::Value as Json;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// Events to be sent.
#[derive(Debug, Default)]
pub struct Events(VecDeque<Event>);

impl Events {
    /// Adds an event without a name.
    pub fn data(&mut self, data: impl AsRef<str>) {
        self.0.push_back(Event::default().data(data));
    }

    /// Adds a named event.
    pub fn named(&mut self, name: &str, data: &Json) {
        self.0
            .push_back(Event::default().event(name).data(data.to_string()));
    }
}

/// How an API writes a stream.
pub trait Writer: Send + 'static {
    /// Before everything else.
    fn begin(&mut self, events: &mut Events);
    /// An answer goes on.
    fn piece(&mut self, index: usize, piece: Piece, events: &mut Events);
    /// The tokens of the text to come.
    fn tokens(&mut self, _tokens: Vec<Token>) {}
    /// An answer is whole.
    fn ended(&mut self, index: usize, ended: &Ended, events: &mut Events);
    /// All answers are whole.
    fn end(&mut self, events: &mut Events);
    /// Something failed in the midst.
    fn failed(&mut self, error: &ApiError, events: &mut Events);
}

struct State<W> {
    answering: Answering,
    writer: W,
    events: Events,
    over: bool,
}

/// The response that tells of the answers as they come.
pub fn response<W: Writer>(answering: Answering, mut writer: W) -> Response {
    let mut events = Events::default();
    writer.begin(&mut events);
    let state = State {
        answering,
        writer,
        events,
        over: false,
    };
    let events = stream::unfold(state, |mut state| async move {
        loop {
            if let Some(event) = state.events.0.pop_front() {
                return Some((Ok::<Event, Infallible>(event), state));
            }
            if state.over {
                return None;
            }
            state.advance().await;
        }
    });
    Sse::new(events)
        .keep_alive(KeepAlive::new().interval(Duration::from_secs(10)))
        .into_response()
}

impl<W: Writer> State<W> {
    async fn advance(&mut self) {
        let State {
            answering,
            writer,
            events,
            over,
        } = self;
        match answering.next().await {
            Some(Ok((index, Happening::Pieces(pieces, tokens)))) => {
                writer.tokens(tokens);
                for piece in pieces {
                    writer.piece(index, piece, events);
                }
            }
            Some(Ok((index, Happening::Ended(ended)))) => writer.ended(index, &ended, events),
            Some(Err(error)) => {
                writer.failed(&error, events);
                *over = true;
            }
            None => {
                writer.end(events);
                *over = true;
            }
        }
    }
}
