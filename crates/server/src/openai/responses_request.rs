//! Bodies of `/v1/responses`.

use super::fields::{call_json, format_of, thinking, tool, tool_choice};
use crate::body::Content;
use crate::error::ApiError;
use crate::question::{Format, Options, Question};
use crate::sampling_fields::SamplingFields;
use crate::tools::Tool;
use kozue_engine::chat::Message;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

/// A body; see [`super::chat_request::ChatRequest`] for what happens to other fields.
#[derive(Debug, Deserialize)]
pub struct ResponsesRequest {
    pub model: Option<String>,
    input: Input,
    pub instructions: Option<String>,
    pub stream: Option<bool>,
    pub max_output_tokens: Option<usize>,
    tools: Option<Vec<Json>>,
    pub tool_choice: Option<Json>,
    pub parallel_tool_calls: Option<bool>,
    text: Option<TextOptions>,
    reasoning: Option<ReasoningOptions>,
    pub metadata: Option<Json>,
    chat_template_kwargs: Option<Map<String, Json>>,
    previous_response_id: Option<String>,
    conversation: Option<Json>,
    background: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Item>),
}

/// An item; which fields count depends on its type.
#[derive(Debug, Deserialize)]
struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    summary: Option<Vec<Json>>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
}

#[derive(Debug, Deserialize)]
struct TextOptions {
    format: Option<TextFormat>,
}

#[derive(Debug, Deserialize)]
struct TextFormat {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Json>,
}

#[derive(Debug, Deserialize)]
struct ReasoningOptions {
    effort: Option<String>,
}

impl ResponsesRequest {
    /// The tools as they were given.
    pub fn tools(&self) -> &[Json] {
        self.tools.as_deref().unwrap_or_default()
    }

    /// In the server's own terms.
    pub fn question(self, sampling: SamplingFields) -> Result<Question, ApiError> {
        self.refuse_unsupported()?;
        let mut reader = Reader::default();
        if let Some(text) = self.instructions {
            reader.messages.push(Message::new("system", text));
        }
        match self.input {
            Input::Text(text) => reader.messages.push(Message::new("user", text)),
            Input::Items(items) => {
                for (index, item) in items.into_iter().enumerate() {
                    reader.item(item, &format!("input[{index}]"))?;
                }
            }
        }
        let mut tools = Vec::new();
        for (index, description) in self.tools.unwrap_or_default().into_iter().enumerate() {
            tools.push(read_tool(description, &format!("tools[{index}]"))?);
        }
        let effort = self.reasoning.and_then(|reasoning| reasoning.effort);
        let variables = self.chat_template_kwargs.unwrap_or_default();
        let (thinking, variables) = thinking(variables, None, effort.as_deref())?;
        let options = Options {
            max_tokens: self.max_output_tokens,
            ..sampling.options()?
        };
        options
            .check()
            .map_err(|error| error.renamed("max_tokens", "max_output_tokens"))?;
        Ok(Question {
            messages: reader.messages,
            tool_choice: tool_choice(self.tool_choice, &tools)?,
            tools,
            single_call: self.parallel_tool_calls == Some(false),
            format: match self.text.and_then(|text| text.format) {
                None => Format::Text,
                Some(format) => format_of(&format.kind, format.schema, "text.format")?,
            },
            thinking,
            variables,
            prefill: None,
            options,
        })
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let conversation = self.conversation.as_ref().is_some_and(|id| !id.is_null());
        for (field, given) in [
            ("previous_response_id", self.previous_response_id.is_some()),
            ("conversation", conversation),
            ("background", self.background == Some(true)),
        ] {
            if given {
                let message = format!(
                    "{field} is not supported: this server keeps no responses, send the whole conversation as input"
                );
                return Err(ApiError::field(field, message));
            }
        }
        Ok(())
    }
}

/// Items to messages: calls and thoughts belong to the assistant's message around them.
#[derive(Default)]
struct Reader {
    messages: Vec<Message>,
}

