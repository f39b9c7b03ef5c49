//! The thread that answers requests.
//!
//! Requests run side by side: every pass takes the next rows of all answers in progress through
//! the model together, and a part of one prompt besides. Prompts take turns, so that a long one
//! does not keep a short one waiting, and where answers are in progress, prompts get half of the
//! time at most. The bits of an answer do not depend on what runs beside it.

use crate::cache_folder::CacheFolder;
use crate::error::Error;
use crate::loaded::{CpuModel, Loaded};
use crate::runner::run_pass;
use crate::scheduler::{CacheSize, Finished, Listener, Progress, SchedulerOptions, Shared, Token};
use crate::sequence::Sequence;
use crate::session::{Event, Request};
use crate::starts::Starts;
use crate::target::LanguageModel;
use kozue_kernels::available_memory;
use kozue_model::State;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Tokens of an answer that memory is set aside for; most are shorter.
const USUAL_ANSWER: usize = 2048;

/// Bytes of a cache that is to take its share, where the system does not tell what is free.
const USUAL_CACHE: usize = 2 << 30;

/// Bytes for snapshots, and for the states of requests being answered: together most of what is
/// `free` beside what a pass works in. `None` = no snapshots; no limit, since the system does not tell.
fn budgets(options: &SchedulerOptions, free: Option<usize>) -> (Option<usize>, Option<u64>) {
    let cache = match options.cache {
        CacheSize::Off => None,
        CacheSize::Share => Some(free.map_or(USUAL_CACHE, |free| free / 4)),
        CacheSize::Bytes(bytes) => Some(bytes),
    };
    let rest = |free: usize| (free / 10 * 8).saturating_sub(cache.unwrap_or(0)) as u64;
    (cache, options.memory.or(free.map(rest)))
}

/// A request in progress.
struct Running<'a> {
    number: u64,
    listener: Listener,
    cancel: Arc<AtomicBool>,
    sequence: Sequence<'a, State>,
    /// Bytes that its state is expected to take.
    bytes: u64,
}

fn tell(listener: &mut Listener, cancel: &AtomicBool, progress: Progress) {
    if !listener(progress) {
        cancel.store(true, Ordering::Relaxed);
    }
}

fn tell_event(listener: &mut Listener, cancel: &AtomicBool, event: Event) {
    match event {
        Event::Prefill { .. } => {}
        Event::Token(drawn) => tell(listener, cancel, Progress::Token(Token::of(drawn))),
        Event::Round(round) => tell(listener, cancel, Progress::Round(round.clone())),
        Event::Text(text) => tell(listener, cancel, Progress::Text(text.to_string())),
    }
}

/// The model's thread.
pub(crate) struct Worker<'a> {
    loaded: &'a Loaded,
    shared: &'a Shared,
    context: usize,
    /// Most bytes for states; `None` = unknown.
    memory: Option<u64>,
    /// Bytes for snapshots while states keep to theirs.
    cache: usize,
    /// Bytes that states take beyond theirs, which the cache has given up.
    beyond: u64,
    starts: Starts<'a, CpuModel>,
    /// Those that read their prompts come in the order of their turns.
    running: Vec<Running<'a>>,
    /// Seconds of passes with a prompt that decoding is still to make up for.
    debt: f64,
}

