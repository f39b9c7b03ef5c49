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

use kozue_checkpoint::{Checkpoint, description::ModelConfig};
use kozue_kernels::{
    Conv, ConvState, Cpu, DeltaRows, DeltaShape, DeltaState, Heads, Linear, Scratch, delta_advance,
    delta_chain, delta_gates, delta_tree, gated_norm, l2_norm_heads, linear,
};

use crate::Error;
use crate::model::projection;
use crate::pass::{Rows, Span};
use crate::state::LayerState;

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

/// What a verified tree leaves behind, so that an accepted path can be replayed.
#[derive(Clone)]
pub(crate) struct DeltaReplay {
    /// Inputs of the convolution, rows x channels.
    inputs: Vec<f32>,
    mixed: Vec<f32>,
    alpha: Vec<f32>,
    beta: Vec<f32>,
    updates: Vec<f32>,
}

impl DeltaReplay {
    /// Advances window and memory along `path` as if its rows had come one by one.
    pub(crate) fn run(
        &self,
        cpu: &Cpu,
        window: &mut ConvState,
        memory: &mut DeltaState,
        path: &[usize],
    ) {
        let rows = DeltaRows {
            mixed: &self.mixed,
            alpha: &self.alpha,
            beta: &self.beta,
        };
        window.advance(&self.inputs, Heads::packed(1, memory.shape().mixed()), path);
        delta_advance(cpu, memory, rows, &self.updates, path);
    }
}

/// What the recurrent layers of one segment keep besides their states.
#[derive(Default)]
pub(crate) struct Kept {
    /// After how many rows of a chain windows and memories are copied.
    snapshot: Option<usize>,
    /// The copies, layer by layer.
    pub(crate) memories: Vec<(ConvState, DeltaState)>,
    /// The copy of a window whose memory is still to come.
    window: Option<ConvState>,
    /// Of a tree what its commit needs, layer by layer.
    pub(crate) replays: Vec<DeltaReplay>,
}

impl Kept {
    pub(crate) fn new(snapshot: Option<usize>) -> Kept {
        Kept {
            snapshot,
            ..Kept::default()
        }
    }
}

impl Delta {
    pub(crate) fn load(
        checkpoint: &Checkpoint,
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
        }
    }

    /// x: rows x hidden size, already normed; the same shape comes back. Chains advance their
    /// states; what a tree's commit and a chain's snapshot need goes to `kept`.
    pub(crate) fn forward<'c>(
        &self,
        cpu: &'c Cpu,
        x: &[f32],
        rows: usize,
        parts: &mut [(Span, Rows<'_>, &mut ConvState, &mut DeltaState)],
        kept: &mut [Kept],
    ) -> Scratch<'c, f32> {
        let shape = self.shape;
        let (width, channels) = (self.input.outputs(), shape.mixed());
        let (values, heads) = (shape.values(), shape.value_heads);
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
        let mut mixed = cpu.scratch(rows * channels);
        for ((span, part, window, _), kept) in parts.iter_mut().zip(kept.iter_mut()) {
            let from = span.of(&projected, width);
            let to = span.of_mut(&mut mixed, channels);
            match part {
                Rows::Chain(_) => {
                    let parents: Vec<i32> = (-1..span.len() as i32 - 1).collect();
                    let path: Vec<usize> = (0..span.len()).collect();
                    self.conv.silu(cpu, window, from, self.qkv_at, &parents, to);
                    if let Some(rows) = kept.snapshot {
                        let mut window = window.clone();
                        window.advance(from, self.qkv_at, &path[..rows]);
                        kept.window = Some(window);
                    }
                    window.advance(from, self.qkv_at, &path);
                }
                Rows::Tree(tree) => {
                    self.conv
                        .silu(cpu, window, from, self.qkv_at, tree.parents(), to);
                }
            }
        }
        let [q_at, k_at] = shape.query_and_key_heads();
        l2_norm_heads(
            cpu,
            &mut mixed,
            q_at,
            L2_EPS,
            (shape.key_dim as f32).powf(-0.5),
        );
        l2_norm_heads(cpu, &mut mixed, k_at, L2_EPS, 1.0);

        let mut read = cpu.scratch(rows * values);
        for (index, (span, part, _, memory)) in parts.iter_mut().enumerate() {
            let inputs = DeltaRows {
                mixed: span.of(&mixed, channels),
                alpha: span.of(&alpha, heads),
                beta: span.of(&beta, heads),
            };
            let out = span.of_mut(&mut read, values);
            match part {
                Rows::Chain(_) => {
                    let kept = &mut kept[index];
                    let first = kept.snapshot.unwrap_or(0);
                    let (early, late) = inputs.split_at(first, shape);
                    let (early_out, late_out) = out.split_at_mut(first * values);
                    if first > 0 {
                        delta_chain(cpu, memory, early, early_out);
                    }
                    if let Some(window) = kept.window.take() {
                        kept.memories.push((window, memory.clone()));
                    }
                    if !late_out.is_empty() {
                        delta_chain(cpu, memory, late, late_out);
                    }
                }
                Rows::Tree(tree) => {
                    let mut updates = vec![0.0; span.len() * values];
                    delta_tree(cpu, memory, inputs, tree.parents(), out, &mut updates);
                    kept[index].replays.push(DeltaReplay {
                        inputs: span
                            .of(&projected, width)
                            .chunks_exact(width)
                            .flat_map(|row| &row[..channels])
                            .copied()
                            .collect(),
                        mixed: inputs.mixed.to_vec(),
                        alpha: inputs.alpha.to_vec(),
                        beta: inputs.beta.to_vec(),
                        updates,
                    });
                }
            }
        }
        let read_at = Heads::packed(heads, shape.value_dim);
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
}
