//! Decays and rates of Gated DeltaNet.

use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::rows::Heads;

/// Decays and rates of a layer: `alpha = exp(-exp(a_log) * softplus(a + dt_bias))` and
/// `beta = sigmoid(b)`.
///
/// `a` and `b` hold m rows of `value_heads` values where their `Heads` say (one "head" each);
/// `a_log` and `dt_bias` have `value_heads` values; `alpha` and `beta` are m rows of them.
///
/// # Panics
/// If the lengths do not fit.
pub fn delta_gates(
    cpu: &Cpu,
    (a, a_at): (&[f32], Heads),
    (b, b_at): (&[f32], Heads),
    a_log: &[f32],
    dt_bias: &[f32],
    alpha: &mut [f32],
    beta: &mut [f32],
) {
    let heads = a_log.len();
    let rows = a_at.rows(a.len());
    assert_eq!(b_at.rows(b.len()), rows, "rows of a and b");
    assert_eq!((a_at.count, a_at.dim), (1, heads), "width of a");
    assert_eq!((b_at.count, b_at.dim), (1, heads), "width of b");
    assert_eq!(dt_bias.len(), heads, "width of dt_bias");
    assert_eq!((alpha.len(), beta.len()), (rows * heads, rows * heads));
    for row in 0..rows {
        dispatch(
            cpu.isa(),
            Gates {
                a: &a[a_at.range(row, 0)],
                b: &b[b_at.range(row, 0)],
                a_log,
                dt_bias,
                alpha: &mut alpha[row * heads..][..heads],
                beta: &mut beta[row * heads..][..heads],
            },
        );
    }
}

struct Gates<'a> {
    a: &'a [f32],
    b: &'a [f32],
    a_log: &'a [f32],
    dt_bias: &'a [f32],
    alpha: &'a mut [f32],
    beta: &'a mut [f32],
}

impl Kernel for Gates<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for from in (0..self.a.len()).step_by(LANES) {
            let range = from..self.a.len().min(from + LANES);
            let load = |x: &[f32]| s.load_slice(&x[range.clone()]);
            let rate = s.exp(load(self.a_log));
            let softplus = s.softplus(s.add(load(self.a), load(self.dt_bias)));
            let alpha = s.exp(s.mul(s.sub(s.zero(), rate), softplus));
            let beta = s.sigmoid(load(self.b));
            s.store_slice(alpha, &mut self.alpha[range.clone()]);
            s.store_slice(beta, &mut self.beta[range]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, cpus, heads_in, values};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn gates_match_their_definition(m in 1usize..6, heads in 1usize..50, seed: u64) {
            let (a_at, b_at) = (heads_in(seed, 1, heads), heads_in(seed ^ 1, 1, heads));
            let a = values(seed ^ 2, m * a_at.row, 8.0);
            let b = values(seed ^ 3, m * b_at.row, 8.0);
            let (a_log, dt_bias) = (values(seed ^ 4, heads, 3.0), values(seed ^ 5, heads, 4.0));
            let (mut expected_alpha, mut expected_beta) = (vec![], vec![]);
            for row in 0..m {
                for head in 0..heads {
                    let x = a[a_at.range(row, 0)][head] as f64 + dt_bias[head] as f64;
                    let softplus = x.exp().ln_1p();
                    expected_alpha.push((-(a_log[head] as f64).exp() * softplus).exp());
                    expected_beta.push(1.0 / (1.0 + (-b[b_at.range(row, 0)][head] as f64).exp()));
                }
            }
            let mut first = None;
            for cpu in cpus() {
                let (mut alpha, mut beta) = (vec![0.0; m * heads], vec![0.0; m * heads]);
                delta_gates(&cpu, (&a, a_at), (&b, b_at), &a_log, &dt_bias, &mut alpha, &mut beta);
                assert_close(&alpha, &expected_alpha, 1e-6);
                assert_close(&beta, &expected_beta, 1e-6);
                let got = (alpha, beta);
                prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
            }
        }
    }
}
