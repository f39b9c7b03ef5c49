//! A drafted tree with the drafter's own estimate of each node's chance.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use kozue_model::Tree;

/// A tree whose nodes stand in order of their estimated chance of acceptance, best first.
///
/// Because a child is never likelier than its parent, the first n nodes are themselves a tree: the
/// best one of n nodes.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Tokens and parents.
    pub tree: Tree,
    /// Natural logarithm of the estimated chance that the whole path to a node is accepted; 0 for
    /// the root.
    pub log_chances: Vec<f32>,
}

impl Draft {
    /// The root alone: plain decoding.
    pub fn root(token: u32) -> Self {
        Self {
            tree: Tree::new(token),
            log_chances: vec![0.0],
        }
    }

    /// The best tree of `nodes` nodes when every depth's tokens are independent of each other
    /// (DDTree, arXiv 2604.12989): `shortlists[d]` holds tokens and natural log-probabilities for
    /// depth d + 1, likeliest first.
    pub fn from_marginals(root: u32, shortlists: &[Vec<(u32, f32)>], nodes: usize) -> Draft {
        let mut draft = Draft::root(root);
        let mut heap = BinaryHeap::new();
        let mut offered = 0;
        let mut offer = |heap: &mut BinaryHeap<_>, draft: &Draft, parent: usize, rank: usize| {
            let depth = draft.tree.depths()[parent] as usize;
            if let Some(&(_, edge)) = shortlists.get(depth).and_then(|list| list.get(rank)) {
                offered += 1;
                let log_chance = draft.log_chances[parent] + edge.min(0.0);
                heap.push(Candidate {
                    log_chance,
                    offered,
                    what: (parent, rank),
                });
            }
        };
        offer(&mut heap, &draft, 0, 0);
        while draft.len() < nodes {
            let Some(Candidate {
                what: (parent, rank),
                ..
            }) = heap.pop()
            else {
                break;
            };
            let (token, edge) = shortlists[draft.tree.depths()[parent] as usize][rank];
            let node = draft.push(parent, token, edge);
            offer(&mut heap, &draft, parent, rank + 1);
            offer(&mut heap, &draft, node, 0);
        }
        draft
    }

    /// Number of nodes, the root included.
    pub fn len(&self) -> usize {
        self.log_chances.len()
    }

    /// Whether nothing was drafted below the root.
    pub fn is_empty(&self) -> bool {
        self.len() == 1
    }

    /// Keeps the `nodes` likeliest nodes; the root always stays.
    pub fn truncate(&mut self, nodes: usize) {
        self.tree.truncate(nodes);
        self.log_chances.truncate(nodes.max(1));
    }

    /// Adds `token` below `parent` with the natural log-probability `edge` of that step.
    pub(crate) fn push(&mut self, parent: usize, token: u32, edge: f32) -> usize {
        // Rounding may lift a log-probability above zero, which would break the order.
        let log_chance = self.log_chances[parent] + edge.min(0.0);
        let node = self
            .tree
            .push(parent, token)
            .expect("the parent was made by this draft");
        self.log_chances.push(log_chance);
        node
    }
}

/// Something that may be added to a tree, ordered by its chance; ties go to the one offered first,
/// so that a draft never depends on the order of a heap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<T> {
    pub(crate) log_chance: f32,
    pub(crate) offered: usize,
    pub(crate) what: T,
}

impl<T> PartialEq for Candidate<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Candidate<T> {}

impl<T> PartialOrd for Candidate<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Candidate<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.log_chance
            .total_cmp(&other.log_chance)
            .then_with(|| other.offered.cmp(&self.offered))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_sure_first_choice_makes_a_chain_and_doubt_makes_siblings() {
        let sure = vec![vec![(1, -0.01), (2, -5.0)]; 4];
        let draft = Draft::from_marginals(9, &sure, 5);
        assert_eq!(draft.tree.parents(), &[-1, 0, 1, 2, 3]);
        let doubt = vec![vec![(1, -1.0), (2, -1.1), (3, -1.2)]; 4];
        let draft = Draft::from_marginals(9, &doubt, 4);
        assert_eq!(draft.tree.parents(), &[-1, 0, 0, 0]);
        assert_eq!(draft.tree.tokens(), &[9, 1, 2, 3]);
    }

    proptest! {
        /// Against trying every node of the full product tree.
        #[test]
        fn it_is_the_best_tree_of_its_size(
            lists in proptest::collection::vec(
                proptest::collection::vec(-4.0f32..0.0, 1..4), 1..4),
            nodes in 1usize..20,
        ) {
            let shortlists: Vec<Vec<(u32, f32)>> = lists
                .into_iter()
                .map(|mut list| {
                    list.sort_by(|a, b| b.total_cmp(a));
                    list.into_iter().enumerate().map(|(i, p)| (i as u32, p)).collect()
                })
                .collect();
            let mut all = vec![0.0f32];
            let mut level = vec![0.0f32];
            for list in &shortlists {
                level = level.iter().flat_map(|l| list.iter().map(move |(_, p)| l + p)).collect();
                all.extend(&level);
            }
            all.sort_by(|a, b| b.total_cmp(a));
            let draft = Draft::from_marginals(0, &shortlists, nodes);
            let size = nodes.min(all.len());
            prop_assert_eq!(draft.len(), size);
            let best: f32 = all[..size].iter().map(|l| l.exp()).sum();
            let ours: f32 = draft.log_chances.iter().map(|l| l.exp()).sum();
            prop_assert!((best - ours).abs() < 1e-4);
            prop_assert!(draft.log_chances.windows(2).all(|w| w[0] >= w[1]));
        }
    }
}
