//! What the engine needs of a language model.

use crate::error::Error;
use kozue_model::{Footprint, Outputs, PassOutput, Rows, Segment};
use std::io::{self, Write};

/// A decoder-only language model that takes rows of several sequences through one pass.
pub trait LanguageModel {
    /// All that a sequence leaves behind: keys, values, recurrent states. A clone is a snapshot.
    type State: Clone + Send + Sync + 'static;

    /// Number of token ids, which is the length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Longest context that the model was made for, in tokens.
    fn max_position(&self) -> usize;

    /// The state before the first token.
    fn new_state(&self) -> Self::State;

    /// Memory that a state holds, and which of it others may share.
    fn footprint(&self, state: &Self::State) -> Footprint;

    /// Writes a state as bytes. Errors: those of `to`.
    fn write_state(state: &Self::State, to: &mut dyn Write) -> io::Result<()>;

    /// The state that [`LanguageModel::write_state`] wrote. Errors: it was not one of this model.
    fn read_state(&self, bytes: &[u8]) -> Result<Self::State, Error>;

    /// Takes the rows of all segments through the model together: chains advance their states,
    /// trees wait for [`LanguageModel::commit`].
    ///
    /// After an error the states are unusable.
    fn pass(
        &self,
        segments: &mut [Segment<'_, Self::State>],
        wanted: Outputs<'_>,
    ) -> Result<PassOutput<'_, Self::State>, Error>;

    /// Advances a state along `path`, nodes of its last tree, root first.
    fn commit(&self, state: &mut Self::State, path: &[usize]) -> Result<(), Error>;

    /// Advances one sequence by `tokens` and gives the logits after each of the last
    /// `logit_rows` of them, row after row (`logit_rows * vocab_size` values).
    fn advance(
        &self,
        state: &mut Self::State,
        tokens: &[u32],
        logit_rows: usize,
    ) -> Result<Vec<f32>, Error> {
        let segment = Segment {
            state,
            rows: Rows::Chain(tokens),
            logit_rows,
            snapshots: &[],
        };
        Ok(self
            .pass(&mut [segment], Outputs::default())?
            .logits
            .to_vec())
    }
}
