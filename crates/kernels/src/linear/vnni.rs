//! The packed product with AVX-512 VNNI: vpdpbusd takes a line of 16 outputs x 4 unsigned codes and
//! four signed codes of a row, repeated for every output.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::input::Slab;
use crate::packed::{BLOCK, PackedMatrix, TILE, ZeroKind};

/// Bytes by which the small form fetches ahead.
const AHEAD: usize = 4096;

/// See `portable::tile`.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and VNNI; `sums` has 64 values for each row that
/// `input` has room for.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) unsafe fn tile(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    // SAFETY: as the caller promises; the number of rows is that of the function.
    unsafe {
        match input.rows {
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

/// Where the zero points of a tile are: in its head, or the same for all tiles.
#[derive(Clone, Copy)]
pub(super) struct ZeroPoints {
    same: [u8; BLOCK],
    in_head: bool,
}

impl ZeroPoints {
    pub fn of(matrix: &PackedMatrix) -> Self {
        let spec = matrix.spec();
        let same = match spec.zero {
            ZeroKind::Symmetric => 1 << (spec.bits - 1),
            ZeroKind::Point | ZeroKind::Min => 0,
        };
        Self {
            same: [same; BLOCK],
            in_head: spec.zero == ZeroKind::Point,
        }
    }
}

/// What a tile's head says of one block of 16 outputs.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub scales: __m512,
    /// Zero points, one in each i32.
    pub zeros: __m512i,
    /// Minima, or 0 unless MIN.
    pub mins: __m512,
}

impl Head {
    /// # Safety
    /// `tile` points to a tile of the matrix whose zero points these are, which has minima if MIN;
    /// block < 4.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub unsafe fn load<const MIN: bool>(tile: *const u8, block: usize, zeros: &ZeroPoints) -> Self {
        // SAFETY: 16 halves or bytes of each kind are there for each of the four blocks.
        unsafe {
            let scales = tile.add(block * 2 * BLOCK).cast();
            let in_head = tile.add(2 * TILE + block * BLOCK);
            let zeros = if zeros.in_head {
                in_head
            } else {
                zeros.same.as_ptr()
            };
            let mut mins = _mm512_setzero_ps();
            if MIN {
                let at = tile.add(2 * TILE + block * 2 * BLOCK).cast();
                mins = _mm512_cvtph_ps(_mm256_loadu_si256(at));
            }
            Self {
                scales: _mm512_cvtph_ps(_mm256_loadu_si256(scales)),
                zeros: _mm512_cvtepu8_epi32(_mm_loadu_si128(zeros.cast())),
                mins,
            }
        }
    }

    /// The documented step: acc = fma(d, scale_x * scale_w, acc), then the minima's.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn add<const MIN: bool>(&self, acc: __m512, d: __m512i, scale: f32, sum: i32) -> __m512 {
        let scales = _mm512_mul_ps(_mm512_set1_ps(scale), self.scales);
        let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), scales, acc);
        if MIN {
            _mm512_fmadd_ps(self.mins, _mm512_set1_ps(scale * sum as f32), acc)
        } else {
            acc
        }
    }

    /// -zero * sum. The zero point has 8 bits and the sum of a group 15, so that one
    /// multiply-add of 16-bit halves, the upper ones zero, is exact.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub fn correction(&self, sum: i32) -> __m512i {
        _mm512_madd_epi16(self.zeros, _mm512_set1_epi32(sum.wrapping_neg() & 0xFFFF))
    }
}

/// Up to four rows: codes go from memory straight into the product.
///
/// # Safety
/// As `tile`; `input` has room for ROWS rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn few<const ROWS: usize>(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    macro_rules! of {
        ($parts:literal, $blocks:literal, $first:expr) => {
            // SAFETY: as the caller promises; the constants are the matrix's.
            unsafe {
                match (spec.bits, spec.zero) {
                    (4, ZeroKind::Min) => {
                        few_of::<4, true, ROWS, $parts, $blocks>(matrix, tile, $first, input, sums)
                    }
                    (4, _) => {
                        few_of::<4, false, ROWS, $parts, $blocks>(matrix, tile, $first, input, sums)
                    }
                    (_, ZeroKind::Min) => {
                        few_of::<8, true, ROWS, $parts, $blocks>(matrix, tile, $first, input, sums)
                    }
                    (_, _) => {
                        few_of::<8, false, ROWS, $parts, $blocks>(matrix, tile, $first, input, sums)
                    }
                }
            }
        };
    }
    match (blocks.len(), spec.group) {
        (4, 32) => of!(1, 4, 0),
        (4, 64) => of!(2, 4, 0),
        (4, _) => of!(4, 4, 0),
        _ => {
            for block in blocks {
                of!(0, 1, block);
            }
        }
    }
}

