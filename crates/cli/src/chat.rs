//! A chat in the terminal.

use crate::failure::Failure;
use crate::printer::Printer;
use crate::run::Setup;
use crate::typing::HiddenTyping;
use kozue_engine::conversation::Conversation;
use kozue_engine::{LanguageModel, Session};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Editor, Helper};
use std::io::{self, Write};
use std::path::PathBuf;

const HELP: &str = "\
/clear   forget the conversation
/exit    leave (or Ctrl-D)
/help    this text
End a line with \\ to go on in the next one, or put several lines between \"\"\" and \"\"\".
Ctrl-C ends the answer, not the chat.";

/// Talks until the user leaves.
pub fn run(setup: &Setup) -> Result<(), Failure> {
    let template = setup.loaded.chat_template()?;
    let start = || {
        Conversation::new(
            &template,
            &setup.loaded.tokenizer,
            setup.chat_options(),
            setup.args.system.as_deref(),
        )
    };
    let mut chat = start();
    let mut session = setup.loaded.session(setup.args.ctx);
    let mut lines = Lines::open()?;
    say(&format!(
        "{}: /help for help, Ctrl-D to leave",
        setup.loaded.description().name
    ));
    while let Some(input) = lines.next()? {
        match input.trim() {
            "" => {}
            "/exit" | "/quit" => break,
            "/help" => say(HELP),
            "/clear" => {
                chat = start();
                session.clear();
            }
            command if is_command(command) => say(&format!("{command} is no command; /help")),
            question => take_turn(setup, &mut chat, &mut session, question)?,
        }
    }
    lines.save();
    Ok(())
}

fn is_command(text: &str) -> bool {
    text.strip_prefix('/')
        .is_some_and(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase()))
}

/// One question and its answer. Trouble with one question does not end the chat.
fn take_turn<M: LanguageModel>(
    setup: &Setup,
    chat: &mut Conversation,
    session: &mut Session<M>,
    question: &str,
) -> Result<(), Failure> {
    let context = setup.context();
    let prompt = match chat
        .ask(question)
        .and_then(|prompt| make_room(chat, prompt, context))
    {
        Ok(prompt) => prompt,
        Err(error) => {
            say(&format!("kozue: {error}"));
            return Ok(());
        }
    };
    setup.interrupt.clear();
    let request = setup.request(prompt);
    let mut printer = Printer::new(Some(&chat.prompt_text()));
    let typing = HiddenTyping::start();
    let result = setup
        .check_memory(
            session.state().map_or(0, |(tokens, _)| tokens.len()),
            &request,
        )
        .and_then(|()| {
            session.generate(&request, setup.interrupt.flag(), &mut |event| {
                setup.show_event(event, &mut printer);
            })
        });
    drop(typing);
    printer.finish()?;
    setup.interrupt.clear();
    match result {
        Ok(answer) => {
            setup.show_panel(&answer, &request);
            if request.prompt.len() + answer.token_ids.len() >= context {
                say(&format!(
                    "kozue: the answer ends here because the context of {context} tokens is full"
                ));
            }
            chat.answered(&request.prompt, &answer);
        }
        Err(error) => {
            chat.retract();
            say(&format!("kozue: {error}; /clear begins a new conversation"));
        }
    }
    Ok(())
}

/// Forgets the oldest turns until an eighth of the context is left for the answer.
fn make_room(
    chat: &mut Conversation,
    mut prompt: Vec<u32>,
    context: usize,
) -> Result<Vec<u32>, kozue_engine::Error> {
    let mut forgotten = 0;
    while prompt.len() > context - context / 8
        && let Some(shorter) = chat.forget_oldest()?
    {
        prompt = shorter;
        forgotten += 1;
    }
    if forgotten > 0 {
        let turns = if forgotten == 1 {
            "turn is".to_string()
        } else {
            format!("{forgotten} turns are")
        };
        say(&format!(
            "kozue: the context of {context} tokens is full: the oldest {turns} forgotten"
        ));
    }
    Ok(prompt)
}

/// Words to the user that are not part of an answer.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// The user's lines, with editing and a history that outlives the chat.
struct Lines {
    editor: Editor<Multiline, FileHistory>,
    history: Option<PathBuf>,
}

impl Lines {
    fn open() -> Result<Lines, Failure> {
        let config = Config::builder()
            .auto_add_history(true)
            .history_ignore_space(true)
            .build();
        let mut editor = Editor::with_config(config).map_err(Failure::failed)?;
        editor.set_helper(Some(Multiline));
        let history = history_file();
        if let Some(file) = &history {
            // There is none at first.
            let _ = editor.load_history(file);
        }
        Ok(Lines { editor, history })
    }

    /// The next input; `None` when the user leaves. Ctrl-C drops the line.
    fn next(&mut self) -> Result<Option<String>, Failure> {
        loop {
            match self.editor.readline("> ") {
                Ok(line) => return Ok(Some(joined(&line))),
                Err(ReadlineError::Interrupted) => {}
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => {
                    return Err(Failure::Failed(format!(
                        "cannot read the terminal: {error}"
                    )));
                }
            }
        }
    }

    /// Keeps the history. Where it cannot be written, the chat was still had.
    fn save(&mut self) {
        let Some(file) = &self.history else { return };
        if let Some(folder) = file.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        if let Err(error) = self.editor.save_history(file) {
            tracing::debug!("history is not kept in {}: {error}", file.display());
        }
    }
}

fn history_file() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let state = set("XDG_STATE_HOME")
        .map(PathBuf::from)
        .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".local/state")))?;
    Some(state.join("kozue/history"))
}

const QUOTES: &str = "\"\"\"";

/// Whether an input goes on in the next line.
fn is_open(input: &str) -> bool {
    let text = input.trim_start();
    match text.strip_prefix(QUOTES) {
        Some(inside) => !inside.contains(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// The text that an input means.
fn joined(input: &str) -> String {
    match input.trim_start().strip_prefix(QUOTES) {
        Some(inside) => inside
            .replacen(QUOTES, "", 1)
            .trim_matches('\n')
            .to_string(),
        None => input.replace("\\\n", "\n"),
    }
}

struct Multiline;

impl Helper for Multiline {}
impl Highlighter for Multiline {}

impl Completer for Multiline {
    type Candidate = String;
}

impl Hinter for Multiline {
    type Hint = String;
}

impl Validator for Multiline {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        Ok(if is_open(context.input()) {
            ValidationResult::Incomplete
        } else {
            ValidationResult::Valid(None)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_lines_become_one_input() {
        assert!(is_open("first \\"));
        assert!(is_open("\"\"\"a"));
        assert!(is_open("\"\"\"a\nb"));
        assert!(!is_open("\"\"\"a\nb\"\"\""));
        assert!(!is_open("plain"));
        assert_eq!(joined("first \\\nsecond"), "first \nsecond");
        assert_eq!(joined("\"\"\"\na\nb\n\"\"\""), "a\nb");
        assert_eq!(joined("a \\ b"), "a \\ b");
    }

    #[test]
    fn commands_are_single_words() {
        assert!(is_command("/reset"));
        assert!(!is_command("/usr/bin is a folder"));
        assert!(!is_command("/"));
        assert!(!is_command("what is /etc"));
    }
}
