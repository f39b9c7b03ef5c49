//! The server as a program: its address, its answers, its end.

mod support;

use std::io::Read;
use std::net::TcpStream;
use support::server::Server;
use support::{fails, run, tiny};

fn rest(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn it_answers_and_ends_when_told() {
    let mut server = Server::start(&[]);
    let body = r#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1}"#;
    let text = rest(server.post(body));
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    assert!(text.contains("\"completion_tokens\":"), "{text}");
    let schema = r#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}}}"#;
    let text = rest(server.post(schema));
    // Empty lines may come before it.
    let answers = ["\\\"a\\\"\"", "\\\"b\\\"\""];
    assert!(answers.iter().any(|answer| text.contains(answer)), "{text}");
    server.signal();
    assert_eq!(server.wait(), 0);
}

#[test]
fn what_is_in_progress_is_finished_first() {
    let mut server = Server::start(&[]);
    let body = r#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "stream": true,
        "logit_bias": {"317": -100, "315": -100}}"#;
    let mut stream = server.post(body);
    let mut start = [0; 12];
    stream.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 200");
    server.signal();
    let text = rest(stream);
    assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
    assert!(text.contains("data: [DONE]"), "{text}");
    assert_eq!(server.wait(), 0);
}

#[test]
fn mistakes_are_told() {
    let model = tiny("qwen3_5");
    let model = model.to_str().unwrap();
    let server = Server::start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    fails(
        &run(&["serve", model, "--port", port]),
        1,
        &["cannot listen at 127.0.0.1", port],
    );
    fails(
        &run(&["serve", model, "--host", "0.0.0.0", "--port", "0"]),
        2,
        &["0.0.0.0", "--api-key", "--insecure"],
    );
    fails(&run(&["serve", model, "--api-key", "a b"]), 2, &["API key"]);
    fails(
        &run(&["serve", model, "--ctx", "999999"]),
        2,
        &["--ctx 999999"],
    );
    fails(
        &run(&["server", "--model", "/no/such/model"]),
        1,
        &["/no/such/model"],
    );
}
