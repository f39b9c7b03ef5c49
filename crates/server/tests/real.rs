//! The server in front of a real model.

mod support;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use kozue_engine::LanguageModel;
use kozue_engine::scheduler::{Scheduler, SchedulerOptions};
use kozue_server::app::{App, router};
use kozue_server::guard::Guard;
use kozue_server::metrics::Metrics;
use kozue_server::preparing::Places;
use kozue_server::served::{Backend, Served};
use serde_json::{Value, json};
use std::sync::Arc;
use support::{LOADED, weather};
use tower::ServiceExt;

fn app() -> Arc<App> {
    let scheduler = Scheduler::start(Arc::clone(&LOADED), SchedulerOptions::default()).unwrap();
    let backend: Arc<dyn Backend> = Arc::new(scheduler);
    Arc::new(App {
        served: Served::new(Arc::clone(&LOADED), Vec::new(), None, backend).unwrap(),
        metrics: Metrics::default(),
        guard: Guard::default(),
        places: Places::default(),
        body_limit: 1 << 20,
    })
}

async fn chat(app: &Arc<App>, fields: Value) -> (u16, Value) {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let request = Request::post("/v1/chat/completions").header("host", "localhost");
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response = router(Arc::clone(app)).oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap())
}

/// ggml-org/llama.cpp#9587: an unusual value of a sampling option ended the server.
#[tokio::test(flavor = "multi_thread")]
async fn every_allowed_value_gets_an_answer() {
    let app = app();
    let everything: serde_json::Map<String, Value> = (0..LOADED.model.vocab_size())
        .map(|token| (token.to_string(), json!(-100)))
        .collect();
    for fields in [
        json!({"temperature": 1e-30}),
        json!({"temperature": 0, "top_p": 0, "min_p": 1, "top_k": 1}),
        json!({"temperature": 2, "top_p": 1e-30}),
        json!({"temperature": 2, "min_p": 1}),
        json!({"top_k": 9_007_199_254_740_992_u64}),
        json!({"top_k": -1, "top_p": 1, "min_p": 0}),
        json!({"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 1e-30}),
        json!({"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 10}),
        json!({"logit_bias": {"0": -100, "1": 100}}),
        json!({"seed": -1, "n": 16, "max_tokens": 1}),
        json!({"seed": u64::MAX}),
        json!({"max_tokens": u64::MAX, "stop": ["e", "a", "o", "i", "n", " ", "t", "s"], "seed": 1}),
        json!({"logprobs": true, "top_logprobs": 20, "temperature": 0}),
    ] {
        let (status, answer) = chat(&app, fields.clone()).await;
        assert_eq!(status, 200, "{fields}: {answer}");
    }
    // What cannot be done is refused, and nothing else suffers.
    let unknown = json!({"99999999": 5})
        .as_object()
        .cloned()
        .unwrap_or_default();
    for bias in [everything, unknown] {
        let (status, answer) = chat(&app, json!({"logit_bias": bias})).await;
        assert_eq!(status, 400, "{answer}");
    }
    let (status, _) = chat(&app, json!({})).await;
    assert_eq!(status, 200);
}

/// A call that must come is one, whole or cut off, whatever a model without any sense likes.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_must_come_are_calls_or_nothing() {
    let app = app();
    let mut tool = weather();
    tool["function"]["parameters"] = json!({"type": "object", "required": ["city", "days"],
        "properties": {"city": {"enum": ["Kyoto", "Oslo"]}, "days": {"type": "integer", "maximum": 99, "minimum": 0}}});
    let named = json!({"type": "function", "function": {"name": "weather"}});
    let mut whole = 0;
    for (choice, parallel) in [
        ("required".into(), false),
        ("required".into(), true),
        (named, true),
    ] {
        for tokens in [3, 9, 20, 40, 900] {
            let (status, answer) = chat(
                &app,
                json!({"tools": [tool], "tool_choice": choice, "parallel_tool_calls": parallel,
                    "max_tokens": tokens, "seed": tokens, "temperature": 1.5, "enable_thinking": false}),
            )
            .await;
            assert_eq!(status, 200, "{answer}");
            let choice_of = &answer["choices"][0];
            let calls = choice_of["message"]["tool_calls"].as_array();
            let calls = calls.map_or(&[][..], Vec::as_slice);
            whole += calls.len();
            for call in calls {
                let arguments = call["function"]["arguments"].as_str().unwrap();
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                assert!(["Kyoto", "Oslo"].contains(&arguments["city"].as_str().unwrap()));
                assert!(arguments["days"].as_u64().unwrap() < 100);
            }
            let content = choice_of["message"]["content"].as_str().unwrap_or_default();
            assert_eq!(content.trim(), "", "{answer}");
            match choice_of["finish_reason"].as_str().unwrap() {
                "tool_calls" if parallel && choice == json!("required") => {
                    assert!(calls.len() <= 8)
                }
                "tool_calls" => assert_eq!(calls.len(), 1, "{answer}"),
                "length" => assert!(answer["usage"]["completion_tokens"] == tokens),
                other => panic!("{other}"),
            }
        }
    }
    assert!(whole > 0, "no call was whole");
}
