//! The multi-token prediction head of Qwen3.5: one more decoder layer, kept in the target's own
//! checkpoint, that drafts a chain token by token.
//!
//! ```text
//! x_p  = fc([norm_e(embed(t_{p+1})) ; norm_h(h_p)])    h_p: the target's final hidden state, normed
//! y_p  = norm(layer(x_p, positions .. p))              a gated attention layer with an MLP
//! head(y_p) = logits of t_{p+2}
//! ```
//!
//! Further tokens of a chain take y_p in place of h_{p+1}. The structure is that of the published
//! checkpoints (`mtp.*`) as vLLM runs it; that both h and the recycled y are taken after
//! their norms follows ggml-org/llama.cpp#24025, where acceptance fell without.

use std::sync::Arc;

use kozue_checkpoint::Checkpoint;
use kozue_kernels::{Cpu, KvCache, KvType, Linear, Rope, Scratch, add_rms_norm, linear, rms_norm};

use crate::attention::Attention;
use crate::layer::{norm_weight, projection};
use crate::mlp::FeedForward;
use crate::pass::{Rows, Span};
use crate::stored::Footprint;
use crate::{Error, Model};

/// A tensor that every head has, and one that heads of several layers have.
const FC: &str = "mtp.fc.weight";
const SECOND_LAYER: &str = "mtp.layers.1.input_layernorm.weight";

/// Rows taken in together; bits do not depend on it.
const ROWS: usize = 512;

/// The weights of the head.
pub struct Mtp {
    hidden_size: usize,
    eps: f32,
    kv: KvType,
    /// The target's last layer.
    tap: [usize; 1],
    max_position: usize,
    /// The target's output norm, which its residual stream has not seen.
    target_norm: Vec<f32>,
    embedding_norm: Vec<f32>,
    hidden_norm: Vec<f32>,
    /// [embedding | hidden state] to the width of the model.
    fc: Linear,
    input_norm: Vec<f32>,
    attention: Attention,
    post_norm: Vec<f32>,
    mlp: FeedForward,
    norm: Vec<f32>,
}

/// What the head remembers of one sequence.
#[derive(Clone)]
pub struct MtpState {
    len: usize,
    cache: KvCache,
}

impl MtpState {
    /// Number of tokens observed, each with the one after it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was observed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What it holds.
    pub fn footprint(&self) -> Footprint {
        Footprint {
            own: 0,
            pages: self.cache.held(),
        }
    }
}

impl Mtp {
    /// Whether a checkpoint has a head of the one kind that is known.
    pub fn is_in(checkpoint: &Checkpoint) -> bool {
        checkpoint.holds(FC) && !checkpoint.holds(SECOND_LAYER)
    }

    /// Reads the head out of the target's checkpoint; nothing where that has none.
    ///
    /// # Errors
    /// If a tensor of it is missing or misshapen, or it has more than the one layer that is known.
    pub fn load(checkpoint: &Checkpoint, target: &Model) -> Result<Option<Self>, Error> {
        if !checkpoint.holds(FC) {
            return Ok(None);
        }
        if checkpoint.holds(SECOND_LAYER) {
            return Err(Error::Layer {
                name: "mtp.layers.1".to_string(),
                reason: "a multi-token prediction head of several layers is not supported".into(),
            });
        }
        let config = target.config();
        let hidden = config.hidden_size;
        let norm = |name: &str| norm_weight(checkpoint, config, name, hidden);
        let rope = Arc::new(Rope::new(
            config.attention.rope.inverse_frequencies(),
            config.max_position,
        ));
        Ok(Some(Self {
            hidden_size: hidden,
            eps: config.norm_eps,
            kv: target.kv(),
            tap: [config.layers.len() - 1],
            max_position: config.max_position,
            target_norm: norm("model.norm")?,
            embedding_norm: norm("mtp.pre_fc_norm_embedding")?,
            hidden_norm: norm("mtp.pre_fc_norm_hidden")?,
            fc: projection(checkpoint, "mtp", &[("fc", hidden)], 2 * hidden, false)?,
            input_norm: norm("mtp.layers.0.input_layernorm")?,
            attention: Attention::load(checkpoint, config, "mtp.layers.0.self_attn", rope)?,
            post_norm: norm("mtp.layers.0.post_attention_layernorm")?,
            mlp: FeedForward::load(checkpoint, config, config.layers.len(), "mtp.layers.0.mlp")?,
            norm: norm("mtp.norm")?,
        }))
    }

    /// The layer of the target whose residual stream [`Mtp::observe`] wants.
    pub fn taps(&self) -> &[usize] {
        &self.tap
    }

    /// Memory of a sequence of which nothing was observed yet.
    pub fn new_state(&self) -> MtpState {
        MtpState {
            len: 0,
            cache: self.attention.new_cache(self.kv),
        }
    }

