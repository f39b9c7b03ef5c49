//! Hand-written CPU kernels of Kozue.
//!
//! A row of a result is the same bits whatever number of rows run beside it, whatever the number
//! of threads and whatever the instruction set.

pub mod cpu;
pub mod isa;
pub mod threads;

pub use cpu::Cpu;
pub use isa::Isa;
pub use threads::ThreadPool;
