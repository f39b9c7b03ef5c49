//! The program as its users run it, on tiny random checkpoints.

use serde_json::Value;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn tiny(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/reference/tiny")
        .join(name)
}

/// The program in an empty folder, without a default model and without the user's settings.
fn kozue(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kozue"));
    command
        .current_dir(folder)
        .env_remove("KOZUE_MODEL")
        .env("XDG_STATE_HOME", folder)
        .env("COLUMNS", "200")
        .stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    kozue(folder.path()).args(args).output().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// A failure is one line on standard error, nothing on standard output, and this code.
fn fails(output: &Output, code: i32, words: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    assert!(stdout(output).is_empty(), "{}", stdout(output));
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

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

#[test]
fn mistakes_on_the_command_line_have_code_2() {
    let model = tiny("llama");
    let model = model.to_str().unwrap();
    for args in [
        &["run", model, "x", "--no-such-option"][..],
        &["run", model, "x", "--max-tokens", "0"],
        &["quantize", "a"],
        &["inspect", "a", "b"],
    ] {
        let output = run(args);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).starts_with("error: "),
            "{}",
            stderr(&output)
        );
    }
    fails(
        &run(&["run", model, "x", "-t", "-1"]),
        2,
        &["temperature", "0 or more", "-1"],
    );
    fails(
        &run(&["run", model, "x", "--top-p", "1.5"]),
        2,
        &["top-p", "1.5"],
    );
    fails(
        &run(&["run", model, "x", "--ctx", "99999999"]),
        2,
        &["--ctx", "1024"],
    );
    fails(&run(&["run", model, ""]), 2, &["prompt is empty"]);
    fails(&run(&["run", "--model", model]), 2, &["prompt is empty"]);
}

#[test]
fn a_missing_model_is_named_with_a_way_out() {
    for args in [
        &["run", "/no/such/model", "x"][..],
        &["run", "/no/such/model.gguf", "-m", "x"],
        &["inspect", "/no/such/model"],
        &["bench", "/no/such/model"],
    ] {
        fails(
            &run(args),
            1,
            &["/no/such/model", "scripts/fetch-model smollm2-135m"],
        );
    }
    let folder = tempfile::tempdir().unwrap();
    // A copy of the program far from any models folder.
    let program = folder.path().join("kozue");
    std::fs::copy(env!("CARGO_BIN_EXE_kozue"), &program).unwrap();
    let output = Command::new(&program)
        .current_dir(folder.path())
        .env_remove("KOZUE_MODEL")
        .args(["run", "hello"])
        .output()
        .unwrap();
    fails(
        &output,
        1,
        &["KOZUE_MODEL", "scripts/fetch-model smollm2-135m"],
    );
}

#[test]
fn damaged_models_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let file = |name: &str, bytes: &[u8]| {
        std::fs::write(path.join(name), bytes).unwrap();
        path.join(name).to_str().unwrap().to_string()
    };
    let empty = path.join("empty");
    std::fs::create_dir(&empty).unwrap();
    for model in [
        file(
            "noise.gguf",
            b"GGUF\x03\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff",
        ),
        file("short.gguf", b"GG"),
        file("text.txt", b"hello"),
        empty.to_str().unwrap().to_string(),
    ] {
        fails(&run(&["run", "--model", &model, "x"]), 1, &[]);
        fails(&run(&["inspect", &model]), 1, &[]);
        fails(&run(&["quantize", &model, "out", "--size", "M"]), 1, &[]);
    }
}

#[test]
fn prompts_that_do_not_fit_are_counted() {
    let model = tiny("llama");
    let long = "word ".repeat(3000);
    let output = run(&["run", model.to_str().unwrap(), &long]);
    fails(&output, 1, &["the context holds 1024", "--ctx"]);
}

#[test]
fn a_prompt_file_that_is_no_text_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bytes");
    std::fs::write(&file, [b'a', 0xff, 0xfe]).unwrap();
    let model = tiny("llama");
    let run_with = |file: &str| run(&["run", "--model", model.to_str().unwrap(), "-f", file]);
    fails(
        &run_with(file.to_str().unwrap()),
        1,
        &["not UTF-8", "byte 1"],
    );
    fails(&run_with("/no/such/file"), 1, &["/no/such/file"]);
}

