//! Sessions on a model whose answers are known.

mod support;

use kozue_engine::sampling::Sampling;
use kozue_engine::tokenizer::Tokenizer;
use kozue_engine::{Answer, Error, Event, FinishReason, Request, Session};
use std::sync::atomic::{AtomicBool, Ordering};
use support::{Scripted, encode, read, tokenizer};

/// Room for every snapshot of a test.
const CACHE: usize = 1 << 20;

fn request(prompt: &[u32]) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: Sampling::greedy(),
        max_tokens: Some(50),
        stop: Vec::new(),
        grammar: None,
        logprobs: None,
        ignore_eos: false,
        trace: false,
    }
}

fn run(session: &mut Session<Scripted>, request: &Request) -> Result<Answer, Error> {
    session.generate(request, &AtomicBool::new(false), &mut |_| ())
}

fn eos(tokenizer: &Tokenizer) -> u32 {
    tokenizer.id("<|im_end|>").unwrap()
}

/// A prompt, and a model that answers it with `text` and ends.
fn set_up(tokenizer: &Tokenizer, text: &str) -> (Scripted, Vec<u32>, Vec<u32>) {
    let model = Scripted::new(tokenizer);
    let prompt = encode(tokenizer, "a question");
    let mut answer = encode(tokenizer, text);
    answer.push(eos(tokenizer));
    model.answer_at(prompt.len(), &answer);
    (model, prompt, answer)
}

#[test]
fn an_answer_ends_at_the_end_token() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "hello there");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    let mut streamed = String::new();
    let result = session
        .generate(&request(&prompt), &AtomicBool::new(false), &mut |event| {
            if let Event::Text(text) = event {
                streamed.push_str(text);
            }
        })
        .unwrap();
    assert_eq!(result.text, "hello there");
    assert_eq!(streamed, "hello there");
    assert_eq!(result.token_ids, answer);
    assert_eq!(result.finish_reason, FinishReason::Stop);
    assert_eq!(result.usage.prompt_tokens, prompt.len());
    assert_eq!(result.usage.completion_tokens, answer.len());
    // The first token comes from the prompt's pass, each further one from a pass of its own.
    assert_eq!(result.stats.forward_passes, answer.len() - 1);
    assert_eq!(result.stats.tokens_per_forward_pass, Some(1.0));
    // The end token was drawn, not read.
    assert_eq!(read(&session).len(), prompt.len() + answer.len() - 1);
}

#[test]
fn the_end_token_can_be_ignored() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "x");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    let request = Request {
        grammar: None,
        logprobs: None,
        ignore_eos: true,
        trace: false,
        max_tokens: Some(7),
        ..request(&prompt)
    };
    let result = run(&mut session, &request).unwrap();
    assert_eq!(result.token_ids.len(), 7);
    assert_eq!(result.token_ids[..answer.len()], answer);
}

#[test]
fn the_token_limit_is_exact() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "one two three four");
    for limit in [0, 1, 2, answer.len() - 1] {
        let ends = [eos(&tokenizer)];
        let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
        let request = Request {
            max_tokens: Some(limit),
            ..request(&prompt)
        };
        let result = run(&mut session, &request).unwrap();
        assert_eq!(result.token_ids, answer[..limit]);
        assert_eq!(result.finish_reason, FinishReason::Length);
    }
}

#[test]
fn the_answer_ends_where_the_context_is_full() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "one two three four");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, prompt.len() + 3, CACHE);
    let result = run(&mut session, &request(&prompt)).unwrap();
    assert_eq!(result.token_ids, answer[..3]);
    assert_eq!(result.finish_reason, FinishReason::Length);
}

#[test]
fn a_prompt_that_fills_the_context_is_an_error_with_both_lengths() {
    let tokenizer = tokenizer();
    let (model, prompt, _) = set_up(&tokenizer, "x");
    for context in [1, prompt.len()] {
        let mut session = Session::new(&model, &tokenizer, &[], context, CACHE);
        let error = run(&mut session, &request(&prompt))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("{} tokens", prompt.len())),
            "{error}"
        );
        assert!(error.contains(&format!("holds {context}")), "{error}");
        assert!(error.contains("--ctx"), "{error}");
    }
    assert_eq!(model.computed.get(), 0);
}

