//! The names of the drafters.

use serde::Serialize;
use std::fmt;

/// What drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftKind {
    /// A DFlash network: independent shortlists for a block of positions.
    Dflash,
    /// A DFlash network with a Weaver that makes its shortlists agree.
    Weaver,
    /// A smaller model with the same vocabulary.
    Model,
    /// The model's own multi-token prediction head.
    Mtp,
    /// What followed the last few tokens where they stood before.
    Lookup,
    /// Nothing: plain decoding.
    None,
}

impl DraftKind {
    /// The name in options, JSON and docs.
    pub fn name(self) -> &'static str {
        match self {
            DraftKind::Dflash => "dflash",
            DraftKind::Weaver => "weaver",
            DraftKind::Model => "model",
            DraftKind::Mtp => "mtp",
            DraftKind::Lookup => "lookup",
            DraftKind::None => "none",
        }
    }
}

impl fmt::Display for DraftKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}
