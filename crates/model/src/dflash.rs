//! The DFlash drafter (arXiv 2602.06036): a small decoder that fills a block of masks in one
//! pass, reading hidden states of the target as extra keys and values.
//!
//! ```text
//! c     = rms_norm(fc(concat of the tapped residual streams))            per committed token
//! K, V  = [Wk c ; Wk h], [Wv c ; Wv h]     h = normed rows of the block, in every layer
//! block = embed([newest token, mask, mask, ...]), at the positions from the newest token on
//! ```
//!
//! Row i >= 1 proposes the token at its own position. Embeddings and head are the target's.

use std::sync::Arc;

use kozue_checkpoint::{DFlashConfig, Drafter, DrafterKind, Tensors};
use kozue_kernels::{
    Cpu, KvCache, KvType, Linear, Rope, Visible, add_assign, add_rms_norm, linear, rms_norm,
};

use crate::attention::Attention;
use crate::layer::projection;
use crate::mlp::Mlp;
use crate::stored::Footprint;
use crate::{Error, Model};

/// The weights of a DFlash drafter.
pub struct DFlash {
    config: Box<DFlashConfig>,
    kv: KvType,
    /// The target's embedding of a position to be drafted.
    mask: Vec<f32>,
    /// Tapped streams side by side, to the drafter's width.
    fc: Linear,
    context_norm: Vec<f32>,
    layers: Vec<Layer>,
    norm: Vec<f32>,
}

struct Layer {
    /// How far back a row sees; `None` for all of the context.
    window: Option<usize>,
    /// Whether a row of the block sees only the rows before it.
    causal: bool,
    input_norm: Vec<f32>,
    attention: Attention,
    /// The part of the attention's projection that reads features.
    keys_and_values: Linear,
    post_norm: Vec<f32>,
    mlp: Mlp,
}

/// What a drafter remembers of one sequence: keys and values made from the target's features.
#[derive(Clone)]
pub struct DFlashState {
    len: usize,
    caches: Vec<KvCache>,
}

impl DFlashState {
    /// Number of tokens whose features were read.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no features were read yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What it holds.
    pub fn footprint(&self) -> Footprint {
        Footprint {
            own: 0,
            pages: self.caches.iter().flat_map(KvCache::held).collect(),
        }
    }
}

impl DFlash {
    /// Reads the drafter's tensors.
    ///
    /// # Errors
    /// If a tensor is missing, extra or misshapen, or the drafter was made for a target of another
    /// width or vocabulary.
    pub fn load(drafter: &Drafter, target: &Model) -> Result<Self, Error> {
        let of = target.config();
        let mismatch = |reason: String| Error::Drafter {
            path: drafter.path().to_path_buf(),
            reason,
        };
        let DrafterKind::DFlash(config) = drafter.kind().clone() else {
            return Err(mismatch("is no DFlash drafter".to_string()));
        };
        if config.shape.hidden_size != of.hidden_size {
            return Err(mismatch(format!(
                "made for a target of width {}, this one has {}",
                config.shape.hidden_size, of.hidden_size
            )));
        }
        if config.shape.vocab_size != of.vocab_size {
            return Err(mismatch(format!(
                "made for a vocabulary of {}, this target has one of {}",
                config.shape.vocab_size, of.vocab_size
            )));
        }
        if let Some(layers) = config.target_layers.filter(|&n| n != of.layers.len()) {
            return Err(mismatch(format!(
                "made for a target of {layers} layers, this one has {}",
                of.layers.len()
            )));
        }
        if let Some(tap) = config.taps.iter().find(|&&tap| tap >= of.layers.len()) {
            return Err(mismatch(format!(
                "reads layer {tap} of a target that has {} layers",
                of.layers.len()
            )));
        }
        if config.mask_token as usize >= of.vocab_size {
            return Err(mismatch(format!(
                "its mask token {} is outside the target's vocabulary of {}",
                config.mask_token, of.vocab_size
            )));
        }
        let shape = &config.shape;
        let hidden = shape.hidden_size;
        let mut mask = vec![0.0; hidden];
        target.embed(config.mask_token, &mut mask)?;
        let norm = |name: &str, len: usize| drafter.vector(&format!("{name}.weight"), len);
        let rope = Arc::new(Rope::new(
            shape.attention.rope.inverse_frequencies(),
            of.max_position + config.block,
        ));
        let layers = config
            .masks
            .iter()
            .enumerate()
            .map(|(index, mask)| {
                let prefix = format!("layers.{index}");
                let attention =
                    Attention::load(drafter, shape, &format!("{prefix}.self_attn"), rope.clone())?;
                Ok(Layer {
                    window: mask.window,
                    causal: mask.causal,
                    input_norm: norm(&format!("{prefix}.input_layernorm"), hidden)?,
                    keys_and_values: attention.keys_and_values()?,
                    attention,
                    post_norm: norm(&format!("{prefix}.post_attention_layernorm"), hidden)?,
                    mlp: Mlp::load(
                        drafter,
                        shape,
                        &format!("{prefix}.mlp"),
                        shape.intermediate_size,
                    )?,
                })
            })
            .collect::<Result<_, Error>>()?;
        let loaded = Self {
            fc: projection(
                drafter,
                "",
                &[("fc", hidden)],
                hidden * config.taps.len(),
                false,
            )?,
            context_norm: norm("hidden_norm", hidden)?,
            layers,
            norm: norm("norm", hidden)?,
            kv: target.kv(),
            mask,
            config,
        };
        drafter.finish()?;
        Ok(loaded)
    }

