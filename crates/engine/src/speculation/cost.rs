//! What a pass of n rows costs on this machine, and how large a tree that makes worth while.

use crate::error::Error;
use crate::target::LanguageModel;
use std::time::{Duration, Instant};

/// Milliseconds of a pass by its number of rows, measured and kept up to date.
#[derive(Clone, Debug)]
pub struct RowCosts {
    /// `milliseconds[n - 1]` is the cost of n rows.
    milliseconds: Vec<f64>,
}

/// Rows that are measured, the most telling first.
const ROWS: [usize; 8] = [1, 8, 16, 4, 32, 2, 5, 24];
/// The largest of them.
const LARGEST: usize = 32;
/// Tokens before them.
const DEPTH: usize = 16;
/// How often a size is measured, at a start that should be quick; its quickest pass counts.
pub(crate) const QUICK: usize = 3;
/// Time after which only what is indispensable is measured.
const BUDGET: Duration = Duration::from_millis(600);

/// How strongly one more observation moves the table.
const WEIGHT: f64 = 0.1;

impl RowCosts {
    /// A table from measured points (rows, milliseconds), straight lines between them.
    ///
    /// Points may come in any order; rows before the first and after the last are taken to cost
    /// what those cost. Returns `None` without a usable point.
    pub fn new(points: &[(usize, f64)]) -> Option<Self> {
        let mut points: Vec<_> = points
            .iter()
            .copied()
            .filter(|&(n, ms)| n > 0 && ms.is_finite() && ms > 0.0)
            .collect();
        points.sort_by_key(|&(n, _)| n);
        points.dedup_by_key(|&mut (n, _)| n);
        // Fewer rows never cost more: where they seemed to, something else held them up.
        for at in (1..points.len()).rev() {
            points[at - 1].1 = points[at - 1].1.min(points[at].1);
        }
        let last = points.last()?.0;
        let milliseconds = (1..=last)
            .map(|n| {
                let above = points.iter().position(|&(at, _)| at >= n).unwrap_or(0);
                let (x1, y1) = points[above];
                let (x0, y0) = points[above.saturating_sub(1)];
                if x1 == x0 {
                    y1
                } else {
                    y0 + (y1 - y0) * (n - x0) as f64 / (x1 - x0) as f64
                }
            })
            .collect();
        Some(Self { milliseconds })
    }

    /// A table that says nothing: all passes of up to 64 rows cost the same.
    pub fn unknown() -> Self {
        Self {
            milliseconds: vec![1.0; 64],
        }
    }

    /// Measures a model on this machine, every size `rounds` times; [`QUICK`] takes less than a
    /// second unless single passes take that long.
    ///
    /// # Errors
    /// If a pass fails.
    pub fn measure<M: LanguageModel>(model: &M, rounds: usize) -> Result<Self, Error> {
        let start = Instant::now();
        let vocab_size = model.vocab_size().max(1);
        let longest = model.max_position().saturating_sub(DEPTH).max(1);
        let tokens: Vec<u32> = (0..DEPTH.max(LARGEST))
            .map(|i| (i * 7919 % vocab_size) as u32)
            .collect();
        let mut base = model.new_state();
        model.advance(&mut base, &tokens[..DEPTH.min(model.max_position())], 1)?;
        let mut points: Vec<(usize, f64)> = Vec::new();
        for round in 0..rounds {
            // The passes of a round follow each other as those of an answer do. The first one is
            // not timed: it takes memory of its own for what it shares with other states.
            let mut state = base.clone();
            let mut held = DEPTH;
            let mut time = |rows: usize| -> Result<f64, Error> {
                if held + rows > model.max_position() {
                    state = base.clone();
                    held = DEPTH;
                }
                held += rows;
                let start = Instant::now();
                model.advance(&mut state, &tokens[..rows], rows)?;
                Ok(start.elapsed().as_secs_f64() * 1e3)
            };
            time(1)?;
            for (place, &rows) in ROWS.iter().filter(|&&rows| rows <= longest).enumerate() {
                // Slow models get the sizes that matter most, once, unless there is time.
                if rounds == QUICK && start.elapsed() > BUDGET && (round > 0 || place > 3) {
                    break;
                }
                let ms = time(rows)?;
                match points.iter_mut().find(|point| point.0 == rows) {
                    Some(point) => point.1 = point.1.min(ms),
                    None => points.push((rows, ms)),
                }
            }
        }
        Self::new(&points).ok_or_else(|| Error::Model("its passes take no time".to_string()))
    }

    /// The whole table: entry n - 1 is the cost of a pass of n rows.
    pub fn milliseconds(&self) -> &[f64] {
        &self.milliseconds
    }

