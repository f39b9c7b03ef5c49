//! A text's way through a model whose layers are there one at a time.

use std::io::{self, Write};

use kozue_checkpoint::Tensors;
use kozue_checkpoint::description::ModelConfig;
use kozue_kernels::{Cpu, KvType, read_floats, rms_norm, write_floats};

use crate::delta::Kept;
use crate::layer::{Layer, LayerRows, Ropes, norm_weight};
use crate::model::{scale_embedding, spans};
use crate::pass::{Rows, Segment};
use crate::{Error, State};

/// Rows that a layer takes together; bits do not depend on it, memory does.
const ROWS: usize = 512;
/// How the windows' keys and values are kept meanwhile.
const KV: KvType = KvType::F16;

/// A layer without the others.
pub struct SingleLayer(Layer);

/// The residual stream of some windows of text between two layers. Each window starts from an empty
/// context.
pub struct Walk {
    config: ModelConfig,
    ropes: Ropes,
    windows: Vec<Vec<u32>>,
    /// Windows' rows one after the other, hidden size values each.
    stream: Vec<f32>,
}

impl Walk {
    /// Before the first layer: `embed` writes a token's embedding.
    ///
    /// # Errors
    /// If a window is longer than the model's context, and those of `embed`.
    pub fn new(
        config: &ModelConfig,
        windows: Vec<Vec<u32>>,
        mut embed: impl FnMut(u32, &mut [f32]) -> Result<(), kozue_checkpoint::Error>,
    ) -> Result<Walk, Error> {
        let longest = config.max_position;
        if let Some(long) = windows.iter().find(|window| window.len() > longest) {
            return Err(Error::TooLong {
                needed: long.len(),
                longest,
            });
        }
        let rows = windows.iter().map(Vec::len).sum::<usize>();
        let mut stream = vec![0.0; rows * config.hidden_size];
        let tokens = windows.iter().flatten();
        for (&token, row) in tokens.zip(stream.chunks_exact_mut(config.hidden_size)) {
            embed(token, row)?;
            scale_embedding(config, row);
        }
        Ok(Walk {
            ropes: Ropes::new(config),
            config: config.clone(),
            windows,
            stream,
        })
    }

    /// Writes the stream where it is, for [`Walk::read_from`].
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write_to(&self, to: &mut dyn Write) -> io::Result<()> {
        write_floats(&self.stream, to)
    }

    /// Goes to where [`Walk::write_to`] was called with the same windows; `None`, and nothing happens,
    /// if the bytes are too few or too many for them.
    pub fn read_from(&mut self, mut bytes: &[u8]) -> Option<()> {
        (bytes.len() == size_of_val(&self.stream[..])).then_some(())?;
        read_floats(&mut bytes, &mut self.stream)
    }

    /// Layer `index` with its weights from `tensors`.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen.
    pub fn load(&self, tensors: &impl Tensors, index: usize) -> Result<SingleLayer, Error> {
        let mixer = self.config.layers[index];
        Layer::load(tensors, &self.config, index, mixer, &self.ropes).map(SingleLayer)
    }

    /// Takes all windows through a layer, unless `on`, which is asked now and then, fails.
    ///
    /// # Errors
    /// Those of `on`.
    pub fn step<E>(
        &mut self,
        cpu: &Cpu,
        layer: &SingleLayer,
        on: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let hidden = self.config.hidden_size;
        let mut stream = &mut self.stream[..];
        for windows in batches(&self.windows) {
            let rows = windows.iter().map(Vec::len).sum::<usize>();
            let (x, rest) = stream.split_at_mut(rows * hidden);
            on()?;
            through(cpu, &layer.0, self.config.norm_eps, windows, x);
            stream = rest;
        }
        Ok(())
    }

    /// Lets a layer see all windows, which stay where they are: for whoever watches its inputs. `on`
    /// is that of [`Walk::step`].
    ///
    /// # Errors
    /// Those of `on`.
    pub fn show<E>(
        &self,
        cpu: &Cpu,
        layer: &SingleLayer,
        on: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let hidden = self.config.hidden_size;
        let mut stream = &self.stream[..];
        for windows in batches(&self.windows) {
            let rows = windows.iter().map(Vec::len).sum::<usize>();
            let (x, rest) = stream.split_at(rows * hidden);
            let mut x = x.to_vec();
            on()?;
            through(cpu, &layer.0, self.config.norm_eps, windows, &mut x);
            stream = rest;
        }
        Ok(())
    }

    /// The rows after the output norm, as the head takes them.
    ///
    /// # Errors
    /// If the norm is missing or misshapen.
    pub fn finish(self, cpu: &Cpu, tensors: &impl Tensors) -> Result<Vec<f32>, Error> {
        let hidden = self.config.hidden_size;
        let norm = norm_weight(tensors, &self.config, "model.norm", hidden)?;
        let mut normed = vec![0.0; self.stream.len()];
        rms_norm(cpu, &self.stream, &norm, self.config.norm_eps, &mut normed);
        Ok(normed)
    }
}

/// Windows that a layer takes together.
fn batches(windows: &[Vec<u32>]) -> impl Iterator<Item = &[Vec<u32>]> {
    let mut left = windows;
    std::iter::from_fn(move || {
        let mut rows = 0;
        let count = left.iter().take_while(|window| {
            rows += window.len();
            rows <= ROWS
        });
        let count = count.count().max(1).min(left.len());
        let (batch, rest) = left.split_at(count);
        left = rest;
        (!batch.is_empty()).then_some(batch)
    })
}

fn through(cpu: &Cpu, layer: &Layer, eps: f32, windows: &[Vec<u32>], x: &mut [f32]) {
    let state = |_: &Vec<u32>| State::new(vec![layer.new_state(KV)]);
    let mut states: Vec<State> = windows.iter().map(state).collect();
    let mut segments: Vec<Segment<'_>> = states
        .iter_mut()
        .zip(windows)
        .map(|(state, window)| Segment {
            state,
            rows: Rows::Chain(window),
            logit_rows: 0,
            snapshots: &[],
        })
        .collect();
    let spans = spans(&segments);
    let mut kept: Vec<Kept> = windows.iter().map(|_| Kept::new(&[])).collect();
    let mut normed = cpu.scratch(x.len());
    rms_norm(cpu, x, layer.input_norm(), eps, &mut normed);
    let mut rows = LayerRows {
        place: 0,
        x,
        normed: &mut normed,
        segments: &mut segments,
        spans: &spans,
        kept: &mut kept,
    };
    layer.forward(cpu, eps, &mut rows, None);
}
