//! Tests of sampling.

use super::*;
use proptest::prelude::*;

fn with(change: impl FnOnce(&mut Sampling)) -> Sampling {
    let mut sampling = Sampling {
        temperature: 1.0,
        seed: 11,
        ..Sampling::greedy()
    };
    change(&mut sampling);
    sampling
}

fn sample_at(sampler: &mut Sampler, logits: &[f32], position: usize) -> u32 {
    let prompt = vec![0; position];
    sampler
        .sample(
            logits,
            History {
                prompt: &prompt,
                ..Default::default()
            },
        )
        .unwrap()
}

/// Tokens drawn at `draws` different positions, counted.
fn histogram(sampling: Sampling, logits: &[f32], draws: u64) -> Vec<u64> {
    let mut sampler = Sampler::new(sampling, logits.len()).unwrap();
    let mut counts = vec![0; logits.len()];
    for position in 0..draws {
        counts[sampler.draw(logits, position).unwrap() as usize] += 1;
    }
    counts
}

fn chi_square(counts: &[u64], probabilities: &[f64]) -> f64 {
    let draws = counts.iter().sum::<u64>() as f64;
    counts
        .iter()
        .zip(probabilities)
        .filter(|(_, p)| **p > 0.0)
        .map(|(&count, p)| (count as f64 - draws * p).powi(2) / (draws * p))
        .sum()
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let weights: Vec<f64> = logits
        .iter()
        .map(|l| (f64::from(*l) / temperature).exp())
        .collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

const LOGITS: [f32; 8] = [1.0, 0.2, -0.5, 2.0, 0.0, 1.5, -1.0, 0.7];

#[test]
fn frequencies_follow_softmax() {
    for temperature in [0.5, 1.0, 1.7] {
        let counts = histogram(with(|s| s.temperature = temperature), &LOGITS, 40_000);
        // 7 degrees of freedom: 29.9 is passed by chance once in 10,000.
        let statistic = chi_square(&counts, &softmax(&LOGITS, f64::from(temperature)));
        assert!(statistic < 29.9, "T={temperature}: {statistic}");
    }
}

#[test]
fn filtered_frequencies_follow_the_renormalised_softmax() {
    // Best three tokens: 3, 5, 0.
    let mut kept = softmax(&LOGITS, 1.0);
    for token in [1, 2, 4, 6, 7] {
        kept[token] = 0.0;
    }
    let total: f64 = kept.iter().sum();
    kept.iter_mut().for_each(|p| *p /= total);
    let counts = histogram(with(|s| s.top_k = Some(3)), &LOGITS, 40_000);
    assert_eq!([1, 2, 4, 6, 7].map(|t| counts[t]), [0; 5]);
    // 2 degrees of freedom: 18.4 is passed once in 10,000.
    assert!(chi_square(&counts, &kept) < 18.4);
}

#[test]
fn top_p_keeps_the_token_that_crosses_the_mass() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125]
        .iter()
        .map(|p| p.ln())
        .collect();
    let kept = |top_p: f32| -> Vec<bool> {
        histogram(with(|s| s.top_p = top_p), &logits, 2_000)
            .iter()
            .map(|c| *c > 0)
            .collect()
    };
    assert_eq!(kept(0.49), [true, false, false, false]);
    assert_eq!(kept(0.51), [true, true, false, false]);
    assert_eq!(kept(0.74), [true, true, false, false]);
    // Equal probabilities: the lower id is kept first.
    assert_eq!(kept(0.8), [true, true, true, false]);
    assert_eq!(kept(0.9), [true, true, true, true]);
    assert_eq!(kept(1e-6), [true, false, false, false]);
}

#[test]
fn top_p_counts_mass_within_top_k() {
    // After top-k 2 the shares are 2/3 and 1/3.
    let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125]
        .iter()
        .map(|p| p.ln())
        .collect();
    let both = |top_p: f32| {
        let sampling = with(|s| {
            s.top_k = Some(2);
            s.top_p = top_p;
        });
        histogram(sampling, &logits, 2_000)[1] > 0
    };
    assert!(!both(0.65));
    assert!(both(0.68));
}

