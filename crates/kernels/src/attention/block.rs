//! One task of attention: a block of rows, one kv head, a range of chunks.

use std::ops::Range;
use std::sync::Arc;

use crate::cpu::Cpu;
use crate::kv_cache::{Element, Layout, PAGE, Slots, rotate};
use crate::lanes::{Kernel, LANES, Simd};
use crate::rows::{Heads, Shared};

use super::Visible;
use super::merge::{clear, finish, merge, record, softmax};
use super::tail::Tail;
use crate::product::{A_ROW, Product};

/// The weights of a chunk are rows of a product.
const _: () = assert!(PAGE == A_ROW);

/// With at least this many queries it pays to widen keys and values once for all of them.
const WIDEN: usize = 12;

/// Positions whose values are mixed in one go when they are read as stored: few enough for them to
/// be read once, in order, though sixty-four columns are taken at a time.
const RUN: usize = 32;

/// What all tasks of a call share.
pub(super) struct Call<'a, T> {
    pub(super) cpu: &'a Cpu,
    pub(super) pages: &'a [Arc<Slots<T>>],
    pub(super) layout: Layout,
    pub(super) q: &'a [f32],
    pub(super) q_at: Heads,
    pub(super) visible: &'a [Visible<'a>],
    pub(super) tail: &'a Tail,
    pub(super) scale: f32,
}

/// Where the results of a task go.
#[derive(Clone, Copy)]
pub(super) enum Sink<'a> {
    /// The task sees every chunk: rows of heads * head_dim outputs.
    Output(&'a Shared<'a, f32>),
    /// Of every query (row * heads + head) so many `records` of values, the first for others, then
    /// one for each chunk from chunk `from` on.
    Parts {
        parts: &'a Shared<'a, f32>,
        records: usize,
        from: usize,
    },
}

/// How many values of scratch memory a task takes, tails aside.
pub(super) struct Lengths {
    packed: usize,
    rotated: usize,
    wide_keys: usize,
    wide_values: usize,
    scores: usize,
    parts: usize,
    whole: usize,
}

impl Lengths {
    /// Of a task of so many queries, that sees every chunk if it is `whole`.
    pub(super) fn new<T: Element>(layout: Layout, queries: usize, whole: bool) -> Self {
        let (dim, width) = (layout.head_dim, layout.value_stride());
        let wide = queries >= WIDEN && !T::WIDE;
        let where_so = |so: bool, length: usize| if so { length } else { 0 };
        Self {
            packed: dim.div_ceil(A_ROW) * queries * A_ROW,
            rotated: where_so(T::SCALED, dim),
            wide_keys: where_so(wide, PAGE * dim),
            wide_values: where_so(wide, PAGE * width),
            scores: queries * A_ROW,
            parts: queries * record(width),
            whole: where_so(whole, queries * record(width)),
        }
    }

    pub(super) fn sum(&self) -> usize {
        let queries = self.packed + self.rotated + self.scores + self.parts + self.whole;
        queries + self.wide_keys + self.wide_values
    }
}

/// A block of rows, one kv head, a range of chunks.
pub(super) struct Block<'a, T> {
    pub(super) call: &'a Call<'a, T>,
    pub(super) kv_head: usize,
    pub(super) rows: Range<usize>,
    pub(super) chunks: Range<usize>,
    pub(super) sink: Sink<'a>,
}

/// What one row sees of a chunk, as positions from the chunk's start: `first..prefix` in the
/// chunk's own slots, then the entries `tail` of the row's list.
struct Window {
    first: usize,
    prefix: usize,
    tail: Range<usize>,
}

impl Window {
    fn new(seen: &Visible, chunk: usize) -> Self {
        let start = chunk * PAGE;
        let within = |position: usize| position.clamp(start, start + PAGE) - start;
        let prefix = within(seen.prefix);
        let entry = |end: usize| end.saturating_sub(seen.prefix).min(seen.tail.len());
        Self {
            first: within(seen.first).min(prefix),
            prefix,
            tail: entry(start)..entry(start + PAGE),
        }
    }

    /// One more than the last position seen.
    fn end(&self) -> usize {
        self.prefix + self.tail.len()
    }

