//! Messages and tools to the tokens of a prompt.

use crate::calls::CallFormat;
use crate::error::ApiError;
use crate::question::Question;
use crate::served::Served;
use crate::tools::{Tool, ToolChoice};
use kozue_engine::chat::{ChatOptions, Message};
use kozue_engine::tokenizer::Control;
use serde_json::{Value as Json, json};

/// A prompt.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Its text, which tells whether a thought is open at its end.
    pub text: String,
}

/// Renders a question. Errors: the template has no place for it.
pub fn render(served: &Served, question: &Question) -> Result<Prompt, ApiError> {
    if question.messages.is_empty() {
        return Err(ApiError::field(
            "messages",
            "messages must hold at least one message",
        ));
    }
    let template = served.template()?;
    let tools: &[Tool] = match question.tool_choice {
        ToolChoice::None => &[],
        _ => &question.tools,
    };
    let mut messages = join_leading_system(&question.messages);
    let mut options = ChatOptions {
        tools: None,
        enable_thinking: question.thinking,
        variables: question.variables.clone(),
    };
    if served.template_has_tools {
        let mistral = matches!(
            served.call_format,
            CallFormat::MistralList | CallFormat::MistralArguments
        );
        for message in &mut messages {
            message.tool_calls = message.tool_calls.take().map(with_objects);
            if mistral {
                shorten_ids(message);
            }
        }
        if !tools.is_empty() {
            options.tools = Some(tools.iter().map(Tool::to_openai).collect());
        }
    } else {
        messages = spell_tools(messages, tools);
    }
    let rendered = template.render(&messages, &options)?;
    let tokenizer = &served.loaded.tokenizer;
    let mut prompt = Prompt {
        tokens: rendered.tokens(tokenizer)?,
        text: rendered.text(),
    };
    if let Some(prefill) = &question.prefill {
        prompt
            .tokens
            .extend(tokenizer.encode(prefill, Control::Text)?);
        prompt.text.push_str(prefill);
    }
    Ok(prompt)
}

/// Templates know one system message, at the beginning; clients send several.
fn join_leading_system(messages: &[Message]) -> Vec<Message> {
    let leading = messages.iter().take_while(|m| m.role == "system").count();
    if leading < 2 {
        return messages.to_vec();
    }
    let texts: Vec<&str> = messages[..leading]
        .iter()
        .map(|m| m.content.as_str())
        .collect();
    let mut joined = vec![Message::new("system", texts.join("\n\n"))];
    joined.extend_from_slice(&messages[leading..]);
    joined
}

/// Arguments are text in the API and objects in templates.
fn with_objects(mut calls: Json) -> Json {
    for call in calls.as_array_mut().into_iter().flatten() {
        if let Some(arguments) = call.pointer_mut("/function/arguments")
            && let Some(text) = arguments.as_str()
        {
            *arguments = match serde_json::from_str(text) {
                Ok(object @ Json::Object(_)) => object,
                _ if text.trim().is_empty() => json!({}),
                _ => continue,
            };
        }
    }
    calls
}

/// Mistral's templates want names of calls of nine letters and digits. Any other name becomes one, the
/// same for a call and its result.
fn shorten_ids(message: &mut Message) {
    let short = |id: &mut String| {
        if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return;
        }
        // FNV-1a.
        let mut hash = id.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        *id = (0..9)
            .map(|_| {
                let digit = (hash % 36) as u32;
                hash /= 36;
                char::from_digit(digit, 36).unwrap_or('0')
            })
            .collect();
    };
    if let Some(id) = &mut message.tool_call_id {
        short(id);
    }
    let calls = message.tool_calls.as_mut().and_then(Json::as_array_mut);
    for call in calls.into_iter().flatten() {
        if let Some(Json::String(id)) = call.get_mut("id") {
            short(id);
        }
    }
}

