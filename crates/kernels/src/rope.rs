//! Rotary position embedding, rotate-half form (Su et al., arXiv 2104.09864).

use std::sync::OnceLock;

use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::rows::{Heads, Shared, for_rows};

/// Positions of a page of the table.
const PAGE: usize = 256;

/// Rotations by position. Angles and their sines are computed in f64 and kept in pages that are
/// made when first used, so the table costs nothing for a context that is never reached.
pub struct Rope {
    /// Angle of every pair at position 1.
    frequencies: Vec<f64>,
    /// One page holds, for each position, [cos of all pairs | sin of all pairs].
    pages: Vec<OnceLock<Vec<f32>>>,
}

impl Rope {
    /// `frequencies` are the inverse frequencies of the `rotary_dim / 2` pairs (value i is paired
    /// with value i + rotary_dim / 2); the table serves positions `0..max_position`.
    pub fn new(frequencies: Vec<f64>, max_position: usize) -> Self {
        let pages = max_position.div_ceil(PAGE);
        Self {
            frequencies,
            pages: (0..pages).map(|_| OnceLock::new()).collect(),
        }
    }

    /// How many values at the start of a head are rotated.
    pub fn rotary_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// One more than the last position that can be asked for.
    pub fn positions(&self) -> usize {
        self.pages.len() * PAGE
    }

    /// Rotates the first `rotary_dim` values of every head of every row, in place.
    ///
    /// `positions` has one value a row, each below [`Rope::positions`].
    ///
    /// # Panics
    /// If the lengths do not fit, or a position is out of range.
    pub fn apply(&self, cpu: &Cpu, x: &mut [f32], heads: Heads, positions: &[u32]) {
        let rows = heads.rows(x.len());
        assert_eq!(rows, positions.len(), "one position for each row");
        assert!(
            self.rotary_dim() <= heads.dim,
            "more values to rotate than a head has"
        );
        let x = Shared::new(x);
        let work = 4 * heads.count * self.rotary_dim();
        for_rows(cpu, rows, work, &|range| {
            for row in range {
                let angles = self.angles(positions[row] as usize);
                let (cos, sin) = angles.split_at(self.frequencies.len());
                for head in 0..heads.count {
                    // SAFETY: heads of distinct rows or numbers are disjoint (`Heads::rows`
                    // checked the pitch), and each is visited once.
                    let head = unsafe { x.part(heads.range(row, head)) };
                    let (a, rest) = head.split_at_mut(cos.len());
                    let b = &mut rest[..cos.len()];
                    dispatch(cpu.isa(), Rotate { a, b, cos, sin });
                }
            }
        });
    }

    /// [cos | sin] of every pair at a position.
    fn angles(&self, position: usize) -> &[f32] {
        let width = self.rotary_dim();
        let page = self.pages[position / PAGE].get_or_init(|| {
            let first = position / PAGE * PAGE;
            let mut table = vec![0.0; PAGE * width];
            for (i, row) in table.chunks_exact_mut(width.max(1)).enumerate() {
                for (pair, frequency) in self.frequencies.iter().enumerate() {
                    let (sin, cos) = sin_cos((first + i) as f64 * frequency);
                    row[pair] = cos as f32;
                    row[self.frequencies.len() + pair] = sin as f32;
                }
            }
            table
        });
        &page[position % PAGE * width..][..width]
    }
}

/// Sine and cosine of an angle up to some millions, to about 1e-15, by the same operations on
/// every machine (a system's own functions differ in the last bit).
///
/// angle = n pi/2 + r with |r| <= pi/4, pi/2 in three parts (Cody and Waite); Taylor polynomials.
fn sin_cos(angle: f64) -> (f64, f64) {
    const PARTS: [f64; 3] = [
        1.570_796_326_734_125_6,
        6.077_100_506_303_966e-11,
        2.022_266_248_795_950_6e-21,
    ];
    let n = (angle * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = PARTS.iter().fold(angle, |r, part| n.mul_add(-part, r));
    let r2 = r * r;
    // Coefficients 1 / (k (k - 1)) nest into factorials: the last term left out is r^19 / 19!.
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in [16.0, 14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0f64] {
        sin = (sin * r2).mul_add(-1.0 / ((k + 1.0) * k), 1.0);
        cos = (cos * r2).mul_add(-1.0 / (k * (k - 1.0)), 1.0);
    }
    sin *= r;
    match n.rem_euclid(4.0) as u8 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

/// (a, b) = (a cos - b sin, b cos + a sin), each as one multiply and one fused multiply-add.
struct Rotate<'a> {
    a: &'a mut [f32],
    b: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let angles = self.cos.chunks(LANES).zip(self.sin.chunks(LANES));
        let pairs = self.a.chunks_mut(LANES).zip(self.b.chunks_mut(LANES));
        for ((a, b), (cos, sin)) in pairs.zip(angles) {
            let (x, y) = (s.load_slice(a), s.load_slice(b));
            let (cos, sin) = (s.load_slice(cos), s.load_slice(sin));
            let minus_y = s.sub(s.zero(), y);
            s.store_slice(s.mul_add(x, cos, s.mul(minus_y, sin)), a);
            s.store_slice(s.mul_add(y, cos, s.mul(x, sin)), b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, cpus, heads_in, values};
    use proptest::prelude::*;

    fn frequencies(pairs: usize, theta: f64) -> Vec<f64> {
        (0..pairs)
            .map(|i| theta.powf(-(i as f64) / pairs as f64))
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn rotation_matches_its_definition(
            m in 1usize..12, count in 1usize..4, pairs in 1usize..40, rest in 0usize..40, seed: u64,
            start in 0u32..262_000,
        ) {
            let at = heads_in(seed, count, 2 * pairs + rest);
            let x = values(seed, m * at.row, 2.0);
            let positions: Vec<u32> = (0..m as u32).map(|i| start + i * 7).collect();
            let frequencies = frequencies(pairs, 1e7);
            let mut expected: Vec<f64> = x.iter().map(|&v| v as f64).collect();
            for (row, &position) in positions.iter().enumerate() {
                for head in 0..count {
                    let base = at.range(row, head).start;
                    for (i, f) in frequencies.iter().enumerate() {
                        let (sin, cos) = (position as f64 * f).sin_cos();
                        let (a, b) = (x[base + i] as f64, x[base + pairs + i] as f64);
                        expected[base + i] = a * cos - b * sin;
                        expected[base + pairs + i] = b * cos + a * sin;
                    }
                }
            }
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                let rope = Rope::new(frequencies.clone(), 262_144);
                let mut got = x.clone();
                rope.apply(&cpu, &mut got, at, &positions);
                assert_close(&got, &expected, 1e-6);
                prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
            }
        }

        #[test]
        fn sines_are_accurate(angle in 0.0f64..1e6) {
            let (sin, cos) = sin_cos(angle);
            prop_assert!((sin - angle.sin()).abs() < 1e-14);
            prop_assert!((cos - angle.cos()).abs() < 1e-14);
        }
    }

    #[test]
    fn position_zero_changes_nothing() {
        let cpu = Cpu::new(Some(1));
        let x = values(1, 64, 1.0);
        let mut got = x.clone();
        Rope::new(frequencies(16, 1e4), 10).apply(&cpu, &mut got, Heads::packed(2, 32), &[0]);
        assert_eq!(got, x);
    }
}
