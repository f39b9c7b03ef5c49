//! `kozue quantize`: any model to Kozue's packed format.

use crate::cli::{QuantizeArgs, Size};
use crate::conversion;
use crate::failure::Failure;
use crate::hub;
use kozue_checkpoint::{Options, quantize};
use kozue_kernels::Cpu;

/// Runs the command.
pub fn run(args: &QuantizeArgs) -> Result<(), Failure> {
    let source = hub::place(&args.source)?;
    let cpu = Cpu::new(args.threads);
    let options = Options {
        size: match args.size {
            Size::M => kozue_checkpoint::Size::M,
            Size::L => kozue_checkpoint::Size::L,
        },
        group: args.group,
        force: args.force,
    };
    let report =
        conversion::run(|progress| quantize(&cpu, &source, &args.target, options, progress))?;
    conversion::show(&args.target, args.quiet, &report).map_err(Failure::output)
}
