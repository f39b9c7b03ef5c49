//! `kozue`, the program.

mod bench;
mod chat;
mod cli;
mod default_model;
mod failure;
mod inspect;
mod interrupt;
mod panel;
mod printer;
mod prompt;
mod quantize;
mod run;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    start_log();
    let args = cli::Cli::parse_from(cli::with_run(std::env::args_os().collect()));
    let result = match args.command {
        cli::Command::Run(args) => run::run(&args),
        cli::Command::Inspect(args) => inspect::run(&args),
        cli::Command::Quantize(args) => quantize::run(&args),
        cli::Command::Bench(args) => bench::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// `KOZUE_LOG=debug` and the like show what the crates tell of their work.
fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("KOZUE_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
}
