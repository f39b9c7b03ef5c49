//! Softmax attention with grouped query heads, rotary positions, and, where the family has them,
//! query and key norms, an output gate (Qwen3.5's gated attention) and a sliding window.

use std::sync::Arc;

use kozue_checkpoint::{Tensors, description::ModelConfig};
use kozue_kernels::{
    Cpu, Heads, KvCache, KvType, Linear, Rope, Scratch, Visible, attention, linear, rms_norm_heads,
    sigmoid_mul,
};

use crate::layer::{norm_weight, projection};
use crate::pass::{Rows, Span};

use crate::Error;
use crate::state::LayerState;

pub(crate) struct Attention {
    norm_eps: f32,
    /// Factor of every score.
    scale: f32,
    /// Per query head [query | gate] or [query], then keys, then values.
    qkv: Linear,
    q_at: Heads,
    gate_at: Option<Heads>,
    k_at: Heads,
    v_at: Heads,
    output: Linear,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    rope: Arc<Rope>,
    /// How many positions a row sees, its own the last of them; all if there is no window.
    window: Option<usize>,
}

impl Attention {
    /// Attention with the layer's own rotation, without a window.
    pub(crate) fn load(
        tensors: &impl Tensors,
        config: &ModelConfig,
        prefix: &str,
        rope: Arc<Rope>,
    ) -> Result<Self, Error> {
        let shape = &config.attention;
        let (heads, head) = (shape.heads, shape.head_dim);
        let per_query = head * if shape.gated { 2 } else { 1 };
        let (q_width, kv_width) = (heads * per_query, shape.kv_heads * head);
        let at = |offset: usize, count: usize, pitch: usize| Heads {
            row: q_width + 2 * kv_width,
            offset,
            pitch,
            count,
            dim: head,
        };
        let norm = |name: &str| -> Result<Option<Vec<f32>>, Error> {
            if !shape.qk_norm {
                return Ok(None);
            }
            norm_weight(tensors, config, &format!("{prefix}.{name}"), head).map(Some)
        };
        Ok(Self {
            q_at: at(0, heads, per_query),
            gate_at: shape.gated.then(|| at(head, heads, per_query)),
            k_at: at(q_width, shape.kv_heads, head),
            v_at: at(q_width + kv_width, shape.kv_heads, head),
            norm_eps: config.norm_eps,
            scale: (shape.query_scalar as f32).powf(-0.5),
            qkv: projection(
                tensors,
                prefix,
                &[
                    ("q_proj", q_width),
                    ("k_proj", kv_width),
                    ("v_proj", kv_width),
                ],
                config.hidden_size,
                shape.qkv_bias,
            )?,
            output: projection(
                tensors,
                prefix,
                &[("o_proj", config.hidden_size)],
                heads * head,
                shape.output_bias,
            )?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            rope,
            window: None,
        })
    }

    /// The same over the newest positions only.
    pub(crate) fn within(self, window: usize) -> Self {
        Self {
            window: Some(window),
            ..self
        }
    }

    pub(crate) fn new_state(&self, kv: KvType) -> LayerState {
        LayerState::Attention(self.new_cache(kv))
    }

    pub(crate) fn new_cache(&self, kv: KvType) -> KvCache {
        let cache = KvCache::new(self.k_at.count, self.k_at.dim, kv);
        match self.window {
            None => cache,
            Some(window) => cache.within(window),
        }
    }

    /// x: rows x hidden size, already normed; the same shape comes back. Keys and values of every
    /// row go into the caches, past their ends.
    pub(crate) fn forward<'c>(
        &self,
        cpu: &'c Cpu,
        x: &[f32],
        rows: usize,
        parts: &mut [(Span, Rows<'_>, usize, &mut KvCache)],
    ) -> Scratch<'c, f32> {
        let positions = positions(
            rows,
            parts.iter().map(|(span, part, len, _)| (span, part, *len)),
        );
        let width = self.qkv.outputs();
        let qkv = self.project(cpu, x, &positions);
        let mixed_at = self.mixed_at();
        let mut mixed = cpu.scratch(rows * mixed_at.row);
        for (span, part, len, cache) in parts.iter_mut() {
            let paths = paths(part, *len);
            let visible = visible(part, span.len(), *len, self.window, &paths);
            let out = span.of_mut(&mut mixed, mixed_at.row);
            self.mix(cpu, cache, *len, span.of(&qkv, width), &visible, out);
        }
        self.finish(cpu, &qkv, mixed)
    }