    fn is_empty(&self) -> bool {
        self.first == self.end()
    }
}

impl<T: Element> Kernel for Block<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let call = self.call;
        let width = call.layout.value_stride();
        let dim = call.layout.head_dim;
        let group = call.q_at.count / call.layout.kv_heads;
        let queries = self.rows.len() * group;
        let record = record(width);
        let panels = dim.div_ceil(A_ROW);
        let is_whole = matches!(self.sink, Sink::Output(_));
        let lengths = Lengths::new::<T>(call.layout, queries, is_whole);

        // Queries as panels of 256 values, so that every width is a known distance.
        let mut packed = call.cpu.scratch::<f32>(lengths.packed);
        let mut rotated = call.cpu.scratch::<f32>(lengths.rotated);
        for (query, row) in self
            .rows
            .clone()
            .flat_map(|row| std::iter::repeat_n(row, group))
            .enumerate()
        {
            let head = self.kv_head * group + query % group;
            let mut q = &call.q[call.q_at.range(row, head)];
            if T::SCALED {
                rotated.copy_from_slice(q);
                rotate(&mut rotated);
                q = &rotated;
            }
            for (panel, q) in q.chunks(A_ROW).enumerate() {
                packed[(panel * queries + query) * A_ROW..][..q.len()].copy_from_slice(q);
            }
        }
        let packed: &[f32] = &packed;
        let scores_of = |keys: Keys<T>, c: &mut [f32], c_row: usize| {
            for panel in 0..panels {
                let depth = (dim - panel * A_ROW).min(A_ROW);
                let a = &packed[panel * queries * A_ROW..];
                keys.product(s, queries, panel * A_ROW, depth, a, c, c_row, dim);
            }
        };

        // Scores of the tail's slots, once for all chunks.
        let seen = &call.visible[self.rows.clone()];
        let (from, to) = (self.chunks.start * PAGE, self.chunks.end * PAGE);
        let reaches_tail = seen.iter().any(|seen| {
            !seen.tail.is_empty() && seen.prefix < to && seen.prefix + seen.tail.len() > from
        });
        let tail_columns = if reaches_tail { call.tail.columns() } else { 0 };
        let mut tail_scores = call.cpu.scratch::<f32>(queries * tail_columns);
        if reaches_tail {
            for run in call.tail.runs() {
                let page = &call.pages[run.block / (PAGE / LANES)];
                let block = run.block % (PAGE / LANES);
                let start = call.layout.keys(self.kv_head) + block * dim * LANES;
                let keys = Keys::Stored(&page.numbers[start..], run.blocks);
                scores_of(keys, &mut tail_scores[run.column..], tail_columns);
                if T::SCALED {
                    let start = call.layout.key_scales(self.kv_head) + block * LANES;
                    let scales = &page.scales[start..][..run.blocks * LANES];
                    for scores in tail_scores.chunks_exact_mut(tail_columns) {
                        times(s, &mut scores[run.column..][..scales.len()], scales);
                    }
                }
            }
        }

        let wide = lengths.wide_keys > 0;
        let mut wide_keys = call.cpu.scratch::<f32>(lengths.wide_keys);
        let mut wide_values = call.cpu.scratch::<f32>(lengths.wide_values);
        let mut scores = call.cpu.scratch::<f32>(lengths.scores);
        let mut parts = call.cpu.scratch::<f32>(lengths.parts);
        let mut whole = call.cpu.scratch::<f32>(lengths.whole);
        whole.chunks_exact_mut(record).for_each(clear);

        for chunk in self.chunks.clone() {
            let windows: Vec<Window> = seen.iter().map(|seen| Window::new(seen, chunk)).collect();
            let slots = windows.iter().map(|w| w.prefix).max().unwrap_or(0);
            let first = windows.iter().map(|w| w.first).min().unwrap_or(0);
            let page = (slots > first).then(|| &*call.pages[chunk]);
            let numbers = |from: usize| page.map_or(&[][..], |page| &page.numbers[from..]);
            let scales = |from: usize| match page {
                Some(page) if T::SCALED => &page.scales[from..][..PAGE],
                _ => &[],
            };
            let keys = numbers(call.layout.keys(self.kv_head));
            let values = numbers(call.layout.values(self.kv_head));
            let key_scales = scales(call.layout.key_scales(self.kv_head));
            let value_scales = scales(call.layout.value_scales(self.kv_head));

            // Blocks of sixteen slots, rounded to whole register tiles inside the page.
            let blocks = first / LANES..slots.div_ceil(4 * LANES) * 4;
            if slots > first {
                let at = blocks.start * dim * LANES;
                let count = blocks.len();
                if wide {
                    let len = count * dim * LANES;
                    widen(s, &keys[at..at + len], &mut wide_keys[..len]);
                    let keys = Keys::Wide(&wide_keys, count);
                    scores_of(keys, &mut scores[blocks.start * LANES..], A_ROW);
                    let range = first * width..slots * width;
                    widen(s, &values[range.clone()], &mut wide_values[range]);
                } else {
                    let keys = Keys::Stored(&keys[at..], count);
                    scores_of(keys, &mut scores[blocks.start * LANES..], A_ROW);
                }
                if T::SCALED {
                    let columns = blocks.start * LANES..blocks.end * LANES;
                    for scores in scores.chunks_exact_mut(A_ROW) {
                        times(
                            s,
                            &mut scores[columns.clone()],
                            &key_scales[columns.clone()],
                        );
                    }
                }
            }

            for (query, scores) in scores.chunks_exact_mut(A_ROW).enumerate() {
                let row = query / group;
                let (window, seen) = (&windows[row], &seen[row]);
                let part = &mut parts[query * record..][..record];
                if window.is_empty() {
                    clear(part);
                    continue;
                }
                let tail = &seen.tail[window.tail.clone()];
                let from_tail = &tail_scores[query * tail_columns..][..tail_columns];
                for (score, &slot) in scores[window.prefix..].iter_mut().zip(tail) {
                    *score = from_tail[call.tail.column(slot)];
                }
                let (m, l) = softmax(s, scores, window.first, window.end(), call.scale);
                part[..width].fill(0.0);
                part[width] = m;
                part[width + 1] = l;
                if T::SCALED {
                    let own = window.first..window.prefix;
                    times(
                        s,
                        &mut scores[own.clone()],
                        value_scales.get(own).unwrap_or(&[]),
                    );
                    let first = call.layout.value_scales(self.kv_head);
                    for (weight, &slot) in scores[window.prefix..].iter_mut().zip(tail) {
                        let slot = slot as usize;
                        *weight *= call.pages[slot / PAGE].scales[first + slot % PAGE];
                    }
                }
            }

            let weighted = |parts: &mut [f32], query, queries, positions: Range<usize>| {
                let (a, c) = (&scores[query * A_ROW..], &mut parts[query * record..]);
                if wide {
                    mix(s, &wide_values, width, positions, queries, a, c, record);
                } else {
                    for from in positions.clone().step_by(RUN) {
                        let run = from..positions.end.min(from + RUN);
                        mix(s, values, width, run, queries, a, c, record);
                    }
                }
            };
            // Tiles of queries share the slots that all their rows see; what only some see comes
            // before and after, in the order of positions.
            const TILE: usize = 24;
            for query in (0..queries).step_by(TILE) {
                let tile = query..queries.min(query + TILE);
                let windows = &windows[tile.start / group..(tile.end - 1) / group + 1];
                let first = windows.iter().map(|w| w.first).max().unwrap_or(0);
                let last = windows.iter().map(|w| w.prefix).min().unwrap_or(0);
                let of = |query: usize| &windows[query / group - tile.start / group];
                let last = last.max(first);
                for query in tile.clone() {
                    let window = of(query);
                    let early = window.first..window.prefix.min(first);
                    weighted(&mut parts, query, 1, early);
                }
                weighted(&mut parts, tile.start, tile.len(), first..last);
                for query in tile.clone() {
                    let window = of(query);
                    let late = window.first.max(last)..window.prefix;
                    weighted(&mut parts, query, 1, late);
                }
            }
            for (row, window) in windows.iter().enumerate() {
                let slots = &seen[row].tail[window.tail.clone()];
                let mut position = window.prefix;
                for run in slots.chunk_by(|a, b| a + 1 == *b && !(*b as usize).is_multiple_of(PAGE))
                {
                    let slot = run[0] as usize;
                    let page = &call.pages[slot / PAGE];
                    let start = call.layout.values(self.kv_head) + slot % PAGE * width;
                    s.call(Product {
                        rows: group,
                        vectors: width / LANES,
                        depth: run.len(),
                        a: &scores[row * group * A_ROW + position..],
                        b: &page.numbers[start..],
                        b_step: width,
                        b_next: LANES,
                        c: &mut parts[row * group * record..],
                        c_row: record,
                        resume: true,
                    });
                    position += run.len();
                }
            }

            for (query, part) in parts.chunks_exact(record).enumerate() {
                match self.sink {
                    Sink::Output(_) => merge(s, &mut whole[query * record..][..record], part),
                    Sink::Parts {
                        parts,
                        records,
                        from,
                    } => {
                        let query = self.query(query, group);
                        let at = query * records + (1 + chunk - from) * record;
                        // SAFETY: each query and chunk belongs to one task.
                        unsafe { parts.part(at..at + record) }.copy_from_slice(part);
                    }
                }
            }
        }
        if let Sink::Output(out) = self.sink {
            for (query, whole) in whole.chunks_exact(record).enumerate() {
                let at = self.query(query, group) * dim;
                // SAFETY: each query belongs to one task.
                finish(s, whole, T::SCALED, unsafe { out.part(at..at + dim) });
            }
        }
    }
}

