//! GGUF files as llama.cpp writes them, for the known families.
//!
//! Tensors come out under Hugging Face's names with Hugging Face's meaning. Float tensors are
//! mapped as they are; quantised ones are repacked for the kernels when they are asked for,
//! most of them without loss (see [`regroup`]).

mod blocks;
mod config;
mod dequantise;
mod format;
mod memory;
mod metadata;
mod names;
mod order;
mod parse;
mod pretokenizer;
mod regroup;
mod repack;
mod sentencepiece;
mod table;
#[cfg(test)]
mod tests;
mod text;
mod tokenizer;
pub(crate) mod write;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use kozue_kernels::{DenseKind, DenseMatrix, Matrix, SharedBytes};

use crate::description::Description;
use crate::error::Error;
use crate::layout;
use crate::mapping::Mapping;
use crate::source::{InMemory, Note, Source, TensorInfo};

use format::Format;
use memory::{Kept, in_memory, kept, note};
use metadata::Metadata;
use names::{Place, Values};
use order::Order;
use parse::Tensor;
use regroup::{Form, Loss};
use table::Tensors;

/// An opened GGUF file.
pub(crate) struct Gguf {
    file: Arc<Mapping>,
    description: Description,
    tensors: HashMap<String, Tensor>,
    /// Hugging Face's tensors that the file holds.
    places: HashMap<String, Place>,
    /// What repacking did so far.
    repacked: Mutex<BTreeMap<Format, (usize, Loss)>>,
    /// Tensors turned into f32 because their order cannot be kept in groups of 32.
    unpacked: Mutex<Vec<String>>,
}

impl Gguf {
    /// Open and check the file at `path`.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        let file = Arc::new(Mapping::open(path)?);
        let structure = parse::parse(&file).map_err(|what| Error::file(path, what))?;
        let tensors: HashMap<String, Tensor> = structure
            .tensors
            .into_iter()
            .map(|tensor| (tensor.name.clone(), tensor))
            .collect();
        let meta = Metadata::new(file.clone(), structure.values);
        let table = Tensors::new(&file, &tensors);
        let config = config::model_config(&meta, &table)?;
        let text = text::read(&meta, config.vocab_size)?;
        let name = match meta.text("general.name")? {
            Some(name) if !name.trim().is_empty() => Cow::from(name.trim()),
            _ => path
                .file_stem()
                .map_or(Cow::from("model"), |stem| stem.to_string_lossy()),
        };

