//! Anthropic's API.

pub mod messages;
mod messages_request;
