//! A Weaver on top of a DFlash network as a drafter: the tree grows from its likeliest nodes, a
//! few at a time, each node's children scored along its own path.
//!
//! Weaving takes time of its own. Where the tree's size is chosen by what pays, so is this: rounds
//! with and without are compared, and the better way is taken but for a trial now and then.

use super::dflash::Blocks;
use super::draft::{Draft, Pool};
use super::drafter::{Drafter, Growth, Read};
use crate::error::Error;
use crate::loaded::CpuModel;
use kozue_kernels::gathered;
use kozue_model::{DFlash, Outputs, Weave, WeaveNode, Weaver};

/// Nodes expanded together: more cost little in one product, and most of them are needed anyway.
const TOGETHER: usize = 4;
/// Tokens of each position that are scored at most, of those that the Weaver learned to choose
/// among: the drafter's later ones are hardly ever accepted, and each is a product with a row of
/// the head.
const SHORTLIST: usize = 32;
/// Children kept of a node.
const CHILDREN: usize = 8;

/// Drafts coherent trees for one sequence.
pub(super) struct Weaving<'a> {
    target: &'a CpuModel,
    network: &'a DFlash,
    weaver: &'a Weaver,
    blocks: Blocks<'a>,
    /// The target's final hidden state at the last token that it has read.
    hidden: Vec<f32>,
    /// Memory of a round.
    weave: Option<Weave>,
    choice: Choice,
}

/// Rounds of each way before they are compared, and how often the worse one is tried again.
const TRIAL: u32 = 4;
const AGAIN: u32 = 16;
/// Weight of what lies one round further back.
const MEMORY: f64 = 0.9;

/// What rounds of one way brought; older ones weigh less.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    tokens: f64,
    milliseconds: f64,
    rounds: u32,
}

impl Account {
    fn add(&mut self, tokens: usize, milliseconds: f64) {
        self.tokens = MEMORY * self.tokens + tokens as f64;
        self.milliseconds = MEMORY * self.milliseconds + milliseconds;
        self.rounds += 1;
    }

    fn rate(self) -> f64 {
        self.tokens / self.milliseconds.max(f64::MIN_POSITIVE)
    }
}

/// Rounds with a Weaver and without, and which comes next.
#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    woven: Account,
    unwoven: Account,
    rounds: u32,
    weaves: bool,
}

impl Choice {
    fn next(&mut self) -> bool {
        self.rounds += 1;
        let better = self.woven.rate() >= self.unwoven.rate();
        self.weaves = if self.woven.rounds < TRIAL {
            true
        } else if self.unwoven.rounds < TRIAL {
            false
        } else if self.rounds.is_multiple_of(AGAIN) {
            !better
        } else {
            better
        };
        self.weaves
    }

    fn judged(&mut self, tokens: usize, milliseconds: f64) {
        if self.weaves {
            self.woven.add(tokens, milliseconds);
        } else {
            self.unwoven.add(tokens, milliseconds);
        }
    }
}

/// A node of the pool that was expanded: the order of its expansion, and those of its ancestors.
#[derive(Clone, Default)]
struct Expanded {
    path: Vec<u32>,
}

impl<'a> Weaving<'a> {
    pub(super) fn new(target: &'a CpuModel, network: &'a DFlash, weaver: &'a Weaver) -> Self {
        Weaving {
            target,
            network,
            weaver,
            blocks: Blocks::new(target, network),
            hidden: Vec::new(),
            weave: None,
            choice: Choice::default(),
        }
    }
}