#[test]
fn min_p_is_relative_to_the_best_and_after_temperature() {
    let logits = [0.0, -1.0, -2.0];
    let kept = |temperature: f32, min_p: f32| -> usize {
        let sampling = with(|s| {
            s.temperature = temperature;
            s.min_p = min_p;
        });
        histogram(sampling, &logits, 5_000)
            .iter()
            .filter(|c| **c > 0)
            .count()
    };
    assert_eq!(kept(1.0, 0.1), 3); // e^-2 = 0.135
    assert_eq!(kept(1.0, 0.2), 2); // e^-1 = 0.368
    assert_eq!(kept(1.0, 0.4), 1);
    assert_eq!(kept(2.0, 0.2), 3); // e^-1 again, at twice the temperature
    assert_eq!(kept(1.0, 1.0), 1);
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let mut sampler = Sampler::new(Sampling::greedy(), 5).unwrap();
    assert_eq!(sample_at(&mut sampler, &[1.0, 3.0, 3.0, 3.0, 2.0], 0), 1);
    assert_eq!(sample_at(&mut sampler, &[-1.0; 5], 0), 0);
}

#[test]
fn a_logit_that_is_no_number_is_an_error_naming_its_place() {
    for sampling in [
        Sampling::greedy(),
        with(|_| ()),
        with(|s| s.top_k = Some(1)),
    ] {
        let mut sampler = Sampler::new(sampling, 3).unwrap();
        let history = History {
            prompt: &[1, 2],
            ..Default::default()
        };
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(matches!(
                sampler.sample(&[0.0, 5.0, bad], history),
                Err(Error::BadLogits {
                    position: 2,
                    token: 2
                })
            ));
            assert!(matches!(
                sampler.sample(&[bad, 5.0, 1.0], history),
                Err(Error::BadLogits {
                    position: 2,
                    token: 0
                })
            ));
        }
        assert!(matches!(
            sampler.sample(&[f32::NEG_INFINITY; 3], history),
            Err(Error::NothingAllowed { position: 2 })
        ));
    }
}

#[test]
fn tokens_with_minus_infinity_are_never_drawn() {
    let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, -3.0];
    for sampling in [
        with(|_| ()),
        with(|s| s.top_k = Some(3)),
        with(|s| s.top_p = 0.999),
        with(|s| s.min_p = 1e-9),
        with(|s| s.temperature = 100.0),
    ] {
        let counts = histogram(sampling, &logits, 3_000);
        assert_eq!((counts[0], counts[2]), (0, 0));
    }
}

#[test]
fn bias_comes_before_penalties() {
    // 1 + 3 = 4, divided by 2 = 2 < 2.5. Were the penalty first: 0.5 + 3 > 2.5.
    let mut sampler = Sampler::new(
        Sampling {
            logit_bias: vec![(0, 3.0)],
            repetition_penalty: 2.0,
            ..Sampling::greedy()
        },
        2,
    )
    .unwrap();
    let history = History {
        prompt: &[0],
        ..Default::default()
    };
    assert_eq!(sampler.sample(&[1.0, 2.5], history).unwrap(), 1);
}

#[test]
fn repetition_counts_the_prompt_and_presence_and_frequency_do_not() {
    let logits = [2.0, 1.5];
    let history = History {
        prompt: &[0, 0, 0],
        ..Default::default()
    };
    let mut repetition = Sampler::new(
        Sampling {
            repetition_penalty: 2.0,
            ..Sampling::greedy()
        },
        2,
    )
    .unwrap();
    assert_eq!(repetition.sample(&logits, history).unwrap(), 1);
    let mut presence = Sampler::new(
        Sampling {
            presence_penalty: 9.0,
            ..Sampling::greedy()
        },
        2,
    )
    .unwrap();
    assert_eq!(presence.sample(&logits, history).unwrap(), 0);
    let answered = History {
        answer: &[0],
        ..history
    };
    assert_eq!(presence.sample(&logits, answered).unwrap(), 1);
    // Negative logits are multiplied: -1 * 2 < -1.5.
    assert_eq!(repetition.sample(&[-1.0, -1.5], history).unwrap(), 1);
}

