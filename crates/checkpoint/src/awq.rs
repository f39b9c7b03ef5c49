//! AWQ's safetensors in the `gemm` form: codes and zero points of eight outputs share a word, in an
//! order of their own.

use crate::affine::{Affine, Codes, Zero};
use crate::error::Error;
use crate::fields::Fields;
use crate::shards::Shards;
use crate::stored::{Found, Stored, bytes, dimensions, floats, group_size, stems, wrong};

/// Which place of a word holds its first, second, ... output.
const PLACES: [u8; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Where everything lies.
pub(crate) fn find(shards: &Shards, settings: &Fields) -> Result<Found, Error> {
    let bits = match settings.size("bits", 32)? {
        Some(bits) => bits,
        None => settings.size("w_bit", 32)?.unwrap_or(4),
    };
    if bits != 4 {
        let what = format!("codes of {bits} bits are not supported; 4 are");
        return Err(settings.error("bits", what));
    }
    if let Some(version) = settings.text("version")?
        && !version.eq_ignore_ascii_case("gemm")
    {
        let what = format!("{version:?} is not supported; gemm is");
        return Err(settings.error("version", what));
    }
    let mut found = Found::new("AWQ");
    for stem in stems(shards, ".qweight") {
        let [weight, zeros, scales] =
            ["qweight", "qzeros", "scales"].map(|part| format!("{stem}.{part}"));
        let [k, words] = dimensions(shards, &weight)?;
        let n = 8 * words;
        let [groups, _] = dimensions(shards, &scales)?;
        let Some(group) = group_size(k, groups) else {
            let what = format!("{groups} groups do not divide {k} inputs");
            return Err(wrong(shards, &scales, what));
        };
        let word = |bytes| Codes {
            word: 4,
            stacked: true,
            transposed: true,
            places: Some(PLACES),
            ..Codes::rows(bytes, 4, words)
        };
        let affine = Affine {
            n,
            k,
            group,
            codes: word(bytes(shards, &weight, &["I32"], &[k, words])?),
            scales: floats(shards, &scales, &[groups, n], true)?,
            zero: Zero::Points(word(bytes(shards, &zeros, &["I32"], &[groups, words])?), 0),
            rotation: None,
            outputs: None,
            order: None,
        };
        found.uses([weight.as_str(), &zeros, &scales]);
        found.add(
            format!("{stem}.weight"),
            Stored::Affine(Box::new(affine)),
            [n, k],
        );
    }
    Ok(found)
}
