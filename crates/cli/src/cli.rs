//! The command line.

use crate::draft::DraftArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use kozue_kernels::{Cpu, KvType};
use std::fmt::Display;
use std::num::IntErrorKind;
use std::path::PathBuf;
use std::str::FromStr;

/// A fast, exact engine for local language models.
#[derive(Parser)]
#[command(
    name = "kozue",
    version,
    after_help = "Without a command, kozue runs a model: kozue [MODEL] \"prompt\""
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Answer a prompt, or chat when there is none
    #[command(visible_alias = "chat")]
    Run(Box<RunArgs>),
    /// Show a model's architecture, tensors and memory needs
    Inspect(InspectArgs),
    /// Convert a model to Kozue's packed format
    Quantize(crate::quantize::QuantizeArgs),
    /// Write a model in the format of another program
    Export(crate::export::ExportArgs),
    /// Measure a model's speed on this machine
    Bench(BenchArgs),
    /// Answer over HTTP, as OpenAI's and Anthropic's APIs do
    #[command(visible_alias = "server")]
    Serve(Box<crate::serve::ServeArgs>),
    /// Measure servers with OpenAI's API beside each other
    Compare(crate::compare::CompareArgs),
    /// Measure what drafts cost on this machine, for later runs
    Tune(TuneArgs),
    /// Measure how well a model predicts a text, and how far it is from another
    Eval(EvalArgs),
    /// Draw the draft trees of an answer
    Trace(TraceArgs),
    /// Fetch a model's newest version from the hub, and check it
    Pull(PullArgs),
    /// List the models on this machine
    List(ListArgs),
    /// Remove a model that was fetched
    Rm(RmArgs),
}

#[derive(Args)]
#[command(override_usage = "kozue run [OPTIONS] [MODEL] [PROMPT]...")]
pub struct RunArgs {
    /// Model and prompt, or only one of them
    #[arg(value_name = "MODEL PROMPT")]
    pub words: Vec<String>,
    /// Model directory, GGUF file or name on the hub
    #[arg(long = "model", value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// The prompt
    #[arg(short, long, value_name = "TEXT")]
    pub message: Option<String>,
    /// Add the text of a file to the prompt (- is standard input)
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long, conflicts_with_all = ["system", "no_thinking"])]
    pub raw: bool,
    /// Ask a reasoning model to answer at once
    #[arg(long)]
    pub no_thinking: bool,
    /// Print one JSON object instead of streaming text
    #[arg(long)]
    pub json: bool,
    /// No figures after the answer
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Most tokens in an answer [default: until the context is full]
    #[arg(short = 'n', long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub max_tokens: Option<usize>,
    /// End the answer where this text comes (may be given several times)
    #[arg(long, value_name = "TEXT", value_parser = some_text)]
    pub stop: Vec<String>,
    /// Go on after the model's end token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Tokens of context [default: as many as the model was made for]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub ctx: Option<usize>,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// Unset options follow the model's own recommendation.
