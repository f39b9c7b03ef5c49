//! What becomes of a GGUF file's tensors in memory, and what is said of it.

use kozue_kernels::DenseKind;

use super::blocks::GROUP;
use super::format::Format;
use super::names::{Place, Values};
use super::order::Order;
use super::regroup::{self, Form, Loss};
use super::repack;
use crate::kozue::format_name;
use crate::layout;
use crate::source::{InMemory, Note};

/// How a matrix is kept in memory.
pub(super) enum Kept {
    /// Floats as stored.
    Dense(DenseKind),
    /// In the kernels' form, its groups in this order.
    Packed(Form, Order),
    /// As f32.
    Unpacked,
}

pub(super) fn kept(place: &Place, format: Format) -> Kept {
    match format {
        // A matrix whose values change cannot be used as it is stored.
        _ if place.values != Values::Same => Kept::Unpacked,
        Format::F32 => Kept::Dense(DenseKind::F32),
        Format::F16 => Kept::Dense(DenseKind::F16),
        Format::Bf16 => Kept::Dense(DenseKind::Bf16),
        // Decays and rates of a recurrence, whose errors add up over a whole text, and routers.
        _ if layout::stays_float(&place.name) => Kept::Unpacked,
        quantised => match (regroup::form(quantised), place.columns.of_runs(GROUP)) {
            (Some(form), Some(groups)) => Kept::Packed(form, groups),
            _ => Kept::Unpacked,
        },
    }
}

/// What a tensor of this shape and these stored bytes becomes in a model that runs.
pub(super) fn in_memory(place: &Place, format: Format, shape: &[usize], bytes: u64) -> InMemory {
    let &[n, k] = shape else {
        return InMemory::f32(shape);
    };
    if place.name.ends_with(".conv1d.weight") {
        // Read as a vector of taps.
        return InMemory::f32(shape);
    }
    match kept(place, format) {
        Kept::Dense(_) => InMemory {
            mapped: place.rows == Order::Same && place.columns == Order::Same,
            ..InMemory::mapped(format.name(), bytes)
        },
        Kept::Packed(form, _) => {
            let spec = repack::spec(form, n, k);
            InMemory {
                format: format_name(&spec),
                bytes: spec.bytes() as u64,
                mapped: false,
                lossy: form.lossy,
            }
        }
        Kept::Unpacked => InMemory::f32(shape),
    }
}

/// One line on what became of the tensors of a quantised type.
pub(super) fn note(format: Format, count: usize, loss: &Loss) -> Note {
    let Some(form) = regroup::form(format) else {
        return Note {
            text: format!("{}: {count} tensors as stored", format.name()),
            lossy: false,
        };
    };
    let s = if count == 1 { "" } else { "s" };
    let how = match format {
        Format::Q4K | Format::Q5K => ", scales and minima rounded to f16",
        Format::Q6K => ", values rounded to 8 bits",
        _ => "",
    };
    let change = if form.lossy {
        format!("relative error {:.2e}", loss.relative())
    } else {
        "without loss".to_owned()
    };
    let kind = if form.min { "with minima" } else { "symmetric" };
    let (name, bits) = (format.name(), form.bits);
    Note {
        text: format!(
            "{name}: {count} tensor{s} as int{bits} groups of {GROUP} {kind}{how}, {change}"
        ),
        lossy: form.lossy,
    }
}
