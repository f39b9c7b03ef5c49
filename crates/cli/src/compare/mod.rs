//! `kozue compare`: the same prompts to several servers, in turns.
//!
//! Every prompt goes to each server before the next one does, round after round, so that a slow
//! moment of the machine hits all of them. The first round warms up and is dropped.

mod chart;
mod endpoint;
mod report;

use crate::bench::prompts;
use crate::cli::{at_least_one, at_least_zero, number};
use crate::document::write;
use crate::failure::Failure;
use crate::panel::{Lines, progress};
use clap::Args;
use endpoint::{Asked, Endpoint, Sample};
use report::Report;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Args)]
pub struct CompareArgs {
    /// A server's address with the path before /chat/completions, and its model's name (give it
    /// several times)
    #[arg(long = "endpoint", value_name = "URL,MODEL", required = true)]
    pub endpoints: Vec<Endpoint>,
    /// A key: one for all servers, or one for each, in their order (also KOZUE_API_KEY)
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// Prompts, one {"category": ..., "prompt": ...} a line [default: some built in]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Rounds over all prompts, after one that is dropped
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one, allow_negative_numbers = true)]
    pub rounds: usize,
    /// Most tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, value_parser = at_least_one, allow_negative_numbers = true)]
    pub max_tokens: usize,
    /// 0 always takes the best token
    #[arg(short, long, value_name = "T", default_value_t = 0.0, value_parser = number, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Seed of the noise
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = at_least_zero, allow_negative_numbers = true)]
    pub seed: usize,
    /// Most seconds without a word from a server
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = at_least_one, allow_negative_numbers = true)]
    pub timeout: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Draw a chart into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &CompareArgs) -> Result<(), Failure> {
    let prompts = prompts::read(args.prompts.as_deref())?;
    let keys = keys(args)?;
    let agent = endpoint::agent(Duration::from_secs(args.timeout as u64));
    let mut report = Report::new(args, &prompts);
    let mut told = Lines::new();
    // Round 0 is dropped.
    for round in 0..=args.rounds {
        for (index, prompt) in prompts.iter().enumerate() {
            let asked = Asked {
                prompt: &prompt.prompt,
                max_tokens: args.max_tokens,
                temperature: args.temperature,
                seed: args.seed,
            };
            let mut samples: Vec<Sample> = Vec::with_capacity(args.endpoints.len());
            for (endpoint, key) in args.endpoints.iter().zip(&keys) {
                told.show(&format!(
                    "round {round} of {}, prompt {} of {}: {endpoint}",
                    args.rounds,
                    index + 1,
                    prompts.len()
                ));
                let sample = endpoint.ask(&agent, key.as_deref(), &asked);
                let sample = sample.inspect_err(|_| progress(""))?;
                samples.push(sample);
            }
            if round > 0 {
                report.add(index, samples);
            }
        }
    }
    progress("");
    if let Some(path) = &args.svg {
        write(path, &chart::draw(&report))?;
    }
    let text = match args.json {
        true => format!("{}\n", report.json()),
        false => report.table(),
    };
    io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(Failure::output)
}

/// Each server's key.
fn keys(args: &CompareArgs) -> Result<Vec<Option<String>>, Failure> {
    let count = args.endpoints.len();
    match args.api_key.as_slice() {
        [] => {
            let variable = std::env::var("KOZUE_API_KEY").ok();
            Ok(vec![variable.filter(|key| !key.is_empty()); count])
        }
        [key] => Ok(vec![Some(key.clone()); count]),
        keys if keys.len() == count => Ok(keys.iter().cloned().map(Some).collect()),
        keys => Err(Failure::Usage(format!(
            "there are {} keys for {count} servers: give --api-key once, or once for each --endpoint",
            keys.len()
        ))),
    }
}