/// PARTS is group / 32 if known when compiling, 0 if not.
///
/// # Safety
/// As `few`; the constants are the matrix's, and `first + BLOCKS <= 4`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn few_of<
    const BITS: u8,
    const MIN: bool,
    const ROWS: usize,
    const PARTS: usize,
    const BLOCKS: usize,
>(
    matrix: &PackedMatrix,
    tile: usize,
    first: usize,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    let group = if PARTS == 0 { spec.group } else { PARTS * 32 };
    let zeros = ZeroPoints::of(matrix);
    let (tile_bytes, head_bytes) = (spec.tile_bytes(), spec.head_bytes());
    let block_bytes = BLOCK * group * BITS as usize / 8;
    let mut at = matrix.bytes()[spec.tile_offset(tile, 0)..].as_ptr();
    let mut acc = [[_mm512_setzero_ps(); ROWS]; BLOCKS];
    for g in 0..spec.groups() {
        // SAFETY: the matrix holds every tile, the input every group; prefetches may go anywhere.
        unsafe {
            let codes = input
                .codes
                .as_ptr()
                .add(g * group / 64 * ROWS * 64 + g * group % 64);
            let scales: [f32; ROWS] = *input.scales.as_ptr().add(g * ROWS).cast();
            let totals: [i32; ROWS] = *input.sums.as_ptr().add(g * ROWS).cast();
            for (b, acc) in acc.iter_mut().enumerate() {
                let head = Head::load::<MIN>(at, first + b, &zeros);
                let mut even = [_mm512_setzero_si512(); ROWS];
                let mut odd = [_mm512_setzero_si512(); ROWS];
                for (even, total) in even.iter_mut().zip(totals) {
                    *even = head.correction(total);
                }
                let lines = at.add(head_bytes + (first + b) * block_bytes);
                if BLOCKS == 4 {
                    let mut line = 0;
                    while line < block_bytes {
                        _mm_prefetch::<_MM_HINT_T0>(lines.wrapping_add(AHEAD + line).cast());
                        line += 64;
                    }
                }
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
                for (r, acc) in acc.iter_mut().enumerate() {
                    let d = _mm512_add_epi32(even[r], odd[r]);
                    *acc = head.add::<MIN>(*acc, d, scales[r], totals[r]);
                }
            }
            at = at.add(tile_bytes);
        }
    }
    for (b, acc) in acc.iter().enumerate() {
        for (r, acc) in acc.iter().enumerate() {
            let sums = &mut sums[r * TILE + (first + b) * BLOCK..][..BLOCK];
            // SAFETY: the slice has 16 values.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), *acc) };
        }
    }
}

/// Lines of a group of one tile, 4-bit codes taken apart.
#[repr(C, align(64))]
struct Lines([MaybeUninit<u8>; 4 * BLOCK * 128]);

/// Any number of rows: the codes of a group are taken apart once for a slab of rows.
///
/// # Safety
/// As `tile`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn many(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    // SAFETY: as the caller promises; the constants are the matrix's.
    unsafe {
        match (matrix.spec().zero, matrix.spec().group) {
            (ZeroKind::Min, 32) => many_of::<true, 1>(matrix, tile, blocks, input, sums),
            (ZeroKind::Min, 64) => many_of::<true, 2>(matrix, tile, blocks, input, sums),
            (ZeroKind::Min, _) => many_of::<true, 4>(matrix, tile, blocks, input, sums),
            (_, 32) => many_of::<false, 1>(matrix, tile, blocks, input, sums),
            (_, 64) => many_of::<false, 2>(matrix, tile, blocks, input, sums),
            (_, _) => many_of::<false, 4>(matrix, tile, blocks, input, sums),
        }
    }
}

