//! Unquantised matrices and their product.
//!
//! An output is the sum over 16 lanes, lane l holding the FMA chain of inputs l, l + 16, .. in
//! order (inputs past the end count as zero), added as a tree: lanes at distance 8, 4, 2, 1.

use half::{bf16, f16};

use crate::bytes::SharedBytes;
use crate::cpu::Cpu;
use crate::error::Error;
use crate::isa::Isa;

/// Number type of a [`DenseMatrix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenseKind {
    /// 32-bit floats.
    F32,
    /// The upper half of a 32-bit float.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl DenseKind {
    /// Bytes of one weight.
    pub fn bytes(self) -> usize {
        match self {
            DenseKind::F32 => 4,
            DenseKind::Bf16 | DenseKind::F16 => 2,
        }
    }
}

/// A row-major n x k matrix of little-endian floats.
#[derive(Clone)]
pub struct DenseMatrix {
    kind: DenseKind,
    n: usize,
    k: usize,
    bytes: SharedBytes,
}

impl DenseMatrix {
    /// Takes the bytes of an n x k matrix.
    ///
    /// # Errors
    /// If a dimension is 0 or the number of bytes is wrong.
    pub fn new(
        kind: DenseKind,
        n: usize,
        k: usize,
        bytes: impl Into<SharedBytes>,
    ) -> Result<Self, Error> {
        let bytes = bytes.into();
        let want = n
            .checked_mul(k)
            .and_then(|count| count.checked_mul(kind.bytes()));
        if n == 0 || k == 0 || want != Some(bytes.len()) {
            return Err(Error::new(format!(
                "{} bytes are no {n} x {k} matrix of {kind:?}",
                bytes.len()
            )));
        }
        Ok(Self { kind, n, k, bytes })
    }

    /// An n x k matrix of the given values.
    ///
    /// # Errors
    /// If a dimension is 0 or the number of values is not n * k.
    pub fn from_f32(n: usize, k: usize, values: &[f32]) -> Result<Self, Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(DenseKind::F32, n, k, bytes)
    }

    /// Number type.
    pub fn kind(&self) -> DenseKind {
        self.kind
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The bytes.
    pub fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Writes the weights of an output as f32. `out` has k values.
    pub fn row_into(&self, row: usize, out: &mut [f32]) {
        assert!(
            row < self.n && out.len() == self.k,
            "row {row} of {} x {}",
            self.n,
            self.k
        );
        let bytes = self.row_bytes(row);
        match self.kind {
            DenseKind::F32 => {
                for (out, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = f32::from_le_bytes(*b);
                }
            }
            DenseKind::Bf16 => {
                for (out, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = bf16::from_le_bytes(*b).to_f32();
                }
            }
            DenseKind::F16 => {
                for (out, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = f16::from_le_bytes(*b).to_f32();
                }
            }
        }
    }

    fn row_bytes(&self, row: usize) -> &[u8] {
        let size = self.k * self.kind.bytes();
        &self.bytes[row * size..(row + 1) * size]
    }

    /// The products of output `row` with each of the rows of `x`, passed to `put(i, product)`.
    pub(crate) fn dot_rows(&self, isa: Isa, rows: [usize; OUTPUTS], x: &[f32], put: &mut Put<'_>) {
        let weights = rows.map(|row| self.row_bytes(row));
        match self.kind {
            DenseKind::F32 => dot_rows::<F32>(isa, &weights, x, self.k, put),
            DenseKind::Bf16 => dot_rows::<Bf16>(isa, &weights, x, self.k, put),
            DenseKind::F16 => dot_rows::<F16>(isa, &weights, x, self.k, put),
        }
    }

    /// out[i] for x (m rows of k) and the outputs `rows`, passed to `put(row of x, index in rows,
    /// product)`, on all threads.
    pub(crate) fn product(
        &self,
        cpu: &Cpu,
        x: &[f32],
        count: usize,
        row_of: &(dyn Fn(usize) -> usize + Sync),
        put: &(dyn Fn(usize, usize, f32) + Sync),
    ) {
        cpu.run(self.tasks(count), &|task| {
            self.task(cpu.isa(), x, count, task, row_of, put);
        });
    }

    /// Tasks of the product with `count` outputs.
    pub(crate) fn tasks(&self, count: usize) -> usize {
        count.div_ceil(self.task_outputs())
    }

    /// Outputs of a task, which is worth some 64 KiB of weights.
    fn task_outputs(&self) -> usize {
        (65_536 / (OUTPUTS * self.k * self.kind.bytes())).max(1) * OUTPUTS
    }

    /// One of the tasks of [`DenseMatrix::product`].
    pub(crate) fn task(
        &self,
        isa: Isa,
        x: &[f32],
        count: usize,
        task: usize,
        row_of: &dyn Fn(usize) -> usize,
        put: &dyn Fn(usize, usize, f32),
    ) {
        let first = task * self.task_outputs();
        for at in (first..count.min(first + self.task_outputs())).step_by(OUTPUTS) {
            let rows: [usize; OUTPUTS] = std::array::from_fn(|j| row_of((at + j).min(count - 1)));
            self.dot_rows(isa, rows, x, &mut |i, sums| {
                for (j, sum) in sums.iter().enumerate().take(count - at) {
                    put(i, at + j, *sum);
                }
            });
        }
    }
}