#[test]
fn empty_prompts_and_unknown_tokens_are_refused() {
    let tokenizer = tokenizer();
    let model = Scripted::new(&tokenizer);
    let mut session = Session::new(&model, &tokenizer, &[], 100, CACHE);
    assert!(matches!(
        run(&mut session, &request(&[])),
        Err(Error::EmptyPrompt)
    ));
    let token = model.vocab_size as u32;
    assert!(matches!(
        run(&mut session, &request(&[1, token])),
        Err(Error::UnknownToken { token: bad, .. }) if bad == token
    ));
}

#[test]
fn a_stop_string_across_tokens_cuts_the_text() {
    let tokenizer = tokenizer();
    let (model, prompt, _) = set_up(&tokenizer, "keep this DONE not this");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    let mut streamed = String::new();
    let request = Request {
        stop: vec![" DONE".into(), "never".into()],
        ..request(&prompt)
    };
    let result = session
        .generate(&request, &AtomicBool::new(false), &mut |event| {
            if let Event::Text(text) = event {
                streamed.push_str(text);
            }
        })
        .unwrap();
    assert_eq!(result.text, "keep this");
    assert_eq!(streamed, "keep this");
    assert_eq!(result.finish_reason, FinishReason::Stop);
    // The tokens go up to the one that completed the stop string.
    assert_eq!(tokenizer.decode(&result.token_ids), "keep this DONE");
}

#[test]
fn cancelling_keeps_what_there_is() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "one two three four five");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    let cancel = AtomicBool::new(false);
    let mut pieces = 0;
    let result = session
        .generate(&request(&prompt), &cancel, &mut |event| {
            if let Event::Text(_) = event {
                pieces += 1;
                cancel.store(pieces == 3, Ordering::Relaxed);
            }
        })
        .unwrap();
    assert_eq!(result.finish_reason, FinishReason::Cancelled);
    assert!(result.token_ids.len() < answer.len());
    assert_eq!(result.token_ids, answer[..result.token_ids.len()]);
    assert_eq!(result.text, tokenizer.decode(&result.token_ids));
}

#[test]
fn cancelling_in_prefill_gives_an_empty_answer_and_a_usable_session() {
    let tokenizer = tokenizer();
    let model = Scripted::new(&tokenizer);
    let prompt = vec![1; 2000];
    let mut session = Session::new(&model, &tokenizer, &[], 4096, CACHE);
    let cancel = AtomicBool::new(false);
    let mut progress = Vec::new();
    let result = session
        .generate(&request(&prompt), &cancel, &mut |event| {
            if let Event::Prefill { done, total } = event {
                progress.push((done, total));
                cancel.store(done >= 1024, Ordering::Relaxed);
            }
        })
        .unwrap();
    assert_eq!(result.finish_reason, FinishReason::Cancelled);
    assert!(result.token_ids.is_empty() && result.text.is_empty());
    assert_eq!(result.stats.time_to_first_token_s, None);
    assert_eq!(progress, [(0, 2000), (512, 2000), (1024, 2000)]);
    // What was computed is not computed again.
    run(
        &mut session,
        &Request {
            max_tokens: Some(1),
            ..request(&prompt)
        },
    )
    .unwrap();
    assert_eq!(model.computed.get(), 2000);
    assert_eq!(read(&session), prompt);
}

#[test]
fn only_new_tokens_are_computed_when_a_prompt_continues() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "fine");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    run(&mut session, &request(&prompt)).unwrap();
    let before = model.computed.get();
    let mut longer = prompt.clone();
    longer.extend(&answer);
    longer.extend(encode(&tokenizer, "more"));
    let result = run(
        &mut session,
        &Request {
            max_tokens: Some(1),
            ..request(&longer)
        },
    )
    .unwrap();
    assert_eq!(
        model.computed.get() - before,
        longer.len() - (prompt.len() + answer.len() - 1)
    );
    assert_eq!(result.stats.reused_tokens, prompt.len() + answer.len() - 1);
    assert_eq!(read(&session), longer);
}

#[test]
fn a_prompt_that_differs_starts_afresh() {
    let tokenizer = tokenizer();
    let (model, prompt, _) = set_up(&tokenizer, "fine");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    run(&mut session, &request(&prompt)).unwrap();
    let mut other = prompt.clone();
    other[0] += 1;
    let result = run(
        &mut session,
        &Request {
            max_tokens: Some(1),
            ..request(&other)
        },
    )
    .unwrap();
    assert_eq!(read(&session), other);
    assert_eq!(result.stats.reused_tokens, 0);
}

