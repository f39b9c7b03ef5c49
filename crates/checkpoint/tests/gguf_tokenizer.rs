//! Tokenizers out of GGUF metadata, against the tokenizers that the metadata were made of.
#![allow(missing_docs)]

mod gguf_file;

use std::path::Path;
use std::str::FromStr;

use gguf_file::{File, Meta, gpt2_tokens, llama, text};
use kozue_checkpoint::description::{Description, TokenizerSource};
use kozue_checkpoint::{Checkpoint, description::GenerationDefaults};
use serde_json::Value;
use tokenizers::Tokenizer;

fn describe(file: &File) -> Description {
    let written = file.write();
    let checkpoint = Checkpoint::open(&written.path).unwrap_or_else(|error| panic!("{error}"));
    checkpoint.description().clone()
}

fn tokenizer(description: &Description) -> Tokenizer {
    let TokenizerSource::Gguf(text) = &description.tokenizer else {
        panic!("not from GGUF")
    };
    Tokenizer::from_str(text).unwrap_or_else(|error| panic!("{error}"))
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).unwrap().get_ids().to_vec()
}

/// A llama whose vocabulary has this many tokens.
fn with_rows(rows: usize) -> File {
    let mut file = llama();
    file.f32("token_embd.weight", &[rows as u64, 64]);
    file
}

const TEXTS: [&str; 20] = [
    "",
    " ",
    "   \n\n  \n",
    "Hello, world!",
    "It's they're I'M YOU'LL we've 'tis",
    "In 1969, 3.14159 and 1234567890; 22/7 ①②Ⅷ½",
    "  leading and trailing  ",
    "Grüße aus Köln, où l'été est déjà passé. Привет, мир! 你好，世界。",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n\tprint(add(i, 1))\r\n",
    "👨‍👩‍👧‍👦 🇩🇪 😶‍🌫️",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>x",
    "<think>\nno\n</think>",
    "e\u{301} cafe\u{301} A\u{30a} नमस्ते दुनिया สวัสดี",
    "\u{a0}no-break\u{2003}wide\u{3000}wider",
    "tab\t\ttab \t mix",
    "\u{0}\u{1}\u{7f}",
    "...!!??--==>>{}[]()",
    "ſ's 'ſ K's",
    "snake_case camelCase SCREAMING_CASE the the the",
    "http://a.b/c?d=e&f=%20#g",
];

/// The metadata that llama.cpp's converter makes of a byte-level tokenizer.json.
fn from_json(json: &Value, pre: &str) -> File {
    let mut tokens: Vec<(u64, String, i32)> = Vec::new();
    for (token, id) in json["model"]["vocab"].as_object().unwrap() {
        tokens.push((id.as_u64().unwrap(), token.clone(), 1));
    }
    for added in json["added_tokens"].as_array().unwrap() {
        let id = added["id"].as_u64().unwrap();
        tokens.retain(|(other, ..)| *other != id);
        let kind = if added["special"].as_bool().unwrap() {
            3
        } else {
            4
        };
        tokens.push((id, added["content"].as_str().unwrap().to_owned(), kind));
    }
    tokens.sort();
    // The embedding has more rows than there are tokens.
    for id in tokens.len()..tokens.len() + 12 {
        tokens.push((id as u64, format!("[PAD{id}]"), 5));
    }
    let merges = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|merge| {
            let parts: Vec<&str> = match merge {
                Value::String(both) => vec![both],
                _ => merge
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|part| part.as_str().unwrap())
                    .collect(),
            };
            parts.join(" ")
        });
    let merges = merges.collect();
    let mut file = with_rows(tokens.len());
    let special = |name: &str| {
        let token = tokens.iter().find(|(_, text, _)| text == name);
        Meta::U32(token.expect(name).0 as u32)
    };
    file.set("tokenizer.ggml.pre", text(pre));
    file.set("tokenizer.ggml.merges", Meta::Texts(merges));
    file.set("tokenizer.ggml.bos_token_id", special("<|endoftext|>"));
    file.set("tokenizer.ggml.eos_token_id", special("<|im_end|>"));
    let kinds = tokens.iter().map(|(.., kind)| *kind).collect();
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    let tokens = tokens.into_iter().map(|(_, token, _)| token).collect();
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    file
}

