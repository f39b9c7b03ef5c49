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
//! sixteen of them are the lanes of a vector. u and w sum over the key's entries i in four chains
//! of fused multiply-adds, i mod 4, added as (0 + 1) + (2 + 3); the rest is
//! d = beta * fma(-alpha, u, v), o = fma(q . k, d, alpha * w), S = fma(k, d, alpha * S).
//! A chain, a tree and a later commit all do exactly this, so they agree to the bit.

use crate::conv::check_parents;
use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::rows::{Heads, Shared, for_rows};

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
    fn blocks(&self) -> usize {
        self.value_dim.div_ceil(LANES)
    }

    /// Values of one block of columns.
    fn block(&self) -> usize {
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
    fn check(&self, shape: DeltaShape) -> usize {
        let rows = Heads::packed(1, shape.mixed()).rows(self.mixed.len());
        assert_eq!(self.alpha.len(), rows * shape.value_heads, "decays");
        assert_eq!(self.beta.len(), rows * shape.value_heads, "rates");
        rows
    }

    /// What one value head of one row reads.
    #[inline(always)]
    fn head(&self, shape: &DeltaShape, row: usize, head: usize) -> Token<'a> {
        let mixed = &self.mixed[row * shape.mixed()..][..shape.mixed()];
        let (q, rest) = mixed.split_at(shape.key_heads * shape.key_dim);
        let (k, v) = rest.split_at(shape.key_heads * shape.key_dim);
        let key = head / (shape.value_heads / shape.key_heads) * shape.key_dim;
        Token {
            q: &q[key..][..shape.key_dim],
            k: &k[key..][..shape.key_dim],
            v: &v[head * shape.value_dim..][..shape.value_dim],
            alpha: self.alpha[row * shape.value_heads + head],
            beta: self.beta[row * shape.value_heads + head],
        }
    }
}

struct Token<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    alpha: f32,
    beta: f32,
}

/// Runs m tokens, one after the other, from the state, and leaves the state after the last.
///
/// `out` is m rows of `value_heads * value_dim`.
///
/// # Panics
/// If the lengths do not fit.
pub fn delta_chain(cpu: &Cpu, state: &mut DeltaState, rows: DeltaRows, out: &mut [f32]) {
    let m = rows.check(state.shape);
    let parents: Vec<i32> = (-1..m as i32 - 1).collect();
    let path: Vec<usize> = (0..m).collect();
    let mut updates = vec![0.0; m * state.shape.values()];
    delta_tree(cpu, state, rows, &parents, out, &mut updates);
    delta_advance(cpu, state, rows, &updates, &path);
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
    let shape = state.shape;
    let m = rows.check(shape);
    assert_eq!(parents.len(), m, "one parent for each row");
    assert_eq!(out.len(), m * shape.values(), "output");
    assert_eq!(updates.len(), m * shape.values(), "updates");
    check_parents(parents);
    let (out, updates) = (Shared::new(out), Shared::new(updates));
    let blocks = shape.value_heads * shape.blocks();
    for_rows(cpu, blocks, 64 * m * shape.key_dim, &|range| {
        for block in range {
            let (head, block) = (block / shape.blocks(), block % shape.blocks());
            dispatch(
                cpu.isa(),
                TreeBlock {
                    state,
                    rows,
                    parents,
                    head,
                    block,
                    out: &out,
                    updates: &updates,
                },
            );
        }
    });
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
    let blocks = shape.value_heads * shape.blocks();
    let data = Shared::new(&mut state.data);
    for_rows(cpu, blocks, 32 * path.len() * shape.key_dim, &|range| {
        for i in range {
            // SAFETY: blocks are disjoint.
            let state = unsafe { data.part(i * shape.block()..(i + 1) * shape.block()) };
            let (head, block) = (i / shape.blocks(), i % shape.blocks());
            for &node in path {
                let token = rows.head(&shape, node, head);
                let d = &updates[node * shape.values() + head * shape.value_dim..]
                    [..shape.value_dim];
                let d = &d[block * LANES..shape.value_dim.min((block + 1) * LANES)];
                dispatch(cpu.isa(), Update { state, token, d });
            }
        }
    });
}

struct TreeBlock<'a> {
    state: &'a DeltaState,
    rows: DeltaRows<'a>,
    parents: &'a [i32],
    head: usize,
    block: usize,
    out: &'a Shared<'a, f32>,
    updates: &'a Shared<'a, f32>,
}

