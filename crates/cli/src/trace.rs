//! `kozue trace`: one page with the draft trees of an answer, accepted paths marked.

use crate::cli::TraceArgs;
use crate::default_model::model_path;
use crate::document::{escaped, write};
use crate::failure::Failure;
use crate::panel::counted;
use crate::question;
use kozue_engine::sampling::Sampling;
use kozue_engine::speculation::Round;
use kozue_engine::tokenizer::Tokenizer;
use kozue_engine::{Answer, Loaded, Request};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Size of a node's box, and of the room that it gets.
const BOX: (usize, usize) = (92, 20);
const STEP: (usize, usize) = (108, 26);
/// Characters of a token's text that are shown.
const SHOWN: usize = 11;

/// Runs the command.
pub fn run(args: &TraceArgs) -> Result<(), Failure> {
    let path = model_path(args.model.as_deref())?;
    let mut loaded = Loaded::open(&path, args.machine.cpu(), args.machine.kv.into())?;
    args.draft.apply(&mut loaded, &path)?;
    let sampling = Sampling {
        temperature: args.temperature,
        seed: args.seed,
        ..Sampling::greedy()
    };
    let request = Request {
        trace: true,
        ..question::request(&loaded, &args.prompt, sampling, args.max_tokens)?
    };
    let answer = loaded
        .session(None)
        .generate(&request, &AtomicBool::new(false), &mut |_| ())?;
    let page = page(
        &answer,
        &loaded.tokenizer,
        &args.prompt,
        &loaded.description().name,
    );
    write(&args.output, &page)?;
    eprintln!("{}", told(&answer, &args.output));
    Ok(())
}

/// How many trees there were; that there were none is no mistake, but wants a word.
fn told(answer: &Answer, page: &Path) -> String {
    let page = page.display();
    let passes = counted(answer.stats.forward_passes, "pass");
    match answer.trace.len() {
        0 => format!(
            "{page}: the answer without trees, as nothing was drafted in {passes} (--draft says what drafts, --tree-budget how much)"
        ),
        trees => format!("{page}: {} in {passes}", counted(trees, "tree")),
    }
}

fn page(answer: &Answer, tokenizer: &Tokenizer, prompt: &str, model: &str) -> String {
    let mut page = format!(
        "<!doctype html><meta charset=\"utf-8\"><title>Draft trees</title>\n<style>{STYLE}</style>\n<h1>{}</h1>\n<p>{}: {} tokens in {} passes</p>\n{LEGEND}\n",
        escaped(prompt),
        escaped(model),
        answer.token_ids.len(),
        answer.stats.forward_passes,
    );
    for (number, round) in answer.trace.iter().enumerate() {
        let _ = write!(
            page,
            "<h2>{}: {} of {} drafted tokens accepted</h2>\n{}\n",
            number + 1,
            round.path.len() - 1,
            round.tokens.len() - 1,
            picture(round, tokenizer)
        );
    }
    let _ = writeln!(page, "<pre>{}</pre>", escaped(&answer.text));
    page
}

/// What the colours mean.
const LEGEND: &str = "<p class=\"legend\"><b class=\"accepted\">accepted</b> <b>drafted, not accepted</b> \
<b class=\"next\">drawn by the model after the last accepted token</b>; depth goes to the right, each tree begins \
with the newest token</p>";

const STYLE: &str = "body{font:14px system-ui,sans-serif;margin:2em;background:#fff;color:#222}\
h2{font-size:13px;font-weight:500;margin:1.4em 0 .3em;color:#666}\
.legend b{font-weight:400;border:1px solid #bbb;background:#f3f3f3;color:#444;padding:1px 6px}\
.legend b.accepted{background:#d7f0dd;border-color:#2a8a4a}.legend b.next{background:#fff3d6;border-color:#c08a1e}\
svg{font:11px ui-monospace,monospace;max-width:100%}\
rect{fill:#f3f3f3;stroke:#bbb}path{stroke:#bbb;fill:none}text{fill:#444}\
.accepted rect{fill:#d7f0dd;stroke:#2a8a4a}.accepted text{fill:#124}path.accepted{stroke:#2a8a4a;stroke-width:2}\
.next rect{fill:#fff3d6;stroke:#c08a1e}\
@media(prefers-color-scheme:dark){body{background:#1b1b1b;color:#ddd}rect{fill:#2a2a2a;stroke:#555}text{fill:#bbb}\
.accepted rect{fill:#173d24;stroke:#3fae66}.accepted text{fill:#dfd}.next rect{fill:#40330f;stroke:#c08a1e}}";

