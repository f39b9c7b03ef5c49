//! What one sequence remembers between passes.

use kozue_kernels::{ConvState, Cpu, DeltaState, KvCache};

use crate::delta::DeltaReplay;
use crate::stored::Footprint;
use crate::{Error, Tree};

/// The memory of one sequence: KV caches of the attention layers, recurrent states and
/// convolution windows of the Gated DeltaNet layers.
#[derive(Clone)]
pub struct State {
    pub(crate) len: usize,
    pub(crate) layers: Vec<LayerState>,
    /// A verified tree that waits for its commit. Attention keeps the nodes' keys and values in the
    /// slots past the end of its cache; Gated DeltaNet keeps what it needs to replay the recurrence.
    pub(crate) pending: Option<Tree>,
}

/// The memory of one layer.
#[derive(Clone)]
pub(crate) enum LayerState {
    Attention(KvCache),
    Delta {
        window: ConvState,
        memory: DeltaState,
        replay: DeltaReplay,
    },
}

impl State {
    pub(crate) fn new(layers: Vec<LayerState>) -> Self {
        Self {
            len: 0,
            layers,
            pending: None,
        }
    }

    /// Number of tokens that the sequence holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token has been read yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What it holds: pages of keys and values that clones share, recurrent states of its own.
    pub fn footprint(&self) -> Footprint {
        let mut footprint = Footprint::default();
        for layer in &self.layers {
            match layer {
                LayerState::Attention(cache) => footprint.pages.extend(cache.held()),
                LayerState::Delta { window, memory, .. } => {
                    footprint.own += window.bytes() + memory.bytes();
                }
            }
        }
        footprint
    }

    /// The state after `rows` tokens of a chain that has just been read: `memories` are its
    /// recurrent layers as they were then. Keys and values past its length are not its own and
    /// are written over when it goes on.
    pub(crate) fn snapshot(&self, rows: usize, memories: Vec<(ConvState, DeltaState)>) -> State {
        let mut memories = memories.into_iter();
        let layers = self.layers.iter().map(|layer| match layer {
            LayerState::Attention(cache) => {
                let mut cache = cache.clone();
                cache.truncate(self.len + rows);
                cache.forget(self.len + rows);
                LayerState::Attention(cache)
            }
            LayerState::Delta { .. } => {
                let (window, memory) = memories.next().expect("one for each layer");
                LayerState::Delta {
                    window,
                    memory,
                    replay: DeltaReplay::default(),
                }
            }
        });
        State {
            len: self.len + rows,
            layers: layers.collect(),
            pending: None,
        }
    }

    /// Advances the state along `path`, nodes of the tree verified last, root first.
    ///
    /// The result has the same bits as reading those tokens one by one. An empty path drops the
    /// tree and leaves the state as it was.
    ///
    /// # Errors
    /// If no tree waits, or `path` is not a path of it from its root; the state is unchanged.
    pub fn commit(&mut self, cpu: &Cpu, path: &[usize]) -> Result<(), Error> {
        let tree = self
            .pending
            .as_ref()
            .ok_or_else(|| Error::Tree("no tree waits for a commit".into()))?;
        tree.check_path(path)?;
        self.pending = None;
        for layer in &mut self.layers {
            match layer {
                LayerState::Attention(cache) => {
                    for (depth, &node) in path.iter().enumerate() {
                        // Parents come first, so node >= depth and nothing still needed is lost.
                        cache.copy_slot(self.len + node, self.len + depth);
                    }
                }
                LayerState::Delta {
                    window,
                    memory,
                    replay,
                } => {
                    if !path.is_empty() {
                        replay.run(cpu, window, memory, path);
                    }
                    replay.end();
                }
            }
        }
        self.grow(path.len());
        Ok(())
    }

    /// Takes in `rows` more tokens, which all layers have read, and lets go what no later one sees.
    pub(crate) fn grow(&mut self, rows: usize) {
        self.len += rows;
        for layer in &mut self.layers {
            if let LayerState::Attention(cache) = layer {
                cache.forget(self.len);
            }
        }
    }
}
