//! Normalisation of rows and heads. Sums of squares are taken in sixteen lanes (value i in lane
//! i mod 16, in order) and reduced by a fixed tree.

use crate::activation::Add;
use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::rows::{Heads, Shared, for_rows};

/// RMSNorm of every row: `out = x / sqrt(mean(x^2) + eps) * weight`.
///
/// `x` and `out` are rows of `weight.len()` values. Checkpoints whose norms multiply by
/// (1 + weight) add the one when they are loaded.
///
/// # Panics
/// If the lengths do not fit.
pub fn rms_norm(cpu: &Cpu, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert_eq!(x.len(), out.len(), "input and output differ in length");
    let rows = Heads::packed(1, width).rows(x.len());
    let out = Shared::new(out);
    for_rows(cpu, rows, 2 * width, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.part(range.start * width..range.end * width) };
        let x = &x[range.start * width..range.end * width];
        dispatch(
            cpu.isa(),
            RmsNorm {
                x,
                weight,
                eps,
                out,
            },
        );
    });
}

/// What a layer adds, and the norm before the next: `x = x + y`, then [`rms_norm`] of x.
///
/// # Panics
/// If the lengths do not fit.
pub fn add_rms_norm(
    cpu: &Cpu,
    x: &mut [f32],
    y: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let width = weight.len();
    assert_eq!(x.len(), y.len(), "sum of slices that differ in length");
    assert_eq!(x.len(), out.len(), "input and output differ in length");
    let rows = Heads::packed(1, width).rows(x.len());
    let (x, out) = (Shared::new(x), Shared::new(out));
    for_rows(cpu, rows, 3 * width, &|range| {
        let range = range.start * width..range.end * width;
        // SAFETY: ranges of rows are disjoint.
        let (x, out) = unsafe { (x.part(range.clone()), out.part(range.clone())) };
        let y = &y[range];
        dispatch(cpu.isa(), Add { x, y });
        dispatch(
            cpu.isa(),
            RmsNorm {
                x,
                weight,
                eps,
                out,
            },
        );
    });
}

/// RMSNorm of every head, in place, with one weight of `heads.dim` values for all heads.
///
/// # Panics
/// If the lengths do not fit.
pub fn rms_norm_heads(cpu: &Cpu, x: &mut [f32], heads: Heads, weight: &[f32], eps: f32) {
    assert_eq!(weight.len(), heads.dim, "weight and head differ in width");
    over_heads(cpu, x, heads, None, &|head, _| {
        dispatch(cpu.isa(), RmsNormHead { head, weight, eps });
    });
}

/// The normalisation at the end of Gated DeltaNet, in place:
/// `x = x / sqrt(mean(x^2) + eps) * weight * silu(gate)` for every head.
///
/// `gate` holds as many rows and heads as `x`, where `gate_heads` says.
///
/// # Panics
/// If the lengths do not fit.
pub fn gated_norm(
    cpu: &Cpu,
    x: &mut [f32],
    heads: Heads,
    gate: &[f32],
    gate_heads: Heads,
    weight: &[f32],
    eps: f32,
) {
    assert_eq!(weight.len(), heads.dim, "weight and head differ in width");
    over_heads(cpu, x, heads, Some((gate, gate_heads)), &|head, gate| {
        dispatch(
            cpu.isa(),
            GatedNorm {
                head,
                gate,
                weight,
                eps,
            },
        );
    });
}

/// Scales every head, in place, to length `scale`: `x = x * (scale / sqrt(sum(x^2) + eps))`.
///
/// # Panics
/// If the lengths do not fit.
pub fn l2_norm_heads(cpu: &Cpu, x: &mut [f32], heads: Heads, eps: f32, scale: f32) {
    over_heads(cpu, x, heads, None, &|head, _| {
        dispatch(cpu.isa(), L2Norm { head, eps, scale });
    });
}

/// Calls `f` with every head of `x` and the head of the gate beside it.
pub(crate) fn over_heads(
    cpu: &Cpu,
    x: &mut [f32],
    heads: Heads,
    gate: Option<(&[f32], Heads)>,
    f: &(dyn Fn(&mut [f32], &[f32]) + Sync),
) {
    let rows = heads.rows(x.len());
    if let Some((gate, at)) = gate {
        assert_eq!(at.rows(gate.len()), rows, "rows of the gate");
        assert_eq!((at.count, at.dim), (heads.count, heads.dim), "gate's heads");
    }
    let x = Shared::new(x);
    for_rows(cpu, rows, 4 * heads.count * heads.dim, &|range| {
        for row in range {
            for head in 0..heads.count {
                // SAFETY: heads of distinct rows or numbers are disjoint (`Heads::rows` checked
                // the pitch), and each is visited once.
                let x = unsafe { x.part(heads.range(row, head)) };
                let gate = gate.map_or(&[][..], |(gate, at)| &gate[at.range(row, head)]);
                f(x, gate);
            }
        }
    });
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn inverse_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (s.dot(x, x) / x.len() as f32 + eps).sqrt()
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        let rows = self.x.chunks_exact(width);
        for (x, out) in rows.zip(self.out.chunks_exact_mut(width)) {
            let r = s.splat(inverse_rms(s, x, self.eps));
            let parts = x.chunks(LANES).zip(self.weight.chunks(LANES));
            for ((x, w), out) in parts.zip(out.chunks_mut(LANES)) {
                let x = s.mul(s.load_slice(x), r);
                s.store_slice(s.mul(x, s.load_slice(w)), out);
            }
        }
    }
}

