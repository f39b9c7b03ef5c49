use super::*;
use crate::delta::{delta_chain, delta_tree};
use crate::testing::{Tokens, assert_close, cpus, tree, used_state};
use proptest::prelude::*;

fn shapes() -> impl Strategy<Value = DeltaShape> {
    let dims = prop_oneof![(1usize..40, 1usize..70), Just((128, 128))];
    (1usize..3, 1usize..3, dims).prop_map(|(key_heads, groups, (key_dim, value_dim))| DeltaShape {
        key_heads,
        value_heads: key_heads * groups,
        key_dim,
        value_dim,
    })
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x as f64).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn the_solve_agrees_with_the_recurrence_on_chains(shape in shapes(), m in 1usize..150, seed: u64) {
        let tokens = Tokens::new(shape, m, seed);
        let start = used_state(shape, seed);
        let mut expected = vec![0.0; m * shape.values()];
        let mut after = start.clone();
        delta_chain(&Cpu::new(Some(1)), &mut after, tokens.rows(), &mut expected);
        for cpu in cpus() {
            let mut state = start.clone();
            let mut out = vec![f32::NAN; expected.len()];
            delta_solve_chain(&cpu, &mut state, tokens.rows(), &mut out);
            assert_close(&out, &wide(&expected), 1e-5);
            assert_close(state.data(), &wide(after.data()), 1e-5);
        }
    }

    #[test]
    fn the_solve_agrees_with_the_recurrence_on_trees(
        shape in shapes(), m in 1usize..512, spread in 0usize..20, seed: u64,
    ) {
        let tokens = Tokens::new(shape, m, seed);
        let start = used_state(shape, seed);
        let parents = tree(seed, m, spread);
        let mut expected = [vec![0.0; m * shape.values()], vec![0.0; m * shape.values()]];
        let [out, updates] = &mut expected;
        let cpu = Cpu::new(Some(1));
        delta_tree(&cpu, &start, tokens.rows(), &parents, out, updates);
        for cpu in [cpu, Cpu::new(Some(3))] {
            let mut got = [vec![f32::NAN; m * shape.values()], vec![f32::NAN; m * shape.values()]];
            let [out, updates] = &mut got;
            delta_solve_tree(&cpu, &start, tokens.rows(), &parents, out, updates);
            for (got, expected) in got.iter().zip(&expected) {
                assert_close(got, &wide(expected), 1e-5);
            }
        }
    }
}
