//! The inputs of one value head, gathered in the order of a plan.
//!
//! Rows of activations lie far apart, in pages of their own, and every group of columns reads them
//! again; gathered, they are one stream in the second cache.

use crate::lanes::{Kernel, LANES, Simd};

use super::plan::Step;
use super::{DeltaShape, HeadRows};

/// Gathered rows of [alpha, beta, q . k | q | k | v], each part padded to whole vectors.
pub(super) struct Inputs<D> {
    data: D,
    key_dim: usize,
    value_dim: usize,
}

/// What a step reads.
pub(super) struct Input<'a> {
    pub(super) alpha: f32,
    pub(super) beta: f32,
    /// q . k.
    pub(super) product: f32,
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
}

impl Inputs<()> {
    /// Values of a gathered row.
    pub(super) fn row(shape: &DeltaShape) -> usize {
        let keys = shape.key_dim.next_multiple_of(LANES);
        LANES + 2 * keys + shape.value_dim.next_multiple_of(LANES)
    }

    pub(super) fn new<D>(shape: &DeltaShape, data: D) -> Inputs<D> {
        Inputs {
            data,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
        }
    }
}

impl<D> Inputs<D> {
    fn keys(&self) -> usize {
        self.key_dim.next_multiple_of(LANES)
    }

    fn width(&self) -> usize {
        LANES + 2 * self.keys() + self.value_dim.next_multiple_of(LANES)
    }
}

impl<'a> Inputs<&'a [f32]> {
    #[inline(always)]
    pub(super) fn at(&self, step: usize) -> Input<'a> {
        let row = &self.data[step * self.width()..][..self.width()];
        let (scalars, rest) = row.split_at(LANES);
        let (q, rest) = rest.split_at(self.keys());
        let (k, v) = rest.split_at(self.keys());
        Input {
            alpha: scalars[0],
            beta: scalars[1],
            product: scalars[2],
            q: &q[..self.key_dim],
            k: &k[..self.key_dim],
            v: &v[..self.value_dim],
        }
    }
}

/// Gathers the rows of some steps.
pub(super) struct Gather<'a> {
    pub(super) steps: &'a [Step],
    pub(super) rows: HeadRows<'a>,
    pub(super) inputs: Inputs<&'a mut [f32]>,
}

impl Kernel for Gather<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (width, keys) = (self.inputs.width(), self.inputs.keys());
        let rows = self.inputs.data.chunks_exact_mut(width);
        for (step, row) in self.steps.iter().zip(rows) {
            let token = self.rows.at(step.node);
            let (scalars, rest) = row.split_at_mut(LANES);
            let (q, rest) = rest.split_at_mut(keys);
            let (k, v) = rest.split_at_mut(keys);
            scalars[..3].copy_from_slice(&[token.alpha, token.beta, s.dot(token.q, token.k)]);
            q[..token.q.len()].copy_from_slice(token.q);
            k[..token.k.len()].copy_from_slice(token.k);
            v[..token.v.len()].copy_from_slice(token.v);
        }
    }
}
