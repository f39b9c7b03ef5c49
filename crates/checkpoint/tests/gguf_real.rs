//! Real GGUF files, by hand: `KOZUE_GGUF=a.gguf:b.gguf cargo test --release -p kozue-checkpoint
//! --test gguf_real -- --nocapture` prints how long loading took and what it lost. With
//! `KOZUE_TOKENIZERS=DIR` the tokenizers that were made of the files are written there.
#![allow(missing_docs)]

use std::path::Path;
use std::time::Instant;

use kozue_checkpoint::Checkpoint;
use kozue_checkpoint::description::TokenizerSource;

#[test]
fn real_files_load_whole() {
    let Ok(list) = std::env::var("KOZUE_GGUF") else {
        return;
    };
    for path in list.split(':') {
        let start = Instant::now();
        let checkpoint = Checkpoint::open(Path::new(path)).unwrap_or_else(|e| panic!("{e}"));
        let opened = start.elapsed();
        if let Some(dir) = std::env::var_os("KOZUE_TOKENIZERS") {
            let name = Path::new(path).file_stem().expect("a file's name");
            let target = Path::new(&dir).join(name).with_extension("tokenizer.json");
            let (TokenizerSource::Gguf(text) | TokenizerSource::Json(text)) =
                &checkpoint.description().tokenizer;
            std::fs::write(target, text).expect("the tokenizer is written");
        }
        // As a model would, so that the process's memory can be looked at.
        let mut kept = Vec::new();
        for info in checkpoint.tensors() {
            if info.aside {
                continue;
            }
            match info.shape[..] {
                [n, k] if !info.name.contains("conv1d") => {
                    let matrix = checkpoint.matrix(&info.name, n, k);
                    kept.push(matrix.unwrap_or_else(|e| panic!("{e}")));
                }
                _ => {
                    let len = info.shape.iter().product();
                    checkpoint
                        .vector(&info.name, len)
                        .unwrap_or_else(|e| panic!("{e}"));
                }
            }
        }
        let loaded = start.elapsed();
        let bytes: usize = kept.iter().map(|matrix| matrix.bytes().len()).sum();
        checkpoint.finish().unwrap_or_else(|e| panic!("{e}"));
        println!("{path}: opened in {opened:.2?}, loaded in {loaded:.2?}, {bytes} bytes");
        println!("  {:?}", checkpoint.description().config);
        println!("  {:?}", checkpoint.description().generation);
        for note in checkpoint.source_notes() {
            println!("  {}", note.text);
        }
    }
}
