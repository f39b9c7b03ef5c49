//! The randomized Hadamard rotation over blocks of 32 inputs.
//!
//! x' = H (s * x) with H the normalised 32 x 32 Hadamard matrix (symmetric and orthonormal) and s a
//! vector of signs; its inverse is x = s * (H x'). It spreads outliers over a block, so that a
//! group of weights or activations loses less to rounding (QuIP#, Tseng et al. 2024, section 3).
//!
//! Order of operations, the same on every instruction set: the sign, then butterflies at distance
//! 16, 8, 4, 2, 1 (the lower lane gets a + b, the upper a - b), then the factor 1/sqrt(32).

use std::sync::Arc;

use crate::error::Error;

/// Inputs mixed by one Hadamard matrix.
pub const BLOCK: usize = 32;

/// 1/sqrt(32)
const NORM: f32 = 0.176_776_7;

/// A rotation of vectors of a set length. Cloning it shares the signs.
#[derive(Clone, Debug)]
pub struct Rotation {
    signs: Arc<[f32]>,
}

impl PartialEq for Rotation {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.signs, &other.signs) || self.signs == other.signs
    }
}

impl Rotation {
    /// The rotation of vectors of length `k` whose signs follow from `seed`: every matrix of width
    /// `k` that was made with one seed shares its signs.
    ///
    /// # Errors
    /// If `k` is not a multiple of 32.
    pub fn from_seed(k: usize, seed: u64) -> Result<Self, Error> {
        let signs = (0..k)
            .map(|i| {
                let word = mix(seed.wrapping_add(mix(i as u64 / 64)));
                if word >> (i % 64) & 1 == 0 { 1 } else { -1 }
            })
            .collect::<Vec<i8>>();
        Self::from_signs(&signs)
    }

    /// The rotation with the given signs, each 1 or -1.
    ///
    /// # Errors
    /// If the number of signs is not a multiple of 32, or one is neither 1 nor -1.
    pub fn from_signs(signs: &[i8]) -> Result<Self, Error> {
        if signs.is_empty() || !signs.len().is_multiple_of(BLOCK) {
            return Err(Error::new(format!(
                "a Hadamard rotation needs a width that is a multiple of {BLOCK}, not {}",
                signs.len()
            )));
        }
        if let Some(i) = signs.iter().position(|&s| s != 1 && s != -1) {
            return Err(Error::new(format!(
                "Hadamard sign {i} is {}, it must be 1 or -1",
                signs[i]
            )));
        }
        Ok(Self {
            signs: signs.iter().map(|&s| f32::from(s)).collect(),
        })
    }

    /// Length of the vectors it rotates.
    pub fn k(&self) -> usize {
        self.signs.len()
    }

    /// The signs, each 1.0 or -1.0.
    pub fn signs(&self) -> &[f32] {
        &self.signs
    }

    /// Rotates rows of length `k` in place: x' = H (s * x).
    pub fn forward(&self, x: &mut [f32]) {
        for row in x.chunks_exact_mut(self.signs.len()) {
            self.forward_part(0, row);
        }
    }

    /// Rotates inputs `first ..` of a row in place; `first` and their number are multiples of 32.
    #[inline(always)]
    pub(crate) fn forward_part(&self, first: usize, x: &mut [f32]) {
        let signs = self.signs[first..first + x.len()].as_chunks::<BLOCK>().0;
        for (block, signs) in x.as_chunks_mut::<BLOCK>().0.iter_mut().zip(signs) {
            for (x, s) in block.iter_mut().zip(signs) {
                *x *= s;
            }
            hadamard(block);
        }
    }

    /// Undoes [`Rotation::forward`]: x = s * (H x').
    pub fn inverse(&self, x: &mut [f32]) {
        for row in x.chunks_exact_mut(self.signs.len()) {
            for block in row.as_chunks_mut::<BLOCK>().0 {
                hadamard(block);
            }
            for (x, s) in row.iter_mut().zip(&*self.signs) {
                *x *= s;
            }
        }
    }
}

#[inline(always)]
fn hadamard(x: &mut [f32; BLOCK]) {
    let mut distance = BLOCK / 2;
    while distance > 0 {
        for start in (0..BLOCK).step_by(2 * distance) {
            for i in start..start + distance {
                let (a, b) = (x[i], x[i + distance]);
                x[i] = a + b;
                x[i + distance] = a - b;
            }
        }
        distance /= 2;
    }
    for x in x {
        *x *= NORM;
    }
}

