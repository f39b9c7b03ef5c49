//! Gated DeltaNet (Yang, Kautz and Hatamizadeh, arXiv 2412.06464), the recurrence.
//!
//! Per value head, with a state S of key_dim x value_dim, a token's query q, key k, value v, decay
//! alpha and rate beta give
//!
//! ```text
//! u = S^T k                w = S^T q
//! d = beta (v - alpha u)   o = alpha w + (q . k) d
//! S <- alpha S + k d^T
//! ```
//!
//! which is the published form (decay, then delta rule, then read) with the decay moved out of
//! the products and the read taken before the update. Columns of S do not depend on each other:
//! sixteen of them are the lanes of a vector. u and w sum over the key's entries in two chains of
//! fused multiply-adds, even entries and odd, added at the end; the rest is
//! d = beta * fma(-alpha, u, v), o = fma(q . k, d, alpha * w), S = fma(k, d, alpha * S).
//! A chain, a tree and a later commit all do exactly this, so they agree to the bit.
//!
//! Columns are walked in pairs of blocks, 16 KiB of state for a key of 128, which stay in the first
//! cache for many rows. Writing a token's state and reading it for the next token are one pass.

mod gates;
mod inputs;
mod plan;
#[cfg(test)]
mod tests;
mod walk;

use crate::conv::check_parents;
use crate::cpu::Cpu;
use crate::lanes::{LANES, dispatch};
use crate::rows::{Heads, Shared, for_rows};

pub use gates::delta_gates;
use inputs::{Gather, Inputs};
use plan::{Plan, steps_in_place};
use walk::{Replay, TOGETHER, Walk};

/// Shapes of a Gated DeltaNet layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads, a multiple of `key_heads`; value head h reads key head
    /// h / (value_heads / key_heads).
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
}

impl DeltaShape {
    /// Values in a row of [all queries | all keys | all values].
    pub fn mixed(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Values in a row of outputs.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Where the query and the key heads lie in a mixed row: 2 * `key_heads` heads.
    pub fn query_and_key_heads(&self) -> [Heads; 2] {
        [0, self.key_heads * self.key_dim].map(|offset| Heads {
            row: self.mixed(),
            offset,
            pitch: self.key_dim,
            count: self.key_heads,
            dim: self.key_dim,
        })
    }

    /// Blocks of sixteen columns in a head.
    pub(crate) fn blocks(&self) -> usize {
        self.value_dim.div_ceil(LANES)
    }

    /// Values of one block of columns.
    pub(crate) fn block(&self) -> usize {
        self.key_dim * LANES
    }
}

/// The state of one layer: a key_dim x value_dim matrix for every value head.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaState {
    shape: DeltaShape,
    /// [value head][block of 16 columns][key_dim][16]; columns past `value_dim` stay zero.
    data: Vec<f32>,
}

impl DeltaState {
    /// The state before the first token: zeros.
    pub fn new(shape: DeltaShape) -> Self {
        let len = shape.value_heads * shape.blocks() * shape.block();
        Self {
            shape,
            data: vec![0.0; len],
        }
    }

    /// Shape of the layer.
    pub fn shape(&self) -> DeltaShape {
        self.shape
    }

    /// Forgets the sequence.
    pub fn clear(&mut self) {
        self.data.fill(0.0);
    }

    /// Entry (i, j) of a value head's matrix.
    pub fn get(&self, head: usize, i: usize, j: usize) -> f32 {
        let block = head * self.shape.blocks() + j / LANES;
        self.data[block * self.shape.block() + i * LANES + j % LANES]
    }

    /// The blocks of columns of all heads.
    pub(crate) fn data(&self) -> &[f32] {
        &self.data
    }

    pub(crate) fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        size_of_val(self.data.as_slice())
    }
}

/// The inputs of a Gated DeltaNet layer for m tokens.
#[derive(Clone, Copy)]
pub struct DeltaRows<'a> {
    /// m rows of [all queries | all keys | all values], queries and keys of length one, queries
    /// scaled, as [`crate::l2_norm_heads`] leaves them.
    pub mixed: &'a [f32],
    /// Decay exp(g): m rows of `value_heads`.
    pub alpha: &'a [f32],
    /// Rate: m rows of `value_heads`.
    pub beta: &'a [f32],
}