impl<'a> Drafter<'a> for Weaving<'a> {
    fn wants(&self) -> Outputs<'_> {
        Outputs {
            taps: self.network.taps(),
            hidden: true,
        }
    }

    fn observe(&mut self, read: Read<'_>) -> Result<(), Error> {
        self.blocks.observe(read.features);
        if !read.hidden.is_empty() {
            self.hidden.clear();
            self.hidden.extend_from_slice(read.hidden);
        }
        Ok(())
    }

    fn propose(&mut self, growth: &Growth) -> Result<Draft, Error> {
        let deepest = growth.depth.min(self.weaver.depth());
        let free = growth.rate > 0.0;
        if free && !self.choice.next() {
            return self.blocks.tree(growth);
        }
        let count = self.weaver.candidates().min(SHORTLIST);
        let block = self.blocks.draft(growth.root, deepest, count)?;
        let (cpu, model) = (self.target.cpu(), self.target.model());
        let head = model.head().matrices().next().ok_or_else(no_head)?;
        let hidden_size = model.config().hidden_size;
        let tokens: Vec<Vec<u32>> = block
            .shortlists
            .iter()
            .map(|list| list.iter().map(|candidate| candidate.0).collect())
            .collect();
        let weave = match self.weave.take() {
            Some(mut weave) => {
                self.weaver
                    .restart(cpu, &mut weave, &self.hidden, &block.rows);
                weave
            }
            None => self.weaver.begin(cpu, &self.hidden, &block.rows),
        };
        let weave = self.weave.insert(weave);
        let mut pool = Pool::new(growth.root);
        let mut expanded = vec![Expanded::default()];
        let mut frontier = vec![0];
        let mut count = 0;
        while !frontier.is_empty() && pool.len() < growth.nodes * CHILDREN {
            // Whatever grows below a node that is out of the tree is out of it too.
            let least = pool
                .least_of(growth.nodes)
                .unwrap_or(f32::NEG_INFINITY)
                .max(growth.least);
            frontier.retain(|&node| pool.log_chance(node) >= least);
            frontier.sort_by(|&a, &b| pool.log_chance(b).total_cmp(&pool.log_chance(a)));
            let now: Vec<usize> = frontier.drain(..TOGETHER.min(frontier.len())).collect();
            if now.is_empty() {
                break;
            }
            let nodes: Vec<WeaveNode> = now
                .iter()
                .map(|&node| WeaveNode {
                    token: pool.token(node),
                    ancestors: expanded[node].path.clone(),
                })
                .collect();
            let queries = self
                .weaver
                .expand(cpu, model, weave, &nodes)
                .map_err(|error| Error::Model(error.to_string()))?;
            for (&node, query) in now.iter().zip(queries.chunks_exact(hidden_size)) {
                let depth = pool.depth(node);
                let path: Vec<u32> = expanded[node].path.iter().copied().chain([count]).collect();
                count += 1;
                let mut scores = cpu.scratch(tokens[depth].len());
                gathered(cpu, head, query, &tokens[depth], &mut scores);
                let candidates: Vec<(u32, f32)> = block.shortlists[depth]
                    .iter()
                    .zip(&scores[..])
                    .map(|(&(token, logit), score)| (token, logit + score))
                    .collect();
                let ranked = growth.rank(&candidates, depth + 1);
                for (token, edge) in ranked.into_iter().take(CHILDREN) {
                    let child = pool.push(node, token, edge);
                    expanded.push(Expanded { path: path.clone() });
                    if depth + 1 < block.shortlists.len() {
                        frontier.push(child);
                    }
                }
            }
        }
        let mut draft = pool.best(growth.nodes);
        let worth = draft
            .log_chances
            .partition_point(|&chance| chance >= growth.least);
        draft.truncate(worth);
        Ok(draft)
    }

    fn judged(&mut self, _: &Draft, path: &[usize], milliseconds: f64) {
        self.choice.judged(path.len(), milliseconds);
    }

    fn fork(&self) -> Box<dyn Drafter<'a> + 'a> {
        Box::new(Weaving {
            blocks: self.blocks.fork(),
            hidden: self.hidden.clone(),
            weave: None,
            ..*self
        })
    }

    fn bytes(&self) -> usize {
        self.blocks.bytes() + self.hidden.len() * size_of::<f32>()
    }
}

fn no_head() -> Error {
    Error::Model("the model has no head".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of 160 rounds weave where a woven round brings `tokens` in `milliseconds` and an
    /// unwoven one 3 tokens in 10 ms.
    fn woven(tokens: usize, milliseconds: f64) -> usize {
        let mut choice = Choice::default();
        (0..160)
            .filter(|_| {
                let weaves = choice.next();
                match weaves {
                    true => choice.judged(tokens, milliseconds),
                    false => choice.judged(3, 10.0),
                }
                weaves
            })
            .count()
    }

    #[test]
    fn weaving_is_done_where_it_pays() {
        assert!(woven(4, 11.0) > 140);
        assert!(woven(4, 15.0) < 20);
        // The worse way is tried again now and then.
        assert!(woven(4, 15.0) > 10);
    }
}
