//! Decoding of ggml's quantised blocks into groups of 32 codes.
//!
//! In every type but Q6_K a group of 32 values has one scale, and perhaps one minimum:
//! w = scale * (code - zero) + min. Q6_K has a scale for each 16 values:
//! w = scale[i / 16] * (code - 32). Layouts are those of ggml's `ggml-common.h` and
//! `ggml-quants.c`; scales and minima are exact here (f16 times an integer of 8 bits fits f32).

use half::f16;

/// Values in a group.
pub(super) const GROUP: usize = 32;

/// A group whose values share one scale.
pub(super) struct Group {
    pub codes: [u8; GROUP],
    pub scale: f32,
    /// 0 where the type has no minimum.
    pub min: f32,
}

/// A block type made of [`Group`]s.
pub(super) trait Block {
    /// Bytes of a block.
    const BYTES: usize;
    /// Groups in a block.
    const GROUPS: usize;
    /// Code that stands for 0 (for the minimum, in types that have one).
    const ZERO: u8;

    /// Decode group `index` of a block of [`Block::BYTES`] bytes.
    fn group(block: &[u8], index: usize) -> Group;
}

/// 4 bits around 8.
pub(super) struct Q4_0;
/// 4 bits from a minimum.
pub(super) struct Q4_1;
/// 5 bits around 16.
pub(super) struct Q5_0;
/// 5 bits from a minimum.
pub(super) struct Q5_1;
/// 8 bits around 0, here shifted by 128 so that codes are unsigned.
pub(super) struct Q8_0;
/// 8 groups of 4 bits from a minimum, scales and minima of 6 bits.
pub(super) struct Q4K;
/// 8 groups of 5 bits from a minimum, scales and minima of 6 bits.
pub(super) struct Q5K;

impl Block for Q4_0 {
    const BYTES: usize = 18;
    const GROUPS: usize = 1;
    const ZERO: u8 = 8;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        Group {
            codes: nibbles(&block[2..18]),
            scale: float(block, 0),
            min: 0.0,
        }
    }
}

impl Block for Q4_1 {
    const BYTES: usize = 20;
    const GROUPS: usize = 1;
    const ZERO: u8 = 0;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        Group {
            codes: nibbles(&block[4..20]),
            scale: float(block, 0),
            min: float(block, 2),
        }
    }
}

impl Block for Q5_0 {
    const BYTES: usize = 22;
    const GROUPS: usize = 1;
    const ZERO: u8 = 16;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        let mut codes = nibbles(&block[6..22]);
        add_fifth_bits(&mut codes, &block[2..6]);
        Group {
            codes,
            scale: float(block, 0),
            min: 0.0,
        }
    }
}

impl Block for Q5_1 {
    const BYTES: usize = 24;
    const GROUPS: usize = 1;
    const ZERO: u8 = 0;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        let mut codes = nibbles(&block[8..24]);
        add_fifth_bits(&mut codes, &block[4..8]);
        Group {
            codes,
            scale: float(block, 0),
            min: float(block, 2),
        }
    }
}

impl Block for Q8_0 {
    const BYTES: usize = 34;
    const GROUPS: usize = 1;
    const ZERO: u8 = 128;

    #[inline(always)]
    fn group(block: &[u8], _: usize) -> Group {
        let mut codes = [0; GROUP];
        for (code, &byte) in codes.iter_mut().zip(&block[2..34]) {
            *code = byte ^ 0x80;
        }
        Group {
            codes,
            scale: float(block, 0),
            min: 0.0,
        }
    }
}

impl Block for Q4K {
    const BYTES: usize = 144;
    const GROUPS: usize = 8;
    const ZERO: u8 = 0;

    #[inline(always)]
    fn group(block: &[u8], index: usize) -> Group {
        let shift = 4 * (index % 2);
        let mut codes = [0; GROUP];
        for (code, &byte) in codes.iter_mut().zip(&block[16 + index / 2 * 32..][..32]) {
            *code = (byte >> shift) & 15;
        }
        let (scale, min) = scale_and_min(block, index);
        Group { codes, scale, min }
    }
}

