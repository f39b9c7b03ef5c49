//! The experts of a layer as transformers holds them, one tensor for all, taken apart.
//!
//! ```text
//! experts.gate_up_proj   experts x (gate and up, 2 inner) x hidden
//! experts.down_proj      experts x hidden x inner
//! ```
//!
//! Published checkpoints of Qwen3.5 have these; those of Qwen3, and what transformers saves, have
//! a matrix for each expert and part, which is how the rest of this crate knows them.

use crate::safetensors::Entry;

/// The matrices that a tensor of this name consists of, in the order in which they lie in it;
/// nothing if it is no tensor of fused experts.
pub(crate) fn parts(name: &str, entry: &Entry) -> Option<Vec<(String, Entry)>> {
    let (layer, kinds): (_, &[&str]) = match name.rsplit_once('.')? {
        (layer, "gate_up_proj") => (layer, &["gate_proj", "up_proj"]),
        (layer, "down_proj") => (layer, &["down_proj"]),
        _ => return None,
    };
    let &[experts, rows, width] = &entry.shape[..] else {
        return None;
    };
    if !layer.ends_with(".mlp.experts") || !rows.is_multiple_of(kinds.len()) {
        return None;
    }
    let rows = rows / kinds.len();
    let bytes = entry.range.len() / (experts * kinds.len()).max(1);
    let all = (0..experts).flat_map(|expert| kinds.iter().map(move |kind| (expert, kind)));
    let part = |(index, (expert, kind)): (usize, (usize, &&str))| {
        let start = entry.range.start + index * bytes;
        let part = Entry {
            dtype: entry.dtype,
            shape: vec![rows, width],
            range: start..start + bytes,
        };
        (format!("{layer}.{expert}.{kind}.weight"), part)
    };
    Some(all.enumerate().map(part).collect())
}
