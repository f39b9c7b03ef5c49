//! The HTTP server: OpenAI's and Anthropic's APIs in front of one model.
//!
//! A request goes through `guard` (who may ask), an API's module (its fields to a
//! [`question::Question`]), `prompt` (the question to tokens) and `answering` (the engine's
//! progress to pieces) back to the API's module (pieces to its events).

pub mod answering;
pub mod anthropic;
pub mod app;
pub mod body;
pub mod calls;
mod chat_answers;
pub mod error;
pub mod guard;
mod ids;
pub mod listen;
pub mod metrics;
pub mod openai;
mod output;
mod page;
pub mod preparing;
mod prompt;
pub mod question;
pub mod sampling_fields;
mod serve;
pub mod served;
mod slow;
mod sse;
pub mod tools;

pub use serve::{ServeError, ServerOptions, serve};
