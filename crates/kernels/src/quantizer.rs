//! From f32 rows to codes, scales and zeros.
//!
//! For each output and group, ranges from the full one down to a clipped one are tried, each with
//! its scale rounded to f16 before the weights are, and the one of least squared error is kept.

use half::f16;

use crate::bytes::AlignedBytes;
use crate::cpu::Cpu;
use crate::error::Error;
use crate::hadamard::Rotation;
use crate::packed::{PackedMatrix, PackedSpec, ZeroKind, Zeros, pack};

/// Parts of the full range that are tried: 1, 1 - STEP, .. for 4 bits. The error of 8-bit codes is
/// so small that clipping hardly ever pays.
const TRIES_4: usize = 14;
const TRIES_8: usize = 3;
const STEP_4: f32 = 0.025;
const STEP_8: f32 = 0.01;

/// How to quantise: bits, group and zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantizer {
    bits: u8,
    group: usize,
    zero: ZeroKind,
}

/// What quantising lost, as sums so that slices and tensors can be added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QuantError {
    /// Sum of the squared differences.
    pub squared_error: f64,
    /// Sum of the squared weights.
    pub squared_norm: f64,
}

impl QuantError {
    /// Root of the mean squared error, relative to that of the weights; 0 for all-zero weights.
    pub fn relative_rms(&self) -> f64 {
        if self.squared_norm == 0.0 {
            0.0
        } else {
            (self.squared_error / self.squared_norm).sqrt()
        }
    }
}

impl std::ops::AddAssign for QuantError {
    fn add_assign(&mut self, other: Self) {
        self.squared_error += other.squared_error;
        self.squared_norm += other.squared_norm;
    }
}

/// Rows as codes (row-major n x k), scales and zero points (row-major n x groups).
#[derive(Clone, Debug)]
pub struct Quantized {
    spec: PackedSpec,
    /// One code a byte.
    pub codes: Vec<u8>,
    /// A scale for each row and group.
    pub scales: Vec<f16>,
    /// A zero point for each row and group.
    pub zeros: Vec<u8>,
    /// What was lost.
    pub error: QuantError,
}

impl Quantized {
    /// Shape and format of these rows.
    pub fn spec(&self) -> &PackedSpec {
        &self.spec
    }

    /// The rows in kernel order, see [`pack`].
    ///
    /// # Errors
    /// If the public fields were given other lengths.
    pub fn pack(&self) -> Result<AlignedBytes, Error> {
        let zeros = match self.spec.zero {
            ZeroKind::Symmetric => Zeros::Symmetric,
            _ => Zeros::Point(&self.zeros),
        };
        pack(&self.spec, &self.codes, &self.scales, zeros)
    }
}

impl Quantizer {
    /// Codes of 4 bits with a zero point for each group: size M.
    ///
    /// # Errors
    /// If the group is not 32, 64 or 128.
    pub fn int4(group: usize) -> Result<Self, Error> {
        Self::new(4, group, ZeroKind::Point)
    }

    /// Codes of 8 bits around 128: size L.
    ///
    /// # Errors
    /// If the group is not 32, 64 or 128.
    pub fn int8(group: usize) -> Result<Self, Error> {
        Self::new(8, group, ZeroKind::Symmetric)
    }

    fn new(bits: u8, group: usize, zero: ZeroKind) -> Result<Self, Error> {
        let quantizer = Self { bits, group, zero };
        quantizer.spec(1, 1).check()?;
        Ok(quantizer)
    }

    /// Shape and format of an n x k matrix quantised so.
    pub fn spec(&self, n: usize, k: usize) -> PackedSpec {
        PackedSpec {
            n,
            k,
            bits: self.bits,
            group: self.group,
            zero: self.zero,
        }
    }

