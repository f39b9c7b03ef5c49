//! Where sequences start: from a snapshot of an earlier one, where there is one that serves.

use crate::cache_folder::CacheFolder;
use crate::prefix_cache::{PrefixCache, Snapshot};
use crate::sequence::{Ended, Start};
use crate::speculation::{Pace, Speculator};
use crate::target::LanguageModel;
use std::sync::Arc;

/// Makes starting points for sequences of one model, and keeps what they leave behind.
pub struct Starts<'a, M: LanguageModel> {
    model: &'a M,
    /// `None` = every sequence starts from nothing.
    cache: Option<PrefixCache<'a, M::State>>,
    /// Snapshots in files, beyond those of `cache`.
    folder: Option<CacheFolder<M::State>>,
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
            folder: None,
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

    /// Every sequence starts from nothing.
    pub fn forgetting(self) -> Starts<'a, M> {
        Starts {
            cache: None,
            ..self
        }
    }

    /// Snapshots are kept in files too. Without a cache in memory nothing is.
    pub(crate) fn in_folder(self, folder: Option<CacheFolder<M::State>>) -> Starts<'a, M> {
        let folder = folder.filter(|_| self.cache.is_some());
        Starts { folder, ..self }
    }

    /// The longest snapshot that the prompt goes on from, or nothing.
    pub fn start(&mut self, prompt: &[u32]) -> Start<'a, M::State> {
        let mut speculator = (self.speculate)();
        if let (Some(speculator), Some(pace)) = (&mut speculator, &self.pace) {
            speculator.pace = pace.clone();
        }
        self.fetch(prompt);
        let Some(cache) = &mut self.cache else {
            return Start {
                read: 0,
                state: self.model.new_state(),
                speculator,
                shared: None,
            };
        };
        let (hit, shared) = cache.longest(prompt);
        let (read, state) = match hit {
            Some(hit) => {
                let tokens = &prompt[..hit.read];
                if let Some(speculator) = &mut speculator {
                    match hit.drafter {
                        Some(drafter) => speculator.drafter = drafter.fork(),
                        None => speculator.drafter.catch_up_with(tokens),
                    }
                    speculator.drafter.resume(tokens);
                }
                (hit.read, M::State::clone(hit.state))
            }
            None => (0, self.model.new_state()),
        };
        Start {
            read,
            state,
            speculator,
            shared: Some(shared),
        }
    }

    /// Takes a snapshot into memory that is in a file only, where it saves enough.
    fn fetch(&mut self, prompt: &[u32]) {
        let (Some(cache), Some(folder)) = (&mut self.cache, &mut self.folder) else {
            return;
        };
        let held = cache.longest(prompt).0.map_or(0, |hit| hit.read);
        let read = |bytes: &[u8]| self.model.read_state(bytes);
        if let Some((read, state)) = folder.longest(prompt, held, read) {
            cache.insert(Snapshot {
                tokens: prompt[..read].to_vec(),
                footprint: self.model.footprint(&state),
                state: Arc::new(state),
                drafter: None,
                lasting: true,
            });
        }
    }

    /// Keeps a snapshot from the midst of a sequence.
    pub fn keep(&mut self, snapshot: Snapshot<'a, M::State>) {
        let Some(cache) = &mut self.cache else {
            return;
        };
        if let Some(folder) = self.folder.as_mut().filter(|_| snapshot.lasting) {
            folder.keep(&snapshot.tokens, &snapshot.state);
        }
        cache.insert(snapshot);
    }

    /// Keeps what a whole sequence left behind.
    pub fn ended(&mut self, ended: Ended<'a, M::State>) {
        let drafter = ended.speculator.map(|speculator| {
            self.pace = Some(speculator.pace);
            speculator.drafter.fork()
        });
        let drafter_footprint = drafter.as_ref().map(|drafter| drafter.footprint());
        let footprint = self.model.footprint(&ended.state);
        self.keep(Snapshot {
            tokens: ended.tokens,
            footprint: footprint.and(drafter_footprint.unwrap_or_default()),
            state: Arc::new(ended.state),
            drafter,
            lasting: true,
        });
        if let Some(cache) = &self.cache {
            tracing::debug!("{} snapshots in {} bytes", cache.len(), cache.bytes());
        }
    }

    /// The state after the last whole sequence, unless another was used since, and the tokens
    /// that it has read.
    pub fn newest(&self) -> Option<(Vec<u32>, &M::State)> {
        self.cache.as_ref()?.newest()
    }

    /// Bytes that snapshots take in memory.
    pub fn bytes(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::bytes)
    }

    /// Keeps at most so many bytes of snapshots in memory from now on.
    pub fn limit(&mut self, cache_bytes: usize) {
        if let Some(cache) = &mut self.cache {
            cache.limit(cache_bytes);
        }
    }

    /// Forgets everything that is in memory.
    pub fn clear(&mut self) {
        if let Some(cache) = &mut self.cache {
            cache.clear();
        }
        self.pace = None;
    }
}
