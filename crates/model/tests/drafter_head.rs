//! Drafters that use the embedding and head of a quantised target, which is tied and rotated.

mod drafted;
mod tiny;

use std::ops::ControlFlow;

use drafted::{Drafted, bits, logits, relative_error};
use kozue_checkpoint::{Checkpoint, Options, Size, quantize};
use kozue_kernels::{Cpu, KvType, Matrix, gathered};
use kozue_model::{DFlash, Model, WeaveNode, Weaver};
use tiny::folder;

fn quantised(cpu: &Cpu, name: &str, size: Size) -> (tempfile::TempDir, Model) {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("model");
    let options = Options {
        size,
        head: None,
        group: 64,
        force: false,
    };
    quantize(cpu, &folder().join(name), &target, options, &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    let model = Model::load(&Checkpoint::open(&target).unwrap(), KvType::F32).unwrap();
    (parent, model)
}

/// Weights and inputs of 8 bits each lose about half a per cent (a step is 1/127 of the largest of
/// 64 values, the error uniform), weights of 4 bits 17 times the former; a row that is rotated once
/// too often, or not at all, is 140 per cent off.
#[test]
fn a_packed_head_gives_what_the_plain_head_gives() {
    let cpu = Cpu::new(Some(2));
    for name in ["qwen3", "qwen3_5"] {
        let dflash = Drafted::open(&format!("dflash-{name}"));
        let plain = dflash.target(KvType::F32);
        assert!(plain.config().tied);
        let rows = dflash.tensor("hidden.3");
        let expected = logits(&cpu, &plain, &rows);
        for (size, bound) in [(Size::L, 0.015), (Size::M, 0.15)] {
            let (_keep, packed) = quantised(&cpu, name, size);
            let head = packed.head().matrices().next().unwrap();
            let Matrix::Packed(matrix) = head else {
                panic!("{name}: the head is not packed")
            };
            assert!(matrix.rotation().is_some());
            let ours = logits(&cpu, &packed, &rows);
            let error = relative_error(&ours, &expected);
            println!("{name}, {size:?}: head {error:.4}");
            assert!(error < bound, "{name}, {size:?}: {error}");

            // The rows of a shortlist have the bits of the full product.
            let (hidden, vocab) = (packed.config().hidden_size, packed.config().vocab_size);
            let ids = [319, 0, 7, 7, 200, 64];
            let mut scores = vec![0.0; ids.len()];
            gathered(&cpu, head, &rows[hidden..2 * hidden], &ids, &mut scores);
            let full = ids.map(|id| ours[vocab + id as usize]);
            assert_eq!(bits(&scores), bits(&full), "{name}, {size:?}");
        }
    }
}

/// The block's embeddings come out of the same packed matrix.
#[test]
fn drafts_on_packed_embeddings_stay_close() {
    let cpu = Cpu::new(Some(2));
    for name in ["qwen3", "qwen3_5"] {
        let drafted = Drafted::open(&format!("dflash-{name}"));
        let weaver = if name == "qwen3" { "learned" } else { "rotary" };
        let woven = Drafted::open(&format!("weaver-{weaver}"));
        let features = drafted.tensor("features");
        let draft = |target: &Model| {
            let dflash = DFlash::load(&drafted.drafter(), target).unwrap();
            let mut state = dflash.new_state();
            dflash.observe(&cpu, &mut state, &features);
            let rows = dflash
                .draft(&cpu, target, &mut state, 42, usize::MAX)
                .unwrap();
            let weaver = Weaver::load(&woven.drafter(), target).unwrap();
            let mut weave = weaver.begin(&cpu, &woven.tensor("final"), &rows);
            let root = WeaveNode {
                token: 42,
                ancestors: Vec::new(),
            };
            let query = weaver.expand(&cpu, target, &mut weave, &[root]).unwrap();
            (rows, query)
        };
        let (rows, query) = draft(&drafted.target(KvType::F32));
        let (_keep, packed) = quantised(&cpu, name, Size::L);
        let (ours, our_query) = draft(&packed);
        let errors = (
            relative_error(&ours, &rows),
            relative_error(&our_query, &query),
        );
        println!("{name}: {errors:?}");
        assert!(errors.0 < 0.02 && errors.1 < 0.02, "{name}: {errors:?}");
    }
}
