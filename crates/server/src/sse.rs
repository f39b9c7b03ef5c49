//! Answers as server-sent events.

use crate::answering::{Answering, Ended, Happening};
use crate::calls::Piece;
use crate::error::ApiError;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use kozue_engine::scheduler::Token;
use kozue_engine::speculation::Round;
use serde_json::Value as Json;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// Events to be sent.
#[derive(Debug, Default)]
pub struct Events(VecDeque<Event>);

impl Events {
    /// Adds an event without a name.
    pub fn data(&mut self, data: impl AsRef<str>) {
        self.0
            .push_back(Event::default().data(one_line(data.as_ref())));
    }

    /// Adds a named event.
    pub fn named(&mut self, name: &str, data: &Json) {
        self.0.push_back(
            Event::default()
                .event(name)
                .data(one_line(&data.to_string())),
        );
    }
}

/// JSON without the characters that some clients take for the end of a line. They occur in its
/// strings only.
fn one_line(json: &str) -> Cow<'_, str> {
    const ENDS: [char; 3] = ['\u{85}', '\u{2028}', '\u{2029}'];
    if !json.contains(ENDS) {
        return Cow::Borrowed(json);
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for character in json.chars() {
        match ENDS.contains(&character) {
            true => escaped.push_str(&format!("\\u{:04x}", u32::from(character))),
            false => escaped.push(character),
        }
    }
    Cow::Owned(escaped)
}

/// How an API writes a stream.
pub trait Writer: Send + 'static {
    /// Before everything else.
    fn begin(&mut self, events: &mut Events);
    /// An answer goes on.
    fn piece(&mut self, index: usize, piece: Piece, events: &mut Events);
    /// The tokens of the text to come.
    fn tokens(&mut self, _tokens: Vec<Token>) {}
    /// A draft for an answer was verified.
    fn round(&mut self, _index: usize, _round: &Round, _events: &mut Events) {}
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
            Some(Ok((index, Happening::Round(round)))) => writer.round(index, &round, events),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_client_sees_two_lines_in_one() {
        let text = "a\u{85}b\u{2028}c\u{2029}d\ne\u{1c}f";
        let json = serde_json::json!({"x": text}).to_string();
        let shown = one_line(&json);
        assert!(
            shown
                .chars()
                .all(|c| !c.is_control() && c != '\u{2028}' && c != '\u{2029}')
        );
        let back: Json = serde_json::from_str(&shown).unwrap();
        assert_eq!(back["x"], text);
        assert!(matches!(one_line("{\"a\": 1}"), Cow::Borrowed(_)));
    }
}
