//! Models quantised to M and L: close to the floats they came from, and as exact as they are.

mod tiny;

use std::ops::ControlFlow;

use kozue_checkpoint::{Checkpoint, Options, Size, quantize};
use kozue_kernels::{Cpu, Isa, KvType};
use kozue_model::{Model, Outputs, Rows, Segment, Tree};
use tiny::{Tiny, all, folder};

fn quantised(name: &str, size: Size, group: usize) -> (tempfile::TempDir, Model) {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("model");
    let options = Options {
        size,
        head: None,
        group,
        force: false,
    };
    let mut go_on = |_: kozue_checkpoint::Progress<'_>| ControlFlow::Continue(());
    quantize(
        &Cpu::new(Some(2)),
        &folder().join(name),
        &target,
        options,
        &mut go_on,
    )
    .unwrap();
    let model = Model::load(&Checkpoint::open(&target).unwrap(), KvType::F16).unwrap();
    (parent, model)
}

/// Root mean square of a difference, relative to that of the reference.
fn relative_error(ours: &[f32], reference: &[f32]) -> f64 {
    let square = |v: f32| f64::from(v) * f64::from(v);
    let error: f64 = ours.iter().zip(reference).map(|(a, b)| square(a - b)).sum();
    (error / reference.iter().copied().map(square).sum::<f64>()).sqrt()
}

/// Random weights are the hardest case: no structure, and a residual stream in which every layer's
/// error counts in full. L stays within 5 per cent a layer. A step of 4 bits is 17 times one of 8 bits, so M
/// stays within 24 times what L loses.
#[test]
fn logits_stay_close_to_the_floats() {
    let cpu = Cpu::new(Some(2));
    for name in all() {
        let float = Tiny::open(&name);
        let tokens = float.prompt("short").prompt;
        let rows = tokens.len();
        let advance = |model: &Model| {
            model
                .advance(&cpu, &mut model.new_state(), &tokens, rows)
                .unwrap()
        };
        let reference = advance(&float.model);
        let error = |size: Size, group: usize| {
            let (_keep, model) = quantised(&name, size, group);
            relative_error(&advance(&model), &reference)
        };
        let l = error(Size::L, 64);
        println!("{name}: L {l:.4}");
        // A token on the border of two experts may change over, whatever the bits.
        let each = match float.model.config().experts {
            Some(_) => 0.1,
            None => 0.05,
        };
        let bound = each * float.model.config().layers.len() as f64;
        assert!((1e-4..bound).contains(&l), "{name} L: {l}");
        for group in [32, 64, 128] {
            let m = error(Size::M, group);
            println!("{name}: M, groups of {group} {m:.4}");
            assert!(
                (2.0 * l..24.0 * l).contains(&m),
                "{name} M, groups of {group}: {m}, L: {l}"
            );
        }
    }
}

/// Row counts, threads, instruction sets and trees: the same bits.
#[test]
fn bits_do_not_depend_on_rows_threads_or_instruction_set() {
    for (name, size) in [
        ("qwen3_5-gva", Size::M),
        ("qwen3_5-gva", Size::L),
        ("qwen2", Size::M),
        ("llama", Size::L),
        ("mistral", Size::M),
        ("qwen3_moe", Size::M),
        ("qwen3_5_moe", Size::L),
        ("gemma3", Size::L),
    ] {
        let (_keep, model) = quantised(name, size, 32);
        let tokens = Tiny::open(name).prompt("long").prompt;
        let mut state = model.new_state();
        let one = Cpu::with_isa(Some(1), Isa::Portable);
        let mut expected = Vec::new();
        for token in &tokens {
            expected.extend(model.advance(&one, &mut state, &[*token], 1).unwrap());
        }
        for isa in Isa::available() {
            for threads in [1, 3] {
                let cpu = Cpu::with_isa(Some(threads), isa);
                let mut state = model.new_state();
                let ours = model
                    .advance(&cpu, &mut state, &tokens, tokens.len())
                    .unwrap();
                let same = ours
                    .iter()
                    .zip(&expected)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{name} {size:?}, {threads} threads, {isa:?}");
            }
        }
        let cpu = Cpu::new(Some(2));
        let (before, rest) = tokens.split_at(40);
        let mut state = model.new_state();
        model.advance(&cpu, &mut state, before, 0).unwrap();
        let mut tree = Tree::new(rest[0]);
        for (i, token) in rest[1..17].iter().enumerate() {
            // A chain with a wrong sibling beside every right token.
            let right = tree.len() - 1 - usize::from(i > 0);
            tree.push(right, *token).unwrap();
            tree.push(right, token ^ 1).unwrap();
        }
        let segment = Segment {
            state: &mut state,
            rows: Rows::Tree(&tree),
            logit_rows: tree.len(),
            snapshots: &[],
        };
        let logits = model
            .pass(&cpu, &mut [segment], Outputs::default())
            .unwrap()
            .logits;
        let vocab = model.config().vocab_size;
        for (depth, node) in std::iter::once(0)
            .chain((1..tree.len()).step_by(2))
            .enumerate()
        {
            let ours = &logits[node * vocab..][..vocab];
            let plain = &expected[(40 + depth) * vocab..][..vocab];
            let same = ours
                .iter()
                .zip(plain)
                .all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name} {size:?}, node {node} of a tree");
        }
    }
}
