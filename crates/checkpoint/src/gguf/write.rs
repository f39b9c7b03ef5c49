//! Writing GGUF files as llama.cpp's converter does: its names, its order of rows, its metadata.
//!
//! Matrices are floats or Q8_0 (blocks of 32 codes of 8 bits with a scale in f16); norms, biases, decays
//! and convolutions are F32, as llama.cpp wants them.

mod sentencepiece;
mod settings;
mod values;
mod vocabulary;

use std::collections::HashMap;
use std::path::Path;

use half::f16;
use kozue_kernels::QuantError;

use super::format::Format;
use super::names::{Place, Values, places};
use crate::Checkpoint;
use crate::description::RopeScaling;
use crate::error::Error;
use crate::export::Floats;
use crate::layout::{Role, Slot, is_router};
use crate::quantize::input::Input;
use crate::quantize::{Report, Run, TensorReport, unfit};
use crate::safetensors::Dtype;
use crate::writer::Writer;

use values::Values as Metadata;

/// Every tensor's data begin at a multiple of this.
const ALIGNMENT: u64 = 32;
/// Values of a block of Q8_0.
const BLOCK: usize = 32;
/// Rows that are read at a time where their order changes.
const ROWS: usize = 64;

/// See [`crate::export::Plan`].
pub(crate) struct Plan {
    metadata: Metadata,
    /// What the tokenizer's name changes.
    note: Option<String>,
    tensors: Vec<Tensor>,
    weights: u64,
}

struct Tensor {
    stored: String,
    /// Outputs first, as the file has it.
    shape: Vec<usize>,
    format: Format,
    content: Content,
}

enum Content {
    /// Tensors of the model, one below the other: one, or that of every expert of a layer.
    Of(Vec<Part>),
    /// Divisors of the rotary frequencies.
    Factors(Vec<f32>),
}

/// A tensor of the model and how it was stored.
struct Part {
    place: Place,
    slot: Slot,
    from: String,
}

impl Plan {
    pub fn new(input: &Input, checkpoint: &Checkpoint, floats: Floats) -> Result<Plan, Error> {
        let description = checkpoint.description();
        let config = &description.config;
        let arch =
            settings::architecture(config).map_err(|what| Error::file(checkpoint.path(), what))?;
        let places = places(config, |_| false);
        let places: HashMap<&str, &Place> = places
            .iter()
            .rev()
            .map(|place| (place.name.as_str(), place))
            .collect();
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut joined: HashMap<String, usize> = HashMap::new();
        let mut weights = 0;
        for (slot, info) in input.tensors() {
            let Some(&place) = places.get(slot.name.as_str()) else {
                let what = "has no name in GGUF";
                return Err(Error::tensor(checkpoint.path(), &slot.name, what));
            };
            weights += slot.shape.iter().product::<usize>() as u64;
            let shape = slot.shape.clone();
            let part = Part {
                place: place.clone(),
                slot,
                from: info.format,
            };
            // The experts of a layer come in the order of their indices.
            if let Some(&at) = joined.get(&place.stored) {
                tensors[at].push(part);
                continue;
            }
            joined.insert(place.stored.clone(), tensors.len());
            tensors.push(Tensor::new(part, shape, floats));
        }
        if let Some(factors) = factors(&config.attention.rope.scaling, description) {
            tensors.push(Tensor {
                stored: "rope_freqs.weight".to_owned(),
                shape: vec![factors.len()],
                format: Format::F32,
                content: Content::Factors(factors),
            });
        }
        let ahead = checkpoint.holds(&format!("{}fc.weight", crate::layout::MTP));
        let mut metadata = Metadata::default();
        settings::write(&mut metadata, arch, description, floats, usize::from(ahead));
        let note = vocabulary::write(&mut metadata, checkpoint)?;
        Ok(Plan {
            metadata,
            note,
            tensors,
            weights,
        })
    }
}

impl crate::export::Plan for Plan {
    fn values(&self) -> u64 {
        self.weights
    }

