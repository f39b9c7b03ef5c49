//! Tool calls in a model's text.
//!
//! A parser takes the text in pieces and hands out what is certain; what it hands out, joined,
//! does not depend on how the text was cut.

mod bare;
pub mod grammar;
mod json;
mod marked;
mod mistral;
mod xml;

pub use bare::BareParser;
pub use marked::MarkedParser;
pub use mistral::MistralParser;

use crate::tools::Tool;

/// How a model writes a call, which its chat template shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Json,
    /// `<tool_call><function=...><parameter=...>...`: Qwen3.5, Qwen3-Coder.
    Xml,
    /// `{"name": ..., "parameters": {...}}` and nothing around it: Llama 3.
    Bare,
    /// `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`: Mistral until 2024.
    MistralList,
    /// `[TOOL_CALLS]name[ARGS]{...}`, one after the other: Mistral since.
    MistralArguments,
}

impl CallFormat {
    /// The format that a template teaches; `None` where it has no place for tools.
    pub fn of_template(template: &str) -> Option<CallFormat> {
        if !template.contains("tools") {
            None
        } else if template.contains("<function=") {
            Some(CallFormat::Xml)
        } else if template.contains("<tool_call>") {
            Some(CallFormat::Json)
        } else if template.contains("[TOOL_CALLS]") {
            Some(match template.contains("[ARGS]") {
                true => CallFormat::MistralArguments,
                false => CallFormat::MistralList,
            })
        } else if template.contains("\"parameters\"") || template.contains("python_tag") {
            Some(CallFormat::Bare)
        } else {
            None
        }
    }
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text of the answer.
    Text(String),
    /// Text of the thought before it.
    Reasoning(String),
    /// A call begins.
    Call {
        /// Name of the tool.
        name: String,
    },
    /// The arguments of the call go on: a piece of JSON text.
    Arguments(String),
    /// The call is whole.
    CallEnd,
}

/// A parser of one answer.
#[derive(Debug)]
pub enum CallParser {
    /// Calls between marks.
    Marked(MarkedParser),
    /// Calls without marks.
    Bare(BareParser),
    /// Mistral's calls, of both generations.
    Mistral(MistralParser),
}

impl CallParser {
    /// For an answer that may call `tools`.
    pub fn new(format: CallFormat, tools: &[Tool]) -> CallParser {
        match format {
            CallFormat::Json | CallFormat::Xml => {
                CallParser::Marked(MarkedParser::new(format, tools))
            }
            CallFormat::Bare => CallParser::Bare(BareParser::new(tools)),
            CallFormat::MistralList | CallFormat::MistralArguments => {
                CallParser::Mistral(MistralParser::default())
            }
        }
    }

    /// Takes text and appends to `out` what is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        match self {
            CallParser::Marked(parser) => parser.push(text, out),
            CallParser::Bare(parser) => parser.push(text, out),
            CallParser::Mistral(parser) => parser.push(text, out),
        }
    }

    /// The answer has ended: appends what was held back. Where it was `cut` short, the beginning
    /// of a call is no text, and no call is taken for whole that may not be.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Piece>) {
        match self {
            CallParser::Marked(parser) => parser.finish(cut, out),
            CallParser::Bare(parser) => parser.finish(cut, out),
            CallParser::Mistral(parser) => parser.finish(cut, out),
        }
    }
}

/// Gives text, without the white space at its start while that is dropped, which any text ends.
fn show(text: &str, trimming: &mut bool, out: &mut Vec<Piece>) {
    let text = if *trimming { text.trim_start() } else { text };
    if !text.is_empty() {
        *trimming = false;
        out.push(Piece::Text(text.to_string()));
    }
}

/// How many bytes at the end of `text` may be the beginning of `mark`.
fn undecided(text: &str, mark: &str) -> usize {
    let ends = |n: &usize| text.ends_with(&mark[..*n]);
    (1..mark.len()).rev().find(ends).unwrap_or(0)
}

/// Of an answer that was cut short: what may be the beginning of a mark goes, with the white space
/// before it.
fn drop_undecided(held: &mut String, undecided: usize) {
    if undecided > 0 {
        let text = held[..held.len() - undecided].trim_end();
        held.truncate(text.len());
    }
}

/// Whether `text` is the beginning of `mark`, but not all of it.
fn begins(text: &str, mark: &str) -> bool {
    text.len() < mark.len() && mark.starts_with(text)
}

#[cfg(test)]
mod grammar_tests;
#[cfg(test)]
mod tests;
