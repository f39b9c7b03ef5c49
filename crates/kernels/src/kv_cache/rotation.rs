//! How heads are kept in eight bits: rotated, then divided by a scale of each slot and head.
//!
//! x' = H x with H the normalised Hadamard matrix over the largest power of two that divides the
//! head's width, block after block. It is symmetric and orthonormal, so q'k' = qk, and a mix of
//! rotated values rotated once more is the mix of the values. It spreads the few channels that are
//! much larger than the others over the whole head, which then loses less to rounding (QuaRot,
//! Ashkboos et al. 2024, arXiv 2404.00456, section 4).
//!
//! Order of operations, the same on every instruction set: butterflies at distance block/2 .. 1
//! (the lower value becomes a + b, the upper a - b), then the factor 1/sqrt(block).

use crate::linear::factors;

/// Rotates a head in place; once more undoes it.
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32]) {
    let block = 1usize << head.len().trailing_zeros();
    let norm = 1.0 / (block as f32).sqrt();
    for x in head.chunks_exact_mut(block) {
        let mut distance = block / 2;
        while distance > 0 {
            for pair in x.chunks_exact_mut(2 * distance) {
                let (a, b) = pair.split_at_mut(distance);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance /= 2;
        }
        x.iter_mut().for_each(|x| *x *= norm);
    }
}

/// Turns a head into what is stored of it, before it is rounded to whole numbers, and its scale.
#[inline(always)]
pub(crate) fn rotate_and_scale(head: &mut [f32]) -> f32 {
    rotate(head);
    // The order of the magnitudes' bits is that of their values, with infinity and NaN on top.
    let top = head
        .iter()
        .fold(0, |top, x| top.max(x.to_bits() & 0x7FFF_FFFF));
    let (scale, inverse) = factors(f32::from_bits(top));
    match inverse {
        // Not a number times 0 would be no code.
        0.0 => head.fill(0.0),
        _ => head.iter_mut().for_each(|x| *x *= inverse),
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_rotation_is_the_sylvester_matrix_of_each_block_and_undoes_itself(
            width in 1usize..300, seed: u64,
        ) {
            let x = values(seed, width, 3.0);
            let mut rotated = x.clone();
            rotate(&mut rotated);
            let block = width & width.wrapping_neg();
            for (i, &got) in rotated.iter().enumerate() {
                let first = i / block * block;
                let sum: f64 = (0..block)
                    .map(|j| {
                        let odd = ((i - first) & j).count_ones() % 2 == 1;
                        f64::from(x[first + j]) * if odd { -1.0 } else { 1.0 }
                    })
                    .sum();
                prop_assert!((f64::from(got) - sum / (block as f64).sqrt()).abs() < 1e-5);
            }
            rotate(&mut rotated);
            for (x, again) in x.iter().zip(&rotated) {
                prop_assert!((x - again).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn codes_reach_127_and_what_is_not_finite_shows_in_the_scale() {
        let mut head = values(7, 64, 5.0);
        let scale = rotate_and_scale(&mut head);
        let most = head.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!((most - 127.0).abs() < 1e-4 && scale > 0.0, "{most} {scale}");
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut head = vec![1.0; 24];
            head[9] = bad;
            assert!(rotate_and_scale(&mut head).is_nan());
            assert_eq!(head, vec![0.0; 24]);
        }
        let mut head = vec![0.0; 24];
        assert_eq!(rotate_and_scale(&mut head), 0.0);
        assert_eq!(head, vec![0.0; 24]);
    }
}
