//! Hand-written CPU kernels of Kozue.
//!
//! A row of a result is the same bits whatever number of rows run beside it, whatever the number
//! of threads and whatever the instruction set.

pub mod bytes;
pub mod cpu;
pub mod dense;
pub mod error;
pub mod gram;
pub mod hadamard;
pub mod isa;
pub mod linear;
pub mod matrix;
pub mod measure;
pub mod packed;
pub mod quantizer;
pub mod threads;

pub use bytes::{AlignedBytes, SharedBytes};
pub use cpu::{Cpu, Scratch};
pub use dense::{DenseKind, DenseMatrix};
pub use error::Error;
pub use gram::Gram;
pub use hadamard::Rotation;
pub use isa::Isa;
pub use linear::{Linear, gathered, linear, linear_bytes};
pub use matrix::Matrix;
pub use packed::{PackedMatrix, PackedSpec, ZeroKind, Zeros, pack};
pub use quantizer::{Quadratic, QuantError, Quantized, Quantizer};
pub use threads::ThreadPool;

mod activation;
mod attention;
mod conv;
mod delta;
mod delta_solve;
mod kv_cache;
mod lanes;
mod memory;
mod norm;
mod product;
mod rope;
mod route;
mod rows;
mod stored;
#[cfg(test)]
mod testing;

pub use activation::{add_assign, gelu_mul, sigmoid_mul, silu_mul};
pub use attention::{Visible, attention, attention_bytes};
pub use conv::{Conv, ConvState};
pub use delta::{
    DeltaRows, DeltaShape, DeltaState, delta_advance, delta_chain, delta_gates, delta_tree,
};
pub use delta_solve::{delta_solve_chain, delta_solve_tree};
pub use kv_cache::{KvCache, KvType};
pub use memory::{available_memory, obtainable_memory};
pub use norm::{add_rms_norm, gated_norm, l2_norm_heads, rms_norm, rms_norm_heads};
pub use rope::Rope;
pub use route::{Choice, add_weighted, route, sigmoid};
pub use rows::Heads;
pub use stored::{Page, read_floats, write_floats};
