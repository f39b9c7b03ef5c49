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
//! - Of a cache in eight bits (see `kv_cache::rotation`) the numbers k_j and v_j are the codes. The
//!   query is rotated first; the chain of a score is multiplied by the key's scale before `scale`;
//!   a takes p_j times the value's scale for p_j; the output is rotated last.

mod block;
mod merge;

mod tail;
#[cfg(test)]
mod tests;

use half::f16;

use crate::cpu::Cpu;
use crate::kv_cache::{Element, KvCache, KvType, PAGE};
use crate::lanes::{Kernel, Simd, dispatch};
use crate::rows::{Heads, Shared};

use block::{Block, Call, Sink};
use tail::Tail;

/// About how many queries a task takes: enough to make reading keys and values cheap, few enough
/// for its scores to stay in the second cache.
const QUERIES: usize = 96;
/// Fewer multiply-adds than this are not worth another thread.
const SERIAL: usize = 64 * 1024;

/// What a row sees: position i at slot i for i of `first..prefix`, then position `prefix + i` at
/// slot `tail[i]`. A prompt's row at position p sees prefix p + 1 and no tail; a tree's node sees
/// the sequence before the tree as prefix and its ancestors and itself as tail.
#[derive(Clone, Copy, Debug, Default)]
pub struct Visible<'a> {
    /// Positions before this one are out of sight (a sliding window); 0 to see all.
    pub first: usize,
    /// Positions before this one are their own slots.
    pub prefix: usize,
    /// Slots of the positions after those, all of them in sight.
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
    let slots = cache.slots();
    for seen in visible {
        assert!(
            seen.first <= seen.prefix && seen.first < seen.prefix + seen.tail.len(),
            "a row that sees nothing: {seen:?}"
        );
        assert!(seen.prefix <= slots, "prefix {} of {slots}", seen.prefix);
        assert!(seen.tail.iter().all(|&t| (t as usize) < slots), "tail");
    }
    match cache.kind() {
        KvType::F32 => run::<f32>(cpu, cache, (q, q_at), visible, scale, out),
        KvType::F16 => run::<f16>(cpu, cache, (q, q_at), visible, scale, out),
        KvType::Int8 => run::<i8>(cpu, cache, (q, q_at), visible, scale, out),
    }
}

fn run<T: Element>(
    cpu: &Cpu,
    cache: &KvCache,
    (q, q_at): (&[f32], Heads),
    visible: &[Visible],
    scale: f32,
    out: &mut [f32],
) {
    let tail = Tail::new(visible);
    let call = Call {
        cpu,
        pages: T::pages(cache),
        layout: cache.layout(),
        q,
        q_at,
        visible,
        tail: &tail,
        scale,
    };
    let (rows, kv_heads) = (visible.len(), cache.kv_heads());
    let lengths = visible.iter().map(|seen| seen.prefix + seen.tail.len());
    let chunks = lengths.clone().max().unwrap_or(0).div_ceil(PAGE);
    let work = 2 * q_at.count * q_at.dim * lengths.sum::<usize>();
    let parallel = work >= SERIAL && cpu.threads() > 1;

    let enough = if parallel { 4 * cpu.threads() } else { 1 };
    let group = q_at.count / kv_heads;
    let per_block = (QUERIES / group).max(1);
    let blocks = rows.div_ceil(per_block);
    let out = Shared::new(out);
    let each = |tasks: usize, f: &(dyn Fn(usize) + Sync)| {
        if parallel {
            cpu.run(tasks, f);
        } else {
            (0..tasks).for_each(f);
        }
    };
    let rows_of = |block: usize| block * per_block..rows.min((block + 1) * per_block);
    if kv_heads * blocks >= enough || chunks <= 1 {
        each(kv_heads * blocks, &|task| {
            // Later rows see more: the longest tasks first.
            let rows = rows_of(blocks - 1 - task / kv_heads);
            let seen = visible[rows.clone()].iter();
            let length = seen.map(|seen| seen.prefix + seen.tail.len()).max();
            let first = visible[rows.clone()].iter().map(|seen| seen.first).min();
            let block = Block {
                call: &call,
                kv_head: task % kv_heads,
                rows,
                chunks: first.unwrap_or(0) / PAGE..length.unwrap_or(0).div_ceil(PAGE),
                sink: Sink::Output(&out),
            };
            dispatch(cpu.isa(), block);
        });
        return;
    }
    // Too few blocks for the threads: split the chunks too, and merge in a second step.
    let splits = enough.div_ceil(kv_heads * blocks).min(chunks);
    let record = merge::record(cache.layout().value_stride());
    let queries = rows * q_at.count;
    let mut parts = cpu.scratch::<f32>(queries * chunks * record);
    let shared = Shared::new(&mut parts);
    each(kv_heads * blocks * splits, &|task| {
        let (task, split) = (task / splits, task % splits);
        let block = Block {
            call: &call,
            kv_head: task % kv_heads,
            rows: rows_of(task / kv_heads),
            chunks: split * chunks / splits..(split + 1) * chunks / splits,
            sink: Sink::Parts(&shared, chunks),
        };
        dispatch(cpu.isa(), block);
    });
    let tasks = queries.min(enough);
    each(tasks, &|task| {
        for query in task * queries / tasks..(task + 1) * queries / tasks {
            let at = query * chunks * record..(query + 1) * chunks * record;
            // SAFETY: queries are disjoint, and the tasks that wrote the parts have ended.
            let parts = unsafe { shared.part(at) };
            let at = query * q_at.dim..(query + 1) * q_at.dim;
            // SAFETY: queries are disjoint.
            let out = unsafe { out.part(at) };
            let rotated = T::SCALED;
            dispatch(
                cpu.isa(),
                Merge {
                    parts,
                    record,
                    rotated,
                    out,
                },
            );
        }
    });
}

/// Merges the parts of one query in order of their chunks.
struct Merge<'a> {
    parts: &'a mut [f32],
    record: usize,
    /// Whether the values are rotated.
    rotated: bool,
    out: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (whole, rest) = self.parts.split_at_mut(self.record);
        for part in rest.chunks_exact(self.record) {
            merge::merge(s, whole, part);
        }
        merge::finish(s, whole, self.rotated, self.out);
    }
}