impl<T> Block<'_, T> {
    /// row * heads + head of the task's query.
    fn query(&self, query: usize, group: usize) -> usize {
        let row = self.rows.start + query / group;
        row * self.call.q_at.count + self.kv_head * group + query % group
    }
}

/// Blocks of sixteen keys, as stored or widened to f32, and how many.
enum Keys<'a, T> {
    Stored(&'a [T], usize),
    Wide(&'a [f32], usize),
}

impl<T: Element> Keys<'_, T> {
    /// Scores of all queries against the blocks, over the head's values from `from` on.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    fn product<S: Simd>(
        &self,
        s: S,
        queries: usize,
        from: usize,
        depth: usize,
        a: &[f32],
        c: &mut [f32],
        c_row: usize,
        dim: usize,
    ) {
        match *self {
            Keys::Stored(keys, blocks) => s.call(Product {
                rows: queries,
                vectors: blocks,
                depth,
                a,
                b: &keys[from * LANES..],
                b_step: LANES,
                b_next: dim * LANES,
                c,
                c_row,
                resume: from > 0,
            }),
            Keys::Wide(keys, blocks) => s.call(Product {
                rows: queries,
                vectors: blocks,
                depth,
                a,
                b: &keys[from * LANES..],
                b_step: LANES,
                b_next: dim * LANES,
                c,
                c_row,
                resume: from > 0,
            }),
        }
    }
}

