//! Tokenizers of SentencePiece's kind: BPE over characters, with bytes for what has no token.
//!
//! A tokenizer.json lists pairs, best first; SentencePiece gives every token a score and joins the two
//! neighbours whose union has the best one. Scores say the same as a list where all pairs of a union
//! stand together and no pair of tokens that join into a third is missing, as it is where the list was
//! made of scores. Anything else is refused.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::values::Values;
use super::vocabulary::{BYTE, Json, Merge, NORMAL, Token, UNKNOWN, USER, bare};

/// What SentencePiece writes for a space.
const SPACE: &str = "\u{2581}";
/// The score of a token that is never the better of two.
const WORST: f32 = -1000.0;

/// What a tokenizer does before a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spaces {
    /// Nothing.
    None,
    /// A space, after special tokens too.
    Prefix,
    /// A space where there is none, or only at the very beginning.
    Sometimes,
}

/// How a tokenizer of SentencePiece's kind treats spaces; none if it is of another kind.
pub(super) fn spaces(json: &Json) -> Option<Spaces> {
    if !json.model.byte_fallback || json.model.ignore_merges {
        return None;
    }
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let prepend = json!({"type": "Prepend", "prepend": SPACE});
    let normalizer = bare(&json.normalizer);
    let cut = bare(&json.pre_tokenizer);
    // Spaces are gone by then.
    let cuts_nothing =
        cut.is_null() || (cut["type"] == "Split" && cut["pattern"] == json!({"String": " "}));
    if normalizer.is_null() && cut["type"] == "Metaspace" && cut["replacement"] == SPACE {
        return match (&cut["split"], cut["prepend_scheme"].as_str()) {
            (Value::Bool(false), Some("never")) => Some(Spaces::None),
            (Value::Bool(false), Some("first" | "always")) => Some(Spaces::Sometimes),
            _ => None,
        };
    }
    if cuts_nothing && normalizer == replace {
        return Some(Spaces::None);
    }
    let both = json!({"type": "Sequence", "normalizers": [prepend, replace]});
    (cuts_nothing && normalizer == both).then_some(Spaces::Prefix)
}

/// Writes scores and what is done to spaces; gives the tokens with SentencePiece's types, and what
/// changes.
pub(super) fn write(
    values: &mut Values,
    json: &Json,
    mut tokens: Vec<Token>,
    spaces: Spaces,
) -> Result<(Vec<Token>, Option<String>), String> {
    let pairs: Vec<(&str, &str)> = json.model.merges.iter().filter_map(pair).collect();
    let joined: HashSet<String> = pairs.iter().map(|(a, b)| format!("{a}{b}")).collect();
    for (text, kind) in &mut tokens {
        if Some(&*text) == json.model.unk_token.as_ref() {
            *kind = UNKNOWN;
        } else if is_byte(text) {
            *kind = BYTE;
        } else if *kind == USER && text.contains(SPACE) && joined.contains(text) {
            // Cut out of a text it would be looked for before spaces have become what it is made of.
            *kind = NORMAL;
        }
    }
    let scores = scores(&tokens, &pairs)?;
    values.text("tokenizer.ggml.model", "llama");
    values.text("tokenizer.ggml.pre", "default");
    values.bool("tokenizer.ggml.add_space_prefix", spaces != Spaces::None);
    values.floats("tokenizer.ggml.scores", &scores);
    let note = (spaces == Spaces::Sometimes).then(|| {
        "the tokenizer: GGUF puts a space before every text and after every special token, this one \
         not always"
            .to_owned()
    });
    Ok((tokens, note))
}

fn pair(merge: &Merge) -> Option<(&str, &str)> {
    match merge {
        Merge::Pair(left, right) => Some((left, right)),
        Merge::Text(text) => text.split_once(' '),
    }
}

fn is_byte(text: &str) -> bool {
    let digits = text
        .strip_prefix("<0x")
        .and_then(|text| text.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// A score for every token: whole numbers from 0 down in the order in which the pairs make tokens,
/// then for those that no pair makes.
fn scores(tokens: &[Token], pairs: &[(&str, &str)]) -> Result<Vec<f32>, String> {
    let plain: HashMap<&str, usize> = tokens
        .iter()
        .enumerate()
        .filter(|(_, token)| token.1 == NORMAL)
        .map(|(id, token)| (token.0.as_str(), id))
        .collect();
    let cannot = |text: &str| {
        format!(
            "its tokenizer joins parts to {text:?} in an order that SentencePiece's scores cannot say; \
             export to hf"
        )
    };
    let mut scores: Vec<Option<f32>> = vec![None; tokens.len()];
    let mut found: HashMap<usize, HashSet<usize>> = HashMap::new();
    let (mut next, mut last) = (0.0, None);
    for (left, right) in pairs {
        let text = format!("{left}{right}");
        let known = |part: &str| plain.contains_key(part);
        let Some(&id) = plain
            .get(text.as_str())
            .filter(|_| known(left) && known(right))
        else {
            // Of what is cut out of a text before pairs are joined.
            continue;
        };
        if last != Some(id) {
            if scores[id].is_some() {
                return Err(cannot(&text));
            }
            scores[id] = Some(next);
            next -= 1.0;
            last = Some(id);
        }
        found.entry(id).or_default().insert(left.len());
    }
    for (&text, &id) in &plain {
        let cuts = text.char_indices().skip(1).map(|(at, _)| at);
        let all: HashSet<usize> = cuts
            .filter(|&at| plain.contains_key(&text[..at]) && plain.contains_key(&text[at..]))
            .collect();
        if found.remove(&id).unwrap_or_default() != all {
            return Err(cannot(text));
        }
    }
    for (score, token) in scores.iter_mut().zip(tokens) {
        if score.is_none() && token.1 == NORMAL {
            *score = Some(next);
            next -= 1.0;
        }
    }
    // What is no text of its own is found by other ways than its score.
    Ok(scores
        .into_iter()
        .map(|score| score.unwrap_or(WORST))
        .collect())
}
