//! GPTQ's safetensors: `qweight` holds the codes of several inputs in a word, `qzeros` the zero
//! points of several outputs, less 1 in the first version of the format.

use crate::affine::{Affine, Codes, Zero};
use crate::error::Error;
use crate::fields::Fields;
use crate::shards::Shards;
use crate::stored::{Found, Stored, bytes, dimensions, floats, stems, wrong};

/// Where everything lies.
pub(crate) fn find(shards: &Shards, settings: &Fields) -> Result<Found, Error> {
    let bits = settings.required_size("bits", 32)?;
    if ![4, 8].contains(&bits) {
        let what = format!("codes of {bits} bits are not supported; 4 and 8 are");
        return Err(settings.error("bits", what));
    }
    let add = match settings.text("checkpoint_format")? {
        Some("gptq_v2") => 0,
        Some("gptq") | None => 1,
        Some(other) => {
            let what = format!("{other:?} is not supported; gptq and gptq_v2 are");
            return Err(settings.error("checkpoint_format", what));
        }
    };
    let mut found = Found::new("GPTQ");
    for stem in stems(shards, ".qweight") {
        let [weight, zeros, scales, order] =
            ["qweight", "qzeros", "scales", "g_idx"].map(|part| format!("{stem}.{part}"));
        let [words, n] = dimensions(shards, &weight)?;
        let k = words * 32 / bits;
        let [groups, _] = dimensions(shards, &scales)?;
        let group = match settings.get("group_size").and_then(|size| size.as_i64()) {
            Some(-1) | None => k,
            Some(size) => usize::try_from(size).unwrap_or(0),
        };
        if group == 0 || k.div_ceil(group) != groups {
            let what = format!("{groups} groups do not cover {k} inputs in groups of {group}");
            return Err(wrong(shards, &scales, what));
        }
        let zero_words = (n * bits).div_ceil(32);
        let word = |bytes, stacked, transposed, width| Codes {
            word: 4,
            stacked,
            transposed,
            width,
            ..Codes::rows(bytes, bits as u8, 0)
        };
        let codes = bytes(shards, &weight, &["I32"], &[words, n])?;
        let points = bytes(shards, &zeros, &["I32"], &[groups, zero_words])?;
        found.uses([weight.as_str(), &zeros, &scales]);
        let affine = Affine {
            n,
            k,
            group,
            codes: word(codes, false, true, n),
            scales: floats(shards, &scales, &[groups, n], true)?,
            zero: Zero::Points(word(points, true, true, zero_words), add),
            rotation: None,
            outputs: None,
            order: if shards.get(&order).is_ok() {
                found.uses([order.as_str()]);
                input_order(shards, &order, k, group)?
            } else {
                None
            },
        };
        found.add(
            format!("{stem}.weight"),
            Stored::Affine(Box::new(affine)),
            [n, k],
        );
    }
    Ok(found)
}

/// The group of each input, unless groups are runs of inputs.
pub(crate) fn input_order(
    shards: &Shards,
    name: &str,
    k: usize,
    group: usize,
) -> Result<Option<Vec<u32>>, Error> {
    let stored = bytes(shards, name, &["I32"], &[k])?;
    let order: Vec<u32> = stored
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| u32::from_le_bytes(*bytes))
        .collect();
    if let Some(absurd) = order.iter().find(|&&at| at as usize >= k.div_ceil(group)) {
        let what = format!("there is no group {absurd}; the file is damaged");
        return Err(wrong(shards, name, what));
    }
    let runs = order
        .iter()
        .enumerate()
        .all(|(at, &of)| at / group == of as usize);
    Ok((!runs).then_some(order))
}
