//! The recurrence on some columns of one value head, along a plan.

use crate::lanes::{Kernel, LANES, Simd};
use crate::rows::Shared;

use super::DeltaShape;
use super::inputs::{Input, Inputs};
use super::plan::{Place, Step};

/// Blocks of sixteen columns that are walked together: enough chains of multiply-adds to keep two
/// units busy, few enough for a tree's states to stay in the first cache.
pub(super) const TOGETHER: usize = 2;

/// Up to `TOGETHER` blocks of columns of one value head.
pub(super) struct Walk<'a> {
    pub(super) shape: &'a DeltaShape,
    pub(super) steps: &'a [Step],
    /// What the steps read, in their order.
    pub(super) inputs: Inputs<&'a [f32]>,
    pub(super) head: usize,
    /// The first block of columns.
    pub(super) block: usize,
    /// The blocks' state. Written only where the plan says so.
    pub(super) live: *mut f32,
    /// As much room for each of the plan's buffers.
    pub(super) buffers: &'a mut [f32],
    pub(super) out: &'a Shared<'a, f32>,
    pub(super) updates: Option<&'a Shared<'a, f32>>,
}

impl Kernel for Walk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let blocks = self.shape.blocks() - self.block;
        if blocks >= 2 && S::REGISTERS >= 16 {
            self.columns::<S, 2>(s, 0);
            return;
        }
        for block in 0..blocks.min(TOGETHER) {
            self.columns::<S, 1>(s, block);
        }
    }
}

impl Walk<'_> {
    /// N blocks of columns from the walk's block number `skip` on.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&self, s: S, skip: usize) {
        let shape = self.shape;
        let size = shape.block();
        let steps = self.steps;
        let place = |place: Place| -> *mut f32 {
            match place {
                Place::Live => self.live.wrapping_add(skip * size),
                Place::Buffer(i) => {
                    let start = (i * TOGETHER + skip) * size;
                    debug_assert!(start + N * size <= self.buffers.len());
                    self.buffers.as_ptr().cast_mut().wrapping_add(start)
                }
            }
        };
        let column = (self.block + skip) * LANES;
        let columns = column..shape.value_dim.min(column + N * LANES);
        let mut carried = None;
        for (i, step) in steps.iter().enumerate() {
            let token = self.inputs.at(i);
            let from = place(step.from);
            let [u, w] = match carried.take() {
                Some(sums) => sums,
                // SAFETY: a place holds N blocks of `key_dim` rows.
                None => unsafe { read::<S, N>(s, from, &token) },
            };
            let v = load::<S, N>(s, &token.v[columns.clone()]);
            let alpha = s.splat(token.alpha);
            let (minus_alpha, beta) = (s.splat(-token.alpha), s.splat(token.beta));
            let product = s.splat(token.product);
            let (mut d, mut o) = ([s.zero(); N], [s.zero(); N]);
            for j in 0..N {
                d[j] = s.mul(beta, s.mul_add(minus_alpha, u[j], v[j]));
                o[j] = s.mul_add(product, d[j], s.mul(alpha, w[j]));
            }
            let at = step.node * shape.values() + self.head * shape.value_dim;
            let at = at + columns.start..at + columns.end;
            // SAFETY: these columns of this node belong to this walk alone.
            store(s, o, unsafe { self.out.part(at.clone()) });
            if let Some(updates) = self.updates {
                // SAFETY: as above.
                store(s, d, unsafe { updates.part(at) });
            }
            let Some(to) = step.to else { continue };
            let to = place(to);
            if step.feeds_next {
                let next = self.inputs.at(i + 1);
                // SAFETY: as above; only buffers and, for a chain, the live state are written,
                // and both belong to this walk alone.
                carried = Some(unsafe { write_and_read::<S, N>(s, from, to, &token, d, &next) });
            } else {
                // SAFETY: as above.
                unsafe { write::<S, N>(s, from, to, token.k, token.alpha, d) };
            }
        }
    }
}

