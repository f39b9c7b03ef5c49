//! A thread pool for regions of a few microseconds to a few milliseconds.
//!
//! The caller takes part in every region. Tasks are claimed one by one from a shared counter, so a
//! thread that the scheduler has set aside delays only the task it holds. A worker that arrives
//! after the last task was claimed is never waited for. Idle workers spin for a bounded time and
//! then park.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks, when every thread has a core of its own.
const SPIN: Duration = Duration::from_micros(1000);
/// The same when there are more threads than cores: spinning would only take time from the others.
const SPIN_OVERSUBSCRIBED: Duration = Duration::from_micros(20);

/// Set in `Shared::gate` while workers may join the current region.
const OPEN: u64 = 1 << 31;
/// Set in `Shared::gate` when workers must end.
const STOP: u64 = 1 << 30;
/// Bits of `Shared::gate` that count the workers which joined.
const JOINED: u64 = STOP - 1;
/// The region's number lies above this bit of `Shared::gate`.
const EPOCH_SHIFT: u32 = 32;

thread_local! {
    /// True while this thread runs a task, so that a nested region runs in place.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

type Task<'a> = dyn Fn(usize) + Sync + 'a;

struct Shared {
    /// Region number, `OPEN`, `STOP` and the number of workers that joined.
    gate: AtomicU64,
    /// The next task to claim.
    next: AtomicUsize,
    /// Workers that have left the current region.
    left: AtomicUsize,
    /// The current region. Written only while the gate is shut and nobody is inside.
    job: UnsafeCell<Option<(*const Task<'static>, usize)>>,
    /// The first panic of the current region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    spin: Duration,
}

// SAFETY: `job` is written by the one caller that holds `ThreadPool::region` while the gate is shut
// and every worker that joined has left; it is read only by workers that joined an open gate. The
// gate's release/acquire pair orders the two. The pointee is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the raw pointer is only dereferenced inside a region.
unsafe impl Send for Shared {}

/// A fixed set of threads that run parallel regions with low latency.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a region: one region at a time.
    region: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic is carried to the caller as a value, so a poisoned lock protects nothing here.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ThreadPool {
    /// A pool of `threads` threads including the caller's; 0 counts as 1. If the system refuses
    /// more threads, the pool works with those it got.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            spin: if threads <= cores {
                SPIN
            } else {
                SPIN_OVERSUBSCRIBED
            },
        });
        let workers = (1..threads)
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("kozue-{i}"))
                    .spawn(move || worker(&shared))
                    .ok()
            })
            .collect();
        Self {
            shared,
            workers,
            region: Mutex::new(()),
        }
    }

    /// Number of threads that take part in a region, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(0) .. f(tasks - 1)`, each once, in no set order, and returns when all are done.
    ///
    /// A call from inside a task runs in place. A panic in a task stops the claiming of further
    /// tasks and is raised again on the caller once every thread has left the region.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() || IN_TASK.get() {
            for i in 0..tasks {
                f(i);
            }
            return;
        }
        let panic = {
            let _region = lock(&self.region);
            self.region(tasks, f)
        };
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    fn region(&self, tasks: usize, f: &Task<'_>) -> Option<Box<dyn Any + Send>> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed. This function does not return before every worker
        // that can see the pointer has left the region.
        let job = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(f) };
        // SAFETY: the gate is shut and nobody is inside, see `Shared::job`.
        unsafe { *shared.job.get() = Some((job, tasks)) };
        shared.next.store(0, Ordering::Relaxed);
        shared.left.store(0, Ordering::Relaxed);
        let epoch = (shared.gate.load(Ordering::Relaxed) >> EPOCH_SHIFT).wrapping_add(1);
        // Sequentially consistent with the sleepers' check of the gate: either they see the region
        // or the load below sees them.
        shared
            .gate
            .store((epoch << EPOCH_SHIFT) | OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&shared.sleep);
            shared.wake.notify_all();
        }
        shared.claim(f, tasks);
        let joined = (shared.gate.fetch_and(!OPEN, Ordering::AcqRel) & JOINED) as usize;
        let mut spins = 0u32;
        while shared.left.load(Ordering::Acquire) != joined {
            spins += 1;
            if spins < 4096 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        lock(&shared.panic).take()
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.gate.fetch_or(STOP, Ordering::SeqCst);
        {
            let _guard = lock(&self.shared.sleep);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a task, so there is no error to pass on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Claims tasks until none is left.
    fn claim(&self, f: &Task<'_>, tasks: usize) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            IN_TASK.set(true);
            loop {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    break;
                }
                f(i);
            }
        }));
        IN_TASK.set(false);
        if let Err(payload) = result {
            // Far from overflow, and beyond any number of tasks that a region is given.
            self.next.store(usize::MAX / 2, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }

    /// True if `gate` calls a worker whose last region was `seen`.
    fn calls(gate: u64, seen: u64) -> bool {
        gate & STOP != 0 || (gate & OPEN != 0 && gate >> EPOCH_SHIFT != seen)
    }

    /// Waits for a region other than `seen`, or the end; returns the gate that called.
    fn wait(&self, seen: u64) -> u64 {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                let gate = self.gate.load(Ordering::Acquire);
                if Self::calls(gate, seen) {
                    return gate;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > self.spin {
                break;
            }
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let gate = loop {
            let gate = self.gate.load(Ordering::SeqCst);
            if Self::calls(gate, seen) {
                break gate;
            }
            guard = self
                .wake
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        gate
    }
}

fn worker(shared: &Shared) {
    let mut seen = 0;
    loop {
        let gate = shared.wait(seen);
        if gate & STOP != 0 {
            return;
        }
        if shared
            .gate
            .compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            continue;
        }
        seen = gate >> EPOCH_SHIFT;
        // SAFETY: this worker joined while the gate was open, so the caller waits for `left` to
        // reach the number of those who joined before it touches `job` or lets the closure end.
        if let Some((job, tasks)) = unsafe { *shared.job.get() } {
            // SAFETY: as above, the closure outlives the region.
            shared.claim(unsafe { &*job }, tasks);
        }
        shared.left.fetch_add(1, Ordering::Release);
    }
}

/// Physical cores this process may use: one thread for each core of its affinity mask, no more
/// than the system grants (a container's CPU quota counts).
pub fn physical_cores() -> usize {
    let granted = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut cores = std::collections::BTreeSet::new();
    for cpu in allowed_cpus() {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        match std::fs::read_to_string(path) {
            Ok(siblings) => cores.insert(siblings.trim().to_owned()),
            Err(_) => return granted,
        };
    }
    if cores.is_empty() {
        granted
    } else {
        cores.len().min(granted)
    }
}

#[cfg(target_os = "linux")]
fn allowed_cpus() -> Vec<usize> {
    // SAFETY: `cpu_set_t` is plain bits, for which zero is valid, and the call writes no more than
    // the size it is given.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        set
    };
    (0..libc::CPU_SETSIZE as usize)
        // SAFETY: the index is below CPU_SETSIZE.
        .filter(|&i| unsafe { libc::CPU_ISSET(i, &set) })
        .collect()
}

