//! Any text as a config.json: an error, or settings that survive being written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| kozue_checkpoint::fuzzing::config(data));