/// Adds the weighted values of some positions to the parts of some queries.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn mix<S: Simd, T: Element>(
    s: S,
    values: &[T],
    width: usize,
    positions: Range<usize>,
    queries: usize,
    weights: &[f32],
    parts: &mut [f32],
    record: usize,
) {
    if positions.is_empty() {
        return;
    }
    s.call(Product {
        rows: queries,
        vectors: width / LANES,
        depth: positions.len(),
        a: &weights[positions.start..],
        b: &values[positions.start * width..],
        b_step: width,
        b_next: LANES,
        c: parts,
        c_row: record,
        resume: true,
    });
}

/// Multiplies each of some values by its own factor; there are as many.
#[inline(always)]
fn times<S: Simd>(s: S, values: &mut [f32], factors: &[f32]) {
    for (values, factors) in values.chunks_mut(LANES).zip(factors.chunks(LANES)) {
        s.store_slice(s.mul(s.load_slice(values), s.load_slice(factors)), values);
    }
}

/// Converts stored numbers to f32; the length is a multiple of sixteen.
#[inline(always)]
fn widen<S: Simd, T: Element>(s: S, from: &[T], to: &mut [f32]) {
    let (from, _) = from.as_chunks::<LANES>();
    let (to, _) = to.as_chunks_mut::<LANES>();
    for (from, to) in from.iter().zip(to) {
        s.store(T::load(s, from), to);
    }
}
