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

use std::ops::Range;

use half::f16;

use crate::cpu::Cpu;
use crate::kv_cache::{Element, KvCache, KvType, Layout, PAGE};
use crate::lanes::{Kernel, Simd, dispatch};
use crate::rows::{Heads, Shared};

use block::{Block, Call, Lengths, Sink};
use tail::Tail;

/// About how many queries a task takes: enough to make reading keys and values cheap, few enough
/// for its scores to stay in the second cache.
const QUERIES: usize = 96;
/// Fewer multiply-adds than this are not worth another thread.
const SERIAL: usize = 64 * 1024;
/// About how many bytes of partial results there are at a time, where tasks share a query: more
/// would have to be fetched from memory to be merged, and grow with the context.
const PARTS: usize = if cfg!(test) { 32 << 10 } else { 8 << 20 };

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
    let lengths = visible.iter().map(|seen| seen.prefix + seen.tail.len());
    let first = visible.iter().map(|seen| seen.first).min().unwrap_or(0) / PAGE;
    let chunks = first..lengths.clone().max().unwrap_or(0).div_ceil(PAGE);
    let work = 2 * q_at.count * q_at.dim * lengths.sum::<usize>();
    let parallel = work >= SERIAL && cpu.threads() > 1;

    let threads = if parallel { cpu.threads() } else { 1 };
    let plan = Plan::new(threads, cache.layout(), q_at.count, visible.len());
    let out = Shared::new(out);
    let each = |tasks: usize, f: &(dyn Fn(usize) + Sync)| {
        if parallel {
            cpu.run(tasks, f);
        } else {
            (0..tasks).for_each(f);
        }
    };
    if plan.together == 0 || chunks.len() <= 1 {
        each(plan.tasks, &|task| {
            // Later rows see more: the longest tasks first.
            let rows = plan.rows_of(plan.tasks - 1 - task);
            let seen = visible[rows.clone()].iter();
            let length = seen.map(|seen| seen.prefix + seen.tail.len()).max();
            let first = visible[rows.clone()].iter().map(|seen| seen.first).min();
            let block = Block {
                call: &call,
                kv_head: plan.kv_head_of(plan.tasks - 1 - task),
                rows,
                chunks: first.unwrap_or(0) / PAGE..length.unwrap_or(0).div_ceil(PAGE),
                sink: Sink::Output(&out),
            };
            dispatch(cpu.isa(), block);
        });
        return;
    }
    // Too few blocks for the threads: split the chunks too, and merge after every so many of them.
    // Of each query there is a record of what has been merged, then one for each chunk.
    let record = merge::record(cache.layout().value_stride());
    let queries = visible.len() * q_at.count;
    let together = plan.together.min(chunks.len());
    let records = (1 + together) * record;
    let mut parts = cpu.scratch::<f32>(queries * records);
    let whole = parts.chunks_exact_mut(records);
    whole.for_each(|whole| merge::clear(&mut whole[..record]));
    let shared = Shared::new(&mut parts);
    for from in chunks.clone().step_by(together) {
        let some = from..chunks.end.min(from + together);
        let splits = plan.splits.min(some.len());
        each(plan.tasks * splits, &|task| {
            let (task, split) = (task / splits, task % splits);
            let at = |split: usize| some.start + split * some.len() / splits;
            let block = Block {
                call: &call,
                kv_head: plan.kv_head_of(task),
                rows: plan.rows_of(task),
                chunks: at(split)..at(split + 1),
                sink: Sink::Parts {
                    parts: &shared,
                    records,
                    from,
                },
            };
            dispatch(cpu.isa(), block);
        });
        let tasks = queries.min(plan.enough);
        each(tasks, &|task| {
            for query in task * queries / tasks..(task + 1) * queries / tasks {
                let at = query * records..query * records + (1 + some.len()) * record;
                // SAFETY: queries are disjoint, and the tasks that wrote the parts have ended.
                let parts = unsafe { shared.part(at) };
                let at = query * q_at.dim..(query + 1) * q_at.dim;
                // SAFETY: queries are disjoint.
                let out = (some.end == chunks.end).then(|| unsafe { out.part(at) });
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
}

/// Bytes that [`attention`] takes for a while on so many threads, its output aside, with `rows` rows
/// that see up to `positions` positions of a cache with these heads; of a tree's tail a little more.
pub fn attention_bytes(
    threads: usize,
    heads: usize,
    (kv_heads, head_dim, kind): (usize, usize, KvType),
    rows: usize,
    positions: usize,
) -> u64 {
    let layout = Layout { kv_heads, head_dim };
    let plan = Plan::new(threads, layout, heads, rows);
    let queries = plan.per_block.min(rows) * (heads / kv_heads);
    let together = match positions.div_ceil(PAGE) {
        0 | 1 => 0,
        chunks => plan.together.min(chunks),
    };
    let lengths = match kind {
        KvType::F32 => Lengths::new::<f32>(layout, queries, together == 0),
        KvType::F16 => Lengths::new::<f16>(layout, queries, together == 0),
        KvType::Int8 => Lengths::new::<i8>(layout, queries, together == 0),
    };
    let tasks = plan.tasks * if together == 0 { 1 } else { plan.splits };
    let parts = match together {
        0 => 0,
        _ => rows * heads * (1 + together) * merge::record(layout.value_stride()),
    };
    let tasks = threads.min(tasks) * lengths.sum();
    (size_of::<f32>() * (tasks + parts)) as u64
}

/// How the queries of a call are cut into tasks.
struct Plan {
    kv_heads: usize,
    rows: usize,
    /// Rows of a task.
    per_block: usize,
    /// A block of rows and a kv head each.
    tasks: usize,
    /// So many tasks keep all threads busy.
    enough: usize,
    /// Into how many parts the chunks of each task are split.
    splits: usize,
    /// For how many chunks there are partial results at a time; 0 where each task takes all chunks
    /// of its queries.
    together: usize,
}

impl Plan {
    fn new(threads: usize, layout: Layout, heads: usize, rows: usize) -> Self {
        let enough = if threads > 1 { 4 * threads } else { 1 };
        let per_block = (QUERIES * layout.kv_heads / heads).max(1);
        let tasks = layout.kv_heads * rows.div_ceil(per_block);
        let splits = enough.div_ceil(tasks.max(1));
        let record = merge::record(layout.value_stride()) * size_of::<f32>();
        Self {
            kv_heads: layout.kv_heads,
            rows,
            per_block,
            tasks,
            enough,
            splits,
            together: match splits {
                1 => 0,
                _ => (PARTS / (rows * heads * record).max(1)).max(splits),
            },
        }
    }

    fn kv_head_of(&self, task: usize) -> usize {
        task % self.kv_heads
    }

    fn rows_of(&self, task: usize) -> Range<usize> {
        let block = task / self.kv_heads;
        block * self.per_block..self.rows.min((block + 1) * self.per_block)
    }
}

/// Merges the parts of one query in order of their chunks, the first of them what was merged before.
struct Merge<'a> {
    parts: &'a mut [f32],
    record: usize,
    /// Whether the values are rotated.
    rotated: bool,
    /// The query's output, if these are its last parts.
    out: Option<&'a mut [f32]>,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (whole, rest) = self.parts.split_at_mut(self.record);
        for part in rest.chunks_exact(self.record) {
            merge::merge(s, whole, part);
        }
        if let Some(out) = self.out {
            merge::finish(s, whole, self.rotated, out);
        }
    }
}
