//! The packed product with AMX: one instruction multiplies 16 rows x 64 inputs by 64 inputs x 16
//! outputs. The products are exact i32, and the float steps are those of AVX-512.
//!
//! Stable Rust has no AMX intrinsics, so the tile instructions are written as assembly. Nothing
//! else in the program uses tile registers; they are configured on entry and released on exit.
//!
//! A unit is 64 outputs x one block of rows x one group. Tile instructions execute in order and a
//! product takes some fifty cycles, so the work is a pipeline over the units of all tiles of a call:
//! while the float steps of one unit run, the products of the next are stored and those of the one
//! after it are issued, block by block of outputs, and the codes of the next group are taken apart.
//! With each row of float steps a line or so of a later group is fetched: memory has few lines on
//! their way at a time, so fetches that come in bunches would hold the program up.
//!
//! Codes of 8 bits are multiplied as they lie in the matrix, unsigned. Codes of 4 bits are taken
//! apart, and their zero point is taken off at that.
//!
//! Tile instructions keep the second 512-bit floating point unit off (measured on Sapphire Rapids),
//! which leaves the three float operations of a product's row as the limit.
//!
//! Registers: 0 to 3 the products of a unit's four blocks; 4, 5 inputs; 6, 7 weights.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::Place;
use super::input::{SLAB, Slab};
use super::vnni::{Head, ZeroPoints, halves};
use crate::packed::{BLOCK, PackedMatrix, TILE, ZeroKind};

