//! Calls of tools, in front of a script.

mod support;

use kozue_engine::FinishReason;
use serde_json::json;
use support::{Script, Server, assembled, weather};

#[tokio::test]
async fn calls_of_tools() {
    let text = "Let me look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Kyoto\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";
    let server = Server::saying(text);
    let answer = server.chat(json!({"tools": [weather()]})).await.good();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Let me look.");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[0]["function"]["name"], "weather");
    assert_eq!(calls[0]["function"]["arguments"], "{\"city\": \"Kyoto\"}");
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let streamed = server
        .chat(json!({"tools": [weather()], "stream": true}))
        .await
        .events();
    let message = assembled(&streamed, 0);
    assert_eq!(message["content"], "Let me look.");
    assert_eq!(message["finish_reason"], "tool_calls");
    assert_eq!(
        message["tool_calls"],
        json!([
            {"name": "weather", "arguments": "{\"city\": \"Kyoto\"}"},
            {"name": "weather", "arguments": "{}"},
        ])
    );

    // One call at a time: the second is not made.
    for stream in [false, true] {
        let fields = json!({"tools": [weather()], "parallel_tool_calls": false, "stream": stream});
        let answer = server.chat(fields).await;
        let (calls, finish) = match stream {
            true => {
                let message = assembled(&answer.events(), 0);
                (
                    message["tool_calls"].clone(),
                    message["finish_reason"].clone(),
                )
            }
            false => {
                let choice = answer.good()["choices"][0].clone();
                (
                    choice["message"]["tool_calls"].clone(),
                    choice["finish_reason"].clone(),
                )
            }
        };
        assert_eq!(calls.as_array().unwrap().len(), 1);
        assert_eq!(finish, "tool_calls");
    }

    // Without tools it is text.
    let answer = server.chat(json!({})).await.good();
    assert_eq!(answer["choices"][0]["message"]["content"], text);
}

#[tokio::test]
async fn the_template_is_told_of_tools_and_their_results() {
    let server = Server::saying("It rains.");
    let body = json!({"tools": [weather()], "messages": [
        {"role": "user", "content": "And Kyoto?"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function",
            "function": {"name": "weather", "arguments": "{\"city\": \"Kyoto\"}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]});
    server.post("/v1/chat/completions", &body).await.good();
    let asked = server.backend.asked.lock().unwrap();
    let text = support::LOADED.tokenizer.decode(&asked[0].prompt);
    for part in [
        "\"description\":\"The weather.\"",
        "assistant\n<tool_call>\n{\"name\":\"weather\",\"arguments\":{\"city\":\"Kyoto\"}}\n</tool_call>",
        "user\n<tool_response>\nrain\n</tool_response>",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

/// Half a call is not handed out as a whole one, and a whole one before it stays.
#[tokio::test]
async fn calls_cut_short() {
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Kyoto\"}}\n</tool_call>\n";
    for (text, calls, half) in [
        ("<tool_call>\n{\"na".to_string(), 0, None),
        (
            "<tool_call>{\"name\": \"weather\", \"arguments\": {\"ci".to_string(),
            0,
            Some("{\"ci"),
        ),
        (format!("{call}<tool_"), 1, None),
        (format!("{call}<tool_call>\n{{\"name\": \"wea"), 1, None),
        (
            format!("{call}<tool_call>\n{{\"name\": \"weather\", \"arguments\": {{"),
            1,
            Some("{"),
        ),
    ] {
        for (reason, name) in [
            (FinishReason::Length, "length"),
            (FinishReason::Stop, "stop"),
        ] {
            let server = Server::new(Script {
                reason: Some(reason),
                by_token: false,
                ..Script::saying(&text)
            });
            let name = match reason {
                // A stop text after a whole call leaves a call to be run.
                FinishReason::Stop if calls > 0 && half.is_none() => "tool_calls",
                _ => name,
            };
            let answer = server.chat(json!({"tools": [weather()]})).await.good();
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], name, "{text}");
            let message = &choice["message"];
            let content = message["content"].as_str().unwrap_or_default();
            assert_eq!(content, "", "{text}");
            let whole = message["tool_calls"].as_array().map_or(0, Vec::len);
            assert_eq!(whole, calls, "{text}");
            // A stream has told of the half call when it is cut; its end says so.
            let fields = json!({"tools": [weather()], "stream": true});
            let message = assembled(&server.chat(fields).await.events(), 0);
            assert_eq!(message["finish_reason"], name, "{text}");
            assert_eq!(message["content"], "");
            let told = message["tool_calls"].as_array().unwrap();
            assert_eq!(told.len(), calls + usize::from(half.is_some()));
            if let Some(half) = half {
                assert_eq!(told.last().unwrap()["arguments"], half);
            }
        }
        let server = Server::new(Script {
            reason: Some(FinishReason::Length),
            by_token: false,
            ..Script::saying(&text)
        });
        let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
        let body = json!({"input": "hi", "tools": [tool]});
        let answer = server.post("/v1/responses", &body).await.good();
        assert_eq!(answer["status"], "incomplete");
        let mut expected = vec!["completed"; calls];
        expected.extend(half.map(|_| "incomplete"));
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let events = server.post("/v1/responses", &streamed).await.events();
        for response in [&answer, &events.last().unwrap()["response"]] {
            let items = response["output"].as_array().unwrap().iter();
            let calls = items.filter(|item| item["type"] == "function_call");
            let statuses: Vec<&str> = calls.map(|call| call["status"].as_str().unwrap()).collect();
            assert_eq!(statuses, expected, "{text}");
        }
        let tools = json!([{"name": "weather", "input_schema": {"type": "object"}}]);
        let body = json!({"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": tools});
        let answer = server.post("/v1/messages", &body).await.good();
        assert_eq!(answer["stop_reason"], "max_tokens");
        let blocks = answer["content"].as_array().unwrap();
        assert_eq!(blocks.len(), calls, "{answer}");
        assert!(blocks.iter().all(|block| block["type"] == "tool_use"));
    }
}
