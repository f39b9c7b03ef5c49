//! Any bytes as a GGUF file: an error, or a model of which every tensor can be asked for.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use kozue_checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;

/// A file of this process, in memory where the system has such a place.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let shared = PathBuf::from("/dev/shm");
    let folder = if shared.is_dir() {
        shared
    } else {
        std::env::temp_dir()
    };
    folder.join(format!("kozue-fuzz-{}.gguf", std::process::id()))
});

fuzz_target!(|data: &[u8]| {
    // A new file each time: the one before may still be mapped.
    let _ = fs::remove_file(&*FILE);
    fs::write(&*FILE, data).expect("the temporary file is writable");
    if let Ok(checkpoint) = Checkpoint::open(&FILE) {
        kozue_checkpoint::fuzzing::read_all(&checkpoint);
    }
});
