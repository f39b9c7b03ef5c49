//! Bodies of `/v1/messages`.

use crate::body::Content;
use crate::error::ApiError;
use crate::openai::{call_json, tool};
use crate::question::{Options, Question};
use crate::sampling_fields::SamplingFields;
use crate::tools::{Tool, ToolChoice};
use kozue_engine::chat::Message;
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

/// A body; unknown fields are ignored.
#[derive(Debug, Deserialize)]
pub struct MessagesRequest {
    pub model: Option<String>,
    max_tokens: Option<usize>,
    messages: Vec<Turn>,
    system: Option<Content>,
    pub stop_sequences: Option<Vec<String>>,
    pub stream: Option<bool>,
    tools: Option<Vec<ToolDescription>>,
    tool_choice: Option<Choice>,
    thinking: Option<Thinking>,
    chat_template_kwargs: Option<Map<String, Json>>,
}

#[derive(Debug, Deserialize)]
struct Turn {
    role: String,
    content: Blocks,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text or a list of blocks with a type"
)]
enum Blocks {
    Text(String),
    Blocks(Vec<Block>),
}

/// A block; which fields count depends on its type.
#[derive(Debug, Deserialize)]
struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Json>,
    tool_use_id: Option<String>,
    content: Option<Content>,
    is_error: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ToolDescription {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Json>,
    strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
}

impl MessagesRequest {
    /// In the server's own terms; `answered` says that an answer is wanted, which needs
    /// `max_tokens`.
    pub fn question(self, sampling: SamplingFields, answered: bool) -> Result<Question, ApiError> {
        if answered && self.max_tokens.is_none() {
            return Err(ApiError::field("max_tokens", "max_tokens is missing"));
        }
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            messages.push(Message::new("system", system.text("system")?));
        }
        for (index, turn) in self.messages.into_iter().enumerate() {
            read_turn(turn, &format!("messages[{index}]"), &mut messages)?;
        }
        // The beginning of the answer, written by the client.
        let prefill = messages
            .pop_if(|last| last.role == "assistant" && last.tool_calls.is_none())
            .map(|last| last.content.trim_end().to_string());
        let mut tools = Vec::new();
        for (index, description) in self.tools.unwrap_or_default().into_iter().enumerate() {
            tools.push(description.read(&format!("tools[{index}]"))?);
        }
        let single_call = self
            .tool_choice
            .as_ref()
            .is_some_and(|choice| choice.disable_parallel_tool_use == Some(true));
        let thinking = match self
            .thinking
            .as_ref()
            .map(|thinking| thinking.kind.as_str())
        {
            // An answer that has begun is past its thought.
            _ if prefill.is_some() => Some(false),
            None => None,
            Some("disabled") => Some(false),
            Some("enabled" | "adaptive") => Some(true),
            Some(kind) => {
                let message =
                    format!("thinking.type must be enabled, disabled or adaptive, not {kind:?}");
                return Err(ApiError::field("thinking.type", message));
            }
        };
        let options = Options {
            max_tokens: self.max_tokens,
            stop: self.stop_sequences.unwrap_or_default(),
            ..sampling.options()?
        };
        options
            .check()
            .map_err(|error| error.renamed("stop", "stop_sequences"))?;
        Ok(Question {
            tool_choice: read_choice(self.tool_choice, &tools)?,
            messages,
            tools,
            single_call,
            thinking,
            variables: self.chat_template_kwargs.unwrap_or_default(),
            prefill,
            options,
            ..Question::default()
        })
    }
}

/// A turn may hold results of tools, which are messages of their own.
fn read_turn(turn: Turn, path: &str, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    if turn.role != "user" && turn.role != "assistant" {
        let path = format!("{path}.role");
        let message = format!("{path}: {:?} is no role: use user or assistant", turn.role);
        return Err(ApiError::field(path, message));
    }
    let blocks = match turn.content {
        Blocks::Text(text) => {
            messages.push(Message::new(&turn.role, text));
            return Ok(());
        }
        Blocks::Blocks(blocks) => blocks,
    };
    let assistant = turn.role == "assistant";
    let mut texts = Vec::new();
    let mut thoughts = Vec::new();
    let mut calls = Vec::new();
    let mut results = 0;
    for (index, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}.content[{index}]");
        let missing = |field: &str| {
            let path = format!("{path}.{field}");
            ApiError::field(path.clone(), format!("{path} is missing"))
        };
        match block.kind.as_str() {
            "text" => texts.push(block.text.ok_or_else(|| missing("text"))?),
            "thinking" if assistant => {
                thoughts.push(block.thinking.ok_or_else(|| missing("thinking"))?);
            }
            "redacted_thinking" if assistant => {}
            "tool_use" if assistant => {
                let id = block.id.ok_or_else(|| missing("id"))?;
                let name = block.name.ok_or_else(|| missing("name"))?;
                let input = block.input.unwrap_or_else(|| json!({}));
                calls.push(call_json(&id, &name, &input.to_string()));
            }
            "tool_result" if !assistant => {
                let id = block.tool_use_id.ok_or_else(|| missing("tool_use_id"))?;
                let mut text = match block.content {
                    Some(content) => content.text(&format!("{path}.content"))?,
                    None => String::new(),
                };
                if block.is_error == Some(true) {
                    text.insert_str(0, "Error: ");
                }
                messages.push(Message {
                    tool_call_id: Some(id),
                    ..Message::new("tool", text)
                });
                results += 1;
            }
            kind => {
                let message = format!(
                    "{path}: blocks of type {kind:?} are not supported in a turn of the {}",
                    turn.role
                );
                return Err(ApiError::field(path, message));
            }
        }
    }
    if texts.is_empty() && results > 0 {
        return Ok(());
    }
    messages.push(Message {
        reasoning_content: (!thoughts.is_empty()).then(|| thoughts.join("\n")),
        tool_calls: (!calls.is_empty()).then(|| Json::Array(calls)),
        ..Message::new(&turn.role, texts.join("\n"))
    });
    Ok(())
}

