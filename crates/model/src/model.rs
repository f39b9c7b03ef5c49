//! The decoder: embedding, layers, output norm, head.

use kozue_checkpoint::{Checkpoint, EMBED, HEAD, description::ModelConfig};
use kozue_kernels::{Cpu, KvType, Linear, Matrix, linear, rms_norm};

use crate::delta::Kept;
use crate::layer::{Layer, LayerRows, Ropes, norm_weight};
use crate::pass::{Outputs, PassOutput, Rows, Segment, Span};
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
            rms_norm(cpu, &x, first.input_norm(), eps, &mut normed);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let next = self.layers.get(index + 1).map(Layer::input_norm);
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
