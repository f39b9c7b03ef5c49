//! A model's passes beside what the machine can do.
//!
//! Everything is measured in turns, round after round, and the medians are given, so that a
//! machine which is slower for some seconds is slower for all figures. The read bandwidth and
//! the integer peak are measured in the same rounds.

use crate::bench::median;
use crate::cli::BenchArgs;
use crate::failure::Failure;
use crate::panel::{Lines, progress};
use kozue_engine::loaded::CpuModel;
use kozue_engine::{LanguageModel, Loaded};
use kozue_kernels::measure::{integer_peak, read_bandwidth};
use kozue_model::State;
use serde_json::{Value, json};
use std::io::{self, Write};
use std::time::Instant;

/// Rounds in which the machine itself is measured.
const MACHINE_ROUNDS: usize = 3;

/// Tokens decoded for one figure.
const DECODED: usize = 8;

/// Runs the command.
pub fn run(args: &BenchArgs, loaded: &Loaded) -> Result<(), Failure> {
    let longest = loaded.model.max_position();
    let most_rows = args.rows.iter().copied().max().unwrap_or(1).max(DECODED);
    let deepest = args.depth.iter().copied().max().unwrap_or(1);
    let needed = args
        .prefill
        .iter()
        .copied()
        .max()
        .unwrap_or(1)
        .max(deepest + most_rows);
    if needed > longest {
        return Err(Failure::Usage(format!(
            "these measurements need a context of {needed} tokens, but the model was made for {longest}: give smaller --prefill, --depth or --rows"
        )));
    }
    loaded.check_context(0, needed)?;
    let figures = measure(args, &loaded.model)?;
    let text = if args.json {
        format!("{}\n", figures.json(loaded))
    } else {
        figures.text(loaded)
    };
    io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(Failure::output)
}

/// Medians, in seconds.
struct Figures {
    bandwidth: f64,
    peak: f64,
    prefill: Vec<(usize, f64)>,
    /// (depth, seconds for one token)
    decode: Vec<(usize, f64)>,
    /// (rows, seconds for one pass)
    rows: Vec<(usize, f64)>,
    rows_depth: usize,
}

