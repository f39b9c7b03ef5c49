//! The trees of an answer, kept to be looked at.

use super::draft::Draft;

/// One verified draft.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// Token of every node, the root first.
    pub tokens: Vec<u32>,
    /// Parent of every node; -1 for the root.
    pub parents: Vec<i32>,
    /// Natural logarithm of the drafter's estimate that a node is accepted.
    pub log_chances: Vec<f32>,
    /// The accepted nodes, root first.
    pub path: Vec<usize>,
    /// The token that the target drew after them.
    pub next: u32,
}

impl Round {
    pub(crate) fn new(draft: &Draft, path: &[usize], next: u32) -> Round {
        Round {
            tokens: draft.tree.tokens().to_vec(),
            parents: draft.tree.parents().to_vec(),
            log_chances: draft.log_chances.clone(),
            path: path.to_vec(),
            next,
        }
    }
}
