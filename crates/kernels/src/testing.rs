//! What the property tests of the layers have in common.

use crate::cpu::Cpu;
use crate::isa::Isa;
use crate::rows::Heads;

/// Counter-based noise (SplitMix64), so that a failing case is its seed.
pub(crate) fn noise(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// `n` values spread evenly over -`scale`..`scale`.
pub(crate) fn values(seed: u64, n: usize, scale: f32) -> Vec<f32> {
    (0..n as u64)
        .map(|i| ((noise(seed, i) >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale)
        .collect()
}

/// Heads with random gaps before, between and after them.
pub(crate) fn heads_in(seed: u64, count: usize, dim: usize) -> Heads {
    let gap = |i: u64| noise(seed, 1000 + i) as usize % 7;
    let (offset, pitch) = (gap(0), dim + gap(1));
    Heads {
        row: offset + count * pitch + gap(2),
        offset,
        pitch,
        count,
        dim,
    }
}

/// A random tree of `n` nodes, parents first, -1 above a root. `spread` 0 makes a chain.
pub(crate) fn tree(seed: u64, n: usize, spread: usize) -> Vec<i32> {
    (0..n)
        .map(|i| {
            let back = 1 + noise(seed, i as u64) as usize % (spread + 1);
            i as i32 - back.min(i + 1) as i32
        })
        .collect()
}

/// The nodes from a root to `node`, both included.
pub(crate) fn path(parents: &[i32], node: usize) -> Vec<usize> {
    let mut path = vec![];
    let mut at = node as i32;
    while at >= 0 {
        path.push(at as usize);
        at = parents[at as usize];
    }
    path.reverse();
    path
}

/// Every instruction set of this machine, on one thread and on three.
pub(crate) fn cpus() -> impl Iterator<Item = Cpu> {
    Isa::available()
        .into_iter()
        .flat_map(|isa| [1, 3].map(|threads| Cpu::with_isa(Some(threads), isa)))
}

/// Asserts that values agree with f64 ones to `tolerance` of the larger of 1 and their size.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let error = (*g as f64 - e).abs();
        assert!(
            error <= tolerance * e.abs().max(1.0),
            "value {i}: {g} for {e}"
        );
    }
}
