//! The order in which the nodes of a tree are run, and where their states are kept.

/// Where a state lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The layer's own state.
    Live,
    /// A buffer.
    Buffer(usize),
}

/// One node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) node: usize,
    /// The state before the node.
    pub(super) from: Place,
    /// Where the state after the node goes, if anything needs it. May be `from`.
    pub(super) to: Option<Place>,
    /// Whether the next step is a child of this one, and so reads what this one writes.
    pub(super) feeds_next: bool,
}

/// All nodes, parents first, and the number of buffers they need.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) buffers: usize,
    /// Steps of a part; only the last may be shorter.
    part: usize,
}

/// Steps of a chain that are run before the next columns are.
const PART: usize = 64;

/// Steps one after the other on the live state.
pub(super) fn steps_in_place(nodes: impl ExactSizeIterator<Item = usize>) -> Vec<Step> {
    let count = nodes.len();
    let step = |(i, node): (usize, usize)| Step {
        node,
        from: Place::Live,
        to: Some(Place::Live),
        feeds_next: i + 1 < count && !(i + 1).is_multiple_of(PART),
    };
    nodes.enumerate().map(step).collect()
}

impl Plan {
    /// A chain that leaves its last state in place of the first.
    pub(super) fn chain(m: usize) -> Self {
        Self {
            steps: steps_in_place(0..m),
            buffers: 0,
            part: PART,
        }
    }

    /// The most steps of a part.
    pub(super) fn part(&self) -> usize {
        self.part.min(self.steps.len())
    }

    /// Parts that can be run one after the other with nothing but the live state between them.
    pub(super) fn parts(&self) -> impl Iterator<Item = &[Step]> {
        self.steps.chunks(self.part)
    }

    /// A tree that leaves the live state alone. Nodes are run depth first, and a node's last child
    /// writes over the node's buffer; with the largest subtree last, log2(nodes) + 1 buffers are
    /// enough for any tree.
    pub(super) fn tree(parents: &[i32]) -> Self {
        let m = parents.len();
        let mut sizes = vec![1u32; m];
        // Children lists, one for each node and the last for the roots.
        let mut children = vec![vec![]; m + 1];
        for node in (0..m).rev() {
            match parents[node] {
                -1 => children[m].push(node),
                parent => {
                    sizes[parent as usize] += sizes[node];
                    children[parent as usize].push(node);
                }
            }
        }
        for list in &mut children {
            list.sort_by_key(|&node| (sizes[node], node));
        }
        let mut steps = Vec::with_capacity(m);
        let (mut free, mut buffers) = (vec![], 0);
        // Nodes to run: the state before them and whether they are the last to need it.
        let mut stack: Vec<(usize, Place, bool)> = vec![];
        stack.extend(children[m].iter().rev().map(|&n| (n, Place::Live, false)));
        while let Some((node, from, last)) = stack.pop() {
            let below = &children[node];
            let to = if below.is_empty() {
                if let (Place::Buffer(buffer), true) = (from, last) {
                    free.push(buffer);
                }
                None
            } else if last {
                Some(from)
            } else {
                Some(Place::Buffer(free.pop().unwrap_or_else(|| {
                    buffers += 1;
                    buffers - 1
                })))
            };
            if let Some(to) = to {
                let last = below.len() - 1;
                let with_last = below.iter().enumerate().rev();
                stack.extend(with_last.map(|(i, &child)| (child, to, i == last)));
            }
            steps.push(Step {
                node,
                from,
                to,
                feeds_next: to.is_some(),
            });
        }
        Self {
            steps,
            buffers,
            part: m.max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;
    use proptest::prelude::*;

    proptest! {
        /// Runs the plan on names of states and checks that every node starts from its parent's.
        #[test]
        fn every_node_starts_from_its_parents_state(m in 1usize..200, spread in 0usize..20, seed: u64) {
            let parents = tree(seed, m, spread);
            let plan = Plan::tree(&parents);
            prop_assert!(plan.buffers <= m.ilog2() as usize + 1);
            let mut buffers = vec![None; plan.buffers];
            let mut seen = vec![false; m];
            for (i, step) in plan.steps.iter().enumerate() {
                let before = match step.from {
                    Place::Live => -1,
                    Place::Buffer(b) => buffers[b].unwrap(),
                };
                prop_assert_eq!(before, parents[step.node]);
                match step.to {
                    Some(Place::Buffer(b)) => buffers[b] = Some(step.node as i32),
                    Some(Place::Live) => prop_assert!(false, "the live state is written"),
                    None => {}
                }
                if step.feeds_next {
                    prop_assert_eq!(parents[plan.steps[i + 1].node], step.node as i32);
                }
                prop_assert!(!std::mem::replace(&mut seen[step.node], true));
            }
            prop_assert!(seen.into_iter().all(|s| s));
        }
    }

    #[test]
    fn a_chain_needs_one_buffer_and_a_bush_of_leaves_none() {
        assert_eq!(Plan::tree(&[-1, 0, 1, 2, 3]).buffers, 1);
        assert_eq!(Plan::tree(&[-1, -1, -1]).buffers, 0);
    }
}
