//! From logits to one token.
//!
//! The result is a pure function of (logits, history, position, options): a node of a draft tree
//! is sampled along its own path and gives the token that plain decoding would give there.

use crate::error::Error;
use crate::noise::Noise;
use crate::sampling::Sampling;
use crate::top::keep_top;
use crate::transcendental::{exp, ln};
use std::cmp::Ordering;

/// The tokens before the one to be drawn, oldest first.
#[derive(Clone, Copy, Debug, Default)]
pub struct History<'a> {
    /// Tokens of the prompt.
    pub prompt: &'a [u32],
    /// Tokens of the answer so far; at a node of a draft tree, those on its path too.
    pub answer: &'a [u32],
}

impl History<'_> {
    /// How many tokens there are: the absolute position of the token to be drawn.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.answer.len()
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Draws tokens with one set of options. Holds only scratch space besides them.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    adjusted: Vec<f32>,
    /// Noise or weights of all tokens.
    values: Vec<f64>,
    candidates: Vec<Candidate>,
    best: Vec<(u32, f32)>,
    /// Occurrences per token in the answer and, in the top bit, whether it was seen at all.
    counts: Vec<u32>,
    touched: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
    weight: f64,
}

const SEEN: u32 = 1 << 31;

impl Sampler {
    /// Errors: an option outside its range, a biased token outside the vocabulary.
    pub fn new(sampling: Sampling, vocab_size: usize) -> Result<Sampler, Error> {
        sampling.validate(vocab_size)?;
        Ok(Sampler {
            counts: if sampling.penalises() {
                vec![0; vocab_size]
            } else {
                Vec::new()
            },
            sampling,
            adjusted: Vec::new(),
            values: Vec::new(),
            candidates: Vec::new(),
            best: Vec::new(),
            touched: Vec::new(),
        })
    }

    /// The options.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// The token after `history`, from `logits` (one per token of the vocabulary).
    ///
    /// Errors: a logit that is NaN or +inf; all logits -inf.
    pub fn sample(&mut self, logits: &[f32], history: History) -> Result<u32, Error> {
        let position = history.len() as u64;
        let mut adjusted = std::mem::take(&mut self.adjusted);
        let plain = self.sampling.logit_bias.is_empty() && !self.sampling.penalises();
        let result = if plain {
            self.draw(logits, position)
        } else {
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.add_bias(&mut adjusted);
            self.penalise(&mut adjusted, history);
            self.draw(&adjusted, position)
        };
        self.adjusted = adjusted;
        result
    }

    fn add_bias(&self, logits: &mut [f32]) {
        for &(token, bias) in &self.sampling.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
    }

    fn penalise(&mut self, logits: &mut [f32], history: History) {
        if !self.sampling.penalises() {
            return;
        }
        let window = self.sampling.penalty_window.unwrap_or(usize::MAX);
        for &token in history.answer.iter().rev().take(window) {
            self.count(token, 1);
        }
        for &token in history
            .prompt
            .iter()
            .rev()
            .take(window.saturating_sub(history.answer.len()))
        {
            self.count(token, 0);
        }
        let repetition = self.sampling.repetition_penalty;
        for token in self.touched.drain(..) {
            let times = std::mem::take(&mut self.counts[token as usize]) & !SEEN;
            let Some(logit) = logits.get_mut(token as usize) else {
                continue;
            };
            *logit = if *logit > 0.0 {
                *logit / repetition
            } else {
                *logit * repetition
            };
            if times > 0 {
                *logit -= self.sampling.presence_penalty;
                *logit -= self.sampling.frequency_penalty * times as f32;
            }
        }
    }

    fn count(&mut self, token: u32, times: u32) {
        let Some(count) = self.counts.get_mut(token as usize) else {
            return;
        };
        if *count == 0 {
            self.touched.push(token);
        }
        *count = (*count + times) | SEEN;
    }

    fn draw(&mut self, logits: &[f32], position: u64) -> Result<u32, Error> {
        let best = argmax(logits, position)?;
        let temperature = f64::from(self.sampling.temperature);
        if temperature == 0.0 {
            return Ok(best);
        }
        let best_logit = logits[best as usize];
        let noise = Noise::new(self.sampling.seed, position);
        let top_k = self.sampling.top_k.filter(|k| *k < logits.len());
        if top_k.is_none() && self.sampling.top_p >= 1.0 && self.sampling.min_p <= 0.0 {
            return Ok(self.draw_unfiltered(logits, noise, temperature));
        }

        let top_p = f64::from(self.sampling.top_p);
        let scale = Scale {
            best: f64::from(best_logit),
            temperature,
        };
        match top_k {
            Some(k) => {
                keep_top_k(&mut self.candidates, &mut self.best, logits, k.max(1));
                if top_p < 1.0 {
                    let total = weigh(&mut self.candidates, scale);
                    cut_at_mass(&mut self.candidates, top_p * total);
                }
            }
            None if top_p < 1.0 => {
                let total = scale.weights(logits, &mut self.values);
                // All tokens below this weight together hold less than the mass to be cut.
                let negligible = total * (1.0 - top_p) / logits.len() as f64;
                let weighed = logits.iter().zip(&self.values);
                collect(&mut self.candidates, weighed, |_, weight| {
                    *weight >= negligible
                });
                cut_at_mass(&mut self.candidates, top_p * total);
            }
            None => self.candidates.clear(),
        }
        if self.sampling.min_p > 0.0 {
            let floor = scale.best + ln(f64::from(self.sampling.min_p)) * temperature;
            if top_k.is_none() && top_p >= 1.0 {
                let all = logits.iter().zip(std::iter::repeat(&0.0));
                collect(&mut self.candidates, all, |logit, _| {
                    f64::from(*logit) >= floor
                });
            } else {
                self.candidates.retain(|c| f64::from(c.logit) >= floor);
            }
        }
        let scored = self.candidates.iter().map(|c| {
            (
                c.token,
                f64::from(c.logit) / temperature + noise.of(c.token),
            )
        });
        Ok(best_score(scored).unwrap_or(best))
    }

