//! One request in progress: from its prompt over drafts and draws to its answer.
//!
//! A sequence says what it wants to put into the next pass ([`Sequence::plan`]) and takes what
//! comes out ([`Sequence::take`]); who runs the pass, and with which other sequences, is not its
//! business ([`crate::runner`]).

mod planning;

use crate::answer::{Answer, FinishReason, Usage};
use crate::energy::EnergyMeter;
use crate::error::Error;
use crate::logprobs::logprobs;
use crate::marks::{Mark, STRIDE, marks};
use crate::memory::resident_bytes;
use crate::prefix_cache::Snapshot;
use crate::sampler::{History, Sampler};
use crate::session::{Drawn, Event, Request};
use crate::speculation::{Draft, Read, Round, Speculator};
use crate::stats::Counts;
use crate::target::LanguageModel;
use crate::tokenizer::Tokenizer;
use crate::writer::Writer;
use kozue_model::Outputs;
use planning::Plan;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Most prompt tokens of a pass: enough for full speed, few enough that cancelling is quick.
pub const PREFILL_ROWS: usize = STRIDE;

/// What a sequence starts from: nothing, or a snapshot of a prefix of its prompt.
pub struct Start<'a, S> {
    /// Tokens that the state has read; fewer than the prompt has.
    pub read: usize,
    /// The state after them.
    pub state: S,
    /// What drafts, having seen the same tokens; `None` = plain decoding.
    pub speculator: Option<Speculator<'a>>,
    /// How many tokens the prompt shares with earlier ones; `None` = no snapshots are kept.
    pub shared: Option<usize>,
}

/// One request in progress.
pub struct Sequence<'a, S> {
    tokenizer: &'a Tokenizer,
    eos: &'a [u32],
    context: usize,
    vocab_size: usize,
    request: Request,
    state: S,
    /// Tokens of prompt and answer that the state has read.
    read: usize,
    /// Where in the prompt snapshots are still to be taken.
    marks: VecDeque<Mark>,
    /// After how many rows of the pass to come they are due.
    due: Vec<usize>,
    snapshots: Vec<Snapshot<'a, S>>,
    answer: Vec<u32>,
    sampler: Sampler,
    /// Logits that the grammar has gone over.
    masked: Vec<f32>,
    writer: Writer<'a>,
    speculator: Option<Speculator<'a>>,
    plan: Plan,
    finish: Option<FinishReason>,
    ended_by_token: bool,
    counts: Counts,
    trace: Vec<Round>,
    energy: Option<EnergyMeter>,
    start: Instant,
}

/// What a pass made of one sequence's rows.
#[derive(Clone, Copy, Debug)]
pub struct Taken<'a> {
    /// Logits of the rows that asked for them.
    pub logits: &'a [f32],
    /// Tapped residual streams of all rows.
    pub features: &'a [f32],
    /// Final hidden states of the rows with logits.
    pub hidden: &'a [f32],
    /// Rows of the whole pass, and what it took.
    pub rows: usize,
    /// Milliseconds that the pass took.
    pub milliseconds: f64,
    /// Whether no sequence read a prompt in the pass.
    pub decoding: bool,
}

impl<'a, S: Clone> Sequence<'a, S> {
    /// A request with its starting point. `eos` end an answer; prompt and answer together hold
    /// up to `context` tokens.
    ///
    /// Errors: an empty or too long prompt, a token outside the vocabulary, options outside
    /// their ranges.
    pub fn new<M: LanguageModel<State = S>>(
        model: &M,
        tokenizer: &'a Tokenizer,
        eos: &'a [u32],
        context: usize,
        request: Request,
        start: Start<'a, S>,
    ) -> Result<Self, Error> {
        check(model, context, &request)?;
        let vocab_size = model.vocab_size();
        let marks = start
            .shared
            .map(|shared| marks(&request.prompt, tokenizer, eos, start.read, shared))
            .unwrap_or_default();
        let counts = Counts {
            reused: start.read,
            ..Counts::default()
        };
        Ok(Sequence {
            tokenizer,
            eos,
            context,
            vocab_size,
            sampler: Sampler::new(request.sampling.clone(), vocab_size)?,
            masked: Vec::new(),
            writer: Writer::new(tokenizer, &request.stop),
            marks: marks.into(),
            due: Vec::new(),
            snapshots: Vec::new(),
            request,
            state: start.state,
            read: start.read,
            answer: Vec::new(),
            speculator: start.speculator,
            plan: Plan::Nothing,
            finish: None,
            ended_by_token: false,
            counts,
            trace: Vec::new(),
            energy: EnergyMeter::start(),
            start: Instant::now(),
        })
    }

