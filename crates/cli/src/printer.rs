//! An answer on its way to the screen.

use crate::failure::Failure;
use kozue_engine::thinking::{Part, ThoughtSplitter};
use std::io::{self, IsTerminal, Write};

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Whether a stream shows colours: it is a terminal, and `NO_COLOR` is not set.
pub fn colours(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Writes text to standard output as it comes. Thoughts are shown dimmed on a terminal, and not
/// at all elsewhere: what is piped on is the answer.
pub struct Printer {
    splitter: Option<ThoughtSplitter>,
    shows_thoughts: bool,
    colours: bool,
    last: Option<Part>,
    ends_line: bool,
    failure: Option<io::Error>,
}

impl Printer {
    /// For the answer to `prompt`; `None` for plain text, which has no thoughts.
    pub fn new(prompt: Option<&str>) -> Printer {
        let stdout = io::stdout();
        Printer {
            splitter: prompt.map(ThoughtSplitter::after_prompt),
            shows_thoughts: stdout.is_terminal(),
            colours: colours(&stdout),
            last: None,
            ends_line: true,
            failure: None,
        }
    }

    /// Shows some text. `false`: nobody reads any more.
    pub fn push(&mut self, text: &str) -> bool {
        match self.splitter.take() {
            Some(mut splitter) => {
                splitter.push(text, |part, text| self.show(part, text));
                self.splitter = Some(splitter);
            }
            None => self.show(Part::Answer, text),
        }
        self.failure.is_none()
    }

    /// The answer is whole: ends the line.
    pub fn finish(mut self) -> Result<(), Failure> {
        if let Some(mut splitter) = self.splitter.take() {
            splitter.finish(|part, text| self.show(part, text));
        }
        if self.colours && self.last == Some(Part::Thought) {
            self.write(PLAIN);
        }
        if !self.ends_line {
            self.write("\n");
        }
        self.failure
            .map_or(Ok(()), |error| Err(Failure::output(error)))
    }

    fn show(&mut self, part: Part, text: &str) {
        if part == Part::Thought && !self.shows_thoughts {
            return;
        }
        if self.last != Some(part) {
            let opening = match (part, self.last) {
                (Part::Thought, _) => "",
                (Part::Answer, Some(Part::Thought)) => "\n\n",
                (Part::Answer, _) => "",
            };
            if self.colours {
                match part {
                    Part::Thought => self.write(DIM),
                    Part::Answer if self.last.is_some() => self.write(PLAIN),
                    Part::Answer => {}
                }
            }
            self.write(opening);
            self.last = Some(part);
        }
        self.write(text);
        self.ends_line = text.ends_with('\n');
    }

    fn write(&mut self, text: &str) {
        if self.failure.is_some() {
            return;
        }
        let mut stdout = io::stdout().lock();
        let written = stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.flush());
        self.failure = written.err();
    }
}
