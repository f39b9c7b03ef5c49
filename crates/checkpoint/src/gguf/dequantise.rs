//! Rows of any type to f32, value for value as ggml gives them.

use half::{bf16, f16};

use super::blocks::{self, Block, GROUP};
use super::format::Format;

/// Dequantise whole blocks. `bytes` and `out` have matching lengths. Fails with what is wrong
/// if a scale is not finite.
pub(super) fn dequantise(format: Format, bytes: &[u8], out: &mut [f32]) -> Result<(), String> {
    debug_assert_eq!(format.row_bytes(out.len()), bytes.len());
    match format {
        Format::F32 => each(bytes, out, f32::from_le_bytes),
        Format::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        Format::Bf16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        Format::Q4_0 => return groups::<blocks::Q4_0>(bytes, out),
        Format::Q4_1 => return groups::<blocks::Q4_1>(bytes, out),
        Format::Q5_0 => return groups::<blocks::Q5_0>(bytes, out),
        Format::Q5_1 => return groups::<blocks::Q5_1>(bytes, out),
        Format::Q8_0 => return groups::<blocks::Q8_0>(bytes, out),
        Format::Q4K => return groups::<blocks::Q4K>(bytes, out),
        Format::Q5K => return groups::<blocks::Q5K>(bytes, out),
        Format::Q6K => return q6k(bytes, out),
    }
    Ok(())
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; N]) -> f32) {
    for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = read(bytes);
    }
}

fn groups<B: Block>(bytes: &[u8], out: &mut [f32]) -> Result<(), String> {
    let places = out.chunks_exact_mut(B::GROUPS * GROUP);
    for (block, out) in bytes.chunks_exact(B::BYTES).zip(places) {
        for (index, out) in out.chunks_exact_mut(GROUP).enumerate() {
            let group = B::group(block, index);
            check(group.scale, group.min)?;
            for (out, code) in out.iter_mut().zip(group.codes) {
                *out = group.scale * f32::from(i16::from(code) - i16::from(B::ZERO)) + group.min;
            }
        }
    }
    Ok(())
}

fn q6k(bytes: &[u8], out: &mut [f32]) -> Result<(), String> {
    for (block, out) in bytes
        .chunks_exact(blocks::Q6K_BYTES)
        .zip(out.chunks_exact_mut(256))
    {
        for (index, out) in out.chunks_exact_mut(GROUP).enumerate() {
            let (codes, scales, factor) = blocks::q6k_group(block, index);
            check(factor, 0.0)?;
            let halves = out
                .chunks_exact_mut(16)
                .zip(codes.chunks_exact(16))
                .zip(scales);
            for ((out, codes), scale) in halves {
                let scale = factor * f32::from(scale);
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = scale * f32::from(i16::from(code) - 32);
                }
            }
        }
    }
    Ok(())
}

/// Refuse blocks that would spread infinities or NaN.
pub(super) fn check(scale: f32, min: f32) -> Result<(), String> {
    if scale.is_finite() && min.is_finite() {
        Ok(())
    } else {
        Err("a block's scale is not a finite number; the file is damaged".to_owned())
    }
}
