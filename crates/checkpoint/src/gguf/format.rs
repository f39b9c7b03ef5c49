//! The tensor types of GGUF: which numbers name them and how long their blocks are.
//!
//! Block layouts follow ggml (`ggml-common.h`): a block of 32 values, or a block of 256 values
//! with 8 or 16 smaller scales inside (the `_K` types).

/// A tensor type that this loader reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Format {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl Format {
    /// The number that ggml gives this type.
    pub fn number(self) -> u32 {
        match self {
            Format::F32 => 0,
            Format::F16 => 1,
            Format::Q4_0 => 2,
            Format::Q4_1 => 3,
            Format::Q5_0 => 6,
            Format::Q5_1 => 7,
            Format::Q8_0 => 8,
            Format::Q4K => 12,
            Format::Q5K => 13,
            Format::Q6K => 14,
            Format::Bf16 => 30,
        }
    }

    /// The type that ggml gives this number, or the name of one that is not read here.
    pub fn from_ggml(number: u32) -> Result<Format, &'static str> {
        Ok(match number {
            0 => Format::F32,
            1 => Format::F16,
            2 => Format::Q4_0,
            3 => Format::Q4_1,
            6 => Format::Q5_0,
            7 => Format::Q5_1,
            8 => Format::Q8_0,
            12 => Format::Q4K,
            13 => Format::Q5K,
            14 => Format::Q6K,
            30 => Format::Bf16,
            4 => return Err("Q4_2"),
            5 => return Err("Q4_3"),
            9 => return Err("Q8_1"),
            10 => return Err("Q2_K"),
            11 => return Err("Q3_K"),
            15 => return Err("Q8_K"),
            16 => return Err("IQ2_XXS"),
            17 => return Err("IQ2_XS"),
            18 => return Err("IQ3_XXS"),
            19 => return Err("IQ1_S"),
            20 => return Err("IQ4_NL"),
            21 => return Err("IQ3_S"),
            22 => return Err("IQ2_S"),
            23 => return Err("IQ4_XS"),
            24 => return Err("I8"),
            25 => return Err("I16"),
            26 => return Err("I32"),
            27 => return Err("I64"),
            28 => return Err("F64"),
            29 => return Err("IQ1_M"),
            34 => return Err("TQ1_0"),
            35 => return Err("TQ2_0"),
            39 => return Err("MXFP4"),
            40 => return Err("NVFP4"),
            41 => return Err("Q1_0"),
            42 => return Err("Q2_0"),
            _ => return Err("an unknown type"),
        })
    }

    /// Its name in ggml.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "F32",
            Format::F16 => "F16",
            Format::Bf16 => "BF16",
            Format::Q4_0 => "Q4_0",
            Format::Q4_1 => "Q4_1",
            Format::Q5_0 => "Q5_0",
            Format::Q5_1 => "Q5_1",
            Format::Q8_0 => "Q8_0",
            Format::Q4K => "Q4_K",
            Format::Q5K => "Q5_K",
            Format::Q6K => "Q6_K",
        }
    }

    /// Values in one block; a row is a whole number of blocks.
    pub fn block_values(self) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::Bf16 => 1,
            Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1 | Format::Q8_0 => 32,
            Format::Q4K | Format::Q5K | Format::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            Format::Q4_0 => 2 + 16,
            Format::Q4_1 => 2 + 2 + 16,
            Format::Q5_0 => 2 + 4 + 16,
            Format::Q5_1 => 2 + 2 + 4 + 16,
            Format::Q8_0 => 2 + 32,
            Format::Q4K => 2 + 2 + 12 + 128,
            Format::Q5K => 2 + 2 + 12 + 32 + 128,
            Format::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Bytes of a row of `values` values, which must be whole blocks.
    pub fn row_bytes(self, values: usize) -> usize {
        values / self.block_values() * self.block_bytes()
    }
}
