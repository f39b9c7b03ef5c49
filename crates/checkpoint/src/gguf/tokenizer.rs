//! tokenizer.json out of a GGUF file's vocabulary.

use std::collections::HashMap;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::metadata::Metadata;
use super::pretokenizer::pretokenizer;
use super::sentencepiece;
use crate::error::Error;

pub(super) const MODEL: &str = "tokenizer.ggml.model";
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const PRE: &str = "tokenizer.ggml.pre";
const TYPES: &str = "tokenizer.ggml.token_type";

/// What a token is, by `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    /// Stands for what the vocabulary cannot write.
    Unknown,
    /// Not text: begin, end, roles.
    Control,
    /// Text that is always cut out whole.
    User,
    /// A row of the embedding without a token.
    Unused,
    /// A single byte (SentencePiece).
    Byte,
}

/// The tokens of a file and what they are.
pub(super) struct Vocabulary<'a> {
    pub tokens: Vec<&'a str>,
    pub kinds: Vec<Kind>,
}

/// The text of a tokenizer.json, and whether a begin token goes first by default.
pub(super) struct Tokenizer {
    pub json: String,
    pub add_bos: bool,
}

impl<'a> Vocabulary<'a> {
    pub fn read(meta: &'a Metadata, rows: usize) -> Result<Vocabulary<'a>, Error> {
        let tokens = meta.needed(TOKENS, meta.texts(TOKENS)?)?;
        if tokens.len() != rows {
            let what = format!("{} tokens, but the embedding has {rows} rows", tokens.len());
            return Err(meta.wrong(TOKENS, what));
        }
        let kinds = match meta.ints(TYPES)? {
            None => vec![Kind::Normal; rows],
            Some(types) if types.len() != rows => {
                return Err(meta.wrong(TYPES, format!("{} types, {rows} tokens", types.len())));
            }
            Some(types) => types.iter().map(|&number| kind(number)).collect(),
        };
        Ok(Vocabulary { tokens, kinds })
    }

    /// The text of a token.
    pub fn text(&self, meta: &Metadata, key: &str, id: u32) -> Result<&'a str, Error> {
        self.tokens.get(id as usize).copied().ok_or_else(|| {
            meta.wrong(
                key,
                format!("token {id} of a vocabulary of {}", self.tokens.len()),
            )
        })
    }
}

/// llama.cpp takes numbers that it does not know for plain tokens.
fn kind(number: i64) -> Kind {
    match number {
        2 => Kind::Unknown,
        3 => Kind::Control,
        4 => Kind::User,
        5 => Kind::Unused,
        6 => Kind::Byte,
        _ => Kind::Normal,
    }
}

/// Build the tokenizer.
pub(super) fn tokenizer(meta: &Metadata, vocabulary: &Vocabulary) -> Result<Tokenizer, Error> {
    match meta.needed(MODEL, meta.text(MODEL)?)? {
        "gpt2" => byte_level(meta, vocabulary),
        "llama" => sentencepiece::tokenizer(meta, vocabulary),
        other => {
            let what =
                format!("{other} is not supported, only gpt2 (BPE) and llama (SentencePiece)");
            Err(meta.wrong(MODEL, what))
        }
    }
}

/// Byte-level BPE, the kind that GPT-2 began.
fn byte_level(meta: &Metadata, vocabulary: &Vocabulary) -> Result<Tokenizer, Error> {
    let name = meta.text(PRE)?.unwrap_or("default");
    let pre = pretokenizer(name).ok_or_else(|| {
        let what =
            format!("the pre-tokenizer {name} is not supported; use the model's Hugging Face form");
        meta.wrong(PRE, what)
    })?;
    let merges = meta.needed(MERGES, meta.texts(MERGES)?)?;
    let merges = merges
        .iter()
        .map(|merge| {
            // A token may begin with a space of its own, so the first byte is no separator.
            let space = merge.bytes().skip(1).position(|byte| byte == b' ');
            let parts = space.map(|at| (&merge[..at + 1], &merge[at + 2..]));
            parts
                .filter(|(left, right)| !left.is_empty() && !right.is_empty())
                .ok_or_else(|| meta.wrong(MERGES, format!("{merge:?} is no pair of tokens")))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let parts = Parts {
        normalizer: pre.normalizer,
        pre_tokenizer: pre.steps,
        post_processor: json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false
        }),
        decoder: json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true
        }),
        unknown: None,
        ignore_merges: pre.ignore_merges,
        byte_fallback: false,
    };
    Ok(Tokenizer {
        json: parts.json(meta, vocabulary, merges, MERGES)?,
        add_bos: pre.add_bos,
    })
}

