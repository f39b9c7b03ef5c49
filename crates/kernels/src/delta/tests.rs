//! The recurrence against its documented order, bit by bit, and against f64.

use proptest::prelude::*;

use super::*;
use crate::lanes::{Portable, Simd};
use crate::testing::{Tokens, assert_close, cpus, path, tree, used_state};

fn matrix(state: &DeltaState, head: usize) -> Vec<Vec<f32>> {
    let shape = state.shape();
    (0..shape.key_dim)
        .map(|i| {
            (0..shape.value_dim)
                .map(|j| state.get(head, i, j))
                .collect()
        })
        .collect()
}

/// The published recurrence in f64: decay, delta rule, read. Returns outputs and states.
fn published(tokens: &Tokens, states: &mut [Vec<Vec<f64>>]) -> Vec<f64> {
    let shape = &tokens.shape;
    let m = tokens.alpha.len() / shape.value_heads;
    let mut out = vec![];
    for row in 0..m {
        for (head, state) in states.iter_mut().enumerate() {
            let t = tokens.rows().head(shape, head).at(row);
            state
                .iter_mut()
                .flatten()
                .for_each(|s| *s *= t.alpha as f64);
            for j in 0..shape.value_dim {
                let at = |x: &[f32], state: &[Vec<f64>]| -> f64 {
                    x.iter().zip(state).map(|(x, s)| *x as f64 * s[j]).sum()
                };
                let d = t.beta as f64 * (t.v[j] as f64 - at(t.k, state));
                for (k, s) in t.k.iter().zip(state.iter_mut()) {
                    s[j] += *k as f64 * d;
                }
                out.push(at(t.q, state));
            }
        }
    }
    out
}

/// The module's documentation, one number at a time. Returns outputs and the state after.
fn documented(tokens: &Tokens, head: usize, state: &mut [Vec<f32>]) -> Vec<Vec<f32>> {
    let shape = &tokens.shape;
    let m = tokens.alpha.len() / shape.value_heads;
    let sum = |x: &[f32], state: &[Vec<f32>], j: usize| {
        let mut sums = [0.0f32; 2];
        for (i, (x, s)) in x.iter().zip(state).enumerate() {
            sums[i % 2] = x.mul_add(s[j], sums[i % 2]);
        }
        sums[0] + sums[1]
    };
    (0..m)
        .map(|row| {
            let t = tokens.rows().head(shape, head).at(row);
            let qk = Portable.dot(t.q, t.k);
            (0..shape.value_dim)
                .map(|j| {
                    let (u, w) = (sum(t.k, state, j), sum(t.q, state, j));
                    let d = t.beta * (-t.alpha).mul_add(u, t.v[j]);
                    for (k, s) in t.k.iter().zip(state.iter_mut()) {
                        s[j] = k.mul_add(d, t.alpha * s[j]);
                    }
                    qk.mul_add(d, t.alpha * w)
                })
                .collect()
        })
        .collect()
}

