//! Packed weights copied out of a file's mapping into memory of huge pages.
//!
//! Every pass reads all weights once. Through pages of 4 KiB, as a file's mapping has them, this
//! takes 10 to 20 per cent longer than through huge pages, which systems give to anonymous memory
//! only; a copy costs a fraction of a second, once. Where memory is short the mapping serves.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Builder;

use kozue_kernels::{AlignedBytes, PackedMatrix, SharedBytes, available_memory};

use crate::shards::Shards;

/// Tensors start at multiples of this, a cache line.
const LINE: usize = 64;
/// Smaller models gain nothing.
const SMALLEST: usize = 1 << 20;

/// The packed matrices of a directory, for a network that runs: in huge pages where they can be had.
pub(crate) struct Resident {
    mapped: BTreeMap<String, PackedMatrix>,
    /// Made when the first matrix is asked for.
    copies: OnceLock<Option<BTreeMap<String, PackedMatrix>>>,
}

impl Resident {
    /// Matrices as the files have them.
    pub fn new(mapped: BTreeMap<String, PackedMatrix>) -> Resident {
        Resident {
            mapped,
            copies: OnceLock::new(),
        }
    }

    /// The matrices as the files have them.
    pub fn mapped(&self) -> &BTreeMap<String, PackedMatrix> {
        &self.mapped
    }

    /// The matrices for a network that runs, `name` among them. Tensors that begin with `stays`
    /// are left where they are.
    pub fn running(
        &self,
        shards: &Shards,
        name: &str,
        stays: Option<&str>,
    ) -> &BTreeMap<String, PackedMatrix> {
        let stays = |name: &str| stays.is_some_and(|prefix| name.starts_with(prefix));
        if stays(name) {
            return &self.mapped;
        }
        let copies = self.copies.get_or_init(|| {
            let moved = self.mapped.iter().filter(|(name, _)| !stays(name));
            copies(moved, &|name| shards.release(name))
        });
        copies.as_ref().unwrap_or(&self.mapped)
    }
}

/// The same matrices in memory of their own, or nothing where that memory is not to be had.
///
/// `copied` hears of every matrix that the file is not needed for any more, so that its pages do not
/// stay beside the copy.
fn copies<'p>(
    packed: impl Iterator<Item = (&'p String, &'p PackedMatrix)>,
    copied: &(dyn Fn(&str) + Sync),
) -> Option<BTreeMap<String, PackedMatrix>> {
    let padded = |matrix: &PackedMatrix| matrix.bytes().len().next_multiple_of(LINE);
    let packed: Vec<_> = packed.collect();
    let total: usize = packed.iter().map(|(_, matrix)| padded(matrix)).sum();
    // The file's own pages may stay beside the copy for a while.
    if total < SMALLEST || available_memory().is_none_or(|bytes| bytes < total + total / 4) {
        return None;
    }
    let mut arena = AlignedBytes::zeroed(total);
    let mut work = Vec::with_capacity(packed.len());
    let mut rest: &mut [u8] = &mut arena;
    for &(name, matrix) in &packed {
        let (to, later) = rest.split_at_mut(padded(matrix));
        work.push((name, matrix.bytes(), to));
        rest = later;
    }
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
    let work = Mutex::new(work.into_iter());
    let worker = || {
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((name, from, to)) = next else { break };
            to[..from.len()].copy_from_slice(from);
            copied(name);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Where the system has no more threads, those there are do all the work.
            let _ = Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
    let arena = Arc::new(arena);
    let mut start = 0;
    let copy = |(name, matrix): (&String, &PackedMatrix)| {
        let range = start..start + matrix.bytes().len();
        start += padded(matrix);
        let bytes = SharedBytes::new(arena.clone(), range).ok()?;
        let copy = PackedMatrix::new(*matrix.spec(), matrix.rotation().cloned(), bytes).ok()?;
        Some((name.clone(), copy))
    };
    packed.into_iter().map(copy).collect()
}
