//! What proposes tokens for a target to verify.

use super::draft::Draft;
use crate::error::Error;
use crate::noise::Noise;
use kozue_model::{Footprint, Outputs};

/// Proposes trees of tokens for one sequence.
///
/// A drafter sees every token that the target reads, and what the target made of it. Nothing that
/// it proposes can change the answer: it only decides how much of it one pass can verify.
pub trait Drafter<'a>: Send {
    /// What the target has to give for [`Drafter::observe`] besides tokens.
    fn wants(&self) -> Outputs<'_> {
        Outputs::default()
    }

    /// Takes in tokens that the target read before, without its features: a prefix whose state
    /// came from a snapshot, as did this drafter ([`Drafter::fork`]).
    fn resume(&mut self, _tokens: &[u32]) {}

    /// Takes in, as a new drafter, tokens that the target read before, of which no drafter is
    /// left. [`Drafter::resume`] follows.
    fn catch_up_with(&mut self, _tokens: &[u32]) {}

    /// Takes in the next tokens that the target has read.
    fn observe(&mut self, read: Read<'_>) -> Result<(), Error>;

    /// A tree below the newest token, which the target has not read yet.
    fn propose(&mut self, growth: &Growth) -> Result<Draft, Error>;

    /// Takes in that of the last draft `path` (nodes, root first) was accepted, in a round that
    /// takes so many milliseconds.
    fn judged(&mut self, _draft: &Draft, _path: &[usize], _milliseconds: f64) {}

    /// A drafter in the same state, less what [`Drafter::resume`] makes from tokens.
    fn fork(&self) -> Box<dyn Drafter<'a> + 'a>;

    /// Memory that a fork holds.
    fn footprint(&self) -> Footprint {
        Footprint::default()
    }
}

/// What the target read, and what it made of it.
#[derive(Clone, Copy, Debug)]
pub struct Read<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Tapped residual streams, one row for each token, as [`Drafter::wants`] asked.
    pub features: &'a [f32],
    /// The final hidden state of the last of the tokens, where it was asked for and the token's
    /// logits were made.
    pub hidden: &'a [f32],
}

/// How far a tree may grow, and what the target will do with it.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    /// The newest token, the tree's root.
    pub root: u32,
    /// Most nodes, the root included.
    pub nodes: usize,
    /// Deepest edge that is of use.
    pub depth: usize,
    /// Most children of a node; 1 makes a chain.
    pub width: usize,
    /// Natural logarithm of the least chance at which a node is worth a row.
    pub least: f32,
    /// Tokens per millisecond of plain decoding: what time spent on a draft must make up for;
    /// 0 where the tree's size is fixed.
    pub rate: f64,
    /// Absolute position of the token to be drawn after the root.
    pub position: u64,
    /// Temperature and seed of the target's sampling; no noise where it is greedy.
    pub sampling: Option<(f32, u64)>,
}

impl Growth {
    /// A tree of up to `nodes` nodes for a greedy target.
    pub fn of(root: u32, nodes: usize) -> Growth {
        Growth {
            root,
            nodes,
            depth: usize::MAX,
            width: usize::MAX,
            least: f32::NEG_INFINITY,
            rate: 0.0,
            position: 0,
            sampling: None,
        }
    }

    /// The most likely of `candidates` (tokens and logits) to be drawn `depth` edges below the
    /// root, likeliest first, with the natural logarithm of their chance among all of them.
    ///
    /// The target's draw is an argmax over logits and noise, and the noise is known beforehand
    /// (a pure function of seed, position and token), so it is added here too.
    pub fn rank(&self, candidates: &[(u32, f32)], depth: usize) -> Vec<(u32, f32)> {
        let mut ranked: Vec<(u32, f32)> = match self.sampling {
            None => candidates.to_vec(),
            Some((temperature, seed)) => {
                let noise = Noise::new(seed, self.position + depth as u64 - 1);
                let score = |&(token, logit): &(u32, f32)| {
                    (token, logit / temperature + noise.of(token) as f32)
                };
                candidates.iter().map(score).collect()
            }
        };
        ranked.sort_unstable_by(crate::top::best_first);
        let Some(&(_, best)) = ranked.first() else {
            return ranked;
        };
        let total: f32 = ranked.iter().map(|(_, score)| (score - best).exp()).sum();
        let offset = best + total.ln();
        ranked.iter_mut().for_each(|(_, score)| *score -= offset);
        ranked.truncate(self.width);
        ranked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::{History, Sampler};
    use crate::sampling::Sampling;

    #[test]
    fn ranks_are_probabilities_and_narrow_to_the_width() {
        let candidates = [(4, 1.0f32), (9, 3.0), (2, 2.0)];
        let ranked = Growth::of(0, 8).rank(&candidates, 1);
        let tokens: Vec<u32> = ranked.iter().map(|r| r.0).collect();
        assert_eq!(tokens, [9, 2, 4]);
        let total: f32 = ranked.iter().map(|r| r.1.exp()).sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
        assert!((ranked[0].1 - ranked[1].1 - 1.0).abs() < 1e-6);
        let chain = Growth {
            width: 1,
            ..Growth::of(0, 8)
        };
        assert_eq!(chain.rank(&candidates, 1).len(), 1);
        assert!(chain.rank(&[], 1).is_empty());
    }

    /// A drafter that has the target's logits ranks the target's own draw first.
    #[test]
    fn the_noise_is_that_of_the_target() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let candidates: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        let sampling = Sampling {
            temperature: 0.9,
            seed: 7,
            ..Sampling::greedy()
        };
        let mut sampler = Sampler::new(sampling, 50).unwrap();
        let prompt = vec![1; 100];
        for depth in 1..20 {
            let growth = Growth {
                position: 80,
                sampling: Some((0.9, 7)),
                ..Growth::of(0, 8)
            };
            let history = History {
                prompt: &prompt[..80 + depth - 1],
                answer: &[],
            };
            let drawn = sampler.sample(&logits, history).unwrap();
            assert_eq!(growth.rank(&candidates, depth)[0].0, drawn, "depth {depth}");
        }
    }
}
