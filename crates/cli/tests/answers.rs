//! Answers on tiny random checkpoints, as a user asks for them.

mod support;

use serde_json::Value;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use support::{fails, json, kozue, run, stderr, stdout, tiny};

fn answer(extra: &[&str]) -> Value {
    let model = tiny("qwen3_5");
    let mut args = vec![
        "run",
        model.to_str().unwrap(),
        "hello",
        "--json",
        "-n",
        "12",
    ];
    args.extend(extra);
    json(&run(&args))
}

#[test]
fn json_has_the_documented_fields() {
    let answer = answer(&["--seed", "3", "--ignore-eos"]);
    assert!(answer["text"].is_string());
    assert_eq!(answer["token_ids"].as_array().unwrap().len(), 12);
    assert_eq!(answer["finish_reason"], "length");
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 5);
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    let stats = &answer["stats"];
    for name in [
        "time_to_first_token_s",
        "prefill_tokens_per_s",
        "generation_tokens_per_s",
        "tokens_per_forward_pass",
        "memory_bytes",
        "duration_s",
    ] {
        assert!(stats[name].as_f64().unwrap() > 0.0, "{name}");
    }
    assert_eq!(stats["forward_passes"], 11);
    assert!(stats["energy_j"].is_null() || stats["energy_j"].as_f64().unwrap() > 0.0);
    assert_eq!(answer["seed"], 3);
}

#[test]
fn a_seed_gives_one_answer_whatever_the_threads() {
    let hot = ["-t", "1.5", "--top-k", "0", "--top-p", "1", "--ignore-eos"];
    let with = |more: &[&str]| answer(&[&hot, more].concat())["token_ids"].clone();
    let first = with(&["--seed", "7", "--threads", "1"]);
    assert_eq!(first, with(&["--seed", "7", "--threads", "2"]));
    assert_ne!(first, with(&["--seed", "8"]));
}

#[test]
fn greedy_takes_no_notice_of_the_seed() {
    let first = answer(&["-t", "0", "--seed", "1"])["token_ids"].clone();
    assert_eq!(first, answer(&["-t", "0", "--seed", "2"])["token_ids"]);
}

#[test]
fn every_spelling_of_run_gives_the_same_answer() {
    let model = tiny("llama");
    let model = model.to_str().unwrap();
    let rest = ["-t", "0", "-n", "8", "--quiet"];
    let expected = run(&[&["run", model, "hello there"], &rest[..]].concat());
    assert!(expected.status.success(), "{}", stderr(&expected));
    assert!(!expected.stdout.is_empty() && expected.stderr.is_empty());
    for words in [
        &["run", "--model", model, "-m", "hello there"][..],
        &["--model", model, "-m", "hello there"],
        &["--model", model, "--message", "hello there"],
        &[model, "hello there"],
        &["run", "--model", model, "hello there"],
        &["run", model, "hello", "there"],
    ] {
        let output = run(&[words, &rest[..]].concat());
        assert_eq!(
            stdout(&output),
            stdout(&expected),
            "{words:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn prompts_come_from_files_and_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, "hello there").unwrap();
    let model = tiny("llama");
    let model = model.to_str().unwrap();
    let rest = ["-t", "0", "-n", "8", "--quiet"];
    let expected = run(&[&["run", model, "hello there"], &rest[..]].concat()).stdout;
    let from_file = run(&[&["run", model, "-f", file.to_str().unwrap()], &rest[..]].concat());
    assert_eq!(from_file.stdout, expected);
    for words in [
        &["run", "--model", model][..],
        &["run", model, "-"],
        &["run", model, "-f", "-"],
    ] {
        let mut child = kozue(folder.path())
            .args(words)
            .args(rest)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(b"hello there")
            .unwrap();
        assert_eq!(
            child.wait_with_output().unwrap().stdout,
            expected,
            "{words:?}"
        );
    }
}

/// `git diff | kozue run MODEL "Write a commit message for this:"`
#[test]
fn piped_text_follows_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("piped.txt");
    std::fs::write(&file, "piped").unwrap();
    let empty = folder.path().join("empty.txt");
    std::fs::write(&empty, "").unwrap();
    let model = tiny("llama");
    let answer = |words: &[&str], input: Option<&std::path::Path>| {
        let mut command = kozue(folder.path());
        command
            .args([
                "run",
                "--model",
                model.to_str().unwrap(),
                "--json",
                "-n",
                "1",
            ])
            .args(words);
        if let Some(input) = input {
            command.stdin(std::fs::File::open(input).unwrap());
        }
        json(&command.output().unwrap())["usage"]["prompt_tokens"].clone()
    };
    let prompt = file.to_str().unwrap();
    assert_eq!(
        answer(&["-m", "hello"], Some(&file)),
        answer(&["hello\n\npiped"], None)
    );
    assert_eq!(
        answer(&["hello", "-f", prompt], Some(&file)),
        answer(&["hello\n\npiped\n\npiped"], None)
    );
    // Read once where a word says where it goes.
    assert_eq!(
        answer(&["hello", "-f", "-"], Some(&file)),
        answer(&["hello\n\npiped"], None)
    );
    assert_eq!(answer(&["-"], Some(&file)), answer(&["piped"], None));
    assert_eq!(answer(&["hello"], Some(&empty)), answer(&["hello"], None));
}

#[test]
fn the_model_can_come_from_the_environment_or_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let rest = ["run", "hello", "-t", "0", "-n", "4", "--json"];
    let output = kozue(folder.path())
        .env("KOZUE_MODEL", tiny("qwen3"))
        .args(rest)
        .output()
        .unwrap();
    let named = json(&output)["token_ids"].clone();
    let models = folder.path().join("models/kozue-nano");
    std::fs::create_dir_all(&models).unwrap();
    for entry in std::fs::read_dir(tiny("qwen3")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), models.join(entry.file_name())).unwrap();
    }
    let output = kozue(folder.path()).args(rest).output().unwrap();
    assert_eq!(json(&output)["token_ids"], named);
}