/// Outputs computed together.
const OUTPUTS: usize = 4;
/// Takes a row of x and its product with each of the outputs.
type Put<'a> = dyn FnMut(usize, [f32; OUTPUTS]) + 'a;

trait Weights {
    const BYTES: usize;
    fn load(bytes: &[u8]) -> [f32; 16];
}

struct F32;
struct Bf16;
struct F16;

impl Weights for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn load(bytes: &[u8]) -> [f32; 16] {
        let bytes = &bytes[..64];
        std::array::from_fn(|i| {
            f32::from_le_bytes([
                bytes[4 * i],
                bytes[4 * i + 1],
                bytes[4 * i + 2],
                bytes[4 * i + 3],
            ])
        })
    }
}

impl Weights for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load(bytes: &[u8]) -> [f32; 16] {
        let bytes = &bytes[..32];
        std::array::from_fn(|i| {
            let half = u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
            f32::from_bits(u32::from(half) << 16)
        })
    }
}

impl Weights for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load(bytes: &[u8]) -> [f32; 16] {
        let bytes = &bytes[..32];
        std::array::from_fn(|i| {
            let half = u32::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
            // Exponent and mantissa moved to their places in an f32 are 2^112 too small, subnormals
            // too; infinities and NaN need the full exponent.
            let small = f32::from_bits((half & 0x7FFF) << 13);
            let mut bits = (small * f32::from_bits((112 + 127) << 23)).to_bits();
            if half & 0x7C00 == 0x7C00 {
                bits |= 0x7F80_0000;
            }
            f32::from_bits(bits | (half & 0x8000) << 16)
        })
    }
}

/// Sums the lanes as a tree: distance 8, 4, 2, 1.
#[inline(always)]
fn sum_lanes(mut lanes: [f32; 16]) -> f32 {
    let mut distance = 8;
    while distance > 0 {
        for i in 0..distance {
            lanes[i] += lanes[i + distance];
        }
        distance /= 2;
    }
    lanes[0]
}

