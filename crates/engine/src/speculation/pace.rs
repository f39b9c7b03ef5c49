//! When speculation pays, and how large a tree: decided anew for every pass, from what rows cost
//! on this machine and from how earlier drafts of this answer fared.
//!
//! A text for which drafts do not pay must not become slower than by a few in a hundred. So drafts
//! live on credit: they may lose a few tokens' time at first and a small share of what is decoded
//! plainly afterwards, and what they gain they may lose again, up to a bound.

use super::cost::RowCosts;
use super::draft::Draft;

/// Weight of what lies one round further back.
const MEMORY: f64 = 0.93;
/// Edges that the first estimate of the drafter's honesty counts for, and that estimate.
const PRIOR: f64 = 3.0;
const FIRST_HONESTY: f64 = 0.8;
/// What speculation may lose, in tokens of plain decoding: at first, for each token that is then
/// decoded plainly, and the most that it can gain to lose again.
const FIRST_CREDIT: f64 = 1.5;
const CREDIT_PER_TOKEN: f64 = 0.03;
const MOST_CREDIT: f64 = 6.0;
/// Every so many rounds one token is decoded plainly where drafts gain little: what they are held
/// against would otherwise be a measurement of another hour.
const PROBE: u32 = 8;
/// Depth that a draft is first taken to reach, and how fast the memory of one goes.
const FIRST_REACH: f64 = 8.0;
const REACH_MEMORY: f64 = 0.92;

/// Sizes trees for one sequence.
#[derive(Clone, Debug)]
pub struct Pace {
    costs: RowCosts,
    fixed: Option<usize>,
    /// Milliseconds that a draft takes, proposing and observing together.
    draft_ms: f64,
    /// Edges that were expected to be accepted, and those that were; older ones weigh less.
    expected: f64,
    accepted: f64,
    /// Tokens of plain decoding that drafts have gained, less those that they have lost.
    credit: f64,
    /// Depth that drafts were lately accepted to, at most.
    reach: f64,
    rounds: u32,
}

impl Pace {
    /// Trees of the size that pays best by `costs`, or, where `fixed` says so, always of that
    /// many nodes.
    pub fn new(costs: RowCosts, fixed: Option<usize>) -> Pace {
        Pace {
            costs,
            fixed,
            draft_ms: 0.0,
            expected: 0.0,
            accepted: 0.0,
            credit: FIRST_CREDIT,
            reach: FIRST_REACH,
            rounds: 0,
        }
    }

    /// Most nodes of the next tree, the root included, beside `others` rows of other sequences;
    /// 1 while speculation rests.
    pub fn nodes(&mut self, others: usize) -> usize {
        if let Some(nodes) = self.fixed {
            return nodes.max(1);
        }
        if self.credit < 0.0 {
            self.credit += CREDIT_PER_TOKEN;
            return 1;
        }
        self.rounds += 1;
        if self.credit < MOST_CREDIT && self.rounds.is_multiple_of(PROBE) {
            return 1;
        }
        self.costs.largest().saturating_sub(others).max(1)
    }

    /// Depth beyond which a draft is hardly ever accepted: some more than it lately was at most.
    pub fn depth(&self) -> usize {
        match self.fixed {
            Some(_) => usize::MAX,
            None => (1.25 * self.reach).ceil() as usize + 2,
        }
    }

    /// Tokens per millisecond of plain decoding; 0 where the size is fixed.
    pub fn plain_rate(&self) -> f64 {
        if self.fixed.is_some() {
            0.0
        } else {
            1.0 / self.costs.of(1)
        }
    }

    /// Natural logarithm of the least chance at which a node can be worth its row.
    pub fn least(&self) -> f32 {
        if self.fixed.is_some() {
            return f32::NEG_INFINITY;
        }
        // A row among many costs least; a table with steps may make single rows cheaper still.
        let most = self.costs.largest();
        let slope = (self.costs.of(most) - self.costs.of(1)) / (most - 1).max(1) as f64;
        let least = 0.3 * slope * self.plain_rate() / self.honesty();
        (least.clamp(1e-4, 0.5)).ln() as f32
    }

    /// Cuts a draft to the size that makes the most tokens in the time, beside `others` rows of
    /// other sequences.
    pub fn cut(&self, draft: &mut Draft, others: usize) {
        if self.fixed.is_some() {
            return;
        }
        let honesty = self.honesty();
        let chances = draft.log_chances.iter().enumerate().map(|(node, chance)| {
            if node == 0 {
                1.0
            } else {
                (honesty * f64::from(*chance).exp()).min(1.0)
            }
        });
        let (nodes, _) = self.costs.best_size(chances, others, self.draft_ms);
        draft.truncate(nodes);
    }

    /// How many edges come true of each that the drafter expects.
    fn honesty(&self) -> f64 {
        ((self.accepted + FIRST_HONESTY * PRIOR) / (self.expected + PRIOR)).clamp(0.05, 1.3)
    }

    /// Milliseconds that a round takes: a draft made in `draft_ms`, and its pass by the table.
    pub fn round_ms(&self, draft: &Draft, draft_ms: f64) -> f64 {
        self.costs.of(draft.len()) + draft_ms
    }

