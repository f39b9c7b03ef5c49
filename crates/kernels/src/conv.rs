//! Causal depthwise convolution followed by SiLU, along a chain or every path of a tree.

use crate::cpu::Cpu;
use crate::lanes::{Kernel, LANES, Simd, dispatch};
use crate::rows::{Heads, Shared, for_rows};

/// Channels of a task.
const PART: usize = 1024;

/// Weights of a depthwise convolution.
pub struct Conv {
    channels: usize,
    taps: usize,
    /// [tap][channel], the oldest input's tap first.
    weights: Vec<f32>,
}

/// The last `taps - 1` inputs of a sequence, oldest first; zeros before its start.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvState {
    channels: usize,
    window: Vec<f32>,
}

impl Conv {
    /// `weights` is [channel][tap] as checkpoints store it, the newest input's tap last.
    ///
    /// # Panics
    /// If `weights` is not `channels * taps` long or there is no tap.
    pub fn new(weights: &[f32], channels: usize, taps: usize) -> Self {
        assert!(taps > 0 && weights.len() == channels * taps, "conv weights");
        let mut transposed = vec![0.0; weights.len()];
        for (channel, taps) in weights.chunks_exact(taps).enumerate() {
            for (tap, weight) in taps.iter().enumerate() {
                transposed[tap * channels + channel] = *weight;
            }
        }
        Self {
            channels,
            taps,
            weights: transposed,
        }
    }

    /// Channels of a row.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The window before the first token of a sequence.
    pub fn state(&self) -> ConvState {
        ConvState {
            channels: self.channels,
            window: vec![0.0; (self.taps - 1) * self.channels],
        }
    }

    /// Row i of `out` is `silu` of the convolution over row i, its nearest ancestors and, above a
    /// root, the saved window. The state is not changed.
    ///
    /// `x` holds m rows of inputs where `at` says (one "head" of `channels` values); `parents[i]`
    /// is the row before row i in its sequence, below i, or -1; `out` is m rows of `channels`, and so
    /// is `kept`, which receives the inputs.
    ///
    /// # Panics
    /// If the lengths do not fit or a parent does not come before its child.
    #[expect(clippy::too_many_arguments, reason = "two inputs and two outputs")]
    pub fn silu(
        &self,
        cpu: &Cpu,
        state: &ConvState,
        x: &[f32],
        at: Heads,
        parents: &[i32],
        out: &mut [f32],
        kept: Option<&mut [f32]>,
    ) {
        let (channels, taps) = (self.channels, self.taps);
        let rows = at.rows(x.len());
        assert_eq!((at.count, at.dim), (1, channels), "channels of the input");
        assert_eq!(state.window.len(), (taps - 1) * channels, "state");
        assert_eq!(rows, parents.len(), "one parent for each row");
        assert_eq!(out.len(), rows * channels, "output");
        check_parents(parents);
        if let Some(kept) = &kept {
            assert_eq!(kept.len(), rows * channels, "kept inputs");
        }
        let (out, kept) = (Shared::new(out), kept.map(Shared::new));
        // Tasks are rows by parts of the channels, so that one row keeps several threads busy.
        let parts = channels.div_ceil(PART);
        for_rows(cpu, rows * parts, (taps + 12) * PART, &|range| {
            let mut inputs = Vec::with_capacity(taps);
            for task in range {
                let (row, first) = (task / parts, task % parts * PART);
                let part = first..channels.min(first + PART);
                inputs.clear();
                let mut node = row as i32;
                let mut saved = taps - 1;
                for _ in 0..taps {
                    if node >= 0 {
                        inputs.push(&x[at.range(node as usize, 0)][part.clone()]);
                        node = parents[node as usize];
                    } else {
                        saved -= 1;
                        inputs.push(&state.window[saved * channels..][part.clone()]);
                    }
                }
                inputs.reverse();
                let at = row * channels + part.start..row * channels + part.end;
                // SAFETY: rows and parts are disjoint.
                let out = unsafe { out.part(at.clone()) };
                if let (Some(kept), Some(input)) = (&kept, inputs.last()) {
                    // SAFETY: as above.
                    unsafe { kept.part(at) }.copy_from_slice(input);
                }
                let row = ConvRow {
                    weights: &self.weights[first..],
                    weights_row: channels,
                    inputs: &inputs,
                    out,
                };
                dispatch(cpu.isa(), row);
            }
        });
    }
}

impl ConvState {
    /// Moves the window along `path`, rows of `x` in the order of the sequence.
    ///
    /// # Panics
    /// If `x` does not hold the rows of `path` where `at` says.
    pub fn advance(&mut self, x: &[f32], at: Heads, path: &[usize]) {
        assert_eq!((at.count, at.dim), (1, self.channels), "channels");
        if self.window.is_empty() {
            return;
        }
        let saved = self.window.len() / self.channels;
        let skip = path.len().saturating_sub(saved);
        let new = &path[skip..];
        self.window.copy_within(new.len() * self.channels.., 0);
        let first = (saved - new.len()) * self.channels;
        for (to, &row) in self.window[first..]
            .chunks_exact_mut(self.channels)
            .zip(new)
        {
            to.copy_from_slice(&x[at.range(row, 0)]);
        }
    }

    /// Forgets the sequence.
    pub fn clear(&mut self) {
        self.window.fill(0.0);
    }

