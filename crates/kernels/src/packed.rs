//! Matrices of 4-bit and 8-bit codes, in the order in which the kernels read them.
//!
//! The matrix is cut into tiles of 64 outputs (n is padded to 64) by one group of inputs (k is
//! padded to the group). The tiles of 64 outputs lie one after the other along k, then follow
//! those of the next 64 outputs. A tile is
//!
//! ```text
//! 64 scales, f16
//! nothing (Symmetric) | 64 zero points, u8 (Point) | 64 minima, f16 (Min)
//! 4 blocks of 16 outputs by the group's codes
//! ```
//!
//! A block of 8-bit codes has one line of 64 bytes for each quad of inputs: 16 outputs x 4 inputs.
//! In a block of 4-bit codes one line holds quad 2j in its low and quad 2j + 1 in its high halves.
//! This is the operand order of VNNI and of AMX tiles. All numbers are little-endian.

use half::f16;

use crate::bytes::{AlignedBytes, SharedBytes};
use crate::error::Error;
use crate::hadamard::Rotation;

/// Outputs in a tile.
pub const TILE: usize = 64;
/// Outputs in a block of a tile.
pub const BLOCK: usize = 16;

/// What a code of zero stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ZeroKind {
    /// w = scale * (code - 2^(bits - 1))
    Symmetric,
    /// w = scale * (code - zero), a zero point (u8) for each output and group
    Point,
    /// w = scale * code + min, a minimum (f16) for each output and group
    Min,
}

/// The zeros that go with the scales, row-major outputs x groups.
#[derive(Clone, Copy, Debug)]
pub enum Zeros<'a> {
    /// See [`ZeroKind::Symmetric`].
    Symmetric,
    /// See [`ZeroKind::Point`].
    Point(&'a [u8]),
    /// See [`ZeroKind::Min`].
    Min(&'a [f16]),
}

impl Zeros<'_> {
    /// Its kind.
    pub fn kind(&self) -> ZeroKind {
        match self {
            Zeros::Symmetric => ZeroKind::Symmetric,
            Zeros::Point(_) => ZeroKind::Point,
            Zeros::Min(_) => ZeroKind::Min,
        }
    }
}

/// Shape and format of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedSpec {
    /// Outputs (rows).
    pub n: usize,
    /// Inputs (columns).
    pub k: usize,
    /// Bits of a code: 4 or 8.
    pub bits: u8,
    /// Inputs that share a scale: 32, 64 or 128.
    pub group: usize,
    /// What a code of zero stands for.
    pub zero: ZeroKind,
}

impl PackedSpec {
    /// Checks the shape and the format.
    ///
    /// # Errors
    /// If a number is out of its range.
    pub fn check(&self) -> Result<(), Error> {
        let Self {
            n, k, bits, group, ..
        } = *self;
        if n == 0 || k == 0 || n > 1 << 31 || k > 1 << 31 {
            return Err(Error::new(format!("a packed matrix cannot be {n} x {k}")));
        }
        if bits != 4 && bits != 8 {
            return Err(Error::new(format!(
                "packed codes have 4 or 8 bits, not {bits}"
            )));
        }
        if ![32, 64, 128].contains(&group) {
            return Err(Error::new(format!(
                "packed groups are of 32, 64 or 128 inputs, not {group}"
            )));
        }
        Ok(())
    }

    /// Groups along k.
    pub fn groups(&self) -> usize {
        self.k.div_ceil(self.group)
    }

    /// Tiles along n.
    pub fn tiles(&self) -> usize {
        self.n.div_ceil(TILE)
    }

    /// Bytes of the zeros in a tile.
    pub(crate) fn zero_bytes(&self) -> usize {
        match self.zero {
            ZeroKind::Symmetric => 0,
            ZeroKind::Point => TILE,
            ZeroKind::Min => 2 * TILE,
        }
    }

    /// Bytes of one block of 16 outputs' codes.
    pub(crate) fn block_bytes(&self) -> usize {
        BLOCK * self.group * self.bits as usize / 8
    }

    /// Bytes of a tile before its codes.
    pub(crate) fn head_bytes(&self) -> usize {
        2 * TILE + self.zero_bytes()
    }