#[cfg(not(target_os = "linux"))]
fn allowed_cpus() -> Vec<usize> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn counts(pool: &ThreadPool, tasks: usize) -> Vec<u32> {
        let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
        pool.run(tasks, &|i| {
            counts[i].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicU32::into_inner).collect()
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 5, 8] {
            let pool = ThreadPool::new(threads);
            assert_eq!(pool.threads(), threads);
            for tasks in [0, 1, 2, 3, 7, 64, 1000] {
                assert_eq!(counts(&pool, tasks), vec![1; tasks]);
            }
        }
    }

    #[test]
    fn many_tiny_regions() {
        for threads in [2, 4] {
            let pool = ThreadPool::new(threads);
            let total = AtomicUsize::new(0);
            for _ in 0..5_000 {
                pool.run(3, &|i| {
                    total.fetch_add(i + 1, Ordering::Relaxed);
                });
            }
            assert_eq!(total.into_inner(), 5_000 * 6);
        }
    }

    #[test]
    fn regions_after_a_pause_wake_parked_workers() {
        let pool = ThreadPool::new(3);
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(counts(&pool, 50), vec![1; 50]);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(3);
        for bad in [0, 1, 49, 99] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(100, &|i| assert!(i != bad, "task {i} failed"));
            }));
            let payload = result.unwrap_err();
            assert_eq!(
                payload.downcast_ref::<String>().unwrap(),
                &format!("task {bad} failed")
            );
            assert_eq!(counts(&pool, 100), vec![1; 100]);
        }
    }

    #[test]
    fn a_nested_region_runs_in_place() {
        let pool = ThreadPool::new(2);
        let total = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(5, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 20);
    }

    #[test]
    fn several_callers_take_turns() {
        let pool = ThreadPool::new(2);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(10, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 200 * 10);
    }

    #[test]
    fn physical_cores_are_counted() {
        let cores = physical_cores();
        assert!(cores >= 1);
        assert!(cores <= std::thread::available_parallelism().unwrap().get());
    }
}
