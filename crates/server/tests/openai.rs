//! OpenAI's API in front of a script.

mod support;

use kozue_engine::FinishReason;
use serde_json::{Value, json};
use support::{Script, Server, assembled, weather};

#[tokio::test]
async fn a_chat() {
    let server = Server::saying("Hello there.");
    let answer = server.chat(json!({})).await.good();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "qwen3_5");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], "Hello there.");
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["message"].get("tool_calls").is_none());
    let usage = &answer["usage"];
    let prompt = server.backend.asked.lock().unwrap()[0].prompt.len();
    assert_eq!(usage["prompt_tokens"], prompt);
    assert_eq!(usage["completion_tokens"], 4);
    assert_eq!(usage["total_tokens"], prompt + 4);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 2);
    assert_eq!(usage["spec_verify_ct"], 3);
}

/// One end, its reason and the usage in a chunk of its own: ollama/ollama#4448,
/// janhq/cortex.llamacpp#265, ModelTC/LightLLM#130.
#[tokio::test]
async fn a_streamed_chat() {
    let server = Server::saying("<think>\nHm.\n</think>\n\nHello there.");
    let answer = server
        .chat(json!({"stream": true, "stream_options": {"include_usage": true}}))
        .await;
    assert!(answer.text.ends_with("data: [DONE]\n\n"));
    let events = answer.events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let message = assembled(&events, 0);
    assert_eq!(message["content"], "Hello there.");
    assert_eq!(message["reasoning_content"], "Hm.");
    assert_eq!(message["finish_reason"], "stop");
    // The last chunk has no choice and the usage, the others have a choice and none.
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert!(last["usage"]["completion_tokens"].as_u64().unwrap() > 3);
    for event in others {
        assert_eq!(event["choices"].as_array().unwrap().len(), 1);
        assert!(event["usage"].is_null());
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["id"], last["id"]);
    }
    let without = server.chat(json!({"stream": true})).await.events();
    assert!(without.iter().all(|event| event.get("usage").is_none()));
}

#[tokio::test]
async fn an_answer_cut_short() {
    let server = Server::new(Script {
        pieces: vec!["Once upon".into()],
        reason: Some(FinishReason::Length),
        ..Script::default()
    });
    let answer = server.chat(json!({"max_tokens": 1})).await.good();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(server.backend.asked.lock().unwrap()[0].max_tokens, Some(1));
}

#[tokio::test]
async fn several_answers() {
    let server = Server::saying("Yes.");
    let answer = server.chat(json!({"n": 3, "seed": 5})).await.good();
    assert_eq!(answer["choices"].as_array().unwrap().len(), 3);
    assert_eq!(answer["choices"][2]["index"], 2);
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    let asked = server.backend.asked.lock().unwrap().clone();
    let seeds: Vec<u64> = asked.iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [5, 6, 7]);
    assert_eq!(answer["usage"]["prompt_tokens"], asked[0].prompt.len());
    let events = server.chat(json!({"n": 2, "stream": true})).await.events();
    for index in 0..2 {
        assert_eq!(assembled(&events, index)["content"], "Yes.");
    }
}

#[tokio::test]
async fn options_reach_the_engine() {
    let server = Server::saying("x");
    server
        .chat(json!({
            "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 9, "stop": ["a", "b"],
            "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
            "logit_bias": {"3": 2}, "max_completion_tokens": 11,
        }))
        .await
        .good();
    let asked = server.backend.asked.lock().unwrap();
    let sampling = &asked[0].sampling;
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.min_p),
        (0.5, 0.25, 0.125)
    );
    assert_eq!((sampling.top_k, sampling.seed), (Some(7), 9));
    assert_eq!(
        (sampling.presence_penalty, sampling.frequency_penalty),
        (1.0, -1.0)
    );
    assert_eq!(sampling.repetition_penalty, 1.5);
    assert_eq!(sampling.logit_bias, [(3, 2.0)]);
    assert_eq!(asked[0].stop, ["a", "b"]);
    assert_eq!(asked[0].max_tokens, Some(11));
}

#[tokio::test]
async fn failures_have_a_status_of_their_own() {
    let failing = |fails| {
        Server::new(Script {
            pieces: vec!["a".into(), "b".into()],
            fails: Some(fails),
            ..Script::default()
        })
    };
    for stream in [false, true] {
        let error = failing(0).chat(json!({"stream": stream})).await.error(500);
        assert_eq!(error["type"], "server_error");
        let full = Server::new(Script {
            full: true,
            ..Script::default()
        });
        let answer = full.chat(json!({"stream": stream})).await;
        assert_eq!(answer.error(429)["code"], "queue_full");
        assert_eq!(answer.headers["retry-after"], "1");
    }
    failing(1).chat(json!({})).await.error(500);
    // In the midst of a stream there is only the stream to tell it.
    let events = failing(1).chat(json!({"stream": true})).await;
    assert!(!events.text.contains("[DONE]"));
    let events = events.events();
    assert_eq!(events.last().unwrap()["error"]["type"], "server_error");
}