#[derive(Args)]
pub struct SamplingArgs {
    /// 0 always takes the best token
    #[arg(short, long, value_name = "T", value_parser = number, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep only this many best tokens (0: all)
    #[arg(long, value_name = "K", value_parser = at_least_zero, allow_negative_numbers = true)]
    pub top_k: Option<usize>,
    /// Keep only the best tokens with this share of the probability
    #[arg(long, value_name = "P", value_parser = number, allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep only tokens with this share of the best one's probability
    #[arg(long, value_name = "P", value_parser = number, allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens of prompt and answer less likely (1: off)
    #[arg(long, value_name = "R", value_parser = number, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Taken once from tokens of the answer
    #[arg(long, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Taken from tokens of the answer for every time they came
    #[arg(long, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// How many of the last tokens the penalties see [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_zero, allow_negative_numbers = true)]
    pub penalty_window: Option<usize>,
    /// Add to a token's logit (may be given several times; -inf forbids it)
    #[arg(long, value_name = "TOKEN=BIAS", value_parser = bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the noise [default: a new one for each run]
    #[arg(long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

#[derive(Args)]
pub struct MachineArgs {
    /// Threads [default: one for each physical core]
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// Type of cached keys and values
    #[arg(long, value_enum, default_value_t = Kv::F16)]
    pub kv: Kv,
}

impl MachineArgs {
    pub fn cpu(&self) -> Cpu {
        Cpu::new(self.threads)
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Kv {
    F16,
    F32,
    Int8,
}

impl From<Kv> for KvType {
    fn from(kv: Kv) -> KvType {
        match kv {
            Kv::F16 => KvType::F16,
            Kv::F32 => KvType::F32,
            Kv::Int8 => KvType::Int8,
        }
    }
}

#[derive(Args)]
pub struct InspectArgs {
    /// Model directory, GGUF file or name on the hub
    pub model: Option<PathBuf>,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Context to state the memory for (may be given several times)
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub ctx: Vec<usize>,
    /// Type of cached keys and values
    #[arg(long, value_enum, default_value_t = Kv::F16)]
    pub kv: Kv,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct BenchArgs {
    /// Model directory, GGUF file or name on the hub
    pub model: Option<PathBuf>,
    /// Lengths of prompts
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [128, 512, 2048], value_parser = at_least_one, allow_negative_numbers = true)]
    pub prefill: Vec<usize>,
    /// Tokens in the context before decoding
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [16, 512, 2048], value_parser = at_least_one, allow_negative_numbers = true)]
    pub depth: Vec<usize>,
    /// Rows in one pass
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 12, 16, 24, 32], value_parser = at_least_one, allow_negative_numbers = true)]
    pub rows: Vec<usize>,
    /// Measure whole answers by what drafts them instead
    #[arg(long)]
    pub drafts: bool,
    /// Prompts of --drafts, one {"category": ..., "prompt": ...} a line [default: some built in]
    #[arg(long, value_name = "FILE", requires = "drafts")]
    pub prompts: Option<PathBuf>,
    /// Most tokens of an answer of --drafts
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, value_parser = at_least_one, allow_negative_numbers = true)]
    pub max_tokens: usize,
    /// Temperature of --drafts
    #[arg(
        short,
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub temperature: f32,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Measurements of each, of which the median is given
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = at_least_one, allow_negative_numbers = true)]
    pub repeat: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub machine: MachineArgs,
}

#[derive(Args)]
pub struct TuneArgs {
    /// Model directory, GGUF file or name on the hub
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub machine: MachineArgs,
}

#[derive(Args)]
pub struct EvalArgs {
    /// Model directory, GGUF file or name on the hub
    pub model: Option<PathBuf>,
    /// File with the text
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Reference to compare with, such as the model that this one was quantised from
    #[arg(long, value_name = "MODEL")]
    pub against: Option<PathBuf>,
    /// Type of the reference's keys and values [default: that of --kv]
    #[arg(long, value_name = "KV", value_enum, requires = "against")]
    pub against_kv: Option<Kv>,
    /// Tokens of each window, read from an empty context; all but its first 16, or
    /// half of a shorter one, are predicted
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_two, allow_negative_numbers = true)]
    pub ctx: usize,
    /// Most tokens of the text
    #[arg(long, value_name = "N", value_parser = at_least_two, allow_negative_numbers = true)]
    pub tokens: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub machine: MachineArgs,
}

#[derive(Args)]
pub struct TraceArgs {
    /// The prompt
    pub prompt: String,
    /// Model directory, GGUF file or name on the hub
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// File to write, in HTML
    #[arg(short, long, value_name = "FILE", default_value = "trace.html")]
    pub output: PathBuf,
    /// Most tokens in the answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, value_parser = at_least_one, allow_negative_numbers = true)]
    pub max_tokens: usize,
    /// 0 always takes the best token
    #[arg(
        short,
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub temperature: f32,
    /// Seed of the noise
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
}

#[derive(Args)]
pub struct PullArgs {
    /// org/name, org/name@revision or org/name:file.gguf
    pub name: String,
}

