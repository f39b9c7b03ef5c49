//! From a prompt to its answer: text to tokens and back, chat templates, sampling, stopping,
//! sessions, and what they cost.

pub mod answer;
mod cache_file;
pub mod cache_folder;
pub mod calibration;
pub mod chat;
pub mod conversation;
pub mod energy;
pub mod error;
pub mod evaluation;
pub mod grammar;
pub mod loaded;
mod logprobs;
pub mod marks;
pub mod memory;
pub mod noise;
pub mod prefix_cache;
pub mod runner;
pub mod sampler;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
pub mod session;
pub mod speculation;
pub mod starts;
pub mod stats;
pub mod stop;
pub mod streaming;
pub mod target;
pub mod thinking;
pub mod tokenizer;
mod tokenizer_json;
mod top;
pub mod transcendental;
mod worker;
mod writer;

pub use answer::{Answer, FinishReason};
pub use error::Error;
pub use loaded::Loaded;
pub use session::{Event, Request, Session};
pub use target::LanguageModel;