/// Everything in a tokenizer.json besides vocabulary and merges.
pub(super) struct Parts<'a> {
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub post_processor: Value,
    pub decoder: Value,
    pub unknown: Option<&'a str>,
    pub ignore_merges: bool,
    pub byte_fallback: bool,
}

impl Parts<'_> {
    /// The whole text. Merges come best first; `merges_key` is where they came from.
    pub fn json(
        self,
        meta: &Metadata,
        vocabulary: &Vocabulary,
        merges: Vec<(&str, &str)>,
        merges_key: &str,
    ) -> Result<String, Error> {
        let entries = entries(meta, vocabulary, &merges, merges_key)?;
        let file = File {
            version: "1.0",
            truncation: (),
            padding: (),
            added_tokens: added_tokens(vocabulary),
            normalizer: self.normalizer,
            pre_tokenizer: self.pre_tokenizer,
            post_processor: self.post_processor,
            decoder: self.decoder,
            model: Model {
                kind: "BPE",
                dropout: (),
                unk_token: self.unknown,
                continuing_subword_prefix: (),
                end_of_word_suffix: (),
                fuse_unk: self.unknown.is_some(),
                byte_fallback: self.byte_fallback,
                ignore_merges: self.ignore_merges,
                vocab: Vocab(entries),
                merges,
            },
        };
        serde_json::to_string(&file).map_err(|error| meta.wrong(TOKENS, error.to_string()))
    }
}

/// Tokens with their numbers. Rows without a token are left out, so that they write nothing.
/// Every merge must join two tokens into a third; tokenizers would panic or refuse otherwise.
fn entries<'a>(
    meta: &Metadata,
    vocabulary: &Vocabulary<'a>,
    merges: &[(&str, &str)],
    merges_key: &str,
) -> Result<Vec<(&'a str, u32)>, Error> {
    let mut numbers: HashMap<&str, usize> = HashMap::with_capacity(vocabulary.tokens.len());
    for (id, &token) in vocabulary.tokens.iter().enumerate() {
        if vocabulary.kinds[id] == Kind::Unused {
            continue;
        }
        if let Some(other) = numbers.insert(token, id) {
            return Err(meta.wrong(
                TOKENS,
                format!("tokens {other} and {id} are both {token:?}"),
            ));
        }
    }
    let mut joined = String::new();
    for (left, right) in merges {
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        for part in [*left, *right, joined.as_str()] {
            if !numbers.contains_key(part) {
                let what = format!("{left:?} and {right:?} are joined, but {part:?} is no token");
                return Err(meta.wrong(merges_key, what));
            }
        }
    }
    let used = |id: &usize| vocabulary.kinds[*id] != Kind::Unused;
    let ids = (0..vocabulary.tokens.len()).filter(used);
    Ok(ids.map(|id| (vocabulary.tokens[id], id as u32)).collect())
}

fn added_tokens<'a>(vocabulary: &Vocabulary<'a>) -> Vec<Added<'a>> {
    let kinds = vocabulary.kinds.iter();
    vocabulary
        .tokens
        .iter()
        .zip(kinds)
        .enumerate()
        .filter(|(_, (token, kind))| {
            matches!(kind, Kind::Control | Kind::User | Kind::Unknown) && !token.is_empty()
        })
        .map(|(id, (&content, &kind))| Added {
            id: id as u32,
            content,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special: kind != Kind::User,
        })
        .collect()
}

#[derive(Serialize)]
struct File<'a> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<Added<'a>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Model<'a>,
}

#[derive(Serialize)]
struct Added<'a> {
    id: u32,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Model<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: (),
    unk_token: Option<&'a str>,
    continuing_subword_prefix: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocab<'a>,
    merges: Vec<(&'a str, &'a str)>,
}

/// A JSON object in the order of ids.
struct Vocab<'a>(Vec<(&'a str, u32)>);

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, id) in &self.0 {
            map.serialize_entry(token, id)?;
        }
        map.end()
    }
}