        let fused = |layer| tensors.contains_key(&format!("blk.{layer}.attn_qkv.weight"));
        let mut places = HashMap::new();
        for place in names::places(&config, fused) {
            let Some(tensor) = tensors.get(&place.stored) else {
                continue;
            };
            check_place(path, tensor, &place)?;
            places.insert(place.name.clone(), place);
        }
        let description = Description {
            name: name.into_owned(),
            config,
            tokenizer: text.tokenizer,
            chat_template: text.chat_template,
            bos_token: text.bos_token,
            eos_token: text.eos_token,
            generation: text.generation,
        };
        Ok(Gguf {
            file,
            description,
            tensors,
            places,
            repacked: Mutex::default(),
            unpacked: Mutex::default(),
        })
    }

    fn path(&self) -> &Path {
        self.file.path()
    }

    fn find(&self, name: &str) -> Result<(&Place, &Tensor), Error> {
        let place = self.places.get(name);
        let tensor = place.and_then(|place| self.tensors.get(&place.stored));
        place
            .zip(tensor)
            .ok_or_else(|| Error::missing(self.path(), name))
    }

    /// As [`Gguf::find`], for a tensor that must have `n` rows of `k` values.
    fn find_matrix(&self, name: &str, n: usize, k: usize) -> Result<(&Place, &Tensor), Error> {
        let (place, tensor) = self.find(name)?;
        let shape = shape(tensor, place);
        if shape == [n, k] {
            Ok((place, tensor))
        } else {
            Err(Error::shape(self.path(), name, &shape, &[n, k]))
        }
    }

    /// Dequantise row `index` of a tensor into `out`, in Hugging Face's order and meaning.
    fn row(
        &self,
        place: &Place,
        tensor: &Tensor,
        index: usize,
        spare: &mut Vec<f32>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let size = tensor.format.row_bytes(out.len());
        let first = place.part.map_or(0, |(first, _)| first);
        let at = tensor.bytes.start + (first + place.rows.stored(index)) * size;
        let wrong = |what| Error::tensor(self.path(), &place.name, what);
        let bytes = &self.file[at..at + size];
        if place.columns == Order::Same {
            dequantise::dequantise(tensor.format, bytes, out).map_err(wrong)?;
        } else {
            spare.resize(out.len(), 0.0);
            dequantise::dequantise(tensor.format, bytes, spare).map_err(wrong)?;
            for (column, out) in out.iter_mut().enumerate() {
                *out = spare[place.columns.stored(column)];
            }
        }
        if place.values != Values::Same {
            for value in out {
                *value = place.values.undo(*value);
            }
        }
        Ok(())
    }

    /// A matrix of floats: mapped, or copied row by row if the order differs.
    fn dense(
        &self,
        place: &Place,
        tensor: &Tensor,
        kind: DenseKind,
        (n, k): (usize, usize),
    ) -> Result<Matrix, Error> {
        let wrong = |error: kozue_kernels::Error| {
            Error::tensor(self.path(), &place.name, error.to_string())
        };
        let size = tensor.format.row_bytes(k);
        let first = place.part.map_or(0, |(first, _)| first);
        let bytes = if place.rows == Order::Same && place.columns == Order::Same {
            let from = tensor.bytes.start + first * size;
            SharedBytes::new(self.file.clone(), from..from + n * size).map_err(wrong)?
        } else {
            let width = tensor.format.block_bytes();
            let mut copy = Vec::with_capacity(n * size);
            for index in 0..n {
                let at = tensor.bytes.start + (first + place.rows.stored(index)) * size;
                if place.columns == Order::Same {
                    copy.extend_from_slice(&self.file[at..at + size]);
                } else {
                    for column in 0..k {
                        let at = at + place.columns.stored(column) * width;
                        copy.extend_from_slice(&self.file[at..at + width]);
                    }
                }
            }
            self.file.release(part_bytes(place, tensor));
            copy.into()
        };
        DenseMatrix::new(kind, n, k, bytes)
            .map(Matrix::Dense)
            .map_err(wrong)
    }

    /// A quantised matrix in the kernels' form.
    fn packed(
        &self,
        place: &Place,
        tensor: &Tensor,
        form: Form,
        groups: Order,
        (n, k): (usize, usize),
    ) -> Result<Matrix, Error> {
        let stored = repack::Stored {
            format: tensor.format,
            bytes: &self.file[tensor.bytes.clone()],
            first: place.part.map_or(0, |(first, _)| first),
            rows: place.rows,
            groups,
        };
        let (matrix, loss) = repack::repack(&stored, form, n, k)
            .map_err(|what| Error::tensor(self.path(), &place.name, what))?;
        self.file.release(part_bytes(place, tensor));
        let mut repacked = self
            .repacked
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        let (count, total) = repacked.entry(tensor.format).or_default();
        *count += 1;
        *total += loss;
        Ok(Matrix::Packed(matrix))
    }

    /// A quantised matrix as f32.
    fn unpacked(
        &self,
        place: &Place,
        tensor: &Tensor,
        (n, k): (usize, usize),
    ) -> Result<Matrix, Error> {
        let mut bytes = Vec::with_capacity(4 * n * k);
        let (mut row, mut spare) = (vec![0.0; k], Vec::new());
        for index in 0..n {
            self.row(place, tensor, index, &mut spare, &mut row)?;
            bytes.extend(row.iter().flat_map(|value| value.to_le_bytes()));
        }
        self.file.release(part_bytes(place, tensor));
        let mut unpacked = self
            .unpacked
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        unpacked.push(place.name.clone());
        DenseMatrix::new(DenseKind::F32, n, k, bytes)
            .map(Matrix::Dense)
            .map_err(|error| Error::tensor(self.path(), &place.name, error.to_string()))
    }
}

impl Source for Gguf {
    fn description(&self) -> &Description {
        &self.description
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        let mut all: Vec<TensorInfo> = Vec::with_capacity(self.places.len());
        let mut placed = HashSet::new();
        for place in self.places.values() {
            let Some(tensor) = self.tensors.get(&place.stored) else {
                continue;
            };
            placed.insert(place.stored.as_str());
            let rows = tensor.row_count().max(1);
            let share = place.part.map_or(rows, |(_, count)| count);
            let shape = shape(tensor, place);
            let bytes = (tensor.bytes.len() / rows * share) as u64;
            all.push(TensorInfo {
                name: place.name.clone(),
                format: tensor.format.name().to_owned(),
                memory: in_memory(place, tensor.format, &shape, bytes),
                shape,
                bytes,
                aside: place.name.starts_with(layout::MTP),
            });
        }
        let layers = self.description.config.layers.len();
        for tensor in self
            .tensors
            .values()
            .filter(|tensor| !placed.contains(&*tensor.name))
        {
            all.push(TensorInfo {
                name: tensor.name.clone(),
                format: tensor.format.name().to_owned(),
                shape: tensor.shape.clone(),
                bytes: tensor.bytes.len() as u64,
                memory: InMemory::mapped(tensor.format.name(), tensor.bytes.len() as u64),
                aside: is_aside(&tensor.name, layers),
            });
        }
        all
    }

    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        let (place, tensor) = self.find_matrix(name, n, k)?;
        match kept(place, tensor.format) {
            Kept::Dense(kind) => self.dense(place, tensor, kind, (n, k)),
            Kept::Packed(form, groups) => self.packed(place, tensor, form, groups, (n, k)),
            Kept::Unpacked => self.unpacked(place, tensor, (n, k)),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let (place, tensor) = self.find(name)?;
        let shape = shape(tensor, place);
        if shape.iter().product::<usize>() != len {
            return Err(Error::shape(self.path(), name, &shape, &[len]));
        }
        // A vector is a column of rows of one value, which only float types can cut.
        let width = match place.matrix || shape.len() > 1 {
            true => tensor.row_len(),
            false if tensor.format.block_values() == 1 => 1,
            false if place.rows == Order::Same && place.part.is_none() => len,
            false => {
                let what = format!("{} cannot be read in another order", tensor.format.name());
                return Err(Error::tensor(self.path(), name, what));
            }
        };
        let (mut out, mut spare) = (vec![0.0; len], Vec::new());
        for (index, out) in out.chunks_exact_mut(width).enumerate() {
            self.row(place, tensor, index, &mut spare, out)?;
        }
        if let Some(index) = out.iter().position(|value| !value.is_finite()) {
            let what = format!("value {index} is not a finite number; the file is damaged");
            return Err(Error::tensor(self.path(), name, what));
        }
        Ok(out)
    }

    fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error> {
        let (place, tensor) = self.find(name)?;
        let shape = shape(tensor, place);
        let count = out.len().checked_div(k).unwrap_or(0);
        let fits = matches!(shape[..], [n, width] if width == k && count * k == out.len()
            && first.checked_add(count).is_some_and(|end| end <= n));
        if !fits {
            return Err(Error::shape(
                self.path(),
                name,
                &shape,
                &[first.saturating_add(count), k],
            ));
        }
        let mut spare = Vec::new();
        for (index, out) in out.chunks_exact_mut(k).enumerate() {
            self.row(place, tensor, first + index, &mut spare, out)?;
        }
        Ok(())
    }

    fn release(&self, name: &str) {
        if let Ok((place, tensor)) = self.find(name) {
            self.file.release(part_bytes(place, tensor));
        }
    }

    fn notes(&self) -> Vec<Note> {
        let repacked = self
            .repacked
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        let unpacked = self
            .unpacked
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        let mut notes: Vec<Note> = repacked
            .iter()
            .map(|(&format, (count, loss))| note(format, *count, loss))
            .collect();
        let text = match &unpacked[..] {
            [] => return notes,
            [only] => format!("1 tensor kept as f32: {only}"),
            [first, ..] => format!("{} tensors kept as f32, the first {first}", unpacked.len()),
        };
        notes.push(Note { text, lossy: false });
        notes
    }
}

/// The bytes in which a place's rows lie.
fn part_bytes(place: &Place, tensor: &Tensor) -> Range<usize> {
    let Some((first, count)) = place.part else {
        return tensor.bytes.clone();
    };
    let row = tensor.bytes.len() / tensor.row_count().max(1);
    let start = tensor.bytes.start + first * row;
    start..start + count * row
}

/// The shape under Hugging Face's name.
fn shape(tensor: &Tensor, place: &Place) -> Vec<usize> {
    let mut shape = tensor.shape.clone();
    if place.matrix && shape.len() != 2 {
        // A vector that stands for a matrix, or matrices one after the other.
        shape = vec![tensor.row_count(), tensor.row_len()];
    }
    if let (Some((_, count)), Some(rows)) = (place.part, shape.first_mut()) {
        *rows = count;
    }
    shape
}

/// Check that a tensor's rows and columns can be put into Hugging Face's order.
fn check_place(path: &Path, tensor: &Tensor, place: &Place) -> Result<(), Error> {
    let wrong = |what: String| Error::tensor(path, &tensor.name, what);
    let shape = shape(tensor, place);
    let stored = if place.matrix {
        tensor.row_count()
    } else {
        tensor.shape[0]
    };
    if let Some((first, count)) = place.part
        && first + count > stored
    {
        let what = format!("{stored} rows, but its parts take {}", first + count);
        return Err(wrong(what));
    }
    let columns = shape.last().copied().unwrap_or(1);
    if !place.rows.fits(shape[0]) || !place.columns.fits(columns) {
        let what = format!("its shape {shape:?} does not go with the metadata's heads");
        return Err(wrong(what));
    }
    Ok(())
}

/// Tensors that text generation does not use: blocks that predict further tokens, and what was
/// read into the description.
fn is_aside(name: &str, layers: usize) -> bool {
    let block = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split('.').next());
    let block = block.and_then(|number| number.parse::<usize>().ok());
    block.is_some_and(|block| block >= layers)
        || name.starts_with("nextn.")
        || name.starts_with("rope_freqs.")
        // Older converters repeated the rotary table in every layer.
        || (block.is_some() && name.ends_with(".rope_freqs.weight"))
}
