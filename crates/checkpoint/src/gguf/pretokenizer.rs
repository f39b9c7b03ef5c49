//! How text is cut before merging, by the name in `tokenizer.ggml.pre`.
//!
//! llama.cpp knows pre-tokenizers by name only. The patterns here are those of the models' own
//! tokenizer.json files; where a name stands for several models they share the pattern.

use serde_json::{Value, json};

/// A pre-tokenizer and what goes with it.
pub(super) struct Pretokenizer {
    /// tokenizer.json's normalizer.
    pub normalizer: Value,
    /// tokenizer.json's pre-tokenizer.
    pub steps: Value,
    /// Whether a whole piece that is a token is taken as it is.
    pub ignore_merges: bool,
    /// Whether a begin token is put first unless the file says otherwise.
    pub add_bos: bool,
}

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The pre-tokenizer of this name, if it is known.
pub(super) fn pretokenizer(name: &str) -> Option<Pretokenizer> {
    let plain = |steps| Pretokenizer {
        normalizer: Value::Null,
        steps,
        ignore_merges: false,
        add_bos: false,
    };
    let composed = |pattern| Pretokenizer {
        normalizer: json!({"type": "NFC"}),
        ..plain(sequence(vec![split(pattern), bytes(false)]))
    };
    Some(match name {
        "qwen2" | "deepseek-r1-qwen" | "megrez" => composed(QWEN2),
        "qwen35" => composed(QWEN35),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "pixtral" | "midm-2.0" => Pretokenizer {
            ignore_merges: true,
            add_bos: true,
            ..plain(sequence(vec![split(LLAMA3), bytes(false)]))
        },
        "smaug-bpe" => plain(sequence(vec![split(LLAMA3), bytes(false)])),
        "tekken" => Pretokenizer {
            ignore_merges: true,
            add_bos: true,
            ..plain(sequence(vec![split(TEKKEN), bytes(false)]))
        },
        "gpt-2" | "mellum" | "gigachat" | "trillion" => plain(bytes(true)),
        "smollm" | "starcoder" | "refact" | "minerva-7b" => plain(sequence(vec![
            json!({"type": "Digits", "individual_digits": true}),
            bytes(true),
        ])),
        "deepseek-coder" => plain(sequence(vec![
            split("[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split("[一-龥ࠀ-一가-퟿]+"),
            json!({"type": "Digits", "individual_digits": true}),
            bytes(false),
        ])),
        // Files from before llama.cpp told pre-tokenizers apart; it cuts them like this.
        "default" => plain(sequence(vec![
            split(r"[\p{P}\$\+<=>\^~\|]+"),
            split(GPT2),
            split(r"\p{N}+"),
            split("[0-9][0-9][0-9]"),
            bytes(false),
        ])),
        _ => return None,
    })
}

fn sequence(steps: Vec<Value>) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn split(pattern: &str) -> Value {
    json!({
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": false
    })
}

/// Bytes as printable characters, after cutting by GPT-2's pattern if asked.
fn bytes(cut: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": cut})
}
