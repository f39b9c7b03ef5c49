//! Rounding to the nearest against its bounds; rounding under a form against that, and against sums
//! in f64.

use super::*;
use crate::gram::Gram;
use crate::testing::{cpus, values};
use proptest::prelude::*;

/// Inputs with a few strong directions, as activations have.
fn inputs(seed: u64, rows: usize, k: usize) -> Vec<f32> {
    let directions = values(seed, 4 * k, 2.0);
    let weights = values(seed + 1, 4 * rows, 1.0);
    let mut x = values(seed + 2, rows * k, 0.3);
    for (row, weights) in x.chunks_exact_mut(k).zip(weights.chunks_exact(4)) {
        for (direction, weight) in directions.chunks_exact(k).zip(weights) {
            for (x, d) in row.iter_mut().zip(direction) {
                *x += weight * d;
            }
        }
    }
    x
}

fn form(cpu: &Cpu, x: &[f32], k: usize, rotation: Option<&Rotation>, group: usize) -> Quadratic {
    let gram = Gram::new(k);
    gram.add(cpu, x);
    Quadratic::new(cpu, &gram, rotation, group).unwrap()
}

/// What the codes stand for, less the weights, both rotated.
fn errors(cpu: &Cpu, found: &Quantized, rows: &[f32], rotation: Option<&Rotation>) -> Vec<f32> {
    let spec = *found.spec();
    let mut rotated = rows.to_vec();
    if let Some(rotation) = rotation {
        rotation.forward(&mut rotated);
    }
    let matrix = PackedMatrix::new(spec, None, found.pack(cpu).unwrap()).unwrap();
    let mut row = vec![0.0; spec.k];
    for (i, weights) in rotated.chunks_exact_mut(spec.k).enumerate() {
        matrix.row_into(i, &mut row);
        for (w, q) in weights.iter_mut().zip(&row) {
            *w = q - *w;
        }
    }
    rotated
}

fn total(form: &Quadratic, errors: &[f32]) -> f64 {
    errors.chunks_exact(form.k()).map(|e| form.cost(e)).sum()
}

#[test]
fn a_form_is_what_errors_do_to_outputs() {
    let cpu = Cpu::new(Some(2));
    let (k, rows) = (160, 400);
    let x = inputs(1, rows, k);
    let rotation = Rotation::from_seed(k, 5).unwrap();
    let form = form(&cpu, &x, k, Some(&rotation), 64);
    let mut rotated = x.clone();
    rotation.forward(&mut rotated);
    let error = values(9, k, 1.0);
    let square: f64 = rotated
        .chunks_exact(k)
        .map(|x| {
            let dot: f64 = x
                .iter()
                .zip(&error)
                .map(|(x, e)| f64::from(*x) * f64::from(*e))
                .sum();
            dot * dot
        })
        .sum();
    let mean = x.iter().map(|x| f64::from(x * x)).sum::<f64>() / k as f64;
    let damping: f64 = error.iter().map(|e| f64::from(e * e)).sum::<f64>() * 0.01;
    let expected = square / mean + damping;
    let got = form.cost(&error);
    assert!((got / expected - 1.0).abs() < 1e-4, "{got} for {expected}");
}

#[test]
fn codes_do_not_depend_on_threads_or_instruction_sets_or_slices() {
    let (k, n) = (224, 100);
    let x = inputs(4, 300, k);
    let rows = values(5, n * k, 0.1);
    let rotation = Rotation::from_seed(k, 1).unwrap();
    for quantizer in [Quantizer::int4(64).unwrap(), Quantizer::int8(128).unwrap()] {
        let mut first: Option<Vec<u8>> = None;
        for cpu in cpus() {
            let form = form(&cpu, &x, k, Some(&rotation), quantizer.group);
            let whole = quantizer
                .quantize_under(&cpu, &rows, k, Some(&rotation), &form)
                .unwrap();
            let part = quantizer
                .quantize_under(&cpu, &rows[64 * k..], k, Some(&rotation), &form)
                .unwrap();
            assert_eq!(whole.codes[64 * k..], part.codes);
            let bytes = whole.pack(&cpu).unwrap().to_vec();
            assert_eq!(*first.get_or_insert(bytes.clone()), bytes, "{}", cpu.isa());
        }
    }
}

