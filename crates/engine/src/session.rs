//! One conversation: requests one after another, each starting from what the ones before left.

use crate::answer::Answer;
use crate::error::Error;
use crate::grammar::Grammar;
use crate::runner::run_pass;
use crate::sampling::Sampling;
use crate::sequence::Sequence;
use crate::speculation::{Round, Speculator};
use crate::starts::Starts;
use crate::target::LanguageModel;
use crate::tokenizer::Tokenizer;
use std::sync::atomic::{AtomicBool, Ordering};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens to continue.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Most tokens to draw; `None` = until the context is full.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// What the answer must look like; `None` = any text.
    pub grammar: Option<Grammar>,
    /// Whether events tell the probability of each token, and with how many alternatives.
    pub logprobs: Option<usize>,
    /// Whether the model's end tokens are ignored.
    pub ignore_eos: bool,
    /// Whether the answer tells of its drafts.
    pub trace: bool,
}

/// What happens while an answer is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// `done` of `total` prompt tokens are computed.
    Prefill {
        /// Computed, tokens of earlier turns included.
        done: usize,
        /// Length of the prompt.
        total: usize,
    },
    /// A token was drawn. Its text follows, unless it belongs to later text or to none.
    Token(Drawn<'a>),
    /// The answer goes on with this text.
    Text(&'a str),
    /// What became of a draft, where [`Request::trace`] asks for it.
    Round(&'a Round),
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn<'a> {
    /// Its id.
    pub token: u32,
    /// The forward pass that made it; the prompt's is 0.
    pub pass: usize,
    /// Natural logarithm of its probability before bias, penalties, temperature and filters,
    /// where [`Request::logprobs`] asks for it.
    pub logprob: Option<f32>,
    /// The likeliest tokens with theirs, best first.
    pub top: &'a [(u32, f32)],
}

/// Runs requests on one model and keeps snapshots of their states, so that a prompt which shares
/// a beginning with an earlier one costs only its new tokens.
pub struct Session<'a, M: LanguageModel> {
    model: &'a M,
    tokenizer: &'a Tokenizer,
    eos: &'a [u32],
    context: usize,
    starts: Starts<'a, M>,
}

impl<'a, M: LanguageModel> Session<'a, M> {
    /// A session that holds up to `context` tokens, prompt and answer together, and up to
    /// `cache_bytes` of snapshots. `eos` are the tokens that end an answer.
    pub fn new(
        model: &'a M,
        tokenizer: &'a Tokenizer,
        eos: &'a [u32],
        context: usize,
        cache_bytes: usize,
    ) -> Self {
        Session {
            model,
            tokenizer,
            eos,
            context,
            starts: Starts::new(model, Some(cache_bytes)),
        }
    }

    /// A session for one answer: it keeps no snapshots.
    pub fn once(mut self) -> Session<'a, M> {
        self.starts = self.starts.forgetting();
        self
    }

    /// Answers come by drafts of what `speculate` makes, which may be nothing.
    pub fn speculating(
        mut self,
        speculate: impl Fn() -> Option<Speculator<'a>> + 'a,
    ) -> Session<'a, M> {
        self.starts = self.starts.speculating(speculate);
        self
    }

    /// The state after the last answer, and the tokens that it has read.
    pub fn state(&self) -> Option<(Vec<u32>, &M::State)> {
        self.starts.newest()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.starts.clear();
    }

    /// Answers a request. `events` hears of progress; setting `cancel` ends the answer after
    /// the forward pass in progress.
    ///
    /// Errors: an empty or too long prompt, a token outside the vocabulary, options outside
    /// their ranges, logits that are no numbers, a failure of the model. The session stays
    /// usable after each.
    pub fn generate(
        &mut self,
        request: &Request,
        cancel: &AtomicBool,
        events: &mut dyn FnMut(Event),
    ) -> Result<Answer, Error> {
        let start = self.starts.start(&request.prompt);
        events(Event::Prefill {
            done: start.read,
            total: request.prompt.len(),
        });
        let mut sequence = Sequence::new(
            self.model,
            self.tokenizer,
            self.eos,
            self.context,
            request.clone(),
            start,
        )?;
        while !sequence.finished() {
            if cancel.load(Ordering::Relaxed) {
                sequence.cancel();
                break;
            }
            run_pass(self.model, &mut [&mut sequence], &mut |_, event| {
                events(event)
            })?
            .into_iter()
            .collect::<Result<(), Error>>()?;
            for snapshot in sequence.snapshots() {
                self.starts.keep(snapshot);
            }
        }
        let (answer, ended) = sequence.end(events);
        self.starts.ended(ended);
        Ok(answer)
    }
}
