//! `kozue compare`, with the program's own server and with servers that misbehave.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;
use support::server::Server;
use support::{fails, json, kozue, run, stdout};

/// One short prompt a group.
const PROMPTS: &str = "{\"category\": \"a\", \"prompt\": \"hi\"}\n\n{\"category\": \"b\", \"prompt\": \"and you?\"}\n";

#[test]
fn two_servers_side_by_side() {
    let server = Server::start(&["--alias", "other"]);
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    std::fs::write(&prompts, PROMPTS).unwrap();
    let first = format!("http://{},qwen3_5", server.address);
    let second = format!("http://{}/v1/,other", server.address);
    let compare = |more: &[&str]| {
        kozue(folder.path())
            .args(["compare", "--endpoint", &first, "--endpoint", &second])
            .args([
                "--prompts",
                prompts.to_str().unwrap(),
                "--rounds",
                "2",
                "-n",
                "8",
            ])
            .args(more)
            .output()
            .unwrap()
    };
    let report = json(&compare(&["--json", "--svg", "chart.svg"]));
    let results = report["results"].as_array().unwrap();
    let names: Vec<(&str, &str)> = results
        .iter()
        .map(|line| {
            let text = |field: &str| line[field].as_str().unwrap();
            (text("category"), text("model"))
        })
        .collect();
    assert_eq!(
        names,
        [
            ("a", "qwen3_5"),
            ("a", "other"),
            ("b", "qwen3_5"),
            ("b", "other"),
            ("all", "qwen3_5"),
            ("all", "other"),
        ]
    );
    for line in results {
        assert_eq!(
            line["answers"],
            if line["category"] == "all" { 4 } else { 2 }
        );
        assert_eq!(line["counted"], true);
        assert!(line["time_to_first_token_s"]["median"].as_f64().unwrap() > 0.0);
    }
    // The first round is dropped, and both give the same answer: they are the same.
    let samples = report["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 4);
    for sample in samples {
        let endpoints = sample["endpoints"].as_array().unwrap();
        assert_eq!(endpoints.len(), 2);
        let tokens = endpoints[0]["completion_tokens"].as_u64().unwrap();
        assert!((1..=8).contains(&tokens));
        assert_eq!(endpoints[1]["completion_tokens"], tokens);
        assert!(endpoints[0]["spec_verify_ct"].as_u64().unwrap() < 8);
        assert!(endpoints[0]["cached_tokens"].as_u64().is_some());
    }
    let chart = std::fs::read_to_string(folder.path().join("chart.svg")).unwrap();
    assert!(chart.starts_with("<svg") && chart.trim_end().ends_with("</svg>"));
    assert!(chart.contains(&format!("other at {}", server.address)));

    let table = compare(&[]);
    let text = stdout(&table);
    assert_eq!(
        text.lines().filter(|line| line.starts_with("all ")).count(),
        2,
        "{text}"
    );
    assert!(
        text.contains("1.00x") && text.contains("tokens/pass"),
        "{text}"
    );
    // A model that the server does not have.
    let wrong = format!("http://{},gpt-9", server.address);
    fails(
        &run(&["compare", "--endpoint", &first, "--endpoint", &wrong]),
        1,
        &["404", "gpt-9", &server.address, "no model"],
    );
}

/// What a server does with every connection: it reads the question, and then this.
fn fake(answer: impl Fn(&mut TcpStream) + Send + 'static) -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/v1,m", listener.local_addr().unwrap());
    let (sender, heads) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let head = question(&mut stream);
            let _ = sender.send(head);
            answer(&mut stream);
        }
    });
    (address, heads)
}

/// The head of a request; its body is read too.
fn question(stream: &mut TcpStream) -> String {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).unwrap() == 0 {
            return head;
        }
    }
    let head = head.to_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .and_then(|length| length.parse().ok())
        .unwrap_or(0);
    reader.read_exact(&mut vec![0; length]).unwrap();
    head
}

fn reply(status: &str, kind: &str, body: &str) -> impl Fn(&mut TcpStream) + Send + 'static {
    let text =
        format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n{body}");
    move |stream| {
        let _ = stream.write_all(text.as_bytes());
    }
}

const CHUNK: &str = "data: {\"choices\": [{\"delta\": {\"content\": \"a\"}}]}\n\n";