    /// Takes in the features of the next tokens, rows x hidden size, and for each of them the token
    /// after it, all of them committed.
    ///
    /// # Errors
    /// If a token is outside the vocabulary or there are more than the model's context; nothing
    /// is taken in.
    ///
    /// # Panics
    /// If there is not one token for each row of features.
    pub fn observe(
        &self,
        cpu: &Cpu,
        target: &Model,
        state: &mut MtpState,
        features: &[f32],
        after: &[u32],
    ) -> Result<(), Error> {
        let hidden = self.hidden_size;
        assert_eq!(features.len(), after.len() * hidden, "a token for each row");
        self.check_length(state.len + after.len())?;
        let vocab_size = target.config().vocab_size;
        if let Some(&token) = after.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(Error::Token { token, vocab_size });
        }
        for (features, after) in features.chunks(ROWS * hidden).zip(after.chunks(ROWS)) {
            let states = self.final_states(cpu, features);
            self.forward(cpu, target, &mut state.cache, state.len, &states, after)?;
            state.len += after.len();
        }
        Ok(())
    }

    /// Drafts a chain that follows `token`, the newest one, which the target has not read;
    /// `features` are of the token before it, the first that was not observed.
    ///
    /// `choose` is given the logits of each next token and returns the one to go on with, or `None`
    /// to end; the chain also ends where the model's context is full. The state stays as it is.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or the context is full already.
    ///
    /// # Panics
    /// If `features` is not one row.
    pub fn draft(
        &self,
        cpu: &Cpu,
        target: &Model,
        state: &mut MtpState,
        (features, mut token): (&[f32], u32),
        mut choose: impl FnMut(&[f32]) -> Option<u32>,
    ) -> Result<(), Error> {
        assert_eq!(features.len(), self.hidden_size, "one row of features");
        self.check_length(state.len + 1)?;
        let mut newest = self.final_states(cpu, features);
        let mut logits = cpu.scratch(target.config().vocab_size);
        for at in state.len..self.max_position {
            // Keys and values past the state's length are written over next time.
            newest = self.forward(cpu, target, &mut state.cache, at, &newest, &[token])?;
            linear(cpu, target.head(), &newest, &mut logits);
            match choose(&logits) {
                Some(next) => token = next,
                None => break,
            }
        }
        Ok(())
    }

    fn check_length(&self, needed: usize) -> Result<(), Error> {
        let longest = self.max_position;
        if needed > longest {
            Err(Error::TooLong { needed, longest })
        } else {
            Ok(())
        }
    }

    /// The target's final hidden states: its residual streams after its output norm.
    fn final_states<'c>(&self, cpu: &'c Cpu, features: &[f32]) -> Scratch<'c, f32> {
        let mut states = cpu.scratch(features.len());
        rms_norm(cpu, features, &self.target_norm, self.eps, &mut states);
        states
    }

    /// Outputs, normed, of rows from position `at` on: normed hidden states, rows x hidden size,
    /// and the token after each. Keys and values go into the cache.
    fn forward<'c>(
        &self,
        cpu: &'c Cpu,
        target: &Model,
        cache: &mut KvCache,
        at: usize,
        states: &[f32],
        after: &[u32],
    ) -> Result<Scratch<'c, f32>, Error> {
        let (hidden, rows) = (self.hidden_size, after.len());
        let mut embedded = cpu.scratch(rows * hidden);
        for (&token, row) in after.iter().zip(embedded.chunks_exact_mut(hidden)) {
            target.embed(token, row)?;
        }
        let mut normed = cpu.scratch(rows * hidden);
        let mut both = cpu.scratch(rows * 2 * hidden);
        for (place, (x, weight)) in [
            (&embedded[..], &self.embedding_norm),
            (states, &self.hidden_norm),
        ]
        .into_iter()
        .enumerate()
        {
            rms_norm(cpu, x, weight, self.eps, &mut normed);
            let halves = both.chunks_exact_mut(hidden).skip(place).step_by(2);
            for (from, to) in normed.chunks_exact(hidden).zip(halves) {
                to.copy_from_slice(from);
            }
        }
        let mut x = cpu.scratch(rows * hidden);
        linear(cpu, &self.fc, &both, &mut x);

        rms_norm(cpu, &x, &self.input_norm, self.eps, &mut normed);
        let span = Span {
            start: 0,
            end: rows,
        };
        let mut parts = [(span, Rows::Chain(after), at, cache)];
        let mixed = self.attention.forward(cpu, &normed, rows, &mut parts);
        add_rms_norm(cpu, &mut x, &mixed, &self.post_norm, self.eps, &mut normed);
        drop(mixed);
        let out = self.mlp.forward(cpu, &normed, rows);
        add_rms_norm(cpu, &mut x, &out, &self.norm, self.eps, &mut normed);
        Ok(normed)
    }
}
