//! Names for answers and calls.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// `prefix` and 24 letters and digits, never the same twice.
pub fn new_id(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    // The standard library's hasher is keyed by the system's random numbers.
    let random = RandomState::new();
    let bits = u128::from(random.hash_one(count)) << 64 | u128::from(random.hash_one(!count));
    let letters = (0..24).map(|n| LETTERS[(bits >> (5 * n)) as usize & 31] as char);
    prefix.chars().chain(letters).collect()
}

/// A seed for a request that names none.
pub fn new_seed() -> u64 {
    RandomState::new().hash_one(0) >> 32
}
