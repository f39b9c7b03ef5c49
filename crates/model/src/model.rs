//! The decoder: embedding, layers, output norm, head.

use std::sync::Arc;

use kozue_checkpoint::{
    Checkpoint, EMBED, HEAD, Tensors,
    description::{Mixer, ModelConfig, RopeConfig},
};
use kozue_kernels::{
    Cpu, Heads, KvType, Linear, Matrix, Rope, add_assign, add_rms_norm, linear, rms_norm,
    rms_norm_heads,
};

use crate::attention::Attention;
use crate::delta::{self, Delta, Kept};
use crate::mlp::FeedForward;
use crate::pass::{Outputs, PassOutput, Rows, Segment, Span};
use crate::state::LayerState;
use crate::{Error, State};

/// Rows of one pass over a long prompt. Bits do not depend on it; memory and speed do.
const PREFILL_ROWS: usize = 512;

/// The weights of a decoder-only language model.
pub struct Model {
    config: ModelConfig,
    kv: KvType,
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Linear,
}

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

impl Model {
    /// Reads every tensor that the architecture needs; states keep keys and values as `kv`.
    ///
    /// # Errors
    /// If a tensor is missing, extra, misshapen or of a type that its place cannot take.
    pub fn load(checkpoint: &Checkpoint, kv: KvType) -> Result<Self, Error> {
        let config = checkpoint.description().config.clone();
        let ropes = Ropes::new(&config);
        let embedding = checkpoint.matrix(EMBED, config.vocab_size, config.hidden_size)?;
        let layers = config
            .layers
            .iter()
            .enumerate()
            .map(|(index, mixer)| Layer::load(checkpoint, &config, index, *mixer, &ropes))
            .collect::<Result<_, _>>()?;
        let norm = norm_weight(checkpoint, &config, "model.norm", config.hidden_size)?;
        let head = if config.tied {
            embedding.clone()
        } else {
            checkpoint.matrix(HEAD, config.vocab_size, config.hidden_size)?
        };
        checkpoint.finish()?;
        Ok(Self {
            head: Linear::new(vec![head], None).map_err(|reason| Error::Layer {
                name: "lm_head".to_string(),
                reason: reason.to_string(),
            })?,
            embedding,
            layers,
            norm,
            kv,
            config,
        })
    }

    /// Shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How states keep keys and values.
    pub(crate) fn kv(&self) -> KvType {
        self.kv
    }

    /// Memory of a sequence that has read nothing yet.
    pub fn new_state(&self) -> State {
        let layers = self.layers.iter().map(|layer| layer.new_state(self.kv));
        State::new(layers.collect())
    }

    /// The embedding row of `token`, hidden size values.
    ///
    /// # Errors
    /// If the token is outside the vocabulary.
    pub fn embed(&self, token: u32, out: &mut [f32]) -> Result<(), Error> {
        if token as usize >= self.config.vocab_size {
            return Err(Error::Token {
                token,
                vocab_size: self.config.vocab_size,
            });
        }
        self.embedding_row(token, out);
        Ok(())
    }

    fn embedding_row(&self, token: u32, out: &mut [f32]) {
        self.embedding.row_into(token as usize, out);
        scale_embedding(&self.config, out);
    }

    /// The head: logits of hidden states that the output norm has seen, rows x vocabulary.
    pub fn head(&self) -> &Linear {
        &self.head
    }

    /// Reads `tokens` into `state` and returns the logits of the last `logit_rows` of them.
    ///
    /// # Errors
    /// If a token is outside the vocabulary or the sequence would become longer than the model's
    /// context; the state is unchanged.
    pub fn advance(
        &self,
        cpu: &Cpu,
        state: &mut State,
        tokens: &[u32],
        logit_rows: usize,
    ) -> Result<Vec<f32>, Error> {
        self.check_tokens(tokens)?;
        self.check_length(state.len + tokens.len())?;
        let wanted_from = tokens.len().saturating_sub(logit_rows);
        let mut logits = Vec::new();
        for (index, chunk) in tokens.chunks(PREFILL_ROWS).enumerate() {
            let end = index * PREFILL_ROWS + chunk.len();
            let segment = Segment {
                state: &mut *state,
                rows: Rows::Chain(chunk),
                logit_rows: end.saturating_sub(wanted_from).min(chunk.len()),
                snapshots: &[],
            };
            let output = self.pass(cpu, &mut [segment], Outputs::default())?;
            logits.extend_from_slice(&output.logits);
        }
        Ok(logits)
    }

