use half::f16;
use proptest::prelude::*;

use super::*;
use crate::dense::{DenseKind, DenseMatrix};
use crate::hadamard::Rotation;
use crate::packed::tests::{any_codes, zeros};
use crate::packed::{PackedSpec, ZeroKind, pack};

/// Numbers in -1..1 that depend on `seed` only.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(99_991);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn random_packed(spec: PackedSpec, rotation: Option<Rotation>, seed: u64) -> PackedMatrix {
    let byte = |v: &f32| (v.abs() * f32::from(u8::MAX)) as u8 & ((1u16 << spec.bits) - 1) as u8;
    let half = |v: &f32| f16::from_f32(v * 0.02);
    let codes: Vec<u8> = noise(spec.n * spec.k, seed).iter().map(byte).collect();
    let groups = spec.n * spec.groups();
    let scales: Vec<f16> = noise(groups, seed + 1).iter().map(half).collect();
    let points: Vec<u8> = noise(groups, seed + 2).iter().map(byte).collect();
    let mins: Vec<f16> = noise(groups, seed + 3).iter().map(half).collect();
    let bytes = pack(&spec, &codes, &scales, zeros(&spec, &points, &mins)).unwrap();
    PackedMatrix::new(spec, rotation, bytes).unwrap()
}

fn random_dense(kind: DenseKind, n: usize, k: usize, seed: u64) -> DenseMatrix {
    let bytes: Vec<u8> = noise(n * k, seed)
        .iter()
        .flat_map(|&v| match kind {
            DenseKind::F32 => v.to_le_bytes().to_vec(),
            DenseKind::Bf16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
            DenseKind::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
        })
        .collect();
    DenseMatrix::new(kind, n, k, bytes).unwrap()
}

fn run(cpu: &Cpu, layer: &Linear, x: &[f32]) -> Vec<u32> {
    let mut out = vec![f32::NAN; x.len() / layer.inputs() * layer.outputs()];
    linear(cpu, layer, x, &mut out);
    out.iter().map(|v| v.to_bits()).collect()
}

/// The documented arithmetic of one output, written without any kernel.
fn documented(matrix: &PackedMatrix, x: &[f32], output: usize) -> f32 {
    let spec = matrix.spec();
    let mut x = x.to_vec();
    if let Some(rotation) = matrix.rotation() {
        rotation.forward(&mut x);
    }
    let mut acc = 0f32;
    for (g, x) in x.chunks(spec.group).enumerate() {
        let max = x.iter().fold(0f32, |max, v| max.max(v.abs()));
        let (scale, inverse) = if max == 0.0 {
            (0.0, 0.0)
        } else {
            (max / 127.0, 127.0 / max)
        };
        let (mut d, mut sum) = (0i64, 0i64);
        for (i, v) in x.iter().enumerate() {
            let code = (v * inverse).round_ties_even() as i64;
            d += code * i64::from(matrix.code(output, g * spec.group + i));
            sum += code;
        }
        d -= sum * i64::from(matrix.zero_point(output, g));
        acc = (d as f32).mul_add(scale * matrix.scale(output, g).to_f32(), acc);
        if spec.zero == ZeroKind::Min {
            acc = matrix
                .min(output, g)
                .to_f32()
                .mul_add(scale * sum as f32, acc);
        }
    }
    acc
}

/// One of each kind of packed matrix, with shapes that fill no tile and no group.
fn odd_specs() -> Vec<PackedSpec> {
    let mut specs = Vec::new();
    for bits in [4, 8] {
        for group in [32, 64, 128] {
            for zero in [ZeroKind::Symmetric, ZeroKind::Point, ZeroKind::Min] {
                specs.push(PackedSpec {
                    n: 150,
                    k: 352,
                    bits,
                    group,
                    zero,
                });
            }
        }
    }
    specs
}