/// The same prompt twice, the second time with no new token at all: a case that crashed other
/// engines.
#[test]
fn the_same_prompt_again_computes_its_last_token() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "fine");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    let first = run(&mut session, &request(&prompt)).unwrap();
    let before = model.computed.get();
    let second = run(&mut session, &request(&prompt)).unwrap();
    assert_eq!(first.token_ids, second.token_ids);
    assert_eq!(second.stats.reused_tokens, prompt.len() - 1);
    assert_eq!(model.computed.get() - before, answer.len());
}

/// A template that drops old thoughts makes a prompt which parts from the last one where the
/// answer began.
#[test]
fn a_prompt_that_parts_at_the_last_turn_keeps_what_is_before() {
    let tokenizer = tokenizer();
    let model = Scripted::new(&tokenizer);
    let prompt = encode(
        &tokenizer,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>",
    );
    let turn = prompt.len() - 1;
    assert!(tokenizer.is_mark(prompt[turn]));
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    run(&mut session, &request(&prompt)).unwrap();
    let mut other = prompt[..turn].to_vec();
    other.extend(encode(&tokenizer, "no thoughts"));
    let result = run(&mut session, &request(&other)).unwrap();
    assert_eq!(result.stats.reused_tokens, turn);
    assert_eq!(read(&session)[..other.len()], other);
}

#[test]
fn prompts_are_computed_in_chunks_at_fixed_places() {
    let tokenizer = tokenizer();
    let model = Scripted::new(&tokenizer);
    let mut session = Session::new(&model, &tokenizer, &[], 4096, CACHE);
    let one = |length: usize| Request {
        max_tokens: Some(1),
        ..request(&vec![2; length])
    };
    run(&mut session, &one(700)).unwrap();
    run(&mut session, &one(1300)).unwrap();
    assert_eq!(*model.passes.borrow(), [512, 188, 324, 276]);
}

#[test]
fn a_failing_model_leaves_a_usable_session() {
    let tokenizer = tokenizer();
    let (mut model, prompt, answer) = set_up(&tokenizer, "fine");
    model.failing_pass = Some(2);
    model.bad_pass = Some(4);
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    let error = run(&mut session, &request(&prompt)).unwrap_err();
    assert_eq!(error.to_string(), "the disk is on fire");
    // What the failed pass made of the state is not kept; the prompt's snapshot is.
    assert_eq!(read(&session), &prompt[..prompt.len() - 1]);
    // The next attempt meets logits that are no numbers.
    let error = run(&mut session, &request(&prompt)).unwrap_err();
    let position = prompt.len() as u64 + 1;
    assert!(
        matches!(error, Error::BadLogits { position: at, .. } if at == position),
        "{error}"
    );
    let result = run(&mut session, &request(&prompt)).unwrap();
    assert_eq!(result.token_ids, answer);
}

#[test]
fn a_character_cut_by_the_limit_is_marked() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "日");
    assert_eq!(
        answer.len(),
        4,
        "the tiny tokenizer spells this character in bytes"
    );
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    let result = run(
        &mut session,
        &Request {
            max_tokens: Some(2),
            ..request(&prompt)
        },
    )
    .unwrap();
    assert_eq!(result.text, "\u{fffd}");
}

#[test]
fn the_answer_serializes_as_documented() {
    let tokenizer = tokenizer();
    let (model, prompt, answer) = set_up(&tokenizer, "ok");
    let ends = [eos(&tokenizer)];
    let mut session = Session::new(&model, &tokenizer, &ends, 4096, CACHE);
    let json = serde_json::to_value(run(&mut session, &request(&prompt)).unwrap()).unwrap();
    let keys = |value: &serde_json::Value| -> Vec<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(
        keys(&json),
        ["text", "token_ids", "finish_reason", "usage", "stats"]
    );
    assert_eq!(json["finish_reason"], "stop");
    assert_eq!(json["token_ids"].as_array().unwrap().len(), answer.len());
    assert_eq!(keys(&json["usage"]), ["prompt_tokens", "completion_tokens"]);
    assert_eq!(
        keys(&json["stats"]),
        [
            "time_to_first_token_s",
            "prefill_tokens_per_s",
            "generation_tokens_per_s",
            "tokens_per_forward_pass",
            "forward_passes",
            "memory_bytes",
            "energy_j",
            "duration_s",
            "speculation"
        ]
    );
}