/// A round as a drawing: depth goes to the right, and every leaf has a line of its own.
fn picture(round: &Round, tokenizer: &Tokenizer) -> String {
    let count = round.tokens.len();
    let mut depths = vec![0; count];
    let mut children = vec![Vec::new(); count];
    for node in 1..count {
        let parent = round.parents[node] as usize;
        depths[node] = depths[parent] + 1;
        children[parent].push(node);
    }
    let mut lines = vec![0; count];
    let mut used = 0;
    place(0, &children, &mut lines, &mut used);
    let last = round.path[round.path.len() - 1];
    let next = (depths[last] + 1, used);
    let deepest = depths.iter().copied().max().unwrap_or(0).max(next.0);
    let (width, height) = (STEP.0 * (deepest + 1), STEP.1 * (used + 1));
    let mut svg = format!(
        "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\">\n"
    );
    let mut edge = |from: (usize, usize), to: (usize, usize), class: &str| {
        let (x, y) = (from.0 * STEP.0 + BOX.0, from.1 * STEP.1 + BOX.1 / 2);
        let (to_x, to_y) = (to.0 * STEP.0, to.1 * STEP.1 + BOX.1 / 2);
        let middle = (x + to_x) / 2;
        let _ = writeln!(
            svg,
            "<path class=\"{class}\" d=\"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}\"/>"
        );
    };
    let accepted = |node: usize| round.path.contains(&node);
    for node in 1..count {
        let parent = round.parents[node] as usize;
        edge(
            (depths[parent], lines[parent]),
            (depths[node], lines[node]),
            if accepted(node) { "accepted" } else { "" },
        );
    }
    edge((depths[last], lines[last]), next, "");
    let mut node_box = |at: (usize, usize), class: &str, token: u32, title: &str| {
        let (x, y) = (at.0 * STEP.0, at.1 * STEP.1);
        let _ = writeln!(
            svg,
            "<g class=\"{class}\"><title>{title}</title><rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"4\"/><text x=\"{}\" y=\"{}\">{}</text></g>",
            BOX.0,
            BOX.1,
            x + 6,
            y + 14,
            escaped(&shown(token, tokenizer))
        );
    };
    for node in 0..count {
        let chance = 100.0 * round.log_chances[node].exp();
        node_box(
            (depths[node], lines[node]),
            if accepted(node) { "accepted" } else { "" },
            round.tokens[node],
            &format!("estimated {chance:.0}%"),
        );
    }
    node_box(next, "next", round.next, "drawn by the model");
    svg.push_str("</svg>");
    svg
}

/// Gives `node` the line of its first child and every other child lines of its own.
fn place(node: usize, children: &[Vec<usize>], lines: &mut [usize], used: &mut usize) {
    lines[node] = *used;
    if children[node].is_empty() {
        *used += 1;
    }
    for &child in &children[node] {
        place(child, children, lines, used);
    }
}

/// A token's text on one line.
fn shown(token: u32, tokenizer: &Tokenizer) -> String {
    let text = tokenizer.decode(&[token]);
    let text = if text.is_empty() {
        tokenizer.piece(token).unwrap_or_default()
    } else {
        text.replace('\n', "⏎").replace('\t', "⇥").replace(' ', "·")
    };
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kozue_engine::Loaded;
    use kozue_kernels::{Cpu, KvType};

    #[test]
    fn a_picture_shows_every_node_once_and_marks_the_accepted() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/reference/tiny/qwen3"
        );
        let loaded = Loaded::open(Path::new(folder), Cpu::new(Some(1)), KvType::F16).unwrap();
        let token = |text: &str| {
            loaded
                .tokenizer
                .encode(text, kozue_engine::tokenizer::Control::Text)
                .unwrap()[0]
        };
        let round = Round {
            tokens: vec![token("a"), token("b"), token("<"), token("\n")],
            parents: vec![-1, 0, 0, 2],
            log_chances: vec![0.0, -0.1, -1.0, -2.0],
            path: vec![0, 2],
            next: token("z"),
        };
        let svg = picture(&round, &loaded.tokenizer);
        assert_eq!(svg.matches("<rect").count(), 5);
        assert_eq!(svg.matches("<g class=\"accepted\">").count(), 2);
        assert_eq!(svg.matches("<path class=\"accepted\"").count(), 1);
        assert!(svg.contains(">&lt;</text>") && svg.contains(">⏎</text>"));
        assert!(svg.contains("estimated 37%"));
    }
}
