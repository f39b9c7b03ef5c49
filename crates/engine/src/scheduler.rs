//! Requests of several clients on one model: a bounded queue and the thread that answers.
//!
//! Requests run side by side: every pass takes the next rows of all answers in progress through
//! the model together, and a part of one prompt besides. Prompts take turns, so that a long one
//! does not keep a short one waiting, and where answers are in progress, prompts get half of the
//! time at most. The bits of an answer do not depend on what runs beside it.
//!
//! A request belongs to whoever holds its [`Ticket`]: dropping the ticket takes the request out of
//! the queue, or ends its answer after the forward pass in progress. Tickets are told apart by a
//! number that is never used again, so giving up one request never touches another.

use crate::answer::{Answer, FinishReason};
use crate::error::Error;
use crate::loaded::{CpuModel, Loaded};
use crate::runner::run_pass;
use crate::sequence::Sequence;
use crate::session::{Drawn, Event, Request};
use crate::starts::Starts;
use crate::target::LanguageModel;
use kozue_model::State;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Bounds of a scheduler.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerOptions {
    /// Most requests answered at a time; at least 1.
    pub parallel: usize,
    /// Most requests that wait for their turn.
    pub queue: usize,
    /// Tokens of context, prompt and answer together; `None` = what the model was made for.
    pub context: Option<usize>,
    /// Bytes for snapshots of earlier sequences; `None` = every prompt is computed from its
    /// beginning.
    pub cache_bytes: Option<usize>,
}

impl Default for SchedulerOptions {
    fn default() -> SchedulerOptions {
        SchedulerOptions {
            parallel: 8,
            queue: 64,
            context: None,
            cache_bytes: Some(2 << 30),
        }
    }
}

/// What the holder of a ticket hears, in this order: `Started`, any of the next, and one of the
/// last two. A request that is given up while it waits hears nothing.
#[derive(Debug)]
pub enum Progress {
    /// The request's turn has come.
    Started {
        /// Prompt tokens that need no computing, because the model's state holds them already.
        cached_tokens: usize,
    },
    /// A token was drawn; its text follows, unless it belongs to later text or to none.
    Token(Token),
    /// The answer goes on with this text.
    Text(String),
    /// The answer is whole.
    Finished(Finished),
    /// There is no answer.
    Failed(Error),
}

/// A drawn token; see [`Drawn`].
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub token: u32,
    /// The forward pass that made it.
    pub pass: usize,
    /// Its log-probability, where it was asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens with theirs.
    pub top: Vec<(u32, f32)>,
}

impl Token {
    fn of(drawn: Drawn) -> Token {
        Token {
            token: drawn.token,
            pass: drawn.pass,
            logprob: drawn.logprob,
            top: drawn.top.to_vec(),
        }
    }
}

/// How an answer ended and what it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// Whether one of the model's end tokens ended it, not a stop text.
    pub by_token: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that needed no computing.
    pub cached_tokens: usize,
    /// Tokens drawn, the one that ended the answer included.
    pub completion_tokens: usize,
    /// Forward passes after the prompt's.
    pub forward_passes: usize,
    /// Seconds from the request's turn to its first token.
    pub first_token_s: Option<f64>,
    /// Seconds from the request's turn to its end.
    pub duration_s: f64,
}

impl Finished {
    fn of(answer: &Answer) -> Finished {
        Finished {
            reason: answer.finish_reason,
            by_token: answer.ended_by_token,
            prompt_tokens: answer.usage.prompt_tokens,
            cached_tokens: answer.stats.reused_tokens,
            completion_tokens: answer.usage.completion_tokens,
            forward_passes: answer.stats.forward_passes,
            first_token_s: answer.stats.time_to_first_token_s,
            duration_s: answer.stats.duration_s,
        }
    }
}

/// Hears of a request's progress, on the model's thread: it must not wait. `false` gives the
/// request up.
pub type Listener = Box<dyn FnMut(Progress) -> bool + Send>;

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// As many requests wait as may.
    #[error("{waiting} requests are waiting already, which is as many as may: try again later")]
    Full {
        /// Requests in the queue.
        waiting: usize,
    },
    /// The scheduler is ending.
    #[error("the server is stopping")]
    Stopping,
}

/// How much there is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests being answered.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
}

/// The owner's end of a request; dropping it gives the request up.
#[derive(Debug)]
pub struct Ticket {
    number: u64,
    cancel: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

impl Ticket {
    /// Gives the request up; the listener still hears how it ended if its turn has come.
    pub fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
        let given_up = self.shared.lock().take(self.number);
        // Outside the lock: a listener may do anything when it is dropped.
        drop(given_up);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancel();
    }
}

