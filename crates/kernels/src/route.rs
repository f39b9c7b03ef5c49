//! Routing in a mixture of experts: which experts a row takes, and their sum.
//!
//! A row's choice and sum are the same bits whatever rows run beside it: the experts with the
//! largest logits, the lower index first among equals, are summed in the order of their indices.

use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};

/// One expert that one row takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The expert.
    pub expert: usize,
    /// The row.
    pub row: usize,
    /// Weight of the expert's output in the row's sum.
    pub weight: f32,
}

/// The choices of all rows, by expert and then by row.
///
/// `logits` has `experts` values a row. With m the largest, e_i = exp(l_i - m) in lanes; the weight
/// of a chosen expert is e_i divided by the sum of e over the row's `chosen` ones, in order of their
/// logits, if `normalised`, else over all experts, in order of their indices.
///
/// # Panics
/// If `logits` is no whole number of rows or `chosen` is not from 1 to `experts`.
pub fn route(
    cpu: &Cpu,
    logits: &[f32],
    experts: usize,
    chosen: usize,
    normalised: bool,
) -> Vec<Choice> {
    assert!(
        (1..=experts).contains(&chosen) && logits.len().is_multiple_of(experts),
        "{chosen} of {experts} experts, {} logits",
        logits.len()
    );
    let mut choices = Vec::with_capacity(logits.len() / experts * chosen);
    let mut order: Vec<usize> = Vec::with_capacity(experts);
    let mut weights = vec![0.0; experts];
    for (row, logits) in logits.chunks_exact(experts).enumerate() {
        let larger = |&a: &usize, &b: &usize| logits[b].total_cmp(&logits[a]).then(a.cmp(&b));
        order.clear();
        order.extend(0..experts);
        order.select_nth_unstable_by(chosen - 1, larger);
        order.truncate(chosen);
        order.sort_unstable_by(larger);
        let kernel = ExpFrom {
            x: logits,
            largest: logits[order[0]],
            out: &mut weights,
        };
        dispatch(cpu.isa(), kernel);
        let sum: f32 = if normalised {
            order.iter().map(|&expert| weights[expert]).sum()
        } else {
            weights.iter().sum()
        };
        choices.extend(order.iter().map(|&expert| Choice {
            expert,
            row,
            weight: weights[expert] / sum,
        }));
    }
    choices.sort_unstable_by_key(|choice| (choice.expert, choice.row));
    choices
}

/// Adds rows to others, each times its weight: `to = fma(weight, from, to)`.
///
/// `from` has one row of `width` values for each of `to`, which names a row of `out` and a weight.
///
/// # Panics
/// If the lengths do not fit or a row is beyond `out`.
pub fn add_weighted(
    cpu: &Cpu,
    out: &mut [f32],
    width: usize,
    from: &[f32],
    to: impl ExactSizeIterator<Item = (usize, f32)>,
) {
    assert_eq!(from.len(), to.len() * width, "a row for each sum");
    for (from, (row, weight)) in from.chunks_exact(width).zip(to) {
        let out = &mut out[row * width..][..width];
        dispatch(cpu.isa(), AddWeighted { out, from, weight });
    }
}

/// 1 / (1 + e^-x), in place.
pub fn sigmoid(cpu: &Cpu, x: &mut [f32]) {
    dispatch(cpu.isa(), Sigmoid { x });
}

struct ExpFrom<'a> {
    x: &'a [f32],
    largest: f32,
    out: &'a mut [f32],
}

impl Kernel for ExpFrom<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let largest = s.splat(self.largest);
        for (x, out) in self.x.chunks(LANES).zip(self.out.chunks_mut(LANES)) {
            s.store_slice(s.exp(s.sub(s.load_slice(x), largest)), out);
        }
    }
}

struct AddWeighted<'a> {
    out: &'a mut [f32],
    from: &'a [f32],
    weight: f32,
}

impl Kernel for AddWeighted<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let weight = s.splat(self.weight);
        for (out, from) in self.out.chunks_mut(LANES).zip(self.from.chunks(LANES)) {
            let sum = s.mul_add(weight, s.load_slice(from), s.load_slice(out));
            s.store_slice(sum, out);
        }
    }
}