    /// Tokens of the prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.request.prompt
    }

    /// Tokens that the state has read.
    pub fn read(&self) -> usize {
        self.read
    }

    /// Snapshots taken since the last call.
    pub fn snapshots(&mut self) -> Vec<Snapshot<'a, S>> {
        std::mem::take(&mut self.snapshots)
    }

    /// Whether prompt tokens are still to be read.
    pub fn prefilling(&self) -> bool {
        self.read < self.request.prompt.len()
    }

    /// Whether the answer is complete.
    pub fn finished(&self) -> bool {
        self.finish.is_some()
    }

    /// Ends the answer where it is.
    pub fn cancel(&mut self) {
        self.finish.get_or_insert(FinishReason::Cancelled);
    }

    /// What the drafter wants of every pass.
    pub fn wants(&self) -> Outputs<'_> {
        self.speculator
            .as_ref()
            .map(|speculator| speculator.drafter.wants())
            .unwrap_or_default()
    }

    /// Takes what the pass made of the planned rows: reads on in the prompt, or draws tokens.
    ///
    /// Errors: logits that are no numbers, a failure of model or drafter. The sequence is of no
    /// use after one.
    pub fn take<M: LanguageModel<State = S>>(
        &mut self,
        model: &M,
        taken: Taken<'_>,
        snapshots: Vec<S>,
        events: &mut dyn FnMut(Event),
    ) -> Result<(), Error> {
        if let Some(speculator) = &mut self.speculator
            && taken.decoding
        {
            speculator.pace.passed(taken.rows, taken.milliseconds);
        }
        match std::mem::replace(&mut self.plan, Plan::Nothing) {
            Plan::Nothing => {}
            Plan::Prefill(range) => {
                self.read = range.end;
                self.counts.prefilled += range.len();
                let done = range.end;
                let total = self.request.prompt.len();
                self.observe_prompt(model, range, taken, snapshots);
                events(Event::Prefill { done, total });
                if done == total {
                    self.counts.prefill_s = self.start.elapsed().as_secs_f64();
                    if self.request.max_tokens == Some(0) {
                        self.finish.get_or_insert(FinishReason::Length);
                    } else {
                        self.draw(taken.logits, events)?;
                    }
                }
            }
            Plan::Step => {
                self.read += 1;
                self.counts.forward_passes += 1;
                self.counts.speculation.verify_s += taken.milliseconds * 1e-3;
                let newest = self.answer.len() - 1;
                observe(&mut self.speculator, &self.answer[newest..], taken);
                self.draw(taken.logits, events)?;
            }
            Plan::Verify(draft, milliseconds) => {
                self.counts.forward_passes += 1;
                self.counts.speculation.verify_s += taken.milliseconds * 1e-3;
                self.walk(model, draft, milliseconds, taken, events)?;
            }
        }
        self.energy.iter_mut().for_each(EnergyMeter::poll);
        Ok(())
    }

    /// Shows the drafter a part of the prompt, and keeps snapshots on the way.
    fn observe_prompt<M: LanguageModel<State = S>>(
        &mut self,
        model: &M,
        range: Range<usize>,
        taken: Taken<'_>,
        snapshots: Vec<S>,
    ) {
        let rows = range.len();
        let width = taken.features.len() / rows;
        let due = std::mem::take(&mut self.due);
        let taken_at = due.into_iter().zip(snapshots.into_iter().map(Some));
        let mut done = 0;
        for (row, snapshot) in taken_at.chain([(rows, None)]) {
            if done < row {
                let part = Taken {
                    features: &taken.features[done * width..row * width],
                    // Of the last row.
                    hidden: if row == rows { taken.hidden } else { &[] },
                    ..taken
                };
                let tokens = &self.request.prompt[range.start + done..range.start + row];
                observe(&mut self.speculator, tokens, part);
                done = row;
            }
            if let (Some(state), Some(mark)) = (snapshot, self.marks.front().copied()) {
                self.marks.pop_front();
                self.keep(model, mark, state);
            }
        }
    }

    fn keep<M: LanguageModel<State = S>>(&mut self, model: &M, mark: Mark, state: S) {
        let drafter = self.speculator.as_ref().map(|s| s.drafter.fork());
        let drafter_footprint = drafter.as_ref().map(|drafter| drafter.footprint());
        self.snapshots.push(Snapshot {
            tokens: self.request.prompt[..mark.at].to_vec(),
            footprint: model
                .footprint(&state)
                .and(drafter_footprint.unwrap_or_default()),
            state: Arc::new(state),
            drafter,
            lasting: mark.lasting,
        });
    }

    /// Follows the target's own draws down the tree as far as it goes, and commits that path.
    fn walk<M: LanguageModel<State = S>>(
        &mut self,
        model: &M,
        draft: Draft,
        draft_ms: Option<f64>,
        taken: Taken<'_>,
        events: &mut dyn FnMut(Event),
    ) -> Result<(), Error> {
        let start = Instant::now();
        let before = self.answer.len();
        let tree = &draft.tree;
        let mut path = vec![0];
        let mut node = 0;
        loop {
            let token = self.draw(
                &taken.logits[node * self.vocab_size..][..self.vocab_size],
                events,
            )?;
            let child = tree
                .children(node)
                .find(|&child| tree.tokens()[child] == token);
            match child {
                Some(child) if self.finish.is_none() => {
                    path.push(child);
                    node = child;
                }
                _ => break,
            }
        }
        let drawn = Instant::now();
        model.commit(&mut self.state, &path)?;
        self.read += path.len();
        let committed = Instant::now();
        if self.speculator.is_some() {
            let rows = draft.len();
            let width = taken.features.len() / rows;
            let features: Vec<f32> = path
                .iter()
                .flat_map(|&node| &taken.features[node * width..][..width])
                .copied()
                .collect();
            let hidden = taken.hidden.len() / rows;
            let read = Taken {
                features: &features,
                hidden: &taken.hidden[node * hidden..][..hidden],
                ..taken
            };
            // The root was drawn before, each node below it in this walk but the last token.
            let tokens = &self.answer[before - 1..][..path.len()];
            observe(&mut self.speculator, tokens, read);
            // A forced draft says nothing about the drafter.
            if let (Some(draft_ms), Some(speculator)) = (draft_ms, &mut self.speculator) {
                let round_ms = speculator.pace.round_ms(&draft, draft_ms);
                speculator.drafter.judged(&draft, &path, round_ms);
                let observe_ms = committed.elapsed().as_secs_f64() * 1e3;
                speculator
                    .pace
                    .judged(&draft, path.len() - 1, draft_ms + observe_ms);
            }
        }
        let counts = &mut self.counts.speculation;
        counts.sample_s += (drawn - start).as_secs_f64();
        counts.commit_s += (committed - drawn).as_secs_f64();
        counts.draft_s += committed.elapsed().as_secs_f64();
        counts.round(&draft, &path);
        if self.request.trace {
            let next = self.answer[before + path.len() - 1];
            let round = Round::new(&draft, &path, next);
            events(Event::Round(&round));
            self.trace.push(round);
        }
        Ok(())
    }

    /// Draws the next token and decides whether it ends the answer.
    fn draw(&mut self, logits: &[f32], events: &mut dyn FnMut(Event)) -> Result<u32, Error> {
        let history = History {
            prompt: &self.request.prompt,
            answer: &self.answer,
        };
        let token = match &mut self.request.grammar {
            None => self.sampler.sample(logits, history)?,
            Some(grammar) => {
                self.masked.clear();
                self.masked.extend_from_slice(logits);
                grammar.rule_out(&mut self.masked)?;
                let token = self.sampler.sample(&self.masked, history)?;
                grammar.accept(token)?;
                token
            }
        };
        self.answer.push(token);
        let (logprob, top) = match self.request.logprobs {
            None => (None, Vec::new()),
            Some(alternatives) => {
                let (logprob, top) = logprobs(logits, token, alternatives);
                (Some(logprob), top)
            }
        };
        events(Event::Token(Drawn {
            token,
            pass: self.counts.forward_passes,
            logprob,
            top: &top,
        }));
        if self.counts.first_token_s.is_none() {
            self.counts.first_token_s = Some(self.start.elapsed().as_secs_f64());
            self.counts.prefill_energy_j = self.energy.as_mut().and_then(EnergyMeter::joules);
        }
        let answered = self.answer.len();
        self.ended_by_token = !self.request.ignore_eos && self.eos.contains(&token);
        if self.ended_by_token || self.writer.push(token, events) {
            self.finish = Some(FinishReason::Stop);
        } else if self.request.max_tokens.is_some_and(|most| answered >= most)
            || self.request.prompt.len() + answered >= self.context
        {
            self.finish = Some(FinishReason::Length);
        }
        Ok(token)
    }

    /// The answer, with the state and the drafter as they are after it.
    pub fn end(mut self, events: &mut dyn FnMut(Event)) -> (Answer, Ended<'a, S>) {
        let text = self.writer.finish(events);
        self.counts.completion = self.answer.len();
        self.counts.duration_s = self.start.elapsed().as_secs_f64();
        self.counts.energy_j = self.energy.as_mut().and_then(EnergyMeter::joules);
        self.counts.memory_bytes = resident_bytes();
        let mut tokens = self.request.prompt;
        let usage = Usage {
            prompt_tokens: tokens.len(),
            completion_tokens: self.answer.len(),
        };
        tokens.extend_from_slice(&self.answer);
        tokens.truncate(self.read);
        let answer = Answer {
            text,
            usage,
            token_ids: self.answer,
            finish_reason: self.finish.unwrap_or(FinishReason::Cancelled),
            ended_by_token: self.ended_by_token,
            stats: self.counts.stats(),
            trace: self.trace,
        };
        let ended = Ended {
            tokens,
            state: self.state,
            speculator: self.speculator,
        };
        (answer, ended)
    }
}

