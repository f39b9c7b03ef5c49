//! What the answers took, put together.

use super::CompareArgs;
use super::endpoint::{Endpoint, Sample};
use crate::bench::prompts::{Prompt, categories};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;

/// All samples.
pub struct Report<'a> {
    args: &'a CompareArgs,
    prompts: &'a [Prompt],
    /// Prompt and each endpoint's sample, in the order in which they were taken.
    samples: Vec<(usize, Vec<Sample>)>,
}

/// Figures of one endpoint over the prompts of one group.
#[derive(Serialize)]
pub struct Line {
    #[serde(skip)]
    pub endpoint: usize,
    pub url: String,
    pub model: String,
    pub category: String,
    pub answers: usize,
    pub time_to_first_token_s: Option<Spread>,
    pub decode_tokens_per_s: Option<Spread>,
    /// Decode speed by the first endpoint's with the same prompt in the same round.
    pub ratio: Option<Spread>,
    pub tokens_per_pass: Option<Spread>,
    pub completion_tokens: Option<Spread>,
    pub cached_tokens: Option<Spread>,
    /// Whether the server counted its tokens itself; else they are chunks of text.
    pub counted: bool,
}

/// A median with the quartiles around it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

impl Spread {
    /// `None` where there are no values.
    pub fn of(mut values: Vec<f64>) -> Option<Spread> {
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        // Between neighbours in proportion.
        let at = |share: f64| {
            let place = share * last as f64;
            let below = place as usize;
            let above = values[(below + 1).min(last)];
            values[below] + (above - values[below]) * (place - below as f64)
        };
        Some(Spread {
            low: at(0.25),
            median: at(0.5),
            high: at(0.75),
        })
    }
}

impl<'a> Report<'a> {
    pub fn new(args: &'a CompareArgs, prompts: &'a [Prompt]) -> Report<'a> {
        Report {
            args,
            prompts,
            samples: Vec::new(),
        }
    }

    /// Adds what all endpoints did with a prompt.
    pub fn add(&mut self, prompt: usize, samples: Vec<Sample>) {
        self.samples.push((prompt, samples));
    }

    pub fn endpoints(&self) -> &[Endpoint] {
        &self.args.endpoints
    }

    /// The groups of prompts, and all of them where there are several.
    pub fn categories(&self) -> Vec<&str> {
        let mut names = categories(self.prompts);
        if names.len() > 1 {
            names.push("all");
        }
        names
    }

    /// Every endpoint's figures, group by group.
    pub fn lines(&self) -> Vec<Line> {
        let mut lines = Vec::new();
        for category in self.categories() {
            let of: Vec<&[Sample]> = self
                .samples
                .iter()
                .filter(|(prompt, _)| {
                    category == "all" || self.prompts[*prompt].category == category
                })
                .map(|(_, samples)| &samples[..])
                .collect();
            for (index, endpoint) in self.args.endpoints.iter().enumerate() {
                let each = |figure: &dyn Fn(&[Sample]) -> Option<f64>| {
                    Spread::of(of.iter().filter_map(|samples| figure(samples)).collect())
                };
                lines.push(Line {
                    endpoint: index,
                    url: endpoint.url.clone(),
                    model: endpoint.model.clone(),
                    category: category.to_string(),
                    answers: of.len(),
                    time_to_first_token_s: each(&|s| s[index].first_token_s),
                    decode_tokens_per_s: each(&|s| s[index].tokens_per_s()),
                    ratio: each(&|s| Some(s[index].tokens_per_s()? / s[0].tokens_per_s()?)),
                    tokens_per_pass: each(&|s| s[index].tokens_per_pass()),
                    completion_tokens: each(&|s| Some(s[index].tokens as f64)),
                    cached_tokens: each(&|s| s[index].cached.map(|cached| cached as f64)),
                    counted: of.iter().all(|samples| samples[index].counted),
                });
            }
        }
        lines
    }

    /// For a terminal.
    pub fn table(&self) -> String {
        let lines = self.lines();
        let names: Vec<String> = self.endpoints().iter().map(Endpoint::to_string).collect();
        let longest = names.iter().map(|name| name.chars().count()).max();
        let width = longest.unwrap_or(0).max("endpoint".len());
        let mut text = format!(
            "{:<10} {:<width$} {:>26} {:>26} {:>8} {:>12} {:>7}\n",
            "prompts",
            "endpoint",
            "first token, ms",
            "decode, tokens/s",
            "ratio",
            "tokens/pass",
            "tokens"
        );
        for line in &lines {
            let _ = writeln!(
                text,
                "{:<10} {:<width$} {:>26} {:>26} {:>8} {:>12} {:>7}",
                line.category,
                names[line.endpoint],
                spread(line.time_to_first_token_s, 1e3),
                spread(line.decode_tokens_per_s, 1.0),
                median(line.ratio, 2, "x"),
                median(line.tokens_per_pass, 2, ""),
                median(line.completion_tokens, 0, ""),
            );
        }
        let _ = writeln!(
            text,
            "medians of {} rounds (quartiles around them); at most {} tokens, temperature {}, seed {}",
            self.args.rounds, self.args.max_tokens, self.args.temperature, self.args.seed
        );
        let last = &lines[lines.len() - names.len()..];
        for line in last {
            if !line.counted {
                let _ = writeln!(
                    text,
                    "{}: it does not count its tokens, so chunks of text were counted",
                    names[line.endpoint]
                );
            }
            if let Some(cached) = line.cached_tokens.filter(|cached| cached.median > 0.0) {
                let _ = writeln!(
                    text,
                    "{}: {:.0} tokens of a prompt came from its cache, so the first token says nothing of prefill",
                    names[line.endpoint], cached.median
                );
            }
        }
        text
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let samples = self.samples.iter().map(|(prompt, samples)| {
            let each = samples.iter().map(|sample| {
                json!({
                    "time_to_first_token_s": sample.first_token_s,
                    "decode_s": sample.decode_s,
                    "completion_tokens": sample.tokens,
                    "counted": sample.counted,
                    "spec_verify_ct": sample.passes,
                    "cached_tokens": sample.cached,
                })
            });
            json!({"prompt": prompt, "endpoints": each.collect::<Vec<_>>()})
        });
        json!({
            "rounds": self.args.rounds,
            "prompts": self.prompts.len(),
            "max_tokens": self.args.max_tokens,
            "temperature": self.args.temperature,
            "seed": self.args.seed,
            "results": self.lines(),
            "samples": samples.collect::<Vec<_>>(),
        })
    }
}

