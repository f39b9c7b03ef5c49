//! The packed product with AMX: one instruction multiplies 16 rows x 64 inputs by 64 inputs x 16
//! outputs. The tile data is exact i32, and the float steps are those of AVX-512.
//!
//! Stable Rust has no AMX intrinsics, so the tile instructions are written as assembly. Nothing
//! else in the program uses tile registers; they are configured on entry and released on exit.
//!
//! Registers: 0, 1 products; 2, 3 weights; 4 to 7 the inputs of a chunk, loaded once for the four
//! blocks of outputs.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::input::Input;
use super::vnni::{Head, halves};
use crate::packed::{BLOCK, PackedMatrix, TILE, ZeroKind};

/// Steps of k in a chunk: one input register each.
const STEPS: usize = 4;
/// Bytes of a tile register.
const REGISTER: usize = 1024;
/// Weight registers of a chunk: four blocks of outputs by the steps.
const WEIGHTS: usize = TILE / BLOCK * STEPS;

#[repr(C, align(64))]
struct Buffer<const N: usize>([u8; N]);

/// The operand of ldtilecfg: palette, then for each register the bytes of a row and the rows (Intel
/// SDM, volume 1, section 18.2).
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// For `rows` rows of inputs and `depth` inputs a step.
    fn new(rows: usize, depth: usize) -> Self {
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        for register in 0..8 {
            (config.row_bytes[register], config.rows[register]) = match register {
                0 | 1 => (64, rows as u8),
                2 | 3 => (64, (depth / 4) as u8),
                _ => (depth as u16, rows as u8),
            };
        }
        config
    }
}

/// Tile registers in use by this thread, released when dropped.
struct Registers;

impl Registers {
    /// # Safety
    /// The machine has AMX and the process may use it.
    unsafe fn configure(config: &Config) -> Self {
        // SAFETY: the operand is 64 bytes in the format the instruction reads.
        unsafe { asm!("ldtilecfg [{0}]", in(reg) config, options(nostack, readonly)) };
        Self
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: a `Registers` exists only where AMX may be used.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Loads the inputs of step $i of a chunk into its register.
macro_rules! load_inputs {
    ($register:literal, $at:expr) => {
        asm!(
            concat!("tileloadd ", $register, ", [{at} + {stride}]"),
            at = in(reg) $at, stride = in(reg) 64usize, options(nostack, readonly)
        )
    };
}

/// Product register = 0 (if $first) + inputs * weights; stored if $last.
macro_rules! multiply {
    ($c:literal, $w:literal, $x:literal, $op:literal, $first:expr, $last:expr, $weights:expr, $out:expr) => {{
        if $first {
            asm!(concat!("tilezero ", $c), options(nostack, nomem));
        }
        asm!(
            concat!("tileloadd ", $w, ", [{at} + {stride}]"),
            concat!($op, " ", $c, ", ", $x, ", ", $w),
            at = in(reg) $weights, stride = in(reg) 64usize, options(nostack, readonly)
        );
        if $last {
            asm!(
                concat!("tilestored [{at} + {stride}], ", $c),
                at = in(reg) $out, stride = in(reg) 64usize, options(nostack)
            );
        }
    }};
}

/// See `portable::tile`.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, and the process may use them; `sums` has 64 values
/// for each row of `input`'s blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) unsafe fn tile(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Input<'_>,
    sums: &mut [f32],
) {
    // SAFETY: as the caller promises; the number of rows is that of the input's blocks.
    unsafe {
        match (matrix.spec().bits, input.rows) {
            (4, 1) => rows::<4, 1>(matrix, tile, blocks, input, sums),
            (4, 2) => rows::<4, 2>(matrix, tile, blocks, input, sums),
            (4, 3) => rows::<4, 3>(matrix, tile, blocks, input, sums),
            (4, 4) => rows::<4, 4>(matrix, tile, blocks, input, sums),
            (4, 8) => rows::<4, 8>(matrix, tile, blocks, input, sums),
            (4, _) => rows::<4, 16>(matrix, tile, blocks, input, sums),
            (_, 1) => rows::<8, 1>(matrix, tile, blocks, input, sums),
            (_, 2) => rows::<8, 2>(matrix, tile, blocks, input, sums),
            (_, 3) => rows::<8, 3>(matrix, tile, blocks, input, sums),
            (_, 4) => rows::<8, 4>(matrix, tile, blocks, input, sums),
            (_, 8) => rows::<8, 8>(matrix, tile, blocks, input, sums),
            _ => rows::<8, 16>(matrix, tile, blocks, input, sums),
        }
    }
}

/// # Safety
/// As `tile`; the matrix has BITS bits and the input's blocks ROWS rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn rows<const BITS: u8, const ROWS: usize>(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Input<'_>,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    // Inputs of a step, steps of a group, steps of the whole.
    let depth = spec.group.min(64);
    let per_group = spec.group / depth;
    let steps = spec.groups() * per_group;
    let bytes = &matrix.bytes()[spec.tile_offset(tile, 0)..];
    let row_blocks = input.m.div_ceil(ROWS);
    sums[..row_blocks * ROWS * TILE].fill(0.0);
    let mut unpacked = Buffer([0; WEIGHTS * REGISTER]);
    let mut products = Buffer([0; 2 * REGISTER]);
    // SAFETY: as the caller promises.
    let _registers = unsafe { Registers::configure(&Config::new(ROWS, depth)) };
    for first in (0..steps).step_by(STEPS) {
        let count = STEPS.min(steps - first);
        let chunk = Chunk {
            at: bytes[first / per_group * spec.tile_bytes()..].as_ptr(),
            count,
            depth,
            per_group,
        };
        // SAFETY: the chunk's tiles are in the matrix; the buffer holds their weights.
        unsafe {
            if BITS == 4 {
                chunk.unpack(matrix, blocks.clone(), &mut unpacked.0);
            }
            for row_block in 0..row_blocks {
                chunk.multiply::<BITS, ROWS>(
                    matrix,
                    blocks.clone(),
                    input,
                    (row_block, first),
                    &unpacked.0,
                    &mut products.0,
                    sums[row_block * ROWS * TILE..].as_mut_ptr(),
                );
            }
        }
    }
}

