//! Bodies of `/v1/chat/completions`.

use super::fields::{call_json, format_of, thinking, tool, tool_choice};
use crate::body::{Content, OneOrMany};
use crate::error::ApiError;
use crate::question::{Format, Options, Question};
use crate::sampling_fields::SamplingFields;
use crate::tools::Tool;
use kozue_engine::chat::Message;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

/// A body. Fields that OpenAI knows and this server cannot honour are named here to be refused;
/// unknown ones are ignored.
#[derive(Debug, Deserialize)]
pub struct ChatRequest {
    pub model: Option<String>,
    messages: Vec<ChatMessage>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    stop: Option<OneOrMany>,
    n: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    response_format: Option<ResponseFormat>,
    tools: Option<Vec<ToolDescription>>,
    tool_choice: Option<Json>,
    parallel_tool_calls: Option<bool>,
    chat_template_kwargs: Option<Map<String, Json>>,
    enable_thinking: Option<bool>,
    reasoning_effort: Option<String>,
    functions: Option<Json>,
    function_call: Option<Json>,
    audio: Option<Json>,
    modalities: Option<Vec<String>>,
}

/// What a stream tells besides the answer.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
    /// Whether each chunk names the forward pass that made its text: `choices[].pass`.
    pub include_passes: Option<bool>,
    /// Whether verified drafts are told: `choices[].draft`.
    pub include_drafts: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ChatMessage {
    role: String,
    content: Option<Content>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ToolCall {
    id: Option<String>,
    function: CalledFunction,
}

#[derive(Debug, Deserialize)]
struct CalledFunction {
    name: String,
    arguments: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ToolDescription {
    #[serde(rename = "type")]
    kind: String,
    function: Option<FunctionDescription>,
}

#[derive(Debug, Deserialize)]
struct FunctionDescription {
    name: String,
    description: Option<String>,
    parameters: Option<Json>,
    strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<NamedSchema>,
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Json>,
}

impl ChatRequest {
    /// In the server's own terms.
    pub fn question(self, sampling: SamplingFields) -> Result<Question, ApiError> {
        self.refuse_unsupported()?;
        let mut messages = Vec::with_capacity(self.messages.len());
        for (index, message) in self.messages.into_iter().enumerate() {
            messages.push(message.read(&format!("messages[{index}]"))?);
        }
        let mut tools = Vec::new();
        for (index, tool) in self.tools.unwrap_or_default().into_iter().enumerate() {
            tools.push(tool.read(&format!("tools[{index}]"))?);
        }
        let tool_choice = tool_choice(self.tool_choice, &tools)?;
        let max_tokens = self.max_completion_tokens.or(self.max_tokens);
        let variables = self.chat_template_kwargs.unwrap_or_default();
        let (thinking, variables) = thinking(
            variables,
            self.enable_thinking,
            self.reasoning_effort.as_deref(),
        )?;
        let options = Options {
            max_tokens,
            stop: self.stop.map(Vec::from).unwrap_or_default(),
            n: self.n.unwrap_or(1),
            drafts: self.stream == Some(true)
                && self
                    .stream_options
                    .is_some_and(|options| options.include_drafts == Some(true)),
            logprobs: match self.logprobs {
                Some(true) => Some(self.top_logprobs.unwrap_or(0)),
                _ if self.top_logprobs.is_some_and(|top| top > 0) => {
                    let message = "top_logprobs needs logprobs to be true";
                    return Err(ApiError::field("top_logprobs", message));
                }
                _ => None,
            },
            ..sampling.options()?
        };
        options.check()?;
        Ok(Question {
            messages,
            tools,
            tool_choice,
            single_call: self.parallel_tool_calls == Some(false),
            format: match self.response_format {
                None => Format::Text,
                Some(ResponseFormat { kind, json_schema }) => {
                    let schema = json_schema.and_then(|named| named.schema);
                    let path = match kind.as_str() {
                        "json_schema" => "response_format.json_schema",
                        _ => "response_format",
                    };
                    format_of(&kind, schema, path)?
                }
            },
            thinking,
            variables,
            prefill: None,
            options,
        })
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let has = |value: &Option<Json>| value.as_ref().is_some_and(|value| !value.is_null());
        let only_text = self
            .modalities
            .iter()
            .flatten()
            .all(|modality| modality == "text");
        for (field, given, advice) in [
            ("functions", has(&self.functions), "use tools"),
            ("function_call", has(&self.function_call), "use tool_choice"),
            ("audio", has(&self.audio), "this model writes text"),
            ("modalities", !only_text, "this model writes text"),
        ] {
            if given {
                return Err(ApiError::field(
                    field,
                    format!("{field} is not supported: {advice}"),
                ));
            }
        }
        Ok(())
    }
}

impl ChatMessage {
    fn read(self, path: &str) -> Result<Message, ApiError> {
        let role = match self.role.as_str() {
            "developer" => "system",
            "system" | "user" | "assistant" | "tool" => &self.role,
            role => {
                let path = format!("{path}.role");
                let message = format!(
                    "{path}: {role:?} is no role: use system, developer, user, assistant or tool"
                );
                return Err(ApiError::field(path, message));
            }
        };
        let calls = self.tool_calls.filter(|calls| !calls.is_empty());
        let content = match self.content {
            Some(content) => content.text(&format!("{path}.content"))?,
            None if role == "assistant" => String::new(),
            None => {
                let path = format!("{path}.content");
                return Err(ApiError::field(path.clone(), format!("{path} is missing")));
            }
        };
        Ok(Message {
            role: role.to_string(),
            content,
            reasoning_content: self.reasoning_content.filter(|text| !text.is_empty()),
            tool_calls: calls.map(|calls| calls.into_iter().map(ToolCall::into_json).collect()),
            tool_call_id: self.tool_call_id,
            name: self.name,
        })
    }
}

impl ToolCall {
    fn into_json(self) -> Json {
        call_json(
            self.id.as_deref().unwrap_or_default(),
            &self.function.name,
            self.function.arguments.as_deref().unwrap_or_default(),
        )
    }
}

impl ToolDescription {
    fn read(self, path: &str) -> Result<Tool, ApiError> {
        let Some(function) = self.function.filter(|_| self.kind == "function") else {
            let message = format!(
                "{path}: only tools of type \"function\" with a function are supported, not {:?}",
                self.kind
            );
            return Err(ApiError::field(path, message));
        };
        tool(
            path,
            function.name,
            function.description,
            function.parameters,
            function.strict,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Json) -> Result<Question, ApiError> {
        let text = body.to_string();
        let (request, sampling) = crate::body::parse::<ChatRequest>(text.as_bytes())?;
        request.question(sampling)
    }

    fn with(field: &str, value: Json) -> Result<Question, ApiError> {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body[field] = value;
        read(body)
    }

    #[test]
    fn messages_of_all_roles() {
        let question = read(json!({"messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c", "name": "n"},
            {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
                {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "i", "content": ""},
            {"role": "assistant"},
        ]}))
        .unwrap();
        let m = &question.messages;
        assert_eq!(m[0], Message::new("system", "a\nb"));
        assert_eq!(m[1].name.as_deref(), Some("n"));
        assert_eq!(m[2].reasoning_content.as_deref(), Some("r"));
        assert_eq!(m[2].tool_calls, Some(json!([call_json("i", "f", "{}")])));
        assert_eq!(
            (m[3].role.as_str(), m[3].tool_call_id.as_deref()),
            ("tool", Some("i"))
        );
        assert_eq!(m[4], Message::new("assistant", ""));
    }

    #[test]
    fn refusals_name_the_field() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        for (field, value, param) in [
            (
                "messages",
                json!([{"role": "robot", "content": ""}]),
                "messages[0].role",
            ),
            ("messages", json!([{"role": "user"}]), "messages[0].content"),
            (
                "messages",
                json!([{"role": "user", "content": [{"type": "image_url"}]}]),
                "messages[0].content[0]",
            ),
            ("messages", json!("hi"), "messages"),
            ("temperature", json!(2.1), "temperature"),
            ("temperature", json!(-0.1), "temperature"),
            ("temperature", json!("hot"), "temperature"),
            ("top_p", json!(1.5), "top_p"),
            ("min_p", json!(-1), "min_p"),
            ("top_k", json!(-2), "top_k"),
            ("presence_penalty", json!(3), "presence_penalty"),
            ("frequency_penalty", json!(-3), "frequency_penalty"),
            ("repetition_penalty", json!(0), "repetition_penalty"),
            ("max_tokens", json!(0), "max_tokens"),
            ("max_completion_tokens", json!(-1), "max_completion_tokens"),
            ("n", json!(0), "n"),
            ("n", json!(17), "n"),
            ("top_logprobs", json!(2), "top_logprobs"),
            ("stop", json!({}), "stop"),
            ("stop", json!(""), "stop"),
            ("stop", json!(["a", ""]), "stop"),
            ("logit_bias", json!({"x": 1}), "logit_bias"),
            ("logit_bias", json!({"1": "x"}), "logit_bias.1"),
            ("logit_bias", json!({"1": 101}), "logit_bias"),
            (
                "response_format",
                json!({"type": "xml"}),
                "response_format.type",
            ),
            (
                "response_format",
                json!({"type": "json_schema"}),
                "response_format.json_schema.schema",
            ),
            ("tools", json!([{"type": "web_search"}]), "tools[0]"),
            (
                "tools",
                json!([{"type": "function", "function": {"name": "a b"}}]),
                "tools[0].name",
            ),
            ("tool_choice", json!("required"), "tool_choice"),
            (
                "tool_choice",
                json!({"type": "function", "function": {"name": "f"}}),
                "tool_choice",
            ),
            ("tool_choice", json!("maybe"), "tool_choice"),
            ("reasoning_effort", json!("huge"), "reasoning_effort"),
            ("functions", json!([]), "functions"),
            ("modalities", json!(["audio"]), "modalities"),
        ] {
            let error = with(field, value.clone()).unwrap_err();
            assert_eq!(
                error.param.as_deref(),
                Some(param),
                "{field}: {value}: {}",
                error.message
            );
            assert!(!error.message.contains('\n'));
        }
        assert!(with("tools", json!([tool])).is_ok());
        assert!(with("something_else", json!(1)).is_ok());
        assert!(with("audio", json!(null)).is_ok());
    }

    #[test]
    fn thinking_has_three_spellings() {
        for (field, value, thinking) in [
            ("enable_thinking", json!(true), Some(true)),
            ("reasoning_effort", json!("none"), Some(false)),
            ("reasoning_effort", json!("high"), Some(true)),
            (
                "chat_template_kwargs",
                json!({"enable_thinking": false, "x": 1}),
                Some(false),
            ),
            ("chat_template_kwargs", json!({}), None),
        ] {
            let question = with(field, value.clone()).unwrap();
            assert_eq!(question.thinking, thinking, "{value}");
            assert!(!question.variables.contains_key("enable_thinking"));
        }
        let question = with("chat_template_kwargs", json!({"x": 1})).unwrap();
        assert_eq!(question.variables["x"], 1);
    }

    #[test]
    fn top_k_of_minus_1_or_0_is_off() {
        let recommended = kozue_engine::sampling::Sampling {
            top_k: Some(20),
            ..kozue_engine::sampling::Sampling::greedy()
        };
        for (given, kept) in [(-1, None), (0, None), (7, Some(7))] {
            let question = with("top_k", json!(given)).unwrap();
            let sampling = question.options.sampling(recommended.clone(), 0, 0);
            assert_eq!(sampling.top_k, kept, "{given}");
        }
    }

    #[test]
    fn a_bias_of_minus_100_bans() {
        let question = with("logit_bias", json!({"7": -100, "8": 5})).unwrap();
        let recommended = kozue_engine::sampling::Sampling::greedy();
        let sampling = question.options.sampling(recommended, 3, 2);
        assert_eq!(sampling.logit_bias, [(7, f32::NEG_INFINITY), (8, 5.0)]);
        assert_eq!(sampling.seed, 5);
    }
}
