//! The packed product with AVX2.
//!
//! vpmaddubsw adds pairs of unsigned times signed bytes into 16 bits. With 4-bit codes, eight such
//! pairs fit (8 * 2 * 15 * 127 < 2^15), so a whole 32 inputs are added before they are widened. With
//! 8-bit codes even one pair would not, so codes become signed (less 128) and the product is taken
//! as |w| * (x with w's sign): 2 * 128 * 127 < 2^15.

use std::arch::x86_64::*;
use std::ops::Range;

use super::input::Slab;
use crate::packed::{BLOCK, PackedMatrix, TILE, ZeroKind};

/// Bytes by which codes are fetched ahead.
const AHEAD: usize = 4096;
/// Rows computed together.
const ROWS: usize = 4;

/// See `portable::tile`.
///
/// # Safety
/// The machine has AVX2, FMA and F16C; `sums` has 64 values for each row that `input` has room for.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn tile(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    for row in (0..input.m).step_by(ROWS) {
        // SAFETY: as the caller promises; the slab has these rows.
        unsafe {
            match (matrix.spec().bits, ROWS.min(input.m - row)) {
                (4, 1) => rows::<4, 1>(matrix, tile, blocks.clone(), input, row, sums),
                (4, 2) => rows::<4, 2>(matrix, tile, blocks.clone(), input, row, sums),
                (4, 3) => rows::<4, 3>(matrix, tile, blocks.clone(), input, row, sums),
                (4, _) => rows::<4, 4>(matrix, tile, blocks.clone(), input, row, sums),
                (_, 1) => rows::<8, 1>(matrix, tile, blocks.clone(), input, row, sums),
                (_, 2) => rows::<8, 2>(matrix, tile, blocks.clone(), input, row, sums),
                (_, 3) => rows::<8, 3>(matrix, tile, blocks.clone(), input, row, sums),
                (_, _) => rows::<8, 4>(matrix, tile, blocks.clone(), input, row, sums),
            }
        }
    }
}

/// # Safety
/// As `tile`; the matrix has BITS bits, and rows `row .. row + N` are in the slab.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<const BITS: u8, const N: usize>(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Slab<'_>,
    row: usize,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    let bytes = &matrix.bytes()[spec.tile_offset(tile, 0)..];
    // Halves of a block: a register holds 8 outputs.
    let halves = blocks.start * 2..blocks.end * 2;
    let mut acc = [[_mm256_setzero_ps(); N]; 2 * TILE / BLOCK];
    for g in 0..spec.groups() {
        // SAFETY: the matrix holds every tile, the input every row and group; prefetches may go
        // anywhere.
        unsafe {
            let at = bytes.as_ptr().add(g * spec.tile_bytes());
            let codes = input.codes.as_ptr().add(input.at(row, g * spec.group));
            let index = g * input.rows + row;
            let scales: [f32; N] = *input.scales.as_ptr().add(index).cast();
            let totals: [i32; N] = *input.sums.as_ptr().add(index).cast();
            let mut line = 0;
            while row == 0 && line < spec.tile_bytes() {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + line).cast());
                line += 64;
            }
            for half in halves.clone() {
                let lines =
                    at.add(spec.head_bytes() + half / 2 * spec.block_bytes() + half % 2 * 32);
                let mut d = [_mm256_setzero_si256(); N];
                for part in 0..spec.group / 32 {
                    let codes = codes.add(part / 2 * input.rows * 64 + part % 2 * 32);
                    let lines = lines.add(part * BLOCK * 32 * BITS as usize / 8);
                    if BITS == 4 {
                        add_4(&mut d, lines, codes);
                    } else {
                        add_8(&mut d, lines, codes);
                    }
                }
                let scale_w = _mm256_cvtph_ps(_mm_loadu_si128(at.add(half * 16).cast()));
                let zeros = match spec.zero {
                    ZeroKind::Symmetric => _mm256_set1_epi32(1 << (BITS - 1)),
                    ZeroKind::Point => {
                        let at = at.add(2 * TILE + half * 8).cast();
                        _mm256_cvtepu8_epi32(_mm_loadl_epi64(at))
                    }
                    ZeroKind::Min => _mm256_setzero_si256(),
                };
                // What was not taken off the codes yet; 9 bits with sign in the lower 16.
                let offset = if BITS == 4 { 0 } else { 128 };
                let factor = _mm256_and_si256(
                    _mm256_sub_epi32(_mm256_set1_epi32(offset), zeros),
                    _mm256_set1_epi32(0xFFFF),
                );
                for r in 0..N {
                    let sum = _mm256_set1_epi32(totals[r] & 0xFFFF);
                    let exact = _mm256_add_epi32(d[r], _mm256_madd_epi16(factor, sum));
                    let scale = _mm256_mul_ps(_mm256_set1_ps(scales[r]), scale_w);
                    let mut sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), scale, acc[half][r]);
                    if spec.zero == ZeroKind::Min {
                        let at = at.add(2 * TILE + half * 16).cast();
                        let mins = _mm256_cvtph_ps(_mm_loadu_si128(at));
                        let scale = _mm256_set1_ps(scales[r] * totals[r] as f32);
                        sum = _mm256_fmadd_ps(mins, scale, sum);
                    }
                    acc[half][r] = sum;
                }
            }
        }
    }
    for half in halves {
        for (r, acc) in acc[half].iter().enumerate() {
            let at = (row + r) * TILE + half * 8;
            // SAFETY: the slice is checked to have 8 values.
            unsafe { _mm256_storeu_ps(sums[at..at + 8].as_mut_ptr(), *acc) };
        }
    }
}

