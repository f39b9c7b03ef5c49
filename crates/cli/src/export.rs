//! `kozue export`: any model in the format of another program.

use crate::cli::{ExportArgs, ExportFormat, Floats};
use crate::conversion;
use crate::failure::Failure;
use crate::hub;
use kozue_checkpoint::{ExportOptions, Format, export};
use kozue_kernels::Cpu;

/// Runs the command.
pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    let source = hub::place(&args.source)?;
    let cpu = Cpu::new(args.threads);
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
        force: args.force,
    };
    let report = conversion::run(|progress| {
        export(&cpu, &source, &args.target, options, progress).map_err(Failure::failed)
    })?;
    conversion::show(&args.target, args.quiet, &report).map_err(Failure::output)
}
