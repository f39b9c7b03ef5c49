//! Directories that Apple's MLX quantised: Hugging Face's names, with codes in words of 32 bits, a
//! scale and a minimum for each group (`weight`, `scales`, `biases`).

use crate::affine::{Affine, Codes, Zero};
use crate::description::{Family, ModelConfig};
use crate::error::Error;
use crate::fields::Fields;
use crate::shards::Shards;
use crate::stored::{Found, Stored, VectorPlace, bytes, dimensions, floats, stems, wrong};

/// The setting of config.json that marks such a directory.
pub(crate) const CONFIG_KEY: &str = "quantization";

/// Where everything lies.
pub(crate) fn find(
    shards: &Shards,
    settings: &Fields,
    config: &ModelConfig,
) -> Result<Found, Error> {
    if let Some(mode) = settings.text("mode")?
        && mode != "affine"
    {
        return Err(settings.error("mode", format!("{mode:?} is not supported; only affine is")));
    }
    let mut found = Found::new("MLX");
    for stem in stems(shards, ".scales") {
        let [weight, scales, biases] =
            ["weight", "scales", "biases"].map(|part| format!("{stem}.{part}"));
        let [n, words] = dimensions(shards, &weight)?;
        let [rows, groups] = dimensions(shards, &scales)?;
        // Layers may differ from what the settings say of all; the shapes tell.
        let own = settings
            .get(&stem)
            .and_then(|own| own.get("group_size")?.as_u64());
        let of_all = settings.size("group_size", 1 << 16)?;
        let sized = |group: usize| match 32 * words / (group * groups) {
            bits @ (4 | 8) if 32 * words == bits * group * groups => Some((bits as u8, group)),
            _ => None,
        };
        let own = own
            .and_then(|size| usize::try_from(size).ok())
            .filter(|size| (1..1 << 16).contains(size));
        let mut groups_known = own.into_iter().chain(of_all);
        let Some((bits, group)) = groups_known.find_map(sized).filter(|_| rows == n) else {
            let what = format!(
                "its shape [{n}, {words}] and that of its scales, [{rows}, {groups}], are not those \
                 of 4 or 8 bits in groups of quantization.group_size"
            );
            return Err(wrong(shards, &weight, what));
        };
        let k = group * groups;
        let codes = bytes(shards, &weight, &["U32"], &[n, words])?;
        let affine = Affine {
            n,
            k,
            group,
            codes: Codes::rows(codes, bits, 4 * words),
            scales: floats(shards, &scales, &[n, groups], false)?,
            zero: Zero::Minima(floats(shards, &biases, &[n, groups], false)?),
            rotation: None,
            outputs: None,
            order: None,
        };
        found.uses([weight.as_str(), &scales, &biases]);
        found.add(weight, Stored::Affine(Box::new(affine)), [n, k]);
    }
    if config.family == Family::Qwen35 {
        undo_norms(shards, &mut found)?;
    }
    Ok(found)
}

/// MLX's converter adds 1 to Qwen3.5's norms, and moves the taps of its convolutions to the middle,
/// which tells such a file from others.
fn undo_norms(shards: &Shards, found: &mut Found) -> Result<(), Error> {
    let moved = shards.infos().any(|info| {
        info.name.ends_with(".conv1d.weight") && matches!(info.shape[..], [_, taps, 1] if taps > 1)
    });
    if !moved {
        return Ok(());
    }
    let infos = shards.infos().filter(|info| !info.aside);
    for info in infos.filter(|info| {
        info.name.ends_with("norm.weight") && !info.name.ends_with(".linear_attn.norm.weight")
    }) {
        let len = info.shape.iter().product();
        found.uses([info.name.as_str()]);
        let place = VectorPlace {
            shape: info.shape,
            parts: vec![(info.name.clone(), 0, len)],
            add: -1.0,
        };
        found.vectors.insert(info.name, place);
    }
    Ok(())
}
