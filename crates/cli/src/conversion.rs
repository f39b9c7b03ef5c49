//! What the commands that convert models have in common: options, and what they show: progress, then
//! what became of each tensor.

use crate::cli::threads;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::panel::{Lines, bytes};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kozue_checkpoint::{Progress, Report, TensorReport};
use kozue_kernels::Cpu;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

#[derive(Args)]
pub struct ConversionArgs {
    /// Replace what Kozue wrote there before
    #[arg(long)]
    pub force: bool,
    /// Only the summary, no line for each tensor
    #[arg(short, long)]
    pub quiet: bool,
    /// Threads [default: one for each physical core]
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    pub threads: Option<usize>,
}

impl ConversionArgs {
    pub fn cpu(&self) -> Cpu {
        Cpu::new(self.threads)
    }

    /// Tells what a conversion did.
    pub fn show(&self, target: &Path, report: &Report) -> Result<(), Failure> {
        show(target, self.quiet, report).map_err(Failure::output)
    }
}

/// Runs a conversion with a bar, or some lines where there is no terminal; any wish to end it ends it.
pub fn run(
    convert: impl FnOnce(&mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<Report, Failure>,
) -> Result<Report, Failure> {
    let interrupt = Interrupt::on_any_end()?;
    let style =
        ProgressStyle::with_template("{percent:>3}% {bar:30} {elapsed} of about {duration}  {msg}");
    let bar = ProgressBar::new(0).with_style(style.map_err(Failure::failed)?);
    let mut lines = Lines::new();
    let mut tensor = String::new();
    let result = convert(&mut |progress| {
        lines.add(|seconds| {
            let percent = 100 * progress.done / progress.total.max(1);
            format!("{percent}% after {seconds} s: {}", progress.tensor)
        });
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
    match result {
        Err(_) if interrupt.pressed() => Err(interrupt.failure()),
        other => other,
    }
}

/// A line for each tensor unless `quiet`, what was lost besides, and the sizes.
fn show(target: &Path, quiet: bool, report: &Report) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if !quiet {
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
    for note in &report.notes {
        writeln!(out, "{note}")?;
    }
    writeln!(
        out,
        "{}: {} -> {}, {:.2} bits per weight",
        target.display(),
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