#[tokio::test]
async fn bad_requests() {
    let server = Server::saying("x");
    let path = "/v1/chat/completions";
    for (body, param) in [
        ("", Value::Null),
        ("{", Value::Null),
        ("[]", Value::Null),
        ("{}", Value::Null),
        ("{\"messages\": []}", json!("messages")),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"n\": 99}",
            json!("n"),
        ),
    ] {
        let error = server.post_text(path, body.to_string()).await.error(400);
        assert_eq!(error["param"], param, "{body}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let large = format!("{{\"messages\": \"{}\"}}", "x".repeat(2 << 20));
    server.post_text(path, large).await.error(413);
    let long = "a ".repeat(2000);
    let body = json!({"messages": [{"role": "user", "content": long}]});
    let error = server.post(path, &body).await.error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    let error = server.chat(json!({"model": "gpt-9"})).await.error(404);
    assert_eq!(error["code"], "model_not_found");
    for name in ["qwen3_5", "other", "", "default"] {
        server.chat(json!({"model": name})).await.good();
    }
    server.get("/v1/nothing").await.error(404);
    let wrong = server.get(path).await;
    wrong.error(405);
    assert_eq!(wrong.headers["allow"], "POST");
    server
        .post("/v1/embeddings", &json!({"input": "x"}))
        .await
        .error(400);
}

#[tokio::test]
async fn plain_completions() {
    let server = Server::saying("<think> is text.");
    let path = "/v1/completions";
    let answer = server
        .post(
            path,
            &json!({"prompt": ["Once", [1, 2, 3]], "n": 2, "echo": true}),
        )
        .await;
    // Texts and tokens cannot be mixed.
    answer.error(400);
    let answer = server
        .post(
            path,
            &json!({"prompt": ["Once", "Then"], "n": 2, "echo": true, "seed": 1}),
        )
        .await
        .good();
    let texts: Vec<&str> = (0..4)
        .map(|n| answer["choices"][n]["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts[0], "Once<think> is text.");
    assert_eq!(texts[3], "Then<think> is text.");
    let asked = server.backend.asked.lock().unwrap().clone();
    assert_eq!(asked[0].max_tokens, Some(16));
    let both = asked[0].prompt.len() + asked[2].prompt.len();
    assert_eq!(answer["usage"]["prompt_tokens"], both);

    let answer = server
        .post(path, &json!({"prompt": [1, 2, 3], "stream": true, "stream_options": {"include_usage": true}}))
        .await
        .events();
    assert_eq!(server.backend.asked.lock().unwrap()[4].prompt, [1, 2, 3]);
    let text: String = answer
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(text, "<think> is text.");
    assert_eq!(answer.last().unwrap()["usage"]["prompt_tokens"], 3);

    for (field, value) in [
        ("prompt", json!([])),
        ("prompt", json!("")),
        ("prompt", json!([99999])),
        ("prompt", json!([-1])),
        ("suffix", json!("x")),
        ("best_of", json!(2)),
    ] {
        let mut body = json!({"prompt": "x"});
        body[field] = value;
        let error = server.post(path, &body).await.error(400);
        assert_eq!(error["param"], field);
    }
}

#[tokio::test]
async fn responses() {
    let server = Server::saying(
        "<think>Hm.</think>Hello.<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"K\"}}</tool_call>",
    );
    let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
    let body = json!({"input": "hi", "tools": [tool]});
    let answer = server.post("/v1/responses", &body).await.good();
    assert_eq!(answer["object"], "response");
    assert_eq!(answer["status"], "completed");
    let output = answer["output"].as_array().unwrap();
    let kinds: Vec<&str> = output
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"][0]["text"], "Hm.");
    assert_eq!(output[1]["content"][0]["text"], "Hello.");
    assert_eq!(output[2]["arguments"], "{\"city\": \"K\"}");
    assert_eq!(answer["usage"]["input_tokens_details"]["cached_tokens"], 2);

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = server.post("/v1/responses", &streamed).await.events();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let mut kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let whole = &events.last().unwrap()["response"]["output"];
    for (item, other) in whole.as_array().unwrap().iter().zip(output) {
        assert_eq!(item["type"], other["type"]);
        assert_eq!(item["content"], other["content"]);
        assert_eq!(item["arguments"], other["arguments"]);
    }
    let error = server
        .post(
            "/v1/responses",
            &json!({"input": "x", "previous_response_id": "r"}),
        )
        .await
        .error(400);
    assert_eq!(error["param"], "previous_response_id");
}

#[tokio::test]
async fn the_rest() {
    let server = Server::saying("x");
    let models = server.get("/v1/models").await.good();
    assert_eq!(models["data"][0]["id"], "qwen3_5");
    assert_eq!(
        server.get("/v1/models/qwen3_5").await.good()["id"],
        "qwen3_5"
    );
    server.get("/v1/models/a/b").await.error(404);
    let health = server.get("/health").await.good();
    assert_eq!(
        (&health["status"], &health["running"], &health["waiting"]),
        (&json!("ok"), &json!(1), &json!(2))
    );
    server.chat(json!({})).await.good();
    let metrics = server.get("/metrics").await.text;
    for line in [
        "kozue_requests_waiting 2",
        "kozue_completion_tokens_total 1",
        "kozue_http_requests_total{path=\"/v1/chat/completions\",status=\"200\"} 1",
        "kozue_http_requests_total{path=\"/v1/models/{*id}\",status=\"404\"} 1",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}\n{metrics}");
    }
}

#[tokio::test]
async fn tokens_are_told_with_their_text() {
    let pieces = ["<think>", "Hm", "</think>", "Yes", ",", " no"];
    let server = Server::new(Script {
        pieces: pieces.map(String::from).to_vec(),
        ..Script::default()
    });
    let fields = json!({"logprobs": true, "top_logprobs": 2});
    let answer = server.chat(fields.clone()).await.good();
    assert_eq!(answer["choices"][0]["message"]["content"], "Yes, no");
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 3);
    let tokenizer = &support::LOADED.tokenizer;
    let content = answer["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(content.as_array().unwrap().len(), 3);
    for (n, entry) in content.as_array().unwrap().iter().enumerate() {
        let bytes = tokenizer.token_bytes(13 + n as u32).unwrap();
        assert_eq!(entry["bytes"], json!(bytes));
        assert_eq!(entry["logprob"], -0.5);
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["top_logprobs"][1]["logprob"], -1.25);
    }
    // Streamed, every entry comes with its text.
    let mut streamed = fields;
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_passes": true});
    let events = server.chat(streamed).await.events();
    let mut entries = Vec::new();
    let mut passes = Vec::new();
    for event in &events {
        let choice = &event["choices"][0];
        let text = choice["delta"]["content"].as_str().unwrap_or_default();
        let told = choice["logprobs"]["content"].as_array();
        assert_eq!(
            told.map_or(0, Vec::len),
            usize::from(!text.is_empty()),
            "{event}"
        );
        entries.extend(told.into_iter().flatten().cloned());
        passes.extend(choice["pass"].as_u64());
    }
    assert_eq!(json!(entries), content);
    // The end is told beside them too: BerriAI/litellm#10686.
    assert_eq!(assembled(&events, 0)["finish_reason"], "stop");
    assert_eq!(passes, [1, 2, 2]);
    // Nobody asked.
    let answer = server.chat(json!({})).await.good();
    assert!(answer["choices"][0]["logprobs"].is_null());

    let body = json!({"prompt": "x", "logprobs": 1, "echo": true});
    let answer = server.post("/v1/completions", &body).await.good();
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 6);
    assert_eq!(logprobs["token_logprobs"][5], -0.5);
    assert_eq!(logprobs["text_offset"][0], 1);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 1);
}

