//! Several requests on one model: turns, giving up, refusing, stopping.

use kozue_engine::sampling::Sampling;
use kozue_engine::scheduler::{CacheSize, Progress, Refused, Scheduler, SchedulerOptions, Ticket};
use kozue_engine::speculation::{DraftKind, SpeculationOptions};
use kozue_engine::{FinishReason, Loaded, Request};
use kozue_kernels::{Cpu, KvType};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

static LOADED: LazyLock<Arc<Loaded>> = LazyLock::new(|| Arc::new(load()));

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/tiny/qwen3_5")
}

fn load() -> Loaded {
    Loaded::open(&path(), Cpu::new(Some(1)), KvType::F32).unwrap()
}

fn scheduler(queue: usize) -> Scheduler {
    beside(1, queue)
}

/// A scheduler that answers so many requests at a time.
fn beside(parallel: usize, queue: usize) -> Scheduler {
    let options = SchedulerOptions {
        parallel,
        queue,
        ..SchedulerOptions::default()
    };
    Scheduler::start(Arc::clone(&LOADED), options).unwrap()
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: Sampling::greedy(),
        max_tokens: Some(max_tokens),
        stop: Vec::new(),
        grammar: None,
        logprobs: None,
        ignore_eos: true,
        trace: false,
    }
}

struct Asked {
    ticket: Ticket,
    heard: Receiver<Progress>,
}

impl Asked {
    /// All that is still to be heard.
    fn rest(&self) -> Vec<Progress> {
        std::iter::from_fn(|| self.heard.recv_timeout(Duration::from_secs(60)).ok()).collect()
    }
}

fn ask(scheduler: &Scheduler, request: Request) -> Result<Asked, Refused> {
    let (sender, heard) = channel();
    let ticket = scheduler.submit(
        request,
        Box::new(move |progress| sender.send(progress).is_ok()),
    )?;
    Ok(Asked { ticket, heard })
}

/// A request that has its turn and keeps it until the sender is dropped.
fn hold(scheduler: &Scheduler) -> (Asked, Sender<()>) {
    let (sender, heard) = channel();
    let (release, released) = channel::<()>();
    let ticket = scheduler
        .submit(
            request(&[1, 2, 3], 900),
            Box::new(move |progress| {
                let started = matches!(progress, Progress::Started { .. });
                let listened = sender.send(progress).is_ok();
                if started {
                    let _ = released.recv();
                }
                listened
            }),
        )
        .unwrap();
    let asked = Asked { ticket, heard };
    let first = asked.heard.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(matches!(first, Progress::Started { cached_tokens: 0 }));
    (asked, release)
}

fn text(progress: &[Progress]) -> String {
    let pieces = progress.iter().map(|p| match p {
        Progress::Text(text) => text.as_str(),
        _ => "",
    });
    pieces.collect()
}

#[test]
fn an_answer_is_that_of_a_session() {
    let mut session = LOADED.session(None);
    let request = request(&[5, 6, 7], 40);
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let expected = session.generate(&request, &cancel, &mut |_| ()).unwrap();

    let scheduler = scheduler(4);
    let asked = ask(&scheduler, request).unwrap();
    let heard = asked.rest();
    assert!(matches!(heard[0], Progress::Started { cached_tokens: 0 }));
    assert_eq!(text(&heard), expected.text, "{heard:?}");
    let Some(Progress::Finished(finished)) = heard.last() else {
        panic!("{heard:?}");
    };
    assert_eq!(finished.reason, FinishReason::Length);
    assert_eq!(
        (finished.prompt_tokens, finished.completion_tokens),
        (3, 40)
    );
    let load = scheduler.load();
    assert_eq!((load.running, load.waiting), (0, 0));
    // The answer's state is kept.
    assert!(load.cache_bytes > 0);
}