/// `kozue run ... | head -1` ends quietly, and soon.
#[test]
fn a_reader_that_leaves_ends_the_answer_quietly() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = kozue(folder.path())
        .args([
            "run",
            tiny("llama").to_str().unwrap(),
            "hello",
            "--ignore-eos",
            "-t",
            "1",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0];
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut first).unwrap();
    drop(out);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let output = kozue(folder.path())
        .args([
            "run",
            tiny("llama").to_str().unwrap(),
            "hello",
            "-n",
            "4",
            "--ignore-eos",
        ])
        .stdout(std::fs::File::create("/dev/full").unwrap())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("cannot write the output"),
        "{}",
        stderr(&output)
    );
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

#[test]
fn inspect_shows_shapes_and_memory() {
    let model = tiny("qwen3_5");
    let output = run(&[
        "inspect",
        model.to_str().unwrap(),
        "--json",
        "--tensors",
        "--ctx",
        "100",
    ]);
    let shown = json(&output);
    assert_eq!(shown["architecture"], "Qwen3.5");
    assert_eq!(shown["vocab_size"], 320);
    assert_eq!(shown["memory"][0]["context"], 100);
    let tensors = shown["tensors"].as_array().unwrap();
    let sum: u64 = tensors
        .iter()
        .filter(|tensor| tensor["used"] == true)
        .map(|tensor| tensor["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(shown["weight_bytes"], sum);
    let text = run(&["inspect", model.to_str().unwrap()]);
    assert!(stdout(&text).contains("bits per weight"));
}

#[test]
fn a_quantised_model_runs_and_inspects() {
    let folder = tempfile::tempdir().unwrap();
    for (size, bits) in [("M", 4.0..12.0), ("l", 8.0..16.0)] {
        let target = folder.path().join(size);
        let target = target.to_str().unwrap();
        let model = tiny("qwen3");
        let output = run(&[
            "quantize",
            model.to_str().unwrap(),
            target,
            "--size",
            size,
            "--group",
            "32",
        ]);
        assert!(output.status.success(), "{}", stderr(&output));
        let report = stdout(&output);
        assert!(
            report.contains("model.layers.0.mlp.down_proj.weight"),
            "{report}"
        );
        assert!(report.contains("bits per weight"), "{report}");
        let shown = json(&run(&["inspect", target, "--json"]));
        let found = shown["bits_per_weight"].as_f64().unwrap();
        assert!(bits.contains(&found), "{found}");
        let answer = json(&run(&[
            "run",
            target,
            "hello",
            "--json",
            "-n",
            "5",
            "-t",
            "0",
            "--ignore-eos",
        ]));
        assert_eq!(answer["token_ids"].as_array().unwrap().len(), 5);
        // It is there now, so it is not made again by accident.
        let again = run(&["quantize", model.to_str().unwrap(), target, "--size", size]);
        fails(&again, 1, &[target]);
    }
}

#[test]
fn bench_measures_what_it_is_asked_for() {
    let model = tiny("qwen3_5");
    let model = model.to_str().unwrap();
    let few = [
        "--prefill",
        "8",
        "--depth",
        "4",
        "--rows",
        "1,3",
        "--repeat",
        "1",
        "--json",
    ];
    let shown = json(&run(&[&["bench", model], &few[..]].concat()));
    assert_eq!(shown["rows"][1]["rows"], 3);
    assert_eq!(shown["rows"][0]["ratio"], 1.0);
    assert_eq!(shown["prefill"][0]["tokens"], 8);
    assert_eq!(shown["decode"][0]["depth"], 4);
    for name in [
        "read_bandwidth_bytes_per_s",
        "integer_peak_macs_per_s",
        "bytes_per_pass",
    ] {
        assert!(shown[name].as_f64().unwrap() > 0.0, "{name}");
    }
    fails(
        &run(&["bench", model, "--prefill", "99999"]),
        2,
        &["99999", "1024"],
    );
}

#[test]
fn help_and_version() {
    for args in [
        &["--help"][..],
        &["help"],
        &["run", "--help"],
        &["--version"],
    ] {
        let output = run(args);
        assert!(
            output.status.success() && stdout(&output).contains("kozue"),
            "{args:?}"
        );
    }
}
