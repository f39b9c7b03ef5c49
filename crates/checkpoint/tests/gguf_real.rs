//! Real GGUF files, by hand: `KOZUE_GGUF=a.gguf:b.gguf cargo test --release -p kozue-checkpoint
//! --test gguf_real -- --nocapture` prints how long loading took and what it lost.

use std::path::Path;
use std::time::Instant;

use kozue_checkpoint::Checkpoint;

#[test]
fn real_files_load_whole() {
    let Ok(list) = std::env::var("KOZUE_GGUF") else {
        return;
    };
    for path in list.split(':') {
        let start = Instant::now();
        let checkpoint = Checkpoint::open(Path::new(path)).unwrap_or_else(|e| panic!("{e}"));
        let opened = start.elapsed();
        let mut bytes = 0;
        for info in checkpoint.tensors() {
            if info.aside {
                continue;
            }
            match info.shape[..] {
                [n, k] if !info.name.contains("conv1d") => {
                    let matrix = checkpoint.matrix(&info.name, n, k);
                    bytes += matrix.unwrap_or_else(|e| panic!("{e}")).bytes();
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
        checkpoint.finish().unwrap_or_else(|e| panic!("{e}"));
        println!("{path}: opened in {opened:.2?}, loaded in {loaded:.2?}, {bytes} bytes");
        println!("  {:?}", checkpoint.description().config);
        println!("  {:?}", checkpoint.description().generation);
        for note in checkpoint.source_note() {
            println!("  {note}");
        }
    }
}
