//! The tiny checkpoints that transformers wrote (`tests/reference/`): each opens, every tensor is
//! asked for, and each survives quantising.
#![allow(missing_docs)]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use kozue_checkpoint::{Checkpoint, Options, Size, quantize};
use kozue_kernels::Cpu;

fn checkpoints() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/tiny");
    let mut found: Vec<PathBuf> = fs::read_dir(&root)
        .unwrap_or_else(|error| panic!("{}: {error}", root.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("config.json").exists())
        .collect();
    found.sort();
    found
}

fn read_all(checkpoint: &Checkpoint) -> Vec<(String, Vec<f32>)> {
    let tensors = checkpoint.tensors();
    let read = tensors.into_iter().filter(|info| !info.aside).map(|info| {
        let len = info.shape.iter().product();
        (
            info.name.clone(),
            checkpoint.vector(&info.name, len).unwrap(),
        )
    });
    read.collect()
}

#[test]
fn all_open_and_quantise() {
    let all = checkpoints();
    assert!(all.len() >= 4, "only {} reference checkpoints", all.len());
    let root = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(Some(2));
    for path in all {
        let source = Checkpoint::open(&path).unwrap_or_else(|error| panic!("{error}"));
        assert!(
            source.description().chat_template.is_some(),
            "{}",
            path.display()
        );
        assert!(
            !source.description().generation.eos.is_empty(),
            "{}",
            path.display()
        );
        let before = read_all(&source);
        source.finish().unwrap();
        for (size, bound) in [(Size::M, 0.12), (Size::L, 0.01)] {
            let target = root
                .path()
                .join(format!("{}-{size:?}", source.description().name));
            let options = Options {
                size,
                head: None,
                group: 64,
                force: false,
            };
            let report = quantize(&cpu, &path, &target, options, &mut |_| {
                ControlFlow::Continue(())
            });
            let report = report.unwrap_or_else(|error| panic!("{error}"));
            for tensor in &report.tensors {
                let error = tensor.relative_error.unwrap_or(0.0);
                assert!(
                    error < bound,
                    "{}: {}: {error}",
                    path.display(),
                    tensor.name
                );
            }
            let packed = Checkpoint::open(&target).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(packed.description().config, source.description().config);
            let after = read_all(&packed);
            let names = |all: &[(String, Vec<f32>)]| -> Vec<(String, usize)> {
                all.iter()
                    .map(|(name, values)| (name.clone(), values.len()))
                    .collect()
            };
            assert_eq!(names(&after), names(&before));
        }
    }
}
