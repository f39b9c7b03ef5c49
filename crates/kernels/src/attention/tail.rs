//! The slots that rows see beside their prefixes, as blocks of sixteen.

use crate::lanes::LANES;

use super::Visible;

/// The blocks of all tails of a call, each once, in order. Scores of a tail are computed for whole
/// blocks; a slot's score is then found at its column.
pub(super) struct Tail {
    blocks: Vec<u32>,
}

/// Blocks that follow each other in one page.
pub(super) struct Run {
    /// The first block's number.
    pub(super) block: usize,
    /// How many blocks.
    pub(super) blocks: usize,
    /// Column of its first slot.
    pub(super) column: usize,
}

impl Tail {
    pub(super) fn new(visible: &[Visible]) -> Self {
        let mut blocks: Vec<u32> = vec![];
        for seen in visible {
            for slot in seen.tail {
                let block = slot / LANES as u32;
                if blocks.last() != Some(&block) {
                    blocks.push(block);
                }
            }
        }
        blocks.sort_unstable();
        blocks.dedup();
        Self { blocks }
    }

    /// Columns of the scores: sixteen for each block.
    pub(super) fn columns(&self) -> usize {
        self.blocks.len() * LANES
    }

    /// The column of a slot that some row sees.
    pub(super) fn column(&self, slot: u32) -> usize {
        let block = slot / LANES as u32;
        let index = self.blocks.partition_point(|&b| b < block);
        index * LANES + slot as usize % LANES
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = Run> {
        let per_page = (crate::kv_cache::PAGE / LANES) as u32;
        let mut column = 0;
        self.blocks
            .chunk_by(move |a, b| a + 1 == *b && b % per_page != 0)
            .map(move |run| {
                let at = column;
                column += run.len() * LANES;
                Run {
                    block: run[0] as usize,
                    blocks: run.len(),
                    column: at,
                }
            })
    }
}
