//! Any bytes as a GGUF file: opened, and if that works every tensor read.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| kozue_checkpoint::fuzzing::gguf(data));
