//! A Weaver on top of a DFlash network as a drafter: the tree grows from its likeliest nodes, a
//! few at a time, each node's children scored along its own path.
//!
//! Each call of the Weaver waits for the one before, so a deep tree would take as many calls as it
//! is deep. The first call therefore reads the drafter's favourites too, as a chain below the root:
//! where the Weaver agrees with them, that part of the tree is there at once.
//!
//! Weaving takes time of its own. Where the tree's size is chosen by what pays, so is this: rounds
//! with and without are compared, and the better way is taken but for a trial now and then.

use super::dflash::Blocks;
use super::draft::{Draft, Pool};
use super::drafter::{Drafter, Growth, Read};
use crate::error::Error;
use crate::loaded::CpuModel;
use kozue_kernels::gathered;
use kozue_model::{DFlash, Footprint, Outputs, Weave, WeaveNode, Weaver};

/// Nodes expanded together: more cost little in one product, and most of them are needed anyway.
const TOGETHER: usize = 8;
/// Natural logarithm by which a node must be likelier than the last one of the tree to be expanded:
/// of a node that is hardly in, no child is.
const MARGIN: f32 = 0.35;
/// Tokens of each position that are scored at most, of those that the Weaver learned to choose
/// among: the drafter's later ones are hardly ever accepted, and each is a product with a row of
/// the head.
const SHORTLIST: usize = 32;
/// Natural logarithm of the least chance, by the drafter alone, of a chain of its favourites that
/// is expanded on trust.
const FAVOURED: f32 = -2.0;
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

/// A tree in growth.
struct Growing<'g> {
    growth: &'g Growth,
    /// For every position tokens and logits of the drafter, best first.
    shortlists: &'g [Vec<(u32, f32)>],
    pool: Pool,
    /// For every node of the pool the slots of its ancestors in the Weaver's memory, root first.
    paths: Vec<Vec<u32>>,
    /// Nodes that were not expanded yet.
    frontier: Vec<usize>,
}

impl<'g> Growing<'g> {
    fn new(growth: &'g Growth, shortlists: &'g [Vec<(u32, f32)>]) -> Growing<'g> {
        Growing {
            growth,
            shortlists,
            pool: Pool::new(growth.root),
            paths: vec![Vec::new()],
            frontier: vec![0],
        }
    }

    /// The drafter's favourites below the root, as far as they are likely together.
    fn favourites(&self) -> Vec<u32> {
        let mut chance = 0.0;
        let mut tokens = Vec::new();
        // The last position has no children.
        for (depth, list) in (1..self.shortlists.len()).zip(self.shortlists) {
            let Some(&(token, edge)) = self.growth.rank(list, depth).first() else {
                break;
            };
            chance += edge;
            if chance < FAVOURED {
                break;
            }
            tokens.push(token);
        }
        tokens
    }

    /// The likeliest nodes that may still have a place in the tree, and are to be expanded.
    fn next(&mut self) -> Vec<usize> {
        let last = self.pool.least_of(self.growth.nodes);
        let least = last
            .map_or(f32::NEG_INFINITY, |chance| chance + MARGIN)
            .max(self.growth.least);
        let pool = &self.pool;
        self.frontier.retain(|&node| pool.log_chance(node) >= least);
        self.frontier
            .sort_by(|&a, &b| pool.log_chance(b).total_cmp(&pool.log_chance(a)));
        let count = TOGETHER.min(self.frontier.len());
        self.frontier.drain(..count).collect()
    }

    /// Adds the likeliest children of a node, which lies in slot `slot` and by the Weaver adds
    /// `scores` to the logits of its shortlist; gives the child that has `token`.
    fn add(&mut self, node: usize, slot: u32, scores: &[f32], token: Option<u32>) -> Option<usize> {
        let depth = self.pool.depth(node);
        let candidates: Vec<(u32, f32)> = self.shortlists[depth]
            .iter()
            .zip(scores)
            .map(|(&(token, logit), score)| (token, logit + score))
            .collect();
        let path: Vec<u32> = self.paths[node].iter().copied().chain([slot]).collect();
        let mut wanted = None;
        let ranked = self.growth.rank(&candidates, depth + 1);
        for (child_token, edge) in ranked.into_iter().take(CHILDREN) {
            let child = self.pool.push(node, child_token, edge);
            self.paths.push(path.clone());
            if token == Some(child_token) {
                wanted = Some(child);
            } else if depth + 1 < self.shortlists.len() {
                self.frontier.push(child);
            }
        }
        wanted
    }

    /// The best tree.
    fn finish(&self) -> Draft {
        let mut draft = self.pool.best(self.growth.nodes);
        let worth = draft
            .log_chances
            .partition_point(|&chance| chance >= self.growth.least);
        draft.truncate(worth);
        draft
    }
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
        let mut growing = Growing::new(growth, &block.shortlists);
        let mut expand = |nodes: Vec<WeaveNode>| {
            let depths: Vec<usize> = nodes.iter().map(|node| node.ancestors.len()).collect();
            let queries = self
                .weaver
                .expand(cpu, model, weave, &nodes)
                .map_err(|error| Error::Model(error.to_string()))?;
            let scores = depths
                .into_iter()
                .zip(queries.chunks_exact(hidden_size))
                .map(|(depth, query)| {
                    let mut scores = vec![0.0; tokens[depth].len()];
                    gathered(cpu, head, query, &tokens[depth], &mut scores);
                    scores
                })
                .collect();
            Ok::<Vec<Vec<f32>>, Error>(scores)
        };
        let favourites = growing.favourites();
        let chain = (0..).zip(std::iter::once(&growth.root).chain(&favourites));
        let chain = chain.map(|(depth, &token)| WeaveNode {
            token,
            ancestors: (0..depth).collect(),
        });
        let scores = expand(chain.collect())?;
        let mut slots = scores.len() as u32;
        let mut node = growing.frontier.pop();
        for (depth, scores) in scores.iter().enumerate() {
            let Some(parent) = node else { break };
            let favourite = favourites.get(depth).copied();
            node = growing.add(parent, depth as u32, scores, favourite);
        }
        while slots < 2 * growth.nodes as u32 {
            let now = growing.next();
            if now.is_empty() {
                break;
            }
            let nodes = now.iter().map(|&node| WeaveNode {
                token: growing.pool.token(node),
                ancestors: growing.paths[node].clone(),
            });
            for (node, scores) in now.iter().zip(expand(nodes.collect())?) {
                growing.add(*node, slots, &scores, None);
                slots += 1;
            }
        }
        Ok(growing.finish())
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

    fn footprint(&self) -> Footprint {
        let mut footprint = self.blocks.footprint();
        footprint.own += size_of_val(&self.hidden[..]);
        footprint
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
