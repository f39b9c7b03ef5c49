//! The promise: a sequence's bits depend on its tokens alone.

mod tiny;

use kozue_kernels::{Cpu, Isa};
use kozue_model::{Model, Outputs, Rows, Segment, State, Tree};
use proptest::prelude::*;
use tiny::{Tiny, all_kept};

/// Logits of every position of `tokens`, read one token at a time.
fn one_by_one(model: &Model, cpu: &Cpu, tokens: &[u32]) -> (Vec<u32>, State) {
    let mut state = model.new_state();
    let mut bits = Vec::new();
    for token in tokens {
        bits.extend(to_bits(
            &model.advance(cpu, &mut state, &[*token], 1).unwrap(),
        ));
    }
    (bits, state)
}

fn to_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// What a state remembers, seen through what it answers to a probe.
fn probe(model: &Model, cpu: &Cpu, state: &State) -> Vec<u32> {
    to_bits(
        &model
            .advance(cpu, &mut state.clone(), &[1, 2, 3], 3)
            .unwrap(),
    )
}

#[test]
fn bits_do_not_depend_on_threads_or_instruction_set() {
    for (name, kv) in all_kept() {
        let tiny = Tiny::open_kept(&name, kv);
        let tokens = &tiny.prompt("long").prompt;
        let (expected, _) = one_by_one(&tiny.model, &Cpu::new(Some(1)), tokens);
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let cpu = Cpu::with_isa(Some(threads), isa);
                let mut state = tiny.model.new_state();
                let logits = tiny
                    .model
                    .advance(&cpu, &mut state, tokens, tokens.len())
                    .unwrap();
                assert_eq!(
                    to_bits(&logits),
                    expected,
                    "{name}, {threads} threads, {isa:?}"
                );
            }
        }
    }
}

/// A snapshot within a chain is the state after so many tokens, whatever happens afterwards to
/// the state that it was taken of, and however many are taken; it goes into bytes and back.
#[test]
fn snapshots_do_not_depend_on_what_follows() {
    let cpu = Cpu::new(Some(2));
    for (name, kv) in all_kept() {
        let tiny = Tiny::open_kept(&name, kv);
        let tokens = tiny.prompt("long").prompt;
        let (before, rest) = tokens.split_at(5);
        for after in [&[1][..], &[7], &[rest.len()], &[0, 1, 7, 8, rest.len()]] {
            let mut state = tiny.model.new_state();
            tiny.model.advance(&cpu, &mut state, before, 0).unwrap();
            let segment = Segment {
                state: &mut state,
                rows: Rows::Chain(rest),
                logit_rows: 1,
                snapshots: after,
            };
            let mut output = tiny
                .model
                .pass(&cpu, &mut [segment], Outputs::default())
                .unwrap();
            let snapshots = output.snapshots.remove(0);
            assert_eq!(snapshots.len(), after.len());
            tiny.model.advance(&cpu, &mut state, &[3; 20], 1).unwrap();
            for (&rows, snapshot) in after.iter().zip(&snapshots) {
                let (_, expected) = one_by_one(&tiny.model, &cpu, &tokens[..5 + rows]);
                let expected = probe(&tiny.model, &cpu, &expected);
                assert_eq!(snapshot.len(), 5 + rows);
                let same =
                    |state| assert_eq!(probe(&tiny.model, &cpu, state), expected, "{name}, {rows}");
                same(snapshot);
                let mut bytes = Vec::new();
                snapshot.write_to(&mut bytes).unwrap();
                same(&tiny.model.read_state(&bytes).unwrap());
            }
        }
    }
}