/// For a template without a place for tools: their descriptions in the system message, and calls
/// and results as text, in the way of Hermes.
fn spell_tools(messages: Vec<Message>, tools: &[Tool]) -> Vec<Message> {
    let mut spelled: Vec<Message> = Vec::new();
    for message in messages {
        match (message.role.as_str(), &message.tool_calls) {
            ("assistant", Some(calls)) => {
                let mut content = message.content.clone();
                for call in calls.as_array().into_iter().flatten() {
                    let function = &with_objects(json!([call]))[0]["function"];
                    let call =
                        json!({"name": function["name"], "arguments": function["arguments"]});
                    let gap = if content.is_empty() { "" } else { "\n" };
                    content.push_str(&format!("{gap}<tool_call>\n{call}\n</tool_call>"));
                }
                spelled.push(Message {
                    reasoning_content: message.reasoning_content,
                    ..Message::new("assistant", content)
                });
            }
            (role, _) => {
                let message = if role == "tool" {
                    let result = &message.content;
                    Message::new(
                        "user",
                        format!("<tool_response>\n{result}\n</tool_response>"),
                    )
                } else {
                    message
                };
                match spelled.last_mut() {
                    // Results of calls made together, and what the user says beside them, are one
                    // message: many templates want turns to alternate.
                    Some(last)
                        if message.role == "user"
                            && last.role == "user"
                            && last.content.ends_with("</tool_response>") =>
                    {
                        last.content.push('\n');
                        last.content.push_str(&message.content);
                    }
                    _ => spelled.push(message),
                }
            }
        }
    }
    if tools.is_empty() {
        return spelled;
    }
    let list: Vec<String> = tools
        .iter()
        .map(|tool| tool.to_openai().to_string())
        .collect();
    let text = format!(
        "You may call functions. They are described between <tools> and </tools>, one JSON object a line:\n<tools>\n{}\n</tools>\nTo call one, answer with a JSON object that has its name and its arguments, between <tool_call> and </tool_call>:\n<tool_call>\n{{\"name\": \"NAME\", \"arguments\": {{}}}}\n</tool_call>",
        list.join("\n")
    );
    match spelled.first_mut() {
        Some(first) if first.role == "system" => {
            first.content = format!("{}\n\n{text}", first.content);
        }
        _ => spelled.insert(0, Message::new("system", text)),
    }
    spelled
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calling(arguments: &str) -> Message {
        Message {
            tool_calls: Some(json!([{"id": "c1", "type": "function",
                "function": {"name": "time", "arguments": arguments}}])),
            ..Message::new("assistant", "")
        }
    }

    #[test]
    fn arguments_become_objects_where_they_are() {
        for (text, value) in [
            ("{\"a\": [1]}", json!({"a": [1]})),
            ("", json!({})),
            ("oops", json!("oops")),
            ("[1]", json!("[1]")),
        ] {
            let calls = with_objects(calling(text).tool_calls.unwrap());
            assert_eq!(calls[0]["function"]["arguments"], value);
        }
    }

    #[test]
    fn what_a_user_says_beside_a_result_is_one_turn() {
        let messages = vec![
            Message::new("user", "When?"),
            calling("{}"),
            Message::new("tool", "12:00"),
            Message::new("tool", "13:00"),
            Message::new("user", "Go on."),
        ];
        let spelled = spell_tools(messages, &[]);
        let roles: Vec<&str> = spelled.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["user", "assistant", "user"]);
        assert_eq!(
            spelled[2].content,
            "<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response>\nGo on."
        );
    }

    #[test]
    fn mistrals_calls_have_names_of_nine_letters() {
        let mut call = calling("{}");
        let mut result = Message {
            tool_call_id: Some("c1".into()),
            ..Message::new("tool", "12:00")
        };
        shorten_ids(&mut call);
        shorten_ids(&mut result);
        let short = result.tool_call_id.clone().unwrap();
        assert_eq!(call.tool_calls.unwrap()[0]["id"], short.as_str());
        assert!(short.len() == 9 && short.bytes().all(|byte| byte.is_ascii_alphanumeric()));
        // One that is so already stays.
        shorten_ids(&mut result);
        assert_eq!(result.tool_call_id, Some(short));
    }

    #[test]
    fn tools_are_spelled_where_the_template_has_no_place() {
        let tool = Tool {
            name: "time".into(),
            description: None,
            parameters: json!({"type": "object"}),
            strict: false,
        };
        let result = |text: &str| Message {
            tool_call_id: Some("c1".into()),
            ..Message::new("tool", text)
        };
        let messages = vec![
            Message::new("system", "Be kind."),
            Message::new("user", "When?"),
            calling("{\"zone\": \"x\"}"),
            result("12:00"),
            result("13:00"),
        ];
        let spelled = spell_tools(messages, &[tool]);
        let roles: Vec<&str> = spelled.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert!(spelled[0].content.starts_with("Be kind.\n\nYou may"));
        assert!(spelled[0].content.contains(
            "<tools>\n{\"type\":\"function\",\"function\":{\"name\":\"time\",\"parameters\":{\"type\":\"object\"}}}\n</tools>"
        ));
        assert_eq!(
            spelled[2].content,
            "<tool_call>\n{\"name\":\"time\",\"arguments\":{\"zone\":\"x\"}}\n</tool_call>"
        );
        assert_eq!(
            spelled[3].content,
            "<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response>"
        );
    }

    #[test]
    fn leading_system_messages_are_joined() {
        let messages = [
            Message::new("system", "a"),
            Message::new("system", "b"),
            Message::new("user", "c"),
            Message::new("system", "d"),
        ];
        let joined = join_leading_system(&messages);
        assert_eq!(joined[0], Message::new("system", "a\n\nb"));
        assert_eq!(joined[1..], messages[2..]);
    }
}