/// What an answer leaves behind.
pub struct Ended<'a, S> {
    /// The tokens that the state has read.
    pub tokens: Vec<u32>,
    /// The state.
    pub state: S,
    /// What drafted.
    pub speculator: Option<Speculator<'a>>,
}

fn observe(speculator: &mut Option<Speculator<'_>>, tokens: &[u32], taken: Taken<'_>) {
    let read = Read {
        tokens,
        features: taken.features,
        hidden: taken.hidden,
    };
    if let Some(Err(error)) = speculator.as_mut().map(|s| s.drafter.observe(read)) {
        give_up(speculator, &error);
    }
}

/// Goes on without a drafter that failed: no answer depends on it.
fn give_up(speculator: &mut Option<Speculator<'_>>, error: &Error) {
    tracing::warn!("drafting failed, plain decoding goes on: {error}");
    *speculator = None;
}

fn check<M: LanguageModel>(model: &M, context: usize, request: &Request) -> Result<(), Error> {
    let prompt = &request.prompt;
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if prompt.len() >= context {
        return Err(Error::PromptTooLong {
            prompt: prompt.len(),
            context,
            model: model.max_position(),
        });
    }
    let vocab_size = model.vocab_size();
    match prompt.iter().find(|token| **token as usize >= vocab_size) {
        Some(&token) => Err(Error::UnknownToken { token, vocab_size }),
        None => Ok(()),
    }
}