    /// Cost of a pass of `rows` rows, in milliseconds.
    pub fn of(&self, rows: usize) -> f64 {
        self.milliseconds[rows.clamp(1, self.milliseconds.len()) - 1]
    }

    /// Largest number of rows that was measured.
    pub fn largest(&self) -> usize {
        self.milliseconds.len()
    }

    /// Takes in that a pass of `rows` rows took `milliseconds`.
    ///
    /// The whole table moves a little by the same ratio, since what changes while running (clock,
    /// bandwidth taken by others, a longer context) changes every size; the seen size moves more.
    pub fn observe(&mut self, rows: usize, milliseconds: f64) {
        if rows == 0 || rows > self.largest() || !(milliseconds.is_finite() && milliseconds > 0.0) {
            return;
        }
        // One stalled pass must not make speculation look dear for a long time.
        let ratio = (milliseconds / self.of(rows)).clamp(0.5, 2.0);
        for (index, cost) in self.milliseconds.iter_mut().enumerate() {
            let weight = if index + 1 == rows {
                WEIGHT
            } else {
                WEIGHT / 4.0
            };
            *cost *= 1.0 + weight * (ratio - 1.0);
        }
    }

    /// The number of nodes, root included, that makes the most tokens per millisecond, and that
    /// rate: the expected tokens of the first n nodes are the sum of their chances (the root's, 1,
    /// stands for the token that every pass makes), their cost is `overhead` for drafting plus the
    /// pass, which has `others` rows of other sequences, each making a token of its own.
    ///
    /// `chances` are in falling order.
    pub fn best_size(
        &self,
        chances: impl Iterator<Item = f64>,
        others: usize,
        overhead: f64,
    ) -> (usize, f64) {
        let mut best = (1, 0.0);
        let mut expected = others as f64;
        for (index, chance) in chances.take(self.largest()).enumerate() {
            expected += chance;
            let rate = expected / (overhead + self.of(others + index + 1));
            if rate > best.1 {
                best = (index + 1, rate);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_joined_by_lines() {
        let costs = RowCosts::new(&[(4, 16.0), (1, 10.0), (8, 16.0)]).unwrap();
        assert_eq!(costs.of(1), 10.0);
        assert_eq!(costs.of(2), 12.0);
        assert_eq!(costs.of(4), 16.0);
        assert_eq!(costs.of(6), 16.0);
        assert_eq!(costs.of(100), 16.0);
        // A pass that was held up does not count.
        let held = RowCosts::new(&[(1, 10.0), (4, 99.0), (8, 20.0)]).unwrap();
        assert_eq!((held.of(1), held.of(4)), (10.0, 20.0));
        assert!(RowCosts::new(&[]).is_none());
        assert!(RowCosts::new(&[(0, 1.0), (2, f64::NAN)]).is_none());
    }

    #[test]
    fn dear_rows_make_small_trees_and_free_rows_large_ones() {
        let chances = [1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.1];
        let free = RowCosts::new(&[(1, 10.0), (8, 10.0)]).unwrap();
        assert_eq!(free.best_size(chances.into_iter(), 0, 0.0).0, 8);
        let dear = RowCosts::new(&[(1, 10.0), (8, 80.0)]).unwrap();
        assert_eq!(dear.best_size(chances.into_iter(), 0, 0.0).0, 1);
        // A step after four rows: worth going up to it and not past it.
        let step = RowCosts::new(&[(1, 10.0), (4, 11.0), (5, 20.0), (8, 21.0)]).unwrap();
        assert_eq!(step.best_size(chances.into_iter(), 0, 0.0).0, 4);
    }

    #[test]
    fn overhead_is_paid_once_so_it_favours_larger_trees() {
        let chances = [1.0, 0.5, 0.4, 0.3];
        let costs = RowCosts::new(&[(1, 10.0), (4, 25.0)]).unwrap();
        let (without, _) = costs.best_size(chances.into_iter(), 0, 0.0);
        let (with, _) = costs.best_size(chances.into_iter(), 0, 30.0);
        assert!(with > without, "{with} > {without}");
    }

    #[test]
    fn one_stalled_pass_moves_the_table_little() {
        let mut costs = RowCosts::new(&[(1, 10.0), (4, 20.0)]).unwrap();
        costs.observe(1, 1000.0);
        assert!(costs.of(1) <= 11.0 + 1e-9, "{}", costs.of(1));
        for _ in 0..100 {
            costs.observe(1, 30.0);
        }
        assert!(costs.of(1) > 25.0 && costs.of(4) > 25.0);
        costs.observe(0, 1.0);
        costs.observe(3, f64::NAN);
        assert!(costs.of(3).is_finite());
    }
}
