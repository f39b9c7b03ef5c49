//! The packed product with NEON.
//!
//! Four outputs by four inputs are one register. `sdot` multiplies it by four inputs of a row;
//! `smmla` multiplies two outputs by eight inputs with two rows by eight inputs; processors that
//! have neither widen products to 16 bits. All of them multiply signed bytes, so 8-bit codes are
//! taken less 128, which is made up for with the zero point.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use super::input::Slab;
use crate::isa::Isa;
use crate::packed::{BLOCK, PackedMatrix, TILE, ZeroKind};

/// Inputs that are multiplied together.
const STEP: usize = 16;

/// See `portable::tile`.
///
/// # Safety
/// The machine has `isa`; `sums` has 64 values for each row that `input` has room for.
pub(crate) unsafe fn tile(
    isa: Isa,
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    let mut row = 0;
    while row < input.m {
        let mut work = Work {
            matrix,
            tile,
            blocks: blocks.clone(),
            input,
            row,
            sums: &mut *sums,
        };
        let left = input.m - row;
        // SAFETY: as the caller promises; the slab has as many rows as are taken.
        row += unsafe {
            match (matrix.spec().bits, isa) {
                (4, Isa::NeonI8mm) if left > 1 => work.some_pairs::<4>(left),
                (_, Isa::NeonI8mm) if left > 1 => work.some_pairs::<8>(left),
                (4, Isa::Neon) => work.some_rows::<4, Widened>(left),
                (_, Isa::Neon) => work.some_rows::<8, Widened>(left),
                (4, _) => work.some_rows_dot::<4>(left),
                (_, _) => work.some_rows_dot::<8>(left),
            }
        };
    }
}

/// Products of sixteen signed bytes, four and four added up.
trait Quads {
    /// `d[i] += w[4i..4i + 4] * x[4 LANE..4 LANE + 4]`
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn add<const LANE: i32>(d: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t;
}

struct Widened;

impl Quads for Widened {
    #[inline(always)]
    unsafe fn add<const LANE: i32>(d: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: every ARM processor has these.
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_laneq_s32::<LANE>(vreinterpretq_s32_s8(x)));
            // 128 * 127 fits in 16 bits.
            let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
            let high = vpaddlq_s16(vmull_high_s8(w, x));
            vaddq_s32(d, vpaddq_s32(low, high))
        }
    }
}

struct Dot;

