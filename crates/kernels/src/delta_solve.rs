//! Gated DeltaNet without the recurrence: the WY form over chunks (Yang et al., arXiv 2412.06464,
//! section 3.3), generalised to trees.
//!
//! With j < i for "j is a proper ancestor of i", R_ij the product of the decays after j up to i
//! and a_i the product of all of them from the state on:
//!
//! ```text
//! d_i = beta_i (v_i - a_i S^T k_i - sum over j < i of R_ij (k_i . k_j) d_j)
//! o_i = a_i S^T q_i + sum over j <= i of R_ij (q_i . k_j) d_j
//! S   <- a_m S + sum over j <= m of R_mj k_j d_j^T             for a chain of m
//! ```
//!
//! R follows from R_ii = 1 and R_ij = alpha_i R_pj for the parent p of i, so it needs no logarithm,
//! never exceeds one, and is zero where j is no ancestor. This form rounds differently from
//! [`crate::delta_chain`] and [`crate::delta_tree`], whose bits plain decoding has; it is here to
//! check them and to be measured against them.

use crate::conv::check_parents;
use crate::cpu::{Cpu, Scratch};
use crate::delta::{DeltaRows, DeltaShape, DeltaState, Token};
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::product::{A_ROW, Product};
use crate::rows::Shared;

/// Tokens of a chain that are solved together.
const CHUNK: usize = 64;
/// Rows of a triangular matrix that are multiplied together.
const STRIP: usize = 24;

/// As [`crate::delta_chain`], by the solve in chunks of 64 tokens.
///
/// # Panics
/// If the lengths do not fit.
pub fn delta_solve_chain(cpu: &Cpu, state: &mut DeltaState, rows: DeltaRows, out: &mut [f32]) {
    let shape = state.shape();
    let m = rows.check(shape);
    assert_eq!(out.len(), m * shape.values(), "output");
    let parents: Vec<i32> = (-1..CHUNK as i32 - 1).collect();
    let out = Shared::new(out);
    let head_len = shape.blocks() * shape.block();
    let data = Shared::new(state.data_mut());
    let groups = shape.value_heads / shape.key_heads;
    cpu.run(shape.key_heads, &|key_head| {
        for first in (0..m).step_by(CHUNK) {
            let count = CHUNK.min(m - first);
            let keys = Keys::new(cpu, &shape, rows, key_head, first..first + count);
            for head in key_head * groups..(key_head + 1) * groups {
                // SAFETY: heads are disjoint.
                let state = unsafe { data.part(head * head_len..(head + 1) * head_len) };
                let solve = Solve {
                    cpu,
                    shape: &shape,
                    rows,
                    keys: &keys,
                    first,
                    parents: &parents[..count],
                    head,
                    out: &out,
                };
                dispatch(cpu.isa(), Advancing(solve, state));
            }
        }
    });
}

/// As [`crate::delta_tree`], by one solve over all nodes.
///
/// # Panics
/// If the lengths do not fit or a parent does not come before its child.
pub fn delta_solve_tree(
    cpu: &Cpu,
    state: &DeltaState,
    rows: DeltaRows,
    parents: &[i32],
    out: &mut [f32],
    updates: &mut [f32],
) {
    let shape = state.shape();
    let m = rows.check(shape);
    assert_eq!(parents.len(), m, "one parent for each row");
    assert_eq!(out.len(), m * shape.values(), "output");
    assert_eq!(updates.len(), m * shape.values(), "updates");
    check_parents(parents);
    if m == 0 {
        return;
    }
    let (out, updates) = (Shared::new(out), Shared::new(updates));
    let head_len = shape.blocks() * shape.block();
    let groups = shape.value_heads / shape.key_heads;
    cpu.run(shape.key_heads, &|key_head| {
        let keys = Keys::new(cpu, &shape, rows, key_head, 0..m);
        for head in key_head * groups..(key_head + 1) * groups {
            let state = &state.data()[head * head_len..(head + 1) * head_len];
            let solve = Solve {
                cpu,
                shape: &shape,
                rows,
                keys: &keys,
                first: 0,
                parents,
                head,
                out: &out,
            };
            dispatch(cpu.isa(), Reading(solve, state, &updates));
        }
    });
}

