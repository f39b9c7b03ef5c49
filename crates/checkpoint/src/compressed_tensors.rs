//! Directories of the compressed-tensors library (vLLM, LLM Compressor): codes packed in words
//! (`weight_packed`), plain 8-bit codes, or 8-bit floats (`weight` of I8 or F8_E4M3).

use crate::affine::{Affine, Codes, Zero};
use crate::error::Error;
use crate::fields::Fields;
use crate::float8;
use crate::gptq::input_order;
use crate::shards::Shards;
use crate::stored::{Found, Stored, bytes, dimensions, floats, group_size, stems, wrong};

/// What belongs to activations and caches, which are not quantised so here.
const ASIDE: [&str; 6] = [
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
];

/// Where everything lies.
pub(crate) fn find(shards: &Shards, settings: &Fields) -> Result<Found, Error> {
    if let Some(format) = settings.text("format")?
        && ![
            "pack-quantized",
            "int-quantized",
            "float-quantized",
            "naive-quantized",
            "mixed-precision",
            "dense",
        ]
        .contains(&format)
    {
        let what = format!("{format:?} is not supported; pack-, int- and float-quantized are");
        return Err(settings.error("format", what));
    }
    let block = block_size(settings)?;
    let mut found = Found::new("compressed-tensors");
    for stem in stems(shards, ".weight_packed") {
        packed(shards, &mut found, &stem)?;
    }
    for stem in stems(shards, ".weight_scale") {
        let weight = format!("{stem}.weight");
        match shards.get(&weight).map(|placed| placed.entry.dtype.name()) {
            Ok("I8") => whole(shards, &mut found, &stem)?,
            Ok(_) => float8::add(shards, &mut found, &stem, ".weight_scale", block)?,
            Err(_) => {}
        }
    }
    for end in ASIDE {
        for stem in stems(shards, end) {
            found.uses([format!("{stem}{end}").as_str()]);
        }
    }
    Ok(found)
}

/// The block of the first group of settings that has one.
fn block_size(settings: &Fields) -> Result<Option<[usize; 2]>, Error> {
    let Some(groups) = settings
        .get("config_groups")
        .and_then(|groups| groups.as_object())
    else {
        return Ok(None);
    };
    for group in groups.values() {
        if let Some(sizes) = group["weights"]["block_structure"].as_array() {
            let size = |at: usize| sizes.get(at)?.as_u64().filter(|&size| size > 0);
            return match (size(0), size(1)) {
                (Some(rows), Some(columns)) => Ok(Some([rows as usize, columns as usize])),
                _ => Err(settings.error("config_groups", "block_structure: expected two sizes")),
            };
        }
    }
    Ok(None)
}

/// Codes in words of 32 bits, with 2^(bits - 1) added so that none is negative.
fn packed(shards: &Shards, found: &mut Found, stem: &str) -> Result<(), Error> {
    let [weight, shape, scale, zero, order] = [
        "weight_packed",
        "weight_shape",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
    ]
    .map(|part| format!("{stem}.{part}"));
    let [n, words] = dimensions(shards, &weight)?;
    let [rows, k] = stored_shape(shards, &shape)?;
    let bits = [4, 8]
        .into_iter()
        .find(|bits| (k * bits).div_ceil(32) == words);
    let Some(bits) = bits.filter(|_| rows == n) else {
        let what = format!("holds {n} x {words} words, not {rows} x {k} codes of 4 or 8 bits");
        return Err(wrong(shards, &weight, what));
    };
    let (scales, groups, group) = scales(shards, &scale, n, k)?;
    found.uses([weight.as_str(), &shape, &scale]);
    let zero = match shards.get(&zero).map(|placed| placed.entry.dtype.name()) {
        Err(_) => Zero::Symmetric,
        Ok(dtype) => {
            found.uses([zero.as_str()]);
            if dtype == "I8" {
                let points = Codes {
                    signed: true,
                    ..Codes::rows(bytes(shards, &zero, &["I8"], &[n, groups])?, 8, groups)
                };
                // Read with 128 added; the codes have half of their range.
                Zero::Points(points, (1 << (bits - 1)) - 128)
            } else {
                let stacked = (n * bits).div_ceil(32);
                let points = bytes(shards, &zero, &["I32"], &[stacked, groups])?;
                let points = Codes {
                    word: 4,
                    stacked: true,
                    ..Codes::rows(points, bits as u8, groups)
                };
                Zero::Points(points, 0)
            }
        }
    };
    let order = if shards.get(&order).is_ok() {
        found.uses([order.as_str()]);
        input_order(shards, &order, k, group)?
    } else {
        None
    };
    let affine = Affine {
        n,
        k,
        group,
        codes: Codes::rows(
            bytes(shards, &weight, &["I32"], &[n, words])?,
            bits as u8,
            4 * words,
        ),
        scales,
        zero,
        rotation: None,
        outputs: None,
        order,
    };
    found.add(
        format!("{stem}.weight"),
        Stored::Affine(Box::new(affine)),
        [n, k],
    );
    Ok(())
}

