//! From f32 rows to codes, scales and zeros.
//!
//! For each output and group, ranges from the full one down to a clipped one are tried, each with
//! its scale rounded to f16 before the weights are, and the one of least squared error is kept.

mod group;
mod quadratic;
mod rounding;
#[cfg(test)]
mod tests;

use std::sync::Mutex;

use half::f16;

pub use quadratic::Quadratic;

use crate::bytes::AlignedBytes;
use crate::cpu::Cpu;
use crate::error::Error;
use crate::gram::locked;
use crate::hadamard::Rotation;
use crate::packed::{PackedMatrix, PackedSpec, TILE, ZeroKind, Zeros, pack};

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

    /// The rows in kernel order, see [`pack`], tile by tile on all threads.
    ///
    /// # Errors
    /// If the public fields were given other lengths.
    pub fn pack(&self, cpu: &Cpu) -> Result<AlignedBytes, Error> {
        let whole = self.spec;
        let (n, k, groups) = (whole.n, whole.k, whole.groups());
        if [self.codes.len(), self.scales.len(), self.zeros.len()]
            != [n * k, n * groups, n * groups]
        {
            return Err(Error::new(format!("codes or scales are none of {n} x {k}")));
        }
        let size = PackedSpec { n: 1, ..whole }.bytes();
        let mut bytes = AlignedBytes::zeroed(whole.bytes());
        let failed = Mutex::new(None);
        {
            let parts: Vec<_> = bytes.chunks_mut(size).map(Mutex::new).collect();
            cpu.run(parts.len(), &|part| {
                let rows = part * TILE..((part + 1) * TILE).min(n);
                let spec = PackedSpec {
                    n: rows.len(),
                    ..whole
                };
                let of = rows.start * groups..rows.end * groups;
                let zeros = match whole.zero {
                    ZeroKind::Symmetric => Zeros::Symmetric,
                    _ => Zeros::Point(&self.zeros[of.clone()]),
                };
                let codes = &self.codes[rows.start * k..rows.end * k];
                match pack(&spec, codes, &self.scales[of], zeros) {
                    Ok(bytes) => locked(&parts[part]).copy_from_slice(&bytes),
                    Err(error) => *locked(&failed) = Some(error),
                }
            });
        }
        let failed = locked(&failed).take();
        failed.map_or(Ok(bytes), Err)
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
        let spec = self.check(rows, k, rotation)?;
        let n = spec.n;
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
                .map(|slot| Mutex::new(Some(slot)))
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
        check_scales(&scales, groups)?;
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

    /// The shape of `rows`; an error for what [`Quantizer::quantize`] refuses.
    fn check(
        &self,
        rows: &[f32],
        k: usize,
        rotation: Option<&Rotation>,
    ) -> Result<PackedSpec, Error> {
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
        let spec = self.spec(rows.len() / k, k);
        spec.check()?;
        Ok(spec)
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
        let matrix = PackedMatrix::new(quantized.spec, rotation.cloned(), quantized.pack(cpu)?)?;
        Ok((matrix, quantized.error))
    }
}

fn check_scales(scales: &[f16], groups: usize) -> Result<(), Error> {
    match scales.iter().position(|s| !s.is_finite()) {
        None => Ok(()),
        Some(i) => Err(Error::new(format!(
            "row {} holds weights too large for an f16 scale",
            i / groups
        ))),
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
