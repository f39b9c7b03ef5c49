//! `kozue quantize`: any model to Kozue's packed format.

use crate::cli::{QuantizeArgs, Size};
use crate::conversion;
use crate::failure::Failure;
use crate::hub;
use kozue_checkpoint::{Options, quantize};
use kozue_engine::calibration::{self, calibrate};
use kozue_kernels::Cpu;

/// Runs the command.
pub fn run(args: &QuantizeArgs) -> Result<(), Failure> {
    let source = hub::place(&args.source)?;
    let cpu = Cpu::new(args.threads);
    let options = Options {
        size: args.size.into(),
        head: args.head.map(Size::into),
        group: args.group,
        force: args.force,
    };
    let text = match &args.calibrate {
        Some(Some(path)) => Some(
            std::fs::read_to_string(path)
                .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))?,
        ),
        Some(None) => Some(calibration::TEXT.to_string()),
        None => None,
    };
    let report = conversion::run(|progress| match &text {
        Some(text) => {
            calibrate(&cpu, &source, &args.target, options, text, progress).map_err(Failure::from)
        }
        None => quantize(&cpu, &source, &args.target, options, progress).map_err(Failure::failed),
    });
    if let (Err(Failure::Interrupted { .. }), Some(_)) = (&report, &text) {
        eprintln!("kozue: finished layers are kept; the same command goes on after them");
    }
    let report = report?;
    conversion::show(&args.target, args.quiet, &report).map_err(Failure::output)
}

impl From<Size> for kozue_checkpoint::Size {
    fn from(size: Size) -> kozue_checkpoint::Size {
        match size {
            Size::M => kozue_checkpoint::Size::M,
            Size::L => kozue_checkpoint::Size::L,
        }
    }
}
