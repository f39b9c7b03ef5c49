//! Gated DeltaNet (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464), as
//! Qwen3.5 uses it:
//!
//! ```text
//! mixed   = silu(conv(in_proj_qkv(x)));  q, k, v = split(mixed)
//! q       = l2norm(q) / sqrt(key_dim);   k = l2norm(k)
//! beta    = sigmoid(in_proj_b(x))
//! alpha   = exp(-exp(A_log) * softplus(in_proj_a(x) + dt_bias))
//! S       = alpha S;  S = S + k (beta (v - k^T S))^T;  o = q^T S        per value head
//! out     = out_proj(rms_norm(o) * silu(in_proj_z(x)))
//! ```

use kozue_checkpoint::{Tensors, description::ModelConfig};
use kozue_kernels::{
    Conv, ConvState, Cpu, DeltaRows, DeltaShape, DeltaState, Heads, Linear, Scratch, delta_advance,
    delta_chain, delta_gates, delta_tree, gated_norm, l2_norm_heads, linear,
};

use crate::layer::projection;
use crate::pass::{Rows, Span};
use crate::state::LayerState;
use crate::{Error, Tree};

/// Keeps the length of a query or key of zeros from dividing by zero, as transformers has it.
const L2_EPS: f32 = 1e-6;

pub(crate) struct Delta {
    shape: DeltaShape,
    norm_eps: f32,
    /// Queries, keys and values, then z, then b, then a.
    input: Linear,
    qkv_at: Heads,
    z_at: Heads,
    b_at: Heads,
    a_at: Heads,
    output: Linear,
    conv: Conv,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

/// What a verified tree leaves behind, so that an accepted path can be replayed. Its memory is used
/// again for the next tree.
#[derive(Default)]
pub(crate) struct DeltaReplay {
    /// Nodes of the tree; 0 if no tree waits.
    rows: usize,
    /// Inputs of the convolution, rows x channels.
    inputs: Vec<f32>,
    mixed: Vec<f32>,
    alpha: Vec<f32>,
    beta: Vec<f32>,
    updates: Vec<f32>,
}

impl Clone for DeltaReplay {
    fn clone(&self) -> Self {
        if self.rows == 0 {
            return Self::default();
        }
        Self {
            rows: self.rows,
            inputs: self.inputs.clone(),
            mixed: self.mixed.clone(),
            alpha: self.alpha.clone(),
            beta: self.beta.clone(),
            updates: self.updates.clone(),
        }
    }
}

impl DeltaReplay {
    /// Makes room for a tree.
    fn begin(&mut self, rows: usize, shape: &DeltaShape) {
        let grow = |buffer: &mut Vec<f32>, width: usize| {
            if buffer.len() < rows * width {
                buffer.resize(rows * width, 0.0);
            }
        };
        grow(&mut self.inputs, shape.mixed());
        grow(&mut self.mixed, shape.mixed());
        grow(&mut self.alpha, shape.value_heads);
        grow(&mut self.beta, shape.value_heads);
        grow(&mut self.updates, shape.values());
        self.rows = rows;
    }

    /// What the recurrence reads.
    fn inputs(&self, shape: &DeltaShape) -> DeltaRows<'_> {
        DeltaRows {
            mixed: &self.mixed[..self.rows * shape.mixed()],
            alpha: &self.alpha[..self.rows * shape.value_heads],
            beta: &self.beta[..self.rows * shape.value_heads],
        }
    }

    /// Advances window and memory along `path` as if its rows had come one by one.
    pub(crate) fn run(
        &self,
        cpu: &Cpu,
        window: &mut ConvState,
        memory: &mut DeltaState,
        path: &[usize],
    ) {
        let shape = memory.shape();
        let inputs = &self.inputs[..self.rows * shape.mixed()];
        window.advance(inputs, Heads::packed(1, shape.mixed()), path);
        let updates = &self.updates[..self.rows * shape.values()];
        delta_advance(cpu, memory, self.inputs(&shape), updates, path);
    }

    /// Forgets the tree.
    pub(crate) fn end(&mut self) {
        self.rows = 0;
    }
}

