//! Calls after Mistral's `[TOOL_CALLS]`, of both generations: a list of JSON objects, or
//! `name[ARGS]{...}`, each call with a mark of its own and perhaps with `[CALL_ID]id` in its midst.

use super::json::{JsonCall, Nesting, Step};
use super::{Piece, begins, drop_undecided, show, undecided};

const OPEN: &str = "[TOOL_CALLS]";
const ARGUMENTS: &str = "[ARGS]";
const ID: &str = "[CALL_ID]";

/// See the module.
#[derive(Debug, Default)]
pub struct MistralParser {
    /// Text that is not decided yet.
    held: String,
    /// White space before a mark, the mark, and the beginning of a list: text again if no call follows.
    before: String,
    state: State,
    /// Whether white space is dropped, because a call has just ended.
    trimming: bool,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    /// After a mark.
    Opened,
    /// In a list, before or after a call.
    List,
    Json(JsonCall),
    /// Before the arguments of a call whose name is known.
    Named,
    Arguments(Nesting),
}

/// What stands after a mark that no list follows.
enum Name {
    More,
    None,
    /// A name, and how many bytes lead to its arguments.
    Of(String, usize),
}

impl MistralParser {
    /// Takes text and appends to `out` what is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        while self.step(out) {}
    }

    /// Whether something was decided, so that it is worth another look.
    fn step(&mut self, out: &mut Vec<Piece>) -> bool {
        match &mut self.state {
            State::Text => self.text(out),
            State::Opened => {
                let rest = self.held.trim_start();
                if rest.is_empty() {
                    return false;
                }
                if rest.starts_with('[') {
                    let taken = self.held.len() - rest.len() + 1;
                    self.before.extend(self.held.drain(..taken));
                    self.state = State::List;
                    return true;
                }
                match name(rest) {
                    Name::More => return false,
                    Name::None => self.no_call("", out),
                    Name::Of(name, length) => {
                        let taken = self.held.len() - rest.len() + length;
                        self.held.drain(..taken);
                        self.before.clear();
                        out.push(Piece::Call { name });
                        self.state = State::Named;
                    }
                }
                true
            }
            State::List => {
                let between = |c: char| c.is_whitespace() || c == ',';
                let Some(next) = self.held.trim_start_matches(between).chars().next() else {
                    return false;
                };
                match next {
                    '{' => {
                        let rest = self.held.trim_start_matches(between).len();
                        let taken = self.held.len() - rest;
                        self.before.extend(self.held.drain(..taken));
                        self.state = State::Json(JsonCall::marked());
                    }
                    ']' if self.before.is_empty() => {
                        let end = self.held.find(']').map_or(0, |at| at + 1);
                        self.held.drain(..end);
                        self.end();
                    }
                    _ => self.no_call("", out),
                }
                true
            }
            State::Json(call) => {
                let text = std::mem::take(&mut self.held);
                match call.push(&text, &|_| true, out) {
                    Step::More => {
                        if call.begun() {
                            self.before.clear();
                        }
                        false
                    }
                    Step::Ended(length) => {
                        self.before.clear();
                        self.held.push_str(&text[length..]);
                        self.state = State::List;
                        true
                    }
                    Step::NoCall(raw) => {
                        self.no_call(&raw, out);
                        true
                    }
                }
            }
            State::Named => {
                let rest = self.held.trim_start();
                if rest.is_empty() {
                    return false;
                }
                if rest.starts_with('{') {
                    let space = self.held.len() - rest.len();
                    self.held.drain(..space);
                    self.state = State::Arguments(Nesting::default());
                } else {
                    out.push(Piece::Arguments("{}".to_string()));
                    out.push(Piece::CallEnd);
                    self.end();
                }
                true
            }
            State::Arguments(nesting) => {
                let end = nesting.end(&self.held);
                let piece: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
                if !piece.is_empty() {
                    out.push(Piece::Arguments(piece));
                }
                if end.is_some() {
                    out.push(Piece::CallEnd);
                    self.end();
                }
                end.is_some()
            }
        }
    }

    fn text(&mut self, out: &mut Vec<Piece>) -> bool {
        let found = self.held.find(OPEN);
        let certain = found.unwrap_or(self.held.len() - undecided(&self.held, OPEN));
        // White space before a mark goes with it.
        let end = self.held[..certain].trim_end().len();
        let shown: String = self.held.drain(..end).collect();
        show(&shown, &mut self.trimming, out);
        if found.is_none() {
            return false;
        }
        self.before = self.held.drain(..certain - end + OPEN.len()).collect();
        self.state = State::Opened;
        true
    }

    /// A call has ended.
    fn end(&mut self) {
        self.trimming = true;
        self.state = State::Text;
    }

    /// What looked like a call is text.
    fn no_call(&mut self, raw: &str, out: &mut Vec<Piece>) {
        let text = std::mem::take(&mut self.before);
        self.trimming &= text.is_empty();
        show(&text, &mut self.trimming, out);
        self.held.insert_str(0, raw);
        self.state = State::Text;
    }

    /// The answer has ended, or was cut short.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Piece>) {
        match &mut self.state {
            State::Text if cut => {
                let undecided = undecided(&self.held, OPEN);
                drop_undecided(&mut self.held, undecided);
            }
            State::Text => {}
            _ if cut => return,
            State::List if self.before.is_empty() => return,
            State::Opened | State::List => self.no_call("", out),
            State::Json(call) if !call.begun() => {
                let raw = call.take_raw();
                self.no_call(&raw, out);
            }
            State::Json(_) | State::Arguments(_) => return,
            State::Named => {
                out.push(Piece::Arguments("{}".to_string()));
                out.push(Piece::CallEnd);
                return;
            }
        }
        let rest = std::mem::take(&mut self.held);
        show(&rest, &mut self.trimming, out);
    }
}

/// Reads a call up to its arguments.
fn name(text: &str) -> Name {
    let ends = |c: char| c.is_whitespace() || matches!(c, '[' | '{');
    let Some(end) = text.find(ends) else {
        return Name::More;
    };
    let mut place = end;
    if text[place..].starts_with(ID) {
        place += ID.len();
        match text[place..].find(ends) {
            None => return Name::More,
            Some(length) => place += length,
        }
    }
    let tail = &text[place..];
    let may_be_id = place == end && begins(tail, ID);
    if end == 0 {
        Name::None
    } else if tail.starts_with(ARGUMENTS) {
        Name::Of(text[..end].to_string(), place + ARGUMENTS.len())
    } else if begins(tail, ARGUMENTS) || may_be_id {
        Name::More
    } else {
        Name::None
    }
}