    /// As [`Attention::forward`], for rows of one sequence in the slots from `first` on, each
    /// seeing what `visible` says.
    pub(crate) fn forward_visible<'c>(
        &self,
        cpu: &'c Cpu,
        x: &[f32],
        positions: &[u32],
        (cache, first): (&mut KvCache, usize),
        visible: &[Visible<'_>],
    ) -> Scratch<'c, f32> {
        let qkv = self.project(cpu, x, positions);
        let mut mixed = cpu.scratch(positions.len() * self.mixed_at().row);
        self.mix(cpu, cache, first, &qkv, visible, &mut mixed);
        self.finish(cpu, &qkv, mixed)
    }

    /// The part of the projection that makes keys and values, for [`Attention::remember`].
    pub(crate) fn keys_and_values(&self) -> Result<Linear, Error> {
        let matrices = self.qkv.matrices().skip(1).cloned().collect();
        let bias = self
            .qkv
            .bias()
            .map(|bias| bias[self.k_at.offset..].to_vec());
        Linear::new(matrices, bias).map_err(|reason| Error::Layer {
            name: "k_proj, v_proj".to_string(),
            reason: reason.to_string(),
        })
    }

    /// Writes keys and values of rows that make no queries to the slots of their positions.
    /// `keys_and_values` comes from [`Attention::keys_and_values`].
    pub(crate) fn remember(
        &self,
        cpu: &Cpu,
        keys_and_values: &Linear,
        x: &[f32],
        positions: &[u32],
        cache: &mut KvCache,
    ) {
        let at = |heads: Heads| Heads {
            row: keys_and_values.outputs(),
            offset: heads.offset - self.k_at.offset,
            ..heads
        };
        let (k_at, v_at) = (at(self.k_at), at(self.v_at));
        let mut kv = cpu.scratch(positions.len() * k_at.row);
        linear(cpu, keys_and_values, x, &mut kv);
        self.norm_and_rotate(cpu, &mut kv, k_at, &self.k_norm, positions);
        if let Some(&first) = positions.first() {
            cache.write_rows(cpu, first as usize, (&kv, k_at), (&kv, v_at));
        }
    }

    /// Queries (and gates), keys and values of rows, queries and keys normed and rotated.
    fn project<'c>(&self, cpu: &'c Cpu, x: &[f32], positions: &[u32]) -> Scratch<'c, f32> {
        let mut qkv = cpu.scratch(positions.len() * self.qkv.outputs());
        linear(cpu, &self.qkv, x, &mut qkv);
        self.norm_and_rotate(cpu, &mut qkv, self.q_at, &self.q_norm, positions);
        self.norm_and_rotate(cpu, &mut qkv, self.k_at, &self.k_norm, positions);
        qkv
    }

    /// Queries or keys as scores take them: normed head by head, where the family has a norm, then
    /// rotated to the positions of their rows.
    fn norm_and_rotate(
        &self,
        cpu: &Cpu,
        x: &mut [f32],
        at: Heads,
        norm: &Option<Vec<f32>>,
        positions: &[u32],
    ) {
        if let Some(weight) = norm {
            rms_norm_heads(cpu, x, at, weight, self.norm_eps);
        }
        self.rope.apply(cpu, x, at, positions);
    }

    /// Writes keys and values to the slots from `first` on and lets the queries read the cache.
    fn mix(
        &self,
        cpu: &Cpu,
        cache: &mut KvCache,
        first: usize,
        qkv: &[f32],
        visible: &[Visible<'_>],
        out: &mut [f32],
    ) {
        cache.write_rows(cpu, first, (qkv, self.k_at), (qkv, self.v_at));
        attention(cpu, cache, (qkv, self.q_at), visible, self.scale, out);
    }

    /// Gate, where there is one, and output projection.
    fn finish<'c>(
        &self,
        cpu: &'c Cpu,
        qkv: &[f32],
        mut mixed: Scratch<'c, f32>,
    ) -> Scratch<'c, f32> {
        let mixed_at = self.mixed_at();
        if let Some(gate_at) = self.gate_at {
            sigmoid_mul(cpu, &mut mixed, mixed_at, qkv, gate_at);
        }
        let mut out = cpu.scratch(mixed.len() / mixed_at.row * self.output.outputs());
        linear(cpu, &self.output, &mixed, &mut out);
        out
    }

    fn mixed_at(&self) -> Heads {
        Heads::packed(self.q_at.count, self.q_at.dim)
    }
}

/// Position of every row of a pass: a chain's tokens follow its `len` tokens one by one, a tree's
/// nodes stand at `len` + depth.
fn positions<'p>(
    rows: usize,
    parts: impl Iterator<Item = (&'p Span, &'p Rows<'p>, usize)>,
) -> Vec<u32> {
    let mut positions = Vec::with_capacity(rows);
    for (span, part, len) in parts {
        match part {
            Rows::Chain(_) => positions.extend((len..len + span.len()).map(|p| p as u32)),
            Rows::Tree(tree) => positions.extend(tree.depths().iter().map(|&d| len as u32 + d)),
        }
    }
    positions
}

/// For every node of a tree the slots of its ancestors and itself, root first.
fn paths(part: &Rows<'_>, len: usize) -> Vec<Vec<u32>> {
    match part {
        Rows::Chain(_) => Vec::new(),
        Rows::Tree(tree) => (0..tree.len())
            .map(|node| {
                tree.path(node)
                    .into_iter()
                    .map(|n| (len + n) as u32)
                    .collect()
            })
            .collect(),
    }
}

/// What every row of a segment sees: all committed positions, then its own path; of both only what
/// the window reaches.
fn visible<'p>(
    part: &Rows<'_>,
    rows: usize,
    len: usize,
    window: Option<usize>,
    paths: &'p [Vec<u32>],
) -> Vec<Visible<'p>> {
    // The first position that the last of `seen` positions sees.
    let first = |seen: usize| window.map_or(0, |window| seen.saturating_sub(window));
    match part {
        Rows::Chain(_) => (0..rows)
            .map(|row| Visible {
                first: first(len + row + 1),
                prefix: len + row + 1,
                tail: &[],
            })
            .collect(),
        Rows::Tree(_) => paths
            .iter()
            .map(|path| {
                let first = first(len + path.len());
                let (_, tail) = path.split_at(first.saturating_sub(len));
                Visible {
                    first,
                    prefix: len.max(first),
                    tail,
                }
            })
            .collect(),
    }
}
