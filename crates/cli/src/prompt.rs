//! Where the prompt comes from.

use crate::cli::RunArgs;
use crate::default_model::looks_like_model;
use crate::failure::Failure;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

/// What the command line asks for.
#[derive(Debug, PartialEq)]
pub struct Asked {
    /// The model, where one is named.
    pub model: Option<PathBuf>,
    /// The prompt; none means a chat.
    pub prompt: Option<String>,
}

/// Sorts the words of the command line and reads the files they name.
pub fn asked(args: &RunArgs) -> Result<Asked, Failure> {
    let mut words = args.words.as_slice();
    let mut model = args.model.clone();
    if model.is_none()
        && let [first, rest @ ..] = words
        // Two words are MODEL and PROMPT; one word may be either.
        && (!rest.is_empty() || args.message.is_some() || looks_like_model(first))
    {
        model = Some(PathBuf::from(first));
        words = rest;
    }
    let mut parts: Vec<String> = Vec::new();
    if !words.is_empty() {
        parts.push(words.join(" "));
    }
    parts.extend(args.message.clone());
    if let Some(file) = &args.file {
        parts.push(read(file)?);
    } else if parts.is_empty() && !std::io::stdin().is_terminal() {
        parts.push(read(Path::new("-"))?);
    }
    if parts.iter().any(|part| part == "-") && args.file.is_none() {
        let input = read(Path::new("-"))?;
        parts
            .iter_mut()
            .filter(|part| *part == "-")
            .for_each(|part| *part = input.clone());
    }
    let prompt = (!parts.is_empty()).then(|| parts.join("\n\n"));
    if prompt
        .as_ref()
        .is_some_and(|prompt| prompt.trim().is_empty())
    {
        return Err(Failure::Usage(
            "the prompt is empty: give some text, or start in a terminal to chat".into(),
        ));
    }
    Ok(Asked { model, prompt })
}

fn read(file: &Path) -> Result<String, Failure> {
    let (bytes, name) = if file == Path::new("-") {
        let mut bytes = Vec::new();
        let read = std::io::stdin().lock().read_to_end(&mut bytes);
        (read.map(|_| bytes), "standard input".to_string())
    } else {
        (std::fs::read(file), file.display().to_string())
    };
    let bytes = bytes.map_err(|error| Failure::Failed(format!("cannot read {name}: {error}")))?;
    String::from_utf8(bytes).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        Failure::Failed(format!(
            "{name} is not UTF-8 text: byte {place} is the first bad one"
        ))
    })
}
