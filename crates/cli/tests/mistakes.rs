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
    fails(&run(&["run", "", "x"]), 2, &["name is empty"]);
    fails(&run(&["run", "--model", model]), 2, &["prompt is empty"]);
    let args = [
        "trace",
        " ",
        "--model",
        model,
        "-o",
        "/no/such/folder/a.html",
    ];
    fails(&run(&args), 2, &["prompt is empty"]);
    let args = ["run", model, "x", "--draft", "none", "--tree-budget", "4"];
    fails(&run(&args), 2, &["--draft none", "--tree-budget"]);
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    std::fs::write(&prompts, r#"{"category": "a", "prompt": ""}"#).unwrap();
    let args = [
        "bench",
        model,
        "--drafts",
        "--prompts",
        prompts.to_str().unwrap(),
    ];
    fails(&run(&args), 1, &["line 1", "prompt is empty"]);
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
    fails(
        &run(&["inspekt", "/no/such/model"]),
        2,
        &["inspekt", "did you mean kozue inspect?"],
    );
    fails(&run(&["-q", "run", "M", "x"]), 2, &["kozue run first"]);
    let folder = tempfile::tempdir().unwrap();
    // A copy of the program far from any models folder.
    let program = folder.path().join("kozue");
    std::fs::copy(env!("CARGO_BIN_EXE_kozue"), &program).unwrap();
    let output = loop {
        let output = Command::new(&program)
            .current_dir(folder.path())
            .env_remove("KOZUE_MODEL")
            .args(["run", "hello"])
            .stdin(Stdio::null())
            .output();
        match output {
            // A test that starts a program at this moment holds the copy open for writing.
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {}
            output => break output.unwrap(),
        }
    };
    fails(
        &output,
        1,
        &["KOZUE_MODEL", "scripts/fetch-model smollm2-135m"],
    );
}

#[test]
fn paths_that_cannot_be_followed_say_why() {
    let config = tiny("llama").join("config.json/");
    fails(
        &run(&["run", config.to_str().unwrap(), "x"]),
        1,
        &["config.json/", "a file, not a directory"],
    );
    let within = tiny("llama").join("config.json/model");
    fails(
        &run(&["inspect", within.to_str().unwrap()]),
        1,
        &["a file, not a directory"],
    );
    // A pipe is not waited for.
    fails(&run(&["run", "/dev/null", "x"]), 1, &["no regular file"]);
}

/// Whatever the limit: an answer, or one line and code 1; never a trace or a signal.
#[cfg(target_os = "linux")]
#[test]
fn too_little_memory_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let with = |kilobytes: u32, args: &[&str]| {
        Command::new("sh")
            .current_dir(folder.path())
            .args([
                "-c",
                "ulimit -v \"$0\"; exec \"$@\"",
                &kilobytes.to_string(),
            ])
            .arg(env!("CARGO_BIN_EXE_kozue"))
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let model = tiny("qwen3_5");
    let args = ["run", model.to_str().unwrap(), "hello", "-q", "-n", "4"];
    // Below this the system cannot even load the program.
    let least = (10..)
        .map(|megabytes| megabytes * 2048)
        .find(|least| with(*least, &["--version"]).status.success())
        .unwrap();
    let (mut refused, mut answered) = (0, 0);
    for step in 0..40 {
        let output = with(least + step * 3000, &args);
        if output.status.success() {
            answered += 1;
        } else {
            let text = stderr(&output).to_lowercase();
            fails(&output, 1, &[]);
            assert!(
                ["memory", "resource"]
                    .iter()
                    .any(|word| text.contains(word)),
                "{text}"
            );
            refused += 1;
        }
    }
    assert!(refused > 0 && answered > 0, "{refused} and {answered}");
}

#[cfg(unix)]
#[test]
fn what_may_not_be_read_is_not_called_missing() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(tiny("llama")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let mode = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let files = ["config.json", "model.safetensors", "tokenizer.json"];
    let places = files.map(|name| model.join(name));
    for place in places.iter().chain([&model, &folder.path().to_path_buf()]) {
        let (bad, good) = if place.is_dir() {
            (0, 0o755)
        } else {
            (0, 0o644)
        };
        mode(place, bad);
        let readable = std::fs::read_dir(place).is_ok() || std::fs::read(place).is_ok();
        let output = run(&["run", model.to_str().unwrap(), "x"]);
        mode(place, good);
        if readable {
            // The superuser may read everything.
            return;
        }
        fails(&output, 1, &["Permission denied"]);
    }
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
    let model = tiny("llama");
    let calibrate = ["--size", "M", "--calibrate", "/no/such/text"];
    let args = [
        &["quantize", model.to_str().unwrap(), "out"][..],
        &calibrate,
    ];
    fails(&run(&args.concat()), 1, &["/no/such/text: "]);
    let short = file("short.txt", b"too short");
    let calibrate = ["--size", "M", "--calibrate", &short];
    let args = [args[0], &calibrate];
    fails(
        &run(&args.concat()),
        1,
        &["short.txt: ", "give a longer one"],
    );
    let args = ["quantize", "--size", "M", "--calibrate", "a", "b"];
    fails(&run(&args), 2, &["--calibrate took a as its text"]);
}

#[test]
fn prompts_that_do_not_fit_are_counted() {
    let model = tiny("llama");
    let long = "word ".repeat(3000);
    let output = run(&["run", model.to_str().unwrap(), &long]);
    fails(&output, 1, &["the context holds 1024", "made for no more"]);
    let output = run(&["run", model.to_str().unwrap(), "--ctx", "500", &long]);
    fails(
        &output,
        1,
        &["the context holds 500", "raise --ctx", "1024"],
    );
}

#[test]
fn a_drafter_that_would_not_be_used_is_an_error() {
    let model = tiny("llama");
    let model = model.to_str().unwrap();
    for draft in ["lookup", "none", "mtp"] {
        let args = ["run", model, "x", "--draft", draft, "--draft-model", "/no"];
        fails(&run(&args), 1, &[draft, "--draft-model /no", "leave"]);
    }
    let args = ["bench", model, "--drafts", "-n", "1"];
    fails(&run(&args), 2, &["-n at least 2"]);
    let args = ["bench", model, "--draft", "lookup"];
    fails(&run(&args), 2, &["--drafts"]);
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
    #[cfg(unix)]
    fails(&run_with("/dev/zero"), 1, &["/dev/zero", "fits no context"]);
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
fn a_closed_standard_output_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new("sh")
        .current_dir(folder.path())
        .args(["-c", "exec \"$@\" >&-", "sh", env!("CARGO_BIN_EXE_kozue")])
        .args(["inspect", tiny("llama").to_str().unwrap()])
        .output()
        .unwrap();
    fails(&output, 1, &["standard output is closed"]);
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
