//! The packed product with AVX-512 VNNI: vpdpbusd takes a line of 16 outputs x 4 unsigned codes and
//! four signed codes of a row, repeated for every output.

use std::arch::x86_64::*;
use std::ops::Range;

use super::input::Input;
use crate::packed::{BLOCK, PackedMatrix, TILE, ZeroKind};

/// Rows that walk over k together: their sums and one group of their codes stay in the first cache.
const SLAB: usize = 64;
/// Bytes by which the small form fetches ahead.
const AHEAD: usize = 4096;

/// See `portable::tile`.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and VNNI; `sums` has 64 values for each row of `input`'s
/// blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) unsafe fn tile(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Input<'_>,
    sums: &mut [f32],
) {
    // SAFETY: as the caller promises; the number of rows is that of the function.
    unsafe {
        match input.m {
            1 => few::<1>(matrix, tile, blocks, input, sums),
            2 => few::<2>(matrix, tile, blocks, input, sums),
            3 => few::<3>(matrix, tile, blocks, input, sums),
            4 => few::<4>(matrix, tile, blocks, input, sums),
            _ => many(matrix, tile, blocks, input, sums),
        }
    }
}

/// Takes a line of 4-bit codes apart: the even quad (low halves) and the odd one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn halves(line: __m512i) -> (__m512i, __m512i) {
    let mask = _mm512_set1_epi8(15);
    (
        _mm512_and_si512(line, mask),
        _mm512_and_si512(_mm512_srli_epi16::<4>(line), mask),
    )
}

/// What a tile's head says of one block of 16 outputs.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub scales: __m512,
    /// Zero points, one in each i32.
    pub zeros: __m512i,
    /// Minima, or 0.
    pub mins: __m512,
}

impl Head {
    /// # Safety
    /// `tile` points to a tile of this matrix; block < 4.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub unsafe fn load(tile: *const u8, block: usize, zero: ZeroKind, bits: u8) -> Self {
        // SAFETY: 16 halves or bytes of each kind are there for each of the four blocks.
        unsafe {
            let halves = |at: usize| {
                let at = tile.add(at + block * 2 * BLOCK).cast();
                _mm512_cvtph_ps(_mm256_loadu_si256(at))
            };
            let (zeros, mins) = match zero {
                ZeroKind::Symmetric => (_mm512_set1_epi32(1 << (bits - 1)), _mm512_setzero_ps()),
                ZeroKind::Point => {
                    let at = tile.add(2 * TILE + block * BLOCK).cast();
                    (
                        _mm512_cvtepu8_epi32(_mm_loadu_si128(at)),
                        _mm512_setzero_ps(),
                    )
                }
                ZeroKind::Min => (_mm512_setzero_si512(), halves(2 * TILE)),
            };
            Self {
                scales: halves(0),
                zeros,
                mins,
            }
        }
    }

    /// The documented step: acc = fma(d, scale_x * scale_w, acc), then the minima's.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn add(&self, zero: ZeroKind, acc: __m512, d: __m512i, scale: f32, sum: i32) -> __m512 {
        let scales = _mm512_mul_ps(_mm512_set1_ps(scale), self.scales);
        let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), scales, acc);
        match zero {
            ZeroKind::Min => _mm512_fmadd_ps(self.mins, _mm512_set1_ps(scale * sum as f32), acc),
            _ => acc,
        }
    }

    /// -zero * sum. The zero point has 8 bits and the sum of a group 15, so that one
    /// multiply-add of 16-bit halves, the upper ones zero, is exact.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub fn correction(&self, sum: i32) -> __m512i {
        _mm512_madd_epi16(self.zeros, _mm512_set1_epi32((-sum) & 0xFFFF))
    }
}

/// Up to four rows: codes go from memory straight into the product.
///
/// # Safety
/// As `tile`; `input.m` is ROWS.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn few<const ROWS: usize>(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Input<'_>,
    sums: &mut [f32],
) {
    // SAFETY: as the caller promises.
    unsafe {
        match (matrix.spec().bits, blocks.len()) {
            (4, 4) => few_of::<4, ROWS, 4>(matrix, tile, blocks.start, input, sums),
            (4, _) => {
                for block in blocks {
                    few_of::<4, ROWS, 1>(matrix, tile, block, input, sums);
                }
            }
            (_, 4) => few_of::<8, ROWS, 4>(matrix, tile, blocks.start, input, sums),
            _ => {
                for block in blocks {
                    few_of::<8, ROWS, 1>(matrix, tile, block, input, sums);
                }
            }
        }
    }
}