    /// The saved inputs, oldest row first.
    pub fn window(&self) -> &[f32] {
        &self.window
    }

    pub(crate) fn window_mut(&mut self) -> &mut [f32] {
        &mut self.window
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        size_of_val(self.window.as_slice())
    }
}

/// Panics unless every parent is -1 or comes before its child.
pub(crate) fn check_parents(parents: &[i32]) {
    for (i, &parent) in parents.iter().enumerate() {
        assert!(
            parent >= -1 && parent < i as i32,
            "parent {parent} of row {i}: a parent comes before its child"
        );
    }
}

/// One row: multiply by the oldest tap, then fused multiply-adds up to the newest, then SiLU.
struct ConvRow<'a> {
    /// Rows of taps, one every `weights_row` values.
    weights: &'a [f32],
    weights_row: usize,
    inputs: &'a [&'a [f32]],
    out: &'a mut [f32],
}

impl Kernel for ConvRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        match self.inputs.len() {
            4 => self.taps::<S, 4>(s),
            _ => self.any_taps(s, 0),
        }
    }
}

impl ConvRow<'_> {
    /// A known number of taps, which keeps all pointers in registers.
    #[inline(always)]
    fn taps<S: Simd, const T: usize>(&mut self, s: S) {
        let channels = self.out.len();
        let blocks = channels / LANES;
        let mut weights = [&[][..]; T];
        let mut inputs = [&[][..]; T];
        for tap in 0..T {
            let weight = &self.weights[tap * self.weights_row..][..channels];
            weights[tap] = &weight.as_chunks::<LANES>().0[..blocks];
            inputs[tap] = &self.inputs[tap].as_chunks::<LANES>().0[..blocks];
        }
        let out = &mut self.out.as_chunks_mut::<LANES>().0[..blocks];
        for block in 0..blocks {
            let mut sum = s.mul(s.load(&weights[0][block]), s.load(&inputs[0][block]));
            for tap in 1..T {
                let (weight, input) = (&weights[tap][block], &inputs[tap][block]);
                sum = s.mul_add(s.load(weight), s.load(input), sum);
            }
            s.store(s.silu(sum), &mut out[block]);
        }
        self.any_taps(s, blocks * LANES);
    }

    /// Any number of taps, from some channel on.
    #[inline(always)]
    fn any_taps<S: Simd>(&mut self, s: S, first: usize) {
        for (block, out) in self.out[first..].chunks_mut(LANES).enumerate() {
            let from = first + block * LANES;
            let to = from + out.len();
            let mut sum = s.mul(
                s.load_slice(&self.weights[from..to]),
                s.load_slice(&self.inputs[0][from..to]),
            );
            for (tap, input) in self.inputs.iter().enumerate().skip(1) {
                let weight = &self.weights[tap * self.weights_row..][from..to];
                sum = s.mul_add(s.load_slice(weight), s.load_slice(&input[from..to]), sum);
            }
            s.store_slice(s.silu(sum), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, cpus, heads_in, path, tree, values};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_tree_is_its_paths(
            m in 1usize..24, channels in prop_oneof![4 => 1usize..70, 1 => 1000usize..1100], taps in 1usize..6, spread in 0usize..4, seed: u64,
        ) {
            let at = heads_in(seed, 1, channels);
            let weights = values(seed ^ 1, channels * taps, 1.0);
            let x = values(seed, m * at.row, 2.0);
            let parents = tree(seed, m, spread);
            let conv = Conv::new(&weights, channels, taps);
            let mut state = conv.state();
            let before = values(seed ^ 2, taps * channels, 2.0);
            let all: Vec<usize> = (0..taps).collect();
            state.advance(&before, Heads::packed(1, channels), &all);
            let kept = state.clone();
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                let mut out = vec![0.0; m * channels];
                let mut inputs = vec![0.0; m * channels];
                conv.silu(&cpu, &state, &x, at, &parents, &mut out, Some(&mut inputs));
                prop_assert_eq!(&kept, &state);
                let rows: Vec<f32> = (0..m).flat_map(|row| x[at.range(row, 0)].to_vec()).collect();
                prop_assert_eq!(&inputs, &rows);
                for row in 0..m {
                    // The definition, in f64, over the whole sequence.
                    let mut sequence: Vec<&[f32]> = before.chunks(channels).collect();
                    let path = path(&parents, row);
                    sequence.extend(path.iter().map(|&r| &x[at.range(r, 0)]));
                    let expected: Vec<f64> = (0..channels).map(|c| {
                        let sum: f64 = (0..taps)
                            .map(|t| sequence[sequence.len() - taps + t][c] as f64 * weights[c * taps + t] as f64)
                            .sum();
                        sum / (1.0 + (-sum).exp())
                    }).collect();
                    let out = &out[row * channels..][..channels];
                    assert_close(out, &expected, 1e-5);
                    // Committing all but the last node of the path and then running that node
                    // alone gives the same bits.
                    let mut moved = state.clone();
                    moved.advance(&x, at, &path[..path.len() - 1]);
                    let mut alone = vec![0.0; channels];
                    let last = &x[row * at.row..][..at.row];
                    conv.silu(&cpu, &moved, last, at, &[-1], &mut alone, None);
                    prop_assert_eq!(&alone, out);
                }
                prop_assert_eq!(first.get_or_insert_with(|| out.clone()), &out);
            }
        }
    }
}
