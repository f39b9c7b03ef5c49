//! A tokenizer.json to the tokenizer that it describes.
//!
//! The tokenizers crate reads such a file by way of a tree of everything in it, which for a
//! vocabulary of 150,000 tokens costs most of a second and 150 MB. Here the vocabulary and its merges
//! go straight to their tables; the small parts, and tokenizers of other kinds than byte pair
//! encoding, are read by the crate.

use crate::error::Error;
use crate::tokenizer::one_line;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt::{self, Display};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, Tokenizer,
};

/// Reads the text of a tokenizer.json. Errors: it does not parse, or its parts do not fit together.
pub(crate) fn read(json: &str) -> Result<Tokenizer, Error> {
    let kind: Kind = serde_json::from_str(json).map_err(wrong)?;
    if kind.model.kind.as_deref() != Some("BPE") {
        return Tokenizer::from_bytes(json).map_err(wrong);
    }
    let file: File = serde_json::from_str(json).map_err(wrong)?;
    let mut tokenizer = Tokenizer::new(ModelWrapper::BPE(file.model.build()?));
    tokenizer
        .with_normalizer(file.normalizer)
        .map_err(wrong)?
        .with_pre_tokenizer(file.pre_tokenizer)
        .with_post_processor(file.post_processor)
        .with_decoder(file.decoder);
    tokenizer.add_tokens(file.added_tokens).map_err(wrong)?;
    Ok(tokenizer)
}

fn wrong(error: impl Display) -> Error {
    Error::Tokenizer(one_line(&error.to_string()))
}

/// The model's kind, before anything large is read.
#[derive(Deserialize)]
struct Kind {
    model: ModelKind,
}

#[derive(Deserialize)]
struct ModelKind {
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// Truncation and padding are left out: a prompt is never cut or filled up.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<DecoderWrapper>,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab,
    merges: Vec<Merge>,
}

impl Model {
    fn build(self) -> Result<BPE, Error> {
        // What the crate's own check of merges relies on.
        let longest = self.vocab.keys().map(String::len).max().unwrap_or(0);
        let prefix = self.continuing_subword_prefix.as_deref().unwrap_or("");
        let fits = |Merge(a, b): &Merge| {
            b.starts_with(prefix) && a.len() + b.len() - prefix.len() <= longest
        };
        if let Some(Merge(a, b)) = self.merges.iter().find(|merge| !fits(merge)) {
            return Err(wrong(format!(
                "the merge of {a:?} and {b:?} makes no token"
            )));
        }
        let merges = self.merges.into_iter().map(|Merge(a, b)| (a, b)).collect();
        let mut bpe = BPE::builder()
            .vocab_and_merges(self.vocab, merges)
            .fuse_unk(self.fuse_unk.unwrap_or(false))
            .byte_fallback(self.byte_fallback.unwrap_or(false))
            .ignore_merges(self.ignore_merges.unwrap_or(false))
            .build()
            .map_err(wrong)?;
        if self.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err(wrong(
                "dropout would make a prompt's tokens depend on chance",
            ));
        }
        bpe.unk_token = self.unk_token;
        bpe.continuing_subword_prefix = self.continuing_subword_prefix;
        bpe.end_of_word_suffix = self.end_of_word_suffix;
        Ok(bpe)
    }
}