    /// Quantises rows of length `k`, rotated first if a rotation is given. A converter may come
    /// with a few rows at a time; each row's codes depend on that row only.
    ///
    /// # Errors
    /// If `rows` is not a whole number of rows, the rotation has another width, or a weight is not
    /// finite or beyond what an f16 scale can reach.
    pub fn quantize(
        &self,
        cpu: &Cpu,
        rows: &[f32],
        k: usize,
        rotation: Option<&Rotation>,
    ) -> Result<Quantized, Error> {
        if k == 0 || rows.is_empty() || !rows.len().is_multiple_of(k) {
            return Err(Error::new(format!(
                "{} weights are no rows of {k}",
                rows.len()
            )));
        }
        if let Some(rotation) = rotation
            && rotation.k() != k
        {
            return Err(Error::new(format!(
                "a rotation of width {} does not fit rows of {k}",
                rotation.k()
            )));
        }
        if let Some(i) = rows.iter().position(|w| !w.is_finite()) {
            return Err(Error::new(format!(
                "weight {} of row {} is {}, only finite weights can be quantised",
                i % k,
                i / k,
                rows[i]
            )));
        }
        let n = rows.len() / k;
        let spec = self.spec(n, k);
        spec.check()?;
        let groups = spec.groups();
        let mut codes = vec![0; n * k];
        let mut scales = vec![f16::ZERO; n * groups];
        let mut zeros = vec![0; n * groups];
        let mut errors = vec![QuantError::default(); n];
        {
            // One lock a row: tasks take their row's buffers, and no row is taken twice.
            let slots: Vec<_> = codes
                .chunks_mut(k)
                .zip(scales.chunks_mut(groups))
                .zip(zeros.chunks_mut(groups))
                .zip(&mut errors)
                .map(|slot| std::sync::Mutex::new(Some(slot)))
                .collect();
            cpu.run(n, &|row| {
                let slot = slots[row].lock().ok().and_then(|mut slot| slot.take());
                let Some((((codes, scales), zeros), error)) = slot else {
                    return;
                };
                let mut weights = cpu.scratch::<f32>(k);
                weights.copy_from_slice(&rows[row * k..(row + 1) * k]);
                if let Some(rotation) = rotation {
                    rotation.forward(&mut weights);
                }
                for (g, (w, codes)) in weights
                    .chunks(self.group)
                    .zip(codes.chunks_mut(self.group))
                    .enumerate()
                {
                    let fit = fit_group(self.bits, self.zero, w);
                    (scales[g], zeros[g]) = (fit.scale, fit.zero as u8);
                    fit.codes_into(self.bits, w, codes);
                    error.squared_error += f64::from(fit.error);
                    error.squared_norm += w.iter().map(|w| f64::from(w * w)).sum::<f64>();
                }
            });
        }
        if let Some(i) = scales.iter().position(|s| !s.is_finite()) {
            return Err(Error::new(format!(
                "row {} holds weights too large for an f16 scale",
                i / groups
            )));
        }
        let mut error = QuantError::default();
        for row in errors {
            error += row;
        }
        Ok(Quantized {
            spec,
            codes,
            scales,
            zeros,
            error,
        })
    }

    /// Quantises and packs a whole matrix of rows of length `k`.
    ///
    /// # Errors
    /// As [`Quantizer::quantize`].
    pub fn matrix(
        &self,
        cpu: &Cpu,
        rows: &[f32],
        k: usize,
        rotation: Option<&Rotation>,
    ) -> Result<(PackedMatrix, QuantError), Error> {
        let quantized = self.quantize(cpu, rows, k, rotation)?;
        let matrix = PackedMatrix::new(quantized.spec, rotation.cloned(), quantized.pack()?)?;
        Ok((matrix, quantized.error))
    }
}

/// A group's scale and zero point, and the squared error they give.
#[derive(Clone, Copy)]
struct Fit {
    scale: f16,
    zero: f32,
    error: f32,
}

impl Fit {
    /// `inverse` is 0 for a scale of 0: every weight then gets the zero point.
    fn factors(&self) -> (f32, f32) {
        let scale = self.scale.to_f32();
        (scale, if scale == 0.0 { 0.0 } else { 1.0 / scale })
    }

