//! What a model wrote, read by the server and sent back by the client, is the same text again in
//! the next prompt: thoughts, calls and results, in each way of writing calls.

mod support;

use kozue_server::guard::Guard;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use support::{Script, Server, open, weather};

/// Thoughts, content and the end of a message, as Qwen's templates have them.
const TURNS: &str = "{%- for m in messages %}{{ '<|im_start|>' }}\
{%- if m.role == 'tool' %}{{ 'user\n<tool_response>\n' + m.content + '\n</tool_response>' }}\
{%- else %}{{ m.role + '\n' }}\
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}\
{{- m.content }}\
{%- for call in m.tool_calls or [] %}CALL{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}";

const XML: &str = "{{ ('\n\n' if loop.first and m.content else '\n' if not loop.first else '') + '<tool_call>\n<function=' + call.function.name + '>\n' }}\
{%- for name, value in call.function.arguments|items %}{{ '<parameter=' + name + '>\n' + (value if value is string else value|tojson) + '\n</parameter>\n' }}{% endfor %}\
{{- '</function>\n</tool_call>' }}";

const JSON: &str = "{{ ('\n' if m.content or not loop.first else '') + '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments|tojson + '}\n</tool_call>' }}";

const BARE: &str = "{{ '{\"name\": \"' + call.function.name + '\", \"parameters\": ' + call.function.arguments|tojson + '}' }}";

/// The tiny model with a template that shows tools, so that the server sees how calls look.
fn loaded(call: &str, shown: &str) -> Arc<kozue_engine::Loaded> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/tiny/qwen3_5");
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let shown = format!("{{% if tools %}}{{# {shown} #}}{{{{ tools|tojson }}}}{{% endif %}}");
    let template = shown + &TURNS.replace("CALL", call);
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    Arc::new(open(folder.path()))
}

fn prompt(server: &Server, index: usize) -> String {
    let asked = server.backend.asked.lock().unwrap();
    let tokenizer = &support::LOADED.tokenizer;
    // Control tokens are silent, so they are spelled here.
    asked[index]
        .prompt
        .iter()
        .map(|&token| match tokenizer.is_control(token) {
            true => tokenizer.piece(token).unwrap(),
            false => String::from_utf8_lossy(&tokenizer.token_bytes(token).unwrap()).into_owned(),
        })
        .collect()
}

async fn check(call: &str, shown: &str, answer: &str) {
    let loaded = loaded(call, shown);
    let server = Server::of(loaded, Script::saying(answer), Guard::default());
    let mut messages = vec![json!({"role": "user", "content": "And Kyoto?"})];
    let ask = |messages: &[Value]| json!({"messages": messages, "tools": [weather()]});
    let path = "/v1/chat/completions";
    let whole = server.post(path, &ask(&messages)).await.good();
    let message = whole["choices"][0]["message"].clone();
    assert!(
        !message["tool_calls"].as_array().unwrap().is_empty(),
        "{message}"
    );
    assert_eq!(message["reasoning_content"], "I look.\nNow.");
    messages.push(message.clone());
    for call in message["tool_calls"].as_array().unwrap() {
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "rain"}));
    }
    server.post(path, &ask(&messages)).await.good();
    let (first, second) = (prompt(&server, 0), prompt(&server, 1));
    let expected = format!("{first}{answer}<|im_end|>\n");
    assert!(second.starts_with(&expected), "{expected:?}\n{second:?}");
    assert!(second.contains("<tool_response>\nrain\n</tool_response>"));

    // The same by Anthropic's API.
    let tool = json!({"name": "weather", "description": "The weather.",
        "input_schema": weather()["function"]["parameters"]});
    let ask = |messages: &[Value]| json!({"messages": messages, "tools": [tool], "max_tokens": 9});
    let mut messages = vec![json!({"role": "user", "content": "And Kyoto?"})];
    let whole = server.post("/v1/messages", &ask(&messages)).await.good();
    messages.push(json!({"role": "assistant", "content": whole["content"]}));
    let uses = whole["content"].as_array().unwrap().iter();
    let results: Vec<Value> = uses
        .filter(|block| block["type"] == "tool_use")
        .map(|block| json!({"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}))
        .collect();
    messages.push(json!({"role": "user", "content": results}));
    server.post("/v1/messages", &ask(&messages)).await.good();
    assert_eq!(prompt(&server, 2), first);
    assert_eq!(prompt(&server, 3), second);
}

#[tokio::test]
async fn xml() {
    check(
        XML,
        "<tool_call>\n<function=example>",
        "I look.\nNow.\n</think>\n\nLet me see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nKyoto \"x\"\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    )
    .await;
}

#[tokio::test]
async fn json_between_marks() {
    check(
        JSON,
        "<tool_call>",
        "I look.\nNow.\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Kyoto é\", \"days\": [1, {\"a\": null}]}}\n</tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>",
    )
    .await;
}

#[tokio::test]
async fn bare_json() {
    check(
        BARE,
        "\"parameters\"",
        "I look.\nNow.\n</think>\n\n{\"name\": \"weather\", \"parameters\": {\"city\": \"Kyoto\"}}",
    )
    .await;
}