impl<'a> DeltaRows<'a> {
    /// The first `rows` rows, and the others.
    pub fn split_at(self, rows: usize, shape: DeltaShape) -> (DeltaRows<'a>, DeltaRows<'a>) {
        let (mixed, late_mixed) = self.mixed.split_at(rows * shape.mixed());
        let (alpha, late_alpha) = self.alpha.split_at(rows * shape.value_heads);
        let (beta, late_beta) = self.beta.split_at(rows * shape.value_heads);
        let early = DeltaRows { mixed, alpha, beta };
        let late = DeltaRows {
            mixed: late_mixed,
            alpha: late_alpha,
            beta: late_beta,
        };
        (early, late)
    }

    pub(crate) fn check(&self, shape: DeltaShape) -> usize {
        let rows = Heads::packed(1, shape.mixed()).rows(self.mixed.len());
        assert_eq!(self.alpha.len(), rows * shape.value_heads, "decays");
        assert_eq!(self.beta.len(), rows * shape.value_heads, "rates");
        rows
    }

    /// What one value head reads.
    pub(crate) fn head(&self, shape: &DeltaShape, head: usize) -> HeadRows<'a> {
        let keys = shape.key_heads * shape.key_dim;
        let key = head / (shape.value_heads / shape.key_heads) * shape.key_dim;
        HeadRows {
            rows: *self,
            mixed: shape.mixed(),
            heads: shape.value_heads,
            head,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            q: key,
            k: keys + key,
            v: 2 * keys + head * shape.value_dim,
        }
    }
}

/// The rows of one value head.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'a> {
    rows: DeltaRows<'a>,
    /// Width of a row.
    mixed: usize,
    heads: usize,
    head: usize,
    key_dim: usize,
    value_dim: usize,
    /// Where the head's query, key and value lie in a row.
    q: usize,
    k: usize,
    v: usize,
}

impl<'a> HeadRows<'a> {
    #[inline(always)]
    pub(crate) fn at(&self, row: usize) -> Token<'a> {
        let mixed = &self.rows.mixed[row * self.mixed..][..self.mixed];
        Token {
            q: &mixed[self.q..][..self.key_dim],
            k: &mixed[self.k..][..self.key_dim],
            v: &mixed[self.v..][..self.value_dim],
            alpha: self.rows.alpha[row * self.heads + self.head],
            beta: self.rows.beta[row * self.heads + self.head],
        }
    }
}

/// What one value head of one row reads.
pub(crate) struct Token<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
}

/// Runs m tokens, one after the other, from the state, and leaves the state after the last.
///
/// `out` is m rows of `value_heads * value_dim`.
///
/// # Panics
/// If the lengths do not fit.
pub fn delta_chain(cpu: &Cpu, state: &mut DeltaState, rows: DeltaRows, out: &mut [f32]) {
    let m = rows.check(state.shape);
    let plan = Plan::chain(m);
    let live = Live(state.data.as_mut_ptr());
    walk(cpu, state.shape, live, rows, &plan, out, None);
}

/// Runs the nodes of a tree, each along its own path from the state, which is not changed.
///
/// `parents[i]` is the node before node i, below i, or -1 for the state itself. `out` and
/// `updates` are m rows of `value_heads * value_dim`; `updates` receives the d of every node,
/// which [`delta_advance`] needs.
///
/// # Panics
/// If the lengths do not fit or a parent does not come before its child.
pub fn delta_tree(
    cpu: &Cpu,
    state: &DeltaState,
    rows: DeltaRows,
    parents: &[i32],
    out: &mut [f32],
    updates: &mut [f32],
) {
    let m = rows.check(state.shape);
    assert_eq!(parents.len(), m, "one parent for each row");
    assert_eq!(updates.len(), m * state.shape.values(), "updates");
    check_parents(parents);
    let plan = Plan::tree(parents);
    // The plan of a tree names no step that writes the live state.
    let live = Live(state.data.as_ptr().cast_mut());
    walk(cpu, state.shape, live, rows, &plan, out, Some(updates));
}