    fn codes_into(&self, bits: u8, weights: &[f32], codes: &mut [u8]) {
        let (_, inverse) = self.factors();
        let top = top_code(bits);
        for (w, code) in weights.iter().zip(codes) {
            *code = code_of(*w, inverse, self.zero, top) as u8;
        }
    }
}

fn top_code(bits: u8) -> f32 {
    ((1u32 << bits) - 1) as f32
}

/// Adding and taking away 1.5 * 2^23 rounds a small value to the nearest integer, ties to even; it
/// compiles to two additions on every machine.
const ROUND: f32 = 12_582_912.0;

#[inline(always)]
fn code_of(w: f32, inverse: f32, zero: f32, top: f32) -> f32 {
    // The clamp comes first: the rounding holds below 2^22 only.
    let position = (w * inverse + zero).max(0.0).min(top);
    (position + ROUND) - ROUND
}

fn fit_group(bits: u8, kind: ZeroKind, weights: &[f32]) -> Fit {
    let (low, high) = weights
        .iter()
        .fold((0f32, 0f32), |(low, high), &w| (low.min(w), high.max(w)));
    let top = top_code(bits);
    let (tries, step) = if bits == 4 {
        (TRIES_4, STEP_4)
    } else {
        (TRIES_8, STEP_8)
    };
    let mut best = Fit {
        scale: f16::ZERO,
        zero: 0.0,
        error: f32::INFINITY,
    };
    for i in 0..tries {
        let part = 1.0 - step * i as f32;
        let (scale, zero) = match kind {
            ZeroKind::Symmetric => {
                let half = (top - 1.0) / 2.0;
                (f16::from_f32(part * high.max(-low) / half), half + 1.0)
            }
            _ => {
                let scale = f16::from_f32(part * (high - low) / top);
                let exact = scale.to_f32();
                let zero = if exact == 0.0 {
                    0.0
                } else {
                    -part * low / exact
                };
                (scale, ((zero + ROUND) - ROUND).clamp(0.0, top))
            }
        };
        let mut fit = Fit {
            scale,
            zero,
            error: 0.0,
        };
        fit.error = squared_error(&fit, top, weights);
        if fit.error < best.error || i == 0 {
            best = fit;
        }
    }
    best
}