/// Queries and keys of one key head and the products of all pairs.
struct Keys<'a> {
    rows: usize,
    /// Panels of 256 of a head's values, each with rows of queries and rows of keys.
    queries: Scratch<'a, f32>,
    keys: Scratch<'a, f32>,
    /// q_i . k_j and k_i . k_j for j up to the end of i's strip: panels of 256 of j, rows i.
    query_products: Scratch<'a, f32>,
    key_products: Scratch<'a, f32>,
}

impl<'a> Keys<'a> {
    fn new(
        cpu: &'a Cpu,
        shape: &DeltaShape,
        rows: DeltaRows,
        key_head: usize,
        range: std::ops::Range<usize>,
    ) -> Self {
        let count = range.len();
        let (dim, panels) = (shape.key_dim, shape.key_dim.div_ceil(A_ROW));
        let [q_at, k_at] = shape.query_and_key_heads();
        let mut queries = cpu.scratch::<f32>(panels * count * A_ROW);
        let mut keys = cpu.scratch::<f32>(panels * count * A_ROW);
        let mut columns = cpu.scratch::<f32>(count.next_multiple_of(LANES) * dim);
        for (i, row) in range.enumerate() {
            let (q, k) = (
                &rows.mixed[q_at.range(row, key_head)],
                &rows.mixed[k_at.range(row, key_head)],
            );
            for (panel, (q, k)) in q.chunks(A_ROW).zip(k.chunks(A_ROW)).enumerate() {
                let at = (panel * count + i) * A_ROW;
                queries[at..at + q.len()].copy_from_slice(q);
                keys[at..at + k.len()].copy_from_slice(k);
            }
            for (d, k) in k.iter().enumerate() {
                columns[(i / LANES * dim + d) * LANES + i % LANES] = *k;
            }
        }
        let wide = count.div_ceil(A_ROW);
        let mut query_products = cpu.scratch::<f32>(wide * count * A_ROW);
        let mut key_products = cpu.scratch::<f32>(wide * count * A_ROW);
        for (a, c) in [(&queries, &mut query_products), (&keys, &mut key_products)] {
            dispatch(
                cpu.isa(),
                Pairs {
                    a,
                    columns: &columns,
                    c,
                    count,
                    dim,
                },
            );
        }
        Self {
            rows: count,
            queries,
            keys,
            query_products,
            key_products,
        }
    }
}

/// Products of every row with the columns up to the end of its strip.
struct Pairs<'a> {
    a: &'a [f32],
    columns: &'a [f32],
    c: &'a mut [f32],
    count: usize,
    dim: usize,
}

impl Kernel for Pairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in (0..self.count).step_by(STRIP) {
            let rows = STRIP.min(self.count - row);
            for wide in 0..(row + rows).div_ceil(A_ROW) {
                let vectors = (row + rows - wide * A_ROW).min(A_ROW).div_ceil(LANES);
                for panel in 0..self.dim.div_ceil(A_ROW) {
                    let from = panel * A_ROW;
                    s.call(Product {
                        rows,
                        vectors,
                        depth: (self.dim - from).min(A_ROW),
                        a: &self.a[(panel * self.count + row) * A_ROW..],
                        b: &self.columns[(wide * A_ROW * self.dim) + from * LANES..],
                        b_step: LANES,
                        b_next: self.dim * LANES,
                        c: &mut self.c[(wide * self.count + row) * A_ROW..],
                        c_row: A_ROW,
                        resume: panel > 0,
                    });
                }
            }
        }
    }
}

/// One value head of the rows from `first` on.
struct Solve<'a> {
    cpu: &'a Cpu,
    shape: &'a DeltaShape,
    rows: DeltaRows<'a>,
    keys: &'a Keys<'a>,
    first: usize,
    parents: &'a [i32],
    head: usize,
    out: &'a Shared<'a, f32>,
}

/// What a solve leaves for the commit: d of every row, R of every row, a of every row.
struct Solved<'a> {
    d: Scratch<'a, f32>,
    ratios: Scratch<'a, f32>,
    decays: Vec<f32>,
}