fn dot_rows<W: Weights>(
    isa: Isa,
    weights: &[&[u8]; OUTPUTS],
    x: &[f32],
    k: usize,
    put: &mut Put<'_>,
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Amx => {
            // SAFETY: a `Cpu` holds only an instruction set that this machine has.
            unsafe { dot_rows_avx512::<W>(weights, x, k, put) }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            // SAFETY: as above.
            unsafe { dot_rows_avx2::<W>(weights, x, k, put) }
        }
        _ => dot_rows_any::<W, 1>(weights, x, k, put),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn dot_rows_avx512<W: Weights>(weights: &[&[u8]; OUTPUTS], x: &[f32], k: usize, put: &mut Put<'_>) {
    dot_rows_any::<W, 4>(weights, x, k, put);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_rows_avx2<W: Weights>(weights: &[&[u8]; OUTPUTS], x: &[f32], k: usize, put: &mut Put<'_>) {
    dot_rows_any::<W, 1>(weights, x, k, put);
}

/// Rows of x by `ROWS` at a time, so that weights are loaded once for them.
#[inline(always)]
fn dot_rows_any<W: Weights, const ROWS: usize>(
    weights: &[&[u8]; OUTPUTS],
    x: &[f32],
    k: usize,
    put: &mut Put<'_>,
) {
    let m = x.len() / k;
    let mut i = 0;
    while i + ROWS <= m {
        dot_block::<W, ROWS>(weights, &x[i * k..], k, &mut |r, sums| put(i + r, sums));
        i += ROWS;
    }
    while i < m {
        dot_block::<W, 1>(weights, &x[i * k..], k, &mut |r, sums| put(i + r, sums));
        i += 1;
    }
}

#[inline(always)]
fn dot_block<W: Weights, const ROWS: usize>(
    weights: &[&[u8]; OUTPUTS],
    x: &[f32],
    k: usize,
    put: &mut impl FnMut(usize, [f32; OUTPUTS]),
) {
    let mut lanes = [[[0f32; 16]; OUTPUTS]; ROWS];
    let mut step = |w: &[[f32; 16]; OUTPUTS], x: &[[f32; 16]; ROWS]| {
        for r in 0..ROWS {
            for o in 0..OUTPUTS {
                for l in 0..16 {
                    lanes[r][o][l] = w[o][l].mul_add(x[r][l], lanes[r][o][l]);
                }
            }
        }
    };
    let whole = k / 16;
    for c in 0..whole {
        let w: [_; OUTPUTS] = std::array::from_fn(|o| W::load(&weights[o][c * 16 * W::BYTES..]));
        let x: [_; ROWS] = std::array::from_fn(|r| F32::load_f32(&x[r * k + c * 16..]));
        step(&w, &x);
    }
    if whole * 16 < k {
        let rest = k - whole * 16;
        let w: [_; OUTPUTS] = std::array::from_fn(|o| {
            let mut bytes = [0; 64];
            bytes[..rest * W::BYTES].copy_from_slice(&weights[o][whole * 16 * W::BYTES..]);
            W::load(&bytes)
        });
        let x: [_; ROWS] = std::array::from_fn(|r| {
            let mut values = [0f32; 16];
            values[..rest].copy_from_slice(&x[r * k + whole * 16..r * k + k]);
            values
        });
        step(&w, &x);
    }
    for (r, lanes) in lanes.iter().enumerate() {
        put(r, lanes.map(sum_lanes));
    }
}

impl F32 {
    #[inline(always)]
    fn load_f32(x: &[f32]) -> [f32; 16] {
        let x = &x[..16];
        std::array::from_fn(|i| x[i])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of(kind: DenseKind, values: &[f32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|&v| match kind {
                DenseKind::F32 => v.to_le_bytes().to_vec(),
                DenseKind::Bf16 => bf16::from_f32(v).to_le_bytes().to_vec(),
                DenseKind::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
            })
            .collect()
    }

    #[test]
    fn every_half_loads_as_its_value() {
        for first in (0..=u16::MAX).step_by(16) {
            let halves: Vec<u16> = (0..16).map(|i| first + i).collect();
            let bytes: Vec<u8> = halves.iter().flat_map(|h| h.to_le_bytes()).collect();
            let (f16s, bf16s) = (F16::load(&bytes), Bf16::load(&bytes));
            for i in 0..16 {
                let (a, b) = (f16::from_bits(halves[i]), bf16::from_bits(halves[i]));
                assert!(
                    a.is_nan() && f16s[i].is_nan() || f16s[i].to_bits() == a.to_f32().to_bits()
                );
                assert!(
                    b.is_nan() && bf16s[i].is_nan() || bf16s[i].to_bits() == b.to_f32().to_bits()
                );
            }
        }
    }

    #[test]
    fn wrong_lengths_are_refused() {
        assert!(DenseMatrix::new(DenseKind::Bf16, 2, 3, vec![0u8; 11]).is_err());
        assert!(DenseMatrix::new(DenseKind::F32, usize::MAX, 3, vec![0u8; 12]).is_err());
        assert!(DenseMatrix::from_f32(0, 3, &[]).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn row_into_gives_the_stored_values(
            values in proptest::collection::vec(-9f32..9.0, 21), kind in 0usize..3,
        ) {
            let kind = [DenseKind::F32, DenseKind::Bf16, DenseKind::F16][kind];
            let matrix = DenseMatrix::new(kind, 3, 7, bytes_of(kind, &values)).unwrap();
            let mut row = [0.0; 7];
            for r in 0..3 {
                matrix.row_into(r, &mut row);
                for i in 0..7 {
                    let v = values[r * 7 + i];
                    let want = match kind {
                        DenseKind::F32 => v,
                        DenseKind::Bf16 => bf16::from_f32(v).to_f32(),
                        DenseKind::F16 => f16::from_f32(v).to_f32(),
                    };
                    prop_assert_eq!(row[i], want);
                }
            }
        }
    }
}
