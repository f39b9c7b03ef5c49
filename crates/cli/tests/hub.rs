//! Models by name, through the program, from a hub on this machine.

#[path = "../../hub/tests/support/mod.rs"]
mod hub;
mod support;

use hub::{COMMIT, FakeHub, Fault, Published};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use support::{fails, json, stderr, stdout, tiny};

/// The files of a model's directory as a repository has them.
fn published(folder: &Path) -> Vec<Published> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            let bytes = fs::read(entry.path()).unwrap();
            let large = name.ends_with(".safetensors");
            Published::new(&name, bytes, large)
        })
        .collect()
}

fn gguf(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/gguf");
    fs::read(folder.join(name)).unwrap()
}

/// The program with a cache of its own in `folder`.
fn kozue(folder: &Path, server: &FakeHub, args: &[&str]) -> Output {
    command(folder, server).args(args).output().unwrap()
}

fn command(folder: &Path, server: &FakeHub) -> Command {
    let mut command = support::kozue(folder);
    for name in [
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "SSL_CERT_FILE",
    ] {
        command.env_remove(name);
    }
    command
        .env("NO_PROXY", "127.0.0.1")
        .env("HF_HOME", folder.join("hf"))
        .env("HF_ENDPOINT", &server.address);
    command
}

const ASK: [&str; 8] = [
    "-m",
    "Hello",
    "-n",
    "8",
    "-t",
    "0",
    "--json",
    "--ignore-eos",
];

#[test]
fn a_name_runs_as_its_directory_does() {
    let server = FakeHub::start(published(&tiny("llama")));
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ask = |model: &str, rest: &[&str]| {
        let mut args = vec!["run", model];
        args.extend(ASK);
        args.extend(rest);
        kozue(folder, &server, &args)
    };
    let expected = json(&ask(tiny("llama").to_str().unwrap(), &[]));
    let first = ask("org/name", &[]);
    assert_eq!(json(&first)["token_ids"], expected["token_ids"]);
    // What comes with no terminal to show it on is told in one line.
    let lines: Vec<&str> = stderr(&first)
        .lines()
        .filter(|l| l.contains("fetching"))
        .collect();
    assert!(
        matches!(lines[..], [line] if line.contains("fetching org/name, ")),
        "{lines:?}"
    );
    let snapshot = folder
        .join("hf/hub/models--org--name/snapshots")
        .join(COMMIT);
    assert!(snapshot.join("model.safetensors").exists());
    assert!(!snapshot.join("expected.json").exists());
    // From now on nobody is asked.
    server.seen();
    assert_eq!(
        json(&ask("org/name", &[]))["token_ids"],
        expected["token_ids"]
    );
    assert_eq!(server.seen(), []);
    // Every command knows the name, and drafters have names too.
    let output = kozue(folder, &server, &["inspect", "org/name"]);
    assert!(stdout(&output).contains("Llama"), "{}", stderr(&output));
    let output = kozue(
        folder,
        &server,
        &["quantize", "org/name", "packed", "--size", "L", "-q"],
    );
    assert!(output.status.success(), "{}", stderr(&output));
    let drafted = ask(
        "org/name",
        &["--draft", "model", "--draft-model", "org/name"],
    );
    assert_eq!(json(&drafted)["token_ids"], expected["token_ids"]);
    // A path wins.
    fs::create_dir_all(folder.join("org/name")).unwrap();
    fails(&ask("org/name", &[]), 1, &["org/name", "config.json"]);
}

#[test]
fn gguf_files_have_names_and_a_rule() {
    let server = FakeHub::start(vec![
        Published::new("llama-q4_0.gguf", gguf("llama-q4_0.gguf"), true),
        Published::new("llama-f16.gguf", gguf("llama3-rope-f16.gguf"), true),
        Published::new("llama-q8_0-00001-of-00002.gguf", "a part", true),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let run = |args: &[&str]| kozue(folder, &server, args);
    let output = run(&["pull", "org/name"]);
    let text = stdout(&output);
    assert!(
        text.contains("whole and checked (1 file,"),
        "{text}{}",
        stderr(&output)
    );
    assert!(
        text.trim_end()
            .ends_with(&format!("{COMMIT}/llama-q4_0.gguf")),
        "{text}"
    );
    let output = run(&["inspect", "org/name:llama-f16.gguf", "--json"]);
    assert!(json(&output)["name"].is_string());
    fails(
        &run(&["pull", "org/name:other.gguf"]),
        1,
        &["other.gguf", "llama-f16.gguf"],
    );
    let list = json(&run(&["list", "--json"]));
    let names: Vec<&str> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["org/name:llama-f16.gguf", "org/name:llama-q4_0.gguf"]
    );
    assert_eq!(list[1]["size_class"], "M");
    assert_eq!(list[0]["bytes"], gguf("llama3-rope-f16.gguf").len());
    fails(
        &run(&["rm", "org/name"]),
        2,
        &["--yes", "org/name, 2 files"],
    );
    let output = run(&["rm", "org/name:llama-q4_0.gguf", "--yes"]);
    assert!(stdout(&output).starts_with("removed org/name:llama-q4_0.gguf, 1 file"));
    let output = run(&["list"]);
    assert!(
        stdout(&output).contains("org/name:llama-f16.gguf"),
        "{}",
        stdout(&output)
    );
    assert!(!stdout(&output).contains("q4_0"), "{}", stdout(&output));
    assert!(run(&["rm", "-y", "org/name"]).status.success());
    assert!(stdout(&run(&["list"])).starts_with("no models in"));
    fails(&run(&["rm", "-y", "org/name"]), 1, &["not in the cache"]);
}

#[test]
fn mistakes_with_names_are_one_line() {
    let server = FakeHub::start(published(&tiny("llama")));
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let run = |args: &[&str]| kozue(folder, &server, args);
    fails(
        &run(&["run", "org/other", "hello"]),
        1,
        &["no file or folder org/other", "404"],
    );
    for command in ["pull", "rm"] {
        fails(
            &run(&[command, "../x"]),
            2,
            &["\"../x\"", "org/name:file.gguf"],
        );
    }
    let offline = command(folder, &server)
        .env("HF_HUB_OFFLINE", "1")
        .args(["run", "org/name", "hello"])
        .output();
    fails(&offline.unwrap(), 1, &["HF_HUB_OFFLINE"]);
    server.fault("model.safetensors", Fault::Flip(5000));
    let output = run(&["run", "org/name", "hello"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("model.safetensors was damaged"),
        "{}",
        stderr(&output)
    );
    assert!(!folder.join("hf/hub/models--org--name/snapshots").exists());
    let wrong = command(folder, &server)
        .env("HF_ENDPOINT", "hub.example")
        .args(["list"])
        .output();
    fails(&wrong.unwrap(), 1, &["HF_ENDPOINT", "https://"]);
}

#[test]
fn two_programs_at_once_fetch_once() {
    let server = FakeHub::start(published(&tiny("llama")));
    server.fault(
        "model.safetensors",
        Fault::Slow(std::time::Duration::from_millis(500)),
    );
    let folder = tempfile::tempdir().unwrap();
    let pull = || {
        command(folder.path(), &server)
            .args(["pull", "org/name"])
            .spawn()
            .unwrap()
    };
    let programs = [pull(), pull()];
    for program in programs {
        assert!(program.wait_with_output().unwrap().status.success());
    }
    let seen = server.seen();
    let fetched = seen
        .iter()
        .filter(|seen| seen.path.ends_with("/model.safetensors"));
    assert_eq!(fetched.count(), 1);
}
