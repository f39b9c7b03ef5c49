//! What a session needs of a language model.

use crate::error::Error;

/// A decoder-only language model that advances one sequence at a time.
pub trait LanguageModel {
    /// All that a sequence leaves behind: keys, values, recurrent states.
    type State;

    /// Number of token ids, which is the length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Longest context that the model was made for, in tokens.
    fn max_position(&self) -> usize;

    /// The state before the first token.
    fn new_state(&self) -> Self::State;

    /// Advances a sequence by `tokens` and gives the logits after each of the last
    /// `logit_rows` of them, row after row (`logit_rows * vocab_size` values).
    ///
    /// After an error the state is unusable.
    fn advance(
        &self,
        state: &mut Self::State,
        tokens: &[u32],
        logit_rows: usize,
    ) -> Result<Vec<f32>, Error>;

    /// Takes a state back to its first `len` tokens, bit for bit. `false`, with the state
    /// unchanged, where the model cannot: a recurrent state does not remember.
    fn truncate(&self, _state: &mut Self::State, _len: usize) -> bool {
        false
    }
}
