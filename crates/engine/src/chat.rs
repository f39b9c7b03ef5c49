//! Messages to the text of a prompt, by the model's own Jinja template.
//!
//! Templates are written for transformers: Jinja2 with Python's string and dictionary methods,
//! `trim_blocks`, `lstrip_blocks`, loop controls, `tojson` in Python's spacing, `strftime_now`
//! and `raise_exception`. The same is given here.

use crate::error::Error;
use crate::tokenizer::{Control, Tokenizer, one_line};
use kozue_checkpoint::Description;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// Work that a template may do, in instructions: a bound on loops in a file from elsewhere,
/// far above what a conversation needs.
const FUEL: u64 = 20_000_000;

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// "system", "user", "assistant" or "tool".
    pub role: String,
    /// The text.
    pub content: String,
    /// The thought before an assistant's answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// What an assistant called, in OpenAI's form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Json>,
    /// Which call a tool's message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the tool that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message with a role and a text.
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        Message {
            role: role.to_string(),
            content: content.into(),
            ..Message::default()
        }
    }
}

/// What besides the messages goes into a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    /// Descriptions of tools, in OpenAI's form.
    pub tools: Option<Json>,
    /// Whether a reasoning model may think; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Further variables of the template.
    pub variables: serde_json::Map<String, Json>,
}

/// The text of a prompt. Control tokens spelled in messages are broken by a mark, so that only
/// the template's own become tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered {
    text: String,
    mark: Option<char>,
}

impl Rendered {
    /// The text with the marks, which identifies the prompt.
    pub(crate) fn marked(&self) -> &str {
        &self.text
    }

    /// The text as a reader would see it.
    pub fn text(&self) -> String {
        without(&self.text, self.mark)
    }

    /// The tokens of the text from byte `start` of its marked form on.
    pub(crate) fn tokens_from(
        &self,
        start: usize,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, Error> {
        let text = &self.text[start..];
        if self.mark.is_none_or(|mark| !text.contains(mark)) {
            return tokenizer.encode(text, Control::Recognised);
        }
        let mut tokens = Vec::new();
        for segment in segments(text, tokenizer.control_texts()) {
            match segment {
                Segment::Control(control) => {
                    tokens.extend(tokenizer.encode(control, Control::Recognised)?);
                }
                Segment::Text(text) => {
                    let text = without(text, self.mark);
                    tokens.extend(tokenizer.encode(&text, Control::Text)?);
                }
            }
        }
        Ok(tokens)
    }

    /// The tokens of the prompt.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, Error> {
        self.tokens_from(0, tokenizer)
    }
}

fn without(text: &str, mark: Option<char>) -> String {
    match mark {
        Some(mark) => text.replace(mark, ""),
        None => text.to_string(),
    }
}

#[derive(Debug, PartialEq)]
enum Segment<'a> {
    Text(&'a str),
    Control(&'a str),
}

/// Cuts a text at control tokens; `controls` has the longest first.
fn segments<'a>(text: &'a str, controls: &[String]) -> Vec<Segment<'a>> {
    let mut segments = Vec::new();
    let mut start = 0;
    let mut at = 0;
    while at < text.len() {
        let here = &text[at..];
        match controls
            .iter()
            .find(|control| here.starts_with(control.as_str()))
        {
            Some(control) => {
                if start < at {
                    segments.push(Segment::Text(&text[start..at]));
                }
                segments.push(Segment::Control(&here[..control.len()]));
                at += control.len();
                start = at;
            }
            None => at += here.chars().next().map_or(1, char::len_utf8),
        }
    }
    if start < text.len() {
        segments.push(Segment::Text(&text[start..]));
    }
    segments
}

/// A model's chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    controls: Vec<String>,
}

const NAME: &str = "chat template";

impl ChatTemplate {
    /// Compiles the model's template. Errors: there is none, or it does not parse.
    pub fn new(description: &Description, tokenizer: &Tokenizer) -> Result<ChatTemplate, Error> {
        let source = description
            .chat_template
            .as_deref()
            .ok_or(Error::NoChatTemplate)?;
        ChatTemplate::from_source(
            source,
            description.bos_token.clone().unwrap_or_default(),
            description.eos_token.clone().unwrap_or_default(),
            tokenizer.control_texts().to_vec(),
        )
    }

