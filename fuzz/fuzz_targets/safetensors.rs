//! Any bytes as a safetensors file: an error or a header whose every range lies in the file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| kozue_checkpoint::fuzzing::safetensors(data));