#[test]
fn bytes_that_are_no_state_of_the_model_are_refused() {
    let cpu = Cpu::new(Some(1));
    let bytes = |name: &str| {
        let tiny = Tiny::open(name);
        let mut state = tiny.model.new_state();
        tiny.model.advance(&cpu, &mut state, &[1, 2, 3], 0).unwrap();
        let mut bytes = Vec::new();
        state.write_to(&mut bytes).unwrap();
        (tiny, bytes)
    };
    let (tiny, good) = bytes("qwen3_5");
    let said = |bytes: &[u8]| match tiny.model.read_state(bytes) {
        Ok(_) => panic!("taken for a state"),
        Err(error) => error.to_string(),
    };
    for cut in [0, 7, 12, 20, good.len() / 2, good.len() - 1] {
        assert!(said(&good[..cut]).ends_with("too few"), "{cut}");
    }
    let mut longer = good.clone();
    longer.push(0);
    assert!(said(&longer).ends_with("too many"));
    let (_, other) = bytes("qwen3_5-gva");
    assert!(said(&other).ends_with("another shape"));
    let (_, other) = bytes("llama");
    assert!(said(&other).ends_with("another shape"));
    // Another version; more tokens than the model holds.
    for (place, ends) in [(7, "another version"), (13, "than the model holds")] {
        let mut bad = good.clone();
        bad[place] ^= 1;
        assert!(said(&bad).ends_with(ends));
    }
}

#[test]
fn sequences_in_one_pass_do_not_depend_on_each_other() {
    let cpu = Cpu::new(Some(2));
    for (name, kv) in all_kept() {
        let tiny = Tiny::open_kept(&name, kv);
        let model = &tiny.model;
        let (long, short) = (tiny.prompt("long").prompt, tiny.prompt("short").prompt);
        let (long_bits, long_state) = one_by_one(model, &cpu, &long);
        let (short_bits, short_state) = one_by_one(model, &cpu, &short);
        let (mut a, mut b) = (model.new_state(), model.new_state());
        let mut segments = [
            Segment {
                state: &mut a,
                rows: Rows::Chain(&long),
                logit_rows: long.len(),
                snapshots: &[],
            },
            Segment {
                state: &mut b,
                rows: Rows::Chain(&short),
                logit_rows: short.len(),
                snapshots: &[],
            },
        ];
        let together = model.pass(&cpu, &mut segments, Outputs::default()).unwrap();
        let expected: Vec<u32> = long_bits.into_iter().chain(short_bits).collect();
        assert_eq!(to_bits(&together.logits), expected, "{name}");
        assert_eq!(
            probe(model, &cpu, &a),
            probe(model, &cpu, &long_state),
            "{name}"
        );
        assert_eq!(
            probe(model, &cpu, &b),
            probe(model, &cpu, &short_state),
            "{name}"
        );
    }
}

