//! What goes wrong is one clear line and an exit code.

mod support;

use std::io::Read;
use std::process::{Command, Stdio};
use support::{fails, kozue, run, stderr, tiny};

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
