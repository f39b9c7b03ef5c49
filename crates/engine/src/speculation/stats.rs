//! What drafts did for an answer.

use super::draft::Draft;
use serde::Serialize;

/// Figures of speculation over one answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SpeculationStats {
    /// Passes that verified a draft; the others read one token.
    pub rounds: usize,
    /// Nodes of a tree, the root included, on average.
    pub mean_tree_size: f64,
    /// Edges from the root to the deepest node, on average.
    pub mean_tree_depth: f64,
    /// Drafted tokens accepted, on average.
    pub mean_accepted: f64,
    /// For every depth from 1: of the drafts that went so deep, the share accepted so deep.
    pub acceptance_by_depth: Vec<f64>,
    /// Seconds spent on drafts.
    pub draft_s: f64,
    /// Seconds spent in passes of the target.
    pub verify_s: f64,
    /// Seconds spent on taking the accepted path into the state.
    pub commit_s: f64,
    /// Seconds spent on drawing tokens of drafts and making text of them.
    pub sample_s: f64,
}

/// What is counted on the way.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpeculationCounts {
    rounds: usize,
    nodes: usize,
    depths: usize,
    accepted: usize,
    /// By depth - 1: drafts that went so deep, and those accepted so deep.
    by_depth: Vec<(usize, usize)>,
    pub(crate) draft_s: f64,
    pub(crate) verify_s: f64,
    pub(crate) commit_s: f64,
    pub(crate) sample_s: f64,
}

impl SpeculationCounts {
    /// A draft was verified and `path` of it accepted.
    pub(crate) fn round(&mut self, draft: &Draft, path: &[usize]) {
        let deepest = draft.tree.depths().iter().max().map_or(0, |&d| d as usize);
        let accepted = path.len() - 1;
        self.rounds += 1;
        self.nodes += draft.len();
        self.depths += deepest;
        self.accepted += accepted;
        if self.by_depth.len() < deepest {
            self.by_depth.resize(deepest, (0, 0));
        }
        for (depth, (went, taken)) in self.by_depth[..deepest].iter_mut().enumerate() {
            *went += 1;
            *taken += usize::from(depth < accepted);
        }
    }

    pub(crate) fn stats(&self, passes: usize) -> Option<SpeculationStats> {
        // A drafter at rest all the time is worth telling too, if it cost anything.
        if passes == 0 || (self.rounds == 0 && self.draft_s == 0.0) {
            return None;
        }
        let mean = |sum: usize| sum as f64 / self.rounds.max(1) as f64;
        Some(SpeculationStats {
            rounds: self.rounds,
            mean_tree_size: mean(self.nodes),
            mean_tree_depth: mean(self.depths),
            mean_accepted: mean(self.accepted),
            acceptance_by_depth: self
                .by_depth
                .iter()
                .map(|&(went, taken)| taken as f64 / went as f64)
                .collect(),
            draft_s: self.draft_s,
            verify_s: self.verify_s,
            commit_s: self.commit_s,
            sample_s: self.sample_s,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acceptance_counts_only_drafts_that_went_so_deep() {
        let mut deep = Draft::root(0);
        deep.push(0, 1, -0.1);
        deep.push(1, 2, -0.1);
        let mut flat = Draft::root(0);
        flat.push(0, 1, -0.1);
        flat.push(0, 2, -0.2);
        flat.push(0, 3, -0.3);
        let mut counts = SpeculationCounts::default();
        assert_eq!(counts.stats(3), None);
        counts.round(&deep, &[0, 1, 2]);
        counts.round(&flat, &[0]);
        counts.round(&flat, &[0, 2]);
        let stats = counts.stats(3).unwrap();
        assert_eq!(stats.rounds, 3);
        assert_eq!(stats.acceptance_by_depth, [2.0 / 3.0, 1.0]);
        assert_eq!(stats.mean_tree_size, 11.0 / 3.0);
        assert_eq!(stats.mean_tree_depth, 4.0 / 3.0);
        assert_eq!(stats.mean_accepted, 1.0);
    }
}
