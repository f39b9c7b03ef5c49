//! The tools that a client offers to the model.

use serde_json::{Value as Json, json};

/// A function that the client runs when the model calls it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments: an object.
    pub parameters: Json,
    /// Whether arguments must follow the schema.
    pub strict: bool,
}

impl Tool {
    /// As chat templates expect it: OpenAI's form.
    pub fn to_openai(&self) -> Json {
        let mut function = json!({"name": self.name});
        if let Some(description) = &self.description {
            function["description"] = description.as_str().into();
        }
        function["parameters"] = self.parameters.clone();
        json!({"type": "function", "function": function})
    }

    /// The schema of one argument.
    pub fn parameter(&self, name: &str) -> Option<&Json> {
        self.parameters.get("properties")?.get(name)
    }
}

/// Whether the model may, must or must not call tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// No call; the tools are not shown to it.
    None,
    /// At least one call.
    Required,
    /// A call of this tool.
    Function(String),
}
