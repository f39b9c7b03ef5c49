//! Gumbel noise that is a pure function of (seed, position, token).
//!
//! The token at a position is the argmax of logit / temperature + noise. Because the noise does
//! not depend on how the position was reached, plain and speculative decoding draw the same
//! token. The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
//! as easy as 1, 2, 3", SC 2011): no state, any value at once.

use crate::transcendental::ln;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Blocks worked on at once where many neighbouring tokens need noise.
const LANES: usize = 8;
/// Values in one block of the generator.
const WORDS: usize = 4;

/// The largest value that the noise can take, so that a caller can rule tokens out.
pub const LARGEST: f64 = 22.88;

/// Philox4x32-10 on `N` counters at once; one counter is one column.
#[inline(always)]
fn philox<const N: usize>(mut counter: [[u32; N]; WORDS], key: [u32; 2]) -> [[u32; N]; WORDS] {
    let mut key = key;
    for round in 0..ROUNDS {
        if round > 0 {
            key[0] = key[0].wrapping_add(KEY_STEPS[0]);
            key[1] = key[1].wrapping_add(KEY_STEPS[1]);
        }
        let mut next = [[0u32; N]; WORDS];
        for lane in 0..N {
            let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0][lane]);
            let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2][lane]);
            next[0][lane] = (second >> 32) as u32 ^ counter[1][lane] ^ key[0];
            next[1][lane] = second as u32;
            next[2][lane] = (first >> 32) as u32 ^ counter[3][lane] ^ key[1];
            next[3][lane] = first as u32;
        }
        counter = next;
    }
    counter
}

/// A 32-bit word as standard Gumbel noise. The word stands for the middle of its share of
/// (0, 1), so both logarithms are finite: the result lies in (-3.15, 22.88).
#[inline(always)]
fn gumbel(word: u32) -> f64 {
    const STEP: f64 = 1.0 / 4_294_967_296.0;
    let uniform = (f64::from(word) + 0.5) * STEP;
    -ln(-ln(uniform))
}

/// The noise of every token at one position of one answer.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    key: [u32; 2],
    position: [u32; 2],
}

impl Noise {
    /// Noise for the token at absolute `position` (0 = first token of the context).
    pub fn new(seed: u64, position: u64) -> Noise {
        Noise {
            key: [seed as u32, (seed >> 32) as u32],
            position: [position as u32, (position >> 32) as u32],
        }
    }

    #[inline(always)]
    fn blocks<const N: usize>(&self, first: u32) -> [[u32; N]; WORDS] {
        let counter = [
            std::array::from_fn(|lane| first.wrapping_add(lane as u32)),
            [self.position[0]; N],
            [self.position[1]; N],
            [0; N],
        ];
        philox(counter, self.key)
    }

    /// The noise of one token; finite.
    pub fn of(&self, token: u32) -> f64 {
        let words = self.blocks::<1>(token / WORDS as u32);
        gumbel(words[token as usize % WORDS][0])
    }

    /// The noise of tokens 0..out.len(), the same values as [`Noise::of`].
    pub fn fill(&self, out: &mut [f64]) {
        for (step, chunk) in out.chunks_mut(LANES * WORDS).enumerate() {
            let words = self.blocks::<LANES>((step * LANES) as u32);
            let mut values = [0f64; LANES * WORDS];
            for (lane, quad) in values.chunks_exact_mut(WORDS).enumerate() {
                for (word, value) in quad.iter_mut().enumerate() {
                    *value = gumbel(words[word][lane]);
                }
            }
            chunk.copy_from_slice(&values[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn philox_one(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
        philox(counter.map(|word| [word]), key).map(|word| word[0])
    }

    /// The known answers published with the generator (Random123, kat_vectors).
    #[test]
    fn philox_known_answers() {
        assert_eq!(
            philox_one([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox_one([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox_one(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn extreme_words_give_finite_noise_within_the_bounds() {
        for word in [0, 1, u32::MAX / 2, u32::MAX - 1, u32::MAX] {
            let value = gumbel(word);
            assert!(value > -3.15 && value < LARGEST, "{word}: {value}");
        }
        // The median of the distribution is -ln(ln 2).
        assert!((gumbel(u32::MAX / 2) - 0.366_512_920_58).abs() < 1e-8);
    }

    #[test]
    fn fill_equals_single_values_at_every_length() {
        let noise = Noise::new(0x0123_4567_89ab_cdef, 77);
        for length in [0, 1, 3, 4, 5, 31, 32, 33, 100] {
            let mut all = vec![0.0; length];
            noise.fill(&mut all);
            for (token, value) in all.iter().enumerate() {
                assert_eq!(value.to_bits(), noise.of(token as u32).to_bits());
            }
        }
    }

    #[test]
    fn every_part_of_the_key_matters() {
        let base = Noise::new(1, 1).of(1);
        for other in [
            Noise::new(2, 1).of(1),
            Noise::new(1 << 32 | 1, 1).of(1),
            Noise::new(1, 2).of(1),
            Noise::new(1, 1 << 32 | 1).of(1),
            Noise::new(1, 1).of(2),
            Noise::new(1, 1).of(5),
        ] {
            assert_ne!(base.to_bits(), other.to_bits());
        }
    }

    #[test]
    fn mean_and_variance_are_those_of_the_gumbel_distribution() {
        let mut values = vec![0.0; 200_000];
        Noise::new(5, 9).fill(&mut values);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance =
            values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / values.len() as f64;
        assert!((mean - 0.577_215_664_9).abs() < 0.015, "{mean}");
        assert!((variance - 1.644_934_066_8).abs() < 0.03, "{variance}");
    }
}