    fn writer(&self, path: &Path) -> Result<Writer, Error> {
        let mut header = b"GGUF".to_vec();
        header.extend(3u32.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.metadata.count as u64).to_le_bytes());
        header.extend(&self.metadata.bytes);
        let mut offset = 0u64;
        for tensor in &self.tensors {
            values::text(&mut header, &tensor.stored);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            // The innermost dimension comes first.
            for &n in tensor.shape.iter().rev() {
                header.extend((n as u64).to_le_bytes());
            }
            header.extend(tensor.format.number().to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += tensor.bytes().next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        Writer::with_header(path, &header, offset)
    }

    fn write(&self, mut run: Run) -> Result<Report, Error> {
        let mut report = Report {
            tensors: Vec::new(),
            notes: self.note.iter().cloned().collect(),
            bytes_before: run.input.bytes(),
            bytes_after: self.tensors.iter().map(Tensor::bytes).sum(),
            weights: self.weights,
        };
        for tensor in &self.tensors {
            let mut error = QuantError::default();
            match &tensor.content {
                Content::Factors(factors) => {
                    run.floats(&tensor.stored, Dtype::F32, factors, &mut error)?;
                }
                Content::Of(parts) => {
                    for part in parts {
                        tensor.write(&mut run, &part.place, &part.slot, &mut error)?;
                        run.input.release(&part.slot.name);
                    }
                    report.tensors.push(TensorReport {
                        name: tensor.stored.clone(),
                        shape: tensor.shape.clone(),
                        from: parts[0].from.clone(),
                        to: tensor.format.name().to_owned(),
                        bytes: tensor.bytes(),
                        relative_error: Some(error.relative_rms()).filter(|&error| error > 0.0),
                        note: None,
                    });
                }
            }
            let padding = tensor.bytes().next_multiple_of(ALIGNMENT) - tensor.bytes();
            run.writer.data(&vec![0; padding as usize])?;
        }
        run.writer.finish()?;
        Ok(report)
    }
}

impl Tensor {
    /// A tensor of which this is the first or the only part.
    fn new(part: Part, mut shape: Vec<usize>, floats: Floats) -> Tensor {
        let format = match part.slot.role {
            Role::Vector => Format::F32,
            // As llama.cpp's converter has routers.
            Role::FloatMatrix if is_router(&part.slot.name) => Format::F32,
            Role::Matrix | Role::FloatMatrix => format(floats, shape[shape.len() - 1]),
        };
        if part.place.part.is_some() {
            shape.insert(0, 1);
        } else if part.slot.role != Role::Matrix {
            // A convolution's middle dimension, a gate of one output.
            shape.retain(|&n| n != 1);
        }
        Tensor {
            stored: part.place.stored.clone(),
            shape,
            format,
            content: Content::Of(vec![part]),
        }
    }

    fn push(&mut self, part: Part) {
        if let Content::Of(parts) = &mut self.content {
            self.shape[0] += 1;
            parts.push(part);
        }
    }

    fn bytes(&self) -> u64 {
        let (width, rows) = self.shape.split_last().map_or((0, 0), |(width, rest)| {
            (*width, rest.iter().product::<usize>())
        });
        (rows * self.format.row_bytes(width)) as u64
    }