impl Quads for Dot {
    #[inline(always)]
    unsafe fn add<const LANE: i32>(mut d: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: as the caller promises.
        unsafe {
            asm!(
                "sdot {d:v}.4s, {w:v}.16b, {x:v}.4b[{lane}]",
                d = inout(vreg) d,
                w = in(vreg) w,
                x = in(vreg) x,
                lane = const LANE,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        d
    }
}

/// `d[2i + j] += a[8i..8i + 8] * b[8j..8j + 8]`
///
/// # Safety
/// The machine has i8mm.
#[inline(always)]
unsafe fn add_pairs(mut d: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        asm!(
            "smmla {d:v}.4s, {a:v}.16b, {b:v}.16b",
            d = inout(vreg) d,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    d
}

/// Some blocks of a tile and the rows of a slab from `row` on.
struct Work<'a> {
    matrix: &'a PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &'a Slab<'a>,
    row: usize,
    sums: &'a mut [f32],
}

/// Sums of 64 outputs, for each of N rows.
type Sums<const N: usize> = [[[float32x4_t; 4]; N]; TILE / BLOCK];

#[inline(always)]
fn no_floats() -> float32x4_t {
    // SAFETY: every ARM processor has this.
    unsafe { vdupq_n_f32(0.0) }
}

#[inline(always)]
fn no_integers() -> int32x4_t {
    // SAFETY: as above.
    unsafe { vdupq_n_s32(0) }
}

impl Work<'_> {
    /// Up to four of the `left` rows; gives how many.
    ///
    /// # Safety
    /// The matrix has BITS bits, the slab has the rows, and the machine has the instructions of Q.
    #[inline(always)]
    unsafe fn some_rows<const BITS: u8, Q: Quads>(&mut self, left: usize) -> usize {
        // SAFETY: as the caller promises.
        unsafe {
            match left {
                1 => self.rows::<BITS, 1, Q>(),
                2 => self.rows::<BITS, 2, Q>(),
                3 => self.rows::<BITS, 3, Q>(),
                _ => self.rows::<BITS, 4, Q>(),
            }
        }
    }

    /// # Safety
    /// As `some_rows`.
    #[target_feature(enable = "dotprod")]
    unsafe fn some_rows_dot<const BITS: u8>(&mut self, left: usize) -> usize {
        // SAFETY: as the caller promises.
        unsafe { self.some_rows::<BITS, Dot>(left) }
    }

    /// # Safety
    /// As `some_rows`, there are two rows or more, and the machine has i8mm.
    #[target_feature(enable = "i8mm")]
    unsafe fn some_pairs<const BITS: u8>(&mut self, left: usize) -> usize {
        // SAFETY: as the caller promises.
        unsafe {
            match left {
                2..=3 => self.pairs::<BITS, 1, 2>(),
                _ => self.pairs::<BITS, 2, 4>(),
            }
        }
    }

    /// # Safety
    /// As `some_rows`, for N rows.
    #[inline(always)]
    unsafe fn rows<const BITS: u8, const N: usize, Q: Quads>(&mut self) -> usize {
        let mut acc: Sums<N> = [[[no_floats(); 4]; N]; TILE / BLOCK];
        for g in 0..self.matrix.spec().groups() {
            for block in self.blocks.clone() {
                let mut d = [[no_integers(); 4]; N];
                // SAFETY: as the caller promises; the matrix holds every tile and the input every
                // group.
                unsafe {
                    let lines = self.lines(g, block);
                    for part in 0..self.matrix.spec().group / STEP {
                        let x: [int8x16_t; N] = self.codes(g, part);
                        for out in 0..4 {
                            let w = quads::<BITS>(lines, part, out);
                            for r in 0..N {
                                let mut sum = d[r][out];
                                sum = Q::add::<0>(sum, w[0], x[r]);
                                sum = Q::add::<1>(sum, w[1], x[r]);
                                sum = Q::add::<2>(sum, w[2], x[r]);
                                d[r][out] = Q::add::<3>(sum, w[3], x[r]);
                            }
                        }
                    }
                    self.scale::<BITS, N>(g, block, &d, &mut acc[block]);
                }
            }
        }
        self.put(&acc);
        N
    }

    /// # Safety
    /// As `some_pairs`, for N = 2 P rows.
    #[inline(always)]
    unsafe fn pairs<const BITS: u8, const P: usize, const N: usize>(&mut self) -> usize {
        let mut acc: Sums<N> = [[[no_floats(); 4]; N]; TILE / BLOCK];
        for g in 0..self.matrix.spec().groups() {
            for block in self.blocks.clone() {
                // Of each pair of rows, and four outputs: [row][output] of the first and of the
                // last two outputs.
                let mut pairs = [[[no_integers(); 2]; 4]; P];
                // SAFETY: as in `rows`.
                unsafe {
                    let lines = self.lines(g, block);
                    for part in 0..self.matrix.spec().group / STEP {
                        let x: [int8x16_t; N] = self.codes(g, part);
                        let x = x.map(|x| vreinterpretq_s64_s8(x));
                        for out in 0..4 {
                            let w = quads::<BITS>(lines, part, out);
                            let w = w.map(|w| vreinterpretq_s32_s8(w));
                            for (half, w) in w.as_chunks::<2>().0.iter().enumerate() {
                                let first = vreinterpretq_s8_s32(vzip1q_s32(w[0], w[1]));
                                let last = vreinterpretq_s8_s32(vzip2q_s32(w[0], w[1]));
                                for (p, pairs) in pairs.iter_mut().enumerate() {
                                    let (a, b) = (x[2 * p], x[2 * p + 1]);
                                    let x = vreinterpretq_s8_s64(match half {
                                        0 => vzip1q_s64(a, b),
                                        _ => vzip2q_s64(a, b),
                                    });
                                    let [d0, d1] = pairs[out];
                                    pairs[out] = [add_pairs(d0, x, first), add_pairs(d1, x, last)];
                                }
                            }
                        }
                    }
                    let mut d = [[no_integers(); 4]; N];
                    for (p, pairs) in pairs.iter().enumerate() {
                        for (out, pair) in pairs.iter().enumerate() {
                            let [a, b] = pair.map(|d| vreinterpretq_s64_s32(d));
                            d[2 * p][out] = vreinterpretq_s32_s64(vzip1q_s64(a, b));
                            d[2 * p + 1][out] = vreinterpretq_s32_s64(vzip2q_s64(a, b));
                        }
                    }
                    self.scale::<BITS, N>(g, block, &d, &mut acc[block]);
                }
            }
        }
        self.put(&acc);
        N
    }

    /// Where a group's tile starts.
    #[inline(always)]
    unsafe fn at(&self, group: usize) -> *const u8 {
        let offset = self.matrix.spec().tile_offset(self.tile, group);
        // SAFETY: the matrix holds every tile.
        unsafe { self.matrix.bytes().as_ptr().add(offset) }
    }

    /// Where the codes of a block start.
    #[inline(always)]
    unsafe fn lines(&self, group: usize, block: usize) -> *const u8 {
        let spec = self.matrix.spec();
        // SAFETY: as above.
        unsafe {
            self.at(group)
                .add(spec.head_bytes() + block * spec.block_bytes())
        }
    }

    /// Sixteen codes of N rows.
    #[inline(always)]
    unsafe fn codes<const N: usize>(&self, group: usize, part: usize) -> [int8x16_t; N] {
        let first = group * self.matrix.spec().group + part * STEP;
        std::array::from_fn(|r| {
            // SAFETY: the slab has these rows and inputs.
            unsafe {
                vld1q_s8(
                    self.input
                        .codes
                        .as_ptr()
                        .add(self.input.at(self.row + r, first)),
                )
            }
        })
    }

    /// Adds a group's products to the sums, see the module `linear`.
    ///
    /// # Safety
    /// As `rows`.
    #[inline(always)]
    unsafe fn scale<const BITS: u8, const N: usize>(
        &self,
        group: usize,
        block: usize,
        d: &[[int32x4_t; 4]; N],
        acc: &mut [[float32x4_t; 4]; N],
    ) {
        let spec = self.matrix.spec();
        let index = group * self.input.rows + self.row;
        // SAFETY: the tile has 64 scales and zeros, the slab scales and sums of its rows.
        unsafe {
            let at = self.at(group);
            for out in 0..4 {
                let output = block * BLOCK + out * 4;
                let halves = |at: *const u8| {
                    let half = vld1_u16(at.add(2 * output).cast());
                    vcvt_f32_f16(vreinterpret_f16_u16(half))
                };
                let scale_w = halves(at);
                let zeros = match spec.zero {
                    ZeroKind::Symmetric => vdupq_n_s32(1 << (BITS - 1)),
                    ZeroKind::Point => {
                        let four = at.add(2 * TILE + output).cast::<u32>().read_unaligned();
                        let four = vmovl_u8(vcreate_u8(u64::from(four)));
                        vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(four)))
                    }
                    ZeroKind::Min => vdupq_n_s32(0),
                };
                // What was taken off the codes already.
                let offset = vdupq_n_s32(if BITS == 4 { 0 } else { 128 });
                let factor = vsubq_s32(offset, zeros);
                for r in 0..N {
                    let scale_x = *self.input.scales.as_ptr().add(index + r);
                    let total = *self.input.sums.as_ptr().add(index + r);
                    let exact = vcvtq_f32_s32(vmlaq_n_s32(d[r][out], factor, total));
                    let scale = vmulq_n_f32(scale_w, scale_x);
                    let mut sum = vfmaq_f32(acc[r][out], exact, scale);
                    if spec.zero == ZeroKind::Min {
                        let scale = vdupq_n_f32(scale_x * total as f32);
                        sum = vfmaq_f32(sum, halves(at.add(2 * TILE)), scale);
                    }
                    acc[r][out] = sum;
                }
            }
        }
    }

    /// Stores the sums of the blocks.
    #[inline(always)]
    fn put<const N: usize>(&mut self, acc: &Sums<N>) {
        for block in self.blocks.clone() {
            for (r, acc) in acc[block].iter().enumerate() {
                let first = (self.row + r) * TILE + block * BLOCK;
                let sums = &mut self.sums[first..first + BLOCK];
                for (sums, acc) in sums.as_chunks_mut::<4>().0.iter_mut().zip(acc) {
                    // SAFETY: the array has four values.
                    unsafe { vst1q_f32(sums.as_mut_ptr(), *acc) };
                }
            }
        }
    }
}

