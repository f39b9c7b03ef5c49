//! Rounding that keeps a matrix's outputs rather than its weights.
//!
//! First the groups of a row are rounded one after the other: each weight takes in the errors of
//! those before it, through the factor of the form (Frantar et al., "GPTQ", arXiv 2210.17323, in
//! the form of Chee et al., "QuIP", arXiv 2307.13304). A group's scale and zero point are those of
//! some candidates that leave the least, errors taken in. Then the groups are gone through again:
//! given all others, is there a better scale, zero point or code for this one? Every change makes
//! the form smaller, now counting also what comes after.

use half::f16;
use std::sync::Mutex;

use super::group::{Again, First, Lanes, Local};
use super::quadratic::{Factor, Quadratic};
use super::{QuantError, Quantized, Quantizer, top_code};
use crate::cpu::Cpu;
use crate::error::Error;
use crate::gram::locked;
use crate::hadamard::Rotation;
use crate::lanes::{LANES, dispatch};
use crate::packed::ZeroKind;
use crate::product::{A_ROW, Product};

/// Rows of a task, whole vectors of lanes.
const ROWS: usize = 48;
/// How often the groups are gone through again.
const PASSES: usize = 3;

impl Quantizer {
    /// As [`Quantizer::quantize`], but codes are chosen for the least of `form` instead of the least
    /// error of the weights; each row's codes still depend on that row only.
    ///
    /// # Errors
    /// As [`Quantizer::quantize`], and if the form has other inputs or groups.
    pub fn quantize_under(
        &self,
        cpu: &Cpu,
        rows: &[f32],
        k: usize,
        rotation: Option<&Rotation>,
        form: &Quadratic,
    ) -> Result<Quantized, Error> {
        let spec = self.check(rows, k, rotation)?;
        if form.k() != k || form.group() != self.group {
            return Err(Error::new(format!(
                "a form of {} inputs in groups of {} does not fit rows of {k} in groups of {}",
                form.k(),
                form.group(),
                self.group
            )));
        }
        let (n, groups) = (spec.n, spec.groups());
        let mut out = Quantized {
            spec,
            codes: vec![0; n * k],
            scales: vec![f16::ZERO; n * groups],
            zeros: vec![0; n * groups],
            error: QuantError::default(),
        };
        let mut errors = vec![QuantError::default(); n];
        {
            let slots: Vec<_> = out
                .codes
                .chunks_mut(ROWS * k)
                .zip(out.scales.chunks_mut(ROWS * groups))
                .zip(out.zeros.chunks_mut(ROWS * groups))
                .zip(errors.chunks_mut(ROWS))
                .zip(rows.chunks(ROWS * k))
                .map(Mutex::new)
                .collect();
            cpu.run(slots.len(), &|slot| {
                let ((((codes, scales), zeros), errors), rows) = &mut *locked(&slots[slot]);
                let mut tile = Tile::new(cpu, self, form, rows, rotation);
                tile.round();
                tile.write(codes, scales, zeros, errors);
            });
        }
        super::check_scales(&out.scales, groups)?;
        for error in errors {
            out.error += error;
        }
        Ok(out)
    }
}

/// Some rows in work, weights in the form's order of inputs.
struct Tile<'a> {
    cpu: &'a Cpu,
    form: &'a Quadratic,
    bits: u8,
    zero: ZeroKind,
    /// Rows in use; the others are zero.
    count: usize,
    /// ROWS rows of `stride` values each: the weights, what is to be rounded (later the form's
    /// gradient), and the errors.
    weights: Vec<f32>,
    aims: Vec<f32>,
    errors: Vec<f32>,
    codes: Vec<f32>,
    /// [group][row]
    scales: Vec<f32>,
    zeros: Vec<f32>,
}