fn squared_error(fit: &Fit, top: f32, weights: &[f32]) -> f32 {
    let (scale, inverse) = fit.factors();
    let mut sums = [0f32; 16];
    let mut add = |weights: &[f32]| {
        for (w, sum) in weights.iter().zip(&mut sums) {
            let d = (code_of(*w, inverse, fit.zero, top) - fit.zero) * scale - w;
            *sum += d * d;
        }
    };
    for chunk in weights.chunks(16) {
        add(chunk);
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gaussian(count: usize, seed: u64) -> Vec<f32> {
        // Sums of twelve uniform numbers of a linear congruential generator.
        let mut state = seed;
        (0..count)
            .map(|_| {
                let sum: f32 = (0..12)
                    .map(|_| {
                        state = state
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        (state >> 40) as f32 / (1u64 << 24) as f32
                    })
                    .sum();
                sum - 6.0
            })
            .collect()
    }

    #[test]
    fn gaussian_weights_lose_what_the_bits_imply() {
        let cpu = Cpu::new(Some(2));
        let rows = gaussian(64 * 512, 5);
        // Bounds of the relative error of a good uniform quantiser of a Gaussian of this group.
        for (quantizer, low, high) in [
            (Quantizer::int4(32).unwrap(), 0.07, 0.088),
            (Quantizer::int4(64).unwrap(), 0.08, 0.098),
            (Quantizer::int4(128).unwrap(), 0.085, 0.108),
            (Quantizer::int8(64).unwrap(), 0.004, 0.0065),
        ] {
            let error = quantizer
                .quantize(&cpu, &rows, 512, None)
                .unwrap()
                .error
                .relative_rms();
            assert!((low..high).contains(&error), "{quantizer:?}: {error}");
        }
    }

    #[test]
    fn the_reported_error_is_that_of_the_packed_matrix() {
        let cpu = Cpu::new(Some(2));
        let (n, k) = (70, 160);
        let rows = gaussian(n * k, 8);
        let rotation = Rotation::from_seed(k, 2).unwrap();
        for quantizer in [Quantizer::int4(64).unwrap(), Quantizer::int8(32).unwrap()] {
            let (matrix, error) = quantizer.matrix(&cpu, &rows, k, Some(&rotation)).unwrap();
            let mut row = vec![0.0; k];
            let (mut squared_error, mut norm) = (0.0, 0.0);
            for (i, want) in rows.chunks(k).enumerate() {
                matrix.row_into(i, &mut row);
                for (a, b) in row.iter().zip(want) {
                    squared_error += f64::from(a - b).powi(2);
                    norm += f64::from(*b).powi(2);
                }
            }
            let relative = (squared_error / norm).sqrt();
            assert!((relative - error.relative_rms()).abs() < 1e-4 * relative.max(0.01));
        }
    }

    #[test]
    fn rotation_tames_an_outlier() {
        let cpu = Cpu::new(Some(1));
        let mut rows = gaussian(16 * 256, 1);
        for row in rows.chunks_mut(256) {
            row[7] = 60.0;
        }
        let rotation = Rotation::from_seed(256, 1).unwrap();
        let quantizer = Quantizer::int4(64).unwrap();
        let plain = quantizer.quantize(&cpu, &rows, 256, None).unwrap();
        let rotated = quantizer
            .quantize(&cpu, &rows, 256, Some(&rotation))
            .unwrap();
        let without_outlier = |q: &QuantError| q.squared_error;
        assert!(without_outlier(&rotated.error) < 0.7 * without_outlier(&plain.error));
    }

    #[test]
    fn extremes_are_exact_or_refused() {
        let cpu = Cpu::new(Some(1));
        let quantizer = Quantizer::int4(32).unwrap();
        let zeros = quantizer.quantize(&cpu, &[0.0; 64], 64, None).unwrap();
        assert_eq!(zeros.error.relative_rms(), 0.0);
        // Fifteen steps of 1/8 hit every code exactly.
        let steps: Vec<f32> = (0..32).map(|i| (i % 16) as f32 / 8.0 - 1.0).collect();
        let exact = quantizer.quantize(&cpu, &steps, 32, None).unwrap();
        assert_eq!(exact.error.squared_error, 0.0);
        assert_eq!((exact.zeros[0], exact.scales[0].to_f32()), (8, 0.125));
        let mut rows = [1.0; 64];
        rows[33] = f32::NAN;
        let error = quantizer
            .quantize(&cpu, &rows, 32, None)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("weight 1 of row 1 is NaN"), "{error}");
        assert!(quantizer.quantize(&cpu, &[1e9; 32], 32, None).is_err());
        assert!(quantizer.quantize(&cpu, &[1.0; 33], 32, None).is_err());
        assert!(Quantizer::int4(48).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_weight_is_off_by_more_than_the_plain_rounding_allows(
            rows in proptest::collection::vec(-3f32..3.0, 200),
        ) {
            let cpu = Cpu::new(Some(1));
            for quantizer in [Quantizer::int4(64).unwrap(), Quantizer::int8(64).unwrap()] {
                let (matrix, error) = quantizer.matrix(&cpu, &rows, 100, None).unwrap();
                let spec = *matrix.spec();
                let mut row = vec![0.0; 100];
                let mut bound = 0.0;
                for r in 0..2 {
                    matrix.row_into(r, &mut row);
                    for w in rows[r * 100..(r + 1) * 100].chunks(64) {
                        // The search never does worse than the full range, whose error is at most
                        // about half a step, or a step where the zero point was rounded.
                        let range = w.iter().fold(0f32, |m, v| m.max(v.abs())) * 2.0;
                        let step = f64::from(range) / ((1 << spec.bits) - 2) as f64;
                        bound += w.len() as f64 * step * step;
                    }
                }
                prop_assert!(error.squared_error <= bound, "{} > {bound}", error.squared_error);
            }
        }
    }
}
