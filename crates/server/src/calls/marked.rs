//! Calls between `<tool_call>` and `</tool_call>`.
//!
//! Some models forget the marks of JSON: an answer that begins with an object which names a tool
//! and has arguments is a call too.

use super::json::{JsonCall, Step};
use super::xml::XmlCall;
use super::{CallFormat, Piece, begins, drop_undecided, show, undecided};
use crate::tools::Tool;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";

/// See the module.
#[derive(Debug)]
pub struct MarkedParser {
    xml: bool,
    tools: Vec<Tool>,
    /// Text that is not decided yet.
    held: String,
    /// White space before an opening mark, and the mark: text again if no call follows.
    before: String,
    state: State,
    /// Whether white space is dropped, because a call has just ended.
    trimming: bool,
}

#[derive(Debug)]
enum State {
    /// Before anything but white space: a call without marks may begin.
    Start,
    Text,
    /// After an opening mark.
    Opened,
    Json(JsonCall),
    Xml(XmlCall),
    /// After a call, before its closing mark.
    Closing,
}

impl MarkedParser {
    /// `format` is `Json` or `Xml`; the tools' schemas tell how XML values become JSON.
    pub fn new(format: CallFormat, tools: &[Tool]) -> MarkedParser {
        MarkedParser {
            xml: format == CallFormat::Xml,
            tools: tools.to_vec(),
            held: String::new(),
            before: String::new(),
            state: match format {
                CallFormat::Json => State::Start,
                _ => State::Text,
            },
            trimming: false,
        }
    }

    /// Takes text and appends to `out` what is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        while self.step(out) {}
    }

    /// Whether something was decided, so that it is worth another look.
    fn step(&mut self, out: &mut Vec<Piece>) -> bool {
        match &mut self.state {
            State::Start => {
                let rest = self.held.trim_start();
                if rest.is_empty() {
                    return false;
                }
                self.state = match rest.starts_with('{') {
                    true => {
                        let space = self.held.len() - rest.len();
                        self.before = self.held.drain(..space).collect();
                        State::Json(JsonCall::bare())
                    }
                    false => State::Text,
                };
                true
            }
            State::Text => self.text(out),
            State::Opened => {
                let rest = self.held.trim_start();
                if rest.is_empty() || (self.xml && begins(rest, FUNCTION)) {
                    return false;
                }
                if self.xml && rest.starts_with(FUNCTION) {
                    self.state = State::Xml(XmlCall::new());
                } else if rest.starts_with('{') {
                    self.state = State::Json(JsonCall::marked());
                } else {
                    self.no_call(String::new(), out);
                }
                true
            }
            State::Json(call) => {
                let text = std::mem::take(&mut self.held);
                let tools = &self.tools;
                let known = |name: &str| tools.iter().any(|tool| tool.name == name);
                // Between marks the client hears of a tool that it does not have, too.
                let bare = call.is_bare();
                match call.push(&text, &|name| !bare || known(name), out) {
                    Step::More => false,
                    Step::Ended(length) => {
                        self.held.push_str(&text[length..]);
                        self.state = State::Closing;
                        true
                    }
                    Step::NoCall(raw) => {
                        self.no_call(raw, out);
                        true
                    }
                }
            }
            State::Xml(call) => {
                let ended = call.take(&mut self.held, &self.tools, out);
                if ended {
                    self.state = State::Closing;
                }
                ended
            }
            State::Closing => self.close(),
        }
    }

    fn text(&mut self, out: &mut Vec<Piece>) -> bool {
        let found = [(OPEN, true), (FUNCTION, self.xml)]
            .iter()
            .filter(|(_, wanted)| *wanted)
            .filter_map(|(mark, _)| self.held.find(mark).map(|place| (place, *mark)))
            .min();
        let certain = match found {
            Some((place, _)) => place,
            None => self.held.len() - self.undecided(),
        };
        // White space before a mark goes with it.
        let end = self.held[..certain].trim_end().len();
        let shown: String = self.held.drain(..end).collect();
        show(&shown, &mut self.trimming, out);
        let Some((_, mark)) = found else {
            return false;
        };
        let space = certain - end;
        // `<function=` is part of the call's own text.
        let length = space + if mark == OPEN { OPEN.len() } else { 0 };
        self.before = self.held.drain(..length).collect();
        self.state = State::Opened;
        true
    }

    /// How many bytes at the end may be the beginning of a mark.
    fn undecided(&self) -> usize {
        let function = if self.xml {
            undecided(&self.held, FUNCTION)
        } else {
            0
        };
        undecided(&self.held, OPEN).max(function)
    }

    /// What looked like a call is text.
    fn no_call(&mut self, raw: String, out: &mut Vec<Piece>) {
        let before = std::mem::take(&mut self.before);
        show(&before, &mut self.trimming, out);
        self.trimming = false;
        self.held.insert_str(0, &raw);
        self.state = State::Text;
        if before.trim().is_empty() {
            // What began without a mark would be found again: its first character is text.
            let first: String = self.held.drain(..1.min(self.held.len())).collect();
            out.push(Piece::Text(first));
        }
    }

    fn close(&mut self) -> bool {
        let rest = self.held.trim_start();
        if rest.is_empty() || begins(rest, CLOSE) || begins(rest, FUNCTION) {
            return false;
        }
        let space = self.held.len() - rest.len();
        let mark = if rest.starts_with(CLOSE) {
            CLOSE.len()
        } else {
            0
        };
        self.held.drain(..space + mark);
        self.trimming = true;
        self.state = State::Text;
        true
    }

    /// The answer has ended, or was cut short.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Piece>) {
        let names: Vec<&str> = self.tools.iter().map(|tool| tool.name.as_str()).collect();
        match &mut self.state {
            State::Start => {}
            State::Text if cut => {
                let undecided = self.undecided();
                drop_undecided(&mut self.held, undecided);
            }
            State::Text => {}
            State::Opened | State::Xml(_) if cut => return,
            State::Json(call) if cut && (!call.is_bare() || call.resembles(&names)) => return,
            State::Opened => self.no_call(String::new(), out),
            State::Json(call) if !call.begun() => {
                let raw = call.take_raw();
                self.no_call(raw, out);
            }
            State::Xml(call) if !call.begun() => self.no_call(String::new(), out),
            State::Xml(call) => return call.finish(out),
            State::Json(_) => return,
            State::Closing => return,
        }
        let rest = std::mem::take(&mut self.held);
        show(&rest, &mut self.trimming, out);
    }
}