/// Moves the state along `path`, nodes of the rows that [`delta_tree`] was given, in the order of
/// the sequence; `updates` is what it returned.
///
/// # Panics
/// If the lengths do not fit or a node is out of range.
pub fn delta_advance(
    cpu: &Cpu,
    state: &mut DeltaState,
    rows: DeltaRows,
    updates: &[f32],
    path: &[usize],
) {
    let shape = state.shape;
    let m = rows.check(shape);
    assert_eq!(updates.len(), m * shape.values(), "updates");
    if path.is_empty() {
        return;
    }
    let data = Shared::new(&mut state.data);
    let work = TOGETHER * 32 * path.len() * shape.key_dim;
    let steps = steps_in_place(path.iter().copied());
    over_columns(cpu, shape, work, &|head, groups| {
        let mut inputs = cpu.scratch(steps.len() * Inputs::row(&shape));
        let gather = Gather {
            steps: &steps,
            rows: rows.head(&shape, head),
            inputs: Inputs::new(&shape, &mut inputs),
        };
        dispatch(cpu.isa(), gather);
        for group in groups {
            let block = group * TOGETHER;
            let blocks = TOGETHER.min(shape.blocks() - block);
            let first = head * shape.blocks() + block;
            let at = first * shape.block()..(first + blocks) * shape.block();
            let replay = Replay {
                shape: &shape,
                path: &steps,
                inputs: Inputs::new(&shape, &inputs),
                head,
                block,
                // SAFETY: blocks are disjoint.
                state: unsafe { data.part(at) },
                updates,
            };
            dispatch(cpu.isa(), replay);
        }
    });
}

/// The live state, which tasks read and, for a chain, write in disjoint blocks.
struct Live(*mut f32);
// SAFETY: see `walk`: every task has blocks of its own.
unsafe impl Sync for Live {}

impl Live {
    fn block(&self, shape: &DeltaShape, block: usize) -> *mut f32 {
        self.0.wrapping_add(block * shape.block())
    }
}

fn walk(
    cpu: &Cpu,
    shape: DeltaShape,
    live: Live,
    rows: DeltaRows,
    plan: &Plan,
    out: &mut [f32],
    updates: Option<&mut [f32]>,
) {
    let m = plan.steps.len();
    assert_eq!(out.len(), m * shape.values(), "output");
    if m == 0 {
        return;
    }
    let (out, updates) = (Shared::new(out), updates.map(Shared::new));
    let work = TOGETHER * 64 * m * shape.key_dim;
    over_columns(cpu, shape, work, &|head, groups| {
        let mut buffers = cpu.scratch(plan.buffers * TOGETHER * shape.block());
        let mut inputs = cpu.scratch(plan.part() * Inputs::row(&shape));
        // All columns of a head take the rows of a part, gathered in the second cache.
        for steps in plan.parts() {
            dispatch(
                cpu.isa(),
                Gather {
                    steps,
                    rows: rows.head(&shape, head),
                    inputs: Inputs::new(&shape, &mut inputs),
                },
            );
            for group in groups.clone() {
                let block = group * TOGETHER;
                let walk = Walk {
                    shape: &shape,
                    steps,
                    inputs: Inputs::new(&shape, &inputs),
                    head,
                    block,
                    live: live.block(&shape, head * shape.blocks() + block),
                    buffers: &mut buffers,
                    out: &out,
                    updates: updates.as_ref(),
                };
                dispatch(cpu.isa(), walk);
            }
        }
    });
}

/// Calls `f` with every value head and ranges of its groups of `TOGETHER` blocks of columns.
fn over_columns(
    cpu: &Cpu,
    shape: DeltaShape,
    work: usize,
    f: &(dyn Fn(usize, std::ops::Range<usize>) + Sync),
) {
    let groups = shape.blocks().div_ceil(TOGETHER);
    for_rows(cpu, shape.value_heads * groups, work, &|range| {
        let mut at = range.start;
        while at < range.end {
            let (head, first) = (at / groups, at % groups);
            let last = groups.min(first + range.end - at);
            f(head, first..last);
            at += last - first;
        }
    });
}