impl Block for Q5K {
    const BYTES: usize = 176;
    const GROUPS: usize = 8;
    const ZERO: u8 = 0;

    #[inline(always)]
    fn group(block: &[u8], index: usize) -> Group {
        let shift = 4 * (index % 2);
        let mut codes = [0; GROUP];
        let low = &block[48 + index / 2 * 32..][..32];
        for ((code, &low), &high) in codes.iter_mut().zip(low).zip(&block[16..48]) {
            *code = ((low >> shift) & 15) | (((high >> index) & 1) << 4);
        }
        let (scale, min) = scale_and_min(block, index);
        Group { codes, scale, min }
    }
}

/// Bytes of a Q6_K block of 8 groups.
pub(super) const Q6K_BYTES: usize = 210;

/// Group `index` of a Q6_K block: codes around 32, the integer scales of its two halves, and
/// the factor that both scales are multiplied with.
#[inline(always)]
pub(super) fn q6k_group(block: &[u8], index: usize) -> ([u8; GROUP], [i8; 2], f32) {
    let (half, part) = (index / 4, index % 4);
    let low = &block[64 * half + 32 * (part % 2)..][..32];
    let high = &block[128 + 32 * half..][..32];
    let (low_shift, high_shift) = (4 * (part / 2), 2 * part);
    let mut codes = [0; GROUP];
    for ((code, &low), &high) in codes.iter_mut().zip(low).zip(high) {
        *code = ((low >> low_shift) & 15) | (((high >> high_shift) & 3) << 4);
    }
    let scales = [
        block[192 + 2 * index] as i8,
        block[192 + 2 * index + 1] as i8,
    ];
    (codes, scales, float(block, 208))
}

/// As `f16::to_f32`, which asks the processor for its abilities first: too slow once a group.
#[inline(always)]
pub(super) fn to_f32(value: f16) -> f32 {
    value.to_f32_const()
}

/// As `f16::from_f32`, see [`to_f32`].
#[inline(always)]
pub(super) fn from_f32(value: f32) -> f16 {
    f16::from_f32_const(value)
}

/// The f16 at a byte of a block, as f32.
#[inline(always)]
fn float(block: &[u8], at: usize) -> f32 {
    to_f32(f16::from_le_bytes([block[at], block[at + 1]]))
}

/// 16 bytes hold the first 16 codes in their low and the last 16 in their high halves.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [u8; GROUP] {
    let mut codes = [0; GROUP];
    let (low, high) = codes.split_at_mut(GROUP / 2);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
        *low = byte & 15;
        *high = byte >> 4;
    }
    codes
}

/// For each byte, 16 wherever one of its 8 bits is set.
static FIFTH_BITS: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut index = 0;
    while index < 256 * 8 {
        table[index / 8][index % 8] = (((index / 8) >> (index % 8)) as u8 & 1) << 4;
        index += 1;
    }
    table
};

/// Add the fifth bit of 32 codes, one bit each in 4 bytes.
#[inline(always)]
fn add_fifth_bits(codes: &mut [u8; GROUP], bits: &[u8]) {
    for (codes, &bits) in codes.chunks_exact_mut(8).zip(bits) {
        for (code, &bit) in codes.iter_mut().zip(&FIFTH_BITS[usize::from(bits)]) {
            *code |= bit;
        }
    }
}

/// Scale and minimum of a group of a Q4_K or Q5_K block. Their 6-bit factors share 12 bytes:
/// groups 0 to 3 have bytes of their own, groups 4 to 7 are spread over the top two bits of
/// those and the nibbles of the last four.
#[inline(always)]
fn scale_and_min(block: &[u8], index: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, min) = if index < 4 {
        (packed[index] & 63, packed[index + 4] & 63)
    } else {
        (
            (packed[index + 4] & 15) | (packed[index - 4] >> 6 << 4),
            (packed[index + 4] >> 4) | (packed[index] >> 6 << 4),
        )
    };
    (
        float(block, 0) * f32::from(scale),
        -(float(block, 2) * f32::from(min)),
    )
}