/// One segment's part of a layer.
pub(crate) struct Part<'a> {
    pub(crate) span: Span,
    pub(crate) rows: Rows<'a>,
    pub(crate) window: &'a mut ConvState,
    pub(crate) memory: &'a mut DeltaState,
    pub(crate) replay: &'a mut DeltaReplay,
}

/// What the recurrent layers of one segment keep for its snapshots.
pub(crate) struct Kept<'a> {
    /// After how many rows of a chain windows and memories are copied; ascending.
    after: &'a [usize],
    /// The copies of each snapshot, layer by layer.
    pub(crate) memories: Vec<Vec<(ConvState, DeltaState)>>,
}

impl<'a> Kept<'a> {
    pub(crate) fn new(after: &'a [usize]) -> Kept<'a> {
        Kept {
            after,
            memories: vec![Vec::new(); after.len()],
        }
    }
}

impl Delta {
    pub(crate) fn load(
        checkpoint: &impl Tensors,
        config: &ModelConfig,
        prefix: &str,
    ) -> Result<Self, Error> {
        let of = config.delta.as_ref().ok_or_else(|| Error::Layer {
            name: prefix.to_string(),
            reason: "the configuration has no Gated DeltaNet shapes".to_string(),
        })?;
        let (channels, values, heads) = (of.conv_channels(), of.value_width(), of.value_heads);
        let vector = |name: &str, len: usize| checkpoint.vector(&format!("{prefix}.{name}"), len);
        let row = channels + values + 2 * heads;
        let at = |offset: usize, dim: usize| Heads {
            row,
            offset,
            pitch: dim,
            count: 1,
            dim,
        };
        Ok(Self {
            shape: DeltaShape {
                key_heads: of.key_heads,
                value_heads: of.value_heads,
                key_dim: of.key_dim,
                value_dim: of.value_dim,
            },
            norm_eps: config.norm_eps,
            input: projection(
                checkpoint,
                prefix,
                &[
                    ("in_proj_qkv", channels),
                    ("in_proj_z", values),
                    ("in_proj_b", heads),
                    ("in_proj_a", heads),
                ],
                config.hidden_size,
                false,
            )?,
            qkv_at: at(0, channels),
            z_at: Heads {
                row,
                offset: channels,
                pitch: of.value_dim,
                count: heads,
                dim: of.value_dim,
            },
            b_at: at(channels + values, heads),
            a_at: at(channels + values + heads, heads),
            output: projection(
                checkpoint,
                prefix,
                &[("out_proj", config.hidden_size)],
                values,
                false,
            )?,
            conv: Conv::new(
                &vector("conv1d.weight", channels * of.conv_kernel)?,
                channels,
                of.conv_kernel,
            ),
            a_log: vector("A_log", heads)?,
            dt_bias: vector("dt_bias", heads)?,
            norm: vector("norm.weight", of.value_dim)?,
        })
    }

    pub(crate) fn new_state(&self) -> LayerState {
        LayerState::Delta {
            window: self.conv.state(),
            memory: DeltaState::new(self.shape),
            replay: DeltaReplay::default(),
        }
    }

    /// x: rows x hidden size, already normed; the same shape comes back. Chains advance their
    /// states; what a chain's snapshots need goes to `kept`.
    pub(crate) fn forward<'c>(
        &self,
        cpu: &'c Cpu,
        x: &[f32],
        rows: usize,
        parts: &mut [Part<'_>],
        kept: &mut [Kept<'_>],
    ) -> Scratch<'c, f32> {
        let (width, heads) = (self.input.outputs(), self.shape.value_heads);
        let values = self.shape.values();
        let mut projected = cpu.scratch(rows * width);
        linear(cpu, &self.input, x, &mut projected);

        let mut alpha = cpu.scratch(rows * heads);
        let mut beta = cpu.scratch(rows * heads);
        delta_gates(
            cpu,
            (&projected, self.a_at),
            (&projected, self.b_at),
            &self.a_log,
            &self.dt_bias,
            &mut alpha,
            &mut beta,
        );
        let mut read = cpu.scratch(rows * values);
        for (part, kept) in parts.iter_mut().zip(kept) {
            let span = part.span.clone();
            let projected = span.of(&projected, width);
            let gates = (span.of(&alpha, heads), span.of(&beta, heads));
            let out = span.of_mut(&mut read, values);
            match part.rows {
                Rows::Chain(_) => self.chain(cpu, part, projected, gates, kept, out),
                Rows::Tree(tree) => self.tree(cpu, part, projected, gates, tree, out),
            }
        }
        let read_at = Heads::packed(heads, self.shape.value_dim);
        gated_norm(
            cpu,
            &mut read,
            read_at,
            &projected,
            self.z_at,
            &self.norm,
            self.norm_eps,
        );
        let mut out = cpu.scratch(rows * self.output.outputs());
        linear(cpu, &self.output, &read, &mut out);
        out
    }

