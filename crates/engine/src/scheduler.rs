//! Requests of several clients on one model: a bounded queue and the thread that answers.
//!
//! A request belongs to whoever holds its [`Ticket`]: dropping the ticket takes the request out of
//! the queue, or ends its answer after the forward pass in progress. Tickets are told apart by a
//! number that is never used again, so giving up one request never touches another.

use crate::answer::{Answer, FinishReason};
use crate::cache_folder::FolderOptions;
use crate::error::Error;
use crate::loaded::Loaded;
use crate::session::{Drawn, Request};
use crate::speculation::Round;
use crate::worker::Worker;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Bounds of a scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// Most requests answered at a time; at least 1.
    pub parallel: usize,
    /// Most bytes for the states of requests being answered; one is answered whatever it takes.
    /// `None` = most of the memory that is free at the start, less the cache. What answers take
    /// beyond what was set aside for them, the cache gives up.
    pub memory: Option<u64>,
    /// Most requests that wait for their turn.
    pub queue: usize,
    /// Tokens of context, prompt and answer together; `None` = what the model was made for.
    pub context: Option<usize>,
    /// Bytes for snapshots of earlier sequences.
    pub cache: CacheSize,
    /// Where snapshots are kept in files too.
    pub folder: Option<FolderOptions>,
}

/// How much memory snapshots of earlier sequences may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheSize {
    /// None: every prompt is computed from its beginning.
    Off,
    /// A quarter of the memory that is free at the start.
    Share,
    /// So many bytes.
    Bytes(usize),
}

impl Default for SchedulerOptions {
    fn default() -> SchedulerOptions {
        SchedulerOptions {
            parallel: 8,
            memory: None,
            queue: 64,
            context: None,
            cache: CacheSize::Share,
            folder: None,
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
    /// What became of a draft, where the request asks for it.
    Round(Round),
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
    pub(crate) fn of(drawn: Drawn) -> Token {
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
    pub(crate) fn of(answer: &Answer) -> Finished {
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
    #[error("the queue is full (room for {room}): try again later")]
    Full {
        /// Requests that may wait.
        room: usize,
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
    /// Bytes that the prefix cache takes in memory.
    pub cache_bytes: usize,
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

/// A request in the queue.
pub(crate) struct Job {
    pub number: u64,
    pub request: Request,
    pub listener: Listener,
    pub cancel: Arc<AtomicBool>,
}

#[derive(Default)]
pub(crate) struct Queue {
    pub waiting: VecDeque<Job>,
    /// Cancel flags of the requests that are being answered.
    pub running: Vec<(u64, Arc<AtomicBool>)>,
    /// Most of them.
    pub parallel: usize,
    /// What the prefix cache takes, as of the last answer.
    pub cache_bytes: usize,
    next_number: u64,
    pub stopping: bool,
}

impl Queue {
    fn take(&mut self, number: u64) -> Option<Job> {
        let place = self.waiting.iter().position(|job| job.number == number)?;
        self.waiting.remove(place)
    }
}

#[derive(Default)]
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    pub changed: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("Shared")
    }
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, Queue> {
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
        let limit = options.queue;
        let thread = std::thread::Builder::new()
            .name("kozue-model".to_string())
            .spawn(move || Worker::new(&loaded, &theirs, options).work())
            .map_err(|error| Error::Model(format!("cannot start the model's thread: {error}")))?;
        Ok(Scheduler {
            shared,
            limit,
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
            return Err(Refused::Full { room: self.limit });
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
            cache_bytes: queue.cache_bytes,
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