fn measure(args: &BenchArgs, model: &CpuModel) -> Result<Figures, Failure> {
    let rows_depth = args.depth.iter().copied().min().unwrap_or(16);
    let mut depths = Vec::new();
    for &depth in &args.depth {
        let mut state = model.new_state();
        model.advance(&mut state, &tokens(model, depth), 1)?;
        depths.push((depth, state, Vec::new()));
    }
    let base = prefilled(model, rows_depth)?;
    let mut rows: Vec<(usize, Vec<f64>)> = args.rows.iter().map(|n| (*n, Vec::new())).collect();
    let mut prefill: Vec<(usize, Vec<f64>)> =
        args.prefill.iter().map(|n| (*n, Vec::new())).collect();
    let (mut bandwidths, mut peaks) = (Vec::new(), Vec::new());

    let mut told = Lines::new();
    for round in 0..args.repeat {
        told.show(&format!("round {} of {}", round + 1, args.repeat));
        if round < MACHINE_ROUNDS {
            bandwidths.push(read_bandwidth(model.cpu()));
            peaks.push(integer_peak(model.cpu()));
        }
        for (depth, state, seconds) in &mut depths {
            seconds.push(decode(model, state.clone(), *depth)?);
        }
        for (rows, seconds) in &mut rows {
            let mut state = base.clone();
            let tokens = tokens(model, *rows);
            let start = Instant::now();
            model.advance(&mut state, &tokens, *rows)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        for (length, seconds) in &mut prefill {
            let tokens = tokens(model, *length);
            let mut state = model.new_state();
            let start = Instant::now();
            model.advance(&mut state, &tokens, 1)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    progress("");
    let medians = |all: Vec<(usize, Vec<f64>)>| {
        all.into_iter()
            .map(|(n, seconds)| (n, median(seconds)))
            .collect()
    };
    Ok(Figures {
        bandwidth: median(bandwidths),
        peak: median(peaks),
        prefill: medians(prefill),
        decode: medians(
            depths
                .into_iter()
                .map(|(depth, _, seconds)| (depth, seconds))
                .collect(),
        ),
        rows: medians(rows),
        rows_depth,
    })
}

fn prefilled(model: &CpuModel, depth: usize) -> Result<State, Failure> {
    let mut state = model.new_state();
    model.advance(&mut state, &tokens(model, depth), 1)?;
    Ok(state)
}

/// Seconds for one token, over some.
fn decode(model: &CpuModel, mut state: State, depth: usize) -> Result<f64, Failure> {
    let tokens = tokens(model, depth + DECODED);
    let start = Instant::now();
    for token in &tokens[depth..] {
        model.advance(&mut state, std::slice::from_ref(token), 1)?;
    }
    Ok(start.elapsed().as_secs_f64() / DECODED as f64)
}

/// Token ids without a pattern; the work does not depend on them.
fn tokens(model: &CpuModel, count: usize) -> Vec<u32> {
    let vocab_size = model.vocab_size() as u64;
    (0..count as u64)
        .map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) % vocab_size)
        .map(|token| token as u32)
        .collect()
}

impl Figures {
    /// Share of the read bandwidth that decoding at a speed uses.
    fn share(&self, loaded: &Loaded, seconds: f64) -> f64 {
        loaded.bytes_per_pass() as f64 / seconds / self.bandwidth
    }

    fn one_row(&self) -> Option<f64> {
        self.rows
            .iter()
            .find(|(rows, _)| *rows == 1)
            .map(|(_, seconds)| *seconds)
    }

    fn text(&self, loaded: &Loaded) -> String {
        let cpu = loaded.model.cpu();
        let mut text = format!(
            "{}\n{} threads, {}: reads {:.1} GB/s, {:.0} billion int8 multiply-adds/s\nweights read by a pass: {:.3} GB\n\n",
            loaded.description().name,
            cpu.threads(),
            cpu.isa().name(),
            self.bandwidth / 1e9,
            self.peak / 1e9,
            loaded.bytes_per_pass() as f64 / 1e9,
        );
        text.push_str("prefill tokens   tokens/s\n");
        for (length, seconds) in &self.prefill {
            text.push_str(&format!(
                "{length:>14} {:>10.1}\n",
                *length as f64 / seconds
            ));
        }
        text.push_str("\n  decode depth   tokens/s   of read bandwidth\n");
        for (depth, seconds) in &self.decode {
            text.push_str(&format!(
                "{depth:>14} {:>10.2} {:>18.1}%\n",
                1.0 / seconds,
                100.0 * self.share(loaded, *seconds)
            ));
        }
        text.push_str(&format!(
            "\n  rows in a pass (depth {})   ms   of one row\n",
            self.rows_depth
        ));
        for (rows, seconds) in &self.rows {
            let ratio = self
                .one_row()
                .map_or("-".into(), |one| format!("{:.2}x", seconds / one));
            text.push_str(&format!("{rows:>14} {:>17.2} {ratio:>11}\n", 1e3 * seconds));
        }
        text
    }

    fn json(&self, loaded: &Loaded) -> Value {
        let cpu = loaded.model.cpu();
        json!({
            "model": loaded.description().name,
            "threads": cpu.threads(),
            "isa": cpu.isa().name(),
            "read_bandwidth_bytes_per_s": self.bandwidth,
            "integer_peak_macs_per_s": self.peak,
            "bytes_per_pass": loaded.bytes_per_pass(),
            "prefill": self.prefill.iter().map(|(tokens, seconds)| json!({
                "tokens": tokens, "seconds": seconds, "tokens_per_s": *tokens as f64 / seconds,
            })).collect::<Vec<_>>(),
            "decode": self.decode.iter().map(|(depth, seconds)| json!({
                "depth": depth, "seconds": seconds, "tokens_per_s": 1.0 / seconds,
                "bandwidth_share": self.share(loaded, *seconds),
            })).collect::<Vec<_>>(),
            "rows": self.rows.iter().map(|(rows, seconds)| json!({
                "rows": rows, "seconds": seconds,
                "ratio": self.one_row().map(|one| seconds / one),
            })).collect::<Vec<_>>(),
        })
    }
}
