//! Tokenizer, chat template and greedy answers against what transformers gives for the tiny
//! checkpoints (tests/reference/make_tiny.py).

use kozue_checkpoint::Checkpoint;
use kozue_engine::chat::{ChatOptions, ChatTemplate, Message};
use kozue_engine::sampling::Sampling;
use kozue_engine::tokenizer::{Control, Tokenizer};
use kozue_engine::{Loaded, Request};
use kozue_kernels::{Cpu, KvType};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// Every tiny checkpoint that is in the repository, with its expectations.
fn references() -> Vec<(PathBuf, Value)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/tiny");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the tiny checkpoints are in the repository") {
        let path = entry.unwrap().path();
        if let Ok(text) = std::fs::read_to_string(path.join("expected.json")) {
            found.push((path, serde_json::from_str(&text).unwrap()));
        }
    }
    assert!(found.len() >= 4, "only {} tiny checkpoints", found.len());
    found
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn text_becomes_the_same_tokens_and_back() {
    for (path, expected) in references() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let tokenizer = Tokenizer::new(&checkpoint.description().tokenizer).unwrap();
        let cases = expected["tokenizer"]["encode"].as_array().unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            let text = case["text"].as_str().unwrap();
            // transformers puts the first token before the text in the same call.
            let mut tokens: Vec<u32> = checkpoint
                .description()
                .generation
                .bos
                .into_iter()
                .collect();
            tokens.extend(tokenizer.encode(text, Control::Recognised).unwrap());
            assert_eq!(tokens, ids(&case["ids"]), "{}: {text:?}", path.display());
            assert_eq!(
                tokenizer.decode(&tokens),
                case["decoded"].as_str().unwrap(),
                "{text:?}"
            );
        }
    }
}

#[test]
fn chats_become_the_same_text_and_tokens() {
    for (path, expected) in references() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let tokenizer = Tokenizer::new(&checkpoint.description().tokenizer).unwrap();
        let template = ChatTemplate::new(checkpoint.description(), &tokenizer).unwrap();
        let expected = &expected["tokenizer"];
        let messages: Vec<Message> = serde_json::from_value(expected["messages"].clone()).unwrap();
        for case in expected["chat"].as_array().unwrap() {
            let options = ChatOptions {
                enable_thinking: case["options"]["enable_thinking"].as_bool(),
                ..ChatOptions::default()
            };
            let rendered = template.render(&messages, &options).unwrap();
            assert_eq!(
                rendered.text(),
                case["text"].as_str().unwrap(),
                "{}",
                path.display()
            );
            assert_eq!(rendered.tokens(&tokenizer).unwrap(), ids(&case["ids"]));
        }
    }
}

#[test]
fn a_session_writes_the_greedy_tokens() {
    for (path, expected) in references() {
        let loaded = Loaded::open(&path, Cpu::new(Some(2)), KvType::F32).unwrap();
        for (name, case) in expected["prompts"].as_object().unwrap() {
            let greedy = ids(&case["greedy"]);
            let greedy = &greedy[..greedy.len().min(60)];
            let request = Request {
                prompt: ids(&case["prompt"]),
                sampling: Sampling::greedy(),
                max_tokens: Some(greedy.len()),
                stop: Vec::new(),
                grammar: None,
                logprobs: None,
                ignore_eos: true,
                trace: false,
            };
            let mut session = loaded.session(None);
            let answer = session
                .generate(&request, &AtomicBool::new(false), &mut |_| ())
                .unwrap();
            assert_eq!(answer.token_ids, greedy, "{} {name}", path.display());
        }
    }
}
