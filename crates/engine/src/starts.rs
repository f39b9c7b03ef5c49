//! Where sequences start: from a snapshot of an earlier one, where there is one that serves.

use crate::prefix_cache::{PrefixCache, Snapshot};
use crate::sequence::{Ended, Start};
use crate::speculation::{Pace, Speculator};
use crate::target::LanguageModel;

/// Makes starting points for sequences of one model, and keeps what they leave behind.
pub struct Starts<'a, M: LanguageModel> {
    model: &'a M,
    /// `None` = every sequence starts from nothing.
    cache: Option<PrefixCache<'a, M::State>>,
    /// Makes a drafter for a sequence that starts from nothing.
    speculate: Box<dyn Fn() -> Option<Speculator<'a>> + 'a>,
    /// The last sequence's sense of what pays.
    pace: Option<Pace>,
}

impl<'a, M: LanguageModel> Starts<'a, M> {
    /// Keeps up to `cache_bytes` of snapshots, or none at all.
    pub fn new(model: &'a M, cache_bytes: Option<usize>) -> Starts<'a, M> {
        Starts {
            model,
            cache: cache_bytes.map(PrefixCache::new),
            speculate: Box::new(|| None),
            pace: None,
        }
    }

    /// Sequences draft with what `speculate` makes, which may be nothing.
    pub fn speculating(self, speculate: impl Fn() -> Option<Speculator<'a>> + 'a) -> Starts<'a, M> {
        Starts {
            speculate: Box::new(speculate),
            ..self
        }
    }

    /// The longest snapshot that the prompt goes on from, or nothing.
    pub fn start(&mut self, prompt: &[u32]) -> Start<'a, M::State> {
        let fresh = (self.speculate)();
        let snapshot = self.cache.as_mut().and_then(|cache| cache.longest(prompt));
        let (read, state, drafter) = match snapshot {
            Some(snapshot) => {
                let drafter = snapshot.drafter.as_ref().map(|drafter| {
                    let mut drafter = drafter.fork();
                    drafter.resume(&snapshot.tokens);
                    drafter
                });
                (snapshot.tokens.len(), snapshot.state.clone(), drafter)
            }
            None => (0, self.model.new_state(), None),
        };
        let pace = self.pace.clone();
        let speculator = fresh.map(|fresh| Speculator {
            drafter: drafter.unwrap_or(fresh.drafter),
            pace: pace.unwrap_or(fresh.pace),
            width: fresh.width,
        });
        Start {
            read,
            state,
            speculator,
        }
    }

    /// Keeps a snapshot from the midst of a sequence.
    pub fn keep(&mut self, snapshot: Snapshot<'a, M::State>) {
        if let Some(cache) = &mut self.cache {
            cache.insert(snapshot);
        }
    }

    /// Keeps what a whole sequence left behind.
    pub fn ended(&mut self, ended: Ended<'a, M::State>) {
        let drafter = ended.speculator.map(|speculator| {
            self.pace = Some(speculator.pace);
            speculator.drafter
        });
        if !ended.tokens.is_empty() {
            self.keep(Snapshot {
                bytes: self.model.state_bytes(&ended.state),
                tokens: ended.tokens,
                state: ended.state,
                drafter: drafter.map(|drafter| drafter.fork()),
            });
        }
    }

    /// The state after the last whole sequence, unless another was used since, and the tokens
    /// that it has read.
    pub fn newest(&self) -> Option<(&[u32], &M::State)> {
        self.cache.as_ref()?.newest()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        if let Some(cache) = &mut self.cache {
            cache.clear();
        }
        self.pace = None;
    }
}
