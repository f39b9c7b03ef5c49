//! What goes into a pass and what comes out of it.

use kozue_kernels::Scratch;

use crate::{State, Tree};

/// The rows that one sequence puts into a pass.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// Tokens that follow one another; the state advances over all of them.
    Chain(&'a [u32]),
    /// Drafted tokens; the state stays as it is until [`State::commit`].
    Tree(&'a Tree),
}

impl Rows<'_> {
    /// Tokens of the rows, in order.
    pub fn tokens(&self) -> &[u32] {
        match self {
            Rows::Chain(tokens) => tokens,
            Rows::Tree(tree) => tree.tokens(),
        }
    }

    /// Positions that the rows take up.
    pub(crate) fn depth(&self) -> usize {
        match self {
            Rows::Chain(tokens) => tokens.len(),
            Rows::Tree(tree) => tree.depths().iter().max().map_or(0, |&d| d as usize + 1),
        }
    }
}

/// One sequence's part of a pass.
pub struct Segment<'a, S = State> {
    /// The sequence.
    pub state: &'a mut S,
    /// What it reads.
    pub rows: Rows<'a>,
    /// For how many of its last rows logits are made. A prefill chunk needs none or one, a tree
    /// needs all.
    pub logit_rows: usize,
    /// After how many rows of a chain snapshots of the state are wanted, to go on from later;
    /// ascending.
    pub snapshots: &'a [usize],
}

/// What a pass returns besides logits.
#[derive(Clone, Copy, Default)]
pub struct Outputs<'a> {
    /// Layers whose residual stream (after the layer) is wanted for every row, in this order.
    pub taps: &'a [usize],
    /// Whether the normed final hidden state is wanted for the rows that have logits.
    pub hidden: bool,
}

/// Results of a pass; the rows of all segments one after another, in reused memory.
pub struct PassOutput<'c, S = State> {
    /// Logits, rows x vocabulary, for the wanted rows of each segment in turn.
    pub logits: Scratch<'c, f32>,
    /// Tapped residual streams, all rows x (taps x hidden size).
    pub features: Scratch<'c, f32>,
    /// Final hidden states after the output norm, rows x hidden size, for the rows with logits.
    pub hidden: Scratch<'c, f32>,
    /// For each segment the snapshots that it asked for.
    pub snapshots: Vec<Vec<S>>,
}

/// Where a segment's rows lie among the rows of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl Span {
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    /// The part of a row-major matrix of `width` columns that belongs to this span.
    pub(crate) fn of<'m>(&self, matrix: &'m [f32], width: usize) -> &'m [f32] {
        &matrix[self.start * width..self.end * width]
    }

    /// As [`Span::of`], to write to.
    pub(crate) fn of_mut<'m>(&self, matrix: &'m mut [f32], width: usize) -> &'m mut [f32] {
        &mut matrix[self.start * width..self.end * width]
    }
}
