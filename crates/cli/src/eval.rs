//! `kozue eval`: perplexity of a text, and the distance from another model.

use crate::cli::EvalArgs;
use crate::default_model::model_path;
use crate::failure::Failure;
use crate::panel::{Lines, counted, progress};
use clap::ValueEnum;
use kozue_engine::evaluation::{Evaluation, Figure, evaluate};
use kozue_engine::tokenizer::Control;
use kozue_engine::{LanguageModel, Loaded};
use serde_json::json;
use std::io::{self, Write};

/// Runs the command.
pub fn run(args: &EvalArgs) -> Result<(), Failure> {
    let text = std::fs::read_to_string(&args.text)
        .map_err(|error| Failure::Failed(format!("{}: {error}", args.text.display())))?;
    let path = model_path(args.model.as_deref())?;
    let model = Loaded::open(&path, args.machine.cpu(), args.machine.kv.into())?;
    let reference = match &args.against {
        Some(against) => {
            let path = model_path(Some(against))?;
            let kv = args.against_kv.unwrap_or(args.machine.kv);
            let reference = model.beside(&path, kv.into())?;
            reference.check_vocabulary(&model, &path)?;
            Some(reference)
        }
        None => None,
    };
    let mut tokens = model.tokenizer.encode(&text, Control::Text)?;
    if let Some(most) = args.tokens {
        tokens.truncate(most);
    }
    let longest = model.model.max_position();
    let first = model.description().generation.bos;
    if args.ctx + usize::from(first.is_some()) > longest {
        return Err(Failure::Usage(format!(
            "--ctx {} is more than the {longest} tokens that the model was made for",
            args.ctx
        )));
    }
    let windows = tokens.len().div_ceil(args.ctx);
    let mut told = Lines::new();
    let found = evaluate(
        &model.model,
        reference.as_ref().map(|reference| &reference.model),
        first,
        &tokens,
        args.ctx,
        &mut |done| told.show(&format!("window {done} of {windows}")),
    );
    progress("");
    let found = found.map_err(|error| Failure::with_text(&args.text, error))?;
    let text = if args.json {
        format!("{}\n", json!(found))
    } else {
        table(args, &found)
    };
    io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(Failure::output)
}

fn table(args: &EvalArgs, found: &Evaluation) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| text.push_str(&format!("{name:<20} {value}\n"));
    line(
        "text",
        format!(
            "{} tokens in {} of {}",
            found.tokens,
            counted(found.windows, "window"),
            args.ctx
        ),
    );
    line("perplexity", shown(found.perplexity, 1.0, 4, ""));
    if let (Some(against), Some(path)) = (&found.against, &args.against) {
        let kept = args.against_kv.and_then(|kv| kv.to_possible_value());
        let kept = kept.map_or(String::new(), |kv| format!(" --kv {}", kv.get_name()));
        line("against", format!("{}{kept}", path.display()));
        line("its perplexity", shown(against.perplexity, 1.0, 4, ""));
        line("change", shown(against.change, 100.0, 3, "%"));
        line("KL divergence", shown(against.kl, 1.0, 5, " nats a token"));
        line(
            "same likeliest token",
            shown(against.same_top, 100.0, 2, "%"),
        );
    }
    text
}

fn shown(figure: Figure, scale: f64, digits: usize, unit: &str) -> String {
    let half = figure
        .half
        .map_or(String::new(), |half| format!(" ±{:.digits$}", half * scale));
    format!("{:.digits$}{half}{unit}", figure.value * scale)
}
