//! What a linear layer is fed with: the sums of products of its inputs.
//!
//! Rows of x add x x^T. Rounding a matrix by this form (see `quantizer::quadratic`) loses least of
//! its outputs, where rounding each weight to the nearest loses least of the weights.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cpu::Cpu;
use crate::lanes::{LANES, dispatch};
use crate::product::{A_ROW, Product};

/// Inputs of a panel of columns.
const PANEL: usize = 64;
/// Inputs of a task.
const TASK: usize = 96;

/// The sums of the products of all pairs of inputs, over the rows that were added.
///
/// A sum is one chain of fused multiply-adds in the order of the rows, so it does not depend on how
/// many rows come at a time.
pub struct Gram {
    k: usize,
    sums: Mutex<Sums>,
}

/// `values` is k rows of [`stride`] values, of which those from the diagonal on are kept up; empty
/// before the first row.
#[derive(Default)]
struct Sums {
    rows: usize,
    values: Vec<f32>,
}

/// Values from one row of a form to the next. Not a power of two, or the rows of a panel would meet
/// in a few places of the cache.
pub(crate) fn stride(k: usize) -> usize {
    k + LANES
}

impl Gram {
    /// No rows of `k` inputs yet, which must be a multiple of 32.
    ///
    /// # Panics
    /// If `k` is none.
    pub fn new(k: usize) -> Gram {
        assert!(k > 0 && k.is_multiple_of(32), "a form of {k} inputs");
        Gram {
            k,
            sums: Mutex::default(),
        }
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Rows that were added.
    pub fn rows(&self) -> usize {
        self.sums().rows
    }

    /// Adds the rows of `x`.
    ///
    /// # Panics
    /// If they are no whole number of rows.
    pub fn add(&self, cpu: &Cpu, x: &[f32]) {
        assert!(x.len().is_multiple_of(self.k), "no rows of {}", self.k);
        if x.is_empty() {
            return;
        }
        let mut sums = self.grown(x.len() / self.k);
        for rows in x.chunks(A_ROW * self.k) {
            self.add_some(cpu, rows, &mut sums.values);
        }
    }

    /// Adds a row for each input, of `x` there and 0 for all others.
    pub fn add_each(&self, x: f32) {
        let (k, mut sums) = (self.k, self.grown(self.k));
        for sum in sums.values.iter_mut().step_by(stride(k) + 1).take(k) {
            *sum = x.mul_add(x, *sum);
        }
    }

    /// The sums with room for values, counting `rows` more.
    fn grown(&self, rows: usize) -> MutexGuard<'_, Sums> {
        let mut sums = self.sums();
        sums.rows += rows;
        if sums.values.is_empty() {
            sums.values = vec![0.0; self.k * stride(self.k)];
        }
        sums
    }

    /// At most `A_ROW` rows.
    fn add_some(&self, cpu: &Cpu, x: &[f32], values: &mut [f32]) {
        let (k, rows) = (self.k, x.len() / self.k);
        // Both operands in the order in which the product reads them.
        let mut left = cpu.scratch::<f32>(k * A_ROW);
        let mut right = cpu.scratch::<f32>(k * rows);
        let panels: Vec<_> = left
            .chunks_mut(PANEL * A_ROW)
            .zip(right.chunks_mut(PANEL * rows))
            .map(Mutex::new)
            .collect();
        cpu.run(panels.len(), &|panel| {
            let (left, right) = &mut *locked(&panels[panel]);
            let width = right.len() / rows;
            for (row, to) in right.chunks_exact_mut(width).enumerate() {
                let from = &x[row * k + panel * PANEL..][..width];
                to.copy_from_slice(from);
                for (input, &value) in from.iter().enumerate() {
                    left[input * A_ROW + row] = value;
                }
            }
        });
        drop(panels);
        let stride = stride(k);
        for_rows(cpu, values, TASK * stride, &|task, values| {
            let first = task * TASK;
            let own = values.len() / stride;
            // A panel that ends at or before the first row lies below the diagonal.
            for panel in first / PANEL..k.div_ceil(PANEL) {
                let start = panel * PANEL;
                let width = PANEL.min(k - start);
                dispatch(
                    cpu.isa(),
                    Product {
                        rows: own,
                        vectors: width / LANES,
                        depth: rows,
                        a: &left[first * A_ROW..],
                        b: &right[start * rows..][..width * rows],
                        b_step: width,
                        b_next: LANES,
                        c: &mut values[start..],
                        c_row: stride,
                        resume: true,
                    },
                );
            }
        });
    }

