//! Anthropic's API in front of a script.

mod support;

use kozue_engine::FinishReason;
use serde_json::{Value, json};
use support::{Script, Server};

const PATH: &str = "/v1/messages";

fn body(fields: Value) -> Value {
    let mut body = json!({"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn tools() -> Value {
    json!([{"name": "weather", "input_schema": {"type": "object"}}])
}

const TEXT: &str = "<think>Hm.</think>Look:<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"K\"}}</tool_call>";

#[tokio::test]
async fn a_message() {
    let server = Server::saying(TEXT);
    let answer = server
        .post(PATH, &body(json!({"tools": tools()})))
        .await
        .good();
    assert_eq!(answer["type"], "message");
    assert_eq!(answer["role"], "assistant");
    let content = answer["content"].as_array().unwrap();
    assert_eq!(content[0]["thinking"], "Hm.");
    assert_eq!(content[1], json!({"type": "text", "text": "Look:"}));
    assert_eq!(content[2]["input"], json!({"city": "K"}));
    assert!(content[2]["id"].as_str().unwrap().starts_with("toolu_"));
    assert_eq!(answer["stop_reason"], "tool_use");
    let prompt = server.backend.asked.lock().unwrap()[0].prompt.len();
    assert_eq!(answer["usage"]["input_tokens"], prompt - 2);
    assert_eq!(answer["usage"]["cache_read_input_tokens"], 2);
    let count = server
        .post(
            "/v1/messages/count_tokens",
            &body(json!({"tools": tools()})),
        )
        .await
        .good();
    assert_eq!(count["input_tokens"], prompt);
}

#[tokio::test]
async fn a_streamed_message() {
    let server = Server::saying(TEXT);
    let answer = server
        .post(PATH, &body(json!({"tools": tools(), "stream": true})))
        .await;
    let names: Vec<&str> = answer
        .text
        .lines()
        .filter_map(|line| line.strip_prefix("event: "))
        .collect();
    let events = answer.events();
    let types: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(names, types);
    let mut short = types.clone();
    short.dedup();
    let block = [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ];
    assert_eq!(
        short,
        [
            &["message_start", "ping"][..],
            &block,
            &block,
            &block,
            &["message_delta", "message_stop"]
        ]
        .concat()
    );
    let joined = |index: usize, kind: &str, field: &str| -> String {
        let deltas = events.iter().filter(|e| e["index"] == index);
        let deltas = deltas.filter(|e| e["delta"]["type"] == kind);
        deltas
            .map(|e| e["delta"][field].as_str().unwrap())
            .collect()
    };
    assert_eq!(joined(0, "thinking_delta", "thinking"), "Hm.");
    assert_eq!(joined(1, "text_delta", "text"), "Look:");
    assert_eq!(
        joined(2, "input_json_delta", "partial_json"),
        "{\"city\": \"K\"}"
    );
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert!(end["usage"]["output_tokens"].as_u64().unwrap() > 5);
}

#[tokio::test]
async fn why_it_ended() {
    for (reason, by_token, stops, expected, sequence) in [
        (
            FinishReason::Stop,
            true,
            json!(["X"]),
            "end_turn",
            Value::Null,
        ),
        (
            FinishReason::Stop,
            false,
            json!(["X"]),
            "stop_sequence",
            json!("X"),
        ),
        (
            FinishReason::Length,
            false,
            json!([]),
            "max_tokens",
            Value::Null,
        ),
    ] {
        let server = Server::new(Script {
            pieces: vec!["a".into()],
            reason: Some(reason),
            by_token,
            ..Script::default()
        });
        let answer = server
            .post(PATH, &body(json!({"stop_sequences": stops})))
            .await
            .good();
        assert_eq!(answer["stop_reason"], expected);
        assert_eq!(answer["stop_sequence"], sequence);
    }
}

#[tokio::test]
async fn a_begun_answer_goes_on() {
    let server = Server::saying("42.");
    let messages = json!([
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"},
    ]);
    let answer = server
        .post(PATH, &body(json!({"messages": messages})))
        .await
        .good();
    assert_eq!(answer["content"][0]["text"], "42.");
    let asked = server.backend.asked.lock().unwrap();
    let prompt = support::LOADED.tokenizer.decode(&asked[0].prompt);
    assert!(prompt.ends_with("</think>\n\nThe answer is"), "{prompt}");
}

#[tokio::test]
async fn errors_have_its_shape() {
    let server = Server::saying("x");
    for (path, body, status, kind) in [
        (PATH, "{", 400, "invalid_request_error"),
        (PATH, "{\"messages\": []}", 400, "invalid_request_error"),
        (
            PATH,
            "{\"model\": \"m\", \"max_tokens\": 1, \"messages\": []}",
            404,
            "not_found_error",
        ),
        ("/v1/messages/nothing", "{}", 404, "not_found_error"),
    ] {
        let answer = server.post_text(path, body.to_string()).await;
        assert_eq!(answer.status.as_u16(), status, "{body}");
        let error = answer.json();
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], kind);
        assert!(error["error"]["message"].is_string());
    }
    let full = Server::new(Script {
        full: true,
        ..Script::default()
    });
    let answer = full.post(PATH, &body(json!({}))).await;
    assert_eq!(answer.status.as_u16(), 429);
    assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
}
