//! The safetensors files of a directory as one set of tensors under their plain names.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use kozue_kernels::{DenseKind, DenseMatrix, Matrix, SharedBytes};
use serde_json::Value;

use crate::error::Error;
use crate::fields::{Fields, exists, read_object};
use crate::fused_experts;
use crate::layout::{HEAD, MTP};
use crate::safetensors::{Dtype, Entry, SafetensorsFile};
use crate::source::{InMemory, TensorInfo};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// A tensor and the file it lies in.
pub(crate) struct Placed {
    file: usize,
    pub entry: Entry,
    pub aside: bool,
}

/// All tensors of a directory.
pub(crate) struct Shards {
    dir: PathBuf,
    files: Vec<SafetensorsFile>,
    tensors: BTreeMap<String, Placed>,
}

impl Shards {
    /// Open model.safetensors, or all files that model.safetensors.index.json names.
    /// `tied`: whether a head beside the embedding is to be set aside.
    pub fn open(dir: &Path, tied: bool) -> Result<Shards, Error> {
        let single = dir.join(SINGLE);
        let index = dir.join(INDEX);
        let files = if exists(&single)? {
            vec![SafetensorsFile::open(&single)?]
        } else if exists(&index)? {
            open_indexed(dir, &index)?
        } else {
            return Err(Error::NotAModel {
                path: dir.to_path_buf(),
                what: without_weights(dir),
            });
        };
        let mut tensors = BTreeMap::new();
        for (number, file) in files.iter().enumerate() {
            for (stored, entry) in &file.header.entries {
                let name = plain_name(stored).into_owned();
                let aside = is_aside(&name, tied);
                let parts = fused_experts::parts(&name, entry);
                for (name, entry) in parts.unwrap_or_else(|| vec![(name, entry.clone())]) {
                    let placed = Placed {
                        file: number,
                        entry,
                        aside,
                    };
                    if tensors.insert(name, placed).is_some() {
                        return Err(Error::tensor(file.path(), stored, "is there twice"));
                    }
                }
            }
        }
        Ok(Shards {
            dir: dir.to_path_buf(),
            files,
            tensors,
        })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file that holds a tensor.
    pub fn file(&self, placed: &Placed) -> &SafetensorsFile {
        &self.files[placed.file]
    }

    /// What the files say besides their tensors, one file after the other.
    pub fn metadata(&self) -> impl Iterator<Item = (&Path, &BTreeMap<String, String>)> {
        self.files
            .iter()
            .map(|file| (file.path(), &file.header.metadata))
    }

    pub fn get(&self, name: &str) -> Result<&Placed, Error> {
        self.tensors
            .get(name)
            .ok_or_else(|| Error::missing(&self.dir, name))
    }

    /// The tensor's bytes as they lie in the file.
    pub fn bytes(&self, placed: &Placed) -> &[u8] {
        self.file(placed).bytes(&placed.entry)
    }

    /// The tensor's bytes, keeping the mapping alive.
    pub fn shared(&self, placed: &Placed) -> Result<SharedBytes, kozue_kernels::Error> {
        SharedBytes::new(self.file(placed).map.clone(), placed.entry.range.clone())
    }

    /// Error unless every tensor that is not set aside, and that `other` does not know better,
    /// holds floats.
    pub fn check_floats(&self, other: impl Fn(&str) -> bool) -> Result<(), Error> {
        for (name, placed) in &self.tensors {
            if !placed.aside && !other(name) {
                self.float(name, placed)?;
            }
        }
        Ok(())
    }

    pub fn infos(&self) -> impl Iterator<Item = TensorInfo> {
        self.tensors.iter().map(|(name, placed)| TensorInfo {
            name: name.clone(),
            format: placed.entry.dtype.name().to_owned(),
            shape: placed.entry.shape.clone(),
            bytes: placed.entry.range.len() as u64,
            memory: match placed.entry.shape[..] {
                [_, _] => {
                    InMemory::mapped(placed.entry.dtype.name(), placed.entry.range.len() as u64)
                }
                _ => InMemory::f32(&placed.entry.shape),
            },
            aside: placed.aside,
        })
    }

    /// A tensor of `len` values as f32.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let placed = self.get(name)?;
        let shape = &placed.entry.shape;
        // `Header::parse` checked that the product fits.
        if shape.iter().product::<usize>() != len {
            return Err(Error::shape(self.file(placed).path(), name, shape, &[len]));
        }
        let kind = self.float(name, placed)?;
        let mut values = vec![0.0; len];
        decode(kind, self.bytes(placed), &mut values);
        Ok(values)
    }

    /// Rows of a matrix of `k` inputs as f32, from row `first` on, as many as fit `out`.
    pub fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error> {
        let placed = self.get(name)?;
        let [n, width] = placed.entry.shape[..] else {
            return Err(self.not_a_matrix(name, placed));
        };
        let count = out.len().checked_div(k).unwrap_or(0);
        if width != k
            || count * k != out.len()
            || first.checked_add(count).is_none_or(|end| end > n)
        {
            let asked = [first.saturating_add(count), k];
            return Err(Error::shape(
                self.file(placed).path(),
                name,
                &[n, width],
                &asked,
            ));
        }
        let kind = self.float(name, placed)?;
        let row = k * placed.entry.dtype.size();
        let bytes = &self.bytes(placed)[first * row..(first + count) * row];
        decode(kind, bytes, out);
        Ok(())
    }

