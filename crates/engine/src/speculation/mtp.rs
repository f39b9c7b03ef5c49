//! The target's own multi-token prediction head as a drafter: it continues the text token by token,
//! and each step's runners-up become leaves beside the spine.

use super::draft::{Draft, Pool};
use super::drafter::{Drafter, Growth, Read};
use crate::error::Error;
use crate::loaded::CpuModel;
use crate::top::keep_top;
use kozue_model::{Mtp, MtpState, Outputs};
use std::time::Instant;

/// Tokens of a step that are ranked.
const SHORTLIST: usize = 32;
/// Leaves beside the spine at each step.
const LEAVES: usize = 3;
/// Longest spine.
const LONGEST: usize = 8;
/// Tokens that wait at most until the head reads them, where it drafts nothing.
const WAITING: usize = 256;

/// Drafts for one sequence.
pub(super) struct Predicting<'a> {
    target: &'a CpuModel,
    head: &'a Mtp,
    state: MtpState,
    /// Tokens whose features the head has not read, and these features. It reads them together
    /// with the token after each, so the last one always waits.
    tokens: Vec<u32>,
    features: Vec<f32>,
    /// Milliseconds of one step.
    step_ms: f64,
}

impl<'a> Predicting<'a> {
    pub(super) fn new(target: &'a CpuModel, head: &'a Mtp) -> Predicting<'a> {
        Predicting {
            target,
            head,
            state: head.new_state(),
            tokens: Vec::new(),
            features: Vec::new(),
            step_ms: 0.0,
        }
    }

    /// Reads all that waits but the last token.
    fn catch_up(&mut self) -> Result<(), Error> {
        let Some(pairs) = self.tokens.len().checked_sub(1).filter(|&n| n > 0) else {
            return Ok(());
        };
        let (cpu, model) = (self.target.cpu(), self.target.model());
        let width = pairs * model.config().hidden_size;
        let (features, after) = (&self.features[..width], &self.tokens[1..]);
        self.head
            .observe(cpu, model, &mut self.state, features, after)
            .map_err(|error| Error::Model(error.to_string()))?;
        self.tokens.drain(..pairs);
        self.features.drain(..width);
        Ok(())
    }
}

impl<'a> Drafter<'a> for Predicting<'a> {
    fn wants(&self) -> Outputs<'_> {
        Outputs {
            taps: self.head.taps(),
            hidden: false,
        }
    }

    fn observe(&mut self, read: Read<'_>) -> Result<(), Error> {
        self.tokens.extend_from_slice(read.tokens);
        self.features.extend_from_slice(read.features);
        if self.tokens.len() > WAITING {
            self.catch_up()?;
        }
        Ok(())
    }

    fn propose(&mut self, growth: &Growth) -> Result<Draft, Error> {
        let mut pool = Pool::new(growth.root);
        self.catch_up()?;
        let (cpu, model) = (self.target.cpu(), self.target.model());
        if self.features.is_empty() || self.state.len() + 1 >= model.config().max_position {
            return Ok(pool.best(1));
        }
        let (mut spine, mut depth) = (0, 0);
        let mut best = Vec::new();
        let mut step_ms = self.step_ms;
        let mut start = Instant::now();
        let from = (&self.features[..], growth.root);
        self.head
            .draft(cpu, model, &mut self.state, from, |logits| {
                let took = start.elapsed().as_secs_f64() * 1e3;
                step_ms = match step_ms {
                    0.0 => took,
                    mean => 0.9 * mean + 0.1 * took.min(4.0 * mean),
                };
                depth += 1;
                keep_top(&mut best, logits, SHORTLIST);
                let parent = spine;
                let ranked = growth.rank(&best, depth);
                for (place, &(token, edge)) in ranked.iter().take(1 + LEAVES).enumerate() {
                    let node = pool.push(parent, token, edge);
                    if place == 0 {
                        spine = node;
                    }
                }
                let chance = f64::from(pool.log_chance(spine)).exp();
                start = Instant::now();
                // One more step gives at most this much more; plain decoding would make
                // `rate * step_ms` tokens in the time.
                let ends = spine == parent
                    || chance < growth.rate * step_ms
                    || pool.log_chance(spine) < growth.least
                    || depth >= growth.nodes.min(growth.depth).min(LONGEST);
                (!ends).then(|| pool.token(spine))
            })
            .map_err(|error| Error::Model(error.to_string()))?;
        self.step_ms = step_ms;
        Ok(pool.best(growth.nodes))
    }

    fn fork(&self) -> Box<dyn Drafter<'a> + 'a> {
        Box::new(Predicting {
            target: self.target,
            head: self.head,
            state: self.state.clone(),
            tokens: self.tokens.clone(),
            features: self.features.clone(),
            step_ms: self.step_ms,
        })
    }

    fn bytes(&self) -> usize {
        self.state.bytes() + size_of_val(&self.features[..])
    }
}
