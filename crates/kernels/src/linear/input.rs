//! The input of packed matrices: rotated, quantised to int8 by row and group, in kernel order.
//!
//! scale = max|x| / 127 and code = x * (127 / max|x|) rounded half to even. A group so small that
//! 127 / max overflows counts as zero; one with a value that is not finite gets a scale of NaN, so
//! that its outputs show it.
//!
//! Rows are taken in blocks of [`block_rows`]. Within a block, each 64 inputs of all its rows lie
//! together (`rows` lines of 64 bytes), which is an AMX tile and keeps the rows of a block out of
//! each other's cache sets. Missing rows and inputs are zero.

use crate::cpu::{Cpu, Scratch};
use crate::hadamard::Rotation;

/// Rows of a block for `m` rows.
pub(crate) fn block_rows(m: usize) -> usize {
    match m {
        0..=4 => m,
        5..=8 => 8,
        _ => 16,
    }
}

/// Quantised rows.
pub(crate) struct Input<'a> {
    /// Rows.
    pub m: usize,
    /// Rows of a block.
    pub rows: usize,
    /// Groups along k.
    pub groups: usize,
    /// Inputs rounded up to the group and to 64.
    pub width: usize,
    /// [block][width / 64][row][64]
    pub codes: Scratch<'a, i8>,
    /// [block][group][row]
    pub scales: Scratch<'a, f32>,
    /// The sum of the codes, [block][group][row].
    pub sums: Scratch<'a, i32>,
}

impl<'a> Input<'a> {
    /// Quantises `x`, rows of `k`.
    pub fn new(
        cpu: &'a Cpu,
        x: &[f32],
        k: usize,
        rotation: Option<&Rotation>,
        group: usize,
    ) -> Self {
        let m = x.len() / k;
        let rows = block_rows(m);
        let blocks = m.div_ceil(rows);
        let groups = k.div_ceil(group);
        let width = (groups * group).next_multiple_of(64);
        let mut codes = cpu.scratch::<i8>(blocks * rows * width);
        let mut scales = cpu.scratch::<f32>(blocks * rows * groups);
        let mut sums = cpu.scratch::<i32>(blocks * rows * groups);
        let isa = cpu.isa();
        let out = Out {
            codes: codes.as_mut_ptr(),
            scales: scales.as_mut_ptr(),
            sums: sums.as_mut_ptr(),
        };
        let row = |i: usize| {
            let (block, r) = (i / rows, i % rows);
            // SAFETY: every row writes its own lines and numbers, within the lengths above.
            let put = |at: usize, values: &[i8], scale: f32, sum: i32| unsafe {
                for (j, &value) in values.iter().enumerate() {
                    let input = at * group + j;
                    let offset =
                        block * rows * width + input / 64 * rows * 64 + r * 64 + input % 64;
                    *out.codes().add(offset) = value;
                }
                let index = (block * groups + at) * rows + r;
                *out.scales().add(index) = scale;
                *out.sums().add(index) = sum;
            };
            if i >= m {
                for g in 0..groups {
                    put(g, &[0; 128][..group], 0.0, 0);
                }
                return;
            }
            let mut values = cpu.scratch::<f32>(k);
            values.copy_from_slice(&x[i * k..(i + 1) * k]);
            if let Some(rotation) = rotation {
                rotation.forward_on(isa, &mut values);
            }
            for (g, values) in values.chunks(group).enumerate() {
                let mut codes = [0; 128];
                let (scale, sum) = quantize_group(values, &mut codes);
                put(g, &codes[..group], scale, sum);
            }
        };
        // A region costs about as much as quantising a few thousand values.
        if m * k < 16_384 {
            (0..blocks * rows).for_each(row);
        } else {
            cpu.run(blocks * rows, &row);
        }
        Self {
            m,
            rows,
            groups,
            width,
            codes,
            scales,
            sums,
        }
    }

    /// The code of a row and an input.
    pub fn code(&self, row: usize, input: usize) -> i8 {
        let (block, r) = (row / self.rows, row % self.rows);
        self.codes[(block * self.width + input / 64 * 64) * self.rows + r * 64 + input % 64]
    }

    /// Where the scale and the sum of a row and a group are.
    pub fn index(&self, row: usize, group: usize) -> usize {
        (row / self.rows * self.groups + group) * self.rows + row % self.rows
    }
}

/// Pointers that tasks write disjoint parts of.
struct Out {
    codes: *mut i8,
    scales: *mut f32,
    sums: *mut i32,
}

// SAFETY: the tasks write disjoint parts, see `Input::new`.
unsafe impl Sync for Out {}

impl Out {
    fn codes(&self) -> *mut i8 {
        self.codes
    }
    fn scales(&self) -> *mut f32 {
        self.scales
    }
    fn sums(&self) -> *mut i32 {
        self.sums
    }
}

/// Writes the codes of a group; returns its scale and the sum of its codes.
fn quantize_group(values: &[f32], codes: &mut [i8; 128]) -> (f32, i32) {
    // The order of the magnitudes' bits is that of their values, with infinity and NaN on top.
    let top = values
        .iter()
        .fold(0, |top, v| top.max(v.to_bits() & 0x7FFF_FFFF));
    let max = f32::from_bits(top);
    if !max.is_finite() {
        return (f32::NAN, 0);
    }
    let inverse = 127.0 / max;
    if !inverse.is_finite() {
        return (0.0, 0);
    }
    let mut sum = 0;
    for (value, code) in values.iter().zip(codes) {
        *code = (value * inverse).round_ties_even() as i8;
        sum += i32::from(*code);
    }
    (max / 127.0, sum)
}
