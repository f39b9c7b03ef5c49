//! Softmax attention with grouped query heads over a [`KvCache`].
//!
//! What a row sees is a sequence of positions; the result depends on that sequence alone, to the
//! bit, however its keys are placed, whatever rows run beside it and on how many threads:
//!
//! - The score of a query and a key is one chain of fused multiply-adds over the head's width,
//!   times `scale`.
//! - Positions are taken in chunks of 256, at fixed places. In a chunk, m is the largest score,
//!   p_j = exp(s_j - m), l the sum of the p in sixteen lanes (position mod 16, in order, then a
//!   fixed tree), and a = sum of p_j v_j one chain of fused multiply-adds in order of position.
//! - Chunks are merged in order (Milakov and Gimelshein, arXiv 1805.02867): with M the larger
//!   of both m, f = exp(m - M) of either side, l = fma(l2, f2, l1 f1), a = fma(a2, f2, a1 f1).
//!   The output is a / l.

use half::f16;

use crate::cpu::Cpu;
use crate::kv_cache::{Element, KvCache, KvType, Layout, PAGE};
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::rows::{Heads, Shared};

/// What a row sees: position i at slot i for i below `prefix`, then position `prefix + i` at slot
/// `tail[i]`. A prompt's row at position p sees prefix p + 1 and no tail; a tree's node sees the
/// sequence before the tree as prefix and its ancestors and itself as tail.
#[derive(Clone, Copy, Debug, Default)]
pub struct Visible<'a> {
    /// Positions that are their own slots.
    pub prefix: usize,
    /// Slots of the positions after those.
    pub tail: &'a [u32],
}

/// Attention of m rows of queries; each must see at least one position.
///
/// Queries lie in `q` where `q_at` says; query head h reads kv head h / (heads / kv_heads).
/// `out` is m rows of heads * head_dim.
///
/// # Panics
/// If the shapes do not fit, or a row sees nothing or a slot without memory.
pub fn attention(
    cpu: &Cpu,
    cache: &KvCache,
    (q, q_at): (&[f32], Heads),
    visible: &[Visible],
    scale: f32,
    out: &mut [f32],
) {
    let rows = q_at.rows(q.len());
    assert_eq!(q_at.dim, cache.head_dim(), "width of query and key");
    assert!(q_at.count.is_multiple_of(cache.kv_heads()), "query heads");
    assert_eq!(rows, visible.len(), "what every row sees");
    assert_eq!(out.len(), rows * q_at.count * q_at.dim, "output");
    for seen in visible {
        assert!(seen.prefix + seen.tail.len() > 0, "a row that sees nothing");
        let slots = cache.slots();
        assert!(seen.prefix <= slots, "prefix {} of {slots}", seen.prefix);
        assert!(seen.tail.iter().all(|&t| (t as usize) < slots), "tail");
    }
    let out = Shared::new(out);
    cpu.run(rows * q_at.count, &|task| {
        let (row, head) = (task / q_at.count, task % q_at.count);
        // SAFETY: heads of the output are disjoint.
        let out = unsafe { out.part(task * q_at.dim..(task + 1) * q_at.dim) };
        let kernel = Plain {
            layout: cache.layout(),
            kv_head: head / (q_at.count / cache.kv_heads()),
            q: &q[q_at.range(row, head)],
            seen: visible[row],
            scale,
            out,
        };
        match cache.kind() {
            KvType::F32 => dispatch(cpu.isa(), On(kernel, f32::pages(cache))),
            KvType::F16 => dispatch(cpu.isa(), On(kernel, f16::pages(cache))),
        }
    });
}

struct Plain<'a> {
    layout: Layout,
    kv_head: usize,
    q: &'a [f32],
    seen: Visible<'a>,
    scale: f32,
    out: &'a mut [f32],
}

struct On<'a, T>(Plain<'a>, &'a [Vec<T>]);

impl<T: Element> Kernel for On<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let On(kernel, pages) = self;
        let (layout, seen) = (kernel.layout, kernel.seen);
        let stride = layout.value_stride();
        let total = seen.prefix + seen.tail.len();
        let slot = |position: usize| match position.checked_sub(seen.prefix) {
            None => position,
            Some(i) => seen.tail[i] as usize,
        };
        let mut whole: Option<(f32, f32, Vec<f32>)> = None;
        for start in (0..total).step_by(PAGE) {
            let count = PAGE.min(total - start);
            let mut p = [f32::NEG_INFINITY; PAGE];
            for (i, p) in p[..count].iter_mut().enumerate() {
                let slot = slot(start + i);
                let keys = &pages[slot / PAGE][layout.keys(kernel.kv_head)..];
                let block = slot % PAGE / LANES * layout.head_dim;
                let (keys, _) = keys[block * LANES..].as_chunks::<LANES>();
                let mut sum = s.zero();
                for (q, keys) in kernel.q.iter().zip(keys) {
                    sum = s.mul_add(T::load(s, keys), s.splat(*q), sum);
                }
                let mut lanes = [0.0; LANES];
                s.store(s.mul(sum, s.splat(kernel.scale)), &mut lanes);
                *p = lanes[slot % LANES];
            }
            let mut largest = s.splat(f32::NEG_INFINITY);
            for p in p.chunks(LANES) {
                largest = s.max(s.load_slice(p), largest);
            }
            let m = s.largest(largest);
            let mut sum = s.zero();
            for p in p.chunks_mut(LANES) {
                let e = s.exp(s.sub(s.load_slice(p), s.splat(m)));
                sum = s.add(sum, e);
                s.store_slice(e, p);
            }
            let l = s.sum(sum);
            let mut a = vec![0.0; stride];
            for (i, p) in p[..count].iter().enumerate() {
                let slot = slot(start + i);
                let values = &pages[slot / PAGE][layout.values(kernel.kv_head)..];
                let (values, _) = values[slot % PAGE * stride..][..stride].as_chunks::<LANES>();
                for (a, v) in a.chunks_mut(LANES).zip(values) {
                    let v = s.mul_add(s.splat(*p), T::load(s, v), s.load_slice(a));
                    s.store_slice(v, a);
                }
            }
            whole = Some(match whole {
                None => (m, l, a),
                Some((m1, l1, a1)) => {
                    let larger = if m > m1 { m } else { m1 };
                    let f1 = s.exp(s.splat(m1 - larger));
                    let f2 = s.exp(s.splat(m - larger));
                    let mut lanes = [0.0; LANES];
                    s.store(
                        s.mul_add(s.splat(l), f2, s.mul(s.splat(l1), f1)),
                        &mut lanes,
                    );
                    for (a, a1) in a.chunks_mut(LANES).zip(a1.chunks(LANES)) {
                        let before = s.mul(s.load_slice(a1), f1);
                        s.store_slice(s.mul_add(s.load_slice(a), f2, before), a);
                    }
                    (larger, lanes[0], a)
                }
            });
        }
        if let Some((_, l, a)) = whole {
            for (out, a) in kernel.out.chunks_mut(LANES).zip(a.chunks(LANES)) {
                s.store_slice(s.div(s.load_slice(a), s.splat(l)), out);
            }
        }
    }
}