struct Job {
    number: u64,
    request: Request,
    listener: Listener,
    cancel: Arc<AtomicBool>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// Cancel flags of the requests that are being answered.
    running: Vec<(u64, Arc<AtomicBool>)>,
    /// Most of them.
    parallel: usize,
    next_number: u64,
    stopping: bool,
}

impl Queue {
    fn take(&mut self, number: u64) -> Option<Job> {
        let place = self.waiting.iter().position(|job| job.number == number)?;
        self.waiting.remove(place)
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("Shared")
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing is left half done while the lock is held.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers requests on a thread of its own.
#[derive(Debug)]
pub struct Scheduler {
    shared: Arc<Shared>,
    limit: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Scheduler {
    /// Starts the model's thread. Errors: the system gives no thread.
    pub fn start(loaded: Arc<Loaded>, options: SchedulerOptions) -> Result<Scheduler, Error> {
        let shared = Arc::new(Shared::default());
        shared.lock().parallel = options.parallel.max(1);
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kozue-model".to_string())
            .spawn(move || Worker::new(&loaded, &theirs, options).work())
            .map_err(|error| Error::Model(format!("cannot start the model's thread: {error}")))?;
        Ok(Scheduler {
            shared,
            limit: options.queue,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Takes a request, to be answered when its turn comes.
    pub fn submit(&self, request: Request, listener: Listener) -> Result<Ticket, Refused> {
        let mut queue = self.shared.lock();
        if queue.stopping {
            return Err(Refused::Stopping);
        }
        let free = queue.parallel.saturating_sub(queue.running.len());
        if queue.waiting.len() >= self.limit + free {
            return Err(Refused::Full {
                waiting: queue.waiting.len(),
            });
        }
        let number = queue.next_number;
        queue.next_number += 1;
        let cancel = Arc::new(AtomicBool::new(false));
        queue.waiting.push_back(Job {
            number,
            request,
            listener,
            cancel: Arc::clone(&cancel),
        });
        drop(queue);
        self.shared.changed.notify_all();
        Ok(Ticket {
            number,
            cancel,
            shared: Arc::clone(&self.shared),
        })
    }

    /// What there is to do now.
    pub fn load(&self) -> Load {
        let queue = self.shared.lock();
        Load {
            running: queue.running.len(),
            waiting: queue.waiting.len(),
        }
    }

    /// Takes no more requests, answers those it has for at most `grace`, gives up the rest and
    /// ends the thread. Says whether all were answered.
    pub fn stop(&self, grace: Duration) -> bool {
        let deadline = Instant::now() + grace;
        let mut queue = self.shared.lock();
        queue.stopping = true;
        self.shared.changed.notify_all();
        let mut answered = true;
        while !queue.running.is_empty() || !queue.waiting.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                answered = false;
                break;
            }
            queue = self
                .shared
                .changed
                .wait_timeout(queue, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        let given_up = std::mem::take(&mut queue.waiting);
        for (_, cancel) in &queue.running {
            cancel.store(true, Ordering::Relaxed);
        }
        drop(queue);
        drop(given_up);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // Panics of the model are caught in the thread.
            let _ = thread.join();
        }
        answered
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// A request in progress.
struct Running<'a> {
    number: u64,
    listener: Listener,
    cancel: Arc<AtomicBool>,
    sequence: Sequence<'a, State>,
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
        Event::Text(text) => tell(listener, cancel, Progress::Text(text.to_string())),
    }
}

/// The model's thread.
struct Worker<'a> {
    loaded: &'a Loaded,
    shared: &'a Shared,
    context: usize,
    starts: Starts<'a, CpuModel>,
    /// Those that read their prompts come in the order of their turns.
    running: Vec<Running<'a>>,
    /// Seconds of passes with a prompt that decoding is still to make up for.
    debt: f64,
}

impl<'a> Worker<'a> {
    fn new(loaded: &'a Loaded, shared: &'a Shared, options: SchedulerOptions) -> Worker<'a> {
        let longest = loaded.model.max_position();
        Worker {
            loaded,
            shared,
            context: options.context.unwrap_or(longest).min(longest),
            starts: Starts::new(&loaded.model, options.cache_bytes)
                .speculating(|| loaded.speculator()),
            running: Vec::new(),
            debt: 0.0,
        }
    }

    /// Answers until there are no requests and none may come.
    fn work(mut self) {
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

    /// Gives the next request its turn. One at a time, so that the next finds what this one's
    /// prompt leaves behind.
    fn admit(&mut self) {
        let job = {
            let mut queue = self.shared.lock();
            if queue.running.len() >= queue.parallel {
                return;
            }
            let Some(job) = queue.waiting.pop_front() else {
                return;
            };
            queue.running.push((job.number, Arc::clone(&job.cancel)));
            job
        };
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

    /// Keeps what sequences leave behind, and lets whole answers go.
    fn settle(&mut self) {
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
        self.shared
            .lock()
            .running
            .retain(|(running, _)| *running != number);
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