#[test]
fn servers_that_misbehave_are_told_in_one_line() {
    let stream = "text/event-stream";
    let error = "{\"error\": {\"message\": \"no\\nway\"}}";
    let cut = "data: {\"choices\": [{\"del";
    for (answer, words) in [
        (
            reply("401 Unauthorized", "application/json", error),
            &["401", "--api-key", "no way"][..],
        ),
        (
            reply("404 Not Found", "text/html", "<h1>nothing\nhere</h1>"),
            &["404", "nothing here"],
        ),
        (
            reply("429 Too Many Requests", "application/json", "{}"),
            &["429", "too busy"],
        ),
        (reply("500 Oops", "text/plain", ""), &["500"]),
        (
            reply("200 OK", "application/json", "{\"choices\": []}"),
            &["application/json", "stream of events"],
        ),
        (reply("307 Go", "text/plain", ""), &["307"]),
        (reply("200 OK", stream, ""), &["breaks off after 0"]),
        (reply("200 OK", stream, CHUNK), &["breaks off after 1"]),
        (
            reply("200 OK", stream, &format!("{CHUNK}{cut}")),
            &["no JSON"],
        ),
        (
            reply("200 OK", stream, &format!("{CHUNK}data: {error}\n\n")),
            &["gives up", "no way"],
        ),
    ] {
        let (address, _heads) = fake(answer);
        let output = run(&["compare", "--endpoint", &address]);
        fails(&output, 1, &[words, &["/v1 (m): "]].concat());
    }
    let (address, _heads) = fake(|stream| {
        let _ = stream.write_all(b"nonsense\r\n\r\n");
    });
    fails(
        &run(&["compare", "--endpoint", &address]),
        1,
        &["/v1 (m): "],
    );
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let nobody = format!("http://{free},m");
    fails(
        &run(&["compare", "--endpoint", &nobody]),
        1,
        &["no server listens there"],
    );
}

#[test]
fn servers_that_say_nothing_are_left() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let (mute, _heads) = fake(|_| thread::sleep(Duration::from_secs(60)));
    let (stalled, _heads) = fake(move |stream| {
        let _ = stream.write_all(format!("{head}{CHUNK}").as_bytes());
        thread::sleep(Duration::from_secs(60));
    });
    // Comments are no answer.
    let (commenting, _heads) = fake(move |stream| {
        let _ = stream.write_all(format!("{head}{CHUNK}").as_bytes());
        while stream.write_all(b": wait\n\n").is_ok() {
            thread::sleep(Duration::from_millis(50));
        }
    });
    for (address, words) in [
        (mute, "does not answer in time"),
        (stalled, "stalls after 1"),
        (commenting, "only comments"),
    ] {
        let output = run(&["compare", "--endpoint", &address, "--timeout", "1"]);
        fails(&output, 1, &[words]);
    }
}

#[test]
fn keys_go_where_they_belong() {
    let answer = format!("{CHUNK}data: [DONE]\n\n");
    let (first, first_heads) = fake(reply("200 OK", "text/event-stream", &answer));
    let (second, second_heads) = fake(reply("200 OK", "text/event-stream", &answer));
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("p");
    std::fs::write(&prompts, PROMPTS).unwrap();
    let both = [
        "compare",
        "--endpoint",
        &first,
        "--endpoint",
        &second,
        "--rounds",
        "1",
    ];
    let both = [&both[..], &["--prompts", prompts.to_str().unwrap()]].concat();
    let output = run(&[&both[..], &["--api-key", "one", "--api-key", "two"]].concat());
    // Nothing was counted but chunks, and one chunk has no speed.
    let text = stdout(&output);
    assert!(text.contains("chunks of text were counted"), "{text}");
    for (heads, key) in [(first_heads, "one"), (second_heads, "two")] {
        // Two prompts, a round and the one that is dropped.
        let heads: Vec<String> = heads.try_iter().collect();
        assert_eq!(heads.len(), 4);
        for head in heads {
            assert!(
                head.contains(&format!("authorization: bearer {key}\r\n")),
                "{head}"
            );
        }
    }
    let three = ["--api-key", "a", "--api-key", "b", "--api-key", "c"];
    let output = run(&[&both[..], &three].concat());
    fails(&output, 2, &["3 keys for 2 servers"]);
}
