//! The kernel against its documented order of operations, bit by bit, and against f64.

use proptest::prelude::*;

use super::*;
use crate::kv_cache::rotate;
use crate::kv_cache::tests::stored;
use crate::lanes::{LANES, Portable};
use crate::testing::{assert_close, cpus, heads_in, noise, path, tree, values};

/// Every position's key and value of one kv head, as numbers with a scale each.
type Sequence<'a> = Vec<[(&'a [f32], f32); 2]>;

fn exp(x: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    Portable.store(Portable.exp(Portable.splat(x)), &mut lanes);
    lanes[0]
}

fn tree_sum(mut x: [f32; LANES]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            x[i] += x[i + width];
        }
    }
    x[0]
}

/// The module's documentation, one number at a time.
fn documented(kind: KvType, q: &[f32], sequence: &Sequence, first: usize, scale: f32) -> Vec<f32> {
    let mut q = q.to_vec();
    if kind == KvType::Int8 {
        rotate(&mut q);
    }
    let mut whole: Option<(f32, f32, Vec<f32>)> = None;
    for start in (0..sequence.len()).step_by(256) {
        let seen = start.max(first)..sequence.len().min(start + 256);
        if seen.is_empty() {
            continue;
        }
        let scores: Vec<f32> = sequence[seen.clone()]
            .iter()
            .map(|[(k, k_scale), _]| {
                q.iter().zip(*k).fold(0.0f32, |s, (q, k)| q.mul_add(*k, s)) * k_scale * scale
            })
            .collect();
        let m = scores.iter().fold(f32::NEG_INFINITY, |m, s| m.max(*s));
        let mut lanes = [0.0; LANES];
        let mut a = vec![0.0f32; q.len()];
        for (position, score) in seen.zip(&scores) {
            let p = exp(score - m);
            lanes[position % LANES] += p;
            let (v, v_scale) = sequence[position][1];
            for (a, v) in a.iter_mut().zip(v) {
                *a = (p * v_scale).mul_add(*v, *a);
            }
        }
        let l = tree_sum(lanes);
        whole = Some(match whole {
            None => (m, l, a),
            Some((m1, l1, a1)) => {
                let larger = m.max(m1);
                let (f1, f2) = (exp(m1 - larger), exp(m - larger));
                let a = a.iter().zip(&a1).map(|(a, a1)| a.mul_add(f2, a1 * f1));
                (larger, l.mul_add(f2, l1 * f1), a.collect())
            }
        });
    }
    let (_, l, a) = whole.unwrap();
    let mut out: Vec<f32> = a.iter().map(|a| a / l).collect();
    if kind == KvType::Int8 {
        rotate(&mut out);
    }
    out
}

/// Softmax attention in f64.
fn exact(q: &[f32], sequence: &[(&[f32], &[f32])], first: usize, scale: f32) -> Vec<f64> {
    let dot = |k: &[f32]| {
        q.iter()
            .zip(k)
            .map(|(a, b)| *a as f64 * *b as f64)
            .sum::<f64>()
    };
    let scores: Vec<f64> = sequence[first..]
        .iter()
        .map(|(k, _)| dot(k) * scale as f64)
        .collect();
    let m = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
    let weights: Vec<f64> = scores.iter().map(|s| (s - m).exp()).collect();
    let total: f64 = weights.iter().sum();
    (0..q.len())
        .map(|i| {
            let values = sequence[first..].iter().map(|(_, v)| v[i] as f64);
            values.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / total
        })
        .collect()
}

#[derive(Clone, Debug)]
struct Shape {
    kv_heads: usize,
    group: usize,
    dim: usize,
    kind: KvType,
}

fn shape() -> impl Strategy<Value = Shape> {
    let dim = prop_oneof![4 => 1usize..70, 1 => Just(64), 1 => Just(128), 1 => 250usize..270];
    let kind = prop_oneof![Just(KvType::F32), Just(KvType::F16), Just(KvType::Int8)];
    (1usize..4, 1usize..5, dim, kind).prop_map(|(kv_heads, group, dim, kind)| Shape {
        kv_heads,
        group,
        dim,
        kind,
    })
}

