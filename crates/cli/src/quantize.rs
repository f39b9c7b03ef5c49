//! `kozue quantize`: any model to Kozue's packed format.

use crate::cli::{QuantizeArgs, Size};
use crate::failure::Failure;
use crate::hub;
use crate::interrupt::Interrupt;
use crate::panel::bytes;
use indicatif::{ProgressBar, ProgressStyle};
use kozue_checkpoint::{Options, Report, TensorReport, quantize};
use kozue_kernels::Cpu;
use std::io::{self, Write};
use std::ops::ControlFlow;

/// Runs the command.
pub fn run(args: &QuantizeArgs) -> Result<(), Failure> {
    let source = hub::place(&args.source)?;
    let interrupt = Interrupt::on_any_end()?;
    let cpu = Cpu::new(args.threads);
    let options = Options {
        size: match args.size {
            Size::M => kozue_checkpoint::Size::M,
            Size::L => kozue_checkpoint::Size::L,
        },
        group: args.group,
        force: args.force,
    };
    let style =
        ProgressStyle::with_template("{percent:>3}% {bar:30} {elapsed} of about {duration}  {msg}");
    let bar = ProgressBar::new(0).with_style(style.map_err(Failure::failed)?);
    let mut tensor = String::new();
    let result = quantize(&cpu, &source, &args.target, options, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        if tensor != progress.tensor {
            tensor = progress.tensor.to_string();
            bar.set_message(tensor.clone());
        }
        if interrupt.pressed() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    bar.finish_and_clear();
    let report = match result {
        Err(_) if interrupt.pressed() => return Err(interrupt.failure()),
        other => other.map_err(Failure::failed)?,
    };
    show(args, &report).map_err(Failure::output)
}

fn show(args: &QuantizeArgs, report: &Report) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if !args.quiet {
        let width = report
            .tensors
            .iter()
            .map(|t| t.name.len())
            .max()
            .unwrap_or(0);
        for tensor in &report.tensors {
            writeln!(out, "{:<width$}  {}", tensor.name, change(tensor))?;
        }
    }
    writeln!(
        out,
        "{}: {} -> {}, {:.2} bits per weight",
        args.target.display(),
        bytes(report.bytes_before),
        bytes(report.bytes_after),
        report.bits_per_weight()
    )
}

fn change(tensor: &TensorReport) -> String {
    let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
    let mut text = format!("{:<14} {} -> {}", shape.join(" x "), tensor.from, tensor.to);
    if let Some(error) = tensor.relative_error {
        text.push_str(&format!(", error {:.3}%", 100.0 * error));
    }
    if let Some(note) = &tensor.note {
        text.push_str(&format!(" ({note})"));
    }
    text
}
