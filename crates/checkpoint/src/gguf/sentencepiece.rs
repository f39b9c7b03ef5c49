//! SentencePiece's BPE as tokenizer.json.
//!
//! SentencePiece joins the two neighbours whose union has the best score; tokenizer.json wants
//! a list of pairs, best first. The list of all pairs of tokens that join into a third, sorted
//! by the score of that third, does the same (it is how transformers converts Llama), provided
//! that scores are distinct and every character of a token is a token. Where they are not, or
//! where the scores are those of a unigram model, the conversion would not be exact: an error.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::metadata::Metadata;
use super::tokenizer::{Kind, Parts, Tokenizer, Vocabulary};
use crate::error::Error;

const SCORES: &str = "tokenizer.ggml.scores";
const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
/// What SentencePiece writes for a space.
const SPACE: &str = "\u{2581}";

pub(super) fn tokenizer(meta: &Metadata, vocabulary: &Vocabulary) -> Result<Tokenizer, Error> {
    let scores = meta.needed(SCORES, meta.floats(SCORES)?)?;
    if scores.len() != vocabulary.tokens.len() {
        let what = format!(
            "{} scores, {} tokens",
            scores.len(),
            vocabulary.tokens.len()
        );
        return Err(meta.wrong(SCORES, what));
    }
    let merges = merges(meta, vocabulary, &scores)?;
    let unknown = vocabulary
        .kinds
        .iter()
        .position(|&kind| kind == Kind::Unknown);
    let prefix = meta.bool(SPACE_PREFIX)?.unwrap_or(true);
    let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    let mut normalizers = vec![spaces];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let parts = Parts {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        post_processor: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        unknown: unknown.map(|id| vocabulary.tokens[id]),
        ignore_merges: false,
        byte_fallback: vocabulary.kinds.contains(&Kind::Byte),
    };
    let json = parts.json(meta, vocabulary, merges, SCORES)?;
    Ok(Tokenizer {
        json,
        add_bos: true,
    })
}

/// All pairs that join, best first.
fn merges<'a>(
    meta: &Metadata,
    vocabulary: &Vocabulary<'a>,
    scores: &[f32],
) -> Result<Vec<(&'a str, &'a str)>, Error> {
    let mut pieces: Vec<(f32, &str)> = Vec::new();
    for ((&token, &kind), &score) in vocabulary.tokens.iter().zip(&vocabulary.kinds).zip(scores) {
        if kind != Kind::Normal {
            continue;
        }
        if score != score.round() {
            let what = "fractions: the scores of a unigram model, which is not supported; use the \
                        model's Hugging Face form";
            return Err(meta.wrong(SCORES, what));
        }
        pieces.push((score, token));
    }
    let known: HashMap<&str, f32> = pieces
        .iter()
        .map(|&(score, token)| (token, score))
        .collect();
    // `round` above let no NaN through.
    pieces.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut pairs = Vec::new();
    let mut last: Option<(f32, &str)> = None;
    for (score, token) in pieces {
        if token.chars().nth(1).is_none() {
            continue;
        }
        if let Some((_, other)) = last.filter(|&(before, _)| before == score) {
            let what = format!(
                "{other:?} and {token:?} have the same score, so that it is unknown \
                                which is joined first; use the model's Hugging Face form"
            );
            return Err(meta.wrong(SCORES, what));
        }
        last = Some((score, token));
        let mut buffer = [0; 4];
        if let Some(lone) = token
            .chars()
            .find(|c| !known.contains_key(&*c.encode_utf8(&mut buffer)))
        {
            let what = format!(
                "{token:?} is a token, but its {lone:?} is not; use the model's \
                                Hugging Face form"
            );
            return Err(meta.wrong(SCORES, what));
        }
        // Longer left parts first, as transformers orders pairs of one score.
        let cuts = token
            .char_indices()
            .skip(1)
            .map(|(at, _)| token.split_at(at));
        let from = pairs.len();
        pairs.extend(cuts.filter(|(a, b)| known.contains_key(a) && known.contains_key(b)));
        pairs[from..].reverse();
    }
    Ok(pairs)
}