fn shapes() -> impl Strategy<Value = DeltaShape> {
    (1usize..4, 1usize..4, 1usize..40, 1usize..70).prop_map(
        |(key_heads, groups, key_dim, value_dim)| DeltaShape {
            key_heads,
            value_heads: key_heads * groups,
            key_dim,
            value_dim,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_chain_matches_the_documented_order_however_it_is_split(
        shape in shapes(), m in prop_oneof![3 => 1usize..30, 1 => 60usize..140], cut in 0usize..70,
        seed: u64,
    ) {
        let tokens = Tokens::new(shape, m, seed);
        let start = used_state(shape, seed);
        let mut exact: Vec<Vec<Vec<f64>>> = (0..shape.value_heads)
            .map(|h| matrix(&start, h).iter().map(|r| r.iter().map(|&x| x as f64).collect()).collect())
            .collect();
        let exact_out = published(&tokens, &mut exact);
        let mut expected = vec![0.0; m * shape.values()];
        let mut after = vec![];
        for head in 0..shape.value_heads {
            let mut state = matrix(&start, head);
            for (row, o) in documented(&tokens, head, &mut state).into_iter().enumerate() {
                expected[row * shape.values() + head * shape.value_dim..][..shape.value_dim].copy_from_slice(&o);
            }
            after.push(state);
        }
        assert_close(&expected, &exact_out, 1e-5);
        for (after, exact) in after.iter().flatten().zip(exact.iter().flatten()) {
            assert_close(after, exact, 1e-5);
        }
        let cut = cut.min(m);
        let parts = [(0..cut).collect::<Vec<_>>(), (cut..m).collect()].map(|rows| tokens.pick(&rows));
        for cpu in cpus() {
            let mut state = start.clone();
            let mut out = vec![f32::NAN; m * shape.values()];
            delta_chain(&cpu, &mut state, tokens.rows(), &mut out);
            prop_assert_eq!(&out, &expected);
            for (head, after) in after.iter().enumerate() {
                prop_assert_eq!(&matrix(&state, head), after);
            }
            let mut split = start.clone();
            let (first, second) = out.split_at_mut(cut * shape.values());
            first.fill(0.0);
            second.fill(0.0);
            delta_chain(&cpu, &mut split, parts[0].rows(), first);
            delta_chain(&cpu, &mut split, parts[1].rows(), second);
            prop_assert_eq!(&out, &expected);
            prop_assert_eq!(&split, &state);
        }
    }

    #[test]
    fn every_path_of_a_tree_is_a_chain(
        shape in shapes(), m in 1usize..40, spread in 0usize..8, seed: u64, end in 0usize..40,
    ) {
        let tokens = Tokens::new(shape, m, seed);
        let parents = tree(seed, m, spread);
        let start = used_state(shape, seed);
        let mut first: Option<Vec<f32>> = None;
        for cpu in cpus() {
            let mut out = vec![f32::NAN; m * shape.values()];
            let mut updates = out.clone();
            let state = start.clone();
            delta_tree(&cpu, &state, tokens.rows(), &parents, &mut out, &mut updates);
            prop_assert_eq!(&state, &start, "the tree changed the state");
            if first.is_none() {
                for node in 0..m {
                    let path = path(&parents, node);
                    let mut chain_out = vec![0.0; path.len() * shape.values()];
                    delta_chain(&cpu, &mut start.clone(), tokens.pick(&path).rows(), &mut chain_out);
                    let last = chain_out.len() - shape.values();
                    prop_assert_eq!(&out[node * shape.values()..][..shape.values()], &chain_out[last..]);
                }
            }
            let path = path(&parents, end.min(m - 1));
            let mut chain = start.clone();
            delta_chain(&cpu, &mut chain, tokens.pick(&path).rows(), &mut vec![0.0; path.len() * shape.values()]);
            let mut moved = start.clone();
            delta_advance(&cpu, &mut moved, tokens.rows(), &updates, &path);
            prop_assert_eq!(&moved, &chain, "the commit differs from the chain");
            delta_advance(&cpu, &mut moved, tokens.rows(), &updates, &[]);
            prop_assert_eq!(&moved, &chain, "an empty path changed the state");
            prop_assert_eq!(first.get_or_insert_with(|| out.clone()), &out);
        }
    }
}

#[test]
fn ten_thousand_tokens_stay_finite() {
    let shape = DeltaShape {
        key_heads: 1,
        value_heads: 2,
        key_dim: 16,
        value_dim: 16,
    };
    let cpu = Cpu::new(Some(1));
    let mut tokens = Tokens::new(shape, 10_000, 7);
    // Heads that never forget and heads that forget everything.
    for alpha in tokens.alpha.chunks_exact_mut(2) {
        alpha.copy_from_slice(&[1.0, 0.0]);
    }
    let mut state = DeltaState::new(shape);
    let mut out = vec![0.0; 10_000 * shape.values()];
    delta_chain(&cpu, &mut state, tokens.rows(), &mut out);
    assert!(out.iter().all(|x| x.abs() < 100.0));
    assert_eq!(state.bytes(), 2 * 16 * 16 * 4);
    state.clear();
    assert_eq!(state, DeltaState::new(shape));
}