/// Keys and values of some slots; of each head what the cache keeps, and what that stands for.
struct Filled {
    shape: Shape,
    at: Heads,
    k: Vec<f32>,
    v: Vec<f32>,
    kept: [Vec<(Vec<f32>, f32)>; 2],
    meant: [Vec<Vec<f32>>; 2],
}

impl Filled {
    fn new(shape: &Shape, slots: usize, seed: u64, size: f32) -> Self {
        let at = Heads::packed(shape.kv_heads, shape.dim);
        let k = values(seed ^ 11, slots * at.row, size);
        let v = values(seed ^ 12, slots * at.row, 2.0);
        let kept = [&k, &v].map(|x| {
            x.chunks_exact(shape.dim)
                .map(|head| stored(shape.kind, head))
                .collect::<Vec<_>>()
        });
        let meant = |(numbers, scale): &(Vec<f32>, f32)| {
            let mut head: Vec<f32> = numbers.iter().map(|x| x * scale).collect();
            if shape.kind == KvType::Int8 {
                rotate(&mut head);
            }
            head
        };
        let meant = [0, 1].map(|of: usize| kept[of].iter().map(meant).collect());
        Self {
            shape: shape.clone(),
            at,
            k,
            v,
            kept,
            meant,
        }
    }

    fn cache(&self, cpu: &Cpu) -> KvCache {
        let mut cache = KvCache::new(self.shape.kv_heads, self.shape.dim, self.shape.kind);
        cache.write_rows(cpu, 0, (&self.k, self.at), (&self.v, self.at));
        cache
    }

    fn slots<'s>(seen: &Visible<'s>) -> impl Iterator<Item = usize> + use<'s> {
        (0..seen.prefix).chain(seen.tail.iter().map(|&t| t as usize))
    }

    /// What the cache keeps.
    fn sequence(&self, seen: &Visible, kv_head: usize) -> Sequence<'_> {
        let head = |slot| slot * self.shape.kv_heads + kv_head;
        Self::slots(seen)
            .map(|slot| [0, 1].map(|of: usize| &self.kept[of][head(slot)]))
            .map(|pair| pair.map(|(numbers, scale)| (&numbers[..], *scale)))
            .collect()
    }

    /// What that stands for.
    fn meant(&self, seen: &Visible, kv_head: usize) -> Vec<(&[f32], &[f32])> {
        Self::slots(seen)
            .map(|slot| slot * self.shape.kv_heads + kv_head)
            .map(|head| (&self.meant[0][head][..], &self.meant[1][head][..]))
            .collect()
    }
}

