//! Drafting trees of tokens for one pass to verify: how good a tree is expected to be, and how
//! large it pays to make it on this machine.

mod cost;
mod draft;
mod lookup;

pub use cost::RowCosts;
pub use draft::Draft;
pub use lookup::Lookup;
