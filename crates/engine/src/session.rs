//! One sequence in progress: prefill, decode, stop.

use crate::answer::{Answer, FinishReason, Usage};
use crate::energy::EnergyMeter;
use crate::error::Error;
use crate::memory::resident_bytes;
use crate::sampler::{History, Sampler};
use crate::sampling::Sampling;
use crate::stats::Counts;
use crate::stop::StopStrings;
use crate::streaming::StreamDecoder;
use crate::target::LanguageModel;
use crate::tokenizer::Tokenizer;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Prompt tokens per forward pass: enough for full speed, few enough that cancelling is quick.
const PREFILL_CHUNK: usize = 512;

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
    /// Whether the model's end tokens are ignored.
    pub ignore_eos: bool,
}

/// What happens while an answer is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// `done` of `total` prompt tokens are computed.
    Prefill {
        /// Computed, tokens of earlier turns included.
        done: usize,
        /// Length of the prompt.
        total: usize,
    },
    /// The answer goes on with this text.
    Text(&'a str),
}

/// Runs requests on one model and keeps the state between them, so that a prompt which
/// continues the last one costs only its new tokens.
pub struct Session<'a, M: LanguageModel> {
    model: &'a M,
    tokenizer: &'a Tokenizer,
    eos: Vec<u32>,
    context: usize,
    state: M::State,
    /// The tokens that `state` has seen.
    tokens: Vec<u32>,
    /// Logits after the last of `tokens`, where they were computed.
    logits: Vec<f32>,
}

impl<'a, M: LanguageModel> Session<'a, M> {
    /// A session that holds up to `context` tokens, prompt and answer together. `eos` are the
    /// tokens that end an answer.
    pub fn new(model: &'a M, tokenizer: &'a Tokenizer, eos: &[u32], context: usize) -> Self {
        Session {
            model,
            tokenizer,
            eos: eos.to_vec(),
            context,
            state: model.new_state(),
            tokens: Vec::new(),
            logits: Vec::new(),
        }
    }

    /// The tokens that the state stands for.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The state after [`Session::tokens`].
    pub fn state(&self) -> &M::State {
        &self.state
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.state = self.model.new_state();
        self.tokens.clear();
        self.logits.clear();
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
        let start = Instant::now();
        let mut energy = EnergyMeter::start();
        self.check(request)?;
        let mut sampler = Sampler::new(request.sampling.clone(), self.model.vocab_size())?;
        let mut counts = Counts::default();

        let prefilled = self.prefill(&request.prompt, cancel, &mut counts, &mut energy, events)?;
        counts.prefill_s = start.elapsed().as_secs_f64();
        let mut writer = Writer::new(self.tokenizer, &request.stop);
        let mut answer = Vec::new();
        let mut ended_by_token = false;
        let mut finish = if prefilled {
            None
        } else {
            Some(FinishReason::Cancelled)
        };
        if request.max_tokens == Some(0) {
            finish = finish.or(Some(FinishReason::Length));
        }
        while finish.is_none() {
            if !answer.is_empty() {
                self.step(&answer[answer.len() - 1..])?;
                counts.forward_passes += 1;
            }
            let history = History {
                prompt: &request.prompt,
                answer: &answer,
                path: &[],
            };
            let token = sampler.sample(&self.logits, history)?;
            answer.push(token);
            if counts.first_token_s.is_none() {
                counts.first_token_s = Some(start.elapsed().as_secs_f64());
                counts.prefill_energy_j = energy.as_mut().and_then(EnergyMeter::joules);
            }
            ended_by_token = !request.ignore_eos && self.eos.contains(&token);
            let stopped = ended_by_token || writer.push(token, events);
            finish = if stopped {
                Some(FinishReason::Stop)
            } else if request
                .max_tokens
                .is_some_and(|limit| answer.len() >= limit)
                || request.prompt.len() + answer.len() >= self.context
            {
                Some(FinishReason::Length)
            } else if cancel.load(Ordering::Relaxed) {
                Some(FinishReason::Cancelled)
            } else {
                None
            };
            energy.iter_mut().for_each(EnergyMeter::poll);
        }
        let text = writer.finish(events);

        counts.completion = answer.len();
        counts.duration_s = start.elapsed().as_secs_f64();
        counts.energy_j = energy.as_mut().and_then(EnergyMeter::joules);
        counts.memory_bytes = resident_bytes();
        Ok(Answer {
            text,
            usage: Usage {
                prompt_tokens: request.prompt.len(),
                completion_tokens: answer.len(),
            },
            token_ids: answer,
            finish_reason: finish.unwrap_or(FinishReason::Stop),
            ended_by_token,
            stats: counts.stats(),
        })
    }

