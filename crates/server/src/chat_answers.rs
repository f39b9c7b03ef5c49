//! A chat's question to what the engine is asked.

use crate::answering::Wanted;
use crate::calls::grammar::rules;
use crate::error::ApiError;
use crate::ids::new_seed;
use crate::output::Output;
use crate::prompt::{Prompt, render};
use crate::question::{Format, Question};
use crate::served::Served;
use crate::tools::{Tool, ToolChoice};
use kozue_engine::grammar::{Grammar, Thought};
use kozue_engine::sampling::Sampling;
use kozue_engine::{Error, LanguageModel, Request};
use serde_json::json;

/// The answers that a question wants.
pub fn answers(served: &Served, question: &Question) -> Result<Vec<Wanted>, ApiError> {
    let Prompt { tokens, text } = render(served, question)?;
    check_length(served, tokens.len())?;
    let tools: &[Tool] = match question.tool_choice {
        ToolChoice::None => &[],
        _ => &question.tools,
    };
    let grammar = grammar(served, question, tools, &text)?;
    let seed = question.options.seed.unwrap_or_else(new_seed);
    let wanted = (0..question.options.n).map(|index| Wanted {
        request: Request {
            grammar: grammar.clone(),
            ..request(served, question, tokens.clone(), seed, index)
        },
        output: Output::chat(&text, served.call_format, tools),
        single_call: question.single_call,
    });
    Ok(wanted.collect())
}

/// What the answer must look like. Errors: a schema that cannot be used.
fn grammar(
    served: &Served,
    question: &Question,
    tools: &[Tool],
    prompt: &str,
) -> Result<Option<Grammar>, ApiError> {
    let object = json!({"type": "object"});
    let schema = match &question.format {
        Format::Text => None,
        Format::JsonObject => Some(&object),
        Format::JsonSchema(schema) => Some(schema),
    };
    let rules = rules(
        served.call_format,
        tools,
        &question.tool_choice,
        question.single_call,
        schema,
    );
    let prompt = prompt.trim_end();
    let thought = match &question.prefill {
        Some(_) => Thought::None,
        None if prompt.ends_with("<think>") => Thought::Open,
        None if prompt.ends_with("</think>") => Thought::None,
        None => Thought::Possible,
    };
    let grammar = match (rules, schema) {
        (Some(rules), _) => Grammar::lark(served.vocabulary()?, &rules, thought),
        (None, Some(schema)) => Grammar::json_schema(served.vocabulary()?, schema, thought),
        (None, None) => return Ok(None),
    };
    grammar.map(Some).map_err(|error| {
        let field = match question.format {
            Format::Text => "tools",
            _ => "response_format",
        };
        ApiError::field(field, error.to_string())
    })
}

fn request(
    served: &Served,
    question: &Question,
    prompt: Vec<u32>,
    seed: u64,
    index: usize,
) -> Request {
    let options = &question.options;
    let recommended = Sampling::recommended(&served.loaded.description().generation, seed);
    Request {
        prompt,
        sampling: options.sampling(recommended, seed, index),
        max_tokens: options.max_tokens,
        stop: options.stop.clone(),
        grammar: None,
        logprobs: options.logprobs,
        ignore_eos: false,
        trace: options.drafts,
    }
}

/// Errors: a prompt that leaves no room for an answer.
pub fn check_length(served: &Served, prompt: usize) -> Result<(), ApiError> {
    if prompt < served.context {
        return Ok(());
    }
    Err(Error::PromptTooLong {
        prompt,
        context: served.context,
        model: served.loaded.model.max_position(),
    }
    .into())
}
