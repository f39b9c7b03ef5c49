//! Any bytes as weights in Kozue's own format: an error, or matrices that can be read.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

/// A directory of this process, in memory where the system has such a place.
static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let shared = PathBuf::from("/dev/shm");
    let folder = if shared.is_dir() {
        shared
    } else {
        std::env::temp_dir()
    };
    let dir = folder.join(format!("kozue-fuzz-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("the temporary folder is writable");
    dir
});

fuzz_target!(|data: &[u8]| {
    let file = DIR.join("model.safetensors");
    // A new file each time: the one before may still be mapped.
    let _ = fs::remove_file(&file);
    fs::write(&file, data).expect("the temporary file is writable");
    let _ = kozue_checkpoint::fuzzing::packed(&DIR);
});
