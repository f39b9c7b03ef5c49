//! Every tiny checkpoint, run in f32, against what Hugging Face transformers computes on the same
//! weights: logits and residual streams in f64, greedy tokens in f32 (tests/reference/make_tiny.py).

mod tiny;

use kozue_kernels::Cpu;
use tiny::{Tiny, all, argmax};

/// Largest absolute difference that rounding to f32 may cause.
const TOLERANCE: f32 = 1e-4;

fn assert_close(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let worst = ours
        .iter()
        .zip(theirs)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(worst < TOLERANCE, "{what}: differs by {worst}");
}

#[test]
fn logits_and_greedy_tokens_equal_transformers() {
    let cpu = Cpu::new(Some(2));
    for name in all() {
        let tiny = Tiny::open(&name);
        for key in ["short", "long"] {
            let expected = tiny.prompt(key);
            let mut state = tiny.model.new_state();
            let tokens = &expected.prompt;
            let rows = tiny
                .model
                .advance(&cpu, &mut state, tokens, tokens.len())
                .unwrap();
            let vocab = tiny.model.config().vocab_size;
            for (row, theirs) in expected
                .logit_positions
                .iter()
                .zip(expected.prompt_logits.chunks_exact(vocab))
            {
                assert_close(
                    &rows[row * vocab..][..vocab],
                    theirs,
                    &format!("{name}, {key} prompt, position {row}"),
                );
            }
            let mut last = rows[rows.len() - vocab..].to_vec();
            for (step, &theirs) in expected.greedy.iter().enumerate() {
                if let Some(saved) = expected.logit_steps.iter().position(|&s| s == step) {
                    assert_close(
                        &last,
                        &expected.step_logits[saved * vocab..][..vocab],
                        &format!("{name}, {key} prompt, step {step}"),
                    );
                }
                let ours = argmax(&last);
                assert_eq!(ours, theirs, "{name}, {key} prompt, greedy token {step}");
                last = tiny.model.advance(&cpu, &mut state, &[ours], 1).unwrap();
            }
        }
    }
}

#[test]
fn residual_streams_equal_transformers() {
    let cpu = Cpu::new(Some(1));
    for name in all() {
        let tiny = Tiny::open(&name);
        let prompt = &tiny.prompt("short").prompt;
        let hidden = tiny.model.config().hidden_size;
        let layers = tiny.model.config().layers.len();
        let taps: Vec<usize> = (0..layers).collect();
        let mut state = tiny.model.new_state();
        let segment = kozue_model::Segment {
            state: &mut state,
            rows: kozue_model::Rows::Chain(prompt),
            logit_rows: prompt.len(),
            snapshots: &[],
        };
        let wanted = kozue_model::Outputs {
            taps: &taps,
            hidden: true,
        };
        let output = tiny.model.pass(&cpu, &mut [segment], wanted).unwrap();
        // transformers: [layers + 1, rows, hidden], the embedding first.
        let theirs = tiny.tensor("short.hidden");
        for layer in 0..layers {
            for row in 0..prompt.len() {
                assert_close(
                    &output.features[(row * layers + layer) * hidden..][..hidden],
                    &theirs[((layer + 1) * prompt.len() + row) * hidden..][..hidden],
                    &format!("{name}, after layer {layer}, row {row}"),
                );
            }
        }
        assert_close(&output.hidden, &tiny.tensor("short.final_norm"), &name);
    }
}
