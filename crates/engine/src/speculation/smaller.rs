//! A smaller model with the same vocabulary as a drafter: it continues the text token by token,
//! and each step's runners-up become leaves beside the spine.

use super::draft::{Draft, Pool};
use super::drafter::{Drafter, Growth, Read};
use crate::error::Error;
use crate::loaded::CpuModel;
use crate::target::LanguageModel;
use crate::top::keep_top;
use kozue_model::State;
use std::time::Instant;

/// Tokens of a step that are ranked.
const SHORTLIST: usize = 32;
/// Leaves beside the spine at each step.
const LEAVES: usize = 3;
/// Longest spine.
const LONGEST: usize = 16;
/// Tokens that wait at most until the model reads them, where it drafts nothing.
const WAITING: usize = 256;

/// Drafts for one sequence.
pub(super) struct Smaller<'a> {
    model: &'a CpuModel,
    /// After all that was observed but `waiting`.
    state: State,
    waiting: Vec<u32>,
    /// The newest token, where `state` has read it before the target did.
    ahead: Option<u32>,
    /// Milliseconds of one step.
    step_ms: f64,
}

impl<'a> Smaller<'a> {
    pub(super) fn new(model: &'a CpuModel) -> Smaller<'a> {
        Smaller {
            model,
            state: model.new_state(),
            waiting: Vec::new(),
            ahead: None,
            step_ms: 0.0,
        }
    }

    /// Reads what waits; gives the logits after the last token.
    fn catch_up(&mut self) -> Result<Vec<f32>, Error> {
        let mut logits = Vec::new();
        let chunks = self.waiting.chunks(WAITING);
        let last = chunks.len().saturating_sub(1);
        for (index, chunk) in chunks.enumerate() {
            let rows = usize::from(index == last);
            logits = self.model.advance(&mut self.state, chunk, rows)?;
        }
        self.waiting.clear();
        Ok(logits)
    }
}

impl<'a> Drafter<'a> for Smaller<'a> {
    fn observe(&mut self, read: Read<'_>) -> Result<(), Error> {
        let tokens = match self.ahead.take() {
            Some(ahead) if read.tokens.first() == Some(&ahead) => &read.tokens[1..],
            _ => read.tokens,
        };
        self.waiting.extend_from_slice(tokens);
        if self.waiting.len() >= WAITING {
            self.catch_up()?;
        }
        Ok(())
    }

    fn propose(&mut self, growth: &Growth) -> Result<Draft, Error> {
        let mut pool = Pool::new(growth.root);
        let room = self.model.max_position();
        if self.state.len() + self.waiting.len() + 1 >= room {
            return Ok(pool.best(1));
        }
        self.waiting.push(growth.root);
        let mut logits = self.catch_up()?;
        self.ahead = Some(growth.root);
        let mut state = self.state.clone();
        let mut spine = 0;
        let mut best = Vec::new();
        for depth in 1..=growth.depth.min(LONGEST) {
            keep_top(&mut best, &logits, SHORTLIST);
            let ranked = growth.rank(&best, depth);
            let parent = spine;
            for (place, &(token, edge)) in ranked.iter().take(1 + LEAVES).enumerate() {
                let node = pool.push(parent, token, edge);
                if place == 0 {
                    spine = node;
                }
            }
            let chance = f64::from(pool.log_chance(spine)).exp();
            // One more step gives at most this much more; plain decoding would make
            // `rate * step_ms` tokens in the time.
            if spine == parent
                || chance < growth.rate * self.step_ms
                || pool.log_chance(spine) < growth.least
                || depth >= growth.nodes
                || state.len() + 1 >= room
            {
                break;
            }
            let start = Instant::now();
            logits = self.model.advance(&mut state, &[pool.token(spine)], 1)?;
            let took = start.elapsed().as_secs_f64() * 1e3;
            self.step_ms = if self.step_ms == 0.0 {
                took
            } else {
                0.9 * self.step_ms + 0.1 * took.min(4.0 * self.step_ms)
            };
        }
        Ok(pool.best(growth.nodes))
    }

    fn fork(&self) -> Box<dyn Drafter<'a> + 'a> {
        Box::new(Smaller {
            model: self.model,
            state: self.state.clone(),
            waiting: self.waiting.clone(),
            ahead: self.ahead,
            step_ms: self.step_ms,
        })
    }

    fn bytes(&self) -> usize {
        self.state.bytes()
    }
}
