//! What a sequence puts into the next pass: a part of its prompt, its newest token or a draft.

use super::{PREFILL_ROWS, Sequence, give_up};
use crate::error::Error;
use crate::speculation::{Draft, Growth};
use crate::tokenizer::Control;
use kozue_model::{Rows, Segment};
use std::ops::Range;
use std::time::Instant;

/// Most tokens of a text that a grammar forces, in one pass.
const FORCED_ROWS: usize = 32;

/// What a sequence does in the pass to come.
pub(super) enum Plan {
    Nothing,
    /// Reads a part of the prompt.
    Prefill(Range<usize>),
    /// Reads the newest token.
    Step,
    /// Verifies a draft, made in so many milliseconds; `None` where the grammar forced it.
    Verify(Draft, Option<f64>),
}

impl<S: Clone> Sequence<'_, S> {
    /// Decides what to do in the next pass, beside `others` rows of other sequences, and gives the
    /// number of rows that it takes.
    ///
    /// Errors: the drafter failed.
    pub fn plan(&mut self, others: usize) -> Result<usize, Error> {
        if self.prefilling() {
            // Passes end at multiples of their size, however much was there before.
            let end = (self.read / PREFILL_ROWS + 1) * PREFILL_ROWS;
            let end = end.min(self.request.prompt.len());
            let due = self.marks.iter().take_while(|mark| mark.at <= end);
            self.due = due.map(|mark| mark.at - self.read).collect();
            self.plan = Plan::Prefill(self.read..end);
            return Ok(end - self.read);
        }
        self.plan = self.draft(others)?;
        Ok(match &self.plan {
            Plan::Verify(draft, _) => draft.len(),
            _ => 1,
        })
    }

    /// A draft that is worth verifying, or a plain step.
    fn draft(&mut self, others: usize) -> Result<Plan, Error> {
        let total = self.request.prompt.len() + self.answer.len();
        // A draft is of use as deep as the answer may still become.
        let room = self.context - total;
        let left = self.request.max_tokens.unwrap_or(usize::MAX) - self.answer.len();
        let depth = room.min(left).saturating_sub(1);
        if let Some(draft) = self.forced(depth)? {
            return Ok(Plan::Verify(draft, None));
        }
        let (Some(speculator), Some(&root)) = (&mut self.speculator, self.answer.last()) else {
            return Ok(Plan::Step);
        };
        let nodes = speculator.pace.nodes(others);
        if nodes < 2 || depth == 0 {
            return Ok(Plan::Step);
        }
        let start = Instant::now();
        let sampling = &self.request.sampling;
        let growth = Growth {
            root,
            nodes,
            depth: depth.min(speculator.pace.depth()),
            width: speculator.width,
            least: speculator.pace.least(),
            rate: speculator.pace.plain_rate(),
            position: total as u64,
            sampling: (sampling.temperature > 0.0).then_some((sampling.temperature, sampling.seed)),
        };
        let mut draft = match speculator.drafter.propose(&growth) {
            Ok(draft) => draft,
            Err(error) => {
                give_up(&mut self.speculator, &error);
                return Ok(Plan::Step);
            }
        };
        sanitise(&mut draft, &growth, self.vocab_size);
        if let Some(grammar) = &mut self.request.grammar {
            draft.keep_legal(|path| grammar.legal(path))?;
        }
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        self.counts.speculation.draft_s += milliseconds * 1e-3;
        speculator.pace.cut(&mut draft, others);
        if draft.is_empty() {
            // The time is gone all the same.
            speculator.pace.judged(&draft, 0, milliseconds);
            return Ok(Plan::Step);
        }
        Ok(Plan::Verify(draft, Some(milliseconds)))
    }

    /// The text that the grammar forces, as a chain of up to `depth` drafted tokens. Its last
    /// token is left out: it may merge with the text that follows.
    fn forced(&mut self, depth: usize) -> Result<Option<Draft>, Error> {
        let (Some(grammar), Some(&root)) = (&mut self.request.grammar, self.answer.last()) else {
            return Ok(None);
        };
        let text = grammar.forced_text();
        if text.is_empty() {
            return Ok(None);
        }
        let mut tokens = self.tokenizer.encode(&text, Control::Text)?;
        tokens.pop();
        tokens.truncate(depth.min(FORCED_ROWS));
        tokens.truncate(grammar.legal(&tokens)?);
        let mut draft = Draft::root(root);
        for (parent, token) in tokens.into_iter().enumerate() {
            draft.push(parent, token, 0.0);
        }
        Ok((!draft.is_empty()).then_some(draft))
    }

    /// The rows that were planned.
    pub fn segment(&mut self) -> Segment<'_, S> {
        let (rows, logit_rows, snapshots) = match &self.plan {
            Plan::Prefill(range) => {
                let last = range.end == self.request.prompt.len();
                let tokens = &self.request.prompt[range.clone()];
                (Rows::Chain(tokens), usize::from(last), &self.due[..])
            }
            Plan::Verify(draft, _) => (Rows::Tree(&draft.tree), draft.len(), &[][..]),
            Plan::Nothing | Plan::Step => {
                let newest = self.answer.len().saturating_sub(1);
                (Rows::Chain(&self.answer[newest..]), 1, &[][..])
            }
        };
        Segment {
            state: &mut self.state,
            rows,
            logit_rows,
            snapshots,
        }
    }
}

/// Cuts off what no pass could verify: a wrong root, tokens outside the vocabulary, nodes deeper
/// than they are of use. Parents come first, so what is before a bad node is a tree.
fn sanitise(draft: &mut Draft, growth: &Growth, vocab_size: usize) {
    let tree = &draft.tree;
    if tree.tokens()[0] != growth.root {
        *draft = Draft::root(growth.root);
        return;
    }
    let good = (0..tree.len())
        .take_while(|&node| {
            (tree.tokens()[node] as usize) < vocab_size
                && tree.depths()[node] as usize <= growth.depth
        })
        .count();
    draft.truncate(good.min(growth.nodes));
}