impl Kernel for TreeBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = &self.state.shape;
        let first = (self.head * shape.blocks() + self.block) * shape.block();
        let live = &self.state.data[first..][..shape.block()];
        let mut states: Vec<Vec<f32>> = vec![];
        let columns = self.block * LANES..shape.value_dim.min((self.block + 1) * LANES);
        for (node, &parent) in self.parents.iter().enumerate() {
            let before = match parent {
                -1 => live,
                p => &states[p as usize],
            };
            let token = self.rows.head(shape, node, self.head);
            let at = node * shape.values() + self.head * shape.value_dim;
            let at = at + columns.start..at + columns.end;
            let v = s.load_slice(&token.v[columns.clone()]);
            let mut u = [s.zero(); 4];
            let mut w = [s.zero(); 4];
            for (i, row) in before.chunks_exact(LANES).enumerate() {
                let row = s.load_slice(row);
                u[i % 4] = s.mul_add(s.splat(token.k[i]), row, u[i % 4]);
                w[i % 4] = s.mul_add(s.splat(token.q[i]), row, w[i % 4]);
            }
            let [u, w] = [u, w].map(|x| s.add(s.add(x[0], x[1]), s.add(x[2], x[3])));
            let d = s.mul(s.splat(token.beta), s.mul_add(s.splat(-token.alpha), u, v));
            let qk = s.splat(s.dot(token.q, token.k));
            let o = s.mul_add(qk, d, s.mul(s.splat(token.alpha), w));
            // SAFETY: this head and block's columns of this node belong to this task alone.
            s.store_slice(o, unsafe { self.out.part(at.clone()) });
            // SAFETY: as above.
            let updates = unsafe { self.updates.part(at) };
            s.store_slice(d, updates);
            let mut after = before.to_vec();
            Update {
                state: &mut after,
                token,
                d: updates,
            }
            .run(s);
            states.push(after);
        }
    }
}

struct Update<'a> {
    state: &'a mut [f32],
    token: Token<'a>,
    d: &'a [f32],
}

impl Kernel for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d = s.load_slice(self.d);
        let alpha = s.splat(self.token.alpha);
        for (row, k) in self.state.chunks_exact_mut(LANES).zip(self.token.k) {
            let decayed = s.mul(alpha, s.load_slice(row));
            s.store_slice(s.mul_add(s.splat(*k), d, decayed), row);
        }
    }
}

/// Decays and rates of a layer: `alpha = exp(-exp(a_log) * softplus(a + dt_bias))` and
/// `beta = sigmoid(b)`.
///
/// `a` and `b` hold m rows of `value_heads` values where `a_at` and `b_at` say (one "head" each);
/// `a_log` and `dt_bias` have `value_heads` values; `alpha` and `beta` are m rows of them.
///
/// # Panics
/// If the lengths do not fit.
#[allow(clippy::too_many_arguments)]
pub fn delta_gates(
    cpu: &Cpu,
    (a, a_at): (&[f32], Heads),
    (b, b_at): (&[f32], Heads),
    a_log: &[f32],
    dt_bias: &[f32],
    alpha: &mut [f32],
    beta: &mut [f32],
) {
    let heads = a_log.len();
    let rows = a_at.rows(a.len());
    assert_eq!(b_at.rows(b.len()), rows, "rows of a and b");
    assert_eq!((a_at.count, a_at.dim), (1, heads), "width of a");
    assert_eq!((b_at.count, b_at.dim), (1, heads), "width of b");
    assert_eq!(dt_bias.len(), heads, "width of dt_bias");
    assert_eq!((alpha.len(), beta.len()), (rows * heads, rows * heads));
    for row in 0..rows {
        dispatch(
            cpu.isa(),
            Gates {
                a: &a[a_at.range(row, 0)],
                b: &b[b_at.range(row, 0)],
                a_log,
                dt_bias,
                alpha: &mut alpha[row * heads..][..heads],
                beta: &mut beta[row * heads..][..heads],
            },
        );
    }
}

struct Gates<'a> {
    a: &'a [f32],
    b: &'a [f32],
    a_log: &'a [f32],
    dt_bias: &'a [f32],
    alpha: &'a mut [f32],
    beta: &'a mut [f32],
}

impl Kernel for Gates<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for from in (0..self.a.len()).step_by(LANES) {
            let range = from..self.a.len().min(from + LANES);
            let a = s.add(
                s.load_slice(&self.a[range.clone()]),
                s.load_slice(&self.dt_bias[range.clone()]),
            );
            let rate = s.exp(s.load_slice(&self.a_log[range.clone()]));
            let g = s.mul(s.sub(s.zero(), rate), s.softplus(a));
            s.store_slice(s.exp(g), &mut self.alpha[range.clone()]);
            let beta = s.sigmoid(s.load_slice(&self.b[range.clone()]));
            s.store_slice(beta, &mut self.beta[range]);
        }
    }
}
