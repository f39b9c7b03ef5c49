//! Snapshots of sequences, to go on from where a prompt begins like an earlier one.
//!
//! A radix tree over token ids: a node stands for the tokens on the way to it, and may hold a
//! snapshot of a sequence that has read them. Snapshots share pages of keys and values; each page
//! counts once, however many hold it.

use crate::speculation::Drafter;
use kozue_model::Footprint;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// A sequence as it was after its first tokens.
pub struct Snapshot<'a, S> {
    /// The tokens; at least one.
    pub tokens: Vec<u32>,
    /// The state after them. It is never written again: who goes on from it takes a clone.
    pub state: Arc<S>,
    /// The drafter after them.
    pub drafter: Option<Box<dyn Drafter<'a> + 'a>>,
    /// Memory of state and drafter.
    pub footprint: Footprint,
    /// Whether later prompts are likely to part here. Others go first, unless they were used.
    pub lasting: bool,
}

/// A snapshot that a prompt goes on from.
pub struct Hit<'c, 'a, S> {
    /// Tokens that it has read.
    pub read: usize,
    /// The state after them.
    pub state: &'c Arc<S>,
    /// The drafter after them.
    pub drafter: Option<&'c (dyn Drafter<'a> + 'a)>,
}

/// A snapshot in its node.
struct Kept<'a, S> {
    state: Arc<S>,
    drafter: Option<Box<dyn Drafter<'a> + 'a>>,
    footprint: Footprint,
    turn: Turn,
}

/// The order in which snapshots go: first those that do not last, then by their last use.
type Turn = (bool, u64);

struct Node<'a, S> {
    parent: usize,
    /// Tokens from the parent to here.
    edge: Vec<u32>,
    children: Vec<usize>,
    kept: Option<Kept<'a, S>>,
}

/// The node of no tokens.
const ROOT: usize = 0;

/// Snapshots up to a number of bytes; the ones that were not used for longest go first.
pub struct PrefixCache<'a, S> {
    nodes: Vec<Node<'a, S>>,
    /// Nodes that are not part of the tree.
    free: Vec<usize>,
    order: BTreeSet<(Turn, usize)>,
    clock: u64,
    /// How many snapshots hold a page.
    pages: HashMap<usize, usize>,
    bytes: usize,
    budget: usize,
}

