//! The input of packed matrices: rotated, quantised to int8 by row and group, in kernel order.
//!
//! scale = max|x| / 127 and code = x * (127 / max|x|) rounded half to even. A group so small that
//! 127 / max overflows counts as zero; one with a value that is not finite gets a scale of NaN, so
//! that its outputs show it.
//!
//! Rows are taken in slabs of up to 64 (see [`slab_rows`]). In a slab, each 64 inputs of all its rows
//! lie together, a line of 64 bytes for each row: sixteen of them are an AMX tile, and a kernel that
//! walks over k reads a slab from its start to its end. Missing rows and inputs are zero.

use std::ops::Range;

use crate::cpu::{Cpu, Scratch};
#[cfg(target_arch = "x86_64")]
use crate::hadamard;
use crate::hadamard::Rotation;
use crate::isa::Isa;

/// The smallest group.
const MIN_GROUP: usize = 32;
/// The largest group.
const MAX_GROUP: usize = 128;
/// 1.5 * 2^23: adding it and taking it away rounds to the nearest integer.
const ROUND: f32 = 12_582_912.0;

/// Most rows of a slab: their sums stay in the first cache.
pub(crate) const SLAB: usize = 64;

/// Rows that a slab has room for, given `m` rows.
pub(crate) fn slab_rows(m: usize) -> usize {
    match m {
        0..=4 => m,
        5..=8 => 8,
        _ => m.min(SLAB).next_multiple_of(16),
    }
}

/// How long the buffers of an input are.
struct Lengths {
    rows: usize,
    groups: usize,
    width: usize,
    codes: usize,
    /// Of scales and of sums.
    scales: usize,
    offsets: usize,
}

impl Lengths {
    /// Of `m` rows of `k`.
    fn new(m: usize, k: usize, group: usize, offsets: bool) -> Self {
        let rows = slab_rows(m);
        let all = m.next_multiple_of(rows.max(1));
        let groups = k.div_ceil(group);
        let width = (groups * group).next_multiple_of(64);
        Self {
            rows,
            groups,
            width,
            codes: all * width,
            scales: all * groups,
            offsets: if offsets { all * groups * 16 } else { 0 },
        }
    }
}

/// Most bytes that [`super::linear`] takes for a while for `rows` rows of so many inputs.
pub fn linear_bytes(rows: usize, inputs: usize) -> u64 {
    let lengths = Lengths::new(rows.min(super::ROWS), inputs, MIN_GROUP, true);
    (lengths.codes + 4 * (2 * lengths.scales + lengths.offsets)) as u64
}

/// Quantised rows.
pub(crate) struct Input<'a> {
    /// Rows.
    m: usize,
    /// Rows of a slab.
    rows: usize,
    /// Groups along k.
    groups: usize,
    /// Inputs rounded up to the group and to 64.
    width: usize,
    /// [slab][width / 64][row][64]
    codes: Scratch<'a, i8>,
    /// [slab][group][row]
    scales: Scratch<'a, f32>,
    /// The sum of the codes, [slab][group][row].
    sums: Scratch<'a, i32>,
    /// See [`Slab::offsets`].
    offsets: Scratch<'a, i32>,
}

impl<'a> Input<'a> {
    /// Quantises `x`, rows of `k`, with or without offsets.
    pub fn new(
        cpu: &'a Cpu,
        x: &[f32],
        k: usize,
        rotation: Option<&Rotation>,
        group: usize,
        offsets: bool,
    ) -> Self {
        let m = x.len() / k;
        let lengths = Lengths::new(m, k, group, offsets);
        let (rows, groups, width) = (lengths.rows, lengths.groups, lengths.width);
        let mut codes = cpu.scratch::<i8>(lengths.codes);
        let mut scales = cpu.scratch::<f32>(lengths.scales);
        let mut sums = cpu.scratch::<i32>(lengths.scales);
        let mut offsets = cpu.scratch::<i32>(lengths.offsets);
        let work = Work {
            isa: cpu.isa(),
            x,
            k,
            rotation,
            rows,
            group,
            groups,
            width,
            codes: codes.as_mut_ptr(),
            scales: scales.as_mut_ptr(),
            sums: sums.as_mut_ptr(),
            offsets: (!offsets.is_empty()).then_some(offsets.as_mut_ptr()),
        };
        // A task takes up to 16 rows, whose lines lie together, and some groups.
        let total = lengths.codes / width;
        let each_rows = total.min(16);
        let mut each_groups = (TASK / (each_rows * group)).max(1);
        if m * k >= SHARED {
            each_groups = each_groups.min(groups.div_ceil(cpu.threads()));
        }
        let across = groups.div_ceil(each_groups);
        cpu.run(total.div_ceil(each_rows) * across, &|task| {
            let (row, g) = (task / across * each_rows, task % across * each_groups);
            let rows = row..(row + each_rows).min(total);
            // SAFETY: the buffers have the lengths above, and each task has rows and groups of its
            // own.
            unsafe { work.quantize(rows, g..(g + each_groups).min(groups)) };
        });
        Self {
            m,
            rows,
            groups,
            width,
            codes,
            scales,
            sums,
            offsets,
        }
    }

