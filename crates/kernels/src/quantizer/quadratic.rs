//! The quadratic form that rounding keeps small: what an error of a matrix's rows does to its
//! outputs.
//!
//! With inputs x, a row's error e changes its output by e . x, whose squares add up to e H e^T with
//! H the sum of x x^T ([`Gram`]). H is taken apart as M D M^T, M upper triangular with ones on its
//! diagonal and D diagonal, so that
//!
//! ```text
//! e H e^T = sum over j of D_j (e_j + sum over i < j of e_i M_ij)^2
//! ```
//!
//! and weight j, rounded after those before it, can make up for their errors.

use std::ops::Range;

use crate::cpu::Cpu;
use crate::error::Error;
use crate::gram::{Gram, for_rows, locked, mirror, stride};
use crate::hadamard::Rotation;
use crate::lanes::{LANES, dispatch};
use crate::product::{A_ROW, Product};

/// Part of the mean of the diagonal that is added to it: inputs that the text hardly showed still
/// count, and the form is safely positive.
const DAMPING: f64 = 0.01;
/// Columns that are taken apart together.
const PANEL: usize = 64;
/// Rows of a task.
const TASK: usize = 48;

/// A positive form over the inputs of a matrix, in the order in which they are rounded: groups with
/// the largest inputs first, since what comes late can make up for what came early.
pub struct Quadratic {
    k: usize,
    group: usize,
    /// The first input and the length of each group, in order.
    order: Vec<Range<usize>>,
    /// k rows of `stride` values.
    form: Vec<f32>,
    whole: Factor,
    /// Of each group's own square.
    parts: Vec<Factor>,
}

/// M above its diagonal, and D.
pub(super) struct Factor {
    pub stride: usize,
    pub upper: Vec<f32>,
    pub pivots: Vec<f32>,
}