impl<'a, S> PrefixCache<'a, S> {
    /// A cache of up to `budget` bytes.
    pub fn new(budget: usize) -> Self {
        PrefixCache {
            nodes: vec![Node {
                parent: ROOT,
                edge: Vec::new(),
                children: Vec::new(),
                kept: None,
            }],
            free: Vec::new(),
            order: BTreeSet::new(),
            clock: 0,
            pages: HashMap::new(),
            bytes: 0,
            budget,
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = PrefixCache::new(self.budget);
    }

    /// Bytes that the snapshots hold, shared pages counted once, and the tree.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of snapshots.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are no snapshots.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Holds at most `budget` bytes from now on.
    pub fn limit(&mut self, budget: usize) {
        self.budget = budget;
        self.shrink();
    }

    /// The snapshot used or inserted last among those that last, with its tokens.
    pub fn newest(&self) -> Option<(Vec<u32>, &S)> {
        let &(_, node) = self.order.last()?;
        let kept = self.nodes[node].kept.as_ref()?;
        let mut edges = Vec::new();
        let mut at = node;
        while at != ROOT {
            edges.push(&self.nodes[at].edge[..]);
            at = self.nodes[at].parent;
        }
        edges.reverse();
        Some((edges.concat(), &kept.state))
    }

    /// The longest snapshot that `prompt` goes on from, by one token at least. And how many of
    /// its tokens the prompt shares with what any snapshot has read.
    pub fn longest(&mut self, prompt: &[u32]) -> (Option<Hit<'_, 'a, S>>, usize) {
        let (mut node, mut shared, mut found) = (ROOT, 0, None);
        while let Some(child) = self.child(node, &prompt[shared..]) {
            let edge = &self.nodes[child].edge;
            let same = common(edge, &prompt[shared..]);
            shared += same;
            if same < edge.len() {
                break;
            }
            node = child;
            if self.nodes[node].kept.is_some() && shared < prompt.len() {
                found = Some((node, shared));
            }
        }
        let Some((node, read)) = found else {
            return (None, shared);
        };
        self.clock += 1;
        let turn = (true, self.clock);
        let Some(kept) = &mut self.nodes[node].kept else {
            return (None, shared);
        };
        self.order.remove(&(kept.turn, node));
        self.order.insert((turn, node));
        kept.turn = turn;
        let hit = Hit {
            read,
            state: &kept.state,
            drafter: kept.drafter.as_deref(),
        };
        (Some(hit), shared)
    }

    /// Adds a snapshot; one of the same tokens is replaced. One without tokens is of no use, and
    /// nothing goes for one that is larger than the budget.
    pub fn insert(&mut self, snapshot: Snapshot<'a, S>) {
        if snapshot.tokens.is_empty() || snapshot.footprint.bytes() > self.budget {
            return;
        }
        let node = self.node(&snapshot.tokens);
        let before = self.let_go(node);
        self.clock += 1;
        let lasts = snapshot.lasting || before.is_some_and(|(lasts, _)| lasts);
        let turn = (lasts, self.clock);
        self.bytes += snapshot.footprint.own;
        for page in &snapshot.footprint.pages {
            let holders = self.pages.entry(page.id).or_default();
            if *holders == 0 {
                self.bytes += page.bytes;
            }
            *holders += 1;
        }
        self.nodes[node].kept = Some(Kept {
            state: snapshot.state,
            drafter: snapshot.drafter,
            footprint: snapshot.footprint,
            turn,
        });
        self.order.insert((turn, node));
        self.shrink();
    }

    /// Drops snapshots until the rest is within the budget.
    fn shrink(&mut self) {
        while self.bytes > self.budget
            && let Some(&(_, node)) = self.order.first()
        {
            self.let_go(node);
            self.tidy(node);
        }
    }

    /// Drops the snapshot of a node, which stays.
    fn let_go(&mut self, node: usize) -> Option<Turn> {
        let kept = self.nodes[node].kept.take()?;
        self.order.remove(&(kept.turn, node));
        self.bytes -= kept.footprint.own;
        for page in &kept.footprint.pages {
            if let Some(holders) = self.pages.get_mut(&page.id) {
                *holders -= 1;
                if *holders == 0 {
                    self.pages.remove(&page.id);
                    self.bytes -= page.bytes;
                }
            }
        }
        Some(kept.turn)
    }

    /// The child of a node that begins as `tokens` do.
    fn child(&self, node: usize, tokens: &[u32]) -> Option<usize> {
        let first = tokens.first()?;
        let mut children = self.nodes[node].children.iter();
        children
            .find(|&&child| self.nodes[child].edge.first() == Some(first))
            .copied()
    }

    /// The node of `tokens`, made where there is none.
    fn node(&mut self, tokens: &[u32]) -> usize {
        let (mut node, mut read) = (ROOT, 0);
        while read < tokens.len() {
            let Some(child) = self.child(node, &tokens[read..]) else {
                return self.add(node, tokens[read..].to_vec());
            };
            let same = common(&self.nodes[child].edge, &tokens[read..]);
            read += same;
            node = if same < self.nodes[child].edge.len() {
                self.split(child, same)
            } else {
                child
            };
        }
        node
    }

    /// Bytes of a node with an edge of so many tokens.
    fn size(edge: usize) -> usize {
        size_of::<Node<'a, S>>() + edge * size_of::<u32>()
    }

    fn add(&mut self, parent: usize, edge: Vec<u32>) -> usize {
        self.bytes += Self::size(edge.len());
        let node = Node {
            parent,
            edge,
            children: Vec::new(),
            kept: None,
        };
        let place = match self.free.pop() {
            Some(place) => {
                self.nodes[place] = node;
                place
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.nodes[parent].children.push(place);
        place
    }

    /// A node between `node` and its parent, after the first `at` tokens of its edge.
    fn split(&mut self, node: usize, at: usize) -> usize {
        let rest = self.nodes[node].edge.split_off(at);
        let first = std::mem::replace(&mut self.nodes[node].edge, rest);
        self.bytes -= first.len() * size_of::<u32>();
        let parent = self.nodes[node].parent;
        let middle = self.add(parent, first);
        self.nodes[parent].children.retain(|&child| child != node);
        self.nodes[middle].children.push(node);
        self.nodes[node].parent = middle;
        middle
    }

    /// Removes what nothing needs, from a node without a snapshot on.
    fn tidy(&mut self, mut node: usize) {
        while node != ROOT && self.nodes[node].kept.is_none() {
            let parent = self.nodes[node].parent;
            match self.nodes[node].children[..] {
                [] => {
                    self.nodes[parent].children.retain(|&child| child != node);
                    self.bytes -= Self::size(self.nodes[node].edge.len());
                    self.nodes[node].edge = Vec::new();
                    self.free.push(node);
                    node = parent;
                }
                [child] => {
                    let mut edge = std::mem::take(&mut self.nodes[node].edge);
                    edge.append(&mut self.nodes[child].edge);
                    self.nodes[child].edge = edge;
                    self.nodes[child].parent = parent;
                    self.nodes[node].children.clear();
                    let siblings = &mut self.nodes[parent].children;
                    siblings.retain(|&sibling| sibling != node);
                    siblings.push(child);
                    self.bytes -= Self::size(0);
                    self.free.push(node);
                    return;
                }
                _ => return,
            }
        }
    }
}

/// How many tokens two texts begin with in common.
fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
