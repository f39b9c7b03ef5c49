//! Rows of quantised blocks as codes, scales and minima of groups of 32, the kernels' terms.
//!
//! | type | becomes | loss |
//! |---|---|---|
//! | Q4_0 | int4, symmetric | none |
//! | Q4_1 | int4, minimum | none |
//! | Q5_0, Q8_0 | int8, symmetric | none |
//! | Q5_1 | int8, minimum | none |
//! | Q4_K | int4, minimum | a group's scale and minimum are rounded to f16 |
//! | Q5_K | int8, minimum | the same |
//! | Q6_K | int8, symmetric | values are rounded: two scales of 16 become one of 32 |

use std::ops::AddAssign;

use half::f16;

use super::blocks::{self, Block, GROUP, from_f32, to_f32};
use super::dequantise::check;
use super::format::Format;
use super::order::Order;

/// How a quantised type is kept in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Bits of a code.
    pub bits: u8,
    /// Whether groups have a minimum: w = scale * code + min. Otherwise the middle code is 0.
    pub min: bool,
    /// Whether values change.
    pub lossy: bool,
}

/// The form of a quantised type; None for floats.
pub(super) fn form(format: Format) -> Option<Form> {
    let (bits, min, lossy) = match format {
        Format::F32 | Format::F16 | Format::Bf16 => return None,
        Format::Q4_0 => (4, false, false),
        Format::Q4_1 => (4, true, false),
        Format::Q5_0 | Format::Q8_0 => (8, false, false),
        Format::Q5_1 => (8, true, false),
        Format::Q4K => (4, true, true),
        Format::Q5K => (8, true, true),
        Format::Q6K => (8, false, true),
    };
    Some(Form { bits, min, lossy })
}

/// How far values moved.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Loss {
    /// Sum of the squared changes.
    pub error: f64,
    /// Sum of the squared values.
    pub norm: f64,
}

impl Loss {
    /// Root of the ratio of the two.
    pub fn relative(&self) -> f64 {
        if self.norm > 0.0 {
            (self.error / self.norm).sqrt()
        } else {
            0.0
        }
    }
}

impl AddAssign for Loss {
    fn add_assign(&mut self, other: Loss) {
        self.error += other.error;
        self.norm += other.norm;
    }
}

/// Takes the groups of one row, in order.
pub(super) trait Sink {
    /// Group `index`: its codes, its scale and its minimum (0 where the form has none).
    fn put(&mut self, index: usize, codes: &[u8; GROUP], scale: f16, min: f16);
}

/// Decode one stored row of `count` groups. `order` says which stored group each of them is.
pub(super) fn regroup(
    format: Format,
    stored: &[u8],
    count: usize,
    order: Order,
    sink: &mut impl Sink,
) -> Result<Loss, String> {
    let row = Row {
        stored,
        count,
        order,
    };
    match format {
        Format::Q4_0 => exact::<blocks::Q4_0, 8>(row, sink),
        Format::Q4_1 => exact::<blocks::Q4_1, 0>(row, sink),
        Format::Q5_0 => exact::<blocks::Q5_0, 128>(row, sink),
        Format::Q5_1 => exact::<blocks::Q5_1, 0>(row, sink),
        Format::Q8_0 => exact::<blocks::Q8_0, 128>(row, sink),
        Format::Q4K => rounded_scales::<blocks::Q4K>(row, sink),
        Format::Q5K => rounded_scales::<blocks::Q5K>(row, sink),
        Format::Q6K => q6k(row, sink),
        Format::F32 | Format::F16 | Format::Bf16 => Err("not a quantised type".to_owned()),
    }
}

/// A stored row and the order in which its groups are wanted.
#[derive(Clone, Copy)]
struct Row<'a> {
    stored: &'a [u8],
    count: usize,
    order: Order,
}

impl Row<'_> {
    #[inline(always)]
    fn group<B: Block>(&self, index: usize) -> blocks::Group {
        let at = self.order.stored(index);
        B::group(
            &self.stored[at / B::GROUPS * B::BYTES..][..B::BYTES],
            at % B::GROUPS,
        )
    }
}

/// Types whose scales are f16 already. `ZERO` is the code for 0 in the kernels' form.
fn exact<B: Block, const ZERO: u8>(row: Row, sink: &mut impl Sink) -> Result<Loss, String> {
    for index in 0..row.count {
        let mut group = row.group::<B>(index);
        check(group.scale, group.min)?;
        for code in &mut group.codes {
            *code += ZERO - B::ZERO;
        }
        sink.put(
            index,
            &group.codes,
            from_f32(group.scale),
            from_f32(group.min),
        );
    }
    Ok(Loss::default())
}

