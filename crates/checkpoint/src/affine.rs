//! Matrices as other programs quantise them: codes with a scale and a zero for each output and group
//! of inputs. They differ in how codes lie in the file, and in little else.

use std::ops::Range;

use half::{bf16, f16};
use kozue_kernels::{
    AlignedBytes, DenseKind, PackedSpec, QuantError, Rotation, SharedBytes, ZeroKind, Zeros, pack,
};

/// Inputs or outputs mixed by one Hadamard matrix.
const MIXED: usize = kozue_kernels::hadamard::BLOCK;

/// Whole numbers of `bits` bits for rows and columns, several in a word.
#[derive(Clone)]
pub(crate) struct Codes {
    pub bytes: SharedBytes,
    /// 4 or 8.
    pub bits: u8,
    /// Bytes of a word: 1 or 4, little-endian.
    pub word: usize,
    /// Whether a word holds codes of several rows instead of several columns.
    pub stacked: bool,
    /// Whether the words of a column, instead of those of a row, lie side by side.
    pub transposed: bool,
    /// Words that lie side by side.
    pub width: usize,
    /// Which of a word's places holds its first, second, ... code; in turn where `None`.
    pub places: Option<[u8; 8]>,
    /// Whether codes are signed numbers of 8 bits; they are read with 128 added.
    pub signed: bool,
}

impl Codes {
    /// Codes row by row, filling bytes (or little-endian words) from their low bits on.
    pub fn rows(bytes: SharedBytes, bits: u8, row_bytes: usize) -> Codes {
        Codes {
            bytes,
            bits,
            word: 1,
            stacked: false,
            transposed: false,
            width: row_bytes,
            places: None,
            signed: false,
        }
    }

    fn get(&self, row: usize, column: usize) -> u8 {
        let count = 8 * self.word / usize::from(self.bits);
        let along = if self.stacked { row } else { column };
        let place = match &self.places {
            Some(places) => usize::from(places[along % count]),
            None => along % count,
        };
        let (row, column) = if self.stacked {
            (row / count, column)
        } else {
            (row, column / count)
        };
        let word = if self.transposed {
            column * self.width + row
        } else {
            row * self.width + column
        };
        let bit = place * usize::from(self.bits);
        let byte = self.bytes[word * self.word + bit / 8];
        match (self.bits, self.signed) {
            (4, _) => byte >> (bit % 8) & 15,
            (_, false) => byte,
            (_, true) => byte ^ 0x80,
        }
    }

    /// The codes of some rows and all `columns`, row-major.
    fn fill(&self, rows: Range<usize>, columns: usize, out: &mut [u8]) {
        if self.word == 1 && !self.transposed && !self.stacked && !self.signed {
            for (row, out) in rows.zip(out.chunks_exact_mut(columns)) {
                let bytes = &self.bytes[row * self.width..(row + 1) * self.width];
                if self.bits == 8 {
                    out.copy_from_slice(&bytes[..columns]);
                } else {
                    for (pair, byte) in out.chunks_mut(2).zip(bytes) {
                        pair[0] = byte & 15;
                        if let Some(second) = pair.get_mut(1) {
                            *second = byte >> 4;
                        }
                    }
                }
            }
            return;
        }
        // In the order in which they lie: a column's words are near each other.
        for column in 0..columns {
            for (at, row) in rows.clone().enumerate() {
                out[at * columns + column] = self.get(row, column);
            }
        }
    }
}

/// Floats for rows and columns.
#[derive(Clone)]
pub(crate) struct Floats {
    pub bytes: SharedBytes,
    pub kind: DenseKind,
    /// Whether the values of a column, instead of those of a row, lie side by side.
    pub transposed: bool,
    /// Values that lie side by side.
    pub width: usize,
}

impl Floats {
    pub fn get(&self, row: usize, column: usize) -> f32 {
        let at = if self.transposed {
            column * self.width + row
        } else {
            row * self.width + column
        };
        let bytes = &self.bytes[at * self.kind.bytes()..];
        match self.kind {
            DenseKind::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            DenseKind::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            DenseKind::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        }
    }
}

/// What a code of zero stands for, see [`ZeroKind`].
#[derive(Clone)]
pub(crate) enum Zero {
    Symmetric,
    /// Zero points, to which a number is added.
    Points(Codes, i16),
    Minima(Floats),
}

impl Zero {
    pub fn kind(&self) -> ZeroKind {
        match self {
            Zero::Symmetric => ZeroKind::Symmetric,
            Zero::Points(..) => ZeroKind::Point,
            Zero::Minima(_) => ZeroKind::Min,
        }
    }
}