#[test]
fn beyond_the_queue_requests_are_refused() {
    let scheduler = scheduler(2);
    let (first, release) = hold(&scheduler);
    let waiting = [(); 2].map(|()| ask(&scheduler, request(&[1], 2)).unwrap());
    let refused = ask(&scheduler, request(&[1], 2)).err();
    assert_eq!(refused, Some(Refused::Full { room: 2 }));
    let load = scheduler.load();
    assert_eq!((load.running, load.waiting), (1, 2));
    drop(first);
    drop(release);
    for asked in &waiting {
        assert!(matches!(asked.rest().last(), Some(Progress::Finished(_))));
    }
}

#[test]
fn without_a_queue_an_idle_model_still_answers() {
    let scheduler = scheduler(0);
    let asked = ask(&scheduler, request(&[1], 2)).unwrap();
    assert!(matches!(asked.rest().last(), Some(Progress::Finished(_))));
}

#[test]
fn giving_up_a_waiting_request_leaves_the_others_alone() {
    let scheduler = scheduler(3);
    let (first, release) = hold(&scheduler);
    let [second, third] = [(); 2].map(|()| ask(&scheduler, request(&[9, 8], 5)).unwrap());
    drop(second.ticket);
    // Out of the queue at once, without a word.
    assert_eq!(scheduler.load().waiting, 1);
    assert!(second.heard.recv().is_err());
    drop(release);
    for (asked, tokens) in [(&first, 900), (&third, 5)] {
        let heard = asked.rest();
        let Some(Progress::Finished(finished)) = heard.last() else {
            panic!("{heard:?}");
        };
        assert_eq!(finished.reason, FinishReason::Length);
        assert_eq!(finished.completion_tokens, tokens);
    }
}

#[test]
fn giving_up_a_running_request_ends_it() {
    for by_ticket in [true, false] {
        let scheduler = scheduler(3);
        let (first, release) = hold(&scheduler);
        let second = ask(&scheduler, request(&[9, 8], 5)).unwrap();
        if by_ticket {
            first.ticket.cancel();
            drop(release);
            let heard = first.rest();
            let Some(Progress::Finished(finished)) = heard.last() else {
                panic!("{heard:?}");
            };
            assert_eq!(finished.reason, FinishReason::Cancelled);
            assert!(finished.completion_tokens < 900);
        } else {
            // Nobody listens any more.
            drop(first.heard);
            drop(release);
        }
        assert!(matches!(second.rest().last(), Some(Progress::Finished(_))));
    }
}

#[test]
fn what_cannot_be_answered_fails_alone() {
    let scheduler = scheduler(3);
    let bad = [request(&[], 5), request(&[u32::MAX], 5)];
    let bad = bad.map(|request| ask(&scheduler, request).unwrap());
    let good = ask(&scheduler, request(&[1], 5)).unwrap();
    for asked in &bad {
        assert!(matches!(asked.rest()[..], [Progress::Failed(_)]));
    }
    assert!(matches!(good.rest().last(), Some(Progress::Finished(_))));
}

#[test]
fn a_continued_prompt_is_not_computed_again() {
    let scheduler = scheduler(3);
    let first = ask(&scheduler, request(&[1, 2, 3], 1)).unwrap();
    first.rest();
    let second = ask(&scheduler, request(&[1, 2, 3, 4], 1)).unwrap();
    let heard = second.rest();
    assert!(matches!(heard[0], Progress::Started { cached_tokens: 3 }));
}

#[test]
fn stopping_answers_what_was_taken() {
    let scheduler = scheduler(3);
    let asked = [(); 3].map(|()| ask(&scheduler, request(&[4], 20)).unwrap());
    assert!(scheduler.stop(Duration::from_secs(60)));
    for asked in &asked {
        assert!(matches!(asked.rest().last(), Some(Progress::Finished(_))));
    }
    let refused = ask(&scheduler, request(&[4], 20)).err();
    assert_eq!(refused, Some(Refused::Stopping));
}

