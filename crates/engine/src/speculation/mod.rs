//! Drafting trees of tokens for one pass to verify: who drafts, how good a tree is expected to
//! be, and how large it pays to make it on this machine.

mod cost;
mod dflash;
mod draft;
mod drafter;
mod kind;
mod lookup;
mod mtp;
mod open;
mod pace;
mod smaller;
mod spine;
mod stats;
pub mod table;
mod trace;
mod weaver;

pub use cost::RowCosts;
pub use draft::Draft;
pub use drafter::{Drafter, Growth, Read};
pub use kind::DraftKind;
pub use lookup::Lookup;
pub use open::{Speculation, SpeculationOptions, Speculator, drafter_folders};
pub use pace::Pace;
pub(crate) use stats::SpeculationCounts;
pub use stats::SpeculationStats;
pub use trace::Round;