    /// Takes in a round: the draft, how many of its edges were accepted, and the milliseconds
    /// that it took to make.
    pub fn judged(&mut self, draft: &Draft, accepted: usize, draft_ms: f64) {
        let expected: f64 = draft.log_chances[1..]
            .iter()
            .map(|chance| f64::from(*chance).exp())
            .sum();
        self.expected = MEMORY * self.expected + expected;
        self.accepted = MEMORY * self.accepted + accepted as f64;
        self.reach = (REACH_MEMORY * self.reach).max(accepted as f64);
        self.draft_ms = if self.draft_ms == 0.0 {
            draft_ms
        } else {
            // One stalled draft must not make speculation look dear for a long time.
            let seen = draft_ms.min(4.0 * self.draft_ms + 0.1);
            0.8 * self.draft_ms + 0.2 * seen
        };
        if self.fixed.is_some() {
            return;
        }
        // By the table, not by the clock: what disturbs one pass disturbs plain decoding too.
        let took = self.costs.of(draft.len()) + draft_ms.min(4.0 * self.draft_ms);
        let gained = 1.0 + accepted as f64 - took / self.costs.of(1);
        self.credit = (self.credit + gained).min(MOST_CREDIT);
    }

    /// Takes in that a pass of `rows` rows took `milliseconds`.
    pub fn passed(&mut self, rows: usize, milliseconds: f64) {
        self.costs.observe(rows, milliseconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs() -> RowCosts {
        RowCosts::new(&[(1, 10.0), (16, 20.0)]).unwrap()
    }

    /// A chain of `nodes` nodes, each edge with the chance `edge`.
    fn chain(nodes: usize, edge: f32) -> Draft {
        let mut draft = Draft::root(0);
        for node in 1..nodes {
            draft.push(node - 1, 1, edge.ln());
        }
        draft
    }

    #[test]
    fn likely_drafts_stay_long_and_unlikely_ones_are_cut() {
        let pace = Pace::new(costs(), None);
        let mut sure = chain(16, 0.95);
        pace.cut(&mut sure, 0);
        assert_eq!(sure.len(), 16);
        let mut doubtful = chain(16, 0.4);
        pace.cut(&mut doubtful, 0);
        assert!((2..5).contains(&doubtful.len()), "{}", doubtful.len());
    }

    #[test]
    fn a_fixed_size_is_kept_whatever_happens() {
        let mut pace = Pace::new(costs(), Some(8));
        for _ in 0..50 {
            assert_eq!(pace.nodes(0), 8);
            let mut draft = chain(8, 0.01);
            pace.cut(&mut draft, 0);
            assert_eq!(draft.len(), 8);
            pace.judged(&draft, 0, 100.0);
        }
        assert_eq!(pace.least(), f32::NEG_INFINITY);
    }

    #[test]
    fn a_drafter_that_overrates_itself_gets_smaller_trees_and_costs_little() {
        let mut pace = Pace::new(costs(), None);
        let (mut lost, mut decoded) = (0.0, 0.0);
        let mut sizes = Vec::new();
        while decoded < 1000.0 {
            decoded += 1.0;
            if pace.nodes(0) == 1 {
                continue;
            }
            let mut draft = chain(16, 0.9);
            pace.cut(&mut draft, 0);
            sizes.push(draft.len());
            lost += pace.round_ms(&draft, 2.0) / costs().of(1) - 1.0;
            pace.judged(&draft, 0, 2.0);
        }
        assert!(sizes[0] > 8, "{sizes:?}");
        assert!(
            sizes.iter().rev().take(20).all(|&size| size < 6),
            "{sizes:?}"
        );
        // The first credit, the share of later tokens, and one round beyond.
        assert!(lost < 1.5 + 30.0 + 1.5, "{lost}");
    }

    #[test]
    fn one_that_pays_hardly_rests() {
        let mut pace = Pace::new(costs(), None);
        let mut rested = 0;
        for round in 1..300 {
            if pace.nodes(0) == 1 {
                rested += 1;
                continue;
            }
            let draft = chain(8, 0.7);
            pace.judged(&draft, if round % 3 == 0 { 0 } else { 3 }, 1.0);
        }
        // Only while it has not gained much.
        assert!(rested < 20, "{rested}");
    }

    #[test]
    fn drafts_go_little_deeper_than_they_are_accepted() {
        let mut pace = Pace::new(costs(), None);
        for _ in 0..100 {
            pace.judged(&chain(8, 0.7), 2, 1.0);
        }
        assert_eq!(pace.depth(), 5);
        pace.judged(&chain(16, 0.7), 12, 1.0);
        assert_eq!(pace.depth(), 17);
    }

    #[test]
    fn a_dear_draft_does_not_pay() {
        let mut pace = Pace::new(costs(), None);
        let mut plain = 0;
        for _ in 0..300 {
            if pace.nodes(0) == 1 {
                plain += 1;
            } else {
                pace.judged(&chain(8, 0.7), 2, 40.0);
            }
        }
        assert!(plain > 250, "{plain}");
    }
}