#[test]
fn the_bits_do_not_depend_on_rows_threads_or_instruction_set() {
    let cpus: Vec<Cpu> = Isa::available()
        .into_iter()
        .flat_map(|isa| [1, 2, 3, 5].map(|threads| Cpu::with_isa(Some(threads), isa)))
        .collect();
    let rotation = Rotation::from_seed(352, 7).unwrap();
    let x = noise(67 * 352, 3);
    for (i, spec) in odd_specs().into_iter().enumerate() {
        let matrix = random_packed(spec, (i % 2 == 0).then(|| rotation.clone()), i as u64);
        let layer = Linear::new(vec![matrix.clone().into()], None).unwrap();
        let want: Vec<u32> = x
            .chunks(352)
            .flat_map(|x| (0..spec.n).map(|o| documented(&matrix, x, o).to_bits()))
            .collect();
        for cpu in &cpus {
            for m in [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 67] {
                // All rows for one thread count; the others see enough in a few.
                if cpu.threads() > 2 && ![1, 3, 17].contains(&m) {
                    continue;
                }
                let got = run(cpu, &layer, &x[..m * 352]);
                assert!(
                    got == want[..m * spec.n],
                    "{spec:?} {} {} threads {m} rows",
                    cpu.isa(),
                    cpu.threads()
                );
            }
        }
    }
}

#[test]
fn a_wide_layer_gives_the_same_bits_too() {
    // Long enough for every blocking of k, and several tiles a task.
    let spec = PackedSpec {
        n: 300,
        k: 2080,
        bits: 4,
        group: 64,
        zero: ZeroKind::Point,
    };
    let x = noise(40 * 2080, 5);
    for spec in [
        spec,
        PackedSpec {
            bits: 8,
            zero: ZeroKind::Symmetric,
            ..spec
        },
    ] {
        let matrix = random_packed(spec, None, 11);
        let layer = Linear::new(vec![matrix.clone().into()], None).unwrap();
        let want: Vec<u32> = x
            .chunks(2080)
            .flat_map(|x| (0..spec.n).map(|o| documented(&matrix, x, o).to_bits()))
            .collect();
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(Some(2), isa);
            for m in [1, 2, 7, 16, 40] {
                assert!(
                    run(&cpu, &layer, &x[..m * 2080]) == want[..m * 300],
                    "{isa} {m} rows"
                );
            }
        }
    }
}

#[test]
fn more_rows_than_are_taken_at_a_time_are_the_rows_one_by_one() {
    let spec = PackedSpec {
        n: 70,
        k: 64,
        bits: 4,
        group: 32,
        zero: ZeroKind::Point,
    };
    let layer = Linear::new(vec![random_packed(spec, None, 1).into()], None).unwrap();
    let x = noise((ROWS + 3) * 64, 2);
    for isa in Isa::available() {
        let cpu = Cpu::with_isa(Some(2), isa);
        let all = run(&cpu, &layer, &x);
        for row in [0, 1, 15, 16, 500, ROWS - 1, ROWS, ROWS + 2] {
            let one = run(&cpu, &layer, &x[row * 64..(row + 1) * 64]);
            assert_eq!(one, all[row * 70..(row + 1) * 70]);
        }
    }
}

#[test]
fn parts_of_every_kind_stand_side_by_side() {
    let k = 160;
    let rotation = Rotation::from_seed(k, 7).unwrap();
    let spec = PackedSpec {
        n: 70,
        k,
        bits: 4,
        group: 64,
        zero: ZeroKind::Point,
    };
    let parts: Vec<Matrix> = vec![
        random_packed(spec, Some(rotation.clone()), 1).into(),
        random_dense(DenseKind::Bf16, 9, k, 2).into(),
        random_packed(
            PackedSpec {
                n: 3,
                bits: 8,
                ..spec
            },
            Some(rotation),
            3,
        )
        .into(),
        random_packed(
            PackedSpec {
                group: 32,
                n: 64,
                ..spec
            },
            None,
            4,
        )
        .into(),
    ];
    let bias = noise(70 + 9 + 3 + 64, 5);
    let joint = Linear::new(parts.clone(), Some(bias.clone())).unwrap();
    assert_eq!((joint.inputs(), joint.outputs()), (k, bias.len()));
    assert_eq!(joint.views.len(), 2);
    let cpu = Cpu::new(Some(2));
    let m = 5;
    let x = noise(m * k, 6);
    let mut out = vec![f32::NAN; m * joint.outputs()];
    linear(&cpu, &joint, &x, &mut out);
    let mut first = 0;
    for part in parts {
        let n = part.n();
        let alone = Linear::new(vec![part], None).unwrap();
        let mut want = vec![f32::NAN; m * n];
        linear(&cpu, &alone, &x, &mut want);
        for row in 0..m {
            for i in 0..n {
                let got = out[row * joint.outputs() + first + i];
                assert_eq!(
                    got.to_bits(),
                    (want[row * n + i] + bias[first + i]).to_bits()
                );
            }
        }
        first += n;
    }
}

