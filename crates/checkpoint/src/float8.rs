//! Matrices of 8-bit floats with a scale for each block, row or matrix: `weight_scale_inv` of
//! DeepSeek's kind, `weight_scale` of others. Either is a factor.

use crate::affine::Float8;
use crate::error::Error;
use crate::fields::Fields;
use crate::shards::Shards;
use crate::stored::{Found, Stored, bytes, dimensions, floats, stems, wrong};

/// Where everything lies; `settings` may name the size of a block.
pub(crate) fn find(shards: &Shards, settings: &Fields) -> Result<Found, Error> {
    let block = match settings.list("weight_block_size")? {
        None => None,
        Some(sizes) => {
            let size = |at: usize| sizes.get(at)?.as_u64().filter(|&size| size > 0);
            match (size(0), size(1), sizes.len()) {
                (Some(rows), Some(columns), 2) => Some([rows as usize, columns as usize]),
                _ => return Err(settings.error("weight_block_size", "expected two sizes")),
            }
        }
    };
    let mut found = Found::new("FP8");
    for end in [".weight_scale_inv", ".weight_scale"] {
        for stem in stems(shards, end) {
            add(shards, &mut found, &stem, end, block)?;
        }
    }
    // Scales of activations, which are not quantised so here.
    for stem in stems(shards, ".input_scale") {
        found.uses([format!("{stem}.input_scale").as_str()]);
    }
    Ok(found)
}

/// Adds one matrix.
pub(crate) fn add(
    shards: &Shards,
    found: &mut Found,
    stem: &str,
    end: &str,
    block: Option<[usize; 2]>,
) -> Result<(), Error> {
    let (weight, scale) = (format!("{stem}.weight"), format!("{stem}{end}"));
    let [n, k] = dimensions(shards, &weight)?;
    let shape = shards.get(&scale)?.entry.shape.clone();
    let blocks = block.map(|[rows, columns]| [n.div_ceil(rows), k.div_ceil(columns)]);
    let (block, width) = match (&shape[..], block) {
        ([] | [1] | [1, 1], _) => ([n, k], 1),
        (&[rows, columns], Some(block)) if blocks == Some([rows, columns]) => (block, columns),
        (&[rows] | &[rows, 1], _) if rows == n => ([1, k], 1),
        _ => {
            let what = format!("its shape {shape:?} does not go with a matrix of {n} x {k}");
            return Err(wrong(shards, &scale, what));
        }
    };
    let mut scales = floats(shards, &scale, &shape, false)?;
    scales.width = width;
    let float8 = Float8 {
        k,
        bytes: bytes(shards, &weight, &["F8_E4M3"], &[n, k])?,
        scales,
        block,
    };
    found.uses([weight.as_str(), &scale]);
    found.add(weight, Stored::Float8(float8), [n, k]);
    Ok(())
}