#[test]
fn inputs_that_never_come_together_leave_each_weight_to_itself() {
    let cpu = Cpu::new(Some(1));
    let k = 64;
    let x: Vec<f32> = (0..k * k)
        .map(|i| f32::from(i % k == i / k) * (1 + i % 3) as f32)
        .collect();
    let form = form(&cpu, &x, k, None, 32);
    let quantizer = Quantizer::int4(32).unwrap();
    // Sixteen steps hit every code exactly.
    let steps: Vec<f32> = (0..2 * k).map(|i| (i % 16) as f32 / 8.0 - 1.0).collect();
    let exact = quantizer
        .quantize_under(&cpu, &steps, k, None, &form)
        .unwrap();
    assert_eq!(exact.error.squared_error, 0.0);
    let rows = values(3, 16 * k, 1.0);
    let found = quantizer
        .quantize_under(&cpu, &rows, k, None, &form)
        .unwrap();
    for (i, w) in rows.iter().enumerate() {
        let at = i / 32;
        let step = found.scales[at].to_f32();
        let ideal = w / step + f32::from(found.zeros[at]);
        let code = f32::from(found.codes[i]);
        assert!(
            (ideal.clamp(0.0, 15.0) - code).abs() < 0.5001,
            "{ideal}: {code}"
        );
    }
}

#[test]
fn forms_that_do_not_fit_are_refused() {
    let cpu = Cpu::new(Some(1));
    let new = |gram: &Gram, rotation: Option<&Rotation>| {
        let form = Quadratic::new(&cpu, gram, rotation, 64);
        form.err().map(|error| error.to_string())
    };
    let gram = Gram::new(64);
    assert_eq!(new(&gram, None).unwrap(), "no input was seen");
    gram.add(&cpu, &[0.0; 128]);
    let told = new(&gram, None).unwrap();
    assert_eq!(told, "its inputs were all zero, or not finite");
    gram.add(&cpu, &values(1, 128, 1.0));
    let rotation = Rotation::from_seed(96, 1).unwrap();
    let told = new(&gram, Some(&rotation)).unwrap();
    assert_eq!(told, "a rotation of width 96 does not fit 64 inputs");
    let form = Quadratic::new(&cpu, &gram, None, 64).unwrap();
    let quantizer = Quantizer::int4(32).unwrap();
    let told = quantizer.quantize_under(&cpu, &[0.0; 64], 64, None, &form);
    assert!(told.unwrap_err().to_string().contains("groups of 64"));
    let quantizer = Quantizer::int4(64).unwrap();
    let told = quantizer.quantize_under(&cpu, &[f32::NAN; 64], 64, None, &form);
    assert!(told.unwrap_err().to_string().contains("is NaN"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn outputs_lose_less_than_by_rounding_to_the_nearest(
        seed in 0u64..1 << 40, blocks in 1usize..7, n in 1usize..70, seen in 1usize..300,
        log_group in 5u32..8, eight in proptest::bool::weighted(0.2),
    ) {
        let cpu = Cpu::new(Some(2));
        let (k, group) = (32 * blocks, 1 << log_group);
        let quantizer = if eight { Quantizer::int8(group) } else { Quantizer::int4(group) }.unwrap();
        let rows = values(seed, n * k, 0.2);
        let rotation = Rotation::from_seed(k, seed).unwrap();
        let form = form(&cpu, &inputs(seed + 7, seen, k), k, Some(&rotation), group);
        let nearest = quantizer.quantize(&cpu, &rows, k, Some(&rotation)).unwrap();
        let found = quantizer.quantize_under(&cpu, &rows, k, Some(&rotation), &form).unwrap();
        let of = |found: &Quantized| total(&form, &errors(&cpu, found, &rows, Some(&rotation)));
        let (before, after) = (of(&nearest), of(&found));
        prop_assert!(after <= before, "{after} > {before}");
        // With several directions to choose from the gain is large.
        if k >= 128 && n >= 20 && !eight {
            prop_assert!(after < 0.6 * before, "{after} of {before}");
        }
        let plain: f64 = errors(&cpu, &found, &rows, Some(&rotation))
            .iter()
            .map(|e| f64::from(e * e))
            .sum();
        prop_assert!((plain / found.error.squared_error - 1.0).abs() < 1e-3);
    }
}

fn gaussian(count: usize, seed: u64) -> Vec<f32> {
    // Sums of twelve uniform numbers of a linear congruential generator.
    let mut state = seed;
    (0..count)
        .map(|_| {
            let sum: f32 = (0..12)
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (state >> 40) as f32 / (1u64 << 24) as f32
                })
                .sum();
            sum - 6.0
        })
        .collect()
}