    /// Takes the rows of all segments through the model together.
    ///
    /// A row's results have the same bits whatever other rows are in the pass.
    ///
    /// # Errors
    /// If a token is outside the vocabulary or a sequence would become longer than the model's
    /// context; no state is changed.
    pub fn pass<'c>(
        &self,
        cpu: &'c Cpu,
        segments: &mut [Segment<'_>],
        wanted: Outputs<'_>,
    ) -> Result<PassOutput<'c>, Error> {
        for segment in segments.iter() {
            self.check_tokens(segment.rows.tokens())?;
            self.check_length(segment.state.len + segment.rows.depth())?;
            let (rows, at) = (segment.rows.tokens().len(), segment.snapshots);
            if at.last().is_some_and(|&last| last > rows) || !at.is_sorted_by(|a, b| a < b) {
                return Err(Error::Tree(format!(
                    "snapshots after {at:?} of {rows} rows"
                )));
            }
        }
        let hidden = self.config.hidden_size;
        let spans = spans(segments);
        let rows = spans.last().map_or(0, |span| span.end);
        let mut kept: Vec<Kept> = segments
            .iter()
            .map(|segment| Kept::new(segment.snapshots))
            .collect();

        let mut x = cpu.scratch(rows * hidden);
        let tokens = segments.iter().flat_map(|segment| segment.rows.tokens());
        for (&token, row) in tokens.zip(x.chunks_exact_mut(hidden)) {
            self.embedding_row(token, row);
        }
        let mut features = cpu.scratch(rows * hidden * wanted.taps.len());
        let mut normed = cpu.scratch(rows * hidden);
        let eps = self.config.norm_eps;
        if let Some(first) = self.layers.first() {
            rms_norm(cpu, &x, &first.input_norm, eps, &mut normed);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let next = self.layers.get(index + 1).map(|next| &next.input_norm[..]);
            let mut rows = LayerRows {
                place: index,
                x: &mut x,
                normed: &mut normed,
                segments: &mut *segments,
                spans: &spans,
                kept: &mut kept,
            };
            layer.forward(cpu, eps, &mut rows, next);
            for (place, _) in wanted
                .taps
                .iter()
                .enumerate()
                .filter(|&(_, &tap)| tap == index)
            {
                let width = hidden * wanted.taps.len();
                for (to, from) in features.chunks_exact_mut(width).zip(x.chunks_exact(hidden)) {
                    to[place * hidden..][..hidden].copy_from_slice(from);
                }
            }
        }

        let logit_rows: usize = segments
            .iter()
            .map(|s| s.logit_rows.min(s.rows.tokens().len()))
            .sum();
        let mut last = cpu.scratch(logit_rows * hidden);
        let mut to = last.chunks_exact_mut(hidden);
        for (segment, span) in segments.iter().zip(&spans) {
            let from = span.of(&x, hidden);
            let skipped = span.len() - segment.logit_rows.min(span.len());
            for (from, to) in from.chunks_exact(hidden).skip(skipped).zip(&mut to) {
                to.copy_from_slice(from);
            }
        }
        let mut final_hidden = cpu.scratch(logit_rows * hidden);
        rms_norm(
            cpu,
            &last,
            &self.norm,
            self.config.norm_eps,
            &mut final_hidden,
        );
        let mut logits = cpu.scratch(logit_rows * self.config.vocab_size);
        linear(cpu, &self.head, &final_hidden, &mut logits);

        let mut snapshots = Vec::with_capacity(segments.len());
        for (segment, kept) in segments.iter_mut().zip(kept) {
            match segment.rows {
                Rows::Chain(tokens) => {
                    let at = segment.snapshots.iter().zip(kept.memories);
                    let state = &*segment.state;
                    let taken = at.map(|(&rows, memories)| state.snapshot(rows, memories));
                    snapshots.push(taken.collect());
                    segment.state.grow(tokens.len());
                    segment.state.pending = None;
                }
                Rows::Tree(tree) => {
                    snapshots.push(Vec::new());
                    segment.state.pending = Some(tree.clone());
                }
            }
        }
        Ok(PassOutput {
            logits,
            features,
            hidden: if wanted.hidden {
                final_hidden
            } else {
                cpu.scratch(0)
            },
            snapshots,
        })
    }

    fn check_length(&self, needed: usize) -> Result<(), Error> {
        let longest = self.config.max_position;
        if needed > longest {
            Err(Error::TooLong { needed, longest })
        } else {
            Ok(())
        }
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        let vocab_size = self.config.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            Some(&token) => Err(Error::Token { token, vocab_size }),
            None => Ok(()),
        }
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

/// A row of the embedding as the first layer takes it.
pub(crate) fn scale_embedding(config: &ModelConfig, row: &mut [f32]) {
    if config.scaled_embedding {
        let scale = (config.hidden_size as f32).sqrt();
        row.iter_mut().for_each(|value| *value *= scale);
    }
}

/// Where each segment's rows lie in the pass.
pub(crate) fn spans(segments: &[Segment<'_>]) -> Vec<Span> {
    let mut start = 0;
    segments
        .iter()
        .map(|segment| {
            let end = start + segment.rows.tokens().len();
            let span = Span { start, end };
            start = end;
            span
        })
        .collect()
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