/// Two tokens that become one, written `["a", "b"]` or `"a b"`.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Merge, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a merge: two tokens in a list, or with a space between them")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge, E> {
        match text.split_once(' ') {
            Some((a, b)) if !b.contains(' ') => Ok(Merge(a.to_owned(), b.to_owned())),
            _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merge, A::Error> {
        let mut next = || list.next_element::<String>();
        match (next()?, next()?) {
            (Some(a), Some(b)) if next()?.is_none() => Ok(Merge(a, b)),
            _ => Err(serde::de::Error::custom("a merge has two tokens")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::sync::LazyLock;

    fn references() -> Vec<String> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/tiny");
        let folders = std::fs::read_dir(folder).unwrap();
        let texts: Vec<String> = folders
            .filter_map(|entry| {
                std::fs::read_to_string(entry.unwrap().path().join("tokenizer.json")).ok()
            })
            .collect();
        assert!(texts.len() >= 4);
        texts
    }

    /// All that the tokenizers crate would write of it.
    fn written(tokenizer: &Tokenizer) -> Value {
        let mut value = serde_json::to_value(tokenizer).unwrap();
        value["truncation"] = Value::Null;
        value["padding"] = Value::Null;
        value
    }

    #[test]
    fn the_same_as_the_crate_reads() {
        for text in references() {
            let theirs = Tokenizer::from_bytes(&text).unwrap();
            assert_eq!(written(&read(&text).unwrap()), written(&theirs));
            // The older spelling of merges.
            let mut value: Value = serde_json::from_str(&text).unwrap();
            for merge in value["model"]["merges"].as_array_mut().unwrap() {
                if let Value::Array(pair) = merge {
                    *merge = json!(format!(
                        "{} {}",
                        pair[0].as_str().unwrap(),
                        pair[1].as_str().unwrap()
                    ));
                }
            }
            let older = read(&value.to_string()).unwrap();
            assert_eq!(written(&older), written(&theirs));
        }
    }

    #[test]
    fn other_kinds_are_read_too() {
        let text = json!({"version": "1.0", "model": {
            "type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"
        }});
        let tokenizer = read(&text.to_string()).unwrap();
        assert_eq!(tokenizer.token_to_id("a"), Some(0));
    }

    #[test]
    fn damage_is_one_line() {
        let with = |name: &str, value: Value| {
            let mut file = json!({"model": {
                "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]
            }});
            file["model"][name] = value;
            match read(&file.to_string()) {
                Ok(_) => panic!("{name} was accepted"),
                Err(error) => error.to_string(),
            }
        };
        for (name, value, expected) in [
            ("merges", json!([["a"]]), "two tokens"),
            ("merges", json!([["a", "b", "c"]]), "two tokens"),
            ("merges", json!(["a b c"]), "a merge"),
            ("merges", json!(["ab"]), "a merge"),
            ("merges", json!([["a", "abc"]]), "makes no token"),
            ("merges", json!([["b", "b"]]), "out of vocabulary"),
            ("merges", json!([["c", "b"]]), "out of vocabulary"),
            ("merges", Value::Null, "invalid type"),
            ("vocab", json!({"a": -1}), "u32"),
            ("dropout", json!(0.5), "chance"),
            ("continuing_subword_prefix", json!("##"), "makes no token"),
        ] {
            let text = with(name, value);
            assert!(text.contains(expected), "{expected:?} is not in {text:?}");
            assert!(!text.contains('\n'), "{text}");
        }
        assert!(read("{}").is_err());
        assert!(read("").is_err());
    }

    proptest! {
        /// A damaged file is an error or a tokenizer that can be used.
        #[test]
        fn damaged_files_do_no_harm(
            at in 0.0..1.0f64,
            length in 0usize..40,
            put in prop_oneof![
                Just("null"), Just("\"\""), Just("-1"), Just("[]"), Just("{}"), Just("\"a b\""),
                Just("4294967295"), Just("\"##\""), Just("true"), Just(","), Just("\\u0000"), Just(""),
            ],
            text in ".{0,20}",
        ) {
            static TEXT: LazyLock<String> = LazyLock::new(|| references().remove(0));
            let bytes = TEXT.as_bytes();
            let start = (at * bytes.len() as f64) as usize;
            let end = (start + length).min(bytes.len());
            let damaged = [&bytes[..start], put.as_bytes(), &bytes[end..]].concat();
            if let Ok(damaged) = String::from_utf8(damaged)
                && let Ok(tokenizer) = read(&damaged)
                && let Ok(encoding) = tokenizer.encode_fast(text.as_str(), false)
            {
                let _ = tokenizer.decode(encoding.get_ids(), false);
            }
        }
    }
}