#[test]
fn the_panel_follows_the_answer() {
    let model = tiny("qwen2");
    let output = run(&[
        "run",
        model.to_str().unwrap(),
        "hi",
        "-n",
        "4",
        "-t",
        "0.8",
        "--ignore-eos",
    ]);
    let text = stderr(&output);
    for name in [
        "time to first token",
        "prefill",
        "generation",
        "tokens per pass      1.00, 3 passes",
        "memory",
        "energy",
        "duration",
        "seed",
    ] {
        assert!(text.contains(name), "{name:?} is not in {text}");
    }
    assert!(stdout(&output).ends_with('\n'));
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = kozue(folder.path())
        .args([
            "run",
            tiny("llama").to_str().unwrap(),
            "hello",
            "--ignore-eos",
            "--json",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Long enough to have begun, too short for a thousand tokens in a test build; where the
    // answer was quicker, it is whole.
    std::thread::sleep(std::time::Duration::from_millis(400));
    let id = child.id().to_string();
    Command::new("kill").args(["-INT", &id]).status().unwrap();
    let mut text = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    let code = child.wait().unwrap().code();
    let answer: Value = serde_json::from_str(&text).unwrap();
    match code {
        Some(130) => assert_eq!(answer["finish_reason"], "cancelled"),
        _ => assert_eq!(answer["finish_reason"], "length"),
    }
}

#[test]
fn raw_text_is_continued_and_stop_strings_cut() {
    let model = tiny("llama");
    let model = model.to_str().unwrap();
    let base = [
        "run",
        model,
        "hello",
        "--raw",
        "--json",
        "-t",
        "0",
        "-n",
        "40",
        "--ignore-eos",
    ];
    let whole = json(&run(&base));
    let text = whole["text"].as_str().unwrap();
    // Three characters from the middle as the stop string.
    let middle: Vec<(usize, char)> = text.char_indices().collect();
    let at = middle[middle.len() / 2].0;
    let stop: String = text[at..].chars().take(3).collect();
    let cut = json(&run(&[&base[..], &["--stop", &stop]].concat()));
    assert_eq!(cut["finish_reason"], "stop");
    assert_eq!(
        cut["text"].as_str().unwrap(),
        &text[..text.find(&stop).unwrap()]
    );
}

#[test]
fn a_forbidden_token_does_not_come() {
    let greedy = answer(&["-t", "0", "--ignore-eos"]);
    let first = greedy["token_ids"][0].as_u64().unwrap();
    let bias = format!("{first}=-inf");
    let other = answer(&["-t", "0", "--ignore-eos", "--logit-bias", &bias]);
    let tokens = other["token_ids"].as_array().unwrap();
    assert!(tokens.iter().all(|token| token.as_u64() != Some(first)));
    let model = tiny("qwen3_5");
    let output = run(&[
        "run",
        model.to_str().unwrap(),
        "x",
        "--logit-bias",
        "99999=1",
    ]);
    fails(&output, 1, &["99999", "vocabulary"]);
}