struct Sigmoid<'a> {
    x: &'a mut [f32],
}

impl Kernel for Sigmoid<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for x in self.x.chunks_mut(LANES) {
            s.store_slice(s.sigmoid(s.load_slice(x)), x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, values};
    use proptest::prelude::*;

    #[test]
    fn equal_logits_go_to_the_lower_index() {
        let logits = [1.0, 3.0, 0.5, 3.0, 3.0, -1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0];
        for cpu in cpus() {
            let all = route(&cpu, &logits, 6, 2, true);
            let found: Vec<_> = all.iter().map(|c| (c.expert, c.row, c.weight)).collect();
            assert_eq!(found, [(0, 1, 0.5), (1, 0, 0.5), (1, 1, 0.5), (3, 0, 0.5)]);
        }
    }

    #[test]
    fn what_is_no_number_is_routed_all_the_same() {
        let cpu = Cpu::new(Some(1));
        let all = route(&cpu, &[f32::NAN, 1.0, f32::NAN], 3, 2, true);
        assert_eq!(all.iter().map(|c| c.expert).collect::<Vec<_>>(), [0, 2]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn choices_match_and_do_not_depend_on_rows(
            rows in 1usize..20, experts in 1usize..70, chosen in 1usize..70, normalised: bool,
            seed: u64,
        ) {
            let chosen = chosen.min(experts);
            let logits = values(seed, rows * experts, 4.0);
            let mut first = None;
            for cpu in cpus() {
                let all = route(&cpu, &logits, experts, chosen, normalised);
                prop_assert!(all.is_sorted_by_key(|c| (c.expert, c.row)));
                for (row, logits) in logits.chunks(experts).enumerate() {
                    let mine: Vec<Choice> =
                        all.iter().copied().filter(|c| c.row == row).collect();
                    let alone = route(&cpu, logits, experts, chosen, normalised);
                    prop_assert_eq!(alone.len(), chosen);
                    for (alone, mine) in alone.iter().zip(&mine) {
                        prop_assert_eq!(alone.expert, mine.expert);
                        prop_assert_eq!(alone.weight.to_bits(), mine.weight.to_bits());
                    }
                    let taken = |e: usize| mine.iter().any(|c| c.expert == e);
                    let least = mine.iter().map(|c| logits[c.expert]).fold(f32::MAX, f32::min);
                    prop_assert!((0..experts).all(|e| taken(e) || logits[e] <= least));
                    let exp = |e: usize| f64::from(logits[e]).exp();
                    let sum: f64 =
                        (0..experts).filter(|&e| !normalised || taken(e)).map(exp).sum();
                    for choice in &mine {
                        let exact = exp(choice.expert) / sum;
                        prop_assert!((f64::from(choice.weight) - exact).abs() < 1e-6);
                    }
                }
                prop_assert_eq!(first.get_or_insert_with(|| all.clone()), &all);
            }
        }

        #[test]
        fn weighted_sums_are_fused(width in 1usize..70, weight in -2.0f32..2.0, seed: u64) {
            let (out, from) = (values(seed, 3 * width, 2.0), values(seed ^ 1, 2 * width, 2.0));
            for cpu in cpus() {
                let mut sum = out.clone();
                let to = [(2, weight), (0, 0.5)];
                add_weighted(&cpu, &mut sum, width, &from, to.into_iter());
                for i in 0..width {
                    prop_assert_eq!(sum[i], 0.5f32.mul_add(from[width + i], out[i]));
                    prop_assert_eq!(sum[width + i], out[width + i]);
                    let last = 2 * width + i;
                    prop_assert_eq!(sum[last], weight.mul_add(from[i], out[last]));
                }
                let mut gates = out.clone();
                sigmoid(&cpu, &mut gates);
                for (gate, x) in gates.iter().zip(&out) {
                    prop_assert!((f64::from(*gate) - 1.0 / (1.0 + f64::from(-x).exp())).abs() < 1e-6);
                }
            }
        }
    }
}
