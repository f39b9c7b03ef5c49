//! What a format's loader gives: a description and tensors under Hugging Face names.

use std::fmt;
use std::ops::Range;

use kozue_kernels::{Matrix, PackedSpec, Rotation};

use crate::affine::Slice;
use crate::description::Description;
use crate::error::Error;

/// One tensor of a checkpoint, as a listing shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Hugging Face name without a multimodal prefix.
    pub name: String,
    /// How it is stored: `BF16`, `Q4_K`, `int4 group 64 point`, ...
    pub format: String,
    /// Dimensions in Hugging Face's order, outputs first.
    pub shape: Vec<usize>,
    /// Bytes it takes in the file.
    pub bytes: u64,
    /// How it is kept by a model that runs.
    pub memory: InMemory,
    /// Whether it belongs to a part that plain text generation does not use (vision tower, MTP
    /// layers, rotary buffers, a head beside a tied embedding).
    pub aside: bool,
}

/// How a tensor is kept in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InMemory {
    /// As [`TensorInfo::format`].
    pub format: String,
    /// Bytes it takes there.
    pub bytes: u64,
    /// Whether these are the file's own bytes, which the system can drop and load again.
    pub mapped: bool,
    /// Whether values differ from those stored.
    pub lossy: bool,
}

impl InMemory {
    /// The bytes of the file as they are.
    pub(crate) fn mapped(format: &str, bytes: u64) -> InMemory {
        InMemory {
            format: format.to_owned(),
            bytes,
            mapped: true,
            lossy: false,
        }
    }

    /// A tensor of this shape as f32.
    pub(crate) fn f32(shape: &[usize]) -> InMemory {
        InMemory {
            format: "F32".to_owned(),
            bytes: 4 * shape.iter().map(|&n| n as u64).product::<u64>(),
            mapped: false,
            lossy: false,
        }
    }
}

/// What was done to tensors when they were loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// One line.
    pub text: String,
    /// Whether values changed.
    pub lossy: bool,
}

impl fmt::Display for Note {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

/// A format's loader. Names are Hugging Face's without multimodal prefix, values have Hugging
/// Face's meaning (raw norm weights, `A_log`), and a tensor that is asked for with other
/// dimensions than it has is an error, never a panic.
pub(crate) trait Source: Send + Sync {
    /// All but the tensors.
    fn description(&self) -> &Description;

    /// Every tensor of the checkpoint, those set aside too.
    fn tensors(&self) -> Vec<TensorInfo>;

    /// A matrix of `n` outputs and `k` inputs, ready for the kernels.
    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error>;

    /// Any tensor of `len` values, flattened, as f32.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error>;

    /// Rows `first ..` of a matrix with `k` inputs, as many as fit `out`, exactly as stored and
    /// without the losses that [`Source::matrix`] may add. For converters, which read a matrix
    /// in slices; called from several threads.
    fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error>;

    /// The codes of a matrix, where it is stored as codes that the kernels can hold.
    fn codes(&self, _name: &str) -> Option<Box<dyn CodeRows + '_>> {
        None
    }

    /// Let go of the memory behind a tensor after it was read; it can still be read again.
    fn release(&self, name: &str);

    /// What was done to the values at load, one note for each kind of tensor.
    fn notes(&self) -> Vec<Note>;
}

/// A matrix of codes, read in slices of rows. For converters, which need not round again what was
/// rounded before.
pub(crate) trait CodeRows: Sync {
    /// Shape and kind, in the kernels' groups.
    fn spec(&self) -> PackedSpec;

    /// Rotation of the inputs.
    fn rotation(&self) -> Option<Rotation>;

    /// Some rows, with a scale and a zero for each group.
    fn rows(&self, rows: Range<usize>) -> Slice;
}