    /// Bytes of one tile (64 outputs x one group).
    pub fn tile_bytes(&self) -> usize {
        self.head_bytes() + TILE / BLOCK * self.block_bytes()
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.tiles() * self.groups() * self.tile_bytes()
    }

    /// Where the tile of outputs `tile * 64 ..` and group `group` starts.
    pub(crate) fn tile_offset(&self, tile: usize, group: usize) -> usize {
        (tile * self.groups() + group) * self.tile_bytes()
    }

    /// Byte offset in a tile, and shift, of the code of output `row` (0..64) and input `i` of the
    /// group.
    fn code_at(&self, row: usize, i: usize) -> (usize, u32) {
        let (quad, byte) = (i / 4, i % 4);
        let (line, shift) = if self.bits == 4 {
            (quad / 2, 4 * (quad as u32 % 2))
        } else {
            (quad, 0)
        };
        let offset = self.head_bytes()
            + row / BLOCK * self.block_bytes()
            + line * 64
            + row % BLOCK * 4
            + byte;
        (offset, shift)
    }
}

/// Packs codes (row-major n x k, one a byte), scales and zeros (row-major n x groups).
///
/// Rows may be packed in slices whose length is a multiple of 64: the bytes of the slices, one
/// after the other, are those of the whole matrix.
///
/// # Errors
/// If a length does not match the spec, the zeros are of another kind, or a code is too large.
pub fn pack(
    spec: &PackedSpec,
    codes: &[u8],
    scales: &[f16],
    zeros: Zeros<'_>,
) -> Result<AlignedBytes, Error> {
    spec.check()?;
    let PackedSpec { n, k, group, .. } = *spec;
    let groups = spec.groups();
    let want = |what: &str, len: usize, want: usize| {
        if len == want {
            Ok(())
        } else {
            Err(Error::new(format!(
                "packing {n} x {k} takes {want} {what}, not {len}"
            )))
        }
    };
    want("codes", codes.len(), n * k)?;
    want("scales", scales.len(), n * groups)?;
    match zeros {
        Zeros::Point(zeros) => want("zero points", zeros.len(), n * groups)?,
        Zeros::Min(mins) => want("minima", mins.len(), n * groups)?,
        Zeros::Symmetric => {}
    }
    if zeros.kind() != spec.zero {
        return Err(Error::new(format!(
            "packing {:?} zeros into a matrix of {:?} zeros",
            zeros.kind(),
            spec.zero
        )));
    }
    if spec.bits == 4
        && let Some(i) = codes.iter().position(|&c| c > 15)
    {
        return Err(Error::new(format!(
            "code {i} is {}, 4 bits hold 0 to 15",
            codes[i]
        )));
    }

    let mut bytes = AlignedBytes::zeroed(spec.bytes());
    for row in 0..n {
        for g in 0..groups {
            let at = spec.tile_offset(row / TILE, g);
            let tile = &mut bytes[at..at + spec.tile_bytes()];
            let r = row % TILE;
            let index = row * groups + g;
            tile[2 * r..2 * r + 2].copy_from_slice(&scales[index].to_le_bytes());
            match zeros {
                Zeros::Symmetric => {}
                Zeros::Point(zeros) => tile[2 * TILE + r] = zeros[index],
                Zeros::Min(mins) => {
                    let at = 2 * TILE + 2 * r;
                    tile[at..at + 2].copy_from_slice(&mins[index].to_le_bytes());
                }
            }
            let inputs = &codes[row * k + g * group..row * k + ((g + 1) * group).min(k)];
            for (i, &code) in inputs.iter().enumerate() {
                let (offset, shift) = spec.code_at(r, i);
                tile[offset] |= code << shift;
            }
        }
    }
    Ok(bytes)
}

/// A matrix of codes, n outputs x k inputs, see the module's text.
#[derive(Clone)]
pub struct PackedMatrix {
    spec: PackedSpec,
    rotation: Option<Rotation>,
    bytes: SharedBytes,
}