    /// Its settings.
    pub fn config(&self) -> &DFlashConfig {
        &self.config
    }

    /// Layers of the target whose residual streams [`DFlash::observe`] wants, in this order.
    pub fn taps(&self) -> &[usize] {
        &self.config.taps
    }

    /// Rows of one block: the newest token and the positions after it.
    pub fn block(&self) -> usize {
        self.config.block
    }

    /// Memory of a sequence of which nothing was read yet; it keeps keys and values as the target's
    /// states do.
    pub fn new_state(&self) -> DFlashState {
        let caches = self.layers.iter();
        DFlashState {
            len: 0,
            caches: caches
                .map(|layer| layer.attention.new_cache(self.kv))
                .collect(),
        }
    }

    /// Takes in the features of the next committed tokens, rows x (taps x hidden size).
    pub fn observe(&self, cpu: &Cpu, state: &mut DFlashState, features: &[f32]) {
        let hidden = self.config.shape.hidden_size;
        let rows = features.len() / self.fc.inputs();
        let mut projected = cpu.scratch(rows * hidden);
        linear(cpu, &self.fc, features, &mut projected);
        let mut context = cpu.scratch(rows * hidden);
        rms_norm(
            cpu,
            &projected,
            &self.context_norm,
            self.eps(),
            &mut context,
        );
        let positions = positions(state.len, rows);
        for (layer, cache) in self.layers.iter().zip(&mut state.caches) {
            layer
                .attention
                .remember(cpu, &layer.keys_and_values, &context, &positions, cache);
        }
        state.len += rows;
    }

    /// Fills the block that starts with `token`, the newest one, which the features do not cover
    /// yet. Returns the rows after the first, (block - 1) x hidden size, ready for the head; a
    /// block cut to `depth` rows after the first costs less where more would not be accepted.
    ///
    /// # Errors
    /// If the token is outside the vocabulary.
    pub fn draft(
        &self,
        cpu: &Cpu,
        target: &Model,
        state: &mut DFlashState,
        token: u32,
        depth: usize,
    ) -> Result<Vec<f32>, Error> {
        let hidden = self.config.shape.hidden_size;
        let rows = self.config.block.min(depth.saturating_add(1));
        let mut x = cpu.scratch(rows * hidden);
        let mut inputs = x.chunks_exact_mut(hidden);
        if let Some(first) = inputs.next() {
            target.embed(token, first)?;
        }
        inputs.for_each(|input| input.copy_from_slice(&self.mask));
        let positions = positions(state.len, rows);
        let mut normed = cpu.scratch(rows * hidden);
        for (layer, cache) in self.layers.iter().zip(&mut state.caches) {
            rms_norm(cpu, &x, &layer.input_norm, self.eps(), &mut normed);
            let visible: Vec<Visible> = (0..rows)
                .map(|row| layer.visible(state.len, row, rows))
                .collect();
            // The block's keys and values lie past the context and are written over next time.
            let slots = (&mut *cache, state.len);
            let mixed = layer
                .attention
                .forward_visible(cpu, &normed, &positions, slots, &visible);
            add_rms_norm(
                cpu,
                &mut x,
                &mixed,
                &layer.post_norm,
                self.eps(),
                &mut normed,
            );
            drop(mixed);
            let out = layer.mlp.forward(cpu, &normed, rows);
            add_assign(cpu, &mut x, &out);
        }
        rms_norm(cpu, &x, &self.norm, self.eps(), &mut normed);
        Ok(normed[hidden..].to_vec())
    }

    fn eps(&self) -> f32 {
        self.config.shape.norm_eps
    }
}

impl Layer {
    /// What row `row` of a block of `rows` sees after a context of `len` tokens: before itself
    /// what lies less than a window away; after itself nothing where the layer is causal, else the
    /// rows of the block less than a window away.
    fn visible(&self, len: usize, row: usize, rows: usize) -> Visible<'static> {
        let reach = self.window.unwrap_or(usize::MAX);
        let ahead = if self.causal { 1 } else { reach };
        Visible {
            first: (len + row + 1).saturating_sub(reach),
            // Position i lies in slot i, also in the block.
            prefix: len + rows.min(row.saturating_add(ahead)),
            tail: &[],
        }
    }
}

fn positions(from: usize, rows: usize) -> Vec<u32> {
    (from..from + rows)
        .map(|position| position as u32)
        .collect()
}
