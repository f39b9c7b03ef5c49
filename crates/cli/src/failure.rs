//! How a command ends when it does not succeed.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

/// Why a command ended early.
#[derive(Debug)]
pub enum Failure {
    /// The command line makes no sense.
    Usage(String),
    /// Something went wrong.
    Failed(String),
    /// The reader of our output has gone, as in `kozue run ... | head -1`: nothing is wrong.
    ReaderGone,
    /// A signal ended it, Ctrl-C for one.
    Interrupted {
        /// The signal's number.
        signal: u8,
    },
}

impl Failure {
    /// From any error whose text is one line for the user.
    pub fn failed(error: impl Display) -> Failure {
        Failure::Failed(error.to_string())
    }

    /// From what went wrong with the text of a file.
    pub fn with_text(path: &Path, error: kozue_engine::Error) -> Failure {
        match error {
            kozue_engine::Error::Evaluation(what) => {
                Failure::Failed(format!("{}: {what}", path.display()))
            }
            error => Failure::from(error),
        }
    }

    /// From an error of writing to standard output.
    pub fn output(error: io::Error) -> Failure {
        match error.kind() {
            ErrorKind::BrokenPipe => Failure::ReaderGone,
            _ => Failure::Failed(format!("cannot write the output: {error}")),
        }
    }

    /// Tells the user in one line and gives the exit code.
    pub fn report(self) -> ExitCode {
        let (message, code) = match self {
            Failure::Usage(message) => (message, 2),
            Failure::Failed(message) => (message, 1),
            Failure::ReaderGone => return ExitCode::SUCCESS,
            // As shells write the end by a signal.
            Failure::Interrupted { signal } => return ExitCode::from(128 + signal),
        };
        // With standard error gone too there is nobody to tell.
        let _ = writeln!(io::stderr(), "kozue: {message}");
        ExitCode::from(code)
    }
}

impl From<kozue_engine::Error> for Failure {
    fn from(error: kozue_engine::Error) -> Failure {
        match error {
            kozue_engine::Error::Sampling { .. } => Failure::Usage(error.to_string()),
            _ => Failure::failed(error),
        }
    }
}
