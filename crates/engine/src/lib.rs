//! From a prompt to its answer: text to tokens and back, chat templates, sampling, stopping,
//! sessions, and what they cost.

pub mod error;
pub mod noise;
pub mod sampler;
pub mod sampling;
pub mod stop;
pub mod transcendental;

pub use error::Error;
