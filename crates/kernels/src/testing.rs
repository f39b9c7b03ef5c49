//! What the property tests of the layers have in common.

use crate::cpu::Cpu;
use crate::delta::{DeltaRows, DeltaShape, DeltaState, delta_chain};
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

/// Random tokens for Gated DeltaNet.
pub(crate) struct Tokens {
    pub(crate) shape: DeltaShape,
    mixed: Vec<f32>,
    pub(crate) alpha: Vec<f32>,
    beta: Vec<f32>,
}

impl Tokens {
    pub(crate) fn new(shape: DeltaShape, m: usize, seed: u64) -> Self {
        let mut mixed = values(seed, m * shape.mixed(), 1.0);
        let cpu = Cpu::new(Some(1));
        let [q, k] = shape.query_and_key_heads();
        crate::l2_norm_heads(&cpu, &mut mixed, q, 1e-6, (shape.key_dim as f32).powf(-0.5));
        crate::l2_norm_heads(&cpu, &mut mixed, k, 1e-6, 1.0);
        let unit = |seed| -> Vec<f32> {
            let x = values(seed, m * shape.value_heads, 0.5);
            x.into_iter().map(|x| x + 0.5).collect()
        };
        // Decays from none to almost all.
        let alpha = unit(seed ^ 1)
            .into_iter()
            .map(|x| 1.0 - x * x * x)
            .collect();
        Self {
            shape,
            mixed,
            alpha,
            beta: unit(seed ^ 2),
        }
    }

    pub(crate) fn rows(&self) -> DeltaRows<'_> {
        DeltaRows {
            mixed: &self.mixed,
            alpha: &self.alpha,
            beta: &self.beta,
        }
    }

    /// Only some rows, in the order given.
    pub(crate) fn pick(&self, rows: &[usize]) -> Self {
        let of = |x: &[f32], width: usize| -> Vec<f32> {
            rows.iter()
                .flat_map(|r| x[r * width..][..width].to_vec())
                .collect()
        };
        Self {
            shape: self.shape,
            mixed: of(&self.mixed, self.shape.mixed()),
            alpha: of(&self.alpha, self.shape.value_heads),
            beta: of(&self.beta, self.shape.value_heads),
        }
    }
}

/// A state that some tokens have been through.
pub(crate) fn used_state(shape: DeltaShape, seed: u64) -> DeltaState {
    let mut state = DeltaState::new(shape);
    let tokens = Tokens::new(shape, 5, seed ^ 99);
    let mut out = vec![0.0; 5 * shape.values()];
    delta_chain(&Cpu::new(Some(1)), &mut state, tokens.rows(), &mut out);
    state
}