    /// Its rows in the order of the file.
    fn write(
        &self,
        run: &mut Run,
        place: &Place,
        slot: &Slot,
        error: &mut QuantError,
    ) -> Result<(), Error> {
        let count = slot.shape[0];
        let mut order = vec![0; count];
        for row in 0..count {
            order[place.rows.stored(row)] = row;
        }
        let change = |values: &mut [f32]| {
            for value in values {
                *value = match place.values {
                    Values::Same => *value,
                    Values::PlusOne => *value + 1.0,
                    Values::MinusExp => -value.exp(),
                };
            }
        };
        if slot.role == Role::Vector {
            let len = slot.shape.iter().product();
            let width = len / count;
            let all = run.input.vector(&slot.name, len)?;
            let mut values = Vec::with_capacity(len);
            for row in order {
                values.extend(&all[row * width..(row + 1) * width]);
            }
            change(&mut values);
            self.put(run, &slot.name, &values, error)?;
            return run.advance(&slot.name, len);
        }
        let k = slot.shape[1];
        let mut columns = vec![0; k];
        for column in 0..k {
            columns[place.columns.stored(column)] = column;
        }
        let (mut rows, mut turned) = (Vec::new(), Vec::new());
        for part in order.chunks(ROWS) {
            turned.clear();
            // Neighbours are read together.
            for run_of_rows in part.chunk_by(|a, b| a + 1 == *b) {
                run.read(&slot.name, k, run_of_rows[0], run_of_rows.len(), &mut rows)?;
                for row in rows.chunks_exact(k) {
                    turned.extend(columns.iter().map(|&column| row[column]));
                }
            }
            run.release(&slot.name, turned.len());
            self.put(run, &slot.name, &turned, error)?;
            run.advance(&slot.name, turned.len())?;
        }
        Ok(())
    }

    fn put(
        &self,
        run: &mut Run,
        name: &str,
        values: &[f32],
        error: &mut QuantError,
    ) -> Result<(), Error> {
        let dtype = match self.format {
            Format::F16 => Dtype::F16,
            Format::Bf16 => Dtype::Bf16,
            Format::Q8_0 => {
                let bytes = blocks(values, error);
                let bytes = bytes.map_err(|what| Error::tensor(run.path, name, what))?;
                return run.writer.data(&bytes);
            }
            _ => Dtype::F32,
        };
        run.floats(name, dtype, values, error)
    }
}

/// How a matrix of `k` inputs is stored.
fn format(floats: Floats, k: usize) -> Format {
    match floats {
        Floats::Bf16 => Format::Bf16,
        Floats::F32 => Format::F32,
        Floats::Q8_0 if k.is_multiple_of(BLOCK) => Format::Q8_0,
        Floats::F16 | Floats::Q8_0 => Format::F16,
    }
}

/// Blocks of Q8_0: the scale makes the largest value 127.
///
/// # Errors
/// The first value that is not finite, or is too large for the scale.
fn blocks(values: &[f32], error: &mut QuantError) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(values.len() / BLOCK * (2 + BLOCK));
    for block in values.chunks_exact(BLOCK) {
        let largest = block
            .iter()
            .fold(0.0, |most: f32, value| most.max(value.abs()));
        let scale = f16::from_f32(largest / 127.0);
        bytes.extend(scale.to_le_bytes());
        let scale = scale.to_f32();
        // One that is no number, or the one that makes the scale too large.
        let unheld =
            |value: &&f32| !value.is_finite() || !scale.is_finite() && value.abs() == largest;
        if let Some(&value) = block.iter().find(unheld) {
            return Err(unfit(value, Format::Q8_0.name()));
        }
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        for value in block {
            let code = (value * inverse).round_ties_even().clamp(-127.0, 127.0);
            bytes.push(code as i8 as u8);
            error.squared_error += f64::from(code * scale - value).powi(2);
            error.squared_norm += f64::from(*value).powi(2);
        }
    }
    Ok(bytes)
}

/// Llama 3's stretch, for which GGUF has a list of divisors.
fn factors(
    scaling: &RopeScaling,
    description: &crate::description::Description,
) -> Option<Vec<f32>> {
    let rope = &description.config.attention.rope;
    match scaling {
        RopeScaling::None | RopeScaling::Linear { .. } => None,
        RopeScaling::Factors(factors) => Some(factors.clone()),
        RopeScaling::Llama3 { .. } => {
            let plain = crate::description::RopeConfig {
                scaling: RopeScaling::None,
                ..rope.clone()
            };
            let pairs = plain.inverse_frequencies().into_iter();
            Some(
                pairs
                    .zip(rope.inverse_frequencies())
                    .map(|(plain, own)| (plain / own) as f32)
                    .collect(),
            )
        }
    }
}
