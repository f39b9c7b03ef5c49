//! A decoder layer: a mixer and an MLP, with the norms before and around them.

use std::sync::Arc;

use kozue_checkpoint::{
    Tensors,
    description::{Mixer, ModelConfig, RopeConfig},
};
use kozue_kernels::{Cpu, Heads, KvType, Linear, Rope, add_assign, add_rms_norm, rms_norm_heads};

use crate::Error;
use crate::attention::Attention;
use crate::delta::{self, Delta, Kept};
use crate::mlp::FeedForward;
use crate::pass::{Segment, Span};
use crate::state::LayerState;

/// A decoder layer.
pub(crate) struct Layer {
    input_norm: Vec<f32>,
    mixer: Weights,
    /// Of what the mixer made, where the family has it.
    mixed_norm: Option<Vec<f32>>,
    post_norm: Vec<f32>,
    mlp: FeedForward,
    /// Of what the MLP made, where the family has it.
    made_norm: Option<Vec<f32>>,
}

enum Weights {
    Attention(Attention),
    Delta(Delta),
}

/// What layers share: the rotations of those that see everything, and of those that see a window.
pub(crate) struct Ropes {
    full: Arc<Rope>,
    sliding: Option<(Arc<Rope>, usize)>,
}

impl Ropes {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let rope = |rope: &RopeConfig| {
            Arc::new(Rope::new(rope.inverse_frequencies(), config.max_position))
        };
        let full = rope(&config.attention.rope);
        let sliding = config.attention.sliding.as_ref().map(|sliding| {
            let same = sliding.rope == config.attention.rope;
            let rope = if same {
                full.clone()
            } else {
                rope(&sliding.rope)
            };
            (rope, sliding.window)
        });
        Self { full, sliding }
    }
}

/// Rows on their way through a layer.
pub(crate) struct LayerRows<'a, 's, 'k> {
    /// Which of the states' layers is theirs.
    pub(crate) place: usize,
    /// The residual stream.
    pub(crate) x: &'a mut [f32],
    /// The same after the layer's input norm; after the layer, after the next one's.
    pub(crate) normed: &'a mut [f32],
    pub(crate) segments: &'a mut [Segment<'s>],
    pub(crate) spans: &'a [Span],
    pub(crate) kept: &'a mut [Kept<'k>],
}

impl Layer {
    /// Takes rows through the layer; `next` is the input norm of the layer after it.
    pub(crate) fn forward(
        &self,
        cpu: &Cpu,
        eps: f32,
        of: &mut LayerRows<'_, '_, '_>,
        next: Option<&[f32]>,
    ) {
        let (place, spans) = (of.place, of.spans);
        let rows = spans.last().map_or(0, |span| span.end);
        let mut mixed = match &self.mixer {
            Weights::Attention(attention) => {
                let parts = of.segments.iter_mut().zip(spans);
                let mut parts: Vec<_> = parts
                    .map(|(s, span)| match &mut s.state.layers[place] {
                        LayerState::Attention(cache) => (span.clone(), s.rows, s.state.len, cache),
                        LayerState::Delta { .. } => unreachable!("layer {place} is attention"),
                    })
                    .collect();
                attention.forward(cpu, of.normed, rows, &mut parts)
            }
            Weights::Delta(delta) => {
                let parts = of.segments.iter_mut().zip(spans);
                let mut parts: Vec<_> = parts
                    .map(|(s, span)| match &mut s.state.layers[place] {
                        LayerState::Delta {
                            window,
                            memory,
                            replay,
                        } => delta::Part {
                            span: span.clone(),
                            rows: s.rows,
                            window,
                            memory,
                            replay,
                        },
                        LayerState::Attention(_) => unreachable!("layer {place} is recurrent"),
                    })
                    .collect();
                delta.forward(cpu, of.normed, rows, &mut parts, of.kept)
            }
        };
        let norm = |made: &mut [f32], weight: &Option<Vec<f32>>| {
            if let Some(weight) = weight {
                let whole = Heads::packed(1, self.post_norm.len());
                rms_norm_heads(cpu, made, whole, weight, eps);
            }
        };
        norm(&mut mixed, &self.mixed_norm);
        add_rms_norm(cpu, of.x, &mixed, &self.post_norm, eps, of.normed);
        drop(mixed);
        let mut out = self.mlp.forward(cpu, of.normed, rows);
        norm(&mut out, &self.made_norm);
        match next {
            Some(next) => add_rms_norm(cpu, of.x, &out, next, eps, of.normed),
            None => add_assign(cpu, of.x, &out),
        }
    }

