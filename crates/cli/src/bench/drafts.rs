//! `kozue bench --drafts`: whole answers, drafted in every way that the model has.
//!
//! Each prompt is answered in every way in turn before the next one, so that a slow moment of
//! the machine hits all ways; a way's speed is a ratio to plain decoding of the same prompt. All
//! answers to a prompt must have the same tokens.

use crate::bench::median;
use crate::bench::prompts::{self, Prompt};
use crate::cli::BenchArgs;
use crate::failure::Failure;
use crate::panel::{Lines, progress};
use crate::question;
use kozue_engine::sampling::Sampling;
use kozue_engine::speculation::{DraftKind, Speculation, SpeculationOptions};
use kozue_engine::{Answer, Loaded, Request};
use serde::Serialize;
use serde_json::json;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// One way to draft.
struct Way {
    name: String,
    speculation: Speculation,
}

/// What one way did with one prompt.
struct Outcome {
    /// Time of plain decoding by its own.
    ratio: f64,
    tokens: usize,
    passes: usize,
    drafting: f64,
}

/// One line of the table.
#[derive(Serialize)]
struct Line {
    category: String,
    draft: String,
    tokens_per_forward_pass: f64,
    /// Speed by plain decoding's, median over prompts, and the worst prompt's.
    ratio: f64,
    worst_ratio: f64,
    /// Share of the time that drafting takes.
    drafting: f64,
    prompts: usize,
    /// Prompt by prompt: tokens of the answer after the first, and the speed.
    each: Vec<(usize, f64)>,
}

pub fn run(args: &BenchArgs, path: &Path, loaded: &mut Loaded) -> Result<(), Failure> {
    let prompts = prompts::read(args.prompts.as_deref())?;
    let ways = ways(args, path, loaded)?;
    let mut outcomes: Vec<Vec<Vec<Outcome>>> = ways
        .iter()
        .map(|_| prompts.iter().map(|_| Vec::new()).collect())
        .collect();
    if args.max_tokens < 2 {
        return Err(Failure::Usage(
            "the first token comes from the prompt's pass: give -n at least 2".into(),
        ));
    }
    let mut told = Lines::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let request = request(args, loaded, &prompt.prompt)?;
        // The first answer warms caches up and gives the tokens.
        let expected = answer(loaded, &ways[0], &request)?;
        for round in 0..args.repeat {
            told.show(&format!(
                "prompt {} of {}, round {} of {}",
                index + 1,
                prompts.len(),
                round + 1,
                args.repeat
            ));
            let mut plain_s = f64::NAN;
            for (way, outcomes) in ways.iter().zip(&mut outcomes) {
                let answer = answer(loaded, way, &request)?;
                if answer.token_ids != expected.token_ids {
                    progress("");
                    return Err(Failure::Failed(format!(
                        "{} gave other tokens than plain decoding on the prompt {:?}: please report this",
                        way.name, prompt.prompt
                    )));
                }
                let seconds = decode_seconds(&answer);
                if plain_s.is_nan() {
                    plain_s = seconds;
                }
                let drafting = answer.stats.speculation.as_ref().map_or(0.0, |s| s.draft_s);
                outcomes[index].push(Outcome {
                    ratio: plain_s / seconds,
                    tokens: answer.token_ids.len().saturating_sub(1),
                    passes: answer.stats.forward_passes,
                    drafting: drafting / seconds,
                });
            }
        }
    }
    progress("");
    let lines = lines(&prompts, &ways, &outcomes);
    let text = if args.json {
        format!(
            "{}\n",
            json!({ "model": loaded.description().name, "drafts": lines })
        )
    } else {
        table_of(&lines)
    };
    io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(Failure::output)
}