/// # Safety
/// As `few`; the matrix has BITS bits and `first + BLOCKS <= 4`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn few_of<const BITS: u8, const ROWS: usize, const BLOCKS: usize>(
    matrix: &PackedMatrix,
    tile: usize,
    first: usize,
    input: &Input<'_>,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    let (group, zero) = (spec.group, spec.zero);
    let (tile_bytes, head_bytes, block_bytes) =
        (spec.tile_bytes(), spec.head_bytes(), spec.block_bytes());
    let mut at = matrix.bytes()[spec.tile_offset(tile, 0)..].as_ptr();
    let mut acc = [[_mm512_setzero_ps(); BLOCKS]; ROWS];
    for g in 0..spec.groups() {
        // SAFETY: the matrix holds every tile, the input every group; prefetches may go anywhere.
        unsafe {
            let codes = input
                .codes
                .as_ptr()
                .add(g * group / 64 * ROWS * 64 + g * group % 64);
            let scales: [f32; ROWS] = *input.scales.as_ptr().add(g * ROWS).cast();
            let totals: [i32; ROWS] = *input.sums.as_ptr().add(g * ROWS).cast();
            if BLOCKS == 4 {
                let mut line = 0;
                while line < tile_bytes {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + line).cast());
                    line += 64;
                }
            }
            for b in 0..BLOCKS {
                let head = Head::load(at, first + b, zero, BITS);
                let mut even = [_mm512_setzero_si512(); ROWS];
                for (even, total) in even.iter_mut().zip(totals) {
                    *even = head.correction(total);
                }
                let mut odd = [_mm512_setzero_si512(); ROWS];
                let lines = at.add(head_bytes + (first + b) * block_bytes);
                // 32 inputs at a time: every group is a multiple.
                for part in 0..group / 32 {
                    let codes = codes.add((part / 2) * ROWS * 64 + part % 2 * 32);
                    let lines = lines.add(part * BLOCK * 32 * BITS as usize / 8);
                    for j in 0..4 {
                        let (w0, w1) = if BITS == 4 {
                            halves(_mm512_loadu_si512(lines.add(j * 64).cast()))
                        } else {
                            (
                                _mm512_loadu_si512(lines.add(j * 128).cast()),
                                _mm512_loadu_si512(lines.add(j * 128 + 64).cast()),
                            )
                        };
                        for r in 0..ROWS {
                            let quad = codes.add(r * 64 + j * 8).cast::<i32>();
                            let x0 = _mm512_set1_epi32(quad.read_unaligned());
                            let x1 = _mm512_set1_epi32(quad.add(1).read_unaligned());
                            even[r] = _mm512_dpbusd_epi32(even[r], w0, x0);
                            odd[r] = _mm512_dpbusd_epi32(odd[r], w1, x1);
                        }
                    }
                }
                for r in 0..ROWS {
                    let d = _mm512_add_epi32(even[r], odd[r]);
                    acc[r][b] = head.add(zero, acc[r][b], d, scales[r], totals[r]);
                }
            }
            at = at.add(tile_bytes);
        }
    }
    for (acc, sums) in acc.iter().zip(sums.chunks_exact_mut(TILE)) {
        for (acc, sums) in acc.iter().zip(sums.chunks_exact_mut(BLOCK).skip(first)) {
            // SAFETY: the chunk has 16 values.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), *acc) };
        }
    }
}

/// Lines of a group of one tile, 4-bit codes taken apart.
#[repr(C, align(64))]
pub(super) struct Lines(pub [u8; 4 * BLOCK * 128]);