#[test]
fn stopping_without_grace_gives_up() {
    let scheduler = scheduler(3);
    let (first, release) = hold(&scheduler);
    let second = ask(&scheduler, request(&[4], 20)).unwrap();
    let stopped = std::thread::scope(|scope| {
        let stopping = scope.spawn(|| scheduler.stop(Duration::ZERO));
        while scheduler.load().waiting > 0 {
            std::thread::yield_now();
        }
        // The flag is set before the thread is waited for.
        std::thread::sleep(Duration::from_millis(20));
        drop(release);
        stopping.join().unwrap()
    });
    assert!(!stopped);
    let heard = first.rest();
    assert!(matches!(
        heard.last(),
        Some(Progress::Finished(finished)) if finished.reason == FinishReason::Cancelled
    ));
    assert!(second.rest().is_empty());
}

#[test]
fn answers_do_not_depend_on_what_runs_beside_them() {
    let mut requests = Vec::new();
    for n in 0..10u32 {
        let prompt: Vec<u32> = (0..1 + n * 37).map(|i| 1 + (i * (n + 3)) % 300).collect();
        let mut request = request(&prompt, 30 + n as usize);
        request.sampling.temperature = 0.9;
        request.sampling.seed = u64::from(n);
        requests.push(request);
    }
    let alone: Vec<String> = requests
        .iter()
        .map(|request| text(&ask(&scheduler(1), request.clone()).unwrap().rest()))
        .collect();
    let mut drafting = load();
    let options = SpeculationOptions {
        kind: Some(DraftKind::Lookup),
        budget: Some(5),
        ..SpeculationOptions::default()
    };
    drafting.speculate(&path(), &options).unwrap();
    let drafting = Arc::new(drafting);
    for (loaded, parallel) in [(&*LOADED, 3), (&*LOADED, 16), (&drafting, 4)] {
        let options = SchedulerOptions {
            parallel,
            ..SchedulerOptions::default()
        };
        let scheduler = Scheduler::start(Arc::clone(loaded), options).unwrap();
        let asked: Vec<Asked> = requests
            .iter()
            .map(|request| ask(&scheduler, request.clone()).unwrap())
            .collect();
        for (asked, alone) in asked.iter().zip(&alone) {
            assert_eq!(text(&asked.rest()), *alone);
        }
    }
}

/// Starts and ends of requests in the order in which they came to pass, all of them submitted
/// before the first one starts.
fn order(options: SchedulerOptions, requests: &[Request]) -> Vec<(usize, &'static str)> {
    let scheduler = Scheduler::start(Arc::clone(&LOADED), options).unwrap();
    let (sender, heard) = channel();
    let (release, released) = channel::<()>();
    let mut released = Some(released);
    let tickets: Vec<Ticket> = requests
        .iter()
        .enumerate()
        .map(|(n, request)| {
            let sender = sender.clone();
            let released = released.take();
            let listener = move |progress| {
                let what = match progress {
                    Progress::Started { .. } => "starts",
                    Progress::Finished(_) => "ends",
                    _ => return true,
                };
                if let Some(released) = released.as_ref().filter(|_| what == "starts") {
                    let _ = released.recv();
                }
                sender.send((n, what)).is_ok()
            };
            scheduler
                .submit(request.clone(), Box::new(listener))
                .unwrap()
        })
        .collect();
    drop((sender, release));
    let order = heard.iter().collect();
    drop(tickets);
    order
}

#[test]
fn requests_run_side_by_side() {
    let requests = [request(&[1, 2, 3], 90), request(&[7], 3)];
    let options = SchedulerOptions {
        parallel: 2,
        ..SchedulerOptions::default()
    };
    let side_by_side = [(0, "starts"), (1, "starts"), (1, "ends"), (0, "ends")];
    assert_eq!(order(options, &requests), side_by_side);
    let options = SchedulerOptions {
        parallel: 1,
        ..SchedulerOptions::default()
    };
    let in_turn = [(0, "starts"), (0, "ends"), (1, "starts"), (1, "ends")];
    assert_eq!(order(options, &requests), in_turn);
}

