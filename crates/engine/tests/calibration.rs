//! Calibrated rounding: nearer to the source than rounding to the nearest, the same bytes whatever
//! the threads, and a run that was cut goes on.
#![allow(missing_docs)]

use kozue_checkpoint::{Options, Size, quantize};
use kozue_engine::calibration::{TEXT, calibrate};
use kozue_engine::evaluation::evaluate;
use kozue_engine::tokenizer::Control;
use kozue_engine::{Error, Loaded};
use kozue_kernels::{Cpu, KvType};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const M32: Options = Options {
    size: Size::M,
    head: None,
    group: 32,
    force: false,
};

fn tiny(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/reference/tiny/{name}"))
}

/// Part of the built-in text, and another part of it.
fn texts() -> (&'static str, &'static str) {
    let part = |from: usize, to: usize| {
        let whole = |at: usize| TEXT.floor_char_boundary(at);
        &TEXT[whole(from)..whole(to)]
    };
    (part(0, 3000), part(8000, 9500))
}

/// Calibrates and returns the stages that were told of.
fn run(
    source: &Path,
    target: &Path,
    threads: usize,
    text: &str,
    stop: Option<&str>,
) -> (Result<(), Error>, Vec<String>) {
    let mut stages: Vec<String> = Vec::new();
    let mut before = 0;
    let cpu = Cpu::new(Some(threads));
    let result = calibrate(&cpu, source, target, M32, text, &mut |progress| {
        assert!((before..=progress.total).contains(&progress.done));
        before = progress.done;
        stages.push(progress.tensor.to_string());
        match stop {
            Some(stop) if progress.tensor == stop => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    (result.map(|_| ()), stages)
}

fn kl(source: &Path, other: &Path, text: &str) -> f64 {
    let source = Loaded::open(source, Cpu::new(Some(2)), KvType::F32).unwrap();
    let other = source.beside(other, source.kv()).unwrap();
    let tokens = source.tokenizer.encode(text, Control::Text).unwrap();
    let (model, against) = (&other.model, Some(&source.model));
    let found = evaluate(model, against, None, &tokens, 128, &mut |_| ()).unwrap();
    found.against.unwrap().kl.value
}

fn weights(path: &Path) -> Vec<u8> {
    fs::read(path.join("model.safetensors")).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}

#[test]
fn every_family_comes_nearer_to_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let (text, other) = texts();
    for name in ["llama", "qwen2", "qwen3", "qwen3_5", "gemma3", "qwen3_moe"] {
        let source = tiny(name);
        let nearest = folder.path().join(format!("{name}-nearest"));
        let go_on = &mut |_: kozue_checkpoint::Progress<'_>| ControlFlow::Continue(());
        quantize(&Cpu::new(Some(2)), &source, &nearest, M32, go_on).unwrap();
        let target = folder.path().join(name);
        run(&source, &target, 2, text, None).0.unwrap();
        assert_eq!(weights(&nearest).len(), weights(&target).len());
        // Tiny random models are far off in 4 bits either way; real ones gain much more.
        let (before, after) = (kl(&source, &nearest, other), kl(&source, &target, other));
        assert!(after < 0.95 * before, "{name}: {after} of {before}");
    }
}

#[test]
fn bytes_do_not_depend_on_threads() {
    let folder = tempfile::tempdir().unwrap();
    let made = |threads: usize| {
        let target = folder.path().join(threads.to_string());
        run(&tiny("qwen3_5"), &target, threads, texts().0, None)
            .0
            .unwrap();
        weights(&target)
    };
    assert_eq!(made(1), made(3));
}

#[test]
fn a_run_that_was_cut_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let source = tiny("qwen3_5");
    let (text, other) = texts();
    let whole = folder.path().join("whole");
    run(&source, &whole, 2, text, None).0.unwrap();
    assert_eq!(names(folder.path()), ["whole"]);

    let target = folder.path().join("cut");
    let (cut, stages) = run(&source, &target, 2, text, Some("layer 2: inputs"));
    assert!(cut.is_err());
    assert!(stages.contains(&"layer 0: inputs".to_string()));
    assert_eq!(names(folder.path()), [".cut.calibration", "whole"]);
    let parts = folder.path().join(".cut.calibration");
    assert_eq!(names(&parts), ["0.part", "1.part", "identity", "stream"]);
    let told = |stages: &[String], stage: &str| stages.iter().any(|told| told == stage);
    // The text does not go through finished layers again.
    let (_, again) = run(&source, &target, 1, text, Some("layer 3: inputs"));
    assert!(!told(&again, "layer 0: outputs") && !told(&again, "layer 1: outputs"));
    assert!(told(&again, "layer 2: inputs"));
    // Unless nobody knows where it was.
    let stream = parts.join("stream");
    let mut bytes = fs::read(&stream).unwrap();
    bytes[5000] ^= 1;
    fs::write(&stream, bytes).unwrap();
    let (_, again) = run(&source, &target, 1, text, Some("layer 3: inputs"));
    assert!(told(&again, "layer 0: outputs") && !told(&again, "layer 2: inputs"));

    // A part that is damaged is made again, those after it are not.
    let path = parts.join("1.part");
    let mut bytes = fs::read(&path).unwrap();
    bytes[700] ^= 1;
    fs::write(&path, bytes).unwrap();
    fs::write(parts.join("3.tmp"), "cut off").unwrap();
    let (end, last) = run(&source, &target, 2, text, None);
    end.unwrap();
    assert!(told(&last, "layer 1: inputs") && !told(&last, "layer 2: inputs"));
    assert_eq!(weights(&whole), weights(&target));
    assert_eq!(names(folder.path()), ["cut", "whole"]);

    // With another text nothing is taken over.
    let target = folder.path().join("other");
    run(&source, &target, 2, text, Some("layer 2: inputs"))
        .0
        .unwrap_err();
    let (_, stages) = run(&source, &target, 2, other, Some("layer 1: inputs"));
    assert!(stages.contains(&"layer 0: inputs".to_string()));
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_keeps_what_is_done_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let source = tiny("qwen3");
    let (text, target) = (texts().0, folder.path().join("target"));
    // Nothing is done yet.
    let cut = run(&source, &target, 1, text, Some("layer 0: inputs")).0;
    assert!(!matches!(cut, Err(Error::Unfinished { .. })));
    assert_eq!(names(folder.path()), [""; 0]);
    run(&source, &target, 1, text, Some("layer 1: inputs"))
        .0
        .unwrap_err();
    let parts = folder.path().join(".target.calibration");
    std::os::unix::fs::symlink("/dev/full", parts.join("1.tmp")).unwrap();
    let full = run(&source, &target, 1, text, None).0.unwrap_err();
    assert!(matches!(full, Error::Unfinished { .. }));
    let (full, parts) = (full.to_string(), parts.display().to_string());
    for words in [
        &format!("{parts}/1.tmp: No space left on device"),
        &format!("finished layers are kept in {parts} and the same command goes on"),
    ] {
        assert!(full.contains(words), "{full}");
    }
    run(&source, &target, 1, text, None).0.unwrap();
    assert_eq!(names(folder.path()), ["target"]);
}

#[test]
fn what_cannot_be_calibrated_is_told_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target");
    let told = |source: &Path, target: &Path, text: &str| {
        run(source, target, 1, text, None)
            .0
            .unwrap_err()
            .to_string()
    };
    let drafter = tiny("../drafters/dflash-qwen3_5");
    let error = told(&drafter, &target, texts().0);
    assert!(
        error.contains("is a drafter; only models are calibrated"),
        "{error}"
    );
    let error = told(&tiny("qwen3"), &target, "too short");
    assert!(error.contains("too few to tell anything"), "{error}");
    assert!(names(folder.path()).is_empty());
    fs::create_dir(&target).unwrap();
    fs::write(target.join("thesis.txt"), "years of work").unwrap();
    let error = told(&tiny("qwen3"), &target, texts().0);
    assert!(error.contains("was not written by Kozue"), "{error}");
    // A folder of the name that its parts would have, and a user's.
    let parts = folder.path().join(".new.calibration");
    fs::create_dir(&parts).unwrap();
    fs::write(parts.join("thesis.txt"), "years of work").unwrap();
    let error = told(&tiny("qwen3"), &folder.path().join("new"), texts().0);
    assert!(error.contains("was not made by one"), "{error}");
    assert_eq!(names(&parts), ["thesis.txt"]);
}