/// Blocks of outputs of a tile: a product register each.
const BLOCKS: usize = TILE / BLOCK;
/// Inputs of a product.
const DEPTH: usize = 64;
/// Bytes of a tile register.
const REGISTER: usize = 1024;
/// Groups by which codes are fetched ahead.
const AHEAD: usize = 4;
/// Lines of codes of a block, for each bit of a code and each product of a group.
const LINES: usize = BLOCK * DEPTH / 8 / 64;
/// Loads and stores whose addresses agree in their lower 12 bits hold each other up. So the weights
/// start at a page, products and sums half a page off, and a step stores half a page from where it
/// loads weights.
#[repr(C, align(4096))]
struct Buffers {
    /// Codes of 4 bits taken apart: [group % 2][block][product of the group]
    weights: [[MaybeUninit<u8>; BLOCKS * 2 * REGISTER]; 2],
    offset: [MaybeUninit<u8>; 2048],
    /// [block]
    products: [MaybeUninit<u8>; BLOCKS * REGISTER],
    /// [row block][block][row][16]
    sums: [MaybeUninit<f32>; SLAB * TILE],
}

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
    /// For `rows` rows of inputs.
    fn new(rows: usize) -> Self {
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        for register in 0..8 {
            (config.row_bytes[register], config.rows[register]) = match register {
                0..=5 => (64, rows as u8),
                _ => (64, 16),
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

/// What is at $at into register $x.
macro_rules! load {
    ($x:literal, $at:expr) => {
        asm!(
            concat!("tileloadd ", $x, ", [{at} + {stride}]"),
            at = in(reg) $at, stride = in(reg) 64usize, options(nostack, readonly)
        )
    };
}

/// Product register $c += inputs in $x * weights at $weights, by way of $w. The instruction tells
/// whether weights are signed.
macro_rules! multiply {
    ($instruction:literal, $c:literal, $x:literal, $w:literal, $weights:expr) => {
        asm!(
            concat!("tileloadd ", $w, ", [{at} + {stride}]"),
            concat!($instruction, " ", $c, ", ", $x, ", ", $w),
            at = in(reg) $weights, stride = in(reg) 64usize, options(nostack, readonly)
        )
    };
}

/// Register $c to memory at $at.
macro_rules! store {
    ($c:literal, $at:expr) => {
        asm!(
            concat!("tilestored [{at} + {stride}], ", $c),
            at = in(reg) $at, stride = in(reg) 64usize, options(nostack)
        )
    };
}

/// All outputs of some tiles of a matrix whose group is 64 or 128; see `portable::tile`. `place` is
/// asked with a tile's number and a row of the input where the row's sums go.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, and the process may use them; `input` has room
/// for 8 or a multiple of 16 rows, and offsets if the matrix is symmetric with 8 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) unsafe fn tiles<'a>(
    matrix: &PackedMatrix,
    tiles: Range<usize>,
    input: &Slab<'_>,
    place: &dyn Fn(usize, usize) -> Place<'a>,
) {
    let spec = matrix.spec();
    macro_rules! rows {
        ($bits:literal, $zero:expr, $per_group:literal) => {
            // SAFETY: as the caller promises; the constants are the matrix's and the input's.
            unsafe {
                match input.rows {
                    8 => of::<$bits, { $zero }, $per_group, 8>(matrix, tiles, input, place),
                    _ => of::<$bits, { $zero }, $per_group, 16>(matrix, tiles, input, place),
                }
            }
        };
    }
    match (spec.bits, spec.zero, spec.group) {
        (4, ZeroKind::Min, 128) => rows!(4, MIN, 2),
        (4, ZeroKind::Min, _) => rows!(4, MIN, 1),
        (4, _, 128) => rows!(4, DONE, 2),
        (4, _, _) => rows!(4, DONE, 1),
        (_, ZeroKind::Symmetric, 128) => rows!(8, OFFSET, 2),
        (_, ZeroKind::Symmetric, _) => rows!(8, OFFSET, 1),
        (_, ZeroKind::Point, 128) => rows!(8, POINT, 2),
        (_, ZeroKind::Point, _) => rows!(8, POINT, 1),
        (_, ZeroKind::Min, 128) => rows!(8, MIN, 2),
        (_, ZeroKind::Min, _) => rows!(8, MIN, 1),
    }
}

/// What is to be done for the zeros: nothing, since they were taken off the codes,
const DONE: u8 = 0;
/// to start the products from the input's offsets, since the zero is 128 everywhere,
const OFFSET: u8 = 1;
/// to take zero * sum off the products,
const POINT: u8 = 2;
/// to add the minima.
const MIN: u8 = 3;

/// PER_GROUP is the products of a group: 2 if it has 128 inputs.
///
/// # Safety
/// As `tiles`; the constants are the matrix's, and the input has room for a multiple of ROWS.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn of<'a, const BITS: u8, const ZERO: u8, const PER_GROUP: usize, const ROWS: usize>(
    matrix: &PackedMatrix,
    tiles: Range<usize>,
    input: &Slab<'_>,
    place: &dyn Fn(usize, usize) -> Place<'a>,
) {
    let spec = matrix.spec();
    let mut buffers = MaybeUninit::<Buffers>::uninit();
    let buffers = buffers.as_mut_ptr();
    // SAFETY: as the caller promises; the matrix holds the tiles, and the buffers' fields are places
    // only.
    unsafe {
        let _registers = Registers::configure(&Config::new(ROWS));
        let work = Work::<BITS, ZERO, PER_GROUP, ROWS> {
            at: matrix.bytes()[spec.tile_offset(tiles.start, 0)..].as_ptr(),
            groups: spec.groups(),
            steps: tiles.len() * spec.groups(),
            tile_bytes: spec.tile_bytes(),
            head_bytes: spec.head_bytes(),
            block_bytes: spec.block_bytes(),
            zeros: ZeroPoints::of(matrix),
            input,
            row_blocks: input.m.div_ceil(ROWS),
            weights: (&raw mut (*buffers).weights).cast(),
            products: (&raw mut (*buffers).products).cast(),
            sums: (&raw mut (*buffers).sums).cast(),
        };
        work.run(&|tile, row| place(tiles.start + tile, row));
    }
}

/// All of the work on some tiles and a slab of rows, for matrices and inputs of the constants' kind.
struct Work<'a, const BITS: u8, const ZERO: u8, const PER_GROUP: usize, const ROWS: usize> {
    /// The first group of the first tile; the others follow.
    at: *const u8,
    /// Groups of a tile.
    groups: usize,
    /// Groups of all tiles.
    steps: usize,
    tile_bytes: usize,
    head_bytes: usize,
    block_bytes: usize,
    zeros: ZeroPoints,
    input: &'a Slab<'a>,
    /// Blocks of rows in the slab.
    row_blocks: usize,
    /// See `Buffers`.
    weights: *mut u8,
    products: *mut u8,
    sums: *mut f32,
}