impl Reader {
    fn item(&mut self, item: Item, path: &str) -> Result<(), ApiError> {
        let missing = |field: &str| {
            let path = format!("{path}.{field}");
            ApiError::field(path.clone(), format!("{path} is missing"))
        };
        match item.kind.as_deref() {
            None | Some("message") => {
                let role = item.role.ok_or_else(|| missing("role"))?;
                let content = item.content.ok_or_else(|| missing("content"))?;
                let content = content.text(&format!("{path}.content"))?;
                match role.as_str() {
                    "assistant" => {
                        let message = self.assistant(|message| message.tool_calls.is_none());
                        message.content.push_str(&content);
                    }
                    "user" | "system" => self.messages.push(Message::new(&role, content)),
                    "developer" => self.messages.push(Message::new("system", content)),
                    _ => {
                        let path = format!("{path}.role");
                        let message = format!(
                            "{path}: {role:?} is no role: use user, assistant, system or developer"
                        );
                        return Err(ApiError::field(path, message));
                    }
                }
            }
            Some("function_call") => {
                let name = item.name.ok_or_else(|| missing("name"))?;
                let id = item.call_id.ok_or_else(|| missing("call_id"))?;
                let call = call_json(&id, &name, item.arguments.as_deref().unwrap_or_default());
                let message = self.assistant(|_| true);
                match &mut message.tool_calls {
                    Some(Json::Array(calls)) => calls.push(call),
                    calls => *calls = Some(Json::Array(vec![call])),
                }
            }
            Some("function_call_output") => {
                let id = item.call_id.ok_or_else(|| missing("call_id"))?;
                let output = item.output.ok_or_else(|| missing("output"))?;
                self.messages.push(Message {
                    tool_call_id: Some(id),
                    ..Message::new("tool", output.text(&format!("{path}.output"))?)
                });
            }
            Some("reasoning") => {
                let text = match item.content {
                    Some(content) => content.text(&format!("{path}.content"))?,
                    None => {
                        let parts = item.summary.unwrap_or_default();
                        let texts = parts.iter().filter_map(|part| part["text"].as_str());
                        texts.collect::<Vec<_>>().join("\n")
                    }
                };
                if !text.is_empty() {
                    // A thought begins the assistant's message.
                    self.messages.push(Message {
                        reasoning_content: Some(text),
                        ..Message::new("assistant", "")
                    });
                }
            }
            Some(kind) => {
                let path = format!("{path}.type");
                let message = format!("{path}: items of type {kind:?} are not supported");
                return Err(ApiError::field(path, message));
            }
        }
        Ok(())
    }

    /// The assistant's message at the end, where there is one that `fits`; a new one otherwise.
    fn assistant(&mut self, fits: impl Fn(&Message) -> bool) -> &mut Message {
        let last = self.messages.last();
        if !last.is_some_and(|last| last.role == "assistant" && fits(last)) {
            self.messages.push(Message::new("assistant", ""));
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

fn read_tool(description: Json, path: &str) -> Result<Tool, ApiError> {
    let kind = description["type"].as_str().unwrap_or_default();
    if kind != "function" {
        let message =
            format!("{path}: only tools of type \"function\" are supported, not {kind:?}");
        return Err(ApiError::field(path, message));
    }
    let text = |field: &str| description[field].as_str().map(str::to_string);
    tool(
        path,
        text("name").unwrap_or_default(),
        text("description"),
        description.get("parameters").cloned(),
        description["strict"].as_bool(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Json) -> Result<Question, ApiError> {
        let text = body.to_string();
        let (request, sampling) = crate::body::parse::<ResponsesRequest>(text.as_bytes())?;
        request.question(sampling)
    }

    #[test]
    fn items_become_messages() {
        let question = read(json!({
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": "a"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
                {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
                {"role": "assistant", "content": "c"},
                {"role": "user", "content": [{"type": "input_text", "text": "d"}]},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        }))
        .unwrap();
        let roles: Vec<&str> = question.messages.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(
            roles,
            [
                "system",
                "user",
                "assistant",
                "tool",
                "tool",
                "assistant",
                "user"
            ]
        );
        let calling = &question.messages[2];
        assert_eq!(calling.reasoning_content.as_deref(), Some("r"));
        assert_eq!(calling.content, "b");
        assert_eq!(
            calling.tool_calls,
            Some(json!([
                call_json("1", "f", "{}"),
                call_json("2", "g", "{}")
            ]))
        );
        assert_eq!(question.messages[4].content, "y");
        assert!(question.tools[0].strict);
        assert_eq!(
            question.tool_choice,
            crate::tools::ToolChoice::Function("f".into())
        );
        assert_eq!(
            question.format,
            Format::JsonSchema(json!({"type": "object"}))
        );
    }

    #[test]
    fn refusals_name_the_field() {
        for (field, value, param) in [
            ("input", json!(3), "input"),
            ("input", json!([{"role": "user"}]), "input[0].content"),
            (
                "input",
                json!([{"role": "robot", "content": ""}]),
                "input[0].role",
            ),
            (
                "input",
                json!([{"type": "item_reference"}]),
                "input[0].type",
            ),
            (
                "input",
                json!([{"type": "function_call", "name": "f"}]),
                "input[0].call_id",
            ),
            (
                "input",
                json!([{"role": "user", "content": [{"type": "input_image"}]}]),
                "input[0].content[0]",
            ),
            ("tools", json!([{"type": "web_search"}]), "tools[0]"),
            (
                "previous_response_id",
                json!("resp_1"),
                "previous_response_id",
            ),
            ("background", json!(true), "background"),
            ("max_output_tokens", json!(0), "max_output_tokens"),
            (
                "text",
                json!({"format": {"type": "json_schema"}}),
                "text.format.schema",
            ),
        ] {
            let mut body = json!({"input": "hi"});
            body[field] = value;
            let error = read(body).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
    }
}
