//! The orders in which llama.cpp's converter writes rows, and their inverses.
//!
//! Two families are stored in another order than Hugging Face's:
//! - Llama's q and k rows: within a head, Hugging Face keeps the first halves of all rotated
//!   pairs before the second halves; ggml's rotation for this family wants pairs side by side.
//! - Qwen3.5's value heads, where there are more of them than key heads: Hugging Face groups
//!   them by key head, ggml goes round the key heads so that it can broadcast by repeating.

/// Where the rows (or columns) of a Hugging Face tensor lie in the stored one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// In place.
    Same,
    /// Pairs side by side within heads of this width.
    Pairs { width: usize },
    /// From row `first` on: value heads of `width` rows, `per_key` for each of `key_heads`.
    ValueHeads {
        first: usize,
        key_heads: usize,
        per_key: usize,
        width: usize,
    },
}

impl Order {
    /// The stored place of Hugging Face's row `index`.
    pub fn stored(self, index: usize) -> usize {
        match self {
            Order::Same => index,
            Order::Pairs { width } => {
                let (head, within) = (index / width, index % width);
                let (part, pair) = (within / (width / 2), within % (width / 2));
                head * width + 2 * pair + part
            }
            Order::ValueHeads { first, .. } if index < first => index,
            Order::ValueHeads {
                first,
                key_heads,
                per_key,
                width,
            } => {
                let (head, within) = ((index - first) / width, (index - first) % width);
                let (key, value) = (head / per_key, head % per_key);
                first + (value * key_heads + key) * width + within
            }
        }
    }

    /// Whether the order permutes `count` rows among themselves; anything else is a mistake in
    /// the file's metadata.
    pub fn fits(self, count: usize) -> bool {
        match self {
            Order::Same => true,
            Order::Pairs { width } => width > 0 && width % 2 == 0 && count.is_multiple_of(width),
            Order::ValueHeads {
                first,
                key_heads,
                per_key,
                width,
            } => width > 0 && count == first + key_heads * per_key * width,
        }
    }

    /// The same order of runs of `run` rows, if it never splits one.
    pub fn of_runs(self, run: usize) -> Option<Order> {
        match self {
            Order::Same => Some(Order::Same),
            Order::ValueHeads {
                first,
                key_heads,
                per_key,
                width,
            } if first % run == 0 && width % run == 0 => {
                let (first, width) = (first / run, width / run);
                Some(Order::ValueHeads {
                    first,
                    key_heads,
                    per_key,
                    width,
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Order;

    fn all(order: Order, count: usize) -> Vec<usize> {
        (0..count).map(|index| order.stored(index)).collect()
    }

    #[test]
    fn pairs_within_two_heads_of_six() {
        // The converter reshapes a head to [2, 3], swaps the axes: it stores 0 3 1 4 2 5.
        let order = Order::Pairs { width: 6 };
        assert_eq!(all(order, 12), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert!(order.fits(12) && !order.fits(9));
        assert!(!Order::Pairs { width: 3 }.fits(12));
    }

    #[test]
    fn value_heads_behind_queries_and_keys() {
        // Key heads A and B with value heads A0 A1 A2 B0 B1 B2 are stored A0 B0 A1 B1 A2 B2.
        let order = Order::ValueHeads {
            first: 2,
            key_heads: 2,
            per_key: 3,
            width: 1,
        };
        assert_eq!(all(order, 8), [0, 1, 2, 4, 6, 3, 5, 7]);
        assert!(order.fits(8) && !order.fits(9));
        let wide = Order::ValueHeads {
            first: 0,
            key_heads: 2,
            per_key: 2,
            width: 2,
        };
        assert_eq!(all(wide, 8), [0, 1, 4, 5, 2, 3, 6, 7]);
    }

    #[test]
    fn runs_move_whole() {
        let wide = Order::ValueHeads {
            first: 0,
            key_heads: 2,
            per_key: 2,
            width: 64,
        };
        let runs = wide.of_runs(32).unwrap();
        for index in 0..256 {
            assert_eq!(
                wide.stored(index),
                runs.stored(index / 32) * 32 + index % 32
            );
        }
        assert_eq!(
            Order::ValueHeads {
                first: 0,
                key_heads: 2,
                per_key: 2,
                width: 16
            }
            .of_runs(32),
            None
        );
    }
}
