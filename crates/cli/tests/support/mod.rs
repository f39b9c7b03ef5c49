//! Running the program in tests.
#![allow(dead_code)]

pub mod server;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn tiny(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/reference/tiny")
        .join(name)
}

/// The program in an empty folder, without a default model and without the user's settings.
pub fn kozue(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kozue"));
    command
        .current_dir(folder)
        .env_remove("KOZUE_MODEL")
        .env("XDG_STATE_HOME", folder)
        .env("COLUMNS", "200")
        .stdin(Stdio::null());
    command
}

pub fn run(args: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    kozue(folder.path()).args(args).output().unwrap()
}

pub fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

pub fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// A failure is one line on standard error, nothing on standard output, and this code.
pub fn fails(output: &Output, code: i32, words: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    assert!(stdout(output).is_empty(), "{}", stdout(output));
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

pub fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}
