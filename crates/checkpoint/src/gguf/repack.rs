//! Quantised tensors into the kernels' packed form, 64 rows at a time on all cores.

use std::sync::Mutex;
use std::thread::Builder;

use half::f16;
use kozue_kernels::{AlignedBytes, PackedMatrix, PackedSpec, ZeroKind};

use super::blocks::GROUP;
use super::format::Format;
use super::order::Order;
use super::regroup::{Form, Loss, Sink, regroup};

/// Rows that are packed at a time: the height of the kernels' tiles.
const STRIPE: usize = 64;

/// Where the rows of a matrix lie in a stored tensor.
pub(super) struct Stored<'a> {
    pub format: Format,
    /// All rows of the tensor.
    pub bytes: &'a [u8],
    /// First of the matrix's rows in it.
    pub first: usize,
    /// Order of the matrix's rows among themselves.
    pub rows: Order,
    /// Order of a row's groups of 32.
    pub groups: Order,
}

impl Stored<'_> {
    fn row(&self, index: usize, k: usize) -> &[u8] {
        let size = self.format.row_bytes(k);
        &self.bytes[(self.first + self.rows.stored(index)) * size..][..size]
    }
}

/// The kernels' form of a matrix of `n` rows of `k` values.
pub(super) fn spec(form: Form, n: usize, k: usize) -> PackedSpec {
    PackedSpec {
        n,
        k,
        bits: form.bits,
        group: GROUP,
        zero: if form.min {
            ZeroKind::Min
        } else {
            ZeroKind::Symmetric
        },
    }
}

/// Pack a matrix of `n` rows of `k` values. The error says what is wrong with its blocks.
pub(super) fn repack(
    stored: &Stored,
    form: Form,
    n: usize,
    k: usize,
) -> Result<(PackedMatrix, Loss), String> {
    let spec = spec(form, n, k);
    spec.check().map_err(|error| error.to_string())?;
    let mut bytes = AlignedBytes::zeroed(spec.bytes());
    let size = spec.groups() * spec.tile_bytes();
    let work = Mutex::new(bytes.chunks_exact_mut(size).enumerate());
    let next = || {
        work.lock()
            .unwrap_or_else(|poison| poison.into_inner())
            .next()
    };
    let worker = || -> Result<Loss, String> {
        let mut loss = Loss::default();
        while let Some((index, out)) = next() {
            let mut tiles = Tiles {
                out,
                tile: spec.tile_bytes(),
                form,
                row: 0,
            };
            for row in 0..STRIPE.min(n - index * STRIPE) {
                tiles.row = row;
                let from = stored.row(index * STRIPE + row, k);
                loss += regroup(stored.format, from, k / GROUP, stored.groups, &mut tiles)?;
            }
        }
        Ok(loss)
    };
    // Small matrices are not worth a thread.
    let threads = ((n * k) >> 20).clamp(1, cores());
    let total = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads)
            // Where the system has no more threads, those there are do all the work.
            .map_while(|_| Builder::new().spawn_scoped(scope, worker).ok())
            .collect();
        let mut total = worker()?;
        for other in others {
            total += other
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok::<_, String>(total)
    })?;
    let matrix = PackedMatrix::new(spec, None, bytes).map_err(|error| error.to_string())?;
    Ok((matrix, total))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The tiles of 64 rows, one for each group, filled row by row. Writing them in place, in the
/// order that the kernels' `packed` module documents, spares a copy of all codes.
struct Tiles<'a> {
    out: &'a mut [u8],
    /// Bytes of a tile.
    tile: usize,
    form: Form,
    /// The row being filled.
    row: usize,
}

impl Sink for Tiles<'_> {
    #[inline(always)]
    fn put(&mut self, index: usize, codes: &[u8; GROUP], scale: f16, min: f16) {
        /// Rows in a block of codes; each has 4 bytes in a line of 64.
        const BLOCK: usize = 16;
        const LINE: usize = 4 * BLOCK;
        let row = self.row;
        let tile = &mut self.out[index * self.tile..][..self.tile];
        let (scales, rest) = tile.split_at_mut(2 * STRIPE);
        scales[2 * row..][..2].copy_from_slice(&scale.to_le_bytes());
        let blocks = if self.form.min {
            let (mins, blocks) = rest.split_at_mut(2 * STRIPE);
            mins[2 * row..][..2].copy_from_slice(&min.to_le_bytes());
            blocks
        } else {
            rest
        };
        let (quads, _) = codes.as_chunks::<4>();
        let place = row % BLOCK * 4;
        if self.form.bits == 8 {
            let block = &mut blocks[row / BLOCK * (8 * LINE)..][..8 * LINE];
            for (line, quad) in block.as_chunks_mut::<LINE>().0.iter_mut().zip(quads) {
                line[place..place + 4].copy_from_slice(quad);
            }
        } else {
            let block = &mut blocks[row / BLOCK * (4 * LINE)..][..4 * LINE];
            let pairs = quads.as_chunks::<2>().0;
            for (line, [low, high]) in block.as_chunks_mut::<LINE>().0.iter_mut().zip(pairs) {
                // Codes are below 16, so that shifting the four at once mixes nothing.
                let both = u32::from_le_bytes(*low) | u32::from_le_bytes(*high) << 4;
                line[place..place + 4].copy_from_slice(&both.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kozue_kernels::{Zeros, pack};

    use super::*;

    #[test]
    fn tiles_lie_as_the_kernels_pack_them() {
        let (n, groups) = (STRIPE, 3);
        for (bits, min) in [(4u8, false), (4, true), (8, false), (8, true)] {
            let form = Form {
                bits,
                min,
                lossy: false,
            };
            let zero = if min {
                ZeroKind::Min
            } else {
                ZeroKind::Symmetric
            };
            let spec = PackedSpec {
                n,
                k: groups * GROUP,
                bits,
                group: GROUP,
                zero,
            };
            let code = |i: usize| (i * 37 + i / 7) as u8 % if bits == 4 { 16 } else { 255 };
            let codes: Vec<u8> = (0..n * spec.k).map(code).collect();
            let scale = |i: usize| f16::from_f32(i as f32 * 0.25 - 9.0);
            let scales: Vec<f16> = (0..n * groups).map(scale).collect();
            let mins: Vec<f16> = (0..n * groups).map(|i| scale(i + 1)).collect();
            let mut out = vec![0; spec.bytes()];
            let mut tiles = Tiles {
                out: &mut out,
                tile: spec.tile_bytes(),
                form,
                row: 0,
            };
            for row in 0..n {
                tiles.row = row;
                for group in 0..groups {
                    let at = row * groups + group;
                    let codes = codes[at * GROUP..][..GROUP].try_into().unwrap();
                    tiles.put(group, &codes, scales[at], mins[at]);
                }
            }
            let zeros = if min {
                Zeros::Min(&mins)
            } else {
                Zeros::Symmetric
            };
            assert!(
                *pack(&spec, &codes, &scales, zeros).unwrap() == out[..],
                "{form:?}"
            );
        }
    }
}
