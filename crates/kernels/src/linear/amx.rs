//! The packed product with AMX: one instruction multiplies 16 rows x 64 inputs by 64 inputs x 16
//! outputs. The products are exact i32, and the float steps are those of AVX-512.
//!
//! Stable Rust has no AMX intrinsics, so the tile instructions are written as assembly. Nothing
//! else in the program uses tile registers; they are configured on entry and released on exit.
//!
//! A unit is 64 outputs x one block of rows x one group. Tile instructions execute in order and a
//! product takes some fifty cycles, so the work is a pipeline over units: while the float steps of
//! one unit run, the products of the next are stored and those of the one after it are issued, block
//! by block of outputs, and the codes of the next group are taken apart.
//!
//! Tile instructions keep the second 512-bit floating point unit off (measured on Sapphire Rapids),
//! which leaves the three float operations of a product's row as the limit.
//!
//! Registers: 0 to 3 the products of a unit's four blocks; 4, 5 inputs; 6, 7 weights.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

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
/// Loads and stores whose addresses agree in their lower 12 bits hold each other up. So the weights
/// start at a page, products and sums half a page off, and a step stores half a page from where it
/// loads weights.
#[repr(C, align(4096))]
struct Buffers {
    /// [group % 2][block][product of the group]
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

/// Inputs at $at into register $x.
macro_rules! load {
    ($x:literal, $at:expr) => {
        asm!(
            concat!("tileloadd ", $x, ", [{at} + {stride}]"),
            at = in(reg) $at, stride = in(reg) 64usize, options(nostack, readonly)
        )
    };
}

/// Product register $c += inputs in $x * weights at $weights, by way of $w.
macro_rules! multiply {
    ($c:literal, $x:literal, $w:literal, $weights:expr) => {
        asm!(
            concat!("tileloadd ", $w, ", [{at} + {stride}]"),
            concat!("tdpbssd ", $c, ", ", $x, ", ", $w),
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

/// See `portable::tile`; all four blocks of a tile whose group is 64 or 128.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, and the process may use them; `input` has room
/// for 8 or a multiple of 16 rows, for each of which `sums` has 64 values.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) unsafe fn tile(matrix: &PackedMatrix, tile: usize, input: &Slab<'_>, sums: &mut [f32]) {
    let spec = matrix.spec();
    macro_rules! rows {
        ($bits:literal, $zero:expr, $per_group:literal) => {
            // SAFETY: as the caller promises; the constants are the matrix's and the input's.
            unsafe {
                match input.rows {
                    8 => of::<$bits, { $zero }, $per_group, 8>(matrix, tile, input, sums),
                    _ => of::<$bits, { $zero }, $per_group, 16>(matrix, tile, input, sums),
                }
            }
        };
    }
    match (spec.bits, spec.zero, spec.group) {
        (4, ZeroKind::Min, 128) => rows!(4, MIN, 2),
        (4, ZeroKind::Min, _) => rows!(4, MIN, 1),
        (4, _, 128) => rows!(4, DONE, 2),
        (4, _, _) => rows!(4, DONE, 1),
        (_, ZeroKind::Symmetric, 128) => rows!(8, DONE, 2),
        (_, ZeroKind::Symmetric, _) => rows!(8, DONE, 1),
        (_, ZeroKind::Point, 128) => rows!(8, POINT, 2),
        (_, ZeroKind::Point, _) => rows!(8, POINT, 1),
        (_, ZeroKind::Min, 128) => rows!(8, MIN, 2),
        (_, ZeroKind::Min, _) => rows!(8, MIN, 1),
    }
}

/// What is left to do for the zeros: nothing, since they were taken off the codes,
const DONE: u8 = 0;
/// to add (128 - zero) * sum to the products, since 128 was taken off the codes,
const POINT: u8 = 1;
/// to add the minima, and 128 * sum if codes have 8 bits.
const MIN: u8 = 2;

/// PER_GROUP is the products of a group: 2 if it has 128 inputs.
///
/// # Safety
/// As `tile`; the constants are the matrix's, and the input has room for a multiple of ROWS.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn of<const BITS: u8, const ZERO: u8, const PER_GROUP: usize, const ROWS: usize>(
    matrix: &PackedMatrix,
    tile: usize,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    let mut buffers = MaybeUninit::<Buffers>::uninit();
    let buffers = buffers.as_mut_ptr();
    // SAFETY: as the caller promises; the matrix holds the tile, and the buffers' fields are places
    // only.
    unsafe {
        let _registers = Registers::configure(&Config::new(ROWS));
        let work = Work::<BITS, ZERO, PER_GROUP, ROWS> {
            at: matrix.bytes()[spec.tile_offset(tile, 0)..].as_ptr(),
            groups: spec.groups(),
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
        work.run(sums);
    }
}

/// All of the work on a tile and a slab of rows, for matrices and inputs of the constants' kind.
struct Work<'a, const BITS: u8, const ZERO: u8, const PER_GROUP: usize, const ROWS: usize> {
    /// The first group's tile.
    at: *const u8,
    groups: usize,
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
    group: usize,
    row_block: usize,
}

impl<const BITS: u8, const ZERO: u8, const PER_GROUP: usize, const ROWS: usize>
    Work<'_, BITS, ZERO, PER_GROUP, ROWS>
{
    /// # Safety
    /// The fields describe a tile and a slab of rows as `of` does; `out` has 64 values for each row.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn run(&self, out: &mut [f32]) {
        // SAFETY: as the caller promises; the constants are blocks of outputs.
        unsafe {
            for block in 0..BLOCKS {
                self.unpack(0, block);
            }
            for line in 0..self.row_blocks * BLOCKS * ROWS {
                _mm512_storeu_ps(self.sums.add(line * BLOCK), _mm512_setzero_ps());
            }
            let mut now = Unit {
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
            while now.group < self.groups {
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
                now = next;
                next = later;
            }
            for row_block in 0..self.row_blocks {
                for row in 0..ROWS {
                    let out = &mut out[(row_block * ROWS + row) * TILE..][..TILE];
                    for (block, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                        let at = self.sums_of(row_block, block).add(row * BLOCK);
                        _mm512_storeu_ps(out.as_mut_ptr(), _mm512_loadu_ps(at));
                    }
                }
            }
        }
    }

    /// The unit after `unit`; past the last, `group` is no group.
    #[inline(always)]
    fn after(&self, mut unit: Unit) -> Unit {
        unit.row_block += 1;
        if unit.row_block == self.row_blocks {
            unit.row_block = 0;
            unit.group += 1;
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

    /// Where the weights of a group and block are.
    ///
    /// # Safety
    /// As `run`.
    #[inline(always)]
    unsafe fn weights_of(&self, group: usize, block: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe {
            self.weights
                .add((group % 2 * 2 * BLOCKS + block * PER_GROUP) * REGISTER)
        }
    }

    /// Takes the codes of one block and group apart into registers, with the zero point (4 bits) or
    /// 128 (8 bits) already taken off: that makes them an i8.
    ///
    /// # Safety
    /// As `run`.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn unpack(&self, group: usize, block: usize) {
        if group >= self.groups {
            return;
        }
        // SAFETY: the group is in the tile; prefetches may go anywhere.
        unsafe {
            let tile = self.at.add(group * self.tile_bytes);
            let codes = self.head_bytes + block * self.block_bytes;
            // The same part of a later group, with the head for the first block.
            let ahead = tile.wrapping_add(AHEAD * self.tile_bytes);
            let mut line = if block == 0 { 0 } else { codes };
            while line < codes + self.block_bytes {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line).cast());
                line += 64;
            }
            let lines = tile.add(codes);
            let out = self.weights_of(group, block);
            if BITS == 8 {
                for product in 0..PER_GROUP {
                    let (lines, out) = (lines.add(product * REGISTER), out.add(product * REGISTER));
                    for line in 0..DEPTH / 4 {
                        let codes = _mm512_loadu_si512(lines.add(line * 64).cast());
                        let signed = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
                        _mm512_store_si512(out.add(line * 64).cast(), signed);
                    }
                }
                return;
            }
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
    /// group are taken apart; their place was last read by the group before this one.
    ///
    /// # Safety
    /// As `run`, at that place in the order of units; the register was stored.
    #[inline(always)]
    unsafe fn issue<const BLOCK: usize>(&self, unit: Unit) {
        if unit.group >= self.groups {
            return;
        }
        // SAFETY: as the caller promises.
        unsafe {
            let inputs = |unit: Unit, product: usize| {
                let at = (unit.group * PER_GROUP + product) * DEPTH;
                let at = self.input.at(unit.row_block * ROWS, at);
                self.input.codes.as_ptr().wrapping_add(at)
            };
            // A quarter of the inputs of the next unit.
            let next = self.after(unit);
            for product in 0..PER_GROUP {
                for line in BLOCK * ROWS / 4..(BLOCK + 1) * ROWS / 4 {
                    let ahead = inputs(next, product).wrapping_add(line * 64);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                }
            }
            let weights = self.weights_of(unit.group, BLOCK);
            if BLOCK == 0 {
                load!("tmm4", inputs(unit, 0));
                if PER_GROUP == 2 {
                    load!("tmm5", inputs(unit, 1));
                }
            }
            macro_rules! block {
                ($c:literal) => {{
                    asm!(concat!("tilezero ", $c), options(nostack, nomem));
                    multiply!($c, "tmm4", "tmm6", weights);
                    if PER_GROUP == 2 {
                        multiply!($c, "tmm5", "tmm7", weights.add(REGISTER));
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
                self.unpack(unit.group + 1, (BLOCK + 2) % BLOCKS);
            }
        }
    }

    /// Stores the product of one block of a unit.
    ///
    /// # Safety
    /// As `run`, at that place in the order of units.
    #[inline(always)]
    unsafe fn store<const BLOCK: usize>(&self, unit: Unit) {
        if unit.group >= self.groups {
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

    /// The float steps of one block of a unit.
    ///
    /// # Safety
    /// As `run`; the product was stored.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add(&self, unit: Unit, block: usize) {
        // SAFETY: as the caller promises.
        unsafe {
            let tile = self.at.add(unit.group * self.tile_bytes);
            let mut head = match ZERO {
                MIN => Head::load::<true>(tile, block, &self.zeros),
                _ => Head::load::<false>(tile, block, &self.zeros),
            };
            // What is still to be taken off, in the lower 16 bits.
            let zeros = _mm512_sub_epi32(head.zeros, _mm512_set1_epi32(128));
            head.zeros = _mm512_and_si512(zeros, _mm512_set1_epi32(0xFFFF));
            let index = unit.group * self.input.rows + unit.row_block * ROWS;
            let scales = self.input.scales.as_ptr().add(index);
            let totals = self.input.sums.as_ptr().add(index);
            let products = self.products.add(block * REGISTER);
            let sums = self.sums_of(unit.row_block, block);
            for r in 0..ROWS {
                let mut d = _mm512_load_si512(products.add(r * 64).cast());
                let scale = *scales.add(r);
                if BITS == 8 && ZERO != DONE {
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
