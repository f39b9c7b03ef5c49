//! `kozue quantize`: any model to Kozue's packed format.

use crate::conversion::{self, ConversionArgs};
use crate::failure::Failure;
use crate::hub;
use clap::{Args, ValueEnum};
use kozue_checkpoint::{Options, quantize};
use kozue_engine::Error;
use kozue_engine::calibration::{self, calibrate};
use std::path::{Path, PathBuf};

#[derive(Args)]
#[command(override_usage = "kozue quantize [OPTIONS] --size <SIZE> <SOURCE> <TARGET>")]
pub struct QuantizeArgs {
    /// Model to read: a directory, a GGUF file or a name on the hub
    pub source: PathBuf,
    /// Directory to make
    // Not clap's to miss where --calibrate took it: what is said then should say so.
    #[arg(required_unless_present = "calibrate")]
    pub target: Option<PathBuf>,
    /// M: 4 bits with zero points; L: 8 bits
    #[arg(long, value_enum, ignore_case = true)]
    pub size: Size,
    /// The same for the embedding table and the head [default: as --size]
    #[arg(long, value_enum, ignore_case = true)]
    pub head: Option<Size>,
    /// Weights that share a scale
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = group, allow_negative_numbers = true)]
    pub group: usize,
    /// Choose codes by what the model does with a text, which takes longer and loses less [default
    /// text: one built in]
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub calibrate: Option<Option<PathBuf>>,
    #[command(flatten)]
    pub conversion: ConversionArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    #[value(name = "M")]
    M,
    #[value(name = "L")]
    L,
}

impl From<Size> for kozue_checkpoint::Size {
    fn from(size: Size) -> kozue_checkpoint::Size {
        match size {
            Size::M => kozue_checkpoint::Size::M,
            Size::L => kozue_checkpoint::Size::L,
        }
    }
}

fn group(text: &str) -> Result<usize, String> {
    match text {
        "32" => Ok(32),
        "64" => Ok(64),
        "128" => Ok(128),
        _ => Err("must be 32, 64 or 128".into()),
    }
}

impl QuantizeArgs {
    fn target(&self) -> Result<&Path, Failure> {
        let taken = match (&self.target, &self.calibrate) {
            (Some(target), _) => return Ok(target),
            (None, Some(Some(text))) => format!(
                "--calibrate took {} as its text, so there is no directory to make: put --calibrate last, or write --calibrate=FILE",
                text.display()
            ),
            (None, _) => "name the directory to make after the source".to_string(),
        };
        Err(Failure::Usage(taken))
    }
}

/// Runs the command.
pub fn run(args: &QuantizeArgs) -> Result<(), Failure> {
    let target = args.target()?;
    let source = hub::place(&args.source)?;
    let cpu = args.conversion.cpu();
    let options = Options {
        size: args.size.into(),
        head: args.head.map(Size::into),
        group: args.group,
        force: args.conversion.force,
    };
    let text = match &args.calibrate {
        Some(Some(path)) => Some(
            std::fs::read_to_string(path)
                .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))?,
        ),
        Some(None) => Some(calibration::TEXT.to_string()),
        None => None,
    };
    let mut kept = false;
    let report = conversion::run(|progress| match &text {
        Some(text) => {
            let report = calibrate(&cpu, &source, target, options, text, progress);
            kept = matches!(report, Err(Error::Unfinished { .. }));
            report.map_err(|error| match &args.calibrate {
                Some(Some(path)) => Failure::with_text(path, error),
                _ => error.into(),
            })
        }
        None => quantize(&cpu, &source, target, options, progress).map_err(Failure::failed),
    });
    if let (Err(Failure::Interrupted { .. }), true) = (&report, kept) {
        eprintln!("kozue: finished layers are kept; the same command goes on after them");
    }
    args.conversion.show(target, &report?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn parse(words: &[&str]) -> QuantizeArgs {
        match Cli::try_parse_from(["kozue", "quantize"].iter().chain(words)) {
            Ok(Cli {
                command: Command::Quantize(args),
            }) => args,
            Ok(_) => panic!("{words:?} is another command"),
            Err(error) => panic!("{words:?}: {error}"),
        }
    }

    #[test]
    fn a_text_to_calibrate_with_may_be_left_out() {
        let words = ["a", "b", "--size", "M", "--calibrate", "text"];
        assert_eq!(parse(&words[..4]).calibrate, None);
        assert_eq!(parse(&words[..5]).calibrate, Some(None));
        let text = Some(Some(PathBuf::from("text")));
        assert_eq!(parse(&words).calibrate, text);
        let words = ["--calibrate=text", "a", "b", "--size", "M"];
        assert_eq!(parse(&words).calibrate, text);
    }

    #[test]
    fn a_source_that_was_taken_for_a_text_is_told() {
        let told = |words: &[&str]| match parse(words).target() {
            Err(Failure::Usage(told)) => told,
            _ => panic!("{words:?} name a target"),
        };
        for words in [
            ["--size", "M", "--calibrate", "a", "b"],
            ["b", "--calibrate", "a", "--size", "M"],
        ] {
            let told = told(&words);
            assert!(told.contains("took a as its text"), "{told}");
        }
        let told = told(&["a", "--size", "M", "--calibrate"]);
        assert!(told.starts_with("name the directory"), "{told}");
        let words = ["a", "--size", "M"];
        assert!(Cli::try_parse_from(["kozue", "quantize"].iter().chain(&words)).is_err());
    }

    #[test]
    fn sizes_in_either_case() {
        for size in ["M", "m"] {
            let args = parse(&["a", "b", "--size", size]);
            assert_eq!((args.size, args.group), (Size::M, 64));
        }
    }
}
