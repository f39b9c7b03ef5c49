//! What can go wrong between a prompt and its answer.

use thiserror::Error;

/// One clear line each: what is wrong, where, what to do.
#[derive(Debug, Error)]
pub enum Error {
    /// The tokenizer's description cannot be used.
    #[error("the model's tokenizer cannot be read: {0}")]
    Tokenizer(String),
    /// Text could not be turned into tokens.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
    /// A chat was asked of a model without a template.
    #[error(
        "the model has no chat template, so it cannot hold a chat: use --raw to continue plain text"
    )]
    NoChatTemplate,
    /// The template does not parse or refused the messages.
    #[error("the model's chat template failed: {0}")]
    ChatTemplate(String),
    /// A sampling option outside its range.
    #[error("{option} must be {range}, not {value}")]
    Sampling {
        /// Name of the option.
        option: &'static str,
        /// What is allowed, as text.
        range: &'static str,
        /// What was given.
        value: String,
    },
    /// A token id that the model does not have.
    #[error("token {token} is not in the model's vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Number of ids.
        vocab_size: usize,
    },
    /// The model's output is not a distribution.
    #[error(
        "the model's output at position {position} is not a number (token {token}): its weights are damaged or its activations overflowed"
    )]
    BadLogits {
        /// Absolute position of the token to be chosen.
        position: u64,
        /// First token id with a bad value.
        token: u32,
    },
    /// Every token is ruled out.
    #[error("no token is allowed at position {position}: the logit biases rule all of them out")]
    NothingAllowed {
        /// Absolute position of the token to be chosen.
        position: u64,
    },
    /// What an answer must look like cannot be used.
    #[error("the grammar of the answer cannot be used: {0}")]
    Grammar(String),
    /// A text cannot be evaluated.
    #[error("{0}")]
    Evaluation(String),
    /// There is nothing to continue.
    #[error("the prompt is empty: give at least one token of text")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context}: {}",
        if context < model {
            format!("shorten the prompt or raise --ctx (the model was made for {model})")
        } else {
            "shorten the prompt (the model was made for no more)".to_string()
        }
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens that the session's context holds.
        context: usize,
        /// Tokens that the model was made for.
        model: usize,
    },
    /// More memory would be needed than the system has.
    #[error(
        "out of memory: {what} {:.2} GB, but {:.2} GB can be had: {advice}",
        *needed as f64 / 1e9,
        *available as f64 / 1e9
    )]
    OutOfMemory {
        /// What needs it, as in "the weights take".
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes that the system can give.
        available: u64,
        /// What to do.
        advice: &'static str,
    },
    /// The model could not run.
    #[error("{0}")]
    Model(String),
    /// A calibration ended before its last layer.
    #[error(
        "{what}; finished layers are kept in {} and the same command goes on after them",
        folder.display()
    )]
    Unfinished {
        /// Why.
        what: String,
        /// What is kept.
        folder: std::path::PathBuf,
    },
    /// What should draft cannot be used.
    #[error("{0}")]
    Draft(String),
}

impl Error {
    /// A drafter's files or network are the cause.
    pub(crate) fn draft(error: impl std::fmt::Display) -> Error {
        Error::Draft(error.to_string())
    }
}
