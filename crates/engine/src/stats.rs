//! What an answer cost.

use crate::speculation::{SpeculationCounts, SpeculationStats};
use serde::Serialize;

/// Times, speeds, memory and energy of one answer. A figure that cannot be had is `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// Seconds from the request to the first token of the answer.
    pub time_to_first_token_s: Option<f64>,
    /// Prompt tokens computed (not those kept from an earlier turn) per second.
    pub prefill_tokens_per_s: Option<f64>,
    /// Tokens after the first, per second.
    pub generation_tokens_per_s: Option<f64>,
    /// Tokens after the first, per forward pass.
    pub tokens_per_forward_pass: Option<f64>,
    /// Forward passes after the prompt's.
    pub forward_passes: usize,
    /// Resident memory of the process after the answer.
    pub memory_bytes: Option<u64>,
    /// Energy of the processor packages (and memory, where it is counted) during the request.
    pub energy_j: Option<f64>,
    /// Seconds from the request to the end of the answer.
    pub duration_s: f64,
    /// What drafts did; `None` where nothing was drafted.
    pub speculation: Option<SpeculationStats>,
    /// Energy up to the first token, by prompt token computed.
    #[serde(skip)]
    pub energy_per_input_token_j: Option<f64>,
    /// Energy after the first token, by token.
    #[serde(skip)]
    pub energy_per_output_token_j: Option<f64>,
    /// Prompt tokens that an earlier turn had computed already.
    #[serde(skip)]
    pub reused_tokens: usize,
}

/// What was counted during one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    pub prefilled: usize,
    pub reused: usize,
    pub completion: usize,
    pub forward_passes: usize,
    pub first_token_s: Option<f64>,
    pub prefill_s: f64,
    pub duration_s: f64,
    pub prefill_energy_j: Option<f64>,
    pub energy_j: Option<f64>,
    pub memory_bytes: Option<u64>,
    pub speculation: SpeculationCounts,
}

impl Counts {
    pub fn stats(&self) -> Stats {
        let later = self.completion.saturating_sub(1) as f64;
        let decode_s = self.first_token_s.map(|first| self.duration_s - first);
        let decode_energy = self
            .energy_j
            .zip(self.prefill_energy_j)
            .map(|(all, first)| all - first);
        Stats {
            time_to_first_token_s: self.first_token_s,
            prefill_tokens_per_s: ratio(self.prefilled as f64, Some(self.prefill_s)),
            generation_tokens_per_s: ratio(later, decode_s).filter(|_| later > 0.0),
            tokens_per_forward_pass: ratio(later, Some(self.forward_passes as f64)),
            forward_passes: self.forward_passes,
            memory_bytes: self.memory_bytes,
            energy_j: self.energy_j,
            duration_s: self.duration_s,
            energy_per_input_token_j: self
                .prefill_energy_j
                .and_then(|energy| ratio(energy, Some(self.prefilled as f64))),
            energy_per_output_token_j: decode_energy.and_then(|energy| ratio(energy, Some(later))),
            reused_tokens: self.reused,
            speculation: self.speculation.stats(self.forward_passes),
        }
    }
}

fn ratio(amount: f64, per: Option<f64>) -> Option<f64> {
    per.filter(|per| *per > 0.0).map(|per| amount / per)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_belongs_to_the_prompt() {
        let counts = Counts {
            prefilled: 100,
            completion: 21,
            forward_passes: 10,
            first_token_s: Some(2.0),
            prefill_s: 1.9,
            duration_s: 6.0,
            prefill_energy_j: Some(50.0),
            energy_j: Some(150.0),
            ..Counts::default()
        };
        let stats = counts.stats();
        assert_eq!(stats.generation_tokens_per_s, Some(5.0));
        assert_eq!(stats.tokens_per_forward_pass, Some(2.0));
        assert_eq!(stats.energy_per_input_token_j, Some(0.5));
        assert_eq!(stats.energy_per_output_token_j, Some(5.0));
        assert!((stats.prefill_tokens_per_s.unwrap() - 52.63).abs() < 0.01);
    }

    #[test]
    fn what_was_not_measured_is_none() {
        let one = Counts {
            completion: 1,
            first_token_s: Some(1.0),
            duration_s: 1.0,
            ..Counts::default()
        };
        let stats = one.stats();
        assert_eq!(stats.generation_tokens_per_s, None);
        assert_eq!(stats.tokens_per_forward_pass, None);
        assert_eq!(stats.energy_j, None);
        assert_eq!(stats.prefill_tokens_per_s, None);
        assert_eq!(Counts::default().stats().time_to_first_token_s, None);
    }
}
