//! The figures after an answer, on standard error.

use crate::printer::colours;
use kozue_engine::Answer;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// A line that is written over on a terminal, for work that takes a while.
pub fn progress(text: &str) {
    let mut stderr = io::stderr().lock();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r\x1b[2K{text}").and_then(|()| stderr.flush());
    }
}

/// Tells of work that takes minutes: on a terminal by a line that is written over, elsewhere by lines
/// that come the seldomer the longer it takes.
pub struct Lines {
    start: Instant,
    next: Duration,
}

impl Lines {
    const SHORTEST: Duration = Duration::from_secs(5);
    const LONGEST: Duration = Duration::from_secs(300);

    pub fn new() -> Lines {
        Lines {
            start: Instant::now(),
            next: Lines::SHORTEST,
        }
    }

    /// Tells how far it is.
    pub fn show(&mut self, text: &str) {
        progress(text);
        self.add(|seconds| format!("{text}, after {seconds} s"));
    }

    /// A line where there is no terminal; `text` is told the seconds since the start.
    pub fn add(&mut self, text: impl FnOnce(u64) -> String) {
        let elapsed = self.start.elapsed();
        if !io::stderr().is_terminal() && self.due(elapsed) {
            // Nobody to tell is no reason to fail.
            let _ = writeln!(io::stderr(), "kozue: {}", text(elapsed.as_secs()));
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

/// A number of things: 1 tree, 2 trees, 2 passes.
pub fn counted(number: usize, thing: &str) -> String {
    let plural = match number {
        1 => "",
        _ if thing.ends_with('s') => "es",
        _ => "s",
    };
    format!("{number} {thing}{plural}")
}

/// Shows how much of a long prompt is read.
pub fn prefill(done: usize, total: usize) {
    // A prompt of one pass is read at once.
    if total > 512 {
        let text = format!("reading the prompt: {done} of {total} tokens");
        progress(if done < total { &text } else { "" });
    }
}

/// Shows what the answer cost.
pub fn show(answer: &Answer, seed: Option<u64>) {
    if answer.token_ids.is_empty() {
        // It ended while the prompt was read.
        progress("");
    }
    let (dim, plain) = if colours(&io::stderr()) {
        ("\x1b[2m", "\x1b[0m")
    } else {
        ("", "")
    };
    // A terminal shows the answer and the panel together: a line between them.
    let both = io::stderr().is_terminal() && io::stdout().is_terminal();
    let mut text = String::from(if both { "\n" } else { "" });
    for (name, value) in lines(answer, seed) {
        text.push_str(&format!("{dim}{name:<20} {value}{plain}\n"));
    }
    // Figures that nobody can see are no reason to fail.
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

fn lines(answer: &Answer, seed: Option<u64>) -> Vec<(&'static str, String)> {
    let stats = &answer.stats;
    let prompt = answer.usage.prompt_tokens;
    let kept = match stats.reused_tokens {
        0 => String::new(),
        kept => format!(", {kept} of them kept from before"),
    };
    let mut lines = vec![
        ("time to first token", seconds(stats.time_to_first_token_s)),
        (
            "prefill",
            format!(
                "{}, {prompt} tokens{kept}",
                speed(stats.prefill_tokens_per_s)
            ),
        ),
        (
            "generation",
            format!(
                "{}, {} tokens",
                speed(stats.generation_tokens_per_s),
                answer.usage.completion_tokens
            ),
        ),
        (
            "tokens per pass",
            format!(
                "{}, {}",
                stats
                    .tokens_per_forward_pass
                    .map_or("-".into(), |x| format!("{x:.2}")),
                counted(stats.forward_passes, "pass")
            ),
        ),
        ("drafts", drafts(answer)),
        (
            "memory",
            stats
                .memory_bytes
                .map_or("not available on this machine".into(), bytes),
        ),
        ("energy", energy(answer)),
        ("duration", seconds(Some(stats.duration_s))),
    ];
    if let Some(seed) = seed {
        lines.push(("seed", seed.to_string()));
    }
    lines
}

/// How large the drafts were and what they cost, where there were any.
fn drafts(answer: &Answer) -> String {
    let Some(stats) = &answer.stats.speculation else {
        return "none".into();
    };
    if stats.rounds == 0 {
        return "none that paid".into();
    }
    let spent = stats.draft_s + stats.verify_s + stats.commit_s + stats.sample_s;
    format!(
        "{} of {:.1} nodes, {:.1} deep, {:.1} accepted; drafting {:.0}% of the time",
        counted(stats.rounds, "tree"),
        stats.mean_tree_size,
        stats.mean_tree_depth,
        stats.mean_accepted,
        100.0 * stats.draft_s / spent.max(f64::MIN_POSITIVE)
    )
}

fn energy(answer: &Answer) -> String {
    let Some(total) = answer.stats.energy_j else {
        return "not available on this machine".into();
    };
    let each = |joules: Option<f64>| joules.map_or("-".into(), |j| format!("{j:.3} J"));
    format!(
        "{total:.1} J: {} per input token, {} per output token",
        each(answer.stats.energy_per_input_token_j),
        each(answer.stats.energy_per_output_token_j)
    )
}

fn seconds(seconds: Option<f64>) -> String {
    seconds.map_or("-".into(), |s| format!("{s:.2} s"))
}

fn speed(speed: Option<f64>) -> String {
    speed.map_or("-".into(), |s| format!("{s:.1} tokens/s"))
}

/// Bytes as a reader likes them.
pub fn bytes(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.2} GB", value / 1e9),
    }
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
