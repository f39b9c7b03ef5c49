//! What the commands that convert models have in common: options, and what they show: progress, then
//! what became of each tensor.

use crate::cli::threads;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::panel::bytes;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kozue_checkpoint::{Progress, Report, TensorReport};
use kozue_kernels::Cpu;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

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
    let mut lines = (!io::stderr().is_terminal()).then(Lines::new);
    let mut tensor = String::new();
    let result = convert(&mut |progress| {
        if let Some(lines) = &mut lines
            && lines.due(bar.elapsed())
        {
            let percent = 100 * progress.done / progress.total.max(1);
            let seconds = bar.elapsed().as_secs();
            // Nobody to tell is no reason to fail.
            let _ = writeln!(
                io::stderr(),
                "kozue: {percent}% after {seconds} s: {}",
                progress.tensor
            );
        }
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

/// When a line tells how far the work is: the longer it takes, the seldomer.
struct Lines {
    next: Duration,
}

impl Lines {
    const SHORTEST: Duration = Duration::from_secs(5);
    const LONGEST: Duration = Duration::from_secs(300);

    fn new() -> Lines {
        Lines {
            next: Lines::SHORTEST,
        }
    }

    fn due(&mut self, elapsed: Duration) -> bool {
        let due = elapsed >= self.next;
        if due {
            self.next = elapsed + (elapsed / 4).clamp(Lines::SHORTEST, Lines::LONGEST);
        }
        due
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_seldomer_the_longer_it_takes() {
        let told = |seconds: u64| {
            let mut lines = Lines::new();
            let due = |second: &u64| lines.due(Duration::from_secs(*second));
            (0..=seconds).filter(due).collect::<Vec<u64>>()
        };
        assert_eq!(told(4), [0; 0]);
        assert_eq!(told(45), [5, 10, 15, 20, 25, 32, 40]);
        let day = told(86_400);
        assert!(day.len() < 320, "{}", day.len());
        assert!(day.windows(2).all(|pair| pair[1] - pair[0] <= 300));
    }
}
