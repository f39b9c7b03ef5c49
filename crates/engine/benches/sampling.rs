//! Time of one draw, by size of vocabulary and options: `cargo bench -p kozue-engine`.

use kozue_engine::sampler::{History, Sampler};
use kozue_engine::sampling::Sampling;
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 101;

/// Logits like a language model's: most far below a few.
fn logits(vocab_size: usize) -> Vec<f32> {
    let mut state = 1u64;
    (0..vocab_size)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let uniform = ((state >> 40) as f32 + 0.5) / (1 << 24) as f32;
            // A logistic distribution: tails up to about 17 above and below its middle.
            (uniform / (1.0 - uniform)).ln() * 1.2
        })
        .collect()
}

fn main() {
    let base = Sampling {
        temperature: 0.8,
        seed: 1,
        ..Sampling::greedy()
    };
    let options = [
        ("greedy", Sampling::greedy()),
        ("temperature", base.clone()),
        (
            "top-k 20, top-p 0.95",
            Sampling {
                top_k: Some(20),
                top_p: 0.95,
                ..base.clone()
            },
        ),
        (
            "top-p 0.95",
            Sampling {
                top_p: 0.95,
                ..base.clone()
            },
        ),
        (
            "min-p 0.05",
            Sampling {
                min_p: 0.05,
                ..base.clone()
            },
        ),
        (
            "penalties, top-k 20",
            Sampling {
                repetition_penalty: 1.1,
                presence_penalty: 0.5,
                top_k: Some(20),
                ..base
            },
        ),
    ];
    let history: Vec<u32> = (0..4096).collect();
    for vocab_size in [49_152, 151_936, 248_320] {
        let logits = logits(vocab_size);
        for (name, sampling) in &options {
            let mut sampler = Sampler::new(sampling.clone(), vocab_size).expect("valid options");
            let mut micros: Vec<f64> = (0..ROUNDS)
                .map(|round| {
                    let history = History {
                        answer: &history[..round * 40],
                        ..History::default()
                    };
                    let start = Instant::now();
                    black_box(
                        sampler
                            .sample(black_box(&logits), history)
                            .expect("good logits"),
                    );
                    start.elapsed().as_secs_f64() * 1e6
                })
                .collect();
            micros.sort_by(f64::total_cmp);
            println!("{vocab_size:>7}  {name:<22} {:>8.0} us", micros[ROUNDS / 2]);
        }
    }
}