#[derive(Args)]
pub struct ListArgs {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct RmArgs {
    /// org/name (all of it), org/name@revision or org/name:file.gguf
    pub name: String,
    /// Remove it without asking
    #[arg(short, long)]
    pub yes: bool,
}

/// A whole number that is at least `least`.
fn whole<T: FromStr<Err = std::num::ParseIntError> + PartialOrd + Display>(
    text: &str,
    least: T,
) -> Result<T, String> {
    match text.trim().parse() {
        Ok(number) if number >= least => Ok(number),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err("is too large".into()),
        _ => Err(format!("must be a whole number, at least {least}")),
    }
}

pub fn at_least_zero(text: &str) -> Result<usize, String> {
    whole(text, 0)
}

pub fn at_least_one(text: &str) -> Result<usize, String> {
    whole(text, 1)
}

/// One token would predict nothing.
fn at_least_two(text: &str) -> Result<usize, String> {
    whole(text, 2)
}

fn seed(text: &str) -> Result<u64, String> {
    whole(text, 0)
}

/// Its range is checked where it is used.
pub fn number(text: &str) -> Result<f32, String> {
    match text.trim().parse::<f32>() {
        Ok(number) if number.is_finite() => Ok(number),
        Ok(_) => Err("must be a finite number".into()),
        Err(_) => Err("must be a number".into()),
    }
}

fn some_text(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("must not be empty".into());
    }
    Ok(text.to_owned())
}

pub fn threads(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        number @ 1..=1024 => Ok(number),
        _ => Err("must be at most 1024".into()),
    }
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let form = || "must look like 1234=-5 or 1234=-inf".to_string();
    let (token, bias) = text.split_once(['=', ':']).ok_or_else(form)?;
    let token = token.trim().parse().map_err(|_| form())?;
    let bias: f32 = bias.trim().parse().map_err(|_| form())?;
    if bias.is_nan() || bias == f32::INFINITY {
        return Err(form());
    }
    Ok((token, bias))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(words: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(["kozue"].iter().chain(words))
    }

    fn run(words: &[&str]) -> RunArgs {
        match parse(words) {
            Ok(Cli {
                command: Command::Run(args),
            }) => *args,
            Ok(_) => panic!("{words:?} is another command"),
            Err(error) => panic!("{words:?}: {error}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn numbers_are_checked() {
        for words in [
            &["run", "--max-tokens", "0", "x"][..],
            &["run", "--ctx", "many", "x"],
            &["run", "--threads", "0", "x"],
            &["run", "--threads", "99999", "x"],
            &["run", "--logit-bias", "x", "x"],
            &["run", "--logit-bias", "1=nan", "x"],
            &["run", "--seed", "18446744073709551616", "x"],
            &["run", "--top-p", "nan", "x"],
            &["run", "-t", "inf", "x"],
            &["run", "--stop", "", "x"],
            &["quantize", "a", "b", "--size", "M", "--group", "48"],
            &["quantize", "a", "b", "--size", "S"],
            &["quantize", "a", "b"],
            &["run", "--raw", "--system", "s", "x"],
            &["bench", "--rows", "1,0"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
        // A negative number is a bad value, not an unknown option.
        for words in [
            &["run", "--seed", "-1", "x"][..],
            &["run", "--top-k", "-3", "x"],
            &["run", "-n", "-5", "x"],
            &["run", "--ctx", "-1", "x"],
            &["run", "--threads", "-1", "x"],
            &["run", "--penalty-window", "-1", "x"],
            &["bench", "--rows", "1,-2"],
            &["bench", "--repeat", "-2"],
            &["inspect", "--ctx", "-1"],
        ] {
            let error = parse(words).err().map(|error| error.to_string());
            let error = error.unwrap_or_default();
            assert!(
                error.contains("must be a whole number, at least "),
                "{error}"
            );
        }
        let args = run(&[
            "run",
            "--logit-bias",
            "5=-inf",
            "--logit-bias",
            "6=2",
            "-t",
            "0.5",
            "x",
        ]);
        assert_eq!(args.sampling.logit_bias, [(5, f32::NEG_INFINITY), (6, 2.0)]);
        assert_eq!(args.sampling.temperature, Some(0.5));
    }
}