impl Quadratic {
    /// The form of the inputs that `gram` has seen, rotated as the matrix is, for groups of `group`.
    ///
    /// # Errors
    /// If no row was added, all were zero or one was not finite, or the rotation has another width.
    pub fn new(
        cpu: &Cpu,
        gram: &Gram,
        rotation: Option<&Rotation>,
        group: usize,
    ) -> Result<Quadratic, Error> {
        let k = gram.k();
        let mut plain = gram.form(cpu);
        if plain.is_empty() {
            return Err(Error::new("no input was seen"));
        }
        if let Some(rotation) = rotation {
            if rotation.k() != k {
                return Err(Error::new(format!(
                    "a rotation of width {} does not fit {k} inputs",
                    rotation.k()
                )));
            }
            rotate(cpu, &mut plain, rotation);
        }
        let stride = stride(k);
        let diagonal = |i: usize| f64::from(plain[i * stride + i]);
        let mean = (0..k).map(diagonal).sum::<f64>() / k as f64;
        if !(mean.is_finite() && mean > 0.0) {
            return Err(Error::new("its inputs were all zero, or not finite"));
        }
        let mut order: Vec<Range<usize>> = (0..k)
            .step_by(group)
            .map(|first| first..(first + group).min(k))
            .collect();
        // A last group that is not whole stays last, so that all others start at a multiple.
        let whole = k / group;
        order[..whole].sort_by(|a, b| {
            let sum = |range: &Range<usize>| range.clone().map(diagonal).sum::<f64>();
            sum(b).total_cmp(&sum(a))
        });
        let inputs: Vec<usize> = order.iter().cloned().flatten().collect();
        let factor = (1.0 / mean) as f32;
        let mut form = vec![0.0; plain.len()];
        for_rows(cpu, &mut form, TASK * stride, &|task, rows| {
            for (i, row) in rows.chunks_exact_mut(stride).enumerate() {
                let from = &plain[inputs[task * TASK + i] * stride..][..k];
                for (to, &input) in row.iter_mut().zip(&inputs) {
                    *to = from[input] * factor;
                }
            }
        });
        drop(plain);
        let mut damping = DAMPING;
        loop {
            for i in 0..k {
                form[i * stride + i] += damping as f32;
            }
            if let Some(whole) = factorise(cpu, &form, k, stride) {
                let parts = local(cpu, &form, k, group);
                return Ok(Quadratic {
                    k,
                    group,
                    order,
                    form,
                    whole,
                    parts,
                });
            }
            // Rounding of sums over very uneven inputs.
            damping *= 10.0;
            if damping > 1e6 {
                return Err(Error::new("its inputs are too uneven"));
            }
        }
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Inputs that share a scale.
    pub fn group(&self) -> usize {
        self.group
    }

    pub(super) fn order(&self) -> &[Range<usize>] {
        &self.order
    }

    /// The form's rows from `first` on, with gaps up to [`Quadratic::stride`].
    pub(super) fn rows(&self, first: usize) -> &[f32] {
        &self.form[first * self.stride()..]
    }

    pub(super) fn stride(&self) -> usize {
        stride(self.k)
    }

    pub(super) fn whole(&self) -> &Factor {
        &self.whole
    }

    pub(super) fn part(&self, group: usize) -> &Factor {
        &self.parts[group]
    }

    /// e H e^T of an error in the matrix's own order of inputs; H is scaled to a mean diagonal of 1.
    ///
    /// # Panics
    /// If there are not k values.
    pub fn cost(&self, error: &[f32]) -> f64 {
        assert_eq!(error.len(), self.k);
        let inputs: Vec<f64> = self
            .order
            .iter()
            .flat_map(|range| &error[range.clone()])
            .map(|&e| f64::from(e))
            .collect();
        let rows = self.form.chunks_exact(self.stride()).zip(&inputs);
        rows.map(|(row, e)| {
            let sum: f64 = row
                .iter()
                .zip(&inputs)
                .map(|(&h, e)| f64::from(h) * e)
                .sum();
            e * sum
        })
        .sum()
    }
}

/// R H R^T: rows, then, since the form is symmetric, what were its columns.
fn rotate(cpu: &Cpu, form: &mut Vec<f32>, rotation: &Rotation) {
    let k = rotation.k();
    let stride = stride(k);
    for side in 0..2 {
        for_rows(cpu, form, TASK * stride, &|_, rows| {
            for row in rows.chunks_exact_mut(stride) {
                rotation.forward(&mut row[..k]);
            }
        });
        if side == 0 {
            let before = std::mem::take(form);
            *form = vec![0.0; before.len()];
            for_rows(cpu, form, TASK * stride, &|task, rows| {
                for (i, row) in rows.chunks_exact_mut(stride).enumerate() {
                    let column = task * TASK + i;
                    for (to, from) in row[..k].iter_mut().zip(before.chunks_exact(stride)) {
                        *to = from[column];
                    }
                }
            });
        }
    }
    // The two halves were rounded in another order.
    mirror(cpu, form, k);
}

/// The factors of the squares of `group` along the diagonal.
fn local(cpu: &Cpu, form: &[f32], k: usize, group: usize) -> Vec<Factor> {
    let starts: Vec<usize> = (0..k).step_by(group).collect();
    let parts: Vec<_> = starts.iter().map(|_| std::sync::Mutex::new(None)).collect();
    let stride = stride(k);
    cpu.run(parts.len(), &|part| {
        let start = starts[part];
        let n = group.min(k - start);
        let mut square = vec![0.0; n * n];
        for (i, row) in square.chunks_exact_mut(n).enumerate() {
            row.copy_from_slice(&form[(start + i) * stride + start..][..n]);
        }
        // A principal square of a form that has a factor has one too, but for rounding.
        let factor = factorise(cpu, &square, n, n).unwrap_or_else(|| Factor {
            stride: n,
            upper: vec![0.0; n * n],
            pivots: (0..n).map(|i| square[i * n + i]).collect(),
        });
        *locked(&parts[part]) = Some(factor);
    });
    parts
        .iter()
        .filter_map(|part| locked(part).take())
        .collect()
}

/// M and D of a form of `n` inputs, from the last panel of columns to the first; `None` if a pivot
/// is not positive.
fn factorise(cpu: &Cpu, form: &[f32], n: usize, stride: usize) -> Option<Factor> {
    let mut upper = form.to_vec();
    let mut pivots = vec![0.0f32; n];
    let mut end = n;
    while end > 0 {
        let start = (end - 1) / PANEL * PANEL;
        let width = end - start;
        // The panel's own square.
        for j in (start..end).rev() {
            let pivot = upper[j * stride + j];
            if !(pivot.is_finite() && pivot > 0.0) {
                return None;
            }
            pivots[j] = pivot;
            let column: Vec<f32> = (start..j).map(|i| upper[i * stride + j]).collect();
            for (i, &value) in column.iter().enumerate() {
                let m = value / pivot;
                let row = &mut upper[(start + i) * stride..];
                row[j] = m;
                for (l, &other) in column.iter().enumerate().skip(i) {
                    row[start + l] -= m * other;
                }
            }
        }
        // M_J's columns as rows.
        let mut own = [0.0; PANEL * PANEL];
        for (j, own) in own.chunks_exact_mut(PANEL).enumerate().take(width) {
            for (l, own) in own[..j].iter_mut().enumerate() {
                *own = upper[(start + l) * stride + start + j];
            }
        }
        // The rows above: raw values -M_ij D_j to one side, M_ij in place.
        let mut raw = cpu.scratch::<f32>(start * A_ROW);
        {
            let above = &mut upper[..start * stride];
            let parts: Vec<_> = above
                .chunks_mut(TASK * stride)
                .zip(raw.chunks_mut(TASK * A_ROW))
                .map(std::sync::Mutex::new)
                .collect();
            cpu.run(parts.len(), &|part| {
                let (rows, raw) = &mut *locked(&parts[part]);
                for (row, raw) in rows.chunks_exact_mut(stride).zip(raw.chunks_mut(A_ROW)) {
                    let row = &mut row[start..end];
                    for j in (0..width).rev() {
                        let value = row[j];
                        raw[j] = -value;
                        row[j] = value / pivots[start + j];
                        for (l, m) in own[j * PANEL..][..j].iter().enumerate() {
                            row[l] -= value * m;
                        }
                    }
                }
            });
        }
        let mut columns = cpu.scratch::<f32>(width * start);
        for_rows(cpu, &mut columns, start.max(1), &|j, column| {
            for (i, value) in column.iter_mut().enumerate() {
                *value = upper[i * stride + start + j];
            }
        });
        for_rows(
            cpu,
            &mut upper[..start * stride],
            TASK * stride,
            &|task, rows| {
                let first = task * TASK;
                let from = first / LANES * LANES;
                dispatch(
                    cpu.isa(),
                    Product {
                        rows: rows.len() / stride,
                        vectors: (start - from) / LANES,
                        depth: width,
                        a: &raw[first * A_ROW..],
                        b: &columns[from..],
                        b_step: start,
                        b_next: LANES,
                        c: &mut rows[from..],
                        c_row: stride,
                        resume: true,
                    },
                );
            },
        );
        end = start;
    }
    Some(Factor {
        stride,
        upper,
        pivots,
    })
}