impl<'a> Solve<'a> {
    /// Writes the outputs.
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, state: &[f32]) -> Solved<'a> {
        let (shape, keys, m) = (self.shape, self.keys, self.keys.rows);
        let blocks = shape.blocks();
        let width = blocks * LANES;
        let head = self.rows.head(shape, self.head);
        let token = |i: usize| head.at(self.first + i);

        // S^T k and S^T q.
        let mut d = self.cpu.scratch::<f32>(m * width);
        let mut o = self.cpu.scratch::<f32>(m * width);
        for (a, c) in [(&keys.keys, &mut d), (&keys.queries, &mut o)] {
            for panel in 0..shape.key_dim.div_ceil(A_ROW) {
                let from = panel * A_ROW;
                s.call(Product {
                    rows: m,
                    vectors: blocks,
                    depth: (shape.key_dim - from).min(A_ROW),
                    a: &a[panel * m * A_ROW..],
                    b: &state[from * LANES..],
                    b_step: LANES,
                    b_next: shape.block(),
                    c,
                    c_row: width,
                    resume: panel > 0,
                });
            }
        }

        // R, and both triangular matrices: panels of 256 columns, rows i.
        let wide = m.div_ceil(A_ROW);
        let mut ratios = self.cpu.scratch::<f32>(wide * m * A_ROW);
        let mut for_d = self.cpu.scratch::<f32>(wide * m * A_ROW);
        let mut for_o = self.cpu.scratch::<f32>(wide * m * A_ROW);
        ratios.fill(0.0);
        let mut decays = vec![0.0f32; m];
        for i in 0..m {
            let Token { alpha, beta, .. } = token(i);
            let parent = usize::try_from(self.parents[i]).ok();
            decays[i] = alpha * parent.map_or(1.0, |p| decays[p]);
            // Nothing past a row's strip is read.
            let end = m.min(i / STRIP * STRIP + STRIP);
            for panel in 0..end.div_ceil(A_ROW) {
                let at = (panel * m + i) * A_ROW;
                let len = (end - panel * A_ROW).min(A_ROW).next_multiple_of(LANES);
                if let Some(p) = parent {
                    let from = (panel * m + p) * A_ROW;
                    ratios.copy_within(from..from + len, at);
                }
                let r = &mut ratios[at..at + len];
                let products = keys.key_products[at..at + len].chunks(LANES);
                let minus = s.splat(-beta);
                for ((r, p), x) in r
                    .chunks_mut(LANES)
                    .zip(products)
                    .zip(for_d[at..at + len].chunks_mut(LANES))
                {
                    let ratio = s.mul(s.load_slice(r), s.splat(alpha));
                    s.store_slice(ratio, r);
                    s.store_slice(s.mul(minus, s.mul(ratio, s.load_slice(p))), x);
                }
                if i / A_ROW == panel {
                    r[i % A_ROW] = 1.0;
                }
                let products = keys.query_products[at..at + len].chunks(LANES);
                for ((r, p), x) in r
                    .chunks(LANES)
                    .zip(products)
                    .zip(for_o[at..at + len].chunks_mut(LANES))
                {
                    s.store_slice(s.mul(s.load_slice(r), s.load_slice(p)), x);
                }
            }
        }

        // Forward substitution, strips of sixteen: what earlier strips give as a product.
        for start in (0..m).step_by(LANES) {
            let rows = LANES.min(m - start);
            for i in start..start + rows {
                let Token { v, beta, .. } = token(i);
                let (beta, minus) = (s.splat(beta), s.splat(-decays[i]));
                for (d, v) in d[i * width..][..width]
                    .chunks_mut(LANES)
                    .zip(v.chunks(LANES))
                {
                    let rest = s.mul_add(minus, s.load_slice(d), s.load_slice(v));
                    s.store_slice(s.mul(beta, rest), d);
                }
            }
            let (before, strip) = d.split_at_mut(start * width);
            triangular(s, &for_d, m, start, rows, start, before, strip, width);
            for i in 1..rows {
                let (done, rest) = strip.split_at_mut(i * width);
                for j in 0..i {
                    let column = start + j;
                    let x = for_d[(column / A_ROW * m + start + i) * A_ROW + column % A_ROW];
                    if x != 0.0 {
                        let x = s.splat(x);
                        let from = done[j * width..][..width].chunks(LANES);
                        for (d, from) in rest[..width].chunks_mut(LANES).zip(from) {
                            s.store_slice(s.mul_add(x, s.load_slice(from), s.load_slice(d)), d);
                        }
                    }
                }
            }
        }

        for i in 0..m {
            let decay = s.splat(decays[i]);
            for o in o[i * width..][..width].chunks_mut(LANES) {
                s.store_slice(s.mul(decay, s.load_slice(o)), o);
            }
        }
        for start in (0..m).step_by(STRIP) {
            let rows = STRIP.min(m - start);
            let o = &mut o[start * width..];
            triangular(s, &for_o, m, start, rows, start + rows, &d, o, width);
        }
        for i in 0..m {
            let at = (self.first + i) * shape.values() + self.head * shape.value_dim;
            // SAFETY: this head of this row belongs to this task alone.
            let out = unsafe { self.out.part(at..at + shape.value_dim) };
            out.copy_from_slice(&o[i * width..][..shape.value_dim]);
        }
        Solved { d, ratios, decays }
    }
}

