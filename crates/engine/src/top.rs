//! The best tokens of a row of logits.

use std::cmp::Ordering;

/// Best first: higher logit, then lower id.
pub fn best_first(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Logits that are looked at together.
const CHUNK: usize = 64;

/// Fills `kept` with the `k` best tokens and their logits, in no order; ties go to the lower id.
///
/// Collects at most about 2k at a time, so that most of a large vocabulary costs one comparison
/// each.
pub fn keep_top(kept: &mut Vec<(u32, f32)>, logits: &[f32], k: usize) {
    kept.clear();
    let limit = (2 * k).max(64);
    let mut floor = f32::NEG_INFINITY;
    for (first, chunk) in (0..).step_by(CHUNK).zip(logits.chunks(CHUNK)) {
        // Most chunks of a large vocabulary have nothing above the floor, which one comparison of
        // many lanes tells. A later token that only equals the floor has a higher id than k tokens
        // at least as good, so it is out.
        if kept.len() >= k
            && !chunk
                .iter()
                .fold(false, |any, &logit| any | (logit > floor))
        {
            continue;
        }
        for (token, &logit) in (first..).zip(chunk) {
            if logit > floor || (kept.len() < k && logit == floor) {
                kept.push((token, logit));
                if kept.len() > limit {
                    kept.select_nth_unstable_by(k - 1, best_first);
                    kept.truncate(k);
                    floor = kept[k - 1].1;
                }
            }
        }
    }
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, best_first);
        kept.truncate(k);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn they_are_the_first_of_a_sort(
            logits in proptest::collection::vec(-3i8..3, 1..400), k in 1usize..80,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            sorted.sort_by(best_first);
            sorted.truncate(k);
            let mut kept = Vec::new();
            keep_top(&mut kept, &logits, k);
            kept.sort_by(best_first);
            prop_assert_eq!(kept, sorted);
        }
    }
}
