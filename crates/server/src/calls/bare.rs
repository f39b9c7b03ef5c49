//! Calls without marks: an answer that is nothing but `{"name": ..., "parameters": {...}}`.

use super::Piece;
use super::json::{JsonCall, Step};
use crate::tools::Tool;

/// See the module.
#[derive(Debug)]
pub struct BareParser {
    names: Vec<String>,
    state: State,
    /// White space and separators that are text unless a call follows.
    held: String,
    /// Whether there was a call, after which white space and separators are dropped.
    called: bool,
}

#[derive(Debug)]
enum State {
    /// A call may begin.
    Start,
    Call(JsonCall),
    /// No call can come any more.
    Text,
}

impl BareParser {
    /// Only objects that name one of `tools` are calls.
    pub fn new(tools: &[Tool]) -> BareParser {
        BareParser {
            names: tools.iter().map(|tool| tool.name.clone()).collect(),
            state: State::Start,
            held: String::new(),
            called: false,
        }
    }

    /// Takes text and appends to `out` what is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        let mut rest = text;
        while !rest.is_empty() {
            match &mut self.state {
                State::Text => {
                    out.push(Piece::Text(rest.to_string()));
                    return;
                }
                State::Start => {
                    let object = rest.trim_start_matches(is_between);
                    self.held.push_str(&rest[..rest.len() - object.len()]);
                    rest = object;
                    if rest.starts_with('{') {
                        self.state = State::Call(JsonCall::bare());
                    } else if !rest.is_empty() {
                        self.be_text(String::new(), out);
                    }
                }
                State::Call(call) => {
                    let names = &self.names;
                    let known = |name: &str| names.iter().any(|known| known == name);
                    match call.push(rest, &known, out) {
                        Step::More => return,
                        Step::Ended(length) => {
                            rest = &rest[length..];
                            self.held.clear();
                            self.called = true;
                            self.state = State::Start;
                        }
                        Step::NoCall(raw) => {
                            self.be_text(raw, out);
                            return;
                        }
                    }
                }
            }
        }
    }

    /// The answer has ended, or was cut short.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Piece>) {
        if let State::Call(call) = &mut self.state {
            if call.begun() || (cut && call.resembles(&self.names)) {
                self.held.clear();
            } else {
                let raw = call.take_raw();
                self.be_text(raw, out);
            }
        } else {
            self.be_text(String::new(), out);
        }
    }

    fn be_text(&mut self, raw: String, out: &mut Vec<Piece>) {
        let text = std::mem::take(&mut self.held) + &raw;
        let text = if self.called {
            text.trim_start_matches(is_between).to_string()
        } else {
            text
        };
        if !text.is_empty() {
            out.push(Piece::Text(text));
        }
        self.state = State::Text;
    }
}

/// What may stand between calls.
fn is_between(character: char) -> bool {
    character.is_whitespace() || character == ';'
}