/// Replays updates on up to `TOGETHER` blocks of columns of one value head.
pub(super) struct Replay<'a> {
    pub(super) shape: &'a DeltaShape,
    pub(super) path: &'a [Step],
    /// What the nodes of the path read, in its order.
    pub(super) inputs: Inputs<&'a [f32]>,
    pub(super) head: usize,
    pub(super) block: usize,
    pub(super) state: &'a mut [f32],
    pub(super) updates: &'a [f32],
}

impl Kernel for Replay<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let key_dim = self.shape.key_dim;
        for block in 0..self.state.len() / self.shape.block() {
            let mut row = 0;
            if S::REGISTERS >= 32 {
                while row + 8 <= key_dim {
                    self.rows::<S, 8>(s, block, row);
                    row += 8;
                }
            }
            while row + 4 <= key_dim {
                self.rows::<S, 4>(s, block, row);
                row += 4;
            }
            while row < key_dim {
                self.rows::<S, 1>(s, block, row);
                row += 1;
            }
        }
    }
}

impl Replay<'_> {
    /// The whole path on R rows of a block, held in registers.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(&mut self, s: S, block: usize, row: usize) {
        let shape = self.shape;
        let column = (self.block + block) * LANES;
        let width = LANES.min(shape.value_dim - column);
        let (state, _) = self.state[block * shape.block()..].as_chunks_mut::<LANES>();
        let state = &mut state[row..][..R];
        let mut rows = [s.zero(); R];
        for (row, state) in rows.iter_mut().zip(&*state) {
            *row = s.load(state);
        }
        for (i, step) in self.path.iter().enumerate() {
            let input = self.inputs.at(i);
            let at = step.node * shape.values() + self.head * shape.value_dim + column;
            let d = s.load_slice(&self.updates[at..at + width]);
            let alpha = s.splat(input.alpha);
            for (row, k) in rows.iter_mut().zip(&input.k[row..][..R]) {
                *row = s.mul_add(s.splat(*k), d, s.mul(alpha, *row));
            }
        }
        for (row, state) in rows.into_iter().zip(state) {
            s.store(row, state);
        }
    }
}

#[inline(always)]
fn load<S: Simd, const N: usize>(s: S, x: &[f32]) -> [S::V; N] {
    let mut out = [s.zero(); N];
    for (out, x) in out.iter_mut().zip(x.chunks(LANES)) {
        *out = s.load_slice(x);
    }
    out
}

#[inline(always)]
fn store<S: Simd, const N: usize>(s: S, v: [S::V; N], to: &mut [f32]) {
    for (v, to) in v.into_iter().zip(to.chunks_mut(LANES)) {
        s.store_slice(v, to);
    }
}

/// Row i of N blocks.
///
/// # Safety
/// `state` points to N blocks of `key_dim` rows, and i is below `key_dim`.
#[inline(always)]
unsafe fn row<S: Simd, const N: usize>(
    s: S,
    state: *const f32,
    i: usize,
    key_dim: usize,
) -> [S::V; N] {
    let mut out = [s.zero(); N];
    for (j, out) in out.iter_mut().enumerate() {
        // SAFETY: by the caller's promise.
        *out = s.load(unsafe { &*state.add((j * key_dim + i) * LANES).cast() });
    }
    out
}

/// One chain for the even rows and one for the odd.
type Sums<V, const N: usize> = [[V; N]; 2];

#[inline(always)]
fn add_row<S: Simd, const N: usize>(s: S, x: f32, row: [S::V; N], sums: &mut [S::V; N]) {
    let x = s.splat(x);
    for (sum, row) in sums.iter_mut().zip(row) {
        *sum = s.mul_add(x, row, *sum);
    }
}

#[inline(always)]
fn total<S: Simd, const N: usize>(s: S, sums: Sums<S::V, N>) -> [S::V; N] {
    let mut out = sums[0];
    for (out, odd) in out.iter_mut().zip(sums[1]) {
        *out = s.add(*out, odd);
    }
    out
}