struct RmsNormHead<'a> {
    head: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for RmsNormHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let r = s.splat(inverse_rms(s, self.head, self.eps));
        for (x, w) in self.head.chunks_mut(LANES).zip(self.weight.chunks(LANES)) {
            let y = s.mul(s.load_slice(x), r);
            s.store_slice(s.mul(y, s.load_slice(w)), x);
        }
    }
}

struct GatedNorm<'a> {
    head: &'a mut [f32],
    gate: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for GatedNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let r = s.splat(inverse_rms(s, self.head, self.eps));
        let parts = self.gate.chunks(LANES).zip(self.weight.chunks(LANES));
        for (x, (gate, w)) in self.head.chunks_mut(LANES).zip(parts) {
            let y = s.mul(s.mul(s.load_slice(x), r), s.load_slice(w));
            s.store_slice(s.mul(y, s.silu(s.load_slice(gate))), x);
        }
    }
}

struct L2Norm<'a> {
    head: &'a mut [f32],
    eps: f32,
    scale: f32,
}

impl Kernel for L2Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let r = s.splat(self.scale / (s.dot(self.head, self.head) + self.eps).sqrt());
        for x in self.head.chunks_mut(LANES) {
            s.store_slice(s.mul(s.load_slice(x), r), x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::add_assign;
    use crate::testing::{assert_close, cpus, heads_in, values};
    use proptest::prelude::*;

    fn norm(x: &[f32], eps: f64) -> Vec<f64> {
        let mean = x.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / x.len() as f64;
        x.iter().map(|&v| v as f64 / (mean + eps).sqrt()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn rms_norm_matches_its_definition(m in 1usize..40, width in 1usize..200, seed: u64) {
            let x = values(seed, m * width, 3.0);
            let weight = values(seed ^ 1, width, 1.5);
            let expected: Vec<f64> = x.chunks(width)
                .flat_map(|x| norm(x, 1e-6).into_iter().zip(&weight).map(|(x, w)| x * *w as f64).collect::<Vec<_>>())
                .collect();
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                let mut out = vec![0.0; m * width];
                rms_norm(&cpu, &x, &weight, 1e-6, &mut out);
                assert_close(&out, &expected, 1e-5);
                // One row at a time, and in place by heads, gives the same bits.
                for (row, out) in x.chunks(width).zip(out.chunks(width)) {
                    let mut one = vec![0.0; width];
                    rms_norm(&cpu, row, &weight, 1e-6, &mut one);
                    prop_assert_eq!(&one, out);
                }
                let y = values(seed ^ 2, m * width, 2.0);
                let (mut sum, mut fused) = (x.clone(), x.clone());
                add_assign(&cpu, &mut sum, &y);
                let (mut apart, mut together) = (vec![0.0; m * width], vec![0.0; m * width]);
                rms_norm(&cpu, &sum, &weight, 1e-6, &mut apart);
                add_rms_norm(&cpu, &mut fused, &y, &weight, 1e-6, &mut together);
                prop_assert_eq!((&fused, &together), (&sum, &apart));
                let mut in_place = x.clone();
                rms_norm_heads(&cpu, &mut in_place, Heads::packed(1, width), &weight, 1e-6);
                prop_assert_eq!(&in_place, &out);
                prop_assert_eq!(first.get_or_insert_with(|| out.clone()), &out);
            }
        }

        #[test]
        fn head_norms_match_and_touch_nothing_else(
            m in 1usize..20, count in 1usize..5, dim in 1usize..80, seed: u64,
        ) {
            let at = heads_in(seed, count, dim);
            let gate_at = heads_in(seed ^ 9, count, dim);
            let x = values(seed, m * at.row, 2.0);
            let gate = values(seed ^ 2, m * gate_at.row, 4.0);
            let weight = values(seed ^ 1, dim, 1.5);
            let mut first: Option<[Vec<f32>; 3]> = None;
            for cpu in cpus() {
                let mut got = [x.clone(), x.clone(), x.clone()];
                rms_norm_heads(&cpu, &mut got[0], at, &weight, 1e-5);
                gated_norm(&cpu, &mut got[1], at, &gate, gate_at, &weight, 1e-5);
                l2_norm_heads(&cpu, &mut got[2], at, 1e-6, 0.25);
                let mut expected = [x.clone(), x.clone(), x.clone()].map(|x| x.iter().map(|&v| v as f64).collect::<Vec<_>>());
                for row in 0..m {
                    for head in 0..count {
                        let range = at.range(row, head);
                        let plain = norm(&x[range.clone()], 1e-5);
                        let length = x[range.clone()].iter().map(|&v| (v as f64).powi(2)).sum::<f64>() + 1e-6;
                        for (i, (n, g)) in plain.iter().zip(&gate[gate_at.range(row, head)]).enumerate() {
                            let g = *g as f64;
                            expected[0][range.start + i] = n * weight[i] as f64;
                            expected[1][range.start + i] = n * weight[i] as f64 * g / (1.0 + (-g).exp());
                            expected[2][range.start + i] = x[range.start + i] as f64 / length.sqrt() * 0.25;
                        }
                    }
                }
                for (got, expected) in got.iter().zip(&expected) {
                    assert_close(got, expected, 1e-5);
                }
                prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
            }
        }
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let cpu = Cpu::new(Some(1));
        let mut out = vec![1.0; 32];
        rms_norm(&cpu, &[0.0; 32], &[1.0; 32], 1e-6, &mut out);
        assert_eq!(out, [0.0; 32]);
        l2_norm_heads(&cpu, &mut out, Heads::packed(2, 16), 1e-6, 1.0);
        assert_eq!(out, [0.0; 32]);
    }
}