    /// Compiles a template. `controls` are the texts of all control tokens.
    pub fn from_source(
        source: &str,
        bos: String,
        eos: String,
        controls: Vec<String>,
    ) -> Result<ChatTemplate, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|error| Error::ChatTemplate(explain(&error)))?,
        );
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(FUEL));
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, without_generation_blocks(source))
            .map_err(|error| Error::ChatTemplate(explain(&error)))?;
        Ok(ChatTemplate {
            environment,
            bos,
            eos,
            controls,
        })
    }

    /// The prompt for the assistant's next message.
    ///
    /// Errors: the template refuses the messages, or fails.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<Rendered, Error> {
        let mut messages = messages
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<Vec<Json>, _>>()
            .map_err(|error| Error::ChatTemplate(one_line(&error.to_string())))?;
        let mut tools = options.tools.clone();
        let mark = self.mark_for(&messages, tools.as_ref());
        if let Some(mark) = mark {
            messages
                .iter_mut()
                .for_each(|message| self.break_controls(message, mark));
            tools
                .iter_mut()
                .for_each(|tools| self.break_controls(tools, mark));
        }

        let mut context = options.variables.clone();
        context.insert("messages".into(), messages.into());
        if let Some(tools) = tools {
            context.insert("tools".into(), tools);
        }
        if let Some(thinking) = options.enable_thinking {
            context.insert("enable_thinking".into(), thinking.into());
        }
        context.insert("add_generation_prompt".into(), true.into());
        context.insert("bos_token".into(), self.bos.as_str().into());
        context.insert("eos_token".into(), self.eos.as_str().into());
        let text = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from(Serde(context))))
            .map_err(|error| Error::ChatTemplate(explain(&error)))?;
        Ok(Rendered { text, mark })
    }

    /// A character that no message has, if a message spells a control token. Unicode sets
    /// U+FDD0 to U+FDEF aside for internal use.
    fn mark_for(&self, messages: &[Json], tools: Option<&Json>) -> Option<char> {
        let values = || messages.iter().chain(tools);
        let spelled = |text: &str| self.controls.iter().any(|control| text.contains(control));
        if !values().any(|value| any_text(value, &spelled)) {
            return None;
        }
        ('\u{FDD0}'..='\u{FDEF}').find(|mark| {
            let used = |text: &str| text.contains(*mark);
            !values().any(|value| any_text(value, &used))
        })
    }

    fn break_controls(&self, value: &mut Json, mark: char) {
        match value {
            Json::String(text) => {
                for segment in segments(&std::mem::take(text), &self.controls) {
                    match segment {
                        Segment::Text(part) => text.push_str(part),
                        Segment::Control(control) => {
                            let mut characters = control.chars();
                            text.extend(characters.next());
                            text.push(mark);
                            text.push_str(characters.as_str());
                        }
                    }
                }
            }
            Json::Array(values) => values.iter_mut().for_each(|v| self.break_controls(v, mark)),
            Json::Object(values) => {
                values
                    .values_mut()
                    .for_each(|v| self.break_controls(v, mark));
            }
            Json::Null | Json::Bool(_) | Json::Number(_) => {}
        }
    }
}

fn any_text(value: &Json, test: &dyn Fn(&str) -> bool) -> bool {
    match value {
        Json::String(text) => test(text),
        Json::Array(values) => values.iter().any(|v| any_text(v, test)),
        Json::Object(values) => values.iter().any(|(key, v)| test(key) || any_text(v, test)),
        Json::Null | Json::Bool(_) | Json::Number(_) => false,
    }
}

/// `{% generation %}` only marks text for training: the same tags as a block that is always
/// taken keep their handling of white space.
fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let tag = &rest[start + 2..start + length];
        let (before, name) = match tag.strip_prefix(['-', '+']) {
            Some(name) => (&tag[..1], name),
            None => ("", tag),
        };
        let (name, after) = match name.strip_suffix(['-', '+']) {
            Some(inner) => (inner, &name[inner.len()..]),
            None => (name, ""),
        };
        let replacement = match name.trim() {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match replacement {
            Some(block) => {
                out.push_str(&rest[..start]);
                out.push_str(&format!("{{%{before} {block} {after}%}}"));
            }
            None => out.push_str(&rest[..start + length + 2]),
        }
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}

/// As Python's `json.dumps(value, ensure_ascii=False)`: spaces after separators, no escapes for
/// HTML; `indent` gives one item a line.
fn tojson(value: Serde<Json>, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted because templates pass them; each is what happens anyway.
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<Value> = options.get("separators")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let mut value = value.0;
    if sort == Some(true) {
        value.sort_all_objects();
    }
    let mut out = Vec::new();
    let written = match indent {
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            let style = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, style))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut out, Spaced,
        )),
    };
    written.map_err(|error| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"))
    })?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// `[1, 2]` and `{"a": 1}`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: String) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(&format, &jiff::ZonedDateTime::now()).map_err(|error| {
        minijinja::Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: {error}"),
        )
    })
}

fn explain(error: &minijinja::Error) -> String {
    let message = match error.detail() {
        // What raise_exception says is meant for the reader as it is.
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_string(),
        _ => error.to_string(),
    };
    let line = error
        .line()
        .map_or(String::new(), |line| format!(" (line {line})"));
    format!("{}{line}", one_line(&message))
}
