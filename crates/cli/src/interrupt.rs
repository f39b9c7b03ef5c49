//! Signals that ask the program to stop: work in progress ends in good order. A second one, before
//! that has happened, ends the program at once.

use crate::failure::Failure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Whether a signal came.
#[derive(Clone)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl Interrupt {
    /// From now on Ctrl-C sets a flag.
    pub fn on_ctrl_c() -> Result<Interrupt, Failure> {
        Interrupt::on(&[SIGINT])
    }

    /// From now on every request to end sets a flag: Ctrl-C, a plain `kill`, and the terminal's
    /// going away. For work that leaves files behind where it is cut off.
    pub fn on_any_end() -> Result<Interrupt, Failure> {
        Interrupt::on(&[SIGINT, SIGTERM, SIGHUP])
    }

    fn on(signals: &[i32]) -> Result<Interrupt, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        let last = Arc::new(AtomicUsize::new(SIGINT as usize));
        let ignored = ignored();
        for &signal in signals {
            // As `nohup` and shells ask of jobs in the background.
            if ignored >> (signal - 1) & 1 == 1 {
                continue;
            }
            // In this order: the first signal finds the flag unset and sets it.
            signal_hook::flag::register_conditional_shutdown(
                signal,
                128 + signal,
                Arc::clone(&flag),
            )
            .and_then(|_| {
                signal_hook::flag::register_usize(signal, Arc::clone(&last), signal as usize)
            })
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .map_err(|error| Failure::Failed(format!("cannot listen for signals: {error}")))?;
        }
        Ok(Interrupt { flag, signal: last })
    }

    /// The flag.
    pub fn flag(&self) -> &AtomicBool {
        &self.flag
    }

    /// Whether a signal came.
    pub fn pressed(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// How the program ends because of it.
    pub fn failure(&self) -> Failure {
        Failure::Interrupted {
            signal: self.signal.load(Ordering::Relaxed) as u8,
        }
    }

    /// Makes ready for the next answer.
    pub fn clear(&self) {
        self.flag.store(false, Ordering::Relaxed);
    }
}

/// The signals that the program was started to ignore, bit n - 1 for signal n; none where the
/// system does not tell.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0)
}