impl<'a> Tile<'a> {
    fn new(
        cpu: &'a Cpu,
        quantizer: &Quantizer,
        form: &'a Quadratic,
        rows: &[f32],
        rotation: Option<&Rotation>,
    ) -> Tile<'a> {
        let (k, stride) = (form.k(), form.stride());
        let mut weights = vec![0.0; ROWS * stride];
        let mut rotated = vec![0.0; k];
        for (row, to) in rows.chunks_exact(k).zip(weights.chunks_exact_mut(stride)) {
            rotated.copy_from_slice(row);
            if let Some(rotation) = rotation {
                rotation.forward(&mut rotated);
            }
            let inputs = form
                .order()
                .iter()
                .flat_map(|range| &rotated[range.clone()]);
            for (to, from) in to.iter_mut().zip(inputs) {
                *to = *from;
            }
        }
        Tile {
            cpu,
            form,
            bits: quantizer.bits,
            zero: quantizer.zero,
            count: rows.len() / k,
            aims: weights.clone(),
            errors: vec![0.0; weights.len()],
            codes: vec![0.0; weights.len()],
            weights,
            scales: vec![0.0; form.order().len() * ROWS],
            zeros: vec![0.0; form.order().len() * ROWS],
        }
    }

    fn round(&mut self) {
        let (k, stride) = (self.form.k(), self.form.stride());
        for (group, start) in (0..k).step_by(self.form.group()).enumerate() {
            let width = self.form.group().min(k - start);
            self.first(group, start, width);
            // What the group's errors do to the weights after it.
            let after = start + width;
            let upper = &self.form.whole().upper[start * stride + after..];
            self.spread(start, width, upper, after);
        }
        self.aims.fill(0.0);
        for start in (0..k).step_by(self.form.group()) {
            let width = self.form.group().min(k - start);
            self.spread(start, width, self.form.rows(start), 0);
        }
        for _ in 0..PASSES {
            for (group, start) in (0..k).step_by(self.form.group()).enumerate() {
                let width = self.form.group().min(k - start);
                let before = self.block(start, width);
                self.again(group, start, width);
                // Only what changed since.
                let mut now = self.block(start, width);
                let mut changed = false;
                for (now, before) in now.iter_mut().zip(&before) {
                    *now -= before;
                    changed |= *now != 0.0;
                }
                if changed {
                    self.add(&now, width, self.form.rows(start), 0);
                }
            }
        }
    }

    /// A group's errors, rows of `A_ROW` values.
    fn block(&self, start: usize, width: usize) -> Vec<f32> {
        let mut block = vec![0.0; ROWS * A_ROW];
        let rows = self.errors.chunks_exact(self.form.stride());
        for (to, from) in block.chunks_exact_mut(A_ROW).zip(rows) {
            to[..width].copy_from_slice(&from[start..start + width]);
        }
        block
    }

    /// Adds a group's errors times rows of a matrix to the aims from input `from` on.
    fn spread(&mut self, start: usize, width: usize, matrix: &[f32], from: usize) {
        let block = self.block(start, width);
        self.add(&block, width, matrix, from);
    }

    fn add(&mut self, block: &[f32], width: usize, matrix: &[f32], from: usize) {
        let stride = self.form.stride();
        dispatch(
            self.cpu.isa(),
            Product {
                rows: ROWS,
                vectors: (self.form.k() - from) / LANES,
                depth: width,
                a: block,
                b: matrix,
                b_step: stride,
                b_next: LANES,
                c: &mut self.aims[from..],
                c_row: stride,
                resume: true,
            },
        );
    }

    /// Rounds a group for the first time.
    fn first(&mut self, group: usize, start: usize, width: usize) {
        let whole = self.form.whole();
        let local = Local {
            width,
            stride: whole.stride,
            upper: &whole.upper[start * whole.stride + start..],
            pivots: &whole.pivots[start..start + width],
            top: top_code(self.bits),
        };
        let (isa, zero, bits) = (self.cpu.isa(), self.zero, self.bits);
        for row in (0..ROWS).step_by(LANES) {
            let first = First {
                local: &local,
                zero,
                bits,
                lanes: self.lanes(group, start, row),
            };
            dispatch(isa, first);
        }
    }

    /// Looks for a better scale, zero point and codes of a group, given all others.
    fn again(&mut self, group: usize, start: usize, width: usize) {
        let form = self.form;
        let Factor {
            stride,
            upper,
            pivots,
        } = form.part(group);
        let local = Local {
            width,
            stride: *stride,
            upper,
            pivots,
            top: top_code(self.bits),
        };
        let (isa, zero) = (self.cpu.isa(), self.zero);
        for row in (0..ROWS).step_by(LANES) {
            let again = Again {
                local: &local,
                zero,
                form: &form.rows(start)[start..],
                lanes: self.lanes(group, start, row),
            };
            dispatch(isa, again);
        }
    }

    /// A group of `LANES` rows, from input `start` on.
    fn lanes(&mut self, group: usize, start: usize, row: usize) -> Lanes<'_> {
        let stride = self.form.stride();
        let (from, own) = (row * stride + start, group * ROWS + row);
        Lanes {
            stride,
            weights: &self.weights[from..],
            aims: &self.aims[from..],
            errors: &mut self.errors[from..],
            codes: &mut self.codes[from..],
            scales: &mut self.scales[own..][..LANES],
            zeros: &mut self.zeros[own..][..LANES],
        }
    }

    /// Codes, scales and zero points in the matrix's own order of inputs.
    fn write(
        &self,
        codes: &mut [u8],
        scales: &mut [f16],
        zeros: &mut [u8],
        errors: &mut [QuantError],
    ) {
        let (k, stride, group) = (self.form.k(), self.form.stride(), self.form.group());
        let groups = self.form.order().len();
        for row in 0..self.count {
            let own = row * stride..row * stride + k;
            let mut from = self.codes[own.clone()].iter();
            for (place, range) in self.form.order().iter().enumerate() {
                for (to, code) in codes[row * k..][range.clone()].iter_mut().zip(&mut from) {
                    *to = *code as u8;
                }
                let at = row * groups + range.start / group;
                scales[at] = f16::from_f32(self.scales[place * ROWS + row]);
                zeros[at] = self.zeros[place * ROWS + row] as u8;
            }
            let square = |values: &[f32]| values.iter().map(|v| f64::from(v * v)).sum();
            errors[row] = QuantError {
                squared_error: square(&self.errors[own.clone()]),
                squared_norm: square(&self.weights[own]),
            };
        }
    }
}