/// A matrix of codes as it lies in a file.
pub(crate) struct Affine {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Inputs that share a scale; any number.
    pub group: usize,
    pub codes: Codes,
    pub scales: Floats,
    pub zero: Zero,
    /// Rotation of the inputs.
    pub rotation: Option<Rotation>,
    /// Rotation of the outputs, one for each block of 32: y = signs * (H y').
    pub outputs: Option<Vec<Rotation>>,
    /// The group of each input, where groups are no runs of inputs.
    pub order: Option<Vec<u32>>,
}

impl Affine {
    /// Groups along the inputs.
    pub fn groups(&self) -> usize {
        self.k.div_ceil(self.group)
    }

    /// How the kernels hold it without loss (save for what f16 scales may lose), `n` rows of it.
    pub fn spec(&self, n: usize) -> Option<PackedSpec> {
        if self.outputs.is_some() || self.order.is_some() {
            return None;
        }
        // A larger group is several of the kernels' groups with the same scale.
        let parts = [128, 64, 32]
            .into_iter()
            .find(|part| self.group.is_multiple_of(*part));
        Some(PackedSpec {
            n,
            k: self.k,
            bits: self.codes.bits,
            group: parts.or((self.groups() == 1).then_some(64))?,
            zero: self.zero.kind(),
        })
    }

    /// Codes, scales and zeros of some rows in the groups of a spec that [`Affine::spec`] gave.
    pub fn read(&self, rows: Range<usize>, spec: &PackedSpec) -> Slice {
        let mut slice = Slice {
            codes: vec![0; rows.len() * self.k],
            scales: Vec::with_capacity(rows.len() * spec.groups()),
            zeros: Vec::new(),
        };
        self.codes.fill(rows.clone(), self.k, &mut slice.codes);
        for row in rows {
            for group in 0..spec.groups() {
                let group = group * spec.group / self.group;
                slice.scales.push(self.scales.get(row, group));
                match &self.zero {
                    Zero::Symmetric => {}
                    Zero::Points(codes, add) => {
                        slice
                            .zeros
                            .push(f32::from(i16::from(codes.get(row, group)) + add));
                    }
                    Zero::Minima(minima) => slice.zeros.push(minima.get(row, group)),
                }
            }
        }
        slice
    }

    /// The weights of some rows with no rotation left in, row-major.
    pub fn rows(&self, rows: Range<usize>, out: &mut [f32]) {
        let Some(outputs) = &self.outputs else {
            self.stored_rows(rows, out);
            return;
        };
        let k = self.k;
        let mut block = vec![0.0; MIXED * k];
        let mut column = [0.0; MIXED];
        for (first, rotation) in (0..self.n).step_by(MIXED).zip(outputs) {
            let wanted = rows.start.max(first)..rows.end.min(first + MIXED);
            if wanted.is_empty() {
                continue;
            }
            self.stored_rows(first..first + MIXED, &mut block);
            for input in 0..k {
                for (value, row) in column.iter_mut().zip(block.chunks_exact(k)) {
                    *value = row[input];
                }
                rotation.inverse(&mut column);
                for row in wanted.clone() {
                    out[(row - rows.start) * k + input] = column[row - first];
                }
            }
        }
    }

    /// As [`Affine::rows`], the outputs' rotation left in.
    fn stored_rows(&self, rows: Range<usize>, out: &mut [f32]) {
        let mut codes = vec![0; out.len()];
        self.codes.fill(rows.clone(), self.k, &mut codes);
        let middle = 1u32 << (self.codes.bits - 1);
        for (row, (out, codes)) in
            rows.zip(out.chunks_exact_mut(self.k).zip(codes.chunks_exact(self.k)))
        {
            let value = |group: usize| {
                let scale = self.scales.get(row, group);
                match &self.zero {
                    Zero::Symmetric => (scale, middle as f32, 0.0),
                    Zero::Points(points, add) => {
                        let zero = f32::from(i16::from(points.get(row, group)) + add);
                        (scale, zero, 0.0)
                    }
                    Zero::Minima(minima) => (scale, 0.0, minima.get(row, group)),
                }
            };
            let table: Vec<_> = (0..self.groups()).map(value).collect();
            for (input, (out, code)) in out.iter_mut().zip(codes).enumerate() {
                let group = match &self.order {
                    Some(order) => order[input] as usize,
                    None => input / self.group,
                };
                let (scale, zero, min) = table[group];
                *out = scale.mul_add(f32::from(*code) - zero, min);
            }
            if let Some(rotation) = &self.rotation {
                rotation.inverse(out);
            }
        }
    }
}

