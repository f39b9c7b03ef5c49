//! Layers that see a window let what lies behind it go, and nobody can tell.

mod tiny;

use kozue_checkpoint::description::Mixer;
use kozue_kernels::{Cpu, KvType};
use kozue_model::{Model, Outputs, Rows, Segment, State, Tree};
use tiny::Tiny;

/// Several pages, far beyond the windows of the tiny models.
const LONG: usize = 900;

fn tokens() -> Vec<u32> {
    (0..LONG as u32).map(|i| i * i % 89).collect()
}

/// Reads rows in one pass, with a logit row for each and snapshots where they are wanted.
fn read(
    model: &Model,
    cpu: &Cpu,
    state: &mut State,
    rows: Rows,
    snapshots: &[usize],
) -> (Vec<u32>, Vec<State>) {
    let segment = Segment {
        state,
        rows,
        logit_rows: rows.tokens().len(),
        snapshots,
    };
    let mut segments = [segment];
    let mut output = model.pass(cpu, &mut segments, Outputs::default()).unwrap();
    let bits = output.logits.iter().map(|logit| logit.to_bits()).collect();
    (bits, output.snapshots.remove(0))
}

fn each_model(test: impl Fn(&Model, KvType, &Cpu)) {
    let cpu = Cpu::new(Some(2));
    for (name, kv) in [
        ("mistral", KvType::F16),
        ("gemma3", KvType::F32),
        ("gemma3", KvType::Int8),
    ] {
        test(&Tiny::open_kept(name, kv).model, kv, &cpu);
    }
}

#[test]
fn bits_do_not_depend_on_what_is_let_go() {
    each_model(|model, _, cpu| {
        let (tokens, vocab) = (tokens(), model.config().vocab_size);
        // In one pass nothing goes before its end.
        let mut whole = model.new_state();
        let (expected, _) = read(model, cpu, &mut whole, Rows::Chain(&tokens), &[]);
        let mut state = model.new_state();
        let mut at = 0;
        for count in [255, 1, 1, 300, 20, 323] {
            let chain = Rows::Chain(&tokens[at..at + count]);
            // Snapshots within the pass see back to where their own windows begin.
            let within = [count / 2, count];
            let (bits, snapshots) = read(model, cpu, &mut state, chain, &within[..]);
            assert_eq!(
                bits,
                expected[at * vocab..][..count * vocab],
                "{at}, {count}"
            );
            for (mut snapshot, after) in snapshots.into_iter().zip(within) {
                let mut bytes = Vec::new();
                snapshot.write_to(&mut bytes).unwrap();
                let mut stored = model.read_state(&bytes).unwrap();
                let place = at + after;
                let rest = &tokens[place..(place + 40).min(LONG)];
                if rest.is_empty() {
                    continue;
                }
                let expected = &expected[place * vocab..][..rest.len() * vocab];
                for state in [&mut snapshot, &mut stored] {
                    let (bits, _) = read(model, cpu, state, Rows::Chain(rest), &[]);
                    assert!(bits == expected, "snapshot after {place}");
                }
            }
            at += count;
        }
        assert_eq!(at, LONG);
        // A tree that begins far behind the first pages, its path committed, and on.
        let mut state = model.new_state();
        read(model, cpu, &mut state, Rows::Chain(&tokens[..600]), &[]);
        at = 600;
        while at + 60 < LONG {
            let mut tree = Tree::new(tokens[at]);
            let mut path = vec![0];
            for &token in &tokens[at + 1..at + 30] {
                tree.push(path[path.len() - 1], token ^ 1).unwrap();
                tree.push(path[path.len() - 1], token).unwrap();
                path.push(tree.len() - 1);
            }
            let (bits, _) = read(model, cpu, &mut state, Rows::Tree(&tree), &[]);
            for (depth, node) in path.iter().enumerate() {
                let plain = &expected[(at + depth) * vocab..][..vocab];
                assert!(bits[node * vocab..][..vocab] == *plain, "{at}, {depth}");
            }
            state.commit(cpu, &path).unwrap();
            at += path.len();
        }
        let rest = Rows::Chain(&tokens[at..]);
        let (bits, _) = read(model, cpu, &mut state, rest, &[]);
        assert!(bits == expected[at * vocab..], "after the trees");
    });
}

#[test]
fn a_sequence_holds_what_is_told() {
    each_model(|model, kv, cpu| {
        let mut state = model.new_state();
        for (index, chunk) in tokens().chunks(100).enumerate() {
            read(model, cpu, &mut state, Rows::Chain(chunk), &[]);
            let told = model.config().sequence_bytes(kv, 100 * (index + 1));
            let held = state.footprint().bytes() as u64;
            // Two pages where the window might lie across two, for one that it lies in.
            assert!(held <= told && told <= 2 * held, "{index}: {held}, {told}");
        }
        let all = model.config().layers.len() as u64;
        let page = model.config().sequence_bytes(kv, 1) / all;
        let sliding = model.config().count(Mixer::Sliding) as u64;
        // 900 tokens lie in four pages, the last 23 in one.
        let held = state.footprint().bytes() as u64;
        assert_eq!(held, page * (sliding + 4 * (all - sliding)));
    });
}