#[test]
fn dense_rows_do_not_depend_on_rows_threads_or_instruction_set() {
    for kind in [DenseKind::F32, DenseKind::Bf16, DenseKind::F16] {
        for k in [1, 15, 16, 50, 352] {
            let matrix = random_dense(kind, 37, k, 4);
            let layer = Linear::new(vec![matrix.clone().into()], None).unwrap();
            let x = noise(33 * k, 9);
            let want = run(&Cpu::with_isa(Some(1), Isa::Portable), &layer, &x);
            let mut weights = vec![0.0; k];
            for o in 0..37 {
                matrix.row_into(o, &mut weights);
                for (row, x) in x.chunks(k).enumerate() {
                    let exact: f64 = x
                        .iter()
                        .zip(&weights)
                        .map(|(a, b)| f64::from(*a) * f64::from(*b))
                        .sum();
                    let got = f32::from_bits(want[row * 37 + o]);
                    assert!((f64::from(got) - exact).abs() < 1e-5 * (k as f64).sqrt());
                }
            }
            for isa in Isa::available() {
                for threads in [1, 2, 3, 5] {
                    let cpu = Cpu::with_isa(Some(threads), isa);
                    for m in [1, 2, 3, 8, 17, 33] {
                        assert!(
                            run(&cpu, &layer, &x[..m * k]) == want[..m * 37],
                            "{isa} {m} {k}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_visible_and_tiny_inputs_are_zero() {
    let spec = PackedSpec {
        n: 70,
        k: 128,
        bits: 4,
        group: 64,
        zero: ZeroKind::Point,
    };
    let layer = Linear::new(vec![random_packed(spec, None, 1).into()], None).unwrap();
    for isa in Isa::available() {
        let cpu = Cpu::with_isa(Some(2), isa);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(2 * 128, 3);
            x[128 + 70] = bad;
            let mut out = vec![0.0; 2 * 70];
            linear(&cpu, &layer, &x, &mut out);
            assert!(out[..70].iter().all(|v| v.is_finite()));
            assert!(out[70..].iter().all(|v| v.is_nan()));
        }
        let mut out = vec![1.0; 70];
        linear(&cpu, &layer, &[1e-40; 128], &mut out);
        assert_eq!(out, [0.0; 70]);
    }
}

#[test]
fn shares_cover_every_tile_once() {
    for threads in [1, 2, 3, 5, 16, 64] {
        for total in [0, 1, 2, 3, 9, 14, 76, 192, 2374] {
            for least in [1, 3, 40] {
                let shares = Shares {
                    total,
                    threads,
                    least,
                };
                let mut next = 0;
                for share in 0..shares.count() {
                    let tiles = shares.share(share);
                    assert!(
                        tiles.start == next && tiles.end > tiles.start,
                        "{total} {threads} {share}"
                    );
                    next = tiles.end;
                }
                assert_eq!(next, total);
            }
        }
    }
}

#[test]
fn small_layers_are_shared_out_evenly() {
    let shares = |total, threads, least| {
        let shares = Shares {
            total,
            threads,
            least,
        };
        (0..shares.count())
            .map(|share| shares.share(share).len())
            .collect::<Vec<_>>()
    };
    assert_eq!(shares(12, 2, 3), [3, 3, 3, 3]);
    assert_eq!(shares(12, 2, 4), [6, 6]);
    assert_eq!(shares(56, 2, 3), [14, 14, 7, 7, 3, 3, 4, 4]);
    assert_eq!(shares(5, 4, 3), [2, 2, 1]);
}

#[test]
fn wrong_layers_are_refused() {
    let dense = |n, k| Matrix::from(random_dense(DenseKind::F32, n, k, 0));
    let error = |parts, bias| Linear::new(parts, bias).err().unwrap().to_string();
    assert_eq!(
        error(vec![], None),
        "a linear layer needs at least one matrix"
    );
    assert_eq!(
        error(vec![dense(2, 3), dense(2, 4)], None),
        "a linear layer joins matrices of 3 and 4 inputs"
    );
    assert_eq!(
        error(vec![dense(2, 3)], Some(vec![0.0; 3])),
        "a bias of 3 values does not fit 2 outputs"
    );
}

#[test]
fn no_rows_are_fine() {
    let layer = Linear::new(vec![random_dense(DenseKind::F32, 2, 3, 0).into()], None).unwrap();
    linear(&Cpu::new(Some(2)), &layer, &[], &mut []);
    let spec = PackedSpec {
        n: 70,
        k: 64,
        bits: 4,
        group: 32,
        zero: ZeroKind::Point,
    };
    let layer = Linear::new(vec![random_packed(spec, None, 1).into()], None).unwrap();
    linear(&Cpu::new(Some(2)), &layer, &[], &mut []);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn packed_products_follow_the_document_and_the_real_sum(
        (spec, codes, scales, points, mins) in any_codes(), m in 1usize..20, seed: u64,
    ) {
        let bytes = pack(&spec, &codes, &scales, zeros(&spec, &points, &mins)).unwrap();
        let matrix = PackedMatrix::new(spec, None, bytes).unwrap();
        let layer = Linear::new(vec![matrix.clone().into()], None).unwrap();
        let x = noise(m * spec.k, seed);
        let mut out = vec![f32::NAN; m * spec.n];
        linear(&Cpu::new(Some(2)), &layer, &x, &mut out);
        let mut weights = vec![0.0; spec.k];
        for o in 0..spec.n {
            matrix.row_into(o, &mut weights);
            for (row, x) in x.chunks(spec.k).enumerate() {
                let got = out[row * spec.n + o];
                prop_assert_eq!(got.to_bits(), documented(&matrix, x, o).to_bits());
                // Each activation is off by at most half a step of max / 127.
                let (mut exact, mut slack) = (0f64, 1e-4);
                for (x, w) in x.chunks(spec.group).zip(weights.chunks(spec.group)) {
                    let step = f64::from(x.iter().fold(0f32, |m, v| m.max(v.abs()))) / 127.0;
                    for (x, w) in x.iter().zip(w) {
                        exact += f64::from(*x) * f64::from(*w);
                        slack += 0.501 * step * f64::from(w.abs());
                    }
                    // Minima cancel large products in floating point.
                    slack += 1e-5 * step * 127.0 * w.len() as f64 * 300.0;
                }
                prop_assert!((f64::from(got) - exact).abs() <= slack, "{got} {exact} {slack}");
            }
        }
    }

    #[test]
    fn gathered_outputs_are_those_of_the_full_product(
        n in 1usize..200, m in 1usize..20, kind in 0usize..4, seed: u64,
        picks in proptest::collection::vec(any::<u32>(), 0..40),
    ) {
        let k = 96;
        let spec = PackedSpec { n, k, bits: 4, group: 32, zero: ZeroKind::Point };
        let seed = seed % 1000;
        let matrix: Matrix = match kind {
            0 => random_packed(spec, None, seed).into(),
            1 => random_packed(
                PackedSpec { bits: 8, group: 64, zero: ZeroKind::Symmetric, ..spec },
                Some(Rotation::from_seed(k, 1).unwrap()),
                seed,
            )
            .into(),
            2 => random_packed(PackedSpec { zero: ZeroKind::Min, ..spec }, None, seed).into(),
            _ => random_dense(DenseKind::F16, n, k, seed).into(),
        };
        let rows: Vec<u32> = picks.iter().map(|p| p % n as u32).collect();
        let x = noise(m * k, seed);
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(Some(2), isa);
            let full = run(&cpu, &Linear::new(vec![matrix.clone()], None).unwrap(), &x);
            let mut out = vec![f32::NAN; m * rows.len()];
            gathered(&cpu, &matrix, &x, &rows, &mut out);
            for row in 0..m {
                for (i, &pick) in rows.iter().enumerate() {
                    let want = full[row * n + pick as usize];
                    prop_assert_eq!(out[row * rows.len() + i].to_bits(), want);
                }
            }
        }
    }
}