    /// The whole form, row by row with gaps (see [`stride`]); empty if no row was added.
    pub(crate) fn form(&self, cpu: &Cpu) -> Vec<f32> {
        let mut values = self.sums().values.clone();
        mirror(cpu, &mut values, self.k);
        values
    }

    fn sums(&self) -> MutexGuard<'_, Sums> {
        locked(&self.sums)
    }
}

/// Copies what is above the diagonal below it.
pub(crate) fn mirror(cpu: &Cpu, values: &mut [f32], k: usize) {
    let above = values.to_vec();
    let stride = stride(k);
    for_rows(cpu, values, PANEL * stride, &|task, rows| {
        for (i, row) in rows.chunks_exact_mut(stride).enumerate() {
            let i = task * PANEL + i;
            for (j, value) in row[..i].iter_mut().enumerate() {
                *value = above[j * stride + i];
            }
        }
    });
}

/// Runs `f` on parts of `size` values on all threads.
pub(crate) fn for_rows(
    cpu: &Cpu,
    values: &mut [f32],
    size: usize,
    f: &(dyn Fn(usize, &mut [f32]) + Sync),
) {
    let parts: Vec<Mutex<&mut [f32]>> = values.chunks_mut(size).map(Mutex::new).collect();
    cpu.run(parts.len(), &|part| f(part, &mut locked(&parts[part])));
}

/// A lock's content, also after a panic elsewhere, which ends the whole region anyway.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, cpus, values};

    #[test]
    fn a_row_for_each_input_adds_to_the_diagonal() {
        let k = 96;
        let x = values(5, 20 * k, 1.0);
        for cpu in cpus() {
            let grams = [Gram::new(k), Gram::new(k)];
            for gram in &grams {
                gram.add(&cpu, &x);
            }
            grams[0].add_each(0.3);
            for input in 0..k {
                let mut row = vec![0.0; k];
                row[input] = 0.3;
                grams[1].add(&cpu, &row);
            }
            assert_eq!(grams[0].rows(), grams[1].rows());
            assert_eq!(grams[0].form(&cpu), grams[1].form(&cpu));
        }
    }

    #[test]
    fn sums_are_those_of_products_and_do_not_depend_on_threads_or_parts() {
        let (k, rows) = (160, 300);
        let x = values(3, rows * k, 1.0);
        let mut expected = vec![0f64; k * k];
        for row in x.chunks_exact(k) {
            for i in 0..k {
                for j in 0..k {
                    expected[i * k + j] += f64::from(row[i]) * f64::from(row[j]);
                }
            }
        }
        let mut first: Option<Vec<f32>> = None;
        for (number, cpu) in cpus().enumerate() {
            let gram = Gram::new(k);
            assert!(gram.form(&cpu).is_empty());
            for part in x.chunks((7 + 90 * number) * k) {
                gram.add(&cpu, part);
            }
            assert_eq!(gram.rows(), rows);
            let form = gram.form(&cpu);
            let dense: Vec<f32> = form
                .chunks_exact(stride(k))
                .flat_map(|row| &row[..k])
                .copied()
                .collect();
            assert_close(&dense, &expected, 1e-4);
            assert_eq!(*first.get_or_insert(dense.clone()), dense);
        }
    }
}