impl PackedMatrix {
    /// Takes bytes in the order of [`pack`]. With a rotation, the codes are those of the rotated
    /// rows, and kernels rotate the input.
    ///
    /// # Errors
    /// If the spec, the number of bytes or the rotation's width is wrong.
    pub fn new(
        spec: PackedSpec,
        rotation: Option<Rotation>,
        bytes: impl Into<SharedBytes>,
    ) -> Result<Self, Error> {
        spec.check()?;
        let bytes = bytes.into();
        if bytes.len() != spec.bytes() {
            return Err(Error::new(format!(
                "a packed {} x {} matrix of {} bits in groups of {} takes {} bytes, not {}",
                spec.n,
                spec.k,
                spec.bits,
                spec.group,
                spec.bytes(),
                bytes.len()
            )));
        }
        if let Some(rotation) = &rotation
            && rotation.k() != spec.k
        {
            return Err(Error::new(format!(
                "a rotation of width {} does not fit a matrix of {} inputs",
                rotation.k(),
                spec.k
            )));
        }
        Ok(Self {
            spec,
            rotation,
            bytes,
        })
    }

    /// Shape and format.
    pub fn spec(&self) -> &PackedSpec {
        &self.spec
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.spec.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.spec.k
    }

    /// The rotation of its inputs, if any.
    pub fn rotation(&self) -> Option<&Rotation> {
        self.rotation.as_ref()
    }

    /// The bytes in the order of [`pack`].
    pub fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// The code of an output and an input.
    pub fn code(&self, row: usize, input: usize) -> u8 {
        let tile = &self.bytes[self.spec.tile_offset(row / TILE, input / self.spec.group)..];
        let (offset, shift) = self.spec.code_at(row % TILE, input % self.spec.group);
        let code = tile[offset] >> shift;
        if self.spec.bits == 4 { code & 15 } else { code }
    }

    /// The scale of an output and a group.
    pub fn scale(&self, row: usize, group: usize) -> f16 {
        self.head_f16(row, group, 0)
    }

    /// The minimum of an output and a group; 0 unless the zeros are [`ZeroKind::Min`].
    pub fn min(&self, row: usize, group: usize) -> f16 {
        match self.spec.zero {
            ZeroKind::Min => self.head_f16(row, group, 2 * TILE),
            _ => f16::ZERO,
        }
    }

    fn head_f16(&self, row: usize, group: usize, start: usize) -> f16 {
        let at = self.spec.tile_offset(row / TILE, group) + start + 2 * (row % TILE);
        f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// The zero point of an output and a group; 0 if the zeros are [`ZeroKind::Min`].
    pub fn zero_point(&self, row: usize, group: usize) -> u8 {
        match self.spec.zero {
            ZeroKind::Symmetric => 1 << (self.spec.bits - 1),
            ZeroKind::Point => {
                let at = self.spec.tile_offset(row / TILE, group) + 2 * TILE + row % TILE;
                self.bytes[at]
            }
            ZeroKind::Min => 0,
        }
    }

    /// Writes the weights of an output as f32, the rotation undone. `out` has k values.
    pub fn row_into(&self, row: usize, out: &mut [f32]) {
        self.rotated_row_into(row, out);
        if let Some(rotation) = &self.rotation {
            rotation.inverse(out);
        }
    }

    /// As [`PackedMatrix::row_into`], but with the rotation left in.
    pub fn rotated_row_into(&self, row: usize, out: &mut [f32]) {
        assert!(
            row < self.n() && out.len() == self.k(),
            "row {row} of {} x {}",
            self.n(),
            self.k()
        );
        for (g, out) in out.chunks_mut(self.spec.group).enumerate() {
            let scale = self.scale(row, g).to_f32();
            let zero = i32::from(self.zero_point(row, g));
            let min = self.min(row, g).to_f32();
            let at = self.spec.tile_offset(row / TILE, g);
            let tile = &self.bytes[at..at + self.spec.tile_bytes()];
            for (i, out) in out.iter_mut().enumerate() {
                let (offset, shift) = self.spec.code_at(row % TILE, i);
                let mut code = tile[offset] >> shift;
                if self.spec.bits == 4 {
                    code &= 15;
                }
                *out = scale.mul_add((i32::from(code) - zero) as f32, min);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