    fn draw_unfiltered(&mut self, logits: &[f32], noise: Noise, temperature: f64) -> u32 {
        self.values.resize(logits.len(), 0.0);
        noise.fill(&mut self.values);
        let scored = logits
            .iter()
            .zip(&self.values)
            .enumerate()
            .map(|(token, (&logit, noise))| (token as u32, f64::from(logit) / temperature + noise));
        best_score(scored).unwrap_or(0)
    }
}

/// The token with the highest score, the lowest id among equals.
fn best_score(scored: impl Iterator<Item = (u32, f64)>) -> Option<u32> {
    let mut best: Option<(u32, f64)> = None;
    for (token, score) in scored {
        let better = match best {
            None => true,
            Some((other, record)) => score > record || (score == record && token < other),
        };
        if better {
            best = Some((token, score));
        }
    }
    best.map(|(token, _)| token)
}

/// The token with the highest logit, the lowest id among equals.
///
/// Errors: a logit that is NaN or +inf; all logits -inf. `position` is for the message.
pub fn argmax(logits: &[f32], position: u64) -> Result<u32, Error> {
    let mut best = f32::NEG_INFINITY;
    let mut token = None;
    for (candidate, &logit) in logits.iter().enumerate() {
        // False for NaN too, so that the common case is one comparison.
        if logit <= best {
            continue;
        }
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(Error::BadLogits {
                position,
                token: candidate as u32,
            });
        }
        best = logit;
        token = Some(candidate as u32);
    }
    token.ok_or(Error::NothingAllowed { position })
}

/// Best first: higher logit, then lower id.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// Fills `kept` with the `k` best tokens.
fn keep_top_k(kept: &mut Vec<Candidate>, best: &mut Vec<(u32, f32)>, logits: &[f32], k: usize) {
    keep_top(best, logits, k);
    kept.clear();
    kept.extend(best.iter().map(|&(token, logit)| Candidate {
        token,
        logit,
        weight: 0.0,
    }));
}

/// What turns a logit into a weight: e^((logit - best) / temperature).
#[derive(Clone, Copy)]
struct Scale {
    best: f64,
    temperature: f64,
}

impl Scale {
    #[inline(always)]
    fn weight(self, logit: f32) -> f64 {
        exp((f64::from(logit) - self.best) / self.temperature)
    }

    /// The weights of all tokens and, in the order of their ids, the sum.
    fn weights(self, logits: &[f32], out: &mut Vec<f64>) -> f64 {
        out.clear();
        out.extend(logits.iter().map(|logit| self.weight(*logit)));
        out.iter().sum()
    }
}

/// Fills `kept` with the tokens that pass a test of logit and weight.
fn collect<'a>(
    kept: &mut Vec<Candidate>,
    all: impl Iterator<Item = (&'a f32, &'a f64)>,
    passes: impl Fn(&f32, &f64) -> bool,
) {
    kept.clear();
    for (token, (logit, weight)) in all.enumerate() {
        if passes(logit, weight) {
            kept.push(Candidate {
                token: token as u32,
                logit: *logit,
                weight: *weight,
            });
        }
    }
}

/// Gives candidates their weights; returns the sum, in the order of their ids, whatever order
/// selection left them in.
fn weigh(kept: &mut [Candidate], scale: Scale) -> f64 {
    kept.sort_unstable_by_key(|c| c.token);
    let mut total = 0.0;
    for candidate in kept {
        candidate.weight = scale.weight(candidate.logit);
        total += candidate.weight;
    }
    total
}

/// Keeps the fewest best candidates whose weights reach `needed`, at least one.
fn cut_at_mass(kept: &mut Vec<Candidate>, needed: f64) {
    kept.sort_unstable_by(best_first);
    let mut mass = 0.0;
    let count = kept
        .iter()
        .take_while(|c| {
            let more = mass < needed;
            mass += c.weight;
            more
        })
        .count();
    kept.truncate(count.max(1));
}

#[cfg(test)]
mod tests;