/// u = S^T k and w = S^T q.
///
/// # Safety
/// `state` points to N blocks of as many rows as the token has key entries.
#[inline(always)]
unsafe fn read<S: Simd, const N: usize>(s: S, state: *const f32, token: &Input) -> [[S::V; N]; 2] {
    let key_dim = token.k.len();
    let (mut u, mut w) = ([[s.zero(); N]; 2], [[s.zero(); N]; 2]);
    let (k, q) = (&token.k[..key_dim], &token.q[..key_dim]);
    let mut i = 0;
    while i + 2 <= key_dim {
        for odd in 0..2 {
            // SAFETY: i + odd < key_dim.
            let row = unsafe { row::<S, N>(s, state, i + odd, key_dim) };
            add_row(s, k[i + odd], row, &mut u[odd]);
            add_row(s, q[i + odd], row, &mut w[odd]);
        }
        i += 2;
    }
    if i < key_dim {
        // SAFETY: i < key_dim.
        let row = unsafe { row::<S, N>(s, state, i, key_dim) };
        add_row(s, k[i], row, &mut u[0]);
        add_row(s, q[i], row, &mut w[0]);
    }
    [total(s, u), total(s, w)]
}

/// Row i of alpha S + k d^T, stored to `to`.
///
/// # Safety
/// `from` and `to`, which may be the same, point to N blocks of as many rows as the token has key
/// entries, and i is below that.
#[inline(always)]
unsafe fn write_row<S: Simd, const N: usize>(
    s: S,
    from: *const f32,
    to: *mut f32,
    i: usize,
    k: &[f32],
    alpha: S::V,
    d: [S::V; N],
) -> [S::V; N] {
    let key_dim = k.len();
    // SAFETY: by the caller's promise.
    let mut row = unsafe { row::<S, N>(s, from, i, key_dim) };
    let k = s.splat(k[i]);
    for (j, (row, d)) in row.iter_mut().zip(d).enumerate() {
        *row = s.mul_add(k, d, s.mul(alpha, *row));
        // SAFETY: by the caller's promise.
        s.store(*row, unsafe {
            &mut *to.add((j * key_dim + i) * LANES).cast()
        });
    }
    row
}

/// S <- alpha S + k d^T.
///
/// # Safety
/// As `write_row`.
#[inline(always)]
unsafe fn write<S: Simd, const N: usize>(
    s: S,
    from: *const f32,
    to: *mut f32,
    k: &[f32],
    alpha: f32,
    d: [S::V; N],
) {
    let alpha = s.splat(alpha);
    for i in 0..k.len() {
        // SAFETY: by the caller's promise.
        unsafe { write_row(s, from, to, i, k, alpha, d) };
    }
}

/// `write`, and `read` of what was written for the next token, in one pass.
///
/// # Safety
/// As `write_row`.
#[inline(always)]
unsafe fn write_and_read<S: Simd, const N: usize>(
    s: S,
    from: *const f32,
    to: *mut f32,
    token: &Input,
    d: [S::V; N],
    next: &Input,
) -> [[S::V; N]; 2] {
    let key_dim = token.k.len();
    let alpha = s.splat(token.alpha);
    let (mut u, mut w) = ([[s.zero(); N]; 2], [[s.zero(); N]; 2]);
    let (k, q) = (&next.k[..key_dim], &next.q[..key_dim]);
    let mut i = 0;
    while i + 2 <= key_dim {
        for odd in 0..2 {
            // SAFETY: by the caller's promise, and i + odd < key_dim.
            let row = unsafe { write_row(s, from, to, i + odd, token.k, alpha, d) };
            add_row(s, k[i + odd], row, &mut u[odd]);
            add_row(s, q[i + odd], row, &mut w[odd]);
        }
        i += 2;
    }
    if i < key_dim {
        // SAFETY: by the caller's promise, and i < key_dim.
        let row = unsafe { write_row(s, from, to, i, token.k, alpha, d) };
        add_row(s, k[i], row, &mut u[0]);
        add_row(s, q[i], row, &mut w[0]);
    }
    [total(s, u), total(s, w)]
}
