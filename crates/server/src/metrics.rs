//! Counters for Prometheus' text format.

use kozue_engine::FinishReason;
use kozue_engine::scheduler::{Finished, Load};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

/// Upper bounds of the histograms, in seconds.
const BOUNDS: [f64; 12] = [
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0,
];

/// What is counted since the server started.
#[derive(Debug, Default)]
pub struct Metrics(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    requests: BTreeMap<(&'static str, u16), u64>,
    answers: BTreeMap<&'static str, u64>,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    forward_passes: u64,
    first_token: Histogram,
    duration: Histogram,
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, seconds: f64) {
        self.count += 1;
        self.sum += seconds;
        for (bucket, bound) in self.buckets.iter_mut().zip(BOUNDS) {
            *bucket += u64::from(seconds <= bound);
        }
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        for (bucket, bound) in self.buckets.iter().zip(BOUNDS) {
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {bucket}");
        }
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum {}\n{name}_count {}", self.sum, self.count);
    }
}

impl Metrics {
    /// A request for a known path was answered with a status.
    pub fn requested(&self, path: &'static str, status: u16) {
        *self.lock().requests.entry((path, status)).or_default() += 1;
    }

    /// An answer has ended.
    pub fn answered(&self, finished: &Finished) {
        let mut counts = self.lock();
        let reason = match finished.reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        };
        *counts.answers.entry(reason).or_default() += 1;
        counts.prompt_tokens += finished.prompt_tokens as u64;
        counts.cached_tokens += finished.cached_tokens as u64;
        counts.completion_tokens += finished.completion_tokens as u64;
        counts.forward_passes += finished.forward_passes as u64;
        if let Some(seconds) = finished.first_token_s {
            counts.first_token.add(seconds);
        }
        counts.duration.add(finished.duration_s);
    }

    /// The text that Prometheus reads.
    pub fn text(&self, load: Load) -> String {
        let counts = self.lock();
        let mut out = String::new();
        let mut single = |name: &str, kind: &str, help: &str, value: u64| {
            let _ = writeln!(
                out,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}"
            );
        };
        single(
            "kozue_requests_running",
            "gauge",
            "Requests being answered.",
            load.running as u64,
        );
        single(
            "kozue_requests_waiting",
            "gauge",
            "Requests in the queue.",
            load.waiting as u64,
        );
        single(
            "kozue_cache_bytes",
            "gauge",
            "Bytes that the prefix cache takes in memory.",
            load.cache_bytes as u64,
        );
        single(
            "kozue_prompt_tokens_total",
            "counter",
            "Tokens of prompts.",
            counts.prompt_tokens,
        );
        single(
            "kozue_cached_tokens_total",
            "counter",
            "Tokens of prompts that needed no computing.",
            counts.cached_tokens,
        );
        single(
            "kozue_completion_tokens_total",
            "counter",
            "Tokens drawn.",
            counts.completion_tokens,
        );
        single(
            "kozue_forward_passes_total",
            "counter",
            "Forward passes after those of prompts.",
            counts.forward_passes,
        );
        let _ = writeln!(
            out,
            "# HELP kozue_http_requests_total Requests by path and status.\n# TYPE kozue_http_requests_total counter"
        );
        for ((path, status), count) in &counts.requests {
            let _ = writeln!(
                out,
                "kozue_http_requests_total{{path=\"{path}\",status=\"{status}\"}} {count}"
            );
        }
        let _ = writeln!(
            out,
            "# HELP kozue_answers_total Answers by why they ended.\n# TYPE kozue_answers_total counter"
        );
        for (reason, count) in &counts.answers {
            let _ = writeln!(out, "kozue_answers_total{{reason=\"{reason}\"}} {count}");
        }
        counts.first_token.write(
            "kozue_time_to_first_token_seconds",
            "From a request's turn to its first token.",
            &mut out,
        );
        counts.duration.write(
            "kozue_answer_seconds",
            "From a request's turn to its end.",
            &mut out,
        );
        out
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_out() {
        let metrics = Metrics::default();
        for first_token_s in [0.02, 0.3] {
            metrics.answered(&Finished {
                reason: FinishReason::Length,
                by_token: false,
                prompt_tokens: 10,
                cached_tokens: 4,
                completion_tokens: 5,
                forward_passes: 3,
                first_token_s: Some(first_token_s),
                duration_s: 200.0,
            });
        }
        metrics.requested("/health", 200);
        let text = metrics.text(Load {
            running: 1,
            waiting: 2,
            cache_bytes: 3,
        });
        for line in [
            "kozue_requests_running 1",
            "kozue_requests_waiting 2",
            "kozue_cache_bytes 3",
            "kozue_prompt_tokens_total 20",
            "kozue_cached_tokens_total 8",
            "kozue_completion_tokens_total 10",
            "kozue_forward_passes_total 6",
            "kozue_http_requests_total{path=\"/health\",status=\"200\"} 1",
            "kozue_answers_total{reason=\"length\"} 2",
            "kozue_time_to_first_token_seconds_bucket{le=\"0.025\"} 1",
            "kozue_time_to_first_token_seconds_bucket{le=\"0.5\"} 2",
            "kozue_time_to_first_token_seconds_count 2",
            "kozue_answer_seconds_bucket{le=\"120\"} 0",
            "kozue_answer_seconds_bucket{le=\"+Inf\"} 2",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