/// Adds the first `depth` columns of some rows of a triangular matrix, times d, to `c`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn triangular<S: Simd>(
    s: S,
    matrix: &[f32],
    m: usize,
    row: usize,
    rows: usize,
    depth: usize,
    d: &[f32],
    c: &mut [f32],
    width: usize,
) {
    for panel in 0..depth.div_ceil(A_ROW) {
        let from = panel * A_ROW;
        s.call(Product {
            rows,
            vectors: width / LANES,
            depth: (depth - from).min(A_ROW),
            a: &matrix[(panel * m + row) * A_ROW..],
            b: &d[from * width..],
            b_step: width,
            b_next: LANES,
            c,
            c_row: width,
            resume: true,
        });
    }
}

struct Reading<'a>(Solve<'a>, &'a [f32], &'a Shared<'a, f32>);

impl Kernel for Reading<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Reading(solve, state, updates) = self;
        let shape = solve.shape;
        let solved = solve.run(s, state);
        let width = shape.blocks() * LANES;
        for i in 0..solve.keys.rows {
            let at = i * shape.values() + solve.head * shape.value_dim;
            // SAFETY: this head of this row belongs to this task alone.
            let updates = unsafe { updates.part(at..at + shape.value_dim) };
            updates.copy_from_slice(&solved.d[i * width..][..shape.value_dim]);
        }
    }
}

struct Advancing<'a>(Solve<'a>, &'a mut [f32]);

impl Kernel for Advancing<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Advancing(solve, state) = self;
        let shape = solve.shape;
        let m = solve.keys.rows;
        let solved = solve.run(s, state);
        let width = shape.blocks() * LANES;
        // K^T with the decays from each row to the last.
        let mut scaled = solve.cpu.scratch::<f32>(shape.key_dim * A_ROW);
        let head = solve.rows.head(shape, solve.head);
        for i in 0..m {
            let ratio = solved.ratios[(m - 1) * A_ROW + i];
            let k = head.at(solve.first + i).k;
            for (d, k) in k.iter().enumerate() {
                scaled[d * A_ROW + i] = ratio * k;
            }
        }
        let decay = s.splat(solved.decays[m - 1]);
        for (block, state) in state.chunks_exact_mut(shape.block()).enumerate() {
            for row in state.chunks_exact_mut(LANES) {
                s.store_slice(s.mul(decay, s.load_slice(row)), row);
            }
            s.call(Product {
                rows: shape.key_dim,
                vectors: 1,
                depth: m,
                a: &scaled,
                b: &solved.d[block * LANES..],
                b_step: width,
                b_next: LANES,
                c: state,
                c_row: LANES,
                resume: true,
            });
        }
    }
}

#[cfg(test)]
mod tests;