/// Types with minima whose scales are products; these are rounded to f16.
fn rounded_scales<B: Block>(row: Row, sink: &mut impl Sink) -> Result<Loss, String> {
    let mut loss = Loss::default();
    for index in 0..row.count {
        let group = row.group::<B>(index);
        let (scale, min) = (from_f32(group.scale), from_f32(group.min));
        let rounded = (to_f32(scale), to_f32(min));
        check(rounded.0, rounded.1)?;
        sink.put(index, &group.codes, scale, min);

        // The change of a value is linear in its code, so two sums give all of them. Codes are
        // below 32: the sums fit 16 bits.
        let sum: u16 = group.codes.iter().map(|&code| u16::from(code)).sum();
        let squares: u16 = group
            .codes
            .iter()
            .map(|&code| u16::from(code) * u16::from(code))
            .sum();
        let norm = |scale: f32, min: f32| {
            let (scale, min) = (f64::from(scale), f64::from(min));
            let mixed = 2.0 * scale * min * f64::from(sum);
            (scale * scale * f64::from(squares) + mixed + min * min * GROUP as f64).max(0.0)
        };
        loss += Loss {
            error: norm(group.scale - rounded.0, group.min - rounded.1),
            norm: norm(group.scale, group.min),
        };
    }
    Ok(loss)
}

fn q6k(row: Row, sink: &mut impl Sink) -> Result<Loss, String> {
    let mut loss = Loss::default();
    for index in 0..row.count {
        let at = row.order.stored(index);
        let block = &row.stored[at / 8 * blocks::Q6K_BYTES..][..blocks::Q6K_BYTES];
        let (codes, halves, factor) = blocks::q6k_group(block, at % 8);
        check(factor, 0.0)?;
        // In units of the block's factor every value is a whole number.
        let mut values = [0.0f32; GROUP];
        let mut most = 0;
        let parts = values
            .chunks_exact_mut(16)
            .zip(codes.chunks_exact(16))
            .zip(halves);
        for ((values, codes), scale) in parts {
            let mut widest = 0;
            for (value, &code) in values.iter_mut().zip(codes) {
                let code = i16::from(code) - 32;
                widest = code.abs().max(widest);
                *value = f32::from(i16::from(scale) * code);
            }
            most = most.max(widest * i16::from(scale).abs());
        }
        let scale = from_f32(step(f32::from(most), halves) * factor);
        check(to_f32(scale), 0.0)?;
        let (error, codes) = round(&values, to_f32(scale) / factor);
        sink.put(index, &codes, scale, f16::ZERO);
        let unit = f64::from(factor) * f64::from(factor);
        let norm = sum_of(
            values
                .as_chunks()
                .0
                .iter()
                .map(|lane| lane.map(|value| value * value)),
        );
        loss += Loss {
            error: f64::from(error) * unit,
            norm: f64::from(norm) * unit,
        };
    }
    Ok(loss)
}

/// The step of codes of 8 bits: the finest whole fraction of the larger scale that reaches the
/// largest value. Then the half with that scale stays exact, and both do if they share it. The
/// finest step of all, most / 127, would round both halves. Since most is at most 32 larger
/// scales, the fraction is at least a third, the chosen step at most 4/3 of the finest, and the
/// square error 16/9 of one half's instead of 2.
fn step(most: f32, halves: [i8; 2]) -> f32 {
    let larger = f32::from(halves[0]).abs().max(f32::from(halves[1]).abs());
    if most == 0.0 {
        return 0.0;
    }
    // The conversion cuts the fraction off.
    let parts = (127.0 * larger / most) as i32;
    larger / parts.max(1) as f32
}

/// 1.5 * 2^23: adding it to a small f32 leaves no bits for a fraction, so that the sum is
/// rounded to the nearest whole number, halves to even.
const ROUNDER: f32 = 12_582_912.0;

/// Codes of the values at a step, 128 standing for 0, and the sum of the squared changes.
fn round(values: &[f32; GROUP], step: f32) -> (f32, [u8; GROUP]) {
    // A scale of 0 can only stand for zeros.
    let step = if step.is_finite() { step } else { 0.0 };
    let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
    let mut codes = [0; GROUP];
    let lanes = values
        .as_chunks::<8>()
        .0
        .iter()
        .zip(codes.as_chunks_mut::<8>().0);
    let errors = lanes.map(|(values, codes)| {
        let mut errors = [0.0; 8];
        for ((&value, code), error) in values.iter().zip(codes).zip(&mut errors) {
            // The scale's own rounding may push the largest value past the last code.
            let rounded = (value * inverse).clamp(-128.0, 127.0) + ROUNDER;
            let change = value - step * (rounded - ROUNDER);
            *error = change * change;
            // The whole number is in the low bits of the fraction, as two's complement.
            *code = rounded.to_bits() as u8 ^ 0x80;
        }
        errors
    });
    (sum_of(errors), codes)
}

/// The sum of all lanes; eight sums at a time keep the additions independent.
#[inline(always)]
fn sum_of(lanes: impl Iterator<Item = [f32; 8]>) -> f32 {
    let mut sums = [0.0f32; 8];
    for lane in lanes {
        for (sum, value) in sums.iter_mut().zip(lane) {
            *sum += value;
        }
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}