/// `median (low-high)`.
fn spread(spread: Option<Spread>, factor: f64) -> String {
    spread.map_or("-".to_string(), |Spread { low, median, high }| {
        format!(
            "{:.1} ({:.1}-{:.1})",
            median * factor,
            low * factor,
            high * factor
        )
    })
}

fn median(spread: Option<Spread>, digits: usize, unit: &str) -> String {
    spread.map_or("-".to_string(), |spread| {
        format!("{:.digits$}{unit}", spread.median)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        let spread = |values: &[f64]| Spread::of(values.to_vec());
        assert_eq!(spread(&[]), None);
        let of = |low, median, high| Some(Spread { low, median, high });
        assert_eq!(spread(&[3.0]), of(3.0, 3.0, 3.0));
        assert_eq!(spread(&[5.0, 1.0, 3.0, 2.0, 4.0]), of(2.0, 3.0, 4.0));
        assert_eq!(spread(&[1.0, 2.0]), of(1.25, 1.5, 1.75));
    }

    #[test]
    fn ratios_are_of_the_same_prompt_and_round() {
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            args: CompareArgs,
        }
        let words = [
            "x",
            "--endpoint",
            "http://a,m",
            "--endpoint",
            "http://b,<m>",
        ];
        let args = Line::parse_from(words).args;
        let prompt = |category: &str| Prompt {
            category: category.to_string(),
            prompt: String::new(),
        };
        let prompts = [prompt("code"), prompt("chat")];
        let mut report = Report::new(&args, &prompts);
        let sample = |speed: f64| Sample {
            first_token_s: Some(0.25),
            decode_s: 10.0 / speed,
            tokens: 11,
            counted: true,
            ..Sample::default()
        };
        // The machine gets slower; the second endpoint is twice as fast all the time.
        for (prompt, speed) in [(0, 10.0), (1, 8.0), (0, 2.0), (1, 1.0)] {
            report.add(prompt, vec![sample(speed), sample(2.0 * speed)]);
        }
        let lines = report.lines();
        let names: Vec<&str> = lines.iter().map(|line| &*line.category).collect();
        assert_eq!(names, ["code", "code", "chat", "chat", "all", "all"]);
        for line in &lines {
            let ratio = line.ratio.unwrap();
            let expected = 1.0 + line.endpoint as f64;
            assert!((ratio.low - expected).abs() < 1e-9 && (ratio.high - expected).abs() < 1e-9);
        }
        assert_eq!(lines[0].decode_tokens_per_s.unwrap().median, 6.0);
        assert_eq!((lines[0].answers, lines[4].answers), (2, 4));
        assert!(lines[0].tokens_per_pass.is_none());
        let table = report.table();
        assert!(
            table.contains("250.0 (250.0-250.0)") && table.contains("2.00x"),
            "{table}"
        );
        let chart = super::super::chart::draw(&report);
        assert!(chart.contains("&lt;m&gt; at b") && !chart.contains("<m>"));
        assert_eq!(chart.matches("class=\"bar").count(), 12);
    }
}
