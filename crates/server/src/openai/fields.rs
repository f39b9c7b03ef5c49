//! Fields that several APIs share.

use crate::error::ApiError;
use crate::question::Format;
use crate::tools::{Tool, ToolChoice};
use serde_json::{Map, Value as Json, json};

/// A call in OpenAI's form.
pub fn call_json(id: &str, name: &str, arguments: &str) -> Json {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// A tool, checked.
pub fn tool(
    path: &str,
    name: String,
    description: Option<String>,
    parameters: Option<Json>,
    strict: Option<bool>,
) -> Result<Tool, ApiError> {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
    if name.is_empty() || name.len() > 128 || !name.chars().all(fine) {
        let path = format!("{path}.name");
        let message = format!(
            "{path}: a tool's name is 1 to 128 letters, digits, underscores, dashes, dots or colons"
        );
        return Err(ApiError::field(path, message));
    }
    let parameters = parameters
        .filter(|parameters| !parameters.is_null())
        .unwrap_or_else(|| json!({"type": "object", "properties": {}}));
    if !parameters.is_object() {
        let path = format!("{path}.parameters");
        let message = format!("{path} must be a JSON schema: an object");
        return Err(ApiError::field(path, message));
    }
    let tool = Tool {
        name,
        description,
        parameters,
        strict: strict.unwrap_or(false),
    };
    if tool.refers_to_itself() {
        let path = format!("{path}.parameters");
        let message = format!("{path}: the schema refers to nothing but itself");
        return Err(ApiError::field(path, message));
    }
    Ok(tool)
}

/// Reads `tool_choice`, as chat and responses spell it.
pub fn tool_choice(choice: Option<Json>, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    let bad = |message: String| Err(ApiError::field("tool_choice", message));
    let choice = match choice {
        None | Some(Json::Null) => return Ok(ToolChoice::Auto),
        Some(choice) => choice,
    };
    let parsed = match &choice {
        Json::String(word) if word == "auto" => ToolChoice::Auto,
        Json::String(word) if word == "none" => ToolChoice::None,
        Json::String(word) if word == "required" => ToolChoice::Required,
        choice => {
            let name = choice
                .pointer("/function/name")
                .or_else(|| choice.get("name"))
                .and_then(Json::as_str);
            match name {
                Some(name) => ToolChoice::Function(name.to_string()),
                None => {
                    return bad(
                        "tool_choice must be \"auto\", \"none\", \"required\" or name a function"
                            .to_string(),
                    );
                }
            }
        }
    };
    match &parsed {
        ToolChoice::Function(name) if !tools.iter().any(|tool| tool.name == *name) => bad(format!(
            "tool_choice names {name:?}, which is not among the tools"
        )),
        ToolChoice::Required if tools.is_empty() => {
            bad("tool_choice is \"required\", but there are no tools".to_string())
        }
        _ => Ok(parsed),
    }
}

/// What a format's type and schema mean; `path` names the field in an error.
pub fn format_of(kind: &str, schema: Option<Json>, path: &str) -> Result<Format, ApiError> {
    match kind {
        "text" => Ok(Format::Text),
        "json_object" => Ok(Format::JsonObject),
        "json_schema" => schema.map(Format::JsonSchema).ok_or_else(|| {
            let path = format!("{path}.schema");
            ApiError::field(path.clone(), format!("{path} is missing"))
        }),
        kind => {
            let path = format!("{path}.type");
            let message = format!("{path} must be text, json_object or json_schema, not {kind:?}");
            Err(ApiError::field(path, message))
        }
    }
}

/// Whether to think, from the three ways of saying so, and what else the template is told.
pub fn thinking(
    mut variables: Map<String, Json>,
    enable: Option<bool>,
    effort: Option<&str>,
) -> Result<(Option<bool>, Map<String, Json>), ApiError> {
    let by_effort = match effort {
        None => None,
        Some("none" | "minimal") => Some(false),
        Some("low" | "medium" | "high" | "xhigh" | "max") => Some(true),
        Some(other) => {
            return Err(ApiError::field(
                "reasoning_effort",
                format!(
                    "reasoning_effort must be none, minimal, low, medium or high, not {other:?}"
                ),
            ));
        }
    };
    if let Some(effort) = effort {
        variables
            .entry("reasoning_effort")
            .or_insert_with(|| effort.into());
    }
    let by_template = match variables.remove("enable_thinking") {
        None | Some(Json::Null) => None,
        Some(Json::Bool(value)) => Some(value),
        Some(_) => {
            return Err(ApiError::field(
                "chat_template_kwargs.enable_thinking",
                "chat_template_kwargs.enable_thinking must be true or false",
            ));
        }
    };
    Ok((by_template.or(enable).or(by_effort), variables))
}