    /// The slabs, with the first row of each.
    pub fn slabs(&self) -> impl Iterator<Item = (usize, Slab<'_>)> {
        (0..self.m).step_by(self.rows).map(|first| {
            let slab = Slab {
                m: self.rows.min(self.m - first),
                rows: self.rows,
                codes: &self.codes[first * self.width..],
                scales: &self.scales[first * self.groups..],
                sums: &self.sums[first * self.groups..],
                offsets: self.offsets.get(first * self.groups * 16..).unwrap_or(&[]),
            };
            (first, slab)
        })
    }
}

/// Up to 64 quantised rows: what a kernel works on at a time.
pub(crate) struct Slab<'a> {
    /// Rows.
    pub m: usize,
    /// Rows it has room for.
    pub rows: usize,
    /// [k / 64][row][64]
    pub codes: &'a [i8],
    /// [group][row]
    pub scales: &'a [f32],
    /// [group][row]
    pub sums: &'a [i32],
    /// -128 * sum, which takes a zero point of 128 off a product, for each of 16 outputs:
    /// [group][row][16], or empty.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "only AMX takes them")
    )]
    pub offsets: &'a [i32],
}

impl Slab<'_> {
    /// Where the code of a row and an input is.
    pub fn at(&self, row: usize, input: usize) -> usize {
        (input / 64 * self.rows + row) * 64 + input % 64
    }
}

/// Values that a task quantises, at most.
const TASK: usize = 16_384;
/// Fewer values than this are not worth another thread.
const SHARED: usize = 8192;

/// All of the work; the names are those of [`Input`].
struct Work<'a> {
    isa: Isa,
    x: &'a [f32],
    k: usize,
    rotation: Option<&'a Rotation>,
    rows: usize,
    group: usize,
    groups: usize,
    width: usize,
    codes: *mut i8,
    scales: *mut f32,
    sums: *mut i32,
    offsets: Option<*mut i32>,
}

// SAFETY: the tasks write disjoint parts of the buffers, see `Input::new`.
unsafe impl Sync for Work<'_> {}

