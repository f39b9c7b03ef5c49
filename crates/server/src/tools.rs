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

    /// Whether its schema is a reference that leads back to itself, so that no arguments satisfy it.
    pub fn refers_to_itself(&self) -> bool {
        let mut at = &self.parameters;
        let mut seen = Vec::new();
        while let Some(reference) = at.get("$ref").and_then(Json::as_str) {
            let target = reference
                .strip_prefix('#')
                .map(|at| self.parameters.pointer(at));
            let Some(Some(target)) = target else {
                return false;
            };
            if seen.contains(&reference) {
                return true;
            }
            seen.push(reference);
            at = target;
        }
        false
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_followed_to_their_end() {
        let itself = |parameters: Json| {
            let tool = Tool {
                name: "f".into(),
                description: None,
                parameters,
                strict: false,
            };
            tool.refers_to_itself()
        };
        let tree = json!({"type": "object", "properties": {"child": {"$ref": "#/$defs/tree"}}});
        assert!(itself(json!({"$ref": "#"})));
        let (a, b) = (json!({"$ref": "#/$defs/b"}), json!({"$ref": "#/$defs/a"}));
        assert!(itself(
            json!({"$ref": "#/$defs/a", "$defs": {"a": a, "b": b}})
        ));
        assert!(!itself(
            json!({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
        ));
        assert!(!itself(json!({"$ref": "https://example.org/schema"})));
        assert!(!itself(tree));
    }
}
