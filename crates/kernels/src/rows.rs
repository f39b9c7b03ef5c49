//! Splitting rows of activations over threads, and where heads lie inside rows.

use std::marker::PhantomData;
use std::ops::Range;

use crate::cpu::Cpu;

/// Fewer operations than this are not worth waking another thread for.
const SERIAL: usize = 32 * 1024;

/// Where the heads of one kind lie inside the rows of a matrix of activations.
///
/// Head h of row r is the `dim` values at `r * row + offset + h * pitch`. So the query, key and
/// value heads can be worked on where a fused projection left them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Values between the starts of two rows.
    pub row: usize,
    /// Values before the first head of a row.
    pub offset: usize,
    /// Values between the starts of two heads of a row; at least `dim`.
    pub pitch: usize,
    /// Heads in a row.
    pub count: usize,
    /// Values of a head.
    pub dim: usize,
}

impl Heads {
    /// Rows that hold nothing but `count` heads of `dim` values.
    pub fn packed(count: usize, dim: usize) -> Self {
        Self {
            row: count * dim,
            offset: 0,
            pitch: dim,
            count,
            dim,
        }
    }

    /// Where head `head` of row `row` lies.
    #[inline(always)]
    pub fn range(&self, row: usize, head: usize) -> Range<usize> {
        let start = row * self.row + self.offset + head * self.pitch;
        start..start + self.dim
    }

    /// Rows in a matrix of `len` values.
    ///
    /// # Panics
    /// If the heads do not fit in a row or `len` is no whole number of rows.
    pub(crate) fn rows(&self, len: usize) -> usize {
        let end = self.offset + self.count.saturating_sub(1) * self.pitch + self.dim;
        assert!(
            self.count > 0 && self.pitch >= self.dim && end <= self.row,
            "heads lie outside their row: {self:?}"
        );
        assert!(
            len.is_multiple_of(self.row),
            "{len} values are no whole number of rows of {}",
            self.row
        );
        len / self.row
    }
}

/// Runs `f` on ranges that together are `0..rows`, on several threads if `work` operations a row
/// make it worth while. `f` must treat every row alike, so that the split cannot be seen.
pub(crate) fn for_rows(cpu: &Cpu, rows: usize, work: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
    let total = rows.saturating_mul(work);
    if rows <= 1 || total < SERIAL || cpu.threads() == 1 {
        if rows > 0 {
            f(0..rows);
        }
        return;
    }
    let tasks = (total / (SERIAL / 2)).min(4 * cpu.threads()).min(rows);
    cpu.run(tasks, &|task| {
        let range = task * rows / tasks..(task + 1) * rows / tasks;
        f(range);
    });
}

/// A mutable slice that several tasks write, each its own part.
pub(crate) struct Shared<'a, T> {
    data: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `part`, whose caller answers for the parts being disjoint.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self {
            data: data.as_mut_ptr(),
            len: data.len(),
            lifetime: PhantomData,
        }
    }

    /// One part of the slice.
    ///
    /// # Safety
    /// No two parts in use at one time may overlap.
    ///
    /// # Panics
    /// If the part is not inside the slice.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice by the check above, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) }
    }
}
