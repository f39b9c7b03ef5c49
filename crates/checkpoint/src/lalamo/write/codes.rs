//! Which of lalamo's matrices hold codes, and how codes, scales and zero points lie in them.

use kozue_kernels::{PackedSpec, Quantizer, Rotation};

use super::super::Layout;
use super::super::structure::Joined;
use crate::Checkpoint;
use crate::affine::Slice;

/// Outputs of scales and zero points by group are padded to a multiple of this.
pub(super) const PADDED: usize = 4;

/// How a matrix is stored.
pub(super) enum Kind {
    Floats,
    Codes(PackedSpec, Option<Rotation>),
}

/// How a joined matrix is stored: as codes if its parts are codes of one kind, save for rows of heads,
/// which are rounded.
pub(super) fn kind(checkpoint: &Checkpoint, joined: &Joined) -> Kind {
    let mut form = None;
    let mut floats = false;
    for run in &joined.runs {
        let name = format!("{}.weight", run.name);
        let Some(codes) = checkpoint.source.codes(&name) else {
            if !crate::layout::stays_float(&name) {
                return Kind::Floats;
            }
            floats = true;
            continue;
        };
        let spec = PackedSpec {
            n: joined.n(),
            ..codes.spec()
        };
        let own = (spec, codes.rotation());
        if form.get_or_insert_with(|| own.clone()) != &own {
            return Kind::Floats;
        }
    }
    let Some((mut spec, rotation)) = form else {
        return Kind::Floats;
    };
    // lalamo's groups are whole.
    let whole = [spec.group, 64, 32]
        .into_iter()
        .find(|&group| group <= spec.group && spec.k.is_multiple_of(group));
    match whole {
        Some(group) => spec.group = group,
        None => return Kind::Floats,
    }
    if floats && quantizer(&spec).is_none() {
        return Kind::Floats;
    }
    Kind::Codes(spec, rotation)
}

/// What rounds to codes of this kind.
pub(super) fn quantizer(spec: &PackedSpec) -> Option<Quantizer> {
    let made = match spec.bits {
        4 => Quantizer::int4(spec.group),
        _ => Quantizer::int8(spec.group),
    };
    made.ok()
        .filter(|quantizer| quantizer.spec(spec.n, spec.k) == *spec)
}

/// The same codes in smaller groups.
pub(super) fn regrouped(slice: Slice, from: &PackedSpec, to: &PackedSpec) -> Slice {
    if from.group == to.group {
        return slice;
    }
    let spread = |values: &[f32]| -> Vec<f32> {
        let rows = values.chunks_exact(from.groups());
        rows.flat_map(|row| (0..to.groups()).map(|group| row[group * to.group / from.group]))
            .collect()
    };
    Slice {
        scales: spread(&slice.scales),
        zeros: spread(&slice.zeros),
        codes: slice.codes,
    }
}

/// Scales or zeros, rows x groups, as lalamo lays them out, and how many lie side by side: embeddings
/// by row, others by group with outputs padded.
pub(super) fn arranged(
    values: Vec<f32>,
    layout: Layout,
    n: usize,
    groups: usize,
) -> (Vec<f32>, usize) {
    if layout == Layout::InputOutput {
        return (values, groups);
    }
    let width = n.next_multiple_of(PADDED);
    let mut turned = vec![0.0; groups * width];
    for (row, values) in values.chunks_exact(groups).enumerate() {
        for (group, value) in values.iter().enumerate() {
            turned[group * width + row] = *value;
        }
    }
    (turned, width)
}

/// Numbers of `bits` bits, the first of two in the low half of a byte.
pub(super) fn narrow(codes: &[u8], bits: u8) -> Vec<u8> {
    if bits == 8 {
        return codes.to_vec();
    }
    codes
        .chunks(2)
        .map(|pair| pair[0] | pair.get(1).map_or(0, |second| second << 4))
        .collect()
}
