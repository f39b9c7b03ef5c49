//! What a pass takes for a while, besides weights and states.

use kozue_checkpoint::description::{AttentionConfig, DeltaConfig, Mixer, ModelConfig};
use kozue_kernels::{KvCache, KvType, attention_bytes, linear_bytes};

/// The size of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Working {
    /// Rows of the pass.
    pub rows: usize,
    /// Rows for which logits are made.
    pub logit_rows: usize,
    /// Layers whose residual streams are wanted.
    pub taps: usize,
    /// Positions that its rows see.
    pub positions: usize,
    /// Threads.
    pub threads: usize,
}

/// Bytes of memory that [`crate::Model::pass`] works in; the processor keeps it for the next pass,
/// but for keys and values that fall behind their windows when it ends.
pub fn pass_bytes(config: &ModelConfig, kv: KvType, pass: Working) -> u64 {
    let hidden = config.hidden_size;
    let values = |of_a_row: usize| 4 * (pass.rows * of_a_row) as u64;
    let attention = &config.attention;
    let mixer = |mixer: &Mixer| match (mixer, &config.delta, &attention.sliding) {
        (Mixer::Delta, Some(delta), _) => delta_bytes(delta, hidden, pass.rows),
        (Mixer::Sliding, _, Some(sliding)) => {
            let positions = pass.positions.min(sliding.window.saturating_add(pass.rows));
            mixing_bytes(attention, hidden, kv, Working { positions, ..pass })
        }
        _ => mixing_bytes(attention, hidden, kv, pass),
    };
    let mixers = config.layers.iter().map(mixer).max().unwrap_or(0);
    let feed_forward = |layer| feed_forward_bytes(config, layer, pass.rows);
    let feed_forwards = (0..config.layers.len()).map(feed_forward).max();
    let layer = mixers.max(feed_forwards.unwrap_or(0));
    let head = 4 * (pass.logit_rows * (2 * hidden + config.vocab_size)) as u64;
    let kept = KvCache::bytes_of(attention.kv_heads, attention.head_dim, kv, pass.rows, None);
    let behind = config.count(Mixer::Sliding) as u64 * kept;
    // The residual stream and its norm are there all the time.
    values((2 + pass.taps) * hidden) + layer.max(head) + behind
}

/// See `attention::Attention::forward`.
fn mixing_bytes(shape: &AttentionConfig, hidden: usize, kv: KvType, pass: Working) -> u64 {
    let (heads, dim) = (shape.heads, shape.head_dim);
    let queries = heads * dim * if shape.gated { 2 } else { 1 };
    let projected = queries + 2 * shape.kv_heads * dim;
    let mixed = heads * dim;
    let mixing = attention_bytes(
        pass.threads,
        heads,
        (shape.kv_heads, dim, kv),
        pass.rows,
        pass.positions,
    );
    let output = 4 * (pass.rows * hidden) as u64 + linear_bytes(pass.rows, mixed);
    4 * (pass.rows * (projected + mixed)) as u64 + mixing.max(output)
}

/// See `delta::Delta::forward`.
fn delta_bytes(shape: &DeltaConfig, hidden: usize, rows: usize) -> u64 {
    let (values, heads) = (shape.value_width(), shape.value_heads);
    let projected = shape.conv_channels() + values + 2 * heads;
    let output = 4 * (rows * hidden) as u64 + linear_bytes(rows, values);
    let mixed = 4 * (rows * shape.conv_channels()) as u64;
    4 * (rows * (projected + 2 * heads + values)) as u64 + mixed.max(output)
}

/// See `mlp::FeedForward::forward`.
fn feed_forward_bytes(config: &ModelConfig, layer: usize, rows: usize) -> u64 {
    let hidden = config.hidden_size;
    let mlp = |inner: usize| {
        4 * (rows * (3 * inner + hidden)) as u64 + linear_bytes(rows, inner.max(hidden))
    };
    match config.feed_forward(layer) {
        Err(inner) => mlp(inner),
        Ok(experts) => {
            let inner = config.intermediate_size.max(experts.shared.unwrap_or(0));
            let mixed = 4 * (rows * (experts.count + 2 * hidden)) as u64 + mlp(inner);
            let dense = experts.dense.as_ref();
            mixed.max(dense.map_or(0, |dense| mlp(dense.intermediate_size)))
        }
    }
}