/// Any number of rows: the codes of a group are taken apart once for a slab of rows.
///
/// # Safety
/// As `tile`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn many(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Input<'_>,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    let tile_bytes = spec.tile_bytes();
    let bytes = &matrix.bytes()[spec.tile_offset(tile, 0)..];
    let mut lines = Lines([0; 4 * BLOCK * 128]);
    // Distance from one block's lines to the next one's.
    let block_lines = BLOCK * spec.group;
    for first in (0..input.m).step_by(SLAB) {
        let rows = first..(first + SLAB).min(input.m);
        sums[rows.start * TILE..rows.end * TILE].fill(0.0);
        for g in 0..spec.groups() {
            // SAFETY: the matrix holds every tile, the input every row and group; rows are taken
            // by four within their block of 8 or 16, so those past the end are there too, and so
            // are their sums.
            unsafe {
                let at = bytes.as_ptr().add(g * tile_bytes);
                let mut line = 0;
                while line < tile_bytes {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(tile_bytes + line).cast());
                    line += 64;
                }
                let codes = at.add(spec.head_bytes());
                let packed = if spec.bits == 4 {
                    let packed = codes.add(blocks.start * spec.block_bytes());
                    let out = lines.0.as_mut_ptr().add(blocks.start * block_lines);
                    for line in 0..blocks.len() * block_lines / 128 {
                        let (even, odd) = halves(_mm512_loadu_si512(packed.add(line * 64).cast()));
                        _mm512_store_si512(out.add(line * 128).cast(), even);
                        _mm512_store_si512(out.add(line * 128 + 64).cast(), odd);
                    }
                    lines.0.as_ptr()
                } else {
                    codes
                };
                let mut row = rows.start;
                while row < rows.end {
                    if blocks.len() == 4 {
                        four_rows::<4>(matrix, at, packed, 0, input, row, g, sums);
                    } else {
                        for block in blocks.clone() {
                            four_rows::<1>(matrix, at, packed, block, input, row, g, sums);
                        }
                    }
                    row += 4;
                }
            }
        }
    }
}

/// Adds group `g` of rows `row .. row + 4` to their sums.
///
/// # Safety
/// As `tile`; `at` is the tile, `packed` its four blocks of lines of 8-bit codes.
#[expect(
    clippy::too_many_arguments,
    reason = "the innermost step has this much to know"
)]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn four_rows<const BLOCKS: usize>(
    matrix: &PackedMatrix,
    at: *const u8,
    packed: *const u8,
    first: usize,
    input: &Input<'_>,
    row: usize,
    g: usize,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    let (group, zero) = (spec.group, spec.zero);
    let rows = input.rows;
    let (block, r0) = (row / rows, row % rows);
    // SAFETY: as the caller promises.
    unsafe {
        let codes = input.codes.as_ptr().add(
            block * rows * input.width + g * group / 64 * rows * 64 + g * group % 64 + r0 * 64,
        );
        let index = (block * input.groups + g) * rows + r0;
        let scales: [f32; 4] = *input.scales.as_ptr().add(index).cast();
        let totals: [i32; 4] = *input.sums.as_ptr().add(index).cast();
        let mut d = [[_mm512_setzero_si512(); BLOCKS]; 4];
        for part in 0..group / 32 {
            let codes = codes.add((part / 2) * rows * 64 + part % 2 * 32);
            let lines = packed.add(first * BLOCK * group + part * BLOCK * 32);
            for j in 0..8 {
                let mut w = [_mm512_setzero_si512(); BLOCKS];
                for (b, w) in w.iter_mut().enumerate() {
                    *w = _mm512_loadu_si512(lines.add(b * BLOCK * group + j * 64).cast());
                }
                for r in 0..4 {
                    let quad = codes.add(r * 64 + j * 4).cast::<i32>();
                    let x = _mm512_set1_epi32(quad.read_unaligned());
                    for b in 0..BLOCKS {
                        d[r][b] = _mm512_dpbusd_epi32(d[r][b], w[b], x);
                    }
                }
            }
        }
        for b in 0..BLOCKS {
            let head = Head::load(at, first + b, zero, spec.bits);
            for r in 0..4 {
                let acc = sums
                    .as_mut_ptr()
                    .add((row + r) * TILE + (first + b) * BLOCK);
                let exact = _mm512_add_epi32(d[r][b], head.correction(totals[r]));
                let sum = head.add(zero, _mm512_loadu_ps(acc), exact, scales[r], totals[r]);
                _mm512_storeu_ps(acc, sum);
            }
        }
    }
}