#[test]
fn frequency_grows_with_the_count_and_presence_does_not() {
    let logits = [2.0, 1.0];
    let once = History {
        answer: &[0],
        ..Default::default()
    };
    let thrice = History {
        answer: &[0, 0, 0],
        ..Default::default()
    };
    let mut frequency = Sampler::new(
        Sampling {
            frequency_penalty: 0.5,
            ..Sampling::greedy()
        },
        2,
    )
    .unwrap();
    assert_eq!(frequency.sample(&logits, once).unwrap(), 0);
    assert_eq!(frequency.sample(&logits, thrice).unwrap(), 1);
    let mut presence = Sampler::new(
        Sampling {
            presence_penalty: 0.5,
            ..Sampling::greedy()
        },
        2,
    )
    .unwrap();
    assert_eq!(presence.sample(&logits, thrice).unwrap(), 0);
}

#[test]
fn the_window_forgets_older_tokens() {
    let windowed = |window| Sampling {
        repetition_penalty: 4.0,
        penalty_window: Some(window),
        ..Sampling::greedy()
    };
    let history = History {
        prompt: &[0, 2],
        answer: &[2, 2],
    };
    let mut short = Sampler::new(windowed(3), 3).unwrap();
    assert_eq!(short.sample(&[2.0, 1.0, 0.0], history).unwrap(), 0);
    let mut long = Sampler::new(windowed(4), 3).unwrap();
    assert_eq!(long.sample(&[2.0, 1.0, 0.0], history).unwrap(), 1);
    let mut none = Sampler::new(windowed(0), 3).unwrap();
    assert_eq!(none.sample(&[2.0, 1.0, 0.0], history).unwrap(), 0);
}

#[test]
fn tokens_outside_the_vocabulary_in_the_history_are_ignored() {
    let mut sampler = Sampler::new(
        Sampling {
            repetition_penalty: 2.0,
            ..Sampling::greedy()
        },
        2,
    )
    .unwrap();
    let history = History {
        prompt: &[7, u32::MAX],
        ..Default::default()
    };
    assert_eq!(sampler.sample(&[2.0, 1.5], history).unwrap(), 0);
}

proptest! {
    #[test]
    fn filters_that_keep_everything_change_nothing(
        values in proptest::collection::vec(-4f32..4.0, 33),
        position in 0u64..1_000_000,
    ) {
        let mut plain = Sampler::new(with(|_| ()), 33).unwrap();
        // A share so small that no token here falls below it.
        let mut filtered = Sampler::new(with(|s| s.min_p = 1e-6), 33).unwrap();
        let mut nucleus = Sampler::new(with(|s| s.top_p = 1.0 - f32::EPSILON), 33).unwrap();
        let token = plain.draw(&values, position).unwrap();
        prop_assert_eq!(token, filtered.draw(&values, position).unwrap());
        prop_assert_eq!(token, nucleus.draw(&values, position).unwrap());
    }

    #[test]
    fn nucleus_equals_the_definition(
        values in proptest::collection::vec(-6f32..6.0, 2..80),
        top_p in 0.05f32..0.99,
        top_k in proptest::option::of(1usize..90),
        temperature in 0.3f32..2.0,
    ) {
        let sampling = with(|s| {
            s.top_p = top_p;
            s.top_k = top_k;
            s.temperature = temperature;
        });
        let mut sampler = Sampler::new(sampling, values.len()).unwrap();
        sampler.draw(&values, 0).unwrap();
        let mut kept: Vec<u32> = sampler.candidates.iter().map(|c| c.token).collect();
        kept.sort_unstable();

        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
        order.truncate(top_k.unwrap_or(values.len()));
        let best = f64::from(values[order[0]]);
        let weight = |t: usize| ((f64::from(values[t]) - best) / f64::from(temperature)).exp();
        let total: f64 = order.iter().map(|t| weight(*t)).sum();
        let mut mass = 0.0;
        let needed = f64::from(top_p) * total;
        let mut expected = Vec::new();
        for &token in &order {
            // Too close to the border to tell which way rounding goes.
            prop_assume!((mass - needed).abs() > 1e-12 * total);
            if mass >= needed {
                break;
            }
            expected.push(token as u32);
            mass += weight(token);
        }
        expected.sort_unstable();
        prop_assert_eq!(kept, expected);
    }
}