/// Four quads of inputs' codes of four outputs, as signed bytes: 4-bit codes as they are, 8-bit
/// codes less 128.
///
/// # Safety
/// `lines` points to a block of codes that has the part.
#[inline(always)]
unsafe fn quads<const BITS: u8>(lines: *const u8, part: usize, out: usize) -> [int8x16_t; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let line = |number: usize| vld1q_u8(lines.add(number * 4 * BLOCK + out * STEP));
        let codes = if BITS == 4 {
            let (a, b) = (line(2 * part), line(2 * part + 1));
            let low = |line| vandq_u8(line, vdupq_n_u8(15));
            [low(a), vshrq_n_u8::<4>(a), low(b), vshrq_n_u8::<4>(b)]
        } else {
            let sign = vdupq_n_u8(128);
            std::array::from_fn(|quad| veorq_u8(line(4 * part + quad), sign))
        };
        codes.map(|codes| vreinterpretq_s8_u8(codes))
    }
}

/// Multiply-accumulates of one pass of `peak`'s loop: sixteen chains of `smmla`, or of what else
/// there is.
const fn each(isa: Isa) -> usize {
    match isa {
        Isa::NeonI8mm => 16 * 32,
        _ => 16 * 16,
    }
}

/// Multiplies registers, `macs` multiply-accumulates in all.
///
/// # Safety
/// The machine has `isa`.
pub(crate) unsafe fn peak(isa: Isa, macs: usize) -> i32 {
    #[target_feature(enable = "i8mm")]
    unsafe fn pairs(sums: &mut [int32x4_t; 16], a: int8x16_t, rounds: usize) {
        for _ in 0..rounds {
            for sum in &mut *sums {
                // SAFETY: as the caller promises.
                *sum = unsafe { add_pairs(*sum, a, a) };
            }
        }
    }
    #[target_feature(enable = "dotprod")]
    unsafe fn dot(sums: &mut [int32x4_t; 16], a: int8x16_t, rounds: usize) {
        // SAFETY: as the caller promises.
        unsafe { chains::<Dot>(sums, a, rounds) }
    }
    #[inline(always)]
    unsafe fn chains<Q: Quads>(sums: &mut [int32x4_t; 16], a: int8x16_t, rounds: usize) {
        for _ in 0..rounds {
            for sum in &mut *sums {
                // SAFETY: as the caller promises.
                *sum = unsafe { Q::add::<0>(*sum, a, a) };
            }
        }
    }
    let mut sums = [no_integers(); 16];
    let rounds = macs / each(isa);
    // SAFETY: as the caller promises.
    unsafe {
        let a = vdupq_n_s8(std::hint::black_box(3));
        match isa {
            Isa::NeonI8mm => pairs(&mut sums, a, rounds),
            Isa::Neon => chains::<Widened>(&mut sums, a, rounds),
            _ => dot(&mut sums, a, rounds),
        }
        let total = |sum| vaddvq_s32(sum);
        sums.into_iter().map(total).fold(0, i32::wrapping_add)
    }
}