    /// The matrix of `n` x `k` floats, on the mapped bytes.
    pub fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        let placed = self.get(name)?;
        if placed.entry.shape != [n, k] {
            return Err(Error::shape(
                self.file(placed).path(),
                name,
                &placed.entry.shape,
                &[n, k],
            ));
        }
        let kind = self.float(name, placed)?;
        let file = self.file(placed);
        let dense = self
            .shared(placed)
            .and_then(|bytes| DenseMatrix::new(kind, n, k, bytes));
        dense
            .map(Matrix::Dense)
            .map_err(|error| Error::tensor(file.path(), name, error.to_string()))
    }

    pub fn release(&self, name: &str) {
        if let Some(placed) = self.tensors.get(name) {
            self.file(placed).map.release(placed.entry.range.clone());
        }
    }

    fn not_a_matrix(&self, name: &str, placed: &Placed) -> Error {
        let what = format!("has shape {:?}, but a matrix is needed", placed.entry.shape);
        Error::tensor(self.file(placed).path(), name, what)
    }

    fn float(&self, name: &str, placed: &Placed) -> Result<DenseKind, Error> {
        match placed.entry.dtype {
            Dtype::F32 => Ok(DenseKind::F32),
            Dtype::F16 => Ok(DenseKind::F16),
            Dtype::Bf16 => Ok(DenseKind::Bf16),
            other => Err(Error::tensor(
                self.file(placed).path(),
                name,
                format!(
                    "is stored as {}, but F32, F16 or BF16 is needed",
                    other.name()
                ),
            )),
        }
    }
}

/// Floats of any stored kind to f32; `bytes` holds `out.len()` values.
fn decode(kind: DenseKind, bytes: &[u8], out: &mut [f32]) {
    match kind {
        DenseKind::F32 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        DenseKind::F16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = half::f16::from_le_bytes(*bytes).to_f32();
            }
        }
        DenseKind::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = half::bf16::from_le_bytes(*bytes).to_f32();
            }
        }
    }
}

/// The name without the prefix that a multimodal model puts around its language model.
fn plain_name(stored: &str) -> Cow<'_, str> {
    if let Some(rest) = stored.strip_prefix("model.language_model.") {
        return Cow::Owned(format!("model.{rest}"));
    }
    // Saved by transformers before version 5.
    Cow::Borrowed(stored.strip_prefix("language_model.").unwrap_or(stored))
}

/// Whether a tensor belongs to a part that plain text generation does not use.
fn is_aside(name: &str, tied: bool) -> bool {
    name.starts_with("model.visual.")
        || name.starts_with("model.vision_tower.")
        || name.starts_with("model.multi_modal_projector.")
        || name.starts_with("vision_tower.")
        || name.starts_with("multi_modal_projector.")
        || name.starts_with("visual.")
        || name.starts_with(MTP)
        || name.starts_with("model.mtp.")
        || name.ends_with(".rotary_emb.inv_freq")
        || (tied && name == HEAD)
}

/// Open the shards of an index, and check that the index and they agree.
fn open_indexed(dir: &Path, index: &Path) -> Result<Vec<SafetensorsFile>, Error> {
    let map = read_object(index)?;
    let fields = Fields::new(index, &map);
    let Some(Value::Object(weights)) = fields.get("weight_map") else {
        return Err(fields.error("weight_map", "is missing or no object"));
    };
    let mut shard_of: HashMap<&str, &str> = HashMap::new();
    let mut shards: BTreeMap<&str, SafetensorsFile> = BTreeMap::new();
    for (name, value) in weights {
        let shard = value
            .as_str()
            .filter(|shard| is_file_name(shard))
            .ok_or_else(|| {
                Error::tensor(
                    index,
                    name,
                    format!("{value} is no name of a file beside the index"),
                )
            })?;
        if !shards.contains_key(shard) {
            let path = dir.join(shard);
            if !exists(&path)? {
                let what = "is missing, but the index names it; fetch the checkpoint again";
                return Err(Error::file(&path, what));
            }
            shards.insert(shard, SafetensorsFile::open(&path)?);
        }
        if !shards[shard].header.entries.contains_key(name) {
            let what = format!("the index places it in {shard}, which does not have it");
            return Err(Error::tensor(index, name, what));
        }
        shard_of.insert(name, shard);
    }
    for (shard, file) in &shards {
        for name in file.header.entries.keys() {
            if shard_of.get(name.as_str()) != Some(shard) {
                let what = "is in this file, but the index does not place it here";
                return Err(Error::tensor(file.path(), name, what));
            }
        }
    }
    Ok(shards.into_values().collect())
}

fn is_file_name(name: &str) -> bool {
    Path::new(name).file_name() == Some(OsStr::new(name))
}

/// Why a directory with a config.json has no weights that can be read.
fn without_weights(dir: &Path) -> String {
    let names: Vec<String> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    if names.iter().any(|name| name.ends_with(".safetensors")) {
        format!("it has .safetensors files, but neither {SINGLE} nor {INDEX}; fetch the index too")
    } else if names
        .iter()
        .any(|name| name.ends_with(".bin") || name.ends_with(".pth"))
    {
        "its weights are PyTorch pickles; save the model as safetensors".to_owned()
    } else {
        format!("it has a config.json, but no weights ({SINGLE} or {INDEX})")
    }
}