impl<'a> Worker<'a> {
    pub fn new(loaded: &'a Loaded, shared: &'a Shared, options: SchedulerOptions) -> Worker<'a> {
        let longest = loaded.model.max_position();
        let context = options.context.unwrap_or(longest).min(longest);
        let pass = loaded.needs(context).pass as usize;
        let free = available_memory().map(|free| free.saturating_sub(pass));
        let (cache, memory) = budgets(&options, free);
        let folder = options
            .folder
            .map(|folder| CacheFolder::open(folder, CpuModel::write_state));
        Worker {
            loaded,
            shared,
            context,
            memory,
            cache: cache.unwrap_or(0),
            beyond: 0,
            starts: Starts::new(&loaded.model, cache)
                .speculating(|| loaded.speculator())
                .in_folder(folder),
            running: Vec::new(),
            debt: 0.0,
        }
    }

    /// Answers until there are no requests and none may come.
    pub fn work(mut self) {
        loop {
            if self.running.is_empty() && !self.wait() {
                return;
            }
            let decoding = self.running.iter().any(|one| !one.sequence.prefilling());
            if !decoding || self.debt <= 0.0 {
                self.admit();
            }
            self.pass(decoding && self.debt > 0.0);
            self.settle();
        }
    }

    /// Waits for a request. `false`: there will be none.
    fn wait(&mut self) -> bool {
        self.debt = 0.0;
        let mut queue = self.shared.lock();
        while queue.waiting.is_empty() {
            if queue.stopping {
                return false;
            }
            queue = self
                .shared
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    /// Bytes that a request's state is expected to take.
    fn bytes(&self, request: &Request) -> u64 {
        let answer = request.max_tokens.unwrap_or(USUAL_ANSWER).min(USUAL_ANSWER);
        let tokens = request.prompt.len().saturating_add(answer);
        self.loaded.needs(tokens.min(self.context)).own()
    }

    /// Gives the next request its turn. One at a time, so that the next finds what this one's
    /// prompt leaves behind.
    fn admit(&mut self) {
        let job = {
            let mut queue = self.shared.lock();
            if queue.running.len() >= queue.parallel {
                return;
            }
            let Some(next) = queue.waiting.front() else {
                return;
            };
            let taken: u64 = self.running.iter().map(|one| one.bytes).sum();
            let full = self
                .memory
                .is_some_and(|memory| taken + self.bytes(&next.request) > memory);
            if full && !self.running.is_empty() {
                return;
            }
            let Some(job) = queue.waiting.pop_front() else {
                return;
            };
            queue.running.push((job.number, Arc::clone(&job.cancel)));
            job
        };
        let bytes = self.bytes(&job.request);
        let mut listener = job.listener;
        let start = self.starts.start(&job.request.prompt);
        let cached_tokens = start.read;
        let sequence = Sequence::new(
            &self.loaded.model,
            &self.loaded.tokenizer,
            &self.loaded.description().generation.eos,
            self.context,
            job.request,
            start,
        );
        match sequence {
            Ok(sequence) => {
                tell(
                    &mut listener,
                    &job.cancel,
                    Progress::Started { cached_tokens },
                );
                let running = Running {
                    number: job.number,
                    listener,
                    cancel: job.cancel,
                    sequence,
                    bytes,
                };
                // Its prompt is next.
                self.running.insert(0, running);
            }
            Err(error) => self.say_last(job.number, listener, Progress::Failed(error)),
        }
    }

    /// One pass: the next rows of all answers, and a part of one prompt unless `only_decoding`.
    fn pass(&mut self, only_decoding: bool) {
        for one in &mut self.running {
            if one.cancel.load(Ordering::Relaxed) {
                one.sequence.cancel();
            }
        }
        let reader = self
            .running
            .iter()
            .find(|one| one.sequence.prefilling() && !one.sequence.finished())
            .map(|one| one.number)
            .filter(|_| !only_decoding);
        let takes_part = |one: &Running| {
            let reads = one.sequence.prefilling();
            (!reads || Some(one.number) == reader) && !one.sequence.finished()
        };
        let mut numbers = Vec::new();
        let mut sequences = Vec::new();
        let mut listeners = Vec::new();
        for one in self.running.iter_mut().filter(|one| takes_part(one)) {
            numbers.push(one.number);
            sequences.push(&mut one.sequence);
            listeners.push((&mut one.listener, &one.cancel));
        }
        if sequences.is_empty() {
            return;
        }
        let start = Instant::now();
        let model = &self.loaded.model;
        let result = catch_unwind(AssertUnwindSafe(|| {
            run_pass(model, &mut sequences, &mut |index, event| {
                let (listener, cancel) = &mut listeners[index];
                tell_event(listener, cancel, event);
            })
        }));
        let seconds = start.elapsed().as_secs_f64();
        self.debt = match reader {
            Some(_) => seconds,
            None => (self.debt - seconds).max(0.0),
        };
        match result {
            Ok(Ok(results)) => {
                for (number, result) in numbers.into_iter().zip(results) {
                    if let Err(error) = result
                        && let Some(one) = self.take(number)
                    {
                        self.say_last(number, one.listener, Progress::Failed(error));
                    }
                }
            }
            Ok(Err(error)) => self.fail_all(&error.to_string()),
            Err(panic) => self.fail_all(&format!(
                "the model's computation failed: {}",
                panic_text(panic.as_ref())
            )),
        }
        // Another prompt's turn.
        if let Some(one) = reader.and_then(|number| self.take(number)) {
            self.running.push(one);
        }
    }

    fn take(&mut self, number: u64) -> Option<Running<'a>> {
        let place = self.running.iter().position(|one| one.number == number)?;
        Some(self.running.remove(place))
    }

    /// Makes the cache give up what answers take that have grown beyond what was set aside.
    fn balance(&mut self) {
        let Some(memory) = self.memory else {
            return;
        };
        let held = |one: &Running| self.loaded.needs(one.sequence.read()).own();
        let held: u64 = self.running.iter().map(held).sum();
        let beyond = held.saturating_sub(memory);
        if beyond != self.beyond {
            self.beyond = beyond;
            let cache = (self.cache as u64).saturating_sub(beyond);
            self.starts.limit(cache as usize);
        }
    }

    /// Keeps what sequences leave behind, and lets whole answers go.
    fn settle(&mut self) {
        self.balance();
        let mut index = 0;
        while index < self.running.len() {
            for snapshot in self.running[index].sequence.snapshots() {
                self.starts.keep(snapshot);
            }
            if !self.running[index].sequence.finished() {
                index += 1;
                continue;
            }
            let Running {
                number,
                mut listener,
                cancel,
                sequence,
                ..
            } = self.running.remove(index);
            let (answer, ended) = sequence.end(&mut |event| {
                tell_event(&mut listener, &cancel, event);
            });
            self.starts.ended(ended);
            let finished = Finished::of(&answer);
            self.say_last(number, listener, Progress::Finished(finished));
        }
    }

    /// No state is to be trusted any more.
    fn fail_all(&mut self, message: &str) {
        self.starts.clear();
        for one in std::mem::take(&mut self.running) {
            let error = Error::Model(message.to_string());
            self.say_last(one.number, one.listener, Progress::Failed(error));
        }
    }

    /// A request has ended. It does not count as running once its listener hears of it.
    fn say_last(&self, number: u64, mut listener: Listener, last: Progress) {
        let mut queue = self.shared.lock();
        queue.running.retain(|(running, _)| *running != number);
        queue.cache_bytes = self.starts.bytes();
        drop(queue);
        listener(last);
        drop(listener);
        self.shared.changed.notify_all();
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no reason given")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_and_answers_share_what_is_free() {
        let with = |cache, memory| SchedulerOptions {
            cache,
            memory,
            ..SchedulerOptions::default()
        };
        let free = Some(1000);
        let share = budgets(&with(CacheSize::Share, None), free);
        assert_eq!(share, (Some(250), Some(550)));
        let fixed = budgets(&with(CacheSize::Bytes(700), None), free);
        assert_eq!(fixed, (Some(700), Some(100)));
        let larger = budgets(&with(CacheSize::Bytes(2000), None), free);
        assert_eq!(larger, (Some(2000), Some(0)));
        assert_eq!(
            budgets(&with(CacheSize::Off, None), free),
            (None, Some(800))
        );
        let told = budgets(&with(CacheSize::Share, Some(5)), None);
        assert_eq!(told, (Some(USUAL_CACHE), Some(5)));
    }
}
