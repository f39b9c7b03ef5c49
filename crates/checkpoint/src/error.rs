//! What can go wrong with a checkpoint: one line each, saying what, where and what to do.

use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried, as in "cannot open".
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The path holds nothing that looks like a model.
    #[error("{path}: not a model: {what}", path = path.display())]
    NotAModel {
        /// Path given by the user.
        path: PathBuf,
        /// What was looked for, and what to do.
        what: String,
    },
    /// A file's structure is damaged or of an unknown kind.
    #[error("{path}: {what}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// A setting of the model is missing, of the wrong type, out of range or not supported.
    #[error("{path}: {field}: {what}", path = path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The setting's name, with a dot for each level.
        field: String,
        /// What is wrong with it.
        what: String,
    },
    /// A tensor that the model needs is not there.
    #[error("{path}: tensor {name} is missing; fetch or convert the checkpoint again", path = path.display())]
    Missing {
        /// Checkpoint.
        path: PathBuf,
        /// The tensor's Hugging Face name.
        name: String,
    },
    /// A tensor has other dimensions than the model's settings say.
    #[error("{path}: tensor {name} has shape {found:?}, but the model's settings ask for {expected:?}", path = path.display())]
    Shape {
        /// Checkpoint.
        path: PathBuf,
        /// The tensor's Hugging Face name.
        name: String,
        /// Shape stored.
        found: Vec<usize>,
        /// Shape that follows from the settings.
        expected: Vec<usize>,
    },
    /// A tensor's contents cannot be used as asked.
    #[error("{path}: tensor {name}: {what}", path = path.display())]
    Tensor {
        /// Checkpoint or file.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// What is wrong, and what to do.
        what: String,
    },
    /// Tensors that belong to no part of the model.
    #[error("{path}: {count} unexpected tensor{s}, the first {first}; the settings describe another model", path = path.display(), s = if *count == 1 { "" } else { "s" })]
    Unexpected {
        /// Checkpoint.
        path: PathBuf,
        /// How many.
        count: usize,
        /// The first of them, in the order of names.
        first: String,
    },
    /// Files that make no model that is read here.
    #[error("{what}")]
    Repository {
        /// What is wrong, and what to do.
        what: String,
    },
    /// The caller stopped a conversion.
    #[error("stopped; nothing was written")]
    Stopped,
}

impl Error {
    /// For `map_err`: an [`Error::Io`] at `path`.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io {
            path,
            action,
            source,
        }
    }

    pub(crate) fn file(path: &Path, what: impl Into<String>) -> Error {
        Error::File {
            path: path.to_path_buf(),
            what: what.into(),
        }
    }

    pub(crate) fn config(path: &Path, field: impl Into<String>, what: impl Into<String>) -> Error {
        Error::Config {
            path: path.to_path_buf(),
            field: field.into(),
            what: what.into(),
        }
    }

    pub(crate) fn tensor(path: &Path, name: &str, what: impl Into<String>) -> Error {
        Error::Tensor {
            path: path.to_path_buf(),
            name: name.to_owned(),
            what: what.into(),
        }
    }

    pub(crate) fn missing(path: &Path, name: &str) -> Error {
        Error::Missing {
            path: path.to_path_buf(),
            name: name.to_owned(),
        }
    }

    pub(crate) fn shape(path: &Path, name: &str, found: &[usize], expected: &[usize]) -> Error {
        Error::Shape {
            path: path.to_path_buf(),
            name: name.to_owned(),
            found: found.to_vec(),
            expected: expected.to_vec(),
        }
    }
}
