//! The server as a program: its address, its answers, its end.

mod support;

use serde_json::Value;
use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;
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

/// The choices of an answer over HTTP, which do not depend on when it was given.
fn choices(answer: &str) -> Value {
    let (head, body) = answer.split_once("\r\n\r\n").expect(answer);
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    serde_json::from_str::<Value>(body).unwrap()["choices"].take()
}

/// Several servers, killed one after another while they keep snapshots in one folder, some of
/// which are cut besides: the next one's answers are right.
#[test]
fn killed_while_it_writes_snapshots_it_answers_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshots");
    let keeping = ["--cache-dir", path.to_str().unwrap()];
    let body = |n: usize| {
        let text = format!(
            "{} {}",
            "what came before ".repeat(14),
            "more ".repeat(n * 9)
        );
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{text}"}}], "max_tokens": 6, "seed": {n}}}"#
        )
    };
    let plain = Server::start(&["--no-prefix-cache"]);
    let ask = |server: &Server, n| choices(&rest(server.post(&body(n))));
    let expected: Vec<Value> = (0..6).map(|n| ask(&plain, n)).collect();
    drop(plain);
    for round in 0..5 {
        let server = Server::start(&keeping);
        for (n, expected) in expected.iter().enumerate().take(round + 1) {
            assert_eq!(ask(&server, n), *expected, "round {round}");
        }
        // Killed with an answer, and the files that it leaves, in the making.
        let _unheard = server.post(&body(5));
        std::thread::sleep(Duration::from_millis(7 * round as u64));
        drop(server);
        // As a crash of the machine would leave one.
        let files = std::fs::read_dir(&path).unwrap();
        if let Some(Ok(file)) = files.into_iter().nth(round) {
            let bytes = std::fs::read(file.path()).unwrap();
            std::fs::write(file.path(), &bytes[..bytes.len() / 2]).unwrap();
        }
    }
    let server = Server::start(&keeping);
    for (n, expected) in expected.iter().enumerate() {
        assert_eq!(ask(&server, n), *expected);
    }
    drop(server);
    // And what is whole serves: all of a prompt but a last file's tokens.
    let server = Server::start(&keeping);
    let answer = rest(server.post(&body(4)));
    let (_, usage) = answer.rsplit_once("\"cached_tokens\":").expect(&answer);
    let cached: String = usage.chars().take_while(char::is_ascii_digit).collect();
    assert!(cached.parse::<usize>().unwrap() > 64, "{answer}");
}

#[test]
fn a_folder_for_snapshots_that_cannot_be_used_fails_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let server = Server::start(&["--cache-dir", file.to_str().unwrap()]);
    let body = r#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}"#;
    choices(&rest(server.post(body)));
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