    fn check(&self, request: &Request) -> Result<(), Error> {
        if request.prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if request.prompt.len() >= self.context {
            return Err(Error::PromptTooLong {
                prompt: request.prompt.len(),
                context: self.context,
                model: self.model.max_position(),
            });
        }
        let vocab_size = self.model.vocab_size();
        match request
            .prompt
            .iter()
            .find(|token| **token as usize >= vocab_size)
        {
            Some(&token) => Err(Error::UnknownToken { token, vocab_size }),
            None => Ok(()),
        }
    }

    /// Brings the state to the end of the prompt. `false`: cancelled on the way.
    fn prefill(
        &mut self,
        prompt: &[u32],
        cancel: &AtomicBool,
        counts: &mut Counts,
        energy: &mut Option<EnergyMeter>,
        events: &mut dyn FnMut(Event),
    ) -> Result<bool, Error> {
        self.keep_common_prefix(prompt);
        counts.reused = self.tokens.len();
        events(Event::Prefill {
            done: self.tokens.len(),
            total: prompt.len(),
        });
        while self.tokens.len() < prompt.len() {
            if cancel.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let done = self.tokens.len();
            // Chunks end at multiples of their size, however much was there before.
            let end = ((done / PREFILL_CHUNK + 1) * PREFILL_CHUNK).min(prompt.len());
            self.advance(&prompt[done..end], usize::from(end == prompt.len()))?;
            counts.prefilled += end - done;
            energy.iter_mut().for_each(EnergyMeter::poll);
            events(Event::Prefill {
                done: end,
                total: prompt.len(),
            });
        }
        Ok(true)
    }

    /// Makes the state that of a prefix of `prompt`: as it is, cut back, or empty.
    fn keep_common_prefix(&mut self, prompt: &[u32]) {
        let common = self
            .tokens
            .iter()
            .zip(prompt)
            .take_while(|(a, b)| a == b)
            .count();
        let whole = common == self.tokens.len();
        if whole && (common < prompt.len() || !self.logits.is_empty()) {
            return;
        }
        // The last token is computed again, for its logits.
        let keep = common.min(prompt.len() - 1);
        if keep > 0 && self.model.truncate(&mut self.state, keep) {
            self.tokens.truncate(keep);
            self.logits.clear();
        } else {
            self.clear();
        }
    }

    fn step(&mut self, token: &[u32]) -> Result<(), Error> {
        self.advance(token, 1)
    }

    fn advance(&mut self, tokens: &[u32], logit_rows: usize) -> Result<(), Error> {
        match self.model.advance(&mut self.state, tokens, logit_rows) {
            Ok(logits) => {
                self.logits = logits;
                self.tokens.extend_from_slice(tokens);
                Ok(())
            }
            Err(error) => {
                self.clear();
                Err(error)
            }
        }
    }
}

/// Tokens to the text that the caller sees.
struct Writer<'a> {
    decoder: StreamDecoder<'a>,
    stop: StopStrings,
    text: String,
    decoded: String,
    shown: String,
}

impl<'a> Writer<'a> {
    fn new(tokenizer: &'a Tokenizer, stop: &[String]) -> Writer<'a> {
        Writer {
            decoder: tokenizer.stream(),
            stop: StopStrings::new(stop),
            text: String::new(),
            decoded: String::new(),
            shown: String::new(),
        }
    }

    /// Whether a stop string is complete.
    fn push(&mut self, token: u32, events: &mut dyn FnMut(Event)) -> bool {
        self.decoder.push(token, &mut self.decoded);
        let stopped = self.stop.push(&self.decoded, &mut self.shown);
        self.decoded.clear();
        self.show(events);
        stopped
    }

    fn show(&mut self, events: &mut dyn FnMut(Event)) {
        if !self.shown.is_empty() {
            events(Event::Text(&self.shown));
            self.text.push_str(&self.shown);
            self.shown.clear();
        }
    }

    /// The whole text.
    fn finish(mut self, events: &mut dyn FnMut(Event)) -> String {
        self.decoder.finish(&mut self.decoded);
        self.stop.push(&self.decoded, &mut self.shown);
        self.stop.finish(&mut self.shown);
        self.show(events);
        self.text
    }
}
