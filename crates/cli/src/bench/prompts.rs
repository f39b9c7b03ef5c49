//! Prompts to measure with: some that come with the program, or a file's.

use crate::failure::Failure;
use serde::Deserialize;
use std::fmt::Display;
use std::path::Path;

/// Prompts that come with the program.
const PROMPTS: &str = include_str!("prompts.jsonl");

/// A prompt and the group that its figures belong to.
#[derive(Clone, Debug, Deserialize)]
pub struct Prompt {
    /// The group.
    pub category: String,
    /// The prompt.
    pub prompt: String,
}

/// Those of a file, one JSON object a line. Errors: it cannot be read; a line that is no prompt.
pub fn read(file: Option<&Path>) -> Result<Vec<Prompt>, Failure> {
    let (text, source) = match file {
        None => (PROMPTS.to_string(), "prompts".to_string()),
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|e| Failure::Failed(format!("{}: {e}", path.display())))?;
            (text, path.display().to_string())
        }
    };
    let prompts = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            let wrong = |what: &dyn Display| {
                Failure::Failed(format!(
                    "{source}, line {}: {what}; a line is {{\"category\": \"...\", \"prompt\": \"...\"}}",
                    number + 1
                ))
            };
            let prompt: Prompt = serde_json::from_str(line).map_err(|error| wrong(&error))?;
            if prompt.prompt.trim().is_empty() {
                return Err(wrong(&"the prompt is empty"));
            }
            Ok(prompt)
        })
        .collect::<Result<Vec<Prompt>, Failure>>()?;
    if prompts.is_empty() {
        return Err(Failure::Failed(format!(
            "{source}: there is no prompt in it"
        )));
    }
    Ok(prompts)
}

/// The groups, each once, in the order in which they come.
pub fn categories(prompts: &[Prompt]) -> Vec<&str> {
    let mut categories: Vec<&str> = Vec::new();
    for prompt in prompts {
        if !categories.contains(&prompt.category.as_str()) {
            categories.push(&prompt.category);
        }
    }
    categories
}