/// Signed codes of 8 bits, one a byte.
fn whole(shards: &Shards, found: &mut Found, stem: &str) -> Result<(), Error> {
    let [weight, scale, zero] =
        ["weight", "weight_scale", "weight_zero_point"].map(|part| format!("{stem}.{part}"));
    let [n, k] = dimensions(shards, &weight)?;
    let (scales, groups, group) = scales(shards, &scale, n, k)?;
    let signed = |bytes, width| Codes {
        signed: true,
        ..Codes::rows(bytes, 8, width)
    };
    found.uses([weight.as_str(), &scale]);
    let zero = if shards.get(&zero).is_ok() {
        found.uses([zero.as_str()]);
        Zero::Points(
            signed(bytes(shards, &zero, &["I8"], &[n, groups])?, groups),
            0,
        )
    } else {
        Zero::Symmetric
    };
    let affine = Affine {
        n,
        k,
        group,
        codes: signed(bytes(shards, &weight, &["I8"], &[n, k])?, k),
        scales,
        zero,
        rotation: None,
        outputs: None,
        order: None,
    };
    found.add(weight, Stored::Affine(Box::new(affine)), [n, k]);
    Ok(())
}

/// Scales with the number of groups and the inputs of one.
fn scales(
    shards: &Shards,
    name: &str,
    n: usize,
    k: usize,
) -> Result<(crate::affine::Floats, usize, usize), Error> {
    let shape = shards.get(name)?.entry.shape.clone();
    let groups = match shape[..] {
        [rows] if rows == n => 1,
        [rows, groups] if rows == n => groups,
        _ => 0,
    };
    let Some(group) = group_size(k, groups) else {
        let what = format!("its shape {shape:?} does not go with a matrix of {n} x {k}");
        return Err(wrong(shards, name, what));
    };
    let mut scales = floats(shards, name, &shape, false)?;
    scales.width = groups;
    Ok((scales, groups, group))
}

/// The two numbers of a `weight_shape`.
fn stored_shape(shards: &Shards, name: &str) -> Result<[usize; 2], Error> {
    let stored = bytes(shards, name, &["I64", "I32"], &[2])?;
    let size = stored.len() / 2;
    let number = |at: usize| {
        let mut value = [0; 8];
        value[..size].copy_from_slice(&stored[at * size..(at + 1) * size]);
        u64::from_le_bytes(value)
    };
    // More than any matrix has.
    match [number(0), number(1)] {
        [n, k] if (1..1 << 31).contains(&n) && (1..1 << 31).contains(&k) => {
            Ok([n as usize, k as usize])
        }
        [n, k] => Err(wrong(
            shards,
            name,
            format!("{n} x {k} is no shape of a matrix"),
        )),
    }
}
