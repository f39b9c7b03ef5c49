//! Which model runs when none is named.

use crate::failure::Failure;
use crate::hub;
use kozue_hub::Name;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Kozue's own model, then the one that `scripts/fetch-model smollm2-135m` fetches.
const NAMES: [&str; 2] = [
    "models/kozue-nano",
    "models/SmolLM2-135M-Instruct.Q4_1.gguf",
];

const VARIABLE: &str = "KOZUE_MODEL";

/// The model to run: the one named, the one that `KOZUE_MODEL` names, or the default model in
/// the working directory or beside (or some folders above) the program. A name on the hub is fetched
/// where it is not in the cache.
pub fn model_path(named: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(path) = named {
        return existing(path, "");
    }
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return existing(Path::new(&path), " (named by KOZUE_MODEL)");
    }
    let program = std::env::current_exe().ok();
    let folders = program
        .iter()
        .flat_map(|program| program.ancestors().skip(1).take(4));
    std::iter::once(Path::new(""))
        .chain(folders)
        .flat_map(|folder| NAMES.map(|name| folder.join(name)))
        .find(|path| path.exists())
        .ok_or_else(|| {
            Failure::Failed(format!(
                "no model named, and no default model found: name a model's directory, GGUF file or name on the hub, set {VARIABLE}, or fetch one with scripts/fetch-model smollm2-135m"
            ))
        })
}

fn existing(path: &Path, origin: &str) -> Result<PathBuf, Failure> {
    let shown = path.display();
    if path.as_os_str().is_empty() {
        return Err(Failure::Usage("the model's name is empty".into()));
    }
    let place = hub::place(path)?;
    match std::fs::metadata(&place) {
        Ok(_) => Ok(place),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(Failure::Failed(format!(
            "there is no model at {shown}{origin}: name a model's directory, GGUF file or name on the hub (org/name), or fetch one with scripts/fetch-model smollm2-135m"
        ))),
        Err(error) if error.kind() == ErrorKind::NotADirectory => Err(Failure::Failed(format!(
            "{shown}{origin}: a part of this path is a file, not a directory (a file's name has no / after it)"
        ))),
        Err(error) => Err(Failure::Failed(format!(
            "{shown}{origin}: cannot open: {error}"
        ))),
    }
}

/// Whether a word of the command line names a model rather than being a prompt.
pub fn looks_like_model(word: &str) -> bool {
    // A path that does not exist is a mistake to be told, not a prompt; so is one that leads
    // through a file or a directory that may not be read.
    let spelled = !word.contains(char::is_whitespace)
        && (word.ends_with(".gguf")
            || word.starts_with('/')
            || word.starts_with("./")
            || word.starts_with("../")
            || Name::parse(word).is_ok());
    let there = match std::fs::metadata(word) {
        Ok(kind) => kind.is_dir() || kind.is_file(),
        Err(error) => matches!(
            error.kind(),
            ErrorKind::NotADirectory | ErrorKind::PermissionDenied
        ),
    };
    spelled || there
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_and_models_are_told_apart() {
        for word in [
            "Why is the sky blue?",
            "hello",
            "1/2",
            "and/or?",
            "what is a .gguf",
            "/ is a slash",
        ] {
            assert!(!looks_like_model(word), "{word}");
        }
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let file = format!("{folder}/file with a space");
        std::fs::write(&file, "").unwrap();
        let slash = format!("{file}/");
        for word in [
            "missing.gguf",
            "org/name",
            "org/name@main:file.gguf",
            "/no/such/model",
            "./model",
            folder,
            &file,
            &slash,
        ] {
            assert!(looks_like_model(word), "{word}");
        }
    }
}
