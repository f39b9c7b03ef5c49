//! A draft that a network writes token by token: each step's runners-up become leaves beside the
//! spine.

use super::draft::{Draft, Pool};
use super::drafter::Growth;
use crate::top::keep_top;
use std::time::Instant;

/// Tokens of a step that are ranked.
const SHORTLIST: usize = 32;
/// Leaves beside the spine at each step.
const LEAVES: usize = 3;

/// How long a step takes, over the drafts of one sequence.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pulse {
    milliseconds: f64,
}

impl Pulse {
    fn beat(&mut self, milliseconds: f64) {
        self.milliseconds = if self.milliseconds == 0.0 {
            milliseconds
        } else {
            // One stalled step must not make drafting look dear for a long time.
            0.9 * self.milliseconds + 0.1 * milliseconds.min(4.0 * self.milliseconds)
        };
    }
}

/// A spine in growth.
pub(super) struct Spine<'a> {
    growth: &'a Growth,
    pulse: &'a mut Pulse,
    longest: usize,
    pool: Pool,
    tip: usize,
    depth: usize,
    best: Vec<(u32, f32)>,
    start: Option<Instant>,
}

impl<'a> Spine<'a> {
    /// The root alone, to become up to `longest` edges long.
    pub(super) fn new(growth: &'a Growth, pulse: &'a mut Pulse, longest: usize) -> Spine<'a> {
        Spine {
            pool: Pool::new(growth.root),
            longest: longest.min(growth.depth).min(growth.nodes),
            growth,
            pulse,
            tip: 0,
            depth: 0,
            best: Vec::new(),
            start: None,
        }
    }

    /// Takes the logits after the newest token; gives the next one to read, or `None` where one
    /// more step would not pay.
    pub(super) fn grow(&mut self, logits: &[f32]) -> Option<u32> {
        if let Some(start) = self.start {
            self.pulse.beat(start.elapsed().as_secs_f64() * 1e3);
        }
        self.depth += 1;
        keep_top(&mut self.best, logits, SHORTLIST);
        let ranked = self.growth.rank(&self.best, self.depth);
        let parent = self.tip;
        for (place, &(token, edge)) in ranked.iter().take(1 + LEAVES).enumerate() {
            let node = self.pool.push(parent, token, edge);
            if place == 0 {
                self.tip = node;
            }
        }
        let log_chance = self.pool.log_chance(self.tip);
        // One more step gives at most this much more; plain decoding would make
        // `rate * step` tokens in the time.
        let ends = self.tip == parent
            || f64::from(log_chance).exp() < self.growth.rate * self.pulse.milliseconds
            || log_chance < self.growth.least
            || self.depth >= self.longest;
        self.start = Some(Instant::now());
        (!ends).then(|| self.pool.token(self.tip))
    }

    /// The best of what grew.
    pub(super) fn draft(&self) -> Draft {
        self.pool.best(self.growth.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits that prefer `token` by `lead`.
    fn logits(token: usize, lead: f32) -> Vec<f32> {
        let mut logits = vec![0.0; 50];
        logits[token] = lead;
        logits
    }

    #[test]
    fn a_spine_has_leaves_and_ends_where_it_was_told_to() {
        let growth = Growth::of(9, 40);
        let mut pulse = Pulse::default();
        let mut spine = Spine::new(&growth, &mut pulse, 3);
        assert_eq!(spine.grow(&logits(5, 8.0)), Some(5));
        assert_eq!(spine.grow(&logits(6, 8.0)), Some(6));
        assert_eq!(spine.grow(&logits(7, 8.0)), None);
        let draft = spine.draft();
        assert_eq!(draft.len(), 1 + 3 * (1 + LEAVES));
        assert_eq!(draft.tree.tokens()[..4], [9, 5, 6, 7]);
        assert_eq!(draft.tree.parents()[..4], [-1, 0, 1, 2]);
    }

    #[test]
    fn a_step_that_costs_more_than_it_brings_is_not_taken() {
        let growth = Growth {
            rate: 0.1,
            ..Growth::of(9, 40)
        };
        let mut pulse = Pulse::default();
        pulse.beat(5.0);
        // Two tokens are as good: the better one's chance is just under a half.
        let mut even = logits(5, 8.0);
        even[6] = 8.0;
        assert_eq!(Spine::new(&growth, &mut pulse, 8).grow(&even), None);
        pulse = Pulse::default();
        pulse.beat(4.0);
        assert_eq!(Spine::new(&growth, &mut pulse, 8).grow(&even), Some(5));
    }
}
