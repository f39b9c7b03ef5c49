//! `kozue`, the program.

mod bench;
mod chat;
mod cli;
mod closed_output;
mod command;
mod compare;
mod conversion;
mod default_model;
mod document;
mod draft;
mod eval;
mod export;
mod failure;
mod hub;
mod inspect;
mod interrupt;
mod list;
mod out_of_memory;
mod panel;
mod printer;
mod prompt;
mod pull;
mod quantize;
mod question;
mod rm;
mod run;
mod serve;
mod trace;
mod tune;
mod typing;

use cli::Command;
use failure::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    start_log();
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn start() -> Result<(), Failure> {
    if closed_output::is_closed() {
        return Err(Failure::Failed(
            "standard output is closed, so nobody could read the result".into(),
        ));
    }
    match command::parse(std::env::args_os().collect())? {
        Command::Run(args) => run::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::List(args) => list::run(&args),
        Command::Rm(args) => rm::run(&args),
    }
}

/// `KOZUE_LOG=debug` and the like show what the crates tell of their work.
fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("KOZUE_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Whoever reads standard error may be gone; to complain about that there would be a panic.
        .log_internal_errors(false)
        .init();
}