#[test]
fn byte_level_tokenizers_come_back() {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/tiny");
    for (model, pre) in [
        ("qwen2", "qwen2"),
        ("qwen3_5", "qwen35"),
        ("llama", "smollm"),
        ("llama3-rope", "llama-bpe"),
    ] {
        let path = tiny.join(model).join("tokenizer.json");
        let json = std::fs::read_to_string(&path).unwrap();
        let original = Tokenizer::from_str(&json).unwrap();
        let file = from_json(&serde_json::from_str(&json).unwrap(), pre);
        let description = describe(&file);
        let rebuilt = tokenizer(&description);
        for text in TEXTS {
            let (ours, theirs) = (ids(&rebuilt, text), ids(&original, text));
            assert_eq!(ours, theirs, "{model}: {text:?}");
            for skip in [false, true] {
                let decoded = rebuilt.decode(&ours, skip).unwrap();
                assert_eq!(
                    decoded,
                    original.decode(&theirs, skip).unwrap(),
                    "{model}: {text:?}"
                );
            }
        }
        // Rows behind the last token write nothing.
        let last = original.get_vocab_size(true) as u32;
        assert_eq!(rebuilt.get_vocab_size(true) as u32, last, "{model}");
        assert_eq!(
            rebuilt.decode(&[last, last + 11], false).unwrap(),
            "",
            "{model}"
        );
        // Llama 3 wants its first token by default, the others none.
        let first = rebuilt
            .token_to_id("<|endoftext|>")
            .filter(|_| pre == "llama-bpe");
        assert_eq!(description.generation.bos, first, "{model}");
        assert_eq!(description.bos_token.as_deref(), Some("<|endoftext|>"));
        assert_eq!(description.eos_token.as_deref(), Some("<|im_end|>"));
        let ends = ["<|im_end|>", "<|endoftext|>"].map(|end| rebuilt.token_to_id(end).unwrap());
        assert_eq!(description.generation.eos, ends, "{model}");
    }
}

#[test]
fn files_without_a_known_pre_tokenizer_are_cut_as_llama_cpp_cuts_them() {
    let mut file = with_rows(262);
    gpt2_tokens(&mut file, &["1 2", "! !", "12 3", "Ġ a"], &["<s>", "</s>"]);
    file.unset("tokenizer.ggml.pre");
    let rebuilt = tokenizer(&describe(&file));
    let tokens = |text: &str| {
        let encoding = rebuilt.encode(text, false).unwrap();
        encoding.get_tokens().join("|")
    };
    // Punctuation apart from words, digits apart from letters, in threes from the left.
    assert_eq!(tokens("a!!b 12123 a"), "a|!!|b|Ġ|12|1|2|3|Ġa");
    assert_eq!(tokens("123123"), "123|123");
}

/// The model that tests/gguf_sentencepiece.py trained.
fn sentencepiece() -> (File, Vec<(String, Vec<u32>)>) {
    let json: Value = serde_json::from_str(include_str!("gguf_sentencepiece.json")).unwrap();
    let strings = |value: &Value| {
        value
            .as_array()
            .unwrap()
            .iter()
            .map(|text| text.as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let numbers = |value: &Value| {
        value
            .as_array()
            .unwrap()
            .iter()
            .map(|number| number.as_f64().unwrap())
            .collect::<Vec<_>>()
    };
    let tokens = strings(&json["tokens"]);
    let mut file = with_rows(tokens.len());
    file.set("tokenizer.ggml.model", text("llama"))
        .unset("tokenizer.ggml.merges");
    file.set("tokenizer.ggml.pre", text("default"));
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    let scores = numbers(&json["scores"])
        .iter()
        .map(|&score| score as f32)
        .collect();
    file.set("tokenizer.ggml.scores", Meta::F32s(scores));
    let types = numbers(&json["types"])
        .iter()
        .map(|&kind| kind as i32)
        .collect();
    file.set("tokenizer.ggml.token_type", Meta::I32s(types));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(1));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(2));
    let texts = json["texts"].as_array().unwrap().iter().map(|pair| {
        let ids = numbers(&pair[1]).iter().map(|&id| id as u32).collect();
        (pair[0].as_str().unwrap().to_owned(), ids)
    });
    let texts = texts.collect();
    (file, texts)
}

