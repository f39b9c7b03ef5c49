//! Log-probabilities of tokens.

use crate::top::{best_first, keep_top};
use crate::transcendental::{exp, ln};

/// Log-probabilities of `token` and of the `alternatives` likeliest tokens, best first: logits less
/// the logarithm of the sum of all their exponentials.
pub fn logprobs(logits: &[f32], token: u32, alternatives: usize) -> (f32, Vec<(u32, f32)>) {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|&logit| exp(f64::from(logit) - f64::from(best)))
        .sum();
    let total = f64::from(best) + ln(sum);
    let of = |logit: f32| (f64::from(logit) - total) as f32;
    let mut top = Vec::new();
    if alternatives > 0 {
        keep_top(&mut top, logits, alternatives);
        top.sort_unstable_by(best_first);
        top.iter_mut().for_each(|(_, logit)| *logit = of(*logit));
    }
    (of(logits[token as usize]), top)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_one_whole() {
        // Probabilities 1/8, 1/2, 1/8, 1/4 and none.
        let logits = [0.0, 4f32.ln(), 0.0, 2f32.ln(), f32::NEG_INFINITY].map(|l| l + 50.0);
        let (logprob, top) = logprobs(&logits, 3, 3);
        assert!((logprob - 0.25f32.ln()).abs() < 1e-5);
        let tokens: Vec<u32> = top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [1, 3, 0]);
        assert!((top[0].1 - 0.5f32.ln()).abs() < 1e-5);
        assert!(logprobs(&logits, 0, 0).1.is_empty());
        assert_eq!(logprobs(&logits, 4, 0).0, f32::NEG_INFINITY);
    }
}
