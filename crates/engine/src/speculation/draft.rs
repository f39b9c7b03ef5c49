//! A drafted tree with the drafter's own estimate of each node's chance.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::drafter::Growth;
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

    /// The best tree when every depth's tokens are independent of each other (DDTree, arXiv
    /// 2604.12989): `shortlists[d]` holds tokens and natural log-probabilities for depth d + 1,
    /// likeliest first.
    pub fn from_marginals(growth: &Growth, shortlists: &[Vec<(u32, f32)>]) -> Draft {
        let mut draft = Draft::root(growth.root);
        let mut heap = BinaryHeap::new();
        let mut offered = 0;
        let mut offer = |heap: &mut BinaryHeap<_>, draft: &Draft, parent: usize, rank: usize| {
            let depth = draft.tree.depths()[parent] as usize;
            if depth >= growth.depth {
                return;
            }
            if let Some(&(_, edge)) = shortlists.get(depth).and_then(|list| list.get(rank)) {
                offered += 1;
                let log_chance = draft.log_chances[parent] + edge.min(0.0);
                if log_chance < growth.least {
                    return;
                }
                heap.push(Candidate {
                    log_chance,
                    offered,
                    what: (parent, rank),
                });
            }
        };
        offer(&mut heap, &draft, 0, 0);
        while draft.len() < growth.nodes {
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

    /// Keeps the nodes whose paths are `legal`, which says how many tokens of a path below the
    /// root are.
    pub fn keep_legal<E>(
        &mut self,
        mut legal: impl FnMut(&[u32]) -> Result<usize, E>,
    ) -> Result<(), E> {
        let old = std::mem::replace(self, Draft::root(self.tree.tokens()[0]));
        // New places of the old nodes that stay.
        let mut places = vec![Some(0)];
        for node in 1..old.len() {
            let parent = old.tree.parents()[node] as usize;
            let path = old.tree.path(node);
            let tokens: Vec<u32> = path[1..].iter().map(|&n| old.tree.tokens()[n]).collect();
            let place = match places[parent] {
                Some(parent_place) if legal(&tokens)? == tokens.len() => {
                    let edge = old.log_chances[node] - old.log_chances[parent];
                    Some(self.push(parent_place, old.tree.tokens()[node], edge))
                }
                _ => None,
            };
            places.push(place);
        }
        Ok(())
    }

    /// Adds `token` below `parent` with the natural log-probability `edge` of that step; gives the
    /// new node.
    ///
    /// # Panics
    /// If there is no node `parent`.
    pub fn push(&mut self, parent: usize, token: u32, edge: f32) -> usize {
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

/// Nodes found in any order, of which the best make a tree.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    nodes: Vec<PoolNode>,
}

#[derive(Clone, Copy, Debug)]
struct PoolNode {
    token: u32,
    parent: usize,
    depth: usize,
    log_chance: f32,
}

impl Pool {
    pub(crate) fn new(root: u32) -> Pool {
        let root = PoolNode {
            token: root,
            parent: 0,
            depth: 0,
            log_chance: 0.0,
        };
        Pool { nodes: vec![root] }
    }

    /// Adds `token` below `parent` with the natural log-probability `edge` of that step.
    pub(crate) fn push(&mut self, parent: usize, token: u32, edge: f32) -> usize {
        self.nodes.push(PoolNode {
            token,
            parent,
            depth: self.nodes[parent].depth + 1,
            // Rounding may lift a log-probability above zero, which would break the order.
            log_chance: self.nodes[parent].log_chance + edge.min(0.0),
        });
        self.nodes.len() - 1
    }

    pub(crate) fn token(&self, node: usize) -> u32 {
        self.nodes[node].token
    }

    pub(crate) fn depth(&self, node: usize) -> usize {
        self.nodes[node].depth
    }

    pub(crate) fn log_chance(&self, node: usize) -> f32 {
        self.nodes[node].log_chance
    }

    /// The chance of the worst of the best `count` nodes; `None` where there are fewer.
    pub(crate) fn least_of(&self, count: usize) -> Option<f32> {
        let mut chances: Vec<f32> = self.nodes.iter().map(|node| node.log_chance).collect();
        if count == 0 || chances.len() < count {
            return None;
        }
        let (_, least, _) = chances.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
        Some(*least)
    }

    /// The tree of the best `count` nodes.
    pub(crate) fn best(&self, count: usize) -> Draft {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        // Parents come before children in the pool and are at least as likely, so a stable sort
        // keeps them first.
        order.sort_by(|&a, &b| self.log_chance(b).total_cmp(&self.log_chance(a)));
        order.truncate(count.max(1));
        let mut places = vec![0; self.nodes.len()];
        let mut draft = Draft::root(self.nodes[0].token);
        for &index in &order[1..] {
            let node = self.nodes[index];
            let edge = node.log_chance - self.log_chance(node.parent);
            places[index] = draft.push(places[node.parent], node.token, edge);
        }
        draft
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

    #[test]
    fn illegal_nodes_go_with_all_below_them() {
        let mut draft = Draft::root(9);
        let a = draft.push(0, 1, -0.5);
        let b = draft.push(0, 2, -1.0);
        draft.push(a, 2, -1.0);
        draft.push(b, 1, -1.0);
        draft.push(a, 3, -2.0);
        // Only odd tokens are legal.
        let legal = |path: &[u32]| Ok::<_, ()>(path.iter().take_while(|t| *t % 2 == 1).count());
        draft.keep_legal(legal).unwrap();
        assert_eq!(draft.tree.tokens(), [9, 1, 3]);
        assert_eq!(draft.tree.parents(), [-1, 0, 1]);
        assert_eq!(draft.log_chances, [0.0, -0.5, -2.5]);
    }
    use proptest::prelude::*;

    #[test]
    fn a_sure_first_choice_makes_a_chain_and_doubt_makes_siblings() {
        let sure = vec![vec![(1, -0.01), (2, -5.0)]; 4];
        let draft = Draft::from_marginals(&Growth::of(9, 5), &sure);
        assert_eq!(draft.tree.parents(), &[-1, 0, 1, 2, 3]);
        let doubt = vec![vec![(1, -1.0), (2, -1.1), (3, -1.2)]; 4];
        let draft = Draft::from_marginals(&Growth::of(9, 4), &doubt);
        assert_eq!(draft.tree.parents(), &[-1, 0, 0, 0]);
        assert_eq!(draft.tree.tokens(), &[9, 1, 2, 3]);
    }

    #[test]
    fn growth_ends_at_its_depth_and_least_chance() {
        let lists = vec![vec![(1, -0.5), (2, -1.5)]; 4];
        let growth = Growth {
            depth: 2,
            ..Growth::of(9, 100)
        };
        let draft = Draft::from_marginals(&growth, &lists);
        assert_eq!(draft.len(), 7);
        let growth = Growth {
            least: -1.1,
            ..Growth::of(9, 100)
        };
        let draft = Draft::from_marginals(&growth, &lists);
        assert_eq!(draft.tree.tokens(), &[9, 1, 1]);
    }

    #[test]
    fn a_pool_of_nodes_gives_its_best_ones_parents_first() {
        let mut pool = Pool::new(9);
        let a = pool.push(0, 1, -2.0);
        let b = pool.push(0, 2, -0.1);
        let c = pool.push(b, 3, 0.3);
        pool.push(a, 4, 0.0);
        assert_eq!(pool.log_chance(c), -0.1);
        assert_eq!(pool.least_of(3), Some(-0.1));
        assert_eq!(pool.least_of(9), None);
        let draft = pool.best(4);
        assert_eq!(draft.tree.tokens(), &[9, 2, 3, 1]);
        assert_eq!(draft.tree.parents(), &[-1, 0, 1, 0]);
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
            let draft = Draft::from_marginals(&Growth::of(0, nodes), &shortlists);
            let size = nodes.min(all.len());
            prop_assert_eq!(draft.len(), size);
            let best: f32 = all[..size].iter().map(|l| l.exp()).sum();
            let ours: f32 = draft.log_chances.iter().map(|l| l.exp()).sum();
            prop_assert!((best - ours).abs() < 1e-4);
            prop_assert!(draft.log_chances.windows(2).all(|w| w[0] >= w[1]));
        }
    }
}