impl ToolDescription {
    fn read(self, path: &str) -> Result<Tool, ApiError> {
        if let Some(kind) = self.kind.filter(|kind| kind != "custom") {
            let message =
                format!("{path}: only tools with an input_schema are supported, not {kind:?}");
            return Err(ApiError::field(path, message));
        }
        tool(
            path,
            self.name,
            self.description,
            self.input_schema,
            self.strict,
        )
    }
}

fn read_choice(choice: Option<Choice>, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    let Some(choice) = choice else {
        return Ok(ToolChoice::Auto);
    };
    match (choice.kind.as_str(), choice.name) {
        ("auto", _) => Ok(ToolChoice::Auto),
        ("none", _) => Ok(ToolChoice::None),
        ("any", _) if !tools.is_empty() => Ok(ToolChoice::Required),
        ("tool", Some(name)) if tools.iter().any(|tool| tool.name == name) => {
            Ok(ToolChoice::Function(name))
        }
        ("any" | "tool", _) => Err(ApiError::field(
            "tool_choice",
            "tool_choice asks for a tool that is not among the tools",
        )),
        (kind, _) => Err(ApiError::field(
            "tool_choice.type",
            format!("tool_choice.type must be auto, any, tool or none, not {kind:?}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Json) -> Result<Question, ApiError> {
        let text = body.to_string();
        let (request, sampling) = crate::body::parse::<MessagesRequest>(text.as_bytes())?;
        request.question(sampling, true)
    }

    #[test]
    fn turns_become_messages() {
        let question = read(json!({
            "max_tokens": 5,
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "d"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "bad", "is_error": true},
                    {"type": "text", "text": "e"}]},
                {"role": "assistant", "content": "The answer "},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        }))
        .unwrap();
        let m = &question.messages;
        assert_eq!(m[0], Message::new("system", "a\nb"));
        assert_eq!(m[2].reasoning_content.as_deref(), Some("t"));
        assert_eq!(
            m[2].tool_calls,
            Some(json!([call_json("1", "f", "{\"x\":1}")]))
        );
        assert_eq!(
            (m[3].role.as_str(), m[3].content.as_str()),
            ("tool", "Error: bad")
        );
        assert_eq!(m[4], Message::new("user", "e"));
        assert_eq!(m.len(), 5);
        assert_eq!(question.prefill.as_deref(), Some("The answer"));
        assert_eq!(question.thinking, Some(false));
        assert!(question.single_call);
        assert_eq!(question.tool_choice, ToolChoice::Required);
    }

    #[test]
    fn refusals_name_the_field() {
        for (field, value, param) in [
            ("max_tokens", json!(null), "max_tokens"),
            ("max_tokens", json!(0), "max_tokens"),
            ("stop_sequences", json!([""]), "stop_sequences"),
            (
                "messages",
                json!([{"role": "system", "content": ""}]),
                "messages[0].role",
            ),
            (
                "messages",
                json!([{"role": "user", "content": [{"type": "image"}]}]),
                "messages[0].content[0]",
            ),
            (
                "messages",
                json!([{"role": "user", "content": [{"type": "tool_result"}]}]),
                "messages[0].content[0].tool_use_id",
            ),
            (
                "messages",
                json!([{"role": "user", "content": [{"type": "tool_use"}]}]),
                "messages[0].content[0]",
            ),
            (
                "tools",
                json!([{"type": "bash_20250124", "name": "bash"}]),
                "tools[0]",
            ),
            (
                "tool_choice",
                json!({"type": "tool", "name": "x"}),
                "tool_choice",
            ),
            ("tool_choice", json!({"type": "maybe"}), "tool_choice.type"),
            ("thinking", json!({"type": "deep"}), "thinking.type"),
        ] {
            let mut body =
                json!({"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]});
            body[field] = value;
            let error = read(body).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
    }
}
