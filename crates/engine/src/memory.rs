//! Memory of this process.

use crate::error::Error;
use crate::sequence::PREFILL_ROWS;
use kozue_checkpoint::DFlashConfig;
use kozue_checkpoint::description::{Mixer, ModelConfig};
use kozue_kernels::{KvType, obtainable_memory};
use kozue_model::{Working, pass_bytes};

/// Rows of a pass that have logits: those of a tree.
const LOGIT_ROWS: usize = 32;

/// Bytes that a sequence of some length takes besides the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Its keys, values and recurrent states.
    pub sequence: u64,
    /// Those of the network that drafts for it.
    pub drafter: u64,
    /// What a pass works in; sequences share it.
    pub pass: u64,
}

impl Needs {
    /// Of a sequence of `tokens` tokens.
    pub fn new(
        config: &ModelConfig,
        drafts: Option<&DraftShape>,
        kv: KvType,
        threads: usize,
        tokens: usize,
    ) -> Needs {
        let rows = tokens.min(PREFILL_ROWS);
        let taps = drafts.map_or(0, |drafts| drafts.taps);
        let working = Working {
            rows,
            logit_rows: LOGIT_ROWS,
            taps,
            positions: tokens,
            threads,
        };
        // Features wait for the drafter.
        let waiting = 4 * (rows * taps * config.hidden_size) as u64;
        let drafter = drafts.map_or(0, |drafts| drafts.layers.sequence_bytes(kv, tokens));
        Needs {
            sequence: config.sequence_bytes(kv, tokens),
            drafter: drafter.saturating_add(waiting),
            pass: pass_bytes(config, kv, working),
        }
    }

    /// What the sequence takes for itself.
    pub fn own(&self) -> u64 {
        self.sequence.saturating_add(self.drafter)
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.own().saturating_add(self.pass)
    }
}

/// What a drafter keeps of a sequence.
#[derive(Clone, Debug)]
pub struct DraftShape {
    /// Its layers, which keep what those of a model would.
    layers: ModelConfig,
    /// How many of the model's layers it reads.
    taps: usize,
}

impl DraftShape {
    /// A DFlash network.
    pub fn dflash(config: &DFlashConfig) -> DraftShape {
        DraftShape {
            layers: config.shape.clone(),
            taps: config.taps.len(),
        }
    }

    /// The prediction head of a model.
    pub fn head(model: &ModelConfig) -> DraftShape {
        DraftShape {
            layers: ModelConfig {
                layers: vec![Mixer::Attention],
                ..model.clone()
            },
            taps: 1,
        }
    }

    /// A smaller model.
    pub fn model(smaller: &ModelConfig) -> DraftShape {
        DraftShape {
            layers: smaller.clone(),
            taps: 0,
        }
    }
}

/// Resident bytes, mapped weights that were touched included; `None` where the system does not
/// tell.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    resident_in(&status)
}

/// An error if the system cannot give `needed` bytes more. `what` and `advice` are parts of it
/// ([`Error::OutOfMemory`]). Where the system does not tell, nothing is refused.
pub(crate) fn check(needed: u64, what: &str, advice: &'static str) -> Result<(), Error> {
    match obtainable_memory() {
        Some(available) if (available as u64) < needed => Err(Error::OutOfMemory {
            what: what.to_owned(),
            needed,
            available: available as u64,
            advice,
        }),
        _ => Ok(()),
    }
}

/// Gives freed memory back to the system. Reading a large vocabulary leaves more of it behind
/// than the vocabulary takes, and the allocator alone would keep it.
pub fn release_unused() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function takes no pointers and may be called at any time, from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn resident_in(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn freed_memory_goes_back_to_the_system() {
        let resident = || resident_bytes().unwrap() as i64;
        // Small pieces, the last of them kept, so that the rest cannot go back by itself.
        let mut pieces: Vec<Vec<u8>> = (0..200_000).map(|_| vec![1; 200]).collect();
        let kept = pieces.pop();
        let before = resident();
        drop(pieces);
        release_unused();
        assert!(
            before - resident() > 20_000_000,
            "{} bytes went back",
            before - resident()
        );
        drop(kept);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn more_than_there_is_is_refused() {
        check(1 << 20, "a little takes", "never said").unwrap();
        let error = check(1 << 60, "the weights take", "buy memory").unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("out of memory: the weights take 1152921504.61 GB, but "));
        assert!(text.ends_with(" GB can be had: buy memory"), "{text}");
    }

    #[test]
    fn reads_the_kernels_line() {
        let status = "Name:\tkozue\nVmHWM:\t  200 kB\nVmRSS:\t    1234 kB\nThreads:\t2\n";
        assert_eq!(resident_in(status), Some(1234 * 1024));
        assert_eq!(resident_in("Name:\tkozue\n"), None);
        assert_eq!(resident_in("VmRSS:\tmany kB\n"), None);
    }
}
