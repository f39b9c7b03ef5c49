//! What states hold in memory, and states as bytes.
//!
//! ```text
//! magic, version of the form     8 bytes
//! tokens read                    u64
//! for every layer: its kind (1 attention, 2 Gated DeltaNet, 3 attention within a window), three or
//! four sizes, all u32, and
//!     attention: the pages of keys and values that hold the tokens, but for those behind the window
//!     Gated DeltaNet: the window of the convolution, the matrices
//! ```
//!
//! All numbers are little-endian.

use std::io::{self, Write};

use kozue_kernels::{KvCache, KvType, Page};

use crate::delta::DeltaReplay;
use crate::state::LayerState;
use crate::{Error, Model, State};

/// Starts the bytes of a state; the last two count the changes of their form.
const MAGIC: [u8; 8] = *b"kzstat01";

/// Memory that a state holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes that no other state shares.
    pub own: usize,
    /// Pages that clones and snapshots may share.
    pub pages: Vec<Page>,
}

impl Footprint {
    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        self.own + self.pages.iter().map(|page| page.bytes).sum::<usize>()
    }

    /// With what another holds.
    pub fn and(mut self, other: Footprint) -> Footprint {
        self.own += other.own;
        self.pages.extend(other.pages);
        self
    }
}

/// The kind of a layer and its sizes.
fn head(layer: &LayerState) -> Vec<u32> {
    let size = |size: usize| size as u32;
    match layer {
        LayerState::Attention(cache) => {
            let kind = match cache.kind() {
                KvType::F32 => 4,
                KvType::F16 => 2,
                KvType::Int8 => 1,
            };
            let mut head = vec![1, size(cache.kv_heads()), size(cache.head_dim()), kind];
            if let Some(window) = cache.window() {
                head[0] = 3;
                head.push(size(window));
            }
            head
        }
        LayerState::Delta { window, memory, .. } => {
            let shape = memory.shape();
            let window = size(window.window().len());
            let matrices = [shape.value_heads, shape.key_dim, shape.value_dim].map(size);
            [2, window].into_iter().chain(matrices).collect()
        }
    }
}

impl State {
    /// Writes the state, for [`Model::read_state`]. A tree that waits for its commit is left out.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write_to(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&MAGIC)?;
        to.write_all(&(self.len as u64).to_le_bytes())?;
        for layer in &self.layers {
            for number in head(layer) {
                to.write_all(&number.to_le_bytes())?;
            }
            match layer {
                LayerState::Attention(cache) => cache.write_to(self.len, to)?,
                LayerState::Delta { window, memory, .. } => {
                    window.write_to(to)?;
                    memory.write_to(to)?;
                }
            }
        }
        Ok(())
    }
}

impl Model {
    /// The state that [`State::write_to`] wrote.
    ///
    /// Whether a model with these very weights made it is for the caller to know.
    ///
    /// # Errors
    /// If the bytes are no state, or one of a model of another shape, or too few or too many.
    pub fn read_state(&self, mut bytes: &[u8]) -> Result<State, Error> {
        let bytes = &mut bytes;
        if take::<8>(bytes)? != MAGIC {
            return Err(Error::Stored("they are none, or of another version"));
        }
        let len = u64::from_le_bytes(take(bytes)?);
        let len = usize::try_from(len)
            .ok()
            .filter(|&len| len <= self.config().max_position)
            .ok_or(Error::Stored("there are more tokens than the model holds"))?;
        let mut state = self.new_state();
        for layer in &mut state.layers {
            for number in head(layer) {
                if take(bytes)? != number.to_le_bytes() {
                    return Err(Error::Stored("they are of a model of another shape"));
                }
            }
            match layer {
                LayerState::Attention(cache) => {
                    *cache = KvCache::read_from(cache, len, bytes).ok_or(CUT)?;
                }
                LayerState::Delta {
                    window,
                    memory,
                    replay,
                } => {
                    window.read_from(bytes).ok_or(CUT)?;
                    memory.read_from(bytes).ok_or(CUT)?;
                    *replay = DeltaReplay::default();
                }
            }
        }
        if !bytes.is_empty() {
            return Err(Error::Stored("there are too many"));
        }
        state.len = len;
        Ok(state)
    }
}

const CUT: Error = Error::Stored("there are too few");

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], Error> {
    let (taken, rest) = bytes.split_first_chunk().ok_or(CUT)?;
    *bytes = rest;
    Ok(*taken)
}