#[test]
fn sentencepiece_gives_the_ids_of_sentencepiece() {
    let (file, texts) = sentencepiece();
    let description = describe(&file);
    let rebuilt = tokenizer(&description);
    for (text, expected) in texts {
        assert_eq!(ids(&rebuilt, &text), expected, "{text:?}");
        assert_eq!(rebuilt.decode(&expected, true).unwrap(), text);
    }
    assert_eq!(description.generation.bos, Some(1));
    assert_eq!(description.generation.eos, [2]);
    // Control tokens in the text are cut out whole; what follows begins with a space again.
    let the = ids(&rebuilt, "the");
    assert_eq!(ids(&rebuilt, "</s>the"), [&[2], &the[..]].concat());
}

#[test]
fn sentencepiece_that_cannot_be_exact_is_refused() {
    #[track_caller]
    fn refused(change: impl FnOnce(&mut Vec<f32>, &mut Vec<String>), expected: &str) {
        let (mut file, _) = sentencepiece();
        let (mut scores, mut tokens) = (Vec::new(), Vec::new());
        for (_, value) in &file.meta {
            match value {
                Meta::F32s(all) => scores = all.clone(),
                Meta::Texts(all) => tokens = all.clone(),
                _ => {}
            }
        }
        change(&mut scores, &mut tokens);
        file.set("tokenizer.ggml.scores", Meta::F32s(scores));
        file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
        gguf_file::assert_says(&file, expected);
    }
    refused(
        |scores, _| scores[300] = -2.5,
        "scores of a unigram model, which is not supported",
    );
    refused(
        |scores, _| scores[262] = scores[263],
        "\"▁the\" and \"▁▁▁▁\" have the same score",
    );
    refused(|scores, _| scores.truncate(419), "419 scores, 420 tokens");
    refused(
        |_, tokens| tokens[262] = "▁thé€".into(),
        "\"▁thé€\" is a token, but its '€' is not",
    );
}

#[test]
fn templates_and_sampling_are_read() {
    let mut file = llama();
    file.set(
        "tokenizer.chat_template",
        text("{{ bos_token }}{{ messages }}"),
    );
    file.set("tokenizer.ggml.eot_token_id", Meta::U32(65));
    file.set("tokenizer.ggml.add_bos_token", Meta::Bool(true));
    for (key, value) in [
        ("temp", 0.7),
        ("top_p", 0.8),
        ("min_p", 0.05),
        ("penalty_repeat", 1.1),
    ] {
        file.set(&format!("general.sampling.{key}"), Meta::F32(value));
    }
    file.set("general.sampling.top_k", Meta::I32(20));
    let description = describe(&file);
    assert_eq!(description.name, "Tiny Llama");
    assert_eq!(
        description.chat_template.as_deref(),
        Some("{{ bos_token }}{{ messages }}")
    );
    let expected = GenerationDefaults {
        eos: vec![259, 65],
        bos: Some(258),
        temperature: Some(0.7),
        top_p: Some(0.8),
        top_k: Some(20),
        min_p: Some(0.05),
        repetition_penalty: Some(1.1),
    };
    assert_eq!(description.generation, expected);

    // Without a name the file's own.
    file.unset("general.name");
    assert_eq!(describe(&file).name, "model");
}