/// # Safety
/// As `many`; the matrix has minima if MIN, and groups of 32 * PARTS.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn many_of<const MIN: bool, const PARTS: usize>(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    let tile_bytes = spec.tile_bytes();
    let bytes = &matrix.bytes()[spec.tile_offset(tile, 0)..];
    let mut lines = Lines([MaybeUninit::uninit(); 4 * BLOCK * 128]);
    let zeros = ZeroPoints::of(matrix);
    // Distance from one block's lines to the next one's.
    let block_lines = BLOCK * 32 * PARTS;
    sums[..input.m.next_multiple_of(4) * TILE].fill(0.0);
    for g in 0..spec.groups() {
        // SAFETY: the matrix holds every tile, the input every row and group; rows are taken
        // by four within their block of 8 or 16, so those past the end are there too, and so
        // are their sums. The lines of the blocks are written before they are read.
        unsafe {
            let at = bytes.as_ptr().add(g * tile_bytes);
            if blocks.len() == 4 {
                let mut line = 0;
                while line < tile_bytes {
                    let ahead = at.wrapping_add(2 * tile_bytes + line);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                    line += 64;
                }
            }
            let codes = at.add(spec.head_bytes());
            let packed = if spec.bits == 4 {
                let packed = codes.add(blocks.start * block_lines / 2);
                let out = lines.0.as_mut_ptr().add(blocks.start * block_lines);
                for line in 0..blocks.len() * block_lines / 128 {
                    let (even, odd) = halves(_mm512_loadu_si512(packed.add(line * 64).cast()));
                    _mm512_store_si512(out.add(line * 128).cast(), even);
                    _mm512_store_si512(out.add(line * 128 + 64).cast(), odd);
                }
                lines.0.as_ptr().cast()
            } else {
                codes
            };
            let step = Step {
                at,
                packed,
                g,
                zeros: &zeros,
            };
            for row in (0..input.m).step_by(4) {
                if blocks.len() == 4 {
                    step.four_rows::<MIN, PARTS, 4>(0, input, row, sums);
                } else {
                    for block in blocks.clone() {
                        step.four_rows::<MIN, PARTS, 1>(block, input, row, sums);
                    }
                }
            }
        }
    }
}

/// One group of one tile.
struct Step<'a> {
    /// The tile.
    at: *const u8,
    /// Its four blocks of lines of 8-bit codes.
    packed: *const u8,
    g: usize,
    zeros: &'a ZeroPoints,
}

impl Step<'_> {
    /// Adds the group's part of rows `row .. row + 4` to their sums.
    ///
    /// # Safety
    /// As `many_of`; `first + BLOCKS <= 4`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn four_rows<const MIN: bool, const PARTS: usize, const BLOCKS: usize>(
        &self,
        first: usize,
        input: &Slab<'_>,
        row: usize,
        sums: &mut [f32],
    ) {
        let (g, group, rows) = (self.g, PARTS * 32, input.rows);
        // SAFETY: as the caller promises.
        unsafe {
            let codes = input.codes.as_ptr().add(input.at(row, g * group));
            let index = g * rows + row;
            let scales: [f32; 4] = *input.scales.as_ptr().add(index).cast();
            let totals: [i32; 4] = *input.sums.as_ptr().add(index).cast();
            let mut d = [[_mm512_setzero_si512(); BLOCKS]; 4];
            for b in 0..BLOCKS {
                let head = Head::load::<MIN>(self.at, first + b, self.zeros);
                for (d, total) in d.iter_mut().zip(totals) {
                    d[b] = head.correction(total);
                }
            }
            for part in 0..PARTS {
                let codes = codes.add((part / 2) * rows * 64 + part % 2 * 32);
                let lines = self.packed.add(first * BLOCK * group + part * BLOCK * 32);
                for j in 0..8 {
                    let mut w = [_mm512_setzero_si512(); BLOCKS];
                    for (b, w) in w.iter_mut().enumerate() {
                        *w = _mm512_loadu_si512(lines.add(b * BLOCK * group + j * 64).cast());
                    }
                    for (r, d) in d.iter_mut().enumerate() {
                        let quad = codes.add(r * 64 + j * 4).cast::<i32>();
                        let x = _mm512_set1_epi32(quad.read_unaligned());
                        for (d, w) in d.iter_mut().zip(w) {
                            *d = _mm512_dpbusd_epi32(*d, w, x);
                        }
                    }
                }
            }
            for b in 0..BLOCKS {
                let head = Head::load::<MIN>(self.at, first + b, self.zeros);
                for (r, d) in d.iter().enumerate() {
                    let acc = sums
                        .as_mut_ptr()
                        .add((row + r) * TILE + (first + b) * BLOCK);
                    let sum = head.add::<MIN>(_mm512_loadu_ps(acc), d[b], scales[r], totals[r]);
                    _mm512_storeu_ps(acc, sum);
                }
            }
        }
    }
}
