//! `kozue export`: any model in the format of another program.

use crate::conversion::{self, ConversionArgs};
use crate::failure::Failure;
use crate::hub;
use clap::{Args, ValueEnum};
use kozue_checkpoint::{ExportOptions, Format, export};
use std::path::PathBuf;

#[derive(Args)]
pub struct ExportArgs {
    /// Model to read: a directory, a GGUF file or a name on the hub
    pub source: PathBuf,
    /// Directory to make; with --format gguf a file
    pub target: PathBuf,
    /// hf: plain floats, for transformers; lalamo: codes as they are, for Uzu; gguf: floats or q8_0,
    /// for llama.cpp
    #[arg(long, value_enum)]
    pub format: ExportFormat,
    /// Type of floats, and of the scales of codes (f32 keeps every bit)
    #[arg(long, value_enum, default_value_t = Floats::Bf16)]
    pub floats: Floats,
    #[command(flatten)]
    pub conversion: ConversionArgs,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum ExportFormat {
    Hf,
    Lalamo,
    Gguf,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Floats {
    Bf16,
    F16,
    F32,
    /// 8 bits, in GGUF files only
    #[value(name = "q8_0")]
    Q8_0,
}

/// Runs the command.
pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    let source = hub::place(&args.source)?;
    let cpu = args.conversion.cpu();
    let options = ExportOptions {
        format: match args.format {
            ExportFormat::Hf => Format::HuggingFace,
            ExportFormat::Lalamo => Format::Lalamo,
            ExportFormat::Gguf => Format::Gguf,
        },
        floats: match args.floats {
            Floats::Bf16 => kozue_checkpoint::Floats::Bf16,
            Floats::F16 => kozue_checkpoint::Floats::F16,
            Floats::F32 => kozue_checkpoint::Floats::F32,
            Floats::Q8_0 => kozue_checkpoint::Floats::Q8_0,
        },
        force: args.conversion.force,
    };
    let report = conversion::run(|progress| {
        export(&cpu, &source, &args.target, options, progress).map_err(Failure::failed)
    })?;
    args.conversion.show(&args.target, &report)
}
