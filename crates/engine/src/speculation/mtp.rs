//! The target's own multi-token prediction head as a drafter: it continues the text token by
//! token.

use super::draft::Draft;
use super::drafter::{Drafter, Growth, Read};
use super::spine::{Pulse, Spine};
use crate::error::Error;
use crate::loaded::CpuModel;
use kozue_model::{Footprint, Mtp, MtpState, Outputs};

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
    pulse: Pulse,
}

impl<'a> Predicting<'a> {
    pub(super) fn new(target: &'a CpuModel, head: &'a Mtp) -> Predicting<'a> {
        Predicting {
            target,
            head,
            state: head.new_state(),
            tokens: Vec::new(),
            features: Vec::new(),
            pulse: Pulse::default(),
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
        self.catch_up()?;
        let (cpu, model) = (self.target.cpu(), self.target.model());
        if self.features.is_empty() || self.state.len() + 1 >= model.config().max_position {
            return Ok(Draft::root(growth.root));
        }
        let mut spine = Spine::new(growth, &mut self.pulse, LONGEST);
        let from = (&self.features[..], growth.root);
        self.head
            .draft(cpu, model, &mut self.state, from, |logits| {
                spine.grow(logits)
            })
            .map_err(|error| Error::Model(error.to_string()))?;
        Ok(spine.draft())
    }

    fn fork(&self) -> Box<dyn Drafter<'a> + 'a> {
        Box::new(Predicting {
            target: self.target,
            head: self.head,
            state: self.state.clone(),
            tokens: self.tokens.clone(),
            features: self.features.clone(),
            pulse: self.pulse,
        })
    }

    fn footprint(&self) -> Footprint {
        let mut footprint = self.state.footprint();
        footprint.own += size_of_val(&self.features[..]) + size_of_val(&self.tokens[..]);
        footprint
    }
}
