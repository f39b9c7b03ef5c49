//! What the commands that convert models show: progress, then what became of each tensor.

use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::panel::bytes;
use indicatif::{ProgressBar, ProgressStyle};
use kozue_checkpoint::{Progress, Report, TensorReport};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

/// Runs a conversion with a bar; any wish to end it ends it.
pub fn run(
    convert: impl FnOnce(&mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<Report, Failure>,
) -> Result<Report, Failure> {
    let interrupt = Interrupt::on_any_end()?;
    let style =
        ProgressStyle::with_template("{percent:>3}% {bar:30} {elapsed} of about {duration}  {msg}");
    let bar = ProgressBar::new(0).with_style(style.map_err(Failure::failed)?);
    let mut tensor = String::new();
    let result = convert(&mut |progress| {
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
pub fn show(target: &Path, quiet: bool, report: &Report) -> io::Result<()> {
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
