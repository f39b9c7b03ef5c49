//! A call as `<function=name><parameter=key>value</parameter></function>`.
//!
//! A value is the text between the marks without one line break at either end. The tool's schema
//! says what it means: text where the schema says string or says nothing, JSON elsewhere.

use super::{Piece, begins};
use crate::tools::Tool;
use serde_json::Value as Json;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const CLOSE: &str = "</tool_call>";

/// Where a call is read.
#[derive(Debug)]
pub(super) struct XmlCall {
    name: Option<String>,
    /// The parameter whose value is read.
    key: Option<String>,
    /// Whether a parameter was handed out.
    any: bool,
}

impl XmlCall {
    pub fn new() -> XmlCall {
        XmlCall {
            name: None,
            key: None,
            any: false,
        }
    }

    /// Whether the call's name has been handed out.
    pub fn begun(&self) -> bool {
        self.name.is_some()
    }

    /// Takes what it can from the beginning of `held`. Whether the call has ended.
    pub fn take(&mut self, held: &mut String, tools: &[Tool], out: &mut Vec<Piece>) -> bool {
        loop {
            let Some(name) = &self.name else {
                let Some(name) = tag(held, FUNCTION) else {
                    return false;
                };
                out.push(Piece::Call { name: name.clone() });
                self.name = Some(name);
                continue;
            };
            if let Some(key) = &self.key {
                let Some(end) = held.find(PARAMETER_END) else {
                    return false;
                };
                let text = held[..end].strip_prefix('\n').unwrap_or(&held[..end]);
                let text = text.strip_suffix('\n').unwrap_or(text);
                let tool = tools.iter().find(|tool| tool.name == *name);
                let value = value(text, tool.and_then(|tool| tool.parameter(key)));
                let opening = if self.any { "," } else { "{" };
                let key = Json::from(key.as_str());
                out.push(Piece::Arguments(format!("{opening}{key}:{value}")));
                self.any = true;
                self.key = None;
                held.drain(..end + PARAMETER_END.len());
                continue;
            }
            let space = held.len() - held.trim_start().len();
            held.drain(..space);
            if held.starts_with(PARAMETER) {
                let Some(key) = tag(held, PARAMETER) else {
                    return false;
                };
                self.key = Some(key);
            } else if held.starts_with(FUNCTION_END) {
                held.drain(..FUNCTION_END.len());
                self.finish(out);
                return true;
            } else if held.starts_with(CLOSE) {
                self.finish(out);
                return true;
            } else if held.is_empty()
                || [PARAMETER, FUNCTION_END, CLOSE]
                    .iter()
                    .any(|mark| begins(held, mark))
            {
                return false;
            } else {
                // Nothing belongs here: what the model wrote between parameters is dropped.
                let first = held.chars().next().map_or(1, char::len_utf8);
                held.drain(..first);
            }
        }
    }

    /// The call has ended. An unfinished value stays unfinished, so that nobody takes half a
    /// text for a whole one.
    pub fn finish(&mut self, out: &mut Vec<Piece>) {
        if self.key.is_some() {
            return;
        }
        let closing = if self.any { "}" } else { "{}" };
        out.push(Piece::Arguments(closing.to_string()));
        out.push(Piece::CallEnd);
    }
}

/// Takes a whole `<mark=name>` from the beginning.
fn tag(held: &mut String, mark: &str) -> Option<String> {
    let start = held.len() - held.trim_start().len();
    let end = held.find('>')?;
    let name = held[start..end].strip_prefix(mark)?.trim().to_string();
    held.drain(..=end);
    Some(name)
}

/// The JSON text that a value stands for.
fn value(text: &str, schema: Option<&Json>) -> String {
    let as_text = || Json::from(text).to_string();
    let Some(schema) = schema else {
        return as_text();
    };
    if accepts_text(schema) {
        return as_text();
    }
    let trimmed = text.trim();
    match trimmed {
        // As Python writes them.
        "True" => "true".to_string(),
        "False" => "false".to_string(),
        "None" => "null".to_string(),
        _ => match serde_json::from_str::<Json>(trimmed) {
            Ok(value) => value.to_string(),
            Err(_) => as_text(),
        },
    }
}

/// Whether the schema lets a value be a string, or says nothing of types.
pub(super) fn accepts_text(schema: &Json) -> bool {
    let Some(schema) = schema.as_object() else {
        return true;
    };
    for name in ["anyOf", "oneOf"] {
        if let Some(Json::Array(kinds)) = schema.get(name) {
            return kinds.iter().any(accepts_text);
        }
    }
    match schema.get("type") {
        Some(Json::String(kind)) => kind == "string",
        Some(Json::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => match schema.get("enum") {
            Some(Json::Array(values)) => values.iter().all(Json::is_string),
            _ => true,
        },
    }
}
