//! What every kernel runs on: threads, an instruction set and memory to reuse.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use crate::isa::Isa;
use crate::threads::{ThreadPool, physical_cores};

/// One processor as the kernels see it. Every kernel takes it first.
pub struct Cpu {
    pool: ThreadPool,
    isa: Isa,
    /// Buffers given back by earlier calls, so that decoding allocates nothing.
    spare: Mutex<Vec<Vec<Page>>>,
}

impl Cpu {
    /// The widest instruction set on `threads` threads; `None` means one for each physical core.
    pub fn new(threads: Option<usize>) -> Self {
        Self::with_isa(threads, Isa::best())
    }

    /// As [`Cpu::new`], with a set instruction set. One that this machine lacks is replaced by the
    /// widest that it has below it, so the choice can never fault.
    pub fn with_isa(threads: Option<usize>, isa: Isa) -> Self {
        let isa = Isa::available()
            .into_iter()
            .rfind(|&i| i <= isa)
            .unwrap_or(Isa::Portable);
        let pool = ThreadPool::new(threads.unwrap_or_else(physical_cores));
        Self {
            pool,
            isa,
            spare: Mutex::new(Vec::new()),
        }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Runs `f(0) .. f(tasks - 1)` on all threads, see [`ThreadPool::run`].
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        self.pool.run(tasks, f);
    }

    /// Bytes of all buffers that are kept for reuse and not in use now.
    pub fn spare_bytes(&self) -> usize {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.iter().map(|buffer| size_of_val(&buffer[..])).sum()
    }

    /// A reused buffer of `len` values, aligned to a page. Its content is whatever an earlier
    /// user left.
    pub fn scratch<T: Plain>(&self, len: usize) -> Scratch<'_, T> {
        let pages = (len * size_of::<T>()).div_ceil(size_of::<Page>());
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // The smallest that is large enough, else the largest, which then grows.
        let best = (0..spare.len()).min_by_key(|&i| {
            let have = spare[i].len();
            if have >= pages {
                (0, have)
            } else {
                (1, usize::MAX - have)
            }
        });
        let mut buffer = best.map_or_else(Vec::new, |i| spare.swap_remove(i));
        drop(spare);
        if buffer.len() < pages {
            // What it holds is of no use: it goes before the larger one comes.
            buffer = Vec::new();
            buffer.resize(pages, Page([0; 4096]));
        }
        Scratch {
            cpu: self,
            buffer,
            len,
            kind: std::marker::PhantomData,
        }
    }
}

/// The unit of scratch memory. Page alignment lets kernels place their streams so that loads and
/// stores do not share the lower 12 bits of their addresses, which would hold them up.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

mod sealed {
    pub trait Sealed {}
}

/// Number types for which every bit pattern is a value.
pub trait Plain: sealed::Sealed + Copy + Send + Sync {}

macro_rules! plain {
    ($($t:ty),*) => { $(impl sealed::Sealed for $t {} impl Plain for $t {})* };
}
plain!(u8, i8, u16, i16, u32, i32, u64, f32, f64);

/// A buffer borrowed from a [`Cpu`]; it goes back when dropped.
pub struct Scratch<'a, T: Plain> {
    cpu: &'a Cpu,
    buffer: Vec<Page>,
    len: usize,
    kind: std::marker::PhantomData<T>,
}

impl<T: Plain> Deref for Scratch<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the buffer holds at least `len` values of T by construction, is aligned to a page,
        // is initialised, and every bit pattern is a valid `Plain`.
        unsafe { std::slice::from_raw_parts(self.buffer.as_ptr().cast(), self.len) }
    }
}

impl<T: Plain> DerefMut for Scratch<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the buffer is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.as_mut_ptr().cast(), self.len) }
    }
}

impl<T: Plain> Drop for Scratch<'_, T> {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        self.cpu
            .spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_aligned_disjoint_and_reused() {
        let cpu = Cpu::new(Some(1));
        let address = {
            let mut a = cpu.scratch::<f32>(5000);
            let mut b = cpu.scratch::<i8>(3);
            a.fill(1.5);
            b.fill(-1);
            assert_eq!(a.as_ptr() as usize % 4096, 0);
            assert_eq!(b.as_ptr() as usize % 4096, 0);
            assert!(a.iter().all(|&v| v == 1.5) && b.iter().all(|&v| v == -1));
            a.as_ptr() as usize
        };
        assert_eq!(cpu.scratch::<u8>(20_000).as_ptr() as usize, address);
        assert_eq!(cpu.scratch::<u64>(0).len(), 0);
    }

    #[test]
    fn an_instruction_set_out_of_reach_falls_back() {
        for isa in [Isa::Portable, Isa::Avx2, Isa::Amx, Isa::NeonI8mm] {
            let cpu = Cpu::with_isa(Some(2), isa);
            assert!(cpu.isa() <= isa && cpu.isa().is_available());
        }
    }
}