#[test]
fn gaussian_weights_lose_what_the_bits_imply() {
    let cpu = Cpu::new(Some(2));
    let rows = gaussian(64 * 512, 5);
    // Bounds of the relative error of a good uniform quantiser of a Gaussian of this group.
    for (quantizer, low, high) in [
        (Quantizer::int4(32).unwrap(), 0.07, 0.088),
        (Quantizer::int4(64).unwrap(), 0.08, 0.098),
        (Quantizer::int4(128).unwrap(), 0.085, 0.108),
        (Quantizer::int8(64).unwrap(), 0.004, 0.0065),
    ] {
        let error = quantizer
            .quantize(&cpu, &rows, 512, None)
            .unwrap()
            .error
            .relative_rms();
        assert!((low..high).contains(&error), "{quantizer:?}: {error}");
    }
}

#[test]
fn the_reported_error_is_that_of_the_packed_matrix() {
    let cpu = Cpu::new(Some(2));
    let (n, k) = (70, 160);
    let rows = gaussian(n * k, 8);
    let rotation = Rotation::from_seed(k, 2).unwrap();
    for quantizer in [Quantizer::int4(64).unwrap(), Quantizer::int8(32).unwrap()] {
        let (matrix, error) = quantizer.matrix(&cpu, &rows, k, Some(&rotation)).unwrap();
        let mut row = vec![0.0; k];
        let (mut squared_error, mut norm) = (0.0, 0.0);
        for (i, want) in rows.chunks(k).enumerate() {
            matrix.row_into(i, &mut row);
            for (a, b) in row.iter().zip(want) {
                squared_error += f64::from(a - b).powi(2);
                norm += f64::from(*b).powi(2);
            }
        }
        let relative = (squared_error / norm).sqrt();
        assert!((relative - error.relative_rms()).abs() < 1e-4 * relative.max(0.01));
    }
}

#[test]
fn rotation_tames_an_outlier() {
    let cpu = Cpu::new(Some(1));
    let mut rows = gaussian(16 * 256, 1);
    for row in rows.chunks_mut(256) {
        row[7] = 60.0;
    }
    let rotation = Rotation::from_seed(256, 1).unwrap();
    let quantizer = Quantizer::int4(64).unwrap();
    let plain = quantizer.quantize(&cpu, &rows, 256, None).unwrap();
    let rotated = quantizer
        .quantize(&cpu, &rows, 256, Some(&rotation))
        .unwrap();
    let without_outlier = |q: &QuantError| q.squared_error;
    assert!(without_outlier(&rotated.error) < 0.7 * without_outlier(&plain.error));
}

#[test]
fn extremes_are_exact_or_refused() {
    let cpu = Cpu::new(Some(1));
    let quantizer = Quantizer::int4(32).unwrap();
    let zeros = quantizer.quantize(&cpu, &[0.0; 64], 64, None).unwrap();
    assert_eq!(zeros.error.relative_rms(), 0.0);
    // Fifteen steps of 1/8 hit every code exactly.
    let steps: Vec<f32> = (0..32).map(|i| (i % 16) as f32 / 8.0 - 1.0).collect();
    let exact = quantizer.quantize(&cpu, &steps, 32, None).unwrap();
    assert_eq!(exact.error.squared_error, 0.0);
    assert_eq!((exact.zeros[0], exact.scales[0].to_f32()), (8, 0.125));
    let mut rows = [1.0; 64];
    rows[33] = f32::NAN;
    let error = quantizer
        .quantize(&cpu, &rows, 32, None)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("weight 1 of row 1 is NaN"), "{error}");
    assert!(quantizer.quantize(&cpu, &[1e9; 32], 32, None).is_err());
    assert!(quantizer.quantize(&cpu, &[1.0; 33], 32, None).is_err());
    assert!(Quantizer::int4(48).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_weight_is_off_by_more_than_the_plain_rounding_allows(
        rows in proptest::collection::vec(-3f32..3.0, 200),
    ) {
        let cpu = Cpu::new(Some(1));
        for quantizer in [Quantizer::int4(64).unwrap(), Quantizer::int8(64).unwrap()] {
            let (matrix, error) = quantizer.matrix(&cpu, &rows, 100, None).unwrap();
            let spec = *matrix.spec();
            let mut row = vec![0.0; 100];
            let mut bound = 0.0;
            for r in 0..2 {
                matrix.row_into(r, &mut row);
                for w in rows[r * 100..(r + 1) * 100].chunks(64) {
                    // The search never does worse than the full range, whose error is at most
                    // about half a step, or a step where the zero point was rounded.
                    let range = w.iter().fold(0f32, |m, v| m.max(v.abs())) * 2.0;
                    let step = f64::from(range) / ((1 << spec.bits) - 2) as f64;
                    bound += w.len() as f64 * step * step;
                }
            }
            prop_assert!(error.squared_error <= bound, "{} > {bound}", error.squared_error);
        }
    }
}