/// A window that ends within a tree's path hides the same positions as in plain decoding.
#[test]
fn windows_do_not_depend_on_where_a_tree_begins() {
    let cpu = Cpu::new(Some(2));
    for name in ["mistral", "gemma3"] {
        let tiny = Tiny::open(name);
        let tokens = tiny.prompt("long").prompt;
        let window = tiny
            .model
            .config()
            .attention
            .sliding
            .as_ref()
            .unwrap()
            .window;
        let (expected, _) = one_by_one(&tiny.model, &cpu, &tokens);
        let vocab = tiny.model.config().vocab_size;
        for before in [0, 1, window - 1, 60] {
            let (_, mut state) = one_by_one(&tiny.model, &cpu, &tokens[..before]);
            let mut tree = Tree::new(tokens[before]);
            // Every second node goes on; a wrong one stands beside it.
            let rest = &tokens[before + 1..before + 2 * window + 5];
            let mut right = vec![0];
            for &token in rest {
                let parent = right[right.len() - 1];
                tree.push(parent, token ^ 1).unwrap();
                tree.push(parent, token).unwrap();
                right.push(tree.len() - 1);
            }
            let segment = Segment {
                state: &mut state,
                rows: Rows::Tree(&tree),
                logit_rows: tree.len(),
                snapshots: &[],
            };
            let output = tiny.model.pass(&cpu, &mut [segment], Outputs::default());
            let logits = to_bits(&output.unwrap().logits);
            for (depth, node) in right.iter().enumerate() {
                let plain = &expected[(before + depth) * vocab..][..vocab];
                let ours = &logits[node * vocab..][..vocab];
                assert!(
                    ours == plain,
                    "{name}, {before} tokens before, depth {depth}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    /// However a prompt is split, every logit and the final state have the same bits.
    #[test]
    fn bits_do_not_depend_on_how_a_prompt_is_split(
        cuts in proptest::collection::vec(1usize..70, 1..8),
        model in 0usize..60,
    ) {
        let all = all_kept();
        let (name, kv) = &all[model % all.len()];
        let tiny = Tiny::open_kept(name, *kv);
        let cpu = Cpu::new(Some(2));
        let tokens = tiny.prompt("long").prompt;
        let (expected, expected_state) = one_by_one(&tiny.model, &cpu, &tokens);
        let mut state = tiny.model.new_state();
        let mut rest = tokens.as_slice();
        let mut bits = Vec::new();
        for cut in cuts.into_iter().chain([usize::MAX]) {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            bits.extend(to_bits(&tiny.model.advance(&cpu, &mut state, now, now.len()).unwrap()));
            rest = later;
        }
        prop_assert_eq!(bits, expected);
        prop_assert_eq!(state.len(), tokens.len());
        prop_assert_eq!(
            probe(&tiny.model, &cpu, &state),
            probe(&tiny.model, &cpu, &expected_state)
        );
    }

    /// Every node of a random tree has the logits of its path read one by one; the state is as
    /// before until the commit, and after it as if the path had been read one by one.
    #[test]
    fn trees_have_the_bits_of_their_paths(
        shape in proptest::collection::vec((any::<u32>(), 0u32..300), 0..24),
        prompt_len in 1usize..70,
        accepted in any::<u32>(),
        model in 0usize..60,
    ) {
        let all = all_kept();
        let (name, kv) = &all[model % all.len()];
        let tiny = Tiny::open_kept(name, *kv);
        let model = &tiny.model;
        let cpu = Cpu::new(Some(2));
        let prompt = &tiny.prompt("long").prompt[..prompt_len];
        let mut tree = Tree::new(7);
        for (parent, token) in shape {
            tree.push(parent as usize % tree.len(), token).unwrap();
        }
        let vocab = model.config().vocab_size;
        let (_, before) = one_by_one(model, &cpu, prompt);
        let mut state = before.clone();
        let segment =
            Segment { state: &mut state, rows: Rows::Tree(&tree), logit_rows: tree.len(), snapshots: &[] };
        let verified = model.pass(&cpu, &mut [segment], Outputs::default()).unwrap().logits;
        for node in 0..tree.len() {
            let path: Vec<u32> = tree.path(node).into_iter().map(|n| tree.tokens()[n]).collect();
            let plain = model.advance(&cpu, &mut before.clone(), &path, 1).unwrap();
            prop_assert_eq!(to_bits(&verified[node * vocab..][..vocab]), to_bits(&plain));
        }
        prop_assert_eq!(state.len(), prompt_len);
        prop_assert_eq!(probe(model, &cpu, &state), probe(model, &cpu, &before));

        let mut dropped = state.clone();
        dropped.commit(&cpu, &[]).unwrap();
        prop_assert_eq!(probe(model, &cpu, &dropped), probe(model, &cpu, &before));
        prop_assert!(dropped.commit(&cpu, &[0]).is_err());

        let path = tree.path(accepted as usize % tree.len());
        state.commit(&cpu, &path).unwrap();
        let mut plain = before;
        for node in path {
            model.advance(&cpu, &mut plain, &[tree.tokens()[node]], 0).unwrap();
        }
        prop_assert_eq!(state.len(), plain.len());
        prop_assert_eq!(probe(model, &cpu, &state), probe(model, &cpu, &plain));
    }
}