/// Plain decoding first, then the way that the options ask for, or else every way that this model
/// has.
fn ways(args: &BenchArgs, path: &Path, loaded: &Loaded) -> Result<Vec<Way>, Failure> {
    let mut ways = vec![Way {
        name: DraftKind::None.to_string(),
        speculation: Speculation::none(),
    }];
    let mut add = |name: String, speculation| ways.push(Way { name, speculation });
    let asked = args.draft.options()?;
    let open = |kind, path_of: Option<PathBuf>| {
        let options = SpeculationOptions {
            kind,
            path: path_of,
            ..asked.clone()
        };
        Speculation::open(&options, path, loaded)
    };
    let best = open(asked.kind, asked.path.clone())?;
    let kind = best.kind();
    if args.draft.is_one_way() {
        let name = match (asked.budget, asked.width) {
            (None, None) => kind.to_string(),
            (Some(budget), None) => format!("{kind}, {budget} nodes"),
            (None, Some(width)) => format!("{kind}, width {width}"),
            (Some(budget), Some(width)) => format!("{kind}, {budget} nodes, width {width}"),
        };
        if kind != DraftKind::None {
            add(name, best);
        }
        return Ok(ways);
    }
    let lookup = open(Some(DraftKind::Lookup), None)?;
    add(DraftKind::Lookup.to_string(), lookup);
    let networks = match kind {
        DraftKind::Lookup | DraftKind::None => Vec::new(),
        DraftKind::Weaver => vec![open(Some(DraftKind::Dflash), asked.path.clone())?, best],
        _ => vec![best],
    };
    for network in networks {
        let kind = network.kind();
        if kind != DraftKind::Weaver {
            let chain = network.sized(Some(16), Some(1));
            add(format!("{kind}, chain of 16"), chain);
        }
        for budget in [8, 16, 32] {
            let trees = network.sized(Some(budget), None);
            add(format!("{kind}, {budget} nodes"), trees);
        }
        add(kind.to_string(), network);
    }
    Ok(ways)
}

fn request(args: &BenchArgs, loaded: &Loaded, prompt: &str) -> Result<Request, Failure> {
    let sampling = match args.temperature {
        0.0 => Sampling::greedy(),
        temperature => Sampling {
            temperature,
            seed: 1,
            ..Sampling::greedy()
        },
    };
    question::request(loaded, prompt, sampling, args.max_tokens)
}

fn answer(loaded: &Loaded, way: &Way, request: &Request) -> Result<Answer, Failure> {
    let mut session = loaded.session_drafted(None, &way.speculation);
    Ok(session.generate(request, &AtomicBool::new(false), &mut |_| ())?)
}

/// Seconds after the first token.
fn decode_seconds(answer: &Answer) -> f64 {
    answer.stats.duration_s - answer.stats.time_to_first_token_s.unwrap_or(0.0)
}

fn lines(prompts: &[Prompt], ways: &[Way], outcomes: &[Vec<Vec<Outcome>>]) -> Vec<Line> {
    let mut lines = Vec::new();
    for category in prompts::categories(prompts) {
        for (way, outcomes) in ways.iter().zip(outcomes) {
            // A prompt's figure is the median over its repetitions.
            let of: Vec<&Vec<Outcome>> = prompts
                .iter()
                .zip(outcomes)
                .filter(|(prompt, _)| prompt.category == category)
                .map(|(_, outcomes)| outcomes)
                .collect();
            let each = |f: &dyn Fn(&Outcome) -> f64| -> Vec<f64> {
                of.iter()
                    .map(|o| median(o.iter().map(f).collect()))
                    .collect()
            };
            let ratios = each(&|o| o.ratio);
            let total = |f: &dyn Fn(&Outcome) -> usize| -> f64 {
                of.iter().flat_map(|o| o.iter()).map(f).sum::<usize>() as f64
            };
            let tokens = of.iter().map(|o| o.first().map_or(0, |o| o.tokens));
            lines.push(Line {
                each: tokens.zip(ratios.iter().copied()).collect(),
                category: category.to_string(),
                draft: way.name.clone(),
                tokens_per_forward_pass: total(&|o| o.tokens) / total(&|o| o.passes),
                worst_ratio: ratios.iter().copied().fold(f64::INFINITY, f64::min),
                ratio: median(ratios),
                drafting: median(each(&|o| o.drafting)),
                prompts: of.len(),
            });
        }
    }
    lines
}

fn table_of(lines: &[Line]) -> String {
    let mut text =
        String::from("category   draft                  tokens/pass   speed   worst   drafting\n");
    for line in lines {
        text.push_str(&format!(
            "{:<10} {:<22} {:>11.2} {:>6.2}x {:>6.2}x {:>9.0}%\n",
            line.category,
            line.draft,
            line.tokens_per_forward_pass,
            line.ratio,
            line.worst_ratio,
            100.0 * line.drafting
        ));
    }
    text
}