fn check(shape: &Shape, filled: &Filled, visible: &[Visible], seed: u64) {
    let heads = shape.kv_heads * shape.group;
    let q_at = heads_in(seed, heads, shape.dim);
    let q = values(seed ^ 21, visible.len() * q_at.row, 2.0);
    let scale = (shape.dim as f32).powf(-0.5);
    let mut expected = vec![];
    for (row, seen) in visible.iter().enumerate() {
        for head in 0..heads {
            let sequence = filled.sequence(seen, head / shape.group);
            let q = &q[q_at.range(row, head)];
            let documented = documented(shape.kind, q, &sequence, seen.first, scale);
            let meant = filled.meant(seen, head / shape.group);
            assert_close(&documented, &exact(q, &meant, seen.first, scale), 1e-4);
            expected.extend(documented);
        }
    }
    for cpu in cpus() {
        let cache = filled.cache(&cpu);
        let mut out = vec![f32::NAN; expected.len()];
        attention(&cpu, &cache, (&q, q_at), visible, scale, &mut out);
        for (i, (out, expected)) in out.iter().zip(&expected).enumerate() {
            assert!(
                out.to_bits() == expected.to_bits(),
                "{} value {i}: {out} for {expected}",
                cpu.isa()
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_prompt_matches_the_documented_order(
        shape in shape(), rows in 1usize..40, before in 0usize..600, seed: u64, size in 0.1f32..10.0,
    ) {
        let filled = Filled::new(&shape, before + rows, seed, size);
        let visible: Vec<Visible> = (0..rows)
            .map(|row| Visible { prefix: before + row + 1, ..Visible::default() })
            .collect();
        check(&shape, &filled, &visible, seed);
    }

    #[test]
    fn a_tree_matches_the_documented_order(
        shape in shape(), nodes in 1usize..40, before in 0usize..600, gap in 0usize..300,
        spread in 0usize..5, seed: u64,
    ) {
        // The nodes' keys lie anywhere after the prefix.
        let filled = Filled::new(&shape, before + gap + 2 * nodes, seed, 2.0);
        let parents = tree(seed, nodes, spread);
        let slot = |node: usize| (before + gap + 2 * node + (noise(seed, node as u64) % 2) as usize) as u32;
        let tails: Vec<Vec<u32>> = (0..nodes)
            .map(|node| path(&parents, node).into_iter().map(slot).collect())
            .collect();
        let visible: Vec<Visible> = tails.iter()
            .map(|tail| Visible { first: 0, prefix: before, tail })
            .collect();
        check(&shape, &filled, &visible, seed);
    }

    #[test]
    fn windows_match_the_documented_order(
        shape in shape(), rows in 1usize..20, before in 0usize..700, window in 1usize..400, seed: u64,
    ) {
        let filled = Filled::new(&shape, before + 2 * rows, seed, 2.0);
        let tail: Vec<u32> = (0..rows as u32).map(|i| before as u32 + 2 * i).collect();
        let visible: Vec<Visible> = (0..rows)
            .map(|row| Visible {
                first: before.saturating_sub(window + row),
                prefix: before,
                tail: &tail[..row + 1],
            })
            .collect();
        check(&shape, &filled, &visible, seed);
    }

    #[test]
    fn rows_that_have_nothing_in_common(shape in shape(), rows in 1usize..30, slots in 1usize..600, seed: u64) {
        let filled = Filled::new(&shape, slots, seed, 2.0);
        let pick = |i: usize, below: usize| noise(seed ^ 77, i as u64) as usize % below;
        let tails: Vec<Vec<u32>> = (0..rows)
            .map(|row| (0..pick(row, 9)).map(|i| pick(1000 + 10 * row + i, slots) as u32).collect())
            .collect();
        let visible: Vec<Visible> = tails.iter().enumerate()
            .map(|(row, tail)| {
                let prefix = pick(5000 + row, slots + 1).max(usize::from(tail.is_empty()));
                let first = pick(6000 + row, prefix + usize::from(!tail.is_empty()));
                Visible { first, prefix, tail }
            })
            .collect();
        check(&shape, &filled, &visible, seed);
    }
}

#[test]
fn a_long_context_is_split_over_threads_without_a_trace() {
    for kind in [KvType::F16, KvType::Int8] {
        a_long_context_is_split(kind);
    }
}

fn a_long_context_is_split(kind: KvType) {
    let shape = Shape {
        kv_heads: 1,
        group: 2,
        dim: 32,
        kind,
    };
    let filled = Filled::new(&shape, 9000, 5, 3.0);
    let tail: Vec<u32> = (8200..8960).collect();
    let visible = [
        Visible {
            prefix: 8999,
            ..Visible::default()
        },
        Visible {
            prefix: 1,
            ..Visible::default()
        },
        Visible {
            first: 0,
            prefix: 8200,
            tail: &tail,
        },
        Visible {
            first: 8100,
            prefix: 8200,
            tail: &tail,
        },
    ];
    check(&shape, &filled, &visible, 3);
    check(&shape, &filled, &visible[..1], 4);
}

#[test]
fn extreme_scores_stay_finite() {
    for kind in [KvType::F32, KvType::F16, KvType::Int8] {
        let cpu = Cpu::new(Some(1));
        let at = Heads::packed(1, 16);
        let rows = 600;
        // Scores of +-4e9 and more, the largest in the middle; values far beyond f16.
        let k: Vec<f32> = (0..rows)
            .flat_map(|i| {
                [if i == 300 {
                    6e4
                } else {
                    -6e4 + 100.0 * i as f32
                }; 16]
            })
            .collect();
        let v: Vec<f32> = (0..rows).flat_map(|i| [i as f32 * 1e3; 16]).collect();
        let mut cache = KvCache::new(1, 16, kind);
        cache.write_rows(&cpu, 0, (&k, at), (&v, at));
        for sign in [1.0f32, -1.0] {
            let q = [sign * 1e4; 16];
            let mut out = [f32::NAN; 16];
            let seen = Visible {
                prefix: rows,
                ..Visible::default()
            };
            attention(&cpu, &cache, (&q, at), &[seen], 1.0, &mut out);
            let winner = if sign > 0.0 { 300.0 } else { 0.0 };
            let expected: f32 = match kind {
                KvType::F16 => (winner * 1e3f32).min(65504.0),
                KvType::F32 | KvType::Int8 => winner * 1e3,
            };
            // Out of its scale a value comes back with a rounding.
            let close = |x: f32| kind == KvType::Int8 && (x - expected).abs() < 1e-6 * expected;
            assert!(
                out.iter().all(|&x| x == expected || close(x)),
                "{kind:?} {sign}: {out:?} for {expected}"
            );
        }
        // What is not a number is not hidden.
        let seen = Visible {
            prefix: rows,
            ..Visible::default()
        };
        let mut out = [0.0; 16];
        attention(&cpu, &cache, (&[f32::NAN; 16], at), &[seen], 1.0, &mut out);
        assert!(out.iter().all(|x| x.is_nan()));
    }
}

#[test]
fn many_rows_at_once_equal_one_row_at_a_time() {
    for kind in [KvType::F16, KvType::Int8] {
        many_rows_equal_one_at_a_time(kind);
    }
}

fn many_rows_equal_one_at_a_time(kind: KvType) {
    let shape = Shape {
        kv_heads: 2,
        group: 4,
        dim: 64,
        kind,
    };
    let filled = Filled::new(&shape, 512, 9, 2.0);
    let at = Heads::packed(8, 64);
    let q = values(4, 512 * at.row, 2.0);
    let visible: Vec<Visible> = (0..512)
        .map(|row| Visible {
            prefix: row + 1,
            ..Visible::default()
        })
        .collect();
    let cpu = Cpu::new(None);
    let cache = filled.cache(&cpu);
    let mut all = vec![0.0; q.len()];
    attention(&cpu, &cache, (&q, at), &visible, 0.125, &mut all);
    for part in [1, 7, 100, 255] {
        let mut split = vec![0.0; q.len()];
        for from in (0..512).step_by(part) {
            let rows = from..512.min(from + part);
            let range = rows.start * at.row..rows.end * at.row;
            attention(
                &cpu,
                &cache,
                (&q[range.clone()], at),
                &visible[rows],
                0.125,
                &mut split[range],
            );
        }
        assert!(all == split, "{part} rows at a time");
    }
}

#[test]
fn eight_bits_are_near_halves_though_a_channel_is_large() {
    let (rows, dim) = (700, 128);
    let at = Heads::packed(1, dim);
    let cpu = Cpu::new(Some(1));
    let mut k = values(1, rows * dim, 1.0);
    // As the keys of some models with biases: one channel is a hundred times the others.
    k.iter_mut().skip(17).step_by(dim).for_each(|x| *x += 100.0);
    let v = values(2, rows * dim, 1.0);
    let q = values(3, dim, 3.0);
    let seen = Visible {
        prefix: rows,
        ..Visible::default()
    };
    let out = [KvType::F16, KvType::Int8].map(|kind| {
        let mut cache = KvCache::new(1, dim, kind);
        cache.write_rows(&cpu, 0, (&k, at), (&v, at));
        let mut out = vec![0.0; dim];
        attention(&cpu, &cache, (&q, at), &[seen], 0.088, &mut out);
        out
    });
    let norm = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
    let apart: Vec<f32> = out[0].iter().zip(&out[1]).map(|(a, b)| a - b).collect();
    let relative = norm(&apart) / norm(&out[0]);
    assert!(relative < 0.1, "{relative}");
}
