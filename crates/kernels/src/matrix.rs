//! A weight matrix, packed or dense.

use crate::bytes::SharedBytes;
use crate::dense::DenseMatrix;
use crate::packed::PackedMatrix;

/// A weight matrix of n outputs x k inputs. Cloning it copies no weights.
#[derive(Clone)]
pub enum Matrix {
    /// Codes of 4 or 8 bits in kernel order.
    Packed(PackedMatrix),
    /// Floats.
    Dense(DenseMatrix),
}

impl Matrix {
    /// Outputs.
    pub fn n(&self) -> usize {
        match self {
            Matrix::Packed(matrix) => matrix.n(),
            Matrix::Dense(matrix) => matrix.n(),
        }
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        match self {
            Matrix::Packed(matrix) => matrix.k(),
            Matrix::Dense(matrix) => matrix.k(),
        }
    }

    /// Writes the weights of an output as f32, any rotation undone. `out` has k values.
    pub fn row_into(&self, row: usize, out: &mut [f32]) {
        match self {
            Matrix::Packed(matrix) => matrix.row_into(row, out),
            Matrix::Dense(matrix) => matrix.row_into(row, out),
        }
    }

    /// The stored bytes.
    pub fn bytes(&self) -> &SharedBytes {
        match self {
            Matrix::Packed(matrix) => matrix.bytes(),
            Matrix::Dense(matrix) => matrix.bytes(),
        }
    }
}

impl From<PackedMatrix> for Matrix {
    fn from(matrix: PackedMatrix) -> Self {
        Matrix::Packed(matrix)
    }
}

impl From<DenseMatrix> for Matrix {
    fn from(matrix: DenseMatrix) -> Self {
        Matrix::Dense(matrix)
    }
}