/// Some rows' codes, one a byte, with a scale and a zero for each of the kernels' groups.
#[derive(Default)]
pub(crate) struct Slice {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    /// Zero points or minima; none where codes are symmetric.
    pub zeros: Vec<f32>,
}

impl Slice {
    /// Adds rows below these.
    pub fn extend(&mut self, other: Slice) {
        self.codes.extend(other.codes);
        self.scales.extend(other.scales);
        self.zeros.extend(other.zeros);
    }

    /// The rows in the kernels' order, and what rounding scales and minima to f16 loses; an error
    /// in words.
    pub fn pack(&self, spec: &PackedSpec) -> Result<(AlignedBytes, QuantError), String> {
        let mut error = QuantError::default();
        let mut half = |values: &[f32]| -> Result<Vec<f16>, String> {
            let round = |&value: &f32| {
                let stored = f16::from_f32(value);
                error.squared_error += f64::from(stored.to_f32() - value).powi(2);
                error.squared_norm += f64::from(value).powi(2);
                stored
            };
            let rounded: Vec<f16> = values.iter().map(round).collect();
            match rounded.iter().position(|value| !value.is_finite()) {
                None => Ok(rounded),
                Some(at) => Err(format!(
                    "a scale or minimum is {}, beyond f16; the file may be damaged",
                    values[at]
                )),
            }
        };
        let scales = half(&self.scales)?;
        let (points, minima): (Vec<u8>, Vec<f16>);
        let zeros = match spec.zero {
            ZeroKind::Symmetric => Zeros::Symmetric,
            ZeroKind::Point => {
                points = self.zeros.iter().map(|&zero| zero as u8).collect();
                Zeros::Point(&points)
            }
            ZeroKind::Min => {
                minima = half(&self.zeros)?;
                Zeros::Min(&minima)
            }
        };
        let bytes = pack(spec, &self.codes, &scales, zeros).map_err(|error| error.to_string())?;
        Ok((bytes, error))
    }
}

/// Numbers of 8 bits (4 of exponent, 3 of fraction) with a scale for each block.
pub(crate) struct Float8 {
    /// Inputs.
    pub k: usize,
    pub bytes: SharedBytes,
    pub scales: Floats,
    /// Outputs and inputs of a block.
    pub block: [usize; 2],
}

impl Float8 {
    pub fn rows(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(self.k)) {
            let bytes = &self.bytes[row * self.k..(row + 1) * self.k];
            for (block, (out, bytes)) in out
                .chunks_mut(self.block[1])
                .zip(bytes.chunks(self.block[1]))
                .enumerate()
            {
                let scale = self.scales.get(row / self.block[0], block);
                for (out, byte) in out.iter_mut().zip(bytes) {
                    *out = scale * float8(*byte);
                }
            }
        }
    }
}

/// The value of an E4M3 number: no infinities, NaN where all bits but the sign are set (Micikevicius
/// et al. 2022, arXiv 2209.05433).
fn float8(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match exponent {
        15 if byte & 7 == 7 => f32::NAN,
        0 => fraction / 512.0,
        _ => (8.0 + fraction) * f32::powi(2.0, exponent - 10),
    };
    if byte & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_have_their_published_values() {
        for (byte, value) in [
            (0x00, 0.0),
            (0x01, 1.0 / 512.0),
            (0x07, 7.0 / 512.0),
            (0x08, 1.0 / 64.0),
            (0x38, 1.0),
            (0xb8, -1.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(float8(byte), value, "{byte:#x}");
        }
        assert!(float8(0x7f).is_nan());
    }

    #[test]
    fn codes_are_found_wherever_they_lie() {
        // A 2 x 3 word layout: place 0, 1, ... of a word from its low bits on.
        let word = 0x7654_3210u32.to_le_bytes().to_vec();
        let codes = Codes {
            word: 4,
            stacked: true,
            transposed: true,
            width: 1,
            places: Some([0, 4, 1, 5, 2, 6, 3, 7]),
            ..Codes::rows(word.into(), 4, 1)
        };
        let mut out = [0; 8];
        codes.fill(0..8, 1, &mut out);
        assert_eq!(out, [0, 4, 1, 5, 2, 6, 3, 7]);
        let signed = Codes {
            signed: true,
            ..Codes::rows(vec![0x80, 0xff, 0, 0x7f].into(), 8, 4)
        };
        let mut out = [0; 4];
        signed.fill(0..1, 4, &mut out);
        assert_eq!(out, [0, 127, 128, 255]);
    }
}
