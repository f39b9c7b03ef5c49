//! What can go wrong when a model is loaded or run.

/// An error of the model crate; its text is one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint could not give a tensor as the architecture needs it.
    #[error(transparent)]
    Checkpoint(#[from] kozue_checkpoint::Error),
    /// Parts of a projection do not fit together.
    #[error("{name}: {reason}")]
    Layer {
        /// Which layer or tensor.
        name: String,
        /// What does not fit.
        reason: String,
    },
    /// A drafter that does not fit the target.
    #[error("{path}: drafter {reason}", path = path.display())]
    Drafter {
        /// The drafter's directory.
        path: std::path::PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// A token id outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab_size} tokens")]
    Token {
        /// The id.
        token: u32,
        /// Rows of the embedding table.
        vocab_size: usize,
    },
    /// More positions than the model was made for.
    #[error("{needed} tokens do not fit in the model's context of {longest}")]
    TooLong {
        /// Length that the sequence would have.
        needed: usize,
        /// The model's longest context.
        longest: usize,
    },
    /// A tree whose parents do not come first, or a path that does not follow it.
    #[error("draft tree: {0}")]
    Tree(String),
    /// Bytes that are not a state of this model.
    #[error("bytes of a stored state: {0}")]
    Stored(&'static str),
}