#[tokio::test]
async fn answers_that_must_have_a_form_get_a_grammar() {
    let server = Server::saying("x");
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}});
    let required = json!({"tools": [weather()], "tool_choice": "required"});
    let mut strict = weather();
    strict["function"]["strict"] = true.into();
    for (fields, guided) in [
        (json!({}), false),
        (json!({"response_format": {"type": "text"}}), false),
        (json!({"response_format": {"type": "json_object"}}), true),
        (json!({"response_format": schema}), true),
        (json!({"tools": [weather()]}), false),
        (json!({"tools": [weather()], "tool_choice": "none"}), false),
        (required, true),
        (json!({"tools": [strict]}), true),
    ] {
        server.chat(fields.clone()).await.good();
        let asked = server.backend.asked.lock().unwrap();
        assert_eq!(asked.last().unwrap().grammar.is_some(), guided, "{fields}");
    }
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}});
    let error = server
        .chat(json!({"response_format": schema}))
        .await
        .error(400);
    assert_eq!(error["param"], "response_format");
    let mut bad = weather();
    bad["function"]["strict"] = true.into();
    bad["function"]["parameters"]["properties"]["city"]["type"] = "nonsense".into();
    let error = server.chat(json!({"tools": [bad]})).await.error(400);
    assert_eq!(error["param"], "tools");
}
