//! The tokenizer in llama.cpp's keys, out of a tokenizer.json of byte-level BPE or of SentencePiece's kind.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::sentencepiece;
use super::values::Values;
use crate::Checkpoint;
use crate::description::TokenizerSource;
use crate::error::Error;
use crate::gguf::pretokenizer::pretokenizer;

/// Names of ways to cut text; of several that cut alike the most usual.
const NAMES: [&str; 8] = [
    "qwen2",
    "qwen35",
    "llama-bpe",
    "smaug-bpe",
    "tekken",
    "gpt-2",
    "smollm",
    "deepseek-coder",
];

pub(super) const NORMAL: i32 = 1;
pub(super) const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
pub(super) const USER: i32 = 4;
const UNUSED: i32 = 5;
pub(super) const BYTE: i32 = 6;

#[derive(Deserialize)]
pub(super) struct Json {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    pub normalizer: Value,
    #[serde(default)]
    pub pre_tokenizer: Value,
    pub model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
pub(super) struct Model {
    #[serde(default)]
    vocab: BTreeMap<String, u32>,
    #[serde(default)]
    pub merges: Vec<Merge>,
    #[serde(default)]
    pub ignore_merges: bool,
    #[serde(default)]
    pub byte_fallback: bool,
    #[serde(default)]
    pub unk_token: Option<String>,
}

/// Two tokens that make one, in the newer spelling or the older.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Merge {
    Pair(String, String),
    Text(String),
}

/// A token's text and type.
pub(super) type Token = (String, i32);

/// Tokens, how they are joined, the name of the way to cut, and the tokens with a meaning. Gives what
/// changes by that.
pub(super) fn write(values: &mut Values, checkpoint: &Checkpoint) -> Result<Option<String>, Error> {
    let description = checkpoint.description();
    let wrong = |what: String| Error::file(checkpoint.path(), what);
    let (TokenizerSource::Json(text) | TokenizerSource::Gguf(text)) = &description.tokenizer;
    let mut json: Json = serde_json::from_str(text).map_err(|error| {
        wrong(format!(
            "its tokenizer is no BPE that GGUF can hold: {error}"
        ))
    })?;
    let tokens = tokens(&mut json, description.config.vocab_size).map_err(wrong)?;
    let (tokens, note) = match sentencepiece::spaces(&json) {
        Some(spaces) => sentencepiece::write(values, &json, tokens, spaces).map_err(wrong)?,
        None => byte_level(values, &json, tokens).map_err(wrong)?,
    };
    let id = |text: &Option<String>| {
        let text = text.as_ref()?;
        tokens
            .iter()
            .position(|token| token.0 == *text)
            .map(|id| id as u32)
    };
    let generation = &description.generation;
    let first = generation.bos.or(id(&description.bos_token));
    if let Some(first) = first {
        values.uint("tokenizer.ggml.bos_token_id", first);
    }
    values.bool("tokenizer.ggml.add_bos_token", generation.bos.is_some());
    if let Some(unknown) = id(&json.model.unk_token) {
        values.uint("tokenizer.ggml.unknown_token_id", unknown);
    }
    // GGUF has one token for the end of a text, one for that of a turn, one for that of a message.
    let mut ends: Vec<u32> = id(&description.eos_token).into_iter().collect();
    ends.extend(
        generation
            .eos
            .iter()
            .filter(|id| !ends.contains(id))
            .copied()
            .collect::<Vec<_>>(),
    );
    for (key, end) in ["eos", "eot", "eom"].iter().zip(&ends) {
        values.uint(&format!("tokenizer.ggml.{key}_token_id"), *end);
    }
    if let Some(template) = &description.chat_template {
        values.text("tokenizer.chat_template", template);
    }
    let kinds: Vec<i32> = tokens.iter().map(|token| token.1).collect();
    values.ints("tokenizer.ggml.token_type", &kinds);
    let texts: Vec<&str> = tokens.iter().map(|token| token.0.as_str()).collect();
    values.texts("tokenizer.ggml.tokens", &texts);
    Ok(note)
}

/// Tokens by their number; rows of the embedding without one are unused. Takes them out of `json`.
fn tokens(json: &mut Json, size: usize) -> Result<Vec<Token>, String> {
    let mut tokens: Vec<Token> = (0..size).map(|id| (format!("[PAD{id}]"), UNUSED)).collect();
    let plain = std::mem::take(&mut json.model.vocab)
        .into_iter()
        .map(|(text, id)| (id, text, NORMAL));
    let added = std::mem::take(&mut json.added_tokens)
        .into_iter()
        .map(|token| {
            let kind = if token.special { CONTROL } else { USER };
            (token.id, token.content, kind)
        });
    for (id, text, kind) in plain.chain(added) {
        match tokens.get_mut(id as usize) {
            Some(token) => *token = (text, kind),
            None => return Err(format!("token {id} of a vocabulary of {size}")),
        }
    }
    Ok(tokens)
}

/// Byte-level BPE: the name of the way to cut, and the merges.
fn byte_level(
    values: &mut Values,
    json: &Json,
    tokens: Vec<Token>,
) -> Result<(Vec<Token>, Option<String>), String> {
    let cuts_so = |name: &&str| {
        pretokenizer(name).is_some_and(|known| {
            bare(&known.steps) == bare(&json.pre_tokenizer)
                && known.ignore_merges == json.model.ignore_merges
        })
    };
    let composes = |value: &Value| match &bare(value) {
        Value::Null => Some(false),
        value => (value["type"] == "NFC").then_some(true),
    };
    let own = composes(&json.normalizer);
    let known = NAMES.into_iter().filter(|_| own.is_some()).find(cuts_so);
    let name = known.ok_or(
        "its tokenizer cuts text in a way that has no name in GGUF (byte-level BPE of the known \
         families and SentencePiece's have)",
    )?;
    values.text("tokenizer.ggml.model", "gpt2");
    values.text("tokenizer.ggml.pre", name);
    let merges: Vec<String> = json
        .model
        .merges
        .iter()
        .map(|merge| match merge {
            Merge::Pair(left, right) => format!("{left} {right}"),
            Merge::Text(text) => text.clone(),
        })
        .collect();
    values.texts("tokenizer.ggml.merges", &merges);
    let named = pretokenizer(name).and_then(|known| composes(&known.normalizer));
    let note = (named != own).then(|| {
        format!("the tokenizer: GGUF's name for it, {name}, says otherwise whether accents are composed first (NFC)")
    });
    Ok((tokens, note))
}

/// What decides where text is cut: no offsets, and no sequence of one.
pub(super) fn bare(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            if let Some(Value::Array(steps)) = map.get("pretokenizers").or(map.get("normalizers"))
                && let [only] = &steps[..]
            {
                return bare(only);
            }
            let kept = map.iter().filter(|(key, _)| *key != "trim_offsets");
            Value::Object(
                kept.map(|(key, value)| (key.clone(), bare(value)))
                    .collect(),
            )
        }
        Value::Array(all) => all.iter().map(bare).collect(),
        other => other.clone(),
    }
}