/// Adds the products of 32 inputs, 4-bit codes.
///
/// # Safety
/// `lines` points to four lines' halves, `codes` to 32 codes of each of N rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_4<const N: usize>(d: &mut [__m256i; N], lines: *const u8, codes: *const i8) {
    let mask = _mm256_set1_epi8(15);
    let mut pairs = [_mm256_setzero_si256(); N];
    for j in 0..4 {
        // SAFETY: as the caller promises.
        unsafe {
            let line = _mm256_loadu_si256(lines.add(j * 64).cast());
            let even = _mm256_and_si256(line, mask);
            let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(line), mask);
            for (r, pairs) in pairs.iter_mut().enumerate() {
                let quad = codes.add(r * 64 + j * 8).cast::<i32>();
                let x0 = _mm256_set1_epi32(quad.read_unaligned());
                let x1 = _mm256_set1_epi32(quad.add(1).read_unaligned());
                *pairs = _mm256_add_epi16(*pairs, _mm256_maddubs_epi16(even, x0));
                *pairs = _mm256_add_epi16(*pairs, _mm256_maddubs_epi16(odd, x1));
            }
        }
    }
    let ones = _mm256_set1_epi16(1);
    for (d, pairs) in d.iter_mut().zip(pairs) {
        *d = _mm256_add_epi32(*d, _mm256_madd_epi16(pairs, ones));
    }
}

/// Adds the products of 32 inputs, 8-bit codes less 128.
///
/// # Safety
/// `lines` points to eight lines' halves, `codes` to 32 codes of each of N rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_8<const N: usize>(d: &mut [__m256i; N], lines: *const u8, codes: *const i8) {
    let ones = _mm256_set1_epi16(1);
    for j in 0..8 {
        // SAFETY: as the caller promises.
        unsafe {
            let line = _mm256_loadu_si256(lines.add(j * 64).cast());
            let w = _mm256_xor_si256(line, _mm256_set1_epi8(-128));
            let magnitude = _mm256_abs_epi8(w);
            for (r, d) in d.iter_mut().enumerate() {
                let quad = codes.add(r * 64 + j * 4).cast::<i32>();
                let x = _mm256_set1_epi32(quad.read_unaligned());
                let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
                *d = _mm256_add_epi32(*d, _mm256_madd_epi16(pairs, ones));
            }
        }
    }
}
