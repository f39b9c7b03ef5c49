//! The plain form of the packed product: the reference for the others.

use super::input::Slab;
use crate::packed::{BLOCK, PackedMatrix, TILE, ZeroKind};

/// Sums of the outputs of blocks `first..last` of a tile, into `sums` [row][64].
pub(crate) fn tile(
    matrix: &PackedMatrix,
    tile: usize,
    blocks: std::ops::Range<usize>,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    let spec = matrix.spec();
    let mut weights = [[0u8; 128]; BLOCK];
    for row in 0..input.m {
        sums[row * TILE + blocks.start * BLOCK..row * TILE + blocks.end * BLOCK].fill(0.0);
    }
    for g in 0..spec.groups() {
        let first = g * spec.group;
        let count = spec.group.min(spec.k - first);
        for block in blocks.clone() {
            for (lane, weights) in weights.iter_mut().enumerate() {
                let output = tile * TILE + block * BLOCK + lane;
                for (i, code) in weights[..count].iter_mut().enumerate() {
                    *code = matrix.code(output, first + i);
                }
            }
            for row in 0..input.m {
                let at = g * input.rows + row;
                let (scale, sum) = (input.scales[at], input.sums[at]);
                for (lane, weights) in weights.iter().enumerate() {
                    let output = tile * TILE + block * BLOCK + lane;
                    let mut dot = 0i32;
                    for (i, &code) in weights[..count].iter().enumerate() {
                        dot += i32::from(code) * i32::from(input.codes[input.at(row, first + i)]);
                    }
                    dot -= i32::from(matrix.zero_point(output, g)) * sum;
                    let acc = &mut sums[row * TILE + block * BLOCK + lane];
                    *acc = (dot as f32).mul_add(scale * matrix.scale(output, g).to_f32(), *acc);
                    if spec.zero == ZeroKind::Min {
                        *acc = matrix
                            .min(output, g)
                            .to_f32()
                            .mul_add(scale * sum as f32, *acc);
                    }
                }
            }
        }
    }
}
