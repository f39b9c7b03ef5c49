//! Drafters that do their worst.

use kozue_engine::Error;
use kozue_engine::speculation::{Draft, Drafter, Growth, Read};

/// What an adversary drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// Tokens that are never right, in a chain.
    Wrong,
    /// What the target will say, as given.
    Right,
    /// Trees of any shape and any tokens.
    Random,
    /// Many siblings with one token.
    Duplicates,
    /// Tokens outside the vocabulary among right ones.
    Outside,
    /// Another root than the newest token.
    WrongRoot,
    /// A chain much longer than was asked for.
    Endless,
    /// An error instead of a draft.
    Failing,
}

pub const SCHEMES: [Scheme; 8] = [
    Scheme::Wrong,
    Scheme::Right,
    Scheme::Random,
    Scheme::Duplicates,
    Scheme::Outside,
    Scheme::WrongRoot,
    Scheme::Endless,
    Scheme::Failing,
];

/// Drafts by a scheme, knowing the whole text.
#[derive(Clone)]
pub struct Adversary {
    pub scheme: Scheme,
    /// Prompt and answer, as plain decoding gives them.
    pub text: Vec<u32>,
    pub vocab_size: usize,
    pub random: u64,
}

impl Adversary {
    fn next(&mut self) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.random >> 33
    }
}

impl<'a> Drafter<'a> for Adversary {
    fn observe(&mut self, _: Read<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn propose(&mut self, growth: &Growth) -> Result<Draft, Error> {
        let at = growth.position as usize;
        let truth = |i: usize| self.text.get(at + i).copied().unwrap_or(0);
        let mut draft = Draft::root(growth.root);
        let nodes = growth.nodes;
        match self.scheme {
            Scheme::Wrong => {
                for i in 0..nodes - 1 {
                    let wrong = (truth(i) + 1) % self.vocab_size as u32;
                    draft.push(i, wrong, -0.1);
                }
            }
            Scheme::Right => (0..nodes - 1).for_each(|i| {
                draft.push(i, truth(i), -0.1);
            }),
            Scheme::Random => {
                for i in 1..nodes {
                    let parent = (self.next() % i as u64) as usize;
                    // Right for a while where the tree happens to follow the text.
                    let depth = draft.tree.depths()[parent] as usize;
                    let token = match self.next() % 3 {
                        0 => (self.next() % self.vocab_size as u64) as u32,
                        _ => self.text.get(at + depth).copied().unwrap_or(0),
                    };
                    draft.push(parent, token, -0.1);
                }
            }
            Scheme::Duplicates => {
                for i in 1..nodes {
                    let parent = (i - 1) / 3;
                    let depth = draft.tree.depths()[parent] as usize;
                    draft.push(parent, truth(depth), -0.1);
                }
            }
            Scheme::Outside => {
                for i in 0..nodes - 1 {
                    let token = if i % 3 == 2 { u32::MAX } else { truth(i) };
                    draft.push(i, token, -0.1);
                }
            }
            Scheme::WrongRoot => {
                draft = Draft::root(growth.root ^ 1);
                draft.push(0, truth(0), -0.1);
            }
            Scheme::Failing => return Err(Error::Draft("it fell asleep".to_string())),
            Scheme::Endless => (0..500).for_each(|i| {
                draft.push(i, truth(i), -0.1);
            }),
        }
        Ok(draft)
    }

    fn fork(&self) -> Box<dyn Drafter<'a> + 'a> {
        Box::new(self.clone())
    }
}