/// Some steps of k of one tile.
struct Chunk {
    /// The first group's tile.
    at: *const u8,
    /// Steps.
    count: usize,
    /// Inputs of a step.
    depth: usize,
    /// Steps of a group.
    per_group: usize,
}

impl Chunk {
    /// Takes 4-bit codes apart into registers [block][step], the zero point already subtracted: a
    /// code less a zero point of 4 bits is an i8.
    ///
    /// # Safety
    /// `at` points to `count / per_group` tiles of the matrix, `out` has room for `WEIGHTS`
    /// registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn unpack(&self, matrix: &PackedMatrix, blocks: Range<usize>, out: &mut [u8]) {
        let spec = matrix.spec();
        // In each i32, its first byte four times.
        let first_byte =
            _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0C0C_0C0C));
        for group in 0..self.count / self.per_group {
            // SAFETY: as the caller promises.
            unsafe {
                let tile = self.at.add(group * spec.tile_bytes());
                for block in blocks.clone() {
                    // Each output's zero point in the four bytes of its quad.
                    let zeros = Head::load(tile, block, spec.zero, 4).zeros;
                    let zeros = _mm512_shuffle_epi8(zeros, first_byte);
                    let lines = tile.add(spec.head_bytes() + block * spec.block_bytes());
                    for step in 0..self.per_group {
                        let lines = lines.add(step * self.depth / 8 * 64);
                        let register = block * STEPS + group * self.per_group + step;
                        let out = out.as_mut_ptr().add(register * REGISTER);
                        for line in 0..self.depth / 8 {
                            let packed = _mm512_loadu_si512(lines.add(line * 64).cast());
                            let (even, odd) = halves(packed);
                            let out = out.add(line * 128);
                            _mm512_store_si512(out.cast(), _mm512_sub_epi8(even, zeros));
                            _mm512_store_si512(out.add(64).cast(), _mm512_sub_epi8(odd, zeros));
                        }
                    }
                }
            }
        }
    }

    /// Adds the chunk's products to the sums of one block of rows; `position` is the block's number
    /// and the chunk's first step.
    ///
    /// # Safety
    /// As `tile`; `sums` points to the block's ROWS x 64 sums.
    #[expect(
        clippy::too_many_arguments,
        reason = "the innermost step has this much to know"
    )]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn multiply<const BITS: u8, const ROWS: usize>(
        &self,
        matrix: &PackedMatrix,
        blocks: Range<usize>,
        input: &Input<'_>,
        (row_block, first): (usize, usize),
        unpacked: &[u8],
        products: &mut [u8],
        sums: *mut f32,
    ) {
        let spec = matrix.spec();
        // SAFETY: as the caller promises.
        unsafe {
            let codes = input.codes.as_ptr().add(row_block * ROWS * input.width);
            let inputs = |step: usize| {
                let input = (first + step) * self.depth;
                codes.add(input / 64 * ROWS * 64 + input % 64)
            };
            load_inputs!("tmm4", inputs(0));
            if self.count > 1 {
                load_inputs!("tmm5", inputs(1));
            }
            if self.count > 2 {
                load_inputs!("tmm6", inputs(2));
            }
            if self.count > 3 {
                load_inputs!("tmm7", inputs(3));
            }
            let out = products.as_mut_ptr();
            let weights = |block: usize, step: usize| {
                if BITS == 4 {
                    return unpacked.as_ptr().add((block * STEPS + step) * REGISTER);
                }
                let group = step / self.per_group * spec.tile_bytes() + spec.head_bytes();
                let step = step % self.per_group * self.depth * BLOCK;
                self.at.add(group + block * spec.block_bytes() + step)
            };
            // Tile work runs one step ahead of the float work on its product.
            let issue = |block: usize, step: usize| {
                let new = step % self.per_group == 0;
                let done = step % self.per_group == self.per_group - 1;
                let at = weights(block, step);
                let even = out;
                let odd = out.add(REGISTER);
                // With two steps a group the product of a group is in one register.
                match (BITS, step, self.per_group) {
                    (4, 0, _) => multiply!("tmm0", "tmm2", "tmm4", "tdpbssd", new, done, at, even),
                    (4, 1, 1) => multiply!("tmm1", "tmm3", "tmm5", "tdpbssd", new, done, at, odd),
                    (4, 2, 1) => multiply!("tmm0", "tmm2", "tmm6", "tdpbssd", new, done, at, even),
                    (4, 3, 1) => multiply!("tmm1", "tmm3", "tmm7", "tdpbssd", new, done, at, odd),
                    (4, 1, _) => multiply!("tmm0", "tmm3", "tmm5", "tdpbssd", new, done, at, even),
                    (4, 2, _) => multiply!("tmm1", "tmm2", "tmm6", "tdpbssd", new, done, at, odd),
                    (4, _, _) => multiply!("tmm1", "tmm3", "tmm7", "tdpbssd", new, done, at, odd),
                    (_, 0, _) => multiply!("tmm0", "tmm2", "tmm4", "tdpbsud", new, done, at, even),
                    (_, 1, 1) => multiply!("tmm1", "tmm3", "tmm5", "tdpbsud", new, done, at, odd),
                    (_, 2, 1) => multiply!("tmm0", "tmm2", "tmm6", "tdpbsud", new, done, at, even),
                    (_, 3, 1) => multiply!("tmm1", "tmm3", "tmm7", "tdpbsud", new, done, at, odd),
                    (_, 1, _) => multiply!("tmm0", "tmm3", "tmm5", "tdpbsud", new, done, at, even),
                    (_, 2, _) => multiply!("tmm1", "tmm2", "tmm6", "tdpbsud", new, done, at, odd),
                    (_, _, _) => multiply!("tmm1", "tmm3", "tmm7", "tdpbsud", new, done, at, odd),
                }
            };
            let issue_group = |block: usize, group: usize| {
                for step in group * self.per_group..(group + 1) * self.per_group {
                    issue(block, step);
                }
            };
            let groups = self.count / self.per_group;
            let first_group = first / self.per_group;
            // An odd number of groups leaves no free buffer for the next block's first product.
            let ahead = groups % 2 == 0;
            for block in blocks.clone() {
                if block == blocks.start || !ahead {
                    issue_group(block, 0);
                }
                let mut acc = [_mm512_setzero_ps(); ROWS];
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_loadu_ps(sums.add(r * TILE + block * BLOCK));
                }
                for group in 0..groups {
                    if group + 1 < groups {
                        issue_group(block, group + 1);
                    } else if ahead && block + 1 < blocks.end {
                        issue_group(block + 1, 0);
                    }
                    let tile = self.at.add(group * spec.tile_bytes());
                    let head = Head::load(tile, block, spec.zero, BITS);
                    let index = (row_block * input.groups + first_group + group) * ROWS;
                    let scales = input.scales.as_ptr().add(index);
                    let totals = input.sums.as_ptr().add(index);
                    let product = out.add(group % 2 * REGISTER);
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let mut d = _mm512_load_si512(product.add(r * 64).cast());
                        if BITS == 8 && spec.zero != ZeroKind::Min {
                            d = _mm512_add_epi32(d, head.correction(*totals.add(r)));
                        }
                        *acc = head.add(spec.zero, *acc, d, *scales.add(r), *totals.add(r));
                    }
                }
                for (r, acc) in acc.iter().enumerate() {
                    _mm512_storeu_ps(sums.add(r * TILE + block * BLOCK), *acc);
                }
            }
        }
    }
}

/// Multiplies full registers `macs / 16384` times, in four chains.
///
/// # Safety
/// The machine has AMX and the process may use it.
pub(crate) unsafe fn peak(macs: usize) {
    let mut config = Config::new(16, 64);
    for register in 2..8 {
        (config.row_bytes[register], config.rows[register]) = (64, 16);
    }
    // SAFETY: as the caller promises; the registers are zero after they are configured.
    unsafe {
        let _registers = Registers::configure(&config);
        for _ in 0..macs / (16_384 * 4) {
            asm!(
                "tdpbsud tmm0, tmm4, tmm5",
                "tdpbsud tmm1, tmm4, tmm5",
                "tdpbsud tmm2, tmm6, tmm7",
                "tdpbsud tmm3, tmm6, tmm7",
                options(nostack, nomem)
            );
        }
    }
}
