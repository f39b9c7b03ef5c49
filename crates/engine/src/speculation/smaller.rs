//! A smaller model with the same vocabulary as a drafter: it continues the text token by token.

use super::draft::Draft;
use super::drafter::{Drafter, Growth, Read};
use super::spine::{Pulse, Spine};
use crate::error::Error;
use crate::loaded::CpuModel;
use crate::target::LanguageModel;
use kozue_model::{Footprint, State};

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
    pulse: Pulse,
}

impl<'a> Smaller<'a> {
    pub(super) fn new(model: &'a CpuModel) -> Smaller<'a> {
        Smaller {
            model,
            state: model.new_state(),
            waiting: Vec::new(),
            ahead: None,
            pulse: Pulse::default(),
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
    fn catch_up_with(&mut self, tokens: &[u32]) {
        self.waiting.extend_from_slice(tokens);
    }

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
        let room = self.model.max_position();
        if self.state.len() + self.waiting.len() + 1 >= room {
            return Ok(Draft::root(growth.root));
        }
        self.waiting.push(growth.root);
        let mut logits = self.catch_up()?;
        self.ahead = Some(growth.root);
        let mut state = self.state.clone();
        let mut spine = Spine::new(growth, &mut self.pulse, LONGEST);
        while let Some(token) = spine.grow(&logits)
            && state.len() + 1 < room
        {
            logits = self.model.advance(&mut state, &[token], 1)?;
        }
        Ok(spine.draft())
    }

    fn fork(&self) -> Box<dyn Drafter<'a> + 'a> {
        Box::new(Smaller {
            model: self.model,
            state: self.state.clone(),
            waiting: self.waiting.clone(),
            ahead: self.ahead,
            pulse: self.pulse,
        })
    }

    fn footprint(&self) -> Footprint {
        self.state.footprint()
    }
}
