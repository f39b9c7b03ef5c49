//! When speculation pays, and how large a tree: decided anew for every pass, from what rows cost
//! on this machine and from how earlier drafts of this answer fared.

use super::cost::RowCosts;
use super::draft::Draft;

/// Weight of what lies one round further back.
const MEMORY: f64 = 0.93;
/// Edges that the first estimate of the drafter's honesty counts for, and that estimate.
const PRIOR: f64 = 3.0;
const FIRST_HONESTY: f64 = 0.8;
/// Passes of plain decoding after speculation was found not to pay, at first and at most.
const FIRST_REST: u32 = 24;
const LONGEST_REST: u32 = 384;
/// Depth that a draft is first taken to reach, and how fast the memory of one goes.
const FIRST_REACH: f64 = 8.0;
const REACH_MEMORY: f64 = 0.92;
/// Rounds before a judgement, and before one that is plain.
const TRIAL: u32 = 3;
const SHORT_TRIAL: u32 = 2;
const PLAINLY: f64 = 0.8;

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
    /// Tokens and milliseconds of rounds with a draft; older ones weigh less.
    tokens: f64,
    milliseconds: f64,
    rounds: u32,
    rest: u32,
    next_rest: u32,
    /// Depth that drafts were lately accepted to, at most.
    reach: f64,
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
            tokens: 0.0,
            milliseconds: 0.0,
            rounds: 0,
            rest: 0,
            next_rest: FIRST_REST,
            reach: FIRST_REACH,
        }
    }

    /// Most nodes of the next tree, the root included, beside `others` rows of other sequences;
    /// 1 while speculation rests.
    pub fn nodes(&mut self, others: usize) -> usize {
        if let Some(nodes) = self.fixed {
            return nodes.max(1);
        }
        if self.rest > 0 {
            self.rest -= 1;
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
        self.draft_ms = if self.rounds == 0 && self.draft_ms == 0.0 {
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
        let took = self.costs.of(draft.len()) + self.draft_ms;
        self.tokens = MEMORY * self.tokens + 1.0 + accepted as f64;
        self.milliseconds = MEMORY * self.milliseconds + took;
        self.rounds += 1;
        let needed = match self.rounds {
            0..SHORT_TRIAL => return,
            SHORT_TRIAL..TRIAL => PLAINLY * self.plain_rate(),
            TRIAL.. => self.plain_rate(),
        };
        if self.tokens / self.milliseconds < needed {
            self.rest = self.next_rest;
            self.next_rest = (2 * self.next_rest).min(LONGEST_REST);
            // What was seen counts on, but less, so that one good round can turn it.
            self.rounds = TRIAL - 1;
            self.tokens *= 0.3;
            self.milliseconds *= 0.3;
        } else if self.rounds > 4 * TRIAL {
            self.next_rest = FIRST_REST;
        }
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
    fn a_drafter_that_overrates_itself_gets_smaller_trees_and_then_a_rest() {
        let mut pace = Pace::new(costs(), None);
        let mut rested = 0;
        let mut sizes = Vec::new();
        for _ in 0..1000 {
            if pace.nodes(0) == 1 {
                rested += 1;
                continue;
            }
            let mut draft = chain(16, 0.9);
            pace.cut(&mut draft, 0);
            sizes.push(draft.len());
            pace.judged(&draft, 0, 2.0);
        }
        assert!(sizes[0] > 8, "{sizes:?}");
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
        assert!(*sizes.last().unwrap() < sizes[0] - 3, "{sizes:?}");
        assert!(rested > 960, "{rested}");
    }

    #[test]
    fn one_that_pays_never_rests() {
        let mut pace = Pace::new(costs(), None);
        for round in 0..300 {
            assert!(pace.nodes(0) > 1);
            let draft = chain(8, 0.7);
            pace.judged(&draft, if round % 3 == 0 { 0 } else { 3 }, 1.0);
        }
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