/// As [`Rotation::forward_part`] for the 32 inputs from `first` on.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn forward_avx512(
    [x0, x1]: [std::arch::x86_64::__m512; 2],
    rotation: &Rotation,
    first: usize,
) -> [std::arch::x86_64::__m512; 2] {
    use std::arch::x86_64::*;

    /// Butterfly with each lane's partner `t`: the lower lanes get x + t, the upper t - x.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn butterfly(x: __m512, t: __m512, upper: __mmask16) -> __m512 {
        _mm512_mask_sub_ps(_mm512_add_ps(x, t), upper, t, x)
    }

    let signs: &[f32] = &rotation.signs[first..first + BLOCK];
    // SAFETY: the slice has 32 values.
    let (s0, s1) = unsafe {
        (
            _mm512_loadu_ps(signs.as_ptr()),
            _mm512_loadu_ps(signs.as_ptr().add(16)),
        )
    };
    let (a, b) = (_mm512_mul_ps(x0, s0), _mm512_mul_ps(x1, s1));
    let mut halves = [_mm512_add_ps(a, b), _mm512_sub_ps(a, b)];
    for v in &mut halves {
        let mut x = *v;
        x = butterfly(x, _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x), 0xFF00);
        x = butterfly(x, _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x), 0xF0F0);
        x = butterfly(x, _mm512_permute_ps::<0b01_00_11_10>(x), 0xCCCC);
        x = butterfly(x, _mm512_permute_ps::<0b10_11_00_01>(x), 0xAAAA);
        *v = _mm512_mul_ps(x, _mm512_set1_ps(NORM));
    }
    halves
}

/// SplitMix64's output function (Steele, Lea and Flood 2014): a bijection of 64-bit words that
/// turns a counter into random bits.
fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_rotation_is_orthonormal() {
        let rotation = Rotation::from_seed(32, 9).unwrap();
        let columns: Vec<Vec<f32>> = (0..32)
            .map(|i| {
                let mut x = vec![0.0; 32];
                x[i] = 1.0;
                rotation.forward(&mut x);
                x
            })
            .collect();
        for i in 0..32 {
            for j in 0..32 {
                let dot: f32 = columns[i].iter().zip(&columns[j]).map(|(a, b)| a * b).sum();
                assert!((dot - f32::from(i == j)).abs() < 1e-6, "{i} {j} {dot}");
            }
        }
    }

    #[test]
    fn it_is_the_sylvester_matrix_times_the_signs() {
        let rotation = Rotation::from_seed(64, 1).unwrap();
        let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut y = x.clone();
        rotation.forward(&mut y);
        for block in 0..2 {
            for i in 0..32usize {
                let sum: f64 = (0..32usize)
                    .map(|j| {
                        let sign = if (i & j).count_ones() % 2 == 0 {
                            1.0
                        } else {
                            -1.0
                        };
                        let at = block * 32 + j;
                        sign * f64::from(x[at] * rotation.signs()[at])
                    })
                    .sum();
                let want = sum / 32f64.sqrt();
                assert!((f64::from(y[block * 32 + i]) - want).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn signs_follow_from_the_seed_and_are_balanced() {
        let a = Rotation::from_seed(4096, 3).unwrap();
        assert_eq!(a, Rotation::from_seed(4096, 3).unwrap());
        assert_ne!(a, Rotation::from_seed(4096, 4).unwrap());
        let sum: f32 = a.signs().iter().sum();
        assert!(sum.abs() < 4.0 * 64.0, "{sum}");
        // The signs of a narrower matrix are the first of a wider one.
        assert_eq!(
            Rotation::from_seed(96, 3).unwrap().signs(),
            &a.signs()[..96]
        );
    }

    #[test]
    fn bad_widths_and_signs_are_refused() {
        assert!(Rotation::from_seed(0, 1).is_err());
        assert!(Rotation::from_seed(48, 1).is_err());
        let mut signs = [1i8; 32];
        signs[5] = 0;
        let error = Rotation::from_signs(&signs).unwrap_err().to_string();
        assert_eq!(error, "Hadamard sign 5 is 0, it must be 1 or -1");
    }

    proptest! {
        #[test]
        fn inverse_undoes_forward(
            x in proptest::collection::vec(-100f32..100.0, 192), seed: u64,
        ) {
            let rotation = Rotation::from_seed(96, seed).unwrap();
            let mut forward = x.clone();
            rotation.forward(&mut forward);
            rotation.inverse(&mut forward);
            for (a, b) in x.iter().zip(&forward) {
                prop_assert!((a - b).abs() < 1e-3);
            }
        }
    }
}