/// 64 outputs of a block of rows and a group.
#[derive(Clone, Copy)]
struct Unit {
    /// Which group of all tiles.
    step: usize,
    /// Which group of its tile.
    group: usize,
    row_block: usize,
}

impl<const BITS: u8, const ZERO: u8, const PER_GROUP: usize, const ROWS: usize>
    Work<'_, BITS, ZERO, PER_GROUP, ROWS>
{
    /// # Safety
    /// The fields describe tiles and a slab of rows as `of` does. `place` is as in `tiles`, but
    /// counts tiles from the first.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn run<'a>(&self, place: &dyn Fn(usize, usize) -> Place<'a>) {
        // SAFETY: as the caller promises; the constants are blocks of outputs.
        unsafe {
            for block in 0..BLOCKS {
                self.unpack(0, block);
            }
            for line in 0..self.row_blocks * BLOCKS * ROWS {
                _mm512_storeu_ps(self.sums.add(line * BLOCK), _mm512_setzero_ps());
            }
            let mut now = Unit {
                step: 0,
                group: 0,
                row_block: 0,
            };
            let mut next = self.after(now);
            self.issue::<0>(now);
            self.issue::<1>(now);
            self.issue::<2>(now);
            self.issue::<3>(now);
            self.store::<0>(now);
            self.issue::<0>(next);
            self.store::<1>(now);
            self.issue::<1>(next);
            self.store::<2>(now);
            self.issue::<2>(next);
            self.store::<3>(now);
            self.issue::<3>(next);
            let mut tile = 0;
            while now.step < self.steps {
                let later = self.after(next);
                self.add(now, 0);
                self.store::<0>(next);
                self.issue::<0>(later);
                self.add(now, 1);
                self.store::<1>(next);
                self.issue::<1>(later);
                self.add(now, 2);
                self.store::<2>(next);
                self.issue::<2>(later);
                self.add(now, 3);
                self.store::<3>(next);
                self.issue::<3>(later);
                if now.group + 1 == self.groups {
                    self.finish(now.row_block, &|row| place(tile, row));
                    tile += usize::from(next.row_block == 0);
                }
                now = next;
                next = later;
            }
        }
    }

    /// Writes the sums of a block of rows to their places and starts them anew.
    ///
    /// # Safety
    /// As `run`; all groups of the tile were added.
    #[inline(always)]
    unsafe fn finish<'a>(&self, row_block: usize, place: &dyn Fn(usize) -> Place<'a>) {
        for row in 0..ROWS.min(self.input.m - row_block * ROWS) {
            let Place { out, bias } = place(row_block * ROWS + row);
            for block in 0..BLOCKS {
                let left = out.len().saturating_sub(block * BLOCK).min(BLOCK);
                let mask = ((1u32 << left) - 1) as __mmask16;
                // SAFETY: as the caller promises; the mask leaves out what lies past the end.
                unsafe {
                    let at = self.sums_of(row_block, block).add(row * BLOCK);
                    let mut sums = _mm512_loadu_ps(at);
                    if let Some(bias) = bias {
                        let bias = bias.as_ptr().wrapping_add(block * BLOCK);
                        sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, bias));
                    }
                    let out = out.as_mut_ptr().wrapping_add(block * BLOCK);
                    _mm512_mask_storeu_ps(out, mask, sums);
                    _mm512_storeu_ps(at, _mm512_setzero_ps());
                }
            }
        }
    }

    /// The unit after `unit`; past the last, `step` is no step.
    #[inline(always)]
    fn after(&self, mut unit: Unit) -> Unit {
        unit.row_block += 1;
        if unit.row_block == self.row_blocks {
            unit.row_block = 0;
            unit.step += 1;
            unit.group += 1;
            if unit.group == self.groups {
                unit.group = 0;
            }
        }
        unit
    }

    /// Where the sums of a block of rows and outputs are.
    ///
    /// # Safety
    /// Both are in the slab.
    #[inline(always)]
    unsafe fn sums_of(&self, row_block: usize, block: usize) -> *mut f32 {
        // SAFETY: as the caller promises.
        unsafe { self.sums.add((row_block * BLOCKS + block) * ROWS * BLOCK) }
    }

    /// Where the weights of a step and block are.
    ///
    /// # Safety
    /// As `run`.
    #[inline(always)]
    unsafe fn weights_of(&self, step: usize, block: usize) -> *const u8 {
        // SAFETY: as the caller promises.
        unsafe {
            if BITS == 8 {
                self.codes_of(step, block)
            } else {
                self.unpacked(step, block)
            }
        }
    }

    /// Where the matrix has the codes of a step and block.
    ///
    /// # Safety
    /// As `run`; past the last step, the pointer may not be read.
    #[inline(always)]
    unsafe fn codes_of(&self, step: usize, block: usize) -> *const u8 {
        self.at
            .wrapping_add(step * self.tile_bytes + self.head_bytes + block * self.block_bytes)
    }

    /// Where the codes of a step and block are kept that were taken apart.
    ///
    /// # Safety
    /// As `run`.
    #[inline(always)]
    unsafe fn unpacked(&self, step: usize, block: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe {
            self.weights
                .add((step % 2 * 2 * BLOCKS + block * PER_GROUP) * REGISTER)
        }
    }

    /// Takes codes of 4 bits of one block and step apart, with the zero point already taken off: that
    /// makes them an i8.
    ///
    /// # Safety
    /// As `run`.
    #[inline(always)]
    unsafe fn unpack(&self, step: usize, block: usize) {
        if BITS == 8 || step >= self.steps {
            return;
        }
        // SAFETY: the step is in the tiles.
        unsafe {
            let tile = self.at.add(step * self.tile_bytes);
            let lines = self.codes_of(step, block);
            let out = self.unpacked(step, block);
            let zeros = Head::load::<false>(tile, block, &self.zeros).zeros;
            // In each i32, its first byte four times.
            let zeros = _mm512_shuffle_epi8(
                zeros,
                _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0C0C_0C0C)),
            );
            for product in 0..PER_GROUP {
                let (lines, out) = (
                    lines.add(product * REGISTER / 2),
                    out.add(product * REGISTER),
                );
                for line in 0..DEPTH / 8 {
                    let (even, odd) = halves(_mm512_loadu_si512(lines.add(line * 64).cast()));
                    let out = out.add(line * 128);
                    _mm512_store_si512(out.cast(), _mm512_sub_epi8(even, zeros));
                    _mm512_store_si512(out.add(64).cast(), _mm512_sub_epi8(odd, zeros));
                }
            }
        }
    }

    /// Issues the product of one block of a unit. With the last block of rows, the codes of the next
    /// step are taken apart; their place was last read by the step before this one.
    ///
    /// # Safety
    /// As `run`, at that place in the order of units; the register was stored.
    #[inline(always)]
    unsafe fn issue<const BLOCK: usize>(&self, unit: Unit) {
        if unit.step >= self.steps {
            return;
        }
        // SAFETY: as the caller promises.
        unsafe {
            let inputs = |unit: Unit, product: usize| {
                let at = (unit.group * PER_GROUP + product) * DEPTH;
                let at = self.input.at(unit.row_block * ROWS, at);
                self.input.codes.as_ptr().wrapping_add(at)
            };
            let offsets = |unit: Unit| {
                let row = unit.group * self.input.rows + unit.row_block * ROWS;
                self.input.offsets.as_ptr().wrapping_add(row * 16)
            };
            // A quarter of the inputs of the next unit.
            let next = self.after(unit);
            for line in BLOCK * ROWS / 4..(BLOCK + 1) * ROWS / 4 {
                for product in 0..PER_GROUP {
                    let ahead = inputs(next, product).wrapping_add(line * 64);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                }
                if ZERO == OFFSET {
                    _mm_prefetch::<_MM_HINT_T0>(offsets(next).wrapping_add(line * 16).cast());
                }
            }
            let weights = self.weights_of(unit.step, BLOCK);
            if BLOCK == 0 {
                load!("tmm4", inputs(unit, 0));
                if PER_GROUP == 2 {
                    load!("tmm5", inputs(unit, 1));
                }
            }
            macro_rules! block {
                ($c:literal) => {{
                    if ZERO == OFFSET {
                        load!($c, offsets(unit));
                    } else {
                        asm!(concat!("tilezero ", $c), options(nostack, nomem));
                    }
                    if BITS == 8 {
                        multiply!("tdpbsud", $c, "tmm4", "tmm6", weights);
                    } else {
                        multiply!("tdpbssd", $c, "tmm4", "tmm6", weights);
                    }
                    if PER_GROUP == 2 && BITS == 8 {
                        multiply!("tdpbsud", $c, "tmm5", "tmm7", weights.add(REGISTER));
                    } else if PER_GROUP == 2 {
                        multiply!("tdpbssd", $c, "tmm5", "tmm7", weights.add(REGISTER));
                    }
                }};
            }
            match BLOCK {
                0 => block!("tmm0"),
                1 => block!("tmm1"),
                2 => block!("tmm2"),
                _ => block!("tmm3"),
            }
            if unit.row_block + 1 == self.row_blocks {
                // Half a page from the weights that this step loads.
                self.unpack(unit.step + 1, (BLOCK + 2) % BLOCKS);
            }
        }
    }

    /// Stores the product of one block of a unit.
    ///
    /// # Safety
    /// As `run`, at that place in the order of units.
    #[inline(always)]
    unsafe fn store<const BLOCK: usize>(&self, unit: Unit) {
        if unit.step >= self.steps {
            return;
        }
        // SAFETY: as the caller promises.
        unsafe {
            let out = self.products.add(BLOCK * REGISTER);
            match BLOCK {
                0 => store!("tmm0", out),
                1 => store!("tmm1", out),
                2 => store!("tmm2", out),
                _ => store!("tmm3", out),
            }
        }
    }

    /// The float steps of one block of a unit. With the first block of rows, the same block of a later
    /// step is fetched.
    ///
    /// # Safety
    /// As `run`; the product was stored.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add(&self, unit: Unit, block: usize) {
        // SAFETY: as the caller promises; prefetches may go anywhere.
        unsafe {
            let tile = self.at.add(unit.step * self.tile_bytes);
            let head = match ZERO {
                MIN => Head::load::<true>(tile, block, &self.zeros),
                _ => Head::load::<false>(tile, block, &self.zeros),
            };
            let index = unit.group * self.input.rows + unit.row_block * ROWS;
            let scales = self.input.scales.as_ptr().add(index);
            let totals = self.input.sums.as_ptr().add(index);
            let products = self.products.add(block * REGISTER);
            let sums = self.sums_of(unit.row_block, block);
            let ahead = self.codes_of(unit.step + AHEAD, block);
            let fetch = unit.row_block == 0;
            if fetch {
                // A line of the head: it has no more than four.
                let head = tile.wrapping_add(AHEAD * self.tile_bytes + block * 64);
                _mm_prefetch::<_MM_HINT_T0>(head.cast());
            }
            for r in 0..ROWS {
                if fetch {
                    let lines = LINES * BITS as usize * PER_GROUP;
                    for line in r * lines / ROWS..(r + 1) * lines / ROWS {
                        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line * 64).cast());
                    }
                }
                let mut d = _mm512_load_si512(products.add(r * 64).cast());
                let scale = *scales.add(r);
                if ZERO == POINT {
                    d = _mm512_add_epi32(d, head.correction(*totals.add(r)));
                }
                let acc = _mm512_loadu_ps(sums.add(r * BLOCK));
                let acc = match ZERO {
                    MIN => head.add::<true>(acc, d, scale, *totals.add(r)),
                    _ => head.add::<false>(acc, d, scale, 0),
                };
                _mm512_storeu_ps(sums.add(r * BLOCK), acc);
            }
        }
    }
}

/// Multiplies full registers `macs / 16384` times, in four chains.
///
/// # Safety
/// The machine has AMX and the process may use it.
pub(crate) unsafe fn peak(macs: usize) {
    let mut config = Config::new(16);
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
