//! Where the prompt comes from.

use crate::cli::RunArgs;
use crate::default_model::looks_like_model;
use crate::failure::Failure;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// Bytes of a prompt's part that are more than any model's context holds.
const LONGEST: u64 = 64 << 20;

/// How long a pipe beside a prompt may stay open before the user is told what is waited for.
const PATIENCE: Duration = Duration::from_secs(3);

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
    // Where its text goes; without a word on it, it comes last.
    let placed = parts.iter().any(|part| part == "-") && args.file.is_none();
    if placed {
        let input = read(Path::new("-"))?;
        parts
            .iter_mut()
            .filter(|part| *part == "-")
            .for_each(|part| *part = input.clone());
    }
    if let Some(file) = &args.file {
        parts.push(read(file)?);
    }
    if parts.is_empty() && !io::stdin().is_terminal() {
        parts.push(read(Path::new("-"))?);
    } else if !placed && args.file.as_deref() != Some(Path::new("-")) && is_piped() {
        let input = read_piped()?;
        if !input.trim().is_empty() {
            parts.push(input);
        }
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

/// Whether standard input is a pipe or a file: something that the user put there. What scripts
/// and services have instead (a terminal, /dev/null, a socket) is nothing to read.
#[cfg(unix)]
fn is_piped() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;
    let input = io::stdin().as_fd().try_clone_to_owned();
    let kind = input.and_then(|input| std::fs::File::from(input).metadata());
    kind.is_ok_and(|kind| kind.is_file() || kind.file_type().is_fifo())
}

#[cfg(not(unix))]
fn is_piped() -> bool {
    !io::stdin().is_terminal()
}

/// Standard input beside a prompt. A pipe that nobody closes would be waited for in silence.
fn read_piped() -> Result<String, Failure> {
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new()
        .spawn(move || {
            // Nobody listens any more only if the program is ending.
            let _ = sender.send(read(Path::new("-")));
        })
        .map_err(|error| Failure::Failed(format!("cannot read standard input: {error}")))?;
    let input = receiver.recv_timeout(PATIENCE).or_else(|_| {
        let _ = writeln!(
            io::stderr(),
            "kozue: waiting for the end of standard input, which follows the prompt (to leave it out: < /dev/null)"
        );
        receiver.recv()
    });
    input.map_err(|_| Failure::Failed("cannot read standard input".into()))?
}

/// All that a reader gives, but hardly more than a prompt may have: some never end.
fn read_some(reader: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(LONGEST + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn read(file: &Path) -> Result<String, Failure> {
    let (bytes, name) = if file == Path::new("-") {
        (read_some(io::stdin().lock()), "standard input".to_string())
    } else {
        let bytes = std::fs::File::open(file).and_then(read_some);
        (bytes, file.display().to_string())
    };
    let bytes = bytes.map_err(|error| Failure::Failed(format!("cannot read {name}: {error}")))?;
    if bytes.len() as u64 > LONGEST {
        return Err(Failure::Failed(format!(
            "{name} has more than {} MB, which fits no context",
            LONGEST >> 20
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        Failure::Failed(format!(
            "{name} is not UTF-8 text: byte {place} is the first bad one"
        ))
    })
}
