//! Element-wise functions of the MLP and of output gates.

use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::norm::over_heads;
use crate::rows::{Heads, Shared, for_rows};

/// SwiGLU: rows of [gate | up] to rows of `silu(gate) * up`.
///
/// `gate_up` is m rows of 2 `width` values, `out` m rows of `width`.
///
/// # Panics
/// If the lengths do not fit.
pub fn silu_mul(cpu: &Cpu, gate_up: &[f32], width: usize, out: &mut [f32]) {
    gate_mul::<false>(cpu, gate_up, width, out);
}

/// GeGLU, as [`silu_mul`] with the tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415).
///
/// # Panics
/// If the lengths do not fit.
pub fn gelu_mul(cpu: &Cpu, gate_up: &[f32], width: usize, out: &mut [f32]) {
    gate_mul::<true>(cpu, gate_up, width, out);
}

fn gate_mul<const GELU: bool>(cpu: &Cpu, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(
        gate_up.len(),
        2 * out.len(),
        "gate and up beside the output"
    );
    let rows = Heads::packed(1, width).rows(out.len());
    let out = Shared::new(out);
    for_rows(cpu, rows, 16 * width, &|range| {
        for row in range {
            // SAFETY: rows are disjoint.
            let out = unsafe { out.part(row * width..(row + 1) * width) };
            let (gate, up) = gate_up[2 * row * width..2 * (row + 1) * width].split_at(width);
            dispatch(cpu.isa(), GateMul::<GELU> { gate, up, out });
        }
    });
}

/// Gated attention output, in place: `x = x * sigmoid(gate)` for every head.
///
/// `gate` holds as many rows and heads as `x`, where `gate_heads` says.
///
/// # Panics
/// If the lengths do not fit.
pub fn sigmoid_mul(cpu: &Cpu, x: &mut [f32], heads: Heads, gate: &[f32], gate_heads: Heads) {
    over_heads(cpu, x, heads, Some((gate, gate_heads)), &|x, gate| {
        dispatch(cpu.isa(), SigmoidMul { x, gate });
    });
}

/// `x = x + y`, element by element.
///
/// # Panics
/// If the lengths differ.
pub fn add_assign(cpu: &Cpu, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "sum of slices that differ in length");
    const PART: usize = 1024;
    let len = x.len();
    let x = Shared::new(x);
    for_rows(cpu, len.div_ceil(PART), PART, &|range| {
        let range = range.start * PART..(range.end * PART).min(len);
        // SAFETY: ranges of parts are disjoint.
        let x = unsafe { x.part(range.clone()) };
        let y = &y[range];
        dispatch(cpu.isa(), Add { x, y });
    });
}

struct GateMul<'a, const GELU: bool> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl<const GELU: bool> Kernel for GateMul<'_, GELU> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let parts = self.gate.chunks(LANES).zip(self.up.chunks(LANES));
        for ((gate, up), out) in parts.zip(self.out.chunks_mut(LANES)) {
            let gate = s.load_slice(gate);
            let gate = if GELU { s.gelu(gate) } else { s.silu(gate) };
            s.store_slice(s.mul(gate, s.load_slice(up)), out);
        }
    }
}

struct SigmoidMul<'a> {
    x: &'a mut [f32],
    gate: &'a [f32],
}

impl Kernel for SigmoidMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, gate) in self.x.chunks_mut(LANES).zip(self.gate.chunks(LANES)) {
            let gate = s.sigmoid(s.load_slice(gate));
            s.store_slice(s.mul(s.load_slice(x), gate), x);
        }
    }
}

/// x + y to x.
pub(crate) struct Add<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, y) in self.x.chunks_mut(LANES).zip(self.y.chunks(LANES)) {
            s.store_slice(s.add(s.load_slice(x), s.load_slice(y)), x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, cpus, heads_in, values};
    use proptest::prelude::*;

    fn sigmoid(x: f32) -> f64 {
        1.0 / (1.0 + (-x as f64).exp())
    }

    fn gelu(x: f64) -> f64 {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        0.5 * x * (1.0 + u.tanh())
    }

    #[test]
    fn gelu_holds_at_the_ends() {
        for cpu in cpus() {
            let mut out = [1.0; 3];
            gelu_mul(&cpu, &[-60.0, 0.0, 60.0, 1.0, 1.0, 1.0], 3, &mut out);
            assert!(out[0].abs() < 1e-30 && out[1] == 0.0, "{out:?}");
            assert_eq!(out[2], 60.0);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn gates_of_mlps_match_for_any_rows(
            m in 1usize..30, width in 1usize..300, is_gelu: bool, seed: u64,
        ) {
            let x = values(seed, 2 * m * width, 6.0);
            let gated = if is_gelu { gelu_mul } else { silu_mul };
            let gate = |x: f32| match is_gelu {
                true => gelu(x.into()),
                false => x as f64 * sigmoid(x),
            };
            let expected: Vec<f64> = x.chunks(2 * width)
                .flat_map(|x| (0..width).map(|i| gate(x[i]) * x[width + i] as f64))
                .collect();
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                let mut out = vec![0.0; m * width];
                gated(&cpu, &x, width, &mut out);
                assert_close(&out, &expected, 1e-6);
                for (x, out) in x.chunks(2 * width).zip(out.chunks(width)) {
                    let mut one = vec![0.0; width];
                    gated(&cpu, x, width, &mut one);
                    prop_assert_eq!(&one, out);
                }
                prop_assert_eq!(first.get_or_insert_with(|| out.clone()), &out);
            }
        }

        #[test]
        fn gates_and_sums_match(m in 1usize..20, count in 1usize..5, dim in 1usize..80, seed: u64) {
            let (at, gate_at) = (heads_in(seed, count, dim), heads_in(seed ^ 5, count, dim));
            let x = values(seed, m * at.row, 2.0);
            let y = values(seed ^ 3, x.len(), 2.0);
            let gate = values(seed ^ 2, m * gate_at.row, 6.0);
            let mut expected: Vec<f64> = x.iter().map(|&v| v as f64).collect();
            for row in 0..m {
                for head in 0..count {
                    for (i, g) in at.range(row, head).zip(gate_at.range(row, head)) {
                        expected[i] *= sigmoid(gate[g]);
                    }
                }
            }
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                let mut got = x.clone();
                sigmoid_mul(&cpu, &mut got, at, &gate, gate_at);
                assert_close(&got, &expected, 1e-6);
                prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
                let mut sum = x.clone();
                add_assign(&cpu, &mut sum, &y);
                for ((s, x), y) in sum.iter().zip(&x).zip(&y) {
                    prop_assert_eq!(*s, x + y);
                }
            }
        }
    }
}
