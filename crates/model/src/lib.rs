//! Language models as formulas.
//!
//! A [`Model`] holds weights and never changes; a [`State`] holds what one sequence remembers.
//! A pass takes rows of one or more sequences through every layer together:
//!
//! - a *chain* of tokens advances its state at once (prefill and plain decoding);
//! - a *tree* of drafted tokens is computed from the untouched state, and
//!   [`Model::commit`] later advances the state along the accepted path.
//!
//! Both give the same bits for the same sequence of tokens, whatever else is in the pass.
//!
//! This crate knows no file format (that is `kozue-checkpoint`), no instruction set (that is
//! `kozue-kernels`) and no sampling (that is `kozue-engine`).

mod attention;
mod delta;
mod dflash;
mod error;
mod experts;
mod layer;
mod memory;
mod mlp;
mod model;
mod mtp;
mod pass;
mod state;
mod stored;
mod tree;
mod walk;
mod weaver;

pub use dflash::{DFlash, DFlashState};
pub use error::Error;
pub use memory::{Working, pass_bytes};
pub use model::Model;
pub use mtp::{Mtp, MtpState};
pub use pass::{Outputs, PassOutput, Rows, Segment};
pub use state::State;
pub use stored::Footprint;
pub use tree::Tree;
pub use walk::{SingleLayer, Walk};
pub use weaver::{Weave, WeaveNode, Weaver};
