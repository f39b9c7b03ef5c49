//! Which command is meant: `run` may be left out, and a misspelt command is told apart from a
//! prompt.

use crate::cli::{Cli, Command};
use crate::failure::Failure;
use clap::{CommandFactory, Parser};
use std::ffi::OsString;
use std::path::Path;

/// Parses the command line. What clap refuses ends the program with clap's message and code 2.
pub fn parse(mut args: Vec<OsString>) -> Result<Command, Failure> {
    let implied = leaves_run_out(&args);
    if implied {
        if let Some(command) = misspelt(&args[1..]) {
            let word = args[1].to_string_lossy();
            return Err(Failure::Usage(format!(
                "there is no command {word:?}: did you mean kozue {command}? (a prompt: kozue run {word:?})"
            )));
        }
        args.insert(1.min(args.len()), "run".into());
    }
    let command = Cli::parse_from(args).command;
    if implied
        && let Command::Run(args) = &command
        && let Some(word) = args.words.first()
        && names().contains(word)
        && !Path::new(word).exists()
    {
        return Err(Failure::Usage(format!(
            "{word:?} after an option is no command: write kozue {word} first, or -m for a prompt of this word"
        )));
    }
    Ok(command)
}

/// The words that name a command.
fn names() -> Vec<String> {
    let command = Cli::command();
    let names = command
        .get_subcommands()
        .flat_map(|c| c.get_name_and_visible_aliases())
        .map(str::to_owned);
    names.chain(["help".to_owned()]).collect()
}

/// Whether the first word is neither a command nor an option of the program itself.
fn leaves_run_out(args: &[OsString]) -> bool {
    let Some(first) = args.get(1).and_then(|word| word.to_str()) else {
        return true;
    };
    let own = ["-h", "--help", "-V", "--version"];
    !own.contains(&first) && !names().iter().any(|name| name == first)
}

/// The command that the first of `words` probably means, where it names no model and is no
/// prompt that anybody would write.
fn misspelt(words: &[OsString]) -> Option<String> {
    let word = words.first()?.to_str()?;
    if Path::new(word).exists() {
        return None;
    }
    let named = words.iter().any(|word| {
        word.to_str()
            .is_some_and(|word| word == "--model" || word.starts_with("--model="))
    });
    let more = words.get(1).and_then(|word| word.to_str());
    // Its first word would be a model then, and there is none of this name.
    let two = !named && more.is_some_and(|word| !word.starts_with('-'));
    let word = word.to_lowercase();
    let near = |name: &String| {
        let limit = match name.len() {
            // Every word of two letters is near rm.
            0..=2 => 0,
            3..=4 => usize::from(two),
            5 => 1,
            _ => 2,
        };
        distance(&word, name) <= limit
    };
    names().into_iter().find(near)
}

/// Letters to insert, drop, change or swap with their neighbour (the optimal string alignment
/// distance, a restriction of Damerau, CACM 7(3), 1964).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // Of long texts the length alone tells enough.
    if a.len().abs_diff(b.len()) > 2 {
        return usize::MAX;
    }
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let change = usize::from(a[i - 1] != b[j - 1]);
                let mut best = (rows[i - 1][j] + 1)
                    .min(rows[i][j - 1] + 1)
                    .min(rows[i - 1][j - 1] + change);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    best = best.min(rows[i - 2][j - 2] + 1);
                }
                best
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> Vec<OsString> {
        ["kozue"].iter().chain(words).map(OsString::from).collect()
    }

    #[test]
    fn run_may_be_left_out() {
        for words in [
            &["run", "--model", "M", "-m", "TEXT"][..],
            &["--model", "M", "-m", "TEXT"],
        ] {
            let Ok(Command::Run(run)) = parse(args(words)) else {
                panic!("{words:?} is another command");
            };
            assert_eq!(run.model.as_deref(), Some("M".as_ref()));
            assert_eq!(run.message.as_deref(), Some("TEXT"));
        }
        let Ok(Command::Run(run)) = parse(args(&["M", "a prompt"])) else {
            panic!("two words are a model and a prompt");
        };
        assert_eq!(run.words, ["M", "a prompt"]);
        assert!(matches!(parse(args(&[])), Ok(Command::Run(run)) if run.words.is_empty()));
        assert!(matches!(
            parse(args(&["inspect", "M"])),
            Ok(Command::Inspect(_))
        ));
    }

    #[test]
    fn misspelt_commands_are_told_apart_from_prompts() {
        for (words, command) in [
            (&["inspekt"][..], "inspect"),
            (&["Inspect", "M"], "inspect"),
            (&["quantise", "a", "b"], "quantize"),
            (&["quantizse", "--size", "M"], "quantize"),
            (&["banch", "M"], "bench"),
            (&["rnu", "M", "hello"], "run"),
            (&["pul", "org/name"], "pull"),
        ] {
            assert_eq!(
                misspelt(&args(words)[1..]).as_deref(),
                Some(command),
                "{words:?}"
            );
        }
        for words in [
            &["sun"][..],
            &["m", "hello"],
            &["fun", "-n", "5"],
            &["fun", "facts", "--model", "M"],
            &["inspection"],
            &["Why is the sky blue?"],
            &["beaches"],
        ] {
            assert_eq!(misspelt(&args(words)[1..]), None, "{words:?}");
        }
    }

    #[test]
    fn commands_after_options_are_no_prompts() {
        for words in [
            &["-q", "run", "M", "hello"][..],
            &["--model", "M", "inspect"],
        ] {
            assert!(
                matches!(parse(args(words)), Err(Failure::Usage(_))),
                "{words:?}"
            );
        }
        assert!(matches!(parse(args(&["-m", "run"])), Ok(Command::Run(_))));
    }

    #[test]
    fn distances() {
        assert_eq!(distance("run", "run"), 0);
        assert_eq!(distance("rnu", "run"), 1);
        assert_eq!(distance("quantise", "quantize"), 1);
        assert_eq!(distance("inspekt", "inspect"), 1);
        assert_eq!(distance("inpsct", "inspect"), 2);
    }
}