    /// Reads a chain into window and memory, with copies of both after the rows of each snapshot.
    fn chain(
        &self,
        cpu: &Cpu,
        part: &mut Part<'_>,
        projected: &[f32],
        (alpha, beta): (&[f32], &[f32]),
        kept: &mut Kept<'_>,
        out: &mut [f32],
    ) {
        let (shape, rows) = (self.shape, part.span.len());
        part.replay.end();
        let mut mixed = cpu.scratch(rows * shape.mixed());
        let parents: Vec<i32> = (-1..rows as i32 - 1).collect();
        self.mix(cpu, part.window, projected, &parents, &mut mixed, None);
        let inputs = DeltaRows {
            mixed: &mixed,
            alpha,
            beta,
        };
        let path: Vec<usize> = (0..rows).collect();
        let (mut late, mut late_out, mut done) = (inputs, out, 0);
        for (&after, memories) in kept.after.iter().zip(&mut kept.memories) {
            let (early, rest) = late.split_at(after - done, shape);
            let (early_out, rest_out) = late_out.split_at_mut((after - done) * shape.values());
            if !early_out.is_empty() {
                delta_chain(cpu, part.memory, early, early_out);
            }
            let mut window = part.window.clone();
            window.advance(projected, self.qkv_at, &path[..after]);
            memories.push((window, part.memory.clone()));
            (late, late_out, done) = (rest, rest_out, after);
        }
        part.window.advance(projected, self.qkv_at, &path);
        if !late_out.is_empty() {
            delta_chain(cpu, part.memory, late, late_out);
        }
    }

    /// Reads a tree, which changes neither window nor memory, and keeps what its commit needs.
    fn tree(
        &self,
        cpu: &Cpu,
        part: &mut Part<'_>,
        projected: &[f32],
        (alpha, beta): (&[f32], &[f32]),
        tree: &Tree,
        out: &mut [f32],
    ) {
        let (shape, rows) = (self.shape, tree.len());
        let channels = shape.mixed();
        let replay = &mut *part.replay;
        replay.begin(rows, &shape);
        replay.alpha[..alpha.len()].copy_from_slice(alpha);
        replay.beta[..beta.len()].copy_from_slice(beta);
        let mixed = &mut replay.mixed[..rows * channels];
        let inputs = &mut replay.inputs[..rows * channels];
        let parents = tree.parents();
        self.mix(cpu, part.window, projected, parents, mixed, Some(inputs));
        let mut updates = std::mem::take(&mut replay.updates);
        delta_tree(
            cpu,
            part.memory,
            replay.inputs(&shape),
            parents,
            out,
            &mut updates[..rows * shape.values()],
        );
        replay.updates = updates;
    }

    /// Queries, keys and values as the recurrence takes them. The convolution's inputs go to `kept`.
    fn mix(
        &self,
        cpu: &Cpu,
        window: &ConvState,
        projected: &[f32],
        parents: &[i32],
        mixed: &mut [f32],
        kept: Option<&mut [f32]>,
    ) {
        let at = self.qkv_at;
        self.conv
            .silu(cpu, window, projected, at, parents, mixed, kept);
        let [q_at, k_at] = self.shape.query_and_key_heads();
        let q_scale = (self.shape.key_dim as f32).powf(-0.5);
        l2_norm_heads(cpu, mixed, q_at, L2_EPS, q_scale);
        l2_norm_heads(cpu, mixed, k_at, L2_EPS, 1.0);
    }
}