#[test]
fn requests_that_memory_has_no_room_for_wait() {
    // 103 tokens, 4 tokens, 300 tokens: one page, one, and two.
    let requests = [
        request(&[1, 2, 3], 100),
        request(&[7], 3),
        request(&[8], 299),
    ];
    let options = SchedulerOptions {
        parallel: 4,
        // One byte too few for the first and the third.
        memory: Some(LOADED.needs(103).own() + LOADED.needs(300).own() - 1),
        ..SchedulerOptions::default()
    };
    let waits = [
        (0, "starts"),
        (1, "starts"),
        (1, "ends"),
        (0, "ends"),
        (2, "starts"),
        (2, "ends"),
    ];
    assert_eq!(order(options, &requests), waits);
    // One is answered whatever it takes.
    let options = SchedulerOptions {
        memory: Some(0),
        ..SchedulerOptions::default()
    };
    let ends = order(options, &requests).into_iter();
    let ends: Vec<usize> = ends.filter(|e| e.1 == "ends").map(|e| e.0).collect();
    assert_eq!(ends, [0, 1, 2]);
}

#[test]
fn the_same_prompt_twice_at_once_is_computed_once() {
    let scheduler = beside(4, 4);
    let (_first, release) = hold(&scheduler);
    let prompt: Vec<u32> = (9..208).collect();
    let asked = [(); 2].map(|()| ask(&scheduler, request(&prompt, 3)).unwrap());
    drop(release);
    let cached = asked.map(|asked| match asked.rest()[0] {
        Progress::Started { cached_tokens } => cached_tokens,
        ref other => panic!("{other:?}"),
    });
    assert_eq!(cached, [0, 198]);
}

#[test]
fn without_a_cache_every_prompt_is_computed() {
    let options = SchedulerOptions {
        cache: CacheSize::Off,
        ..SchedulerOptions::default()
    };
    let scheduler = Scheduler::start(Arc::clone(&LOADED), options).unwrap();
    for _ in 0..2 {
        let heard = ask(&scheduler, request(&[1, 2, 3], 2)).unwrap().rest();
        assert!(matches!(heard[0], Progress::Started { cached_tokens: 0 }));
    }
}

/// A conversation of many turns: questions follow, are edited, are asked again; another
/// conversation with the same beginning comes between.
fn conversation(scheduler: &Scheduler) -> (Vec<String>, usize, usize) {
    let (mut texts, mut prompts, mut cached) = (Vec::new(), 0, 0);
    let mut history: Vec<u32> = (20..90).collect();
    for turn in 0..30u32 {
        let mut prompt = history.clone();
        prompt.extend((0..12).map(|n| 1 + (turn * 31 + n * 7) % 290));
        if turn % 5 == 3 {
            // The last question, put otherwise.
            let last = prompt.len() - 4;
            prompt[last] = 5;
        }
        let mut asking = request(&prompt, 9);
        asking.sampling.temperature = 1.0;
        asking.sampling.seed = u64::from(turn);
        let aside: Vec<u32> = (20..90).chain([7 + turn, 8, 9]).collect();
        for asking in [asking.clone(), request(&aside, 3), asking] {
            prompts += asking.prompt.len();
            let heard = ask(scheduler, asking).unwrap().rest();
            if let Progress::Started { cached_tokens } = heard[0] {
                cached += cached_tokens;
            }
            texts.push(text(&heard));
        }
        history = prompt;
        history.extend([3, 4, 6]);
    }
    (texts, prompts, cached)
}

#[test]
fn a_cache_changes_no_answer_and_saves_most_prompts() {
    let cached = |cache| {
        let options = SchedulerOptions {
            cache,
            ..SchedulerOptions::default()
        };
        let scheduler = Scheduler::start(Arc::clone(&LOADED), options).unwrap();
        conversation(&scheduler)
    };
    let (texts, prompts, none) = cached(CacheSize::Off);
    assert_eq!(none, 0);
    // Room for everything, and for a few states only.
    for (bytes, least) in [(1 << 30, 80), (1 << 20, 0)] {
        let (same, _, saved) = cached(CacheSize::Bytes(bytes));
        assert_eq!(same, texts);
        assert!(saved * 100 >= prompts * least, "{saved} of {prompts}");
    }
}