impl Work<'_> {
    /// Quantises some groups of some rows.
    ///
    /// # Safety
    /// The buffers have room for these rows and groups, and nobody else uses them.
    unsafe fn quantize(&self, rows: Range<usize>, groups: Range<usize>) {
        // SAFETY: as the caller promises; a `Cpu` holds only an available instruction set.
        unsafe {
            match (self.isa, self.group) {
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512Vnni | Isa::Amx, 32) => self.quantize_avx512::<2>(rows, groups),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512Vnni | Isa::Amx, 64) => self.quantize_avx512::<4>(rows, groups),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512Vnni | Isa::Amx, _) => self.quantize_avx512::<8>(rows, groups),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, _) => self.quantize_avx2(rows, groups),
                _ => self.quantize_any(rows, groups),
            }
        }
    }

    /// # Safety
    /// As `quantize`, and the machine has AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn quantize_avx2(&self, rows: Range<usize>, groups: Range<usize>) {
        // SAFETY: as the caller promises.
        unsafe { self.quantize_any(rows, groups) };
    }

    /// The values of a row and group that are there; a row past the last has none.
    #[inline(always)]
    fn values(&self, row: usize, group: usize) -> &[f32] {
        let first = row * self.k + group * self.group;
        let end = (first + self.group).min((row + 1) * self.k);
        self.x.get(first..end).unwrap_or(&[])
    }

    /// # Safety
    /// As `quantize`.
    #[inline(always)]
    unsafe fn quantize_any(&self, rows: Range<usize>, groups: Range<usize>) {
        for g in groups {
            for row in rows.clone() {
                let x = self.values(row, g);
                let mut values = [0f32; MAX_GROUP];
                values[..x.len()].copy_from_slice(x);
                if let Some(rotation) = self.rotation {
                    rotation.forward_part(g * self.group, &mut values[..x.len()]);
                }
                let mut codes = [0; MAX_GROUP];
                let (scale, sum) = quantize_group(&values, &mut codes);
                // SAFETY: as the caller promises.
                unsafe {
                    for (i, codes) in codes[..self.group].chunks_exact(32).enumerate() {
                        let at = self.codes_at(row, g * self.group + i * 32);
                        at.copy_from_nonoverlapping(codes.as_ptr(), 32);
                    }
                    self.put(row, g, scale, sum);
                }
            }
        }
    }

    /// # Safety
    /// As `quantize`; the machine has AVX-512, and the group is 16 * N.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn quantize_avx512<const N: usize>(&self, rows: Range<usize>, groups: Range<usize>) {
        use std::arch::x86_64::*;
        let magnitude = _mm512_set1_epi32(0x7FFF_FFFF);
        for g in groups {
            let first = g * self.group;
            for row in rows.clone() {
                let x = self.values(row, g);
                let mut values = [_mm512_setzero_ps(); N];
                let mut top = _mm512_setzero_si512();
                for (i, value) in values.iter_mut().enumerate() {
                    let count = x.len().saturating_sub(i * 16).min(16);
                    let mask = ((1u32 << count) - 1) as __mmask16;
                    // SAFETY: the mask leaves out what lies past the end.
                    *value =
                        unsafe { _mm512_maskz_loadu_ps(mask, x.as_ptr().wrapping_add(i * 16)) };
                }
                if let Some(rotation) = self.rotation {
                    for (i, pair) in values.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                        // The width is a multiple of 32, as a rotation's is.
                        if i * 32 < x.len() {
                            *pair = hadamard::forward_avx512(*pair, rotation, first + i * 32);
                        }
                    }
                }
                for value in values {
                    let bits = _mm512_and_si512(_mm512_castps_si512(value), magnitude);
                    top = _mm512_max_epi32(top, bits);
                }
                let max = f32::from_bits(_mm512_reduce_max_epi32(top) as u32);
                let (scale, inverse) = factors(max);
                let mut sum = _mm512_setzero_si512();
                for (i, value) in values.iter().enumerate() {
                    let mut code = _mm512_setzero_si512();
                    if inverse != 0.0 {
                        // The conversion rounds half to even.
                        code = _mm512_cvtps_epi32(_mm512_mul_ps(*value, _mm512_set1_ps(inverse)));
                    }
                    sum = _mm512_add_epi32(sum, code);
                    // SAFETY: as the caller promises.
                    unsafe {
                        let at = self.codes_at(row, first + i * 16);
                        _mm_storeu_si128(at.cast(), _mm512_cvtepi32_epi8(code));
                    }
                }
                // SAFETY: as the caller promises.
                unsafe { self.put(row, g, scale, _mm512_reduce_add_epi32(sum)) };
            }
        }
    }

    /// Where the codes of a row from input `i` on, a multiple of 16, are.
    ///
    /// # Safety
    /// They are in the buffer.
    #[inline(always)]
    unsafe fn codes_at(&self, row: usize, i: usize) -> *mut i8 {
        let (slab, row) = (row / self.rows, row % self.rows);
        let at = slab * self.rows * self.width + (i / 64 * self.rows + row) * 64 + i % 64;
        // SAFETY: as the caller promises.
        unsafe { self.codes.add(at) }
    }

    /// # Safety
    /// As `quantize`.
    #[inline(always)]
    unsafe fn put(&self, row: usize, group: usize, scale: f32, sum: i32) {
        let (slab, row) = (row / self.rows, row % self.rows);
        let at = (slab * self.groups + group) * self.rows + row;
        // SAFETY: as the caller promises.
        unsafe {
            *self.scales.add(at) = scale;
            *self.sums.add(at) = sum;
            if let Some(offsets) = self.offsets {
                *offsets.add(at * 16).cast::<[i32; 16]>() = [-128 * sum; 16];
            }
        }
    }
}

/// Writes the codes of a group; returns its scale and the sum of its codes.
#[inline(always)]
fn quantize_group(values: &[f32; MAX_GROUP], codes: &mut [i8; MAX_GROUP]) -> (f32, i32) {
    // The order of the magnitudes' bits is that of their values, with infinity and NaN on top.
    let top = values
        .iter()
        .fold(0, |top, v| top.max(v.to_bits() & 0x7FFF_FFFF));
    let (scale, inverse) = factors(f32::from_bits(top));
    if inverse == 0.0 {
        return (scale, 0);
    }
    let mut sum = 0;
    for (value, code) in values.iter().zip(codes) {
        // Rounds half to even, since the value is below 2^22.
        let rounded = (value * inverse + ROUND) - ROUND;
        *code = rounded as i8;
        sum += i32::from(*code);
    }
    (scale, sum)
}

/// The scale of a group and its inverse; an inverse of 0 means that all codes are 0.
#[inline(always)]
pub(crate) fn factors(max: f32) -> (f32, f32) {
    let inverse = 127.0 / max;
    if !max.is_finite() {
        (f32::NAN, 0.0)
    } else if !inverse.is_finite() {
        (0.0, 0.0)
    } else {
        (max / 127.0, inverse)
    }
}
