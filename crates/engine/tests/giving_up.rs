//! Clients that leave at a bad moment: what runs beside them is not disturbed.

use kozue_engine::sampling::Sampling;
use kozue_engine::scheduler::{CacheSize, Finished, Progress, Scheduler, SchedulerOptions, Ticket};
use kozue_engine::{FinishReason, Loaded, Request};
use kozue_kernels::{Cpu, KvType};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Longer than one part of a prompt is.
const LONG: usize = 900;

fn scheduler() -> Scheduler {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/tiny/qwen3_5");
    let loaded = Loaded::open(&path, Cpu::new(Some(1)), KvType::F32).unwrap();
    let options = SchedulerOptions {
        parallel: 2,
        queue: 8,
        cache: CacheSize::Off,
        ..SchedulerOptions::default()
    };
    Scheduler::start(Arc::new(loaded), options).unwrap()
}

struct Asked {
    ticket: Ticket,
    heard: Receiver<Progress>,
}

impl Asked {
    /// The text, and how it ended.
    fn end(&self) -> (String, Finished) {
        let mut text = String::new();
        loop {
            match self.heard.recv_timeout(Duration::from_secs(60)).unwrap() {
                Progress::Text(more) => text.push_str(&more),
                Progress::Finished(finished) => return (text, finished),
                Progress::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
    }
}

/// A request; with a `gate` it waits at its turn until the other side is dropped.
fn ask(scheduler: &Scheduler, length: usize, tokens: usize, gate: Option<Receiver<()>>) -> Asked {
    let request = Request {
        prompt: (0..length as u32).map(|n| n * 7 % 200 + 1).collect(),
        sampling: Sampling::greedy(),
        max_tokens: Some(tokens),
        stop: Vec::new(),
        grammar: None,
        logprobs: None,
        ignore_eos: true,
        trace: false,
    };
    let (sender, heard) = channel();
    let listener = move |progress| {
        let started = matches!(progress, Progress::Started { .. });
        let listened = sender.send(progress).is_ok();
        if let (true, Some(gate)) = (started, &gate) {
            let _ = gate.recv();
        }
        listened
    };
    let ticket = scheduler.submit(request, Box::new(listener)).unwrap();
    Asked { ticket, heard }
}

fn started(asked: &Asked) {
    let first = asked.heard.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(matches!(first, Progress::Started { .. }), "{first:?}");
}

/// ggml-org/llama.cpp#24496, #13262, ikawrakow/ik_llama.cpp#1020: a prompt was read to its end, and
/// answered, for a client that had left.
#[test]
fn a_prompt_is_not_read_for_nobody() {
    let scheduler = scheduler();
    let (release, gate): (Sender<()>, _) = channel();
    let asked = ask(&scheduler, LONG, 500, Some(gate));
    started(&asked);
    asked.ticket.cancel();
    drop(release);
    let (text, finished) = asked.end();
    assert_eq!(finished.reason, FinishReason::Cancelled);
    assert_eq!((text.as_str(), finished.completion_tokens), ("", 0));
    assert_eq!(ask(&scheduler, 3, 5, None).end().1.completion_tokens, 5);
}

/// ggml-org/llama.cpp#27604: a stream given up while another request read its prompt hung the
/// server, which then did not stop; ikawrakow/ik_llama.cpp#1929: giving one request up ended another.
#[test]
fn leaving_while_another_reads_its_prompt_disturbs_nobody() {
    let scheduler = scheduler();
    let (alone, _) = ask(&scheduler, LONG, 20, None).end();
    for by_ticket in [true, false] {
        let leaving = ask(&scheduler, 3, 900, None);
        started(&leaving);
        let (release, gate): (Sender<()>, _) = channel();
        let reading = ask(&scheduler, LONG, 20, Some(gate));
        started(&reading);
        match by_ticket {
            true => leaving.ticket.cancel(),
            false => drop(leaving),
        }
        drop(release);
        let (text, finished) = reading.end();
        assert_eq!(finished.reason, FinishReason::Length);
        assert_eq!(text, alone);
    }
    assert!(scheduler.stop(Duration::from_secs(60)));
}
