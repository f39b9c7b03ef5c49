//! A DFlash network as a drafter: one pass gives a shortlist for every position of a block, and
//! the best tree of independent shortlists is drafted (DDTree, arXiv 2604.12989).

use super::draft::Draft;
use super::drafter::{Drafter, Growth, Read};
use crate::error::Error;
use crate::loaded::CpuModel;
use crate::top::{best_first, keep_top};
use kozue_kernels::linear;
use kozue_model::{DFlash, DFlashState, Footprint, Outputs};
use std::sync::Mutex;

/// Tokens of each position among which a tree is drafted.
const SHORTLIST: usize = 32;

/// Rows of features that wait at most until the network reads them; reading a few at a time
/// costs as much as reading many.
const WAITING: usize = 256;

/// Blocks of shortlists for one sequence.
pub(super) struct Blocks<'a> {
    target: &'a CpuModel,
    network: &'a DFlash,
    state: DFlashState,
    /// Features that the network has not read yet.
    waiting: Vec<f32>,
}

/// What one pass of the network gives.
pub(super) struct Block {
    /// The network's rows, positions x hidden size, as the head reads them.
    pub(super) rows: Vec<f32>,
    /// For every position the best tokens and their logits, best first.
    pub(super) shortlists: Vec<Vec<(u32, f32)>>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(target: &'a CpuModel, network: &'a DFlash) -> Blocks<'a> {
        Blocks {
            target,
            network,
            state: network.new_state(),
            waiting: Vec::new(),
        }
    }

    pub(super) fn observe(&mut self, features: &[f32]) {
        self.waiting.extend_from_slice(features);
        let row = self.network.taps().len() * self.target.model().config().hidden_size;
        if self.waiting.len() >= WAITING * row {
            self.catch_up();
        }
    }

    fn catch_up(&mut self) {
        if !self.waiting.is_empty() {
            self.network
                .observe(self.target.cpu(), &mut self.state, &self.waiting);
            self.waiting.clear();
        }
    }

    /// Shortlists of `count` tokens for up to `depth` positions after `root`.
    pub(super) fn draft(&mut self, root: u32, depth: usize, count: usize) -> Result<Block, Error> {
        self.catch_up();
        let (cpu, model) = (self.target.cpu(), self.target.model());
        let rows = self
            .network
            .draft(cpu, model, &mut self.state, root, depth)
            .map_err(|error| Error::Model(error.to_string()))?;
        let (hidden, vocab) = (model.config().hidden_size, model.config().vocab_size);
        let depth = depth.min(rows.len() / hidden);
        let mut logits = cpu.scratch(depth * vocab);
        linear(cpu, model.head(), &rows, &mut logits);
        let shortlists: Vec<Mutex<Vec<(u32, f32)>>> =
            (0..depth).map(|_| Mutex::default()).collect();
        let logits = &logits[..];
        cpu.run(depth, &|position| {
            let mut best = Vec::new();
            keep_top(&mut best, &logits[position * vocab..][..vocab], count);
            best.sort_unstable_by(best_first);
            if let Ok(mut place) = shortlists[position].lock() {
                *place = best;
            }
        });
        Ok(Block {
            rows,
            shortlists: shortlists
                .into_iter()
                .map(|list| list.into_inner().unwrap_or_default())
                .collect(),
        })
    }

    /// The best tree of independent shortlists.
    pub(super) fn tree(&mut self, growth: &Growth) -> Result<Draft, Error> {
        let block = self.draft(growth.root, growth.depth, SHORTLIST)?;
        let ranked: Vec<Vec<(u32, f32)>> = (1..)
            .zip(&block.shortlists)
            .map(|(depth, list)| growth.rank(list, depth))
            .collect();
        Ok(Draft::from_marginals(growth, &ranked))
    }

    pub(super) fn fork(&self) -> Blocks<'a> {
        Blocks {
            target: self.target,
            network: self.network,
            state: self.state.clone(),
            waiting: self.waiting.clone(),
        }
    }

    pub(super) fn footprint(&self) -> Footprint {
        let mut footprint = self.state.footprint();
        footprint.own += size_of_val(&self.waiting[..]);
        footprint
    }
}

/// Drafts from shortlists alone.
pub(super) struct Marginals<'a> {
    blocks: Blocks<'a>,
    network: &'a DFlash,
}

impl<'a> Marginals<'a> {
    pub(super) fn new(target: &'a CpuModel, network: &'a DFlash) -> Marginals<'a> {
        Marginals {
            blocks: Blocks::new(target, network),
            network,
        }
    }
}

impl<'a> Drafter<'a> for Marginals<'a> {
    fn wants(&self) -> Outputs<'_> {
        Outputs {
            taps: self.network.taps(),
            hidden: false,
        }
    }

    fn observe(&mut self, read: Read<'_>) -> Result<(), Error> {
        self.blocks.observe(read.features);
        Ok(())
    }

    fn propose(&mut self, growth: &Growth) -> Result<Draft, Error> {
        self.blocks.tree(growth)
    }

    fn fork(&self) -> Box<dyn Drafter<'a> + 'a> {
        Box::new(Marginals {
            blocks: self.blocks.fork(),
            network: self.network,
        })
    }

    fn footprint(&self) -> Footprint {
        self.blocks.footprint()
    }
}
