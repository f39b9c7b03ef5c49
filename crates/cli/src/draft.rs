//! Options that say what drafts.

use clap::{Args, ValueEnum};
use kozue_engine::Loaded;
use kozue_engine::speculation::{DraftKind, SpeculationOptions, table};
use std::path::{Path, PathBuf};

use crate::cli::at_least_one;
use crate::failure::Failure;
use crate::hub;

#[derive(Args, Clone)]
pub struct DraftArgs {
    /// What drafts tokens for the model to verify; it never changes an answer
    #[arg(long, value_enum, default_value_t = Draft::Auto)]
    pub draft: Draft,
    /// A drafter (a folder with dflash/ and weaver/ in it) or a smaller model: its path or its name on the hub
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Nodes of every draft tree [default: what pays best on this machine]
    #[arg(long, value_name = "N", value_parser = tree_nodes, allow_negative_numbers = true)]
    pub tree_budget: Option<usize>,
    /// Most children of a node of a draft tree; 1 drafts chains [default: any]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub tree_width: Option<usize>,
}

/// Most nodes of a tree: a pass of more rows takes seconds for a few tokens.
const MOST_NODES: usize = 256;

fn tree_nodes(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        nodes if nodes > MOST_NODES => Err(format!("must be at most {MOST_NODES}")),
        nodes => Ok(nodes),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Draft {
    /// The model's own dflash/ and weaver/, else its prediction head, else lookup
    Auto,
    /// A DFlash network
    Dflash,
    /// A DFlash network and a Weaver
    Weaver,
    /// A smaller model
    Model,
    /// The model's own multi-token prediction head (Qwen3.5)
    Mtp,
    /// What followed the last few tokens before
    Lookup,
    /// Plain decoding
    None,
}

impl DraftArgs {
    /// Gives a model its drafter.
    pub fn apply(&self, loaded: &mut Loaded, path: &Path) -> Result<(), Failure> {
        Ok(loaded.speculate(path, &self.options()?)?)
    }

    /// Whether anything but a drafter's place is asked for.
    pub fn is_one_way(&self) -> bool {
        self.draft != Draft::Auto || self.tree_budget.is_some() || self.tree_width.is_some()
    }

    /// What is asked for, in the engine's words. A drafter that is a name on the hub is fetched where
    /// it is not in the cache.
    pub fn options(&self) -> Result<SpeculationOptions, Failure> {
        let kind = match self.draft {
            Draft::Auto => None,
            Draft::Dflash => Some(DraftKind::Dflash),
            Draft::Weaver => Some(DraftKind::Weaver),
            Draft::Model => Some(DraftKind::Model),
            Draft::Mtp => Some(DraftKind::Mtp),
            Draft::Lookup => Some(DraftKind::Lookup),
            Draft::None => Some(DraftKind::None),
        };
        if kind == Some(DraftKind::None)
            && (self.tree_budget.is_some() || self.tree_width.is_some())
        {
            return Err(Failure::Usage(
                "--draft none draws no trees: leave --tree-budget and --tree-width out, or choose another --draft"
                    .into(),
            ));
        }
        Ok(SpeculationOptions {
            kind,
            path: self.draft_model.as_deref().map(hub::place).transpose()?,
            budget: self.tree_budget,
            width: self.tree_width,
            tables: table::default_folder(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_have_a_bound() {
        assert_eq!(tree_nodes("256"), Ok(256));
        assert_eq!(tree_nodes("257"), Err("must be at most 256".to_string()));
        assert!(tree_nodes("0").is_err());
    }
}
