//! A register-tiled product of small f32 matrices: the scores and the mixed values of attention.

use crate::kv_cache::Element;
use crate::lanes::{Kernel, LANES, Simd};

/// Values between two rows of `a`: known, so that every row is a fixed distance away.
pub(crate) const A_ROW: usize = 256;

/// `c[i][j] = sum over k, in order, of a[i][k] * b[k][j]`, one chain of fused multiply-adds for
/// each value of c, starting from 0 or from what c holds.
pub(crate) struct Product<'a, T> {
    /// Rows of `a` and `c`.
    pub(crate) rows: usize,
    /// Vectors of sixteen columns of `b` and `c`.
    pub(crate) vectors: usize,
    /// Length of the chains, at most `A_ROW`.
    pub(crate) depth: usize,
    /// Rows of `A_ROW` values.
    pub(crate) a: &'a [f32],
    pub(crate) b: &'a [T],
    /// Values of `b` from one k to the next.
    pub(crate) b_step: usize,
    /// Values of `b` from one vector to the next.
    pub(crate) b_next: usize,
    pub(crate) c: &'a mut [f32],
    /// Values between two rows of `c`.
    pub(crate) c_row: usize,
    /// Whether to go on from what `c` holds.
    pub(crate) resume: bool,
}

impl<T: Element> Kernel for Product<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        if self.rows == 0 || self.vectors == 0 {
            return;
        }
        assert!(self.depth <= A_ROW);
        assert!(self.a.len() >= (self.rows - 1) * A_ROW + self.depth);
        assert!(self.c.len() >= (self.rows - 1) * self.c_row + self.vectors * LANES);
        let last = self.depth.saturating_sub(1) * self.b_step + (self.vectors - 1) * self.b_next;
        assert!(self.b.len() >= last + LANES);
        // Four vectors of b at a time stay in the first cache for all rows.
        for vector in (0..self.vectors).step_by(4) {
            let mut row = 0;
            while row < self.rows {
                // SAFETY: the shapes were checked above.
                row += unsafe { self.tiles(s, row, vector) };
            }
        }
    }
}

impl<T: Element> Product<'_, T> {
    /// Some rows from `row` on by up to four vectors from `vector` on; returns how many rows.
    ///
    /// # Safety
    /// The shapes must have been checked; `row` and `vector` are inside them.
    #[inline(always)]
    unsafe fn tiles<S: Simd>(&mut self, s: S, row: usize, vector: usize) -> usize {
        let vectors = vector..self.vectors.min(vector + 4);
        let rows = self.rows - row;
        // SAFETY: each arm takes no more rows than there are.
        unsafe {
            if S::REGISTERS >= 32 {
                match rows {
                    12.. => self.tiles_of::<S, 12, 2>(s, row, vectors),
                    8.. => self.tiles_of::<S, 8, 2>(s, row, vectors),
                    4.. => self.tiles_of::<S, 4, 4>(s, row, vectors),
                    2.. => self.tiles_of::<S, 2, 4>(s, row, vectors),
                    _ => self.tiles_of::<S, 1, 4>(s, row, vectors),
                }
            } else if S::REGISTERS >= 8 {
                match rows {
                    4.. => self.tiles_of::<S, 4, 1>(s, row, vectors),
                    2.. => self.tiles_of::<S, 2, 2>(s, row, vectors),
                    _ => self.tiles_of::<S, 1, 4>(s, row, vectors),
                }
            } else {
                self.tiles_of::<S, 1, 1>(s, row, vectors)
            }
        }
    }

    /// # Safety
    /// As `tiles`, and there are R rows from `row` on.
    #[inline(always)]
    unsafe fn tiles_of<S: Simd, const R: usize, const N: usize>(
        &mut self,
        s: S,
        row: usize,
        vectors: std::ops::Range<usize>,
    ) -> usize {
        let mut vector = vectors.start;
        while vector + N <= vectors.end {
            // SAFETY: rows and vectors are inside the shapes.
            unsafe { self.tile::<S, R, N>(s, row, vector) };
            vector += N;
        }
        while vector < vectors.end {
            // SAFETY: as above.
            unsafe { self.tile::<S, R, 1>(s, row, vector) };
            vector += 1;
        }
        R
    }

    /// # Safety
    /// The shapes must have been checked and R rows by N vectors lie inside them.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const N: usize>(
        &mut self,
        s: S,
        row: usize,
        vector: usize,
    ) {
        // SAFETY: the largest index of each slice was checked by `run`.
        unsafe {
            let a = self.a.as_ptr().add(row * A_ROW);
            let mut b = self.b.as_ptr().add(vector * self.b_next);
            let c = self.c.as_mut_ptr().add(row * self.c_row + vector * LANES);
            let mut sums = [[s.zero(); N]; R];
            if self.resume {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum = s.load(&*c.add(i * self.c_row + j * LANES).cast());
                    }
                }
            }
            for k in 0..self.depth {
                let mut right = [s.zero(); N];
                for (j, right) in right.iter_mut().enumerate() {
                    *right = T::load(s, &*b.add(j * self.b_next).cast());
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let left = s.splat(*a.add(i * A_ROW + k));
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = s.mul_add(left, right, *sum);
                    }
                }
                b = b.wrapping_add(self.b_step);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (j, sum) in sums.iter().enumerate() {
                    s.store(*sum, &mut *c.add(i * self.c_row + j * LANES).cast());
                }
            }
        }
    }
}