    pub(crate) fn input_norm(&self) -> &[f32] {
        &self.input_norm
    }

    pub(crate) fn new_state(&self, kv: KvType) -> LayerState {
        match &self.mixer {
            Weights::Attention(attention) => attention.new_state(kv),
            Weights::Delta(delta) => delta.new_state(),
        }
    }

    pub(crate) fn load(
        checkpoint: &impl Tensors,
        config: &ModelConfig,
        index: usize,
        mixer: Mixer,
        ropes: &Ropes,
    ) -> Result<Self, Error> {
        let prefix = format!("model.layers.{index}");
        let norm = |name: &str| {
            norm_weight(
                checkpoint,
                config,
                &format!("{prefix}.{name}"),
                config.hidden_size,
            )
        };
        let sandwich = |name: &str| match config.sandwich_norms {
            true => norm(name).map(Some),
            false => Ok(None),
        };
        let attention = |rope: &Arc<Rope>| {
            let prefix = format!("{prefix}.self_attn");
            Attention::load(checkpoint, config, &prefix, rope.clone())
        };
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            mixer: match mixer {
                Mixer::Attention => Weights::Attention(attention(&ropes.full)?),
                Mixer::Sliding => match &ropes.sliding {
                    Some((rope, window)) => Weights::Attention(attention(rope)?.within(*window)),
                    None => {
                        return Err(Error::Layer {
                            name: prefix.clone(),
                            reason: "the configuration has no window".to_string(),
                        });
                    }
                },
                Mixer::Delta => Weights::Delta(Delta::load(
                    checkpoint,
                    config,
                    &format!("{prefix}.linear_attn"),
                )?),
            },
            mixed_norm: sandwich("post_attention_layernorm")?,
            post_norm: norm(if config.sandwich_norms {
                "pre_feedforward_layernorm"
            } else {
                "post_attention_layernorm"
            })?,
            made_norm: sandwich("post_feedforward_layernorm")?,
            mlp: FeedForward::load(checkpoint, config, index, &format!("{prefix}.mlp"))?,
        })
    }
}

/// The factor of an RMS norm: the stored weight, or one more than it where the family says so.
pub(crate) fn norm_weight(
    tensors: &impl Tensors,
    config: &ModelConfig,
    name: &str,
    len: usize,
) -> Result<Vec<f32>, Error> {
    let mut weight = tensors.vector(&format!("{name}.weight"), len)?;
    if config.norm_plus_one {
        weight.iter_mut().for_each(|w| *w += 1.0);
    }
    Ok(weight)
}

/// Projections that read the same input, as one product whose outputs stand side by side.
pub(crate) fn projection(
    tensors: &impl Tensors,
    prefix: &str,
    parts: &[(&str, usize)],
    inputs: usize,
    bias: bool,
) -> Result<Linear, Error> {
    let mut matrices = Vec::with_capacity(parts.len());
    let mut biases = Vec::new();
    let mut names = Vec::with_capacity(parts.len());
    let dot = if prefix.is_empty() { "" } else { "." };
    for (part, outputs) in parts {
        let name = format!("{prefix}{dot}{part}");
        let weight = format!("{name}.weight");
        matrices.push(tensors.matrix(&weight, *outputs, inputs)?);
        if bias {
            biases.extend(tensors.vector(&format!("{name}.bias"), *outputs)?);
        }
        names.push(weight);
    }
    let joined = Linear::new(matrices, bias.then_some(biases)).map_err(|reason| Error::Layer {
        name: prefix.to_string(),
        reason: reason.to_string(),
    })?;
    Ok(joined.watched(tensors.watch(&names)))
}
