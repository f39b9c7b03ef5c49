//! Where the tensors of another program's checkpoint lie.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kozue_kernels::{DenseKind, SharedBytes};

use crate::affine::{Affine, Float8, Floats};
use crate::error::Error;
use crate::safetensors::Dtype;
use crate::shards::Shards;

/// A matrix as it lies in a file.
pub(crate) enum Stored {
    Dense(Dense),
    Affine(Box<Affine>),
    Float8(Float8),
}

/// A matrix of floats.
pub(crate) struct Dense {
    pub k: usize,
    pub values: Floats,
}

impl Stored {
    /// The weights of some rows, row-major.
    pub fn rows(&self, rows: Range<usize>, out: &mut [f32]) {
        match self {
            Stored::Affine(affine) => affine.rows(rows, out),
            Stored::Float8(float8) => float8.rows(rows, out),
            Stored::Dense(dense) => {
                for (row, out) in rows.zip(out.chunks_exact_mut(dense.k)) {
                    for (column, out) in out.iter_mut().enumerate() {
                        *out = dense.values.get(row, column);
                    }
                }
            }
        }
    }
}

/// Where a matrix lies: rows of stored matrices, one part below the other.
pub(crate) struct Place {
    pub n: usize,
    pub k: usize,
    /// Stored matrix, first row, number of rows.
    pub parts: Vec<(usize, usize, usize)>,
}

/// Where a vector lies.
pub(crate) struct VectorPlace {
    pub shape: Vec<usize>,
    /// Stored tensor, first value, number of values.
    pub parts: Vec<(String, usize, usize)>,
    /// Added to each value.
    pub add: f32,
}

/// What a format's loader found.
pub(crate) struct Found {
    /// What the format is called in listings and notes.
    pub format: &'static str,
    pub stored: Vec<Stored>,
    pub matrices: BTreeMap<String, Place>,
    pub vectors: BTreeMap<String, VectorPlace>,
    /// Stored tensors that those places read; all others are taken as they are.
    pub used: BTreeSet<String>,
}

impl Found {
    pub fn new(format: &'static str) -> Found {
        Found {
            format,
            stored: Vec::new(),
            matrices: BTreeMap::new(),
            vectors: BTreeMap::new(),
            used: BTreeSet::new(),
        }
    }

    /// Adds the matrix `name`, which is one stored matrix.
    pub fn add(&mut self, name: String, stored: Stored, [n, k]: [usize; 2]) {
        let parts = vec![(self.stored.len(), 0, n)];
        self.stored.push(stored);
        self.matrices.insert(name, Place { n, k, parts });
    }

    /// Marks tensors as read by a place.
    pub fn uses<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) {
        self.used.extend(names.into_iter().map(str::to_owned));
    }
}

/// The dimensions of a matrix in a file.
pub(crate) fn dimensions(shards: &Shards, name: &str) -> Result<[usize; 2], Error> {
    let placed = shards.get(name)?;
    match placed.entry.shape[..] {
        [n, k] if n > 0 && k > 0 => Ok([n, k]),
        _ => {
            let what = format!("has shape {:?}, but a matrix is needed", placed.entry.shape);
            Err(Error::tensor(shards.file(placed).path(), name, what))
        }
    }
}

/// The bytes of a tensor of this type and shape.
pub(crate) fn bytes(
    shards: &Shards,
    name: &str,
    dtypes: &[&str],
    shape: &[usize],
) -> Result<SharedBytes, Error> {
    let placed = shards.get(name)?;
    let path = shards.file(placed).path();
    if !dtypes.contains(&placed.entry.dtype.name()) {
        let what = format!(
            "is stored as {}, but {} is needed",
            placed.entry.dtype.name(),
            dtypes.join(" or ")
        );
        return Err(Error::tensor(path, name, what));
    }
    if placed.entry.shape != shape {
        return Err(Error::shape(path, name, &placed.entry.shape, shape));
    }
    shards
        .shared(placed)
        .map_err(|error| Error::tensor(path, name, error.to_string()))
}

/// Floats of a tensor of this shape; `transposed` says that it has a row for each column.
pub(crate) fn floats(
    shards: &Shards,
    name: &str,
    shape: &[usize],
    transposed: bool,
) -> Result<Floats, Error> {
    Ok(Floats {
        bytes: bytes(shards, name, &["F32", "F16", "BF16"], shape)?,
        kind: match shards.get(name)?.entry.dtype {
            Dtype::F32 => DenseKind::F32,
            Dtype::F16 => DenseKind::F16,
            _ => DenseKind::Bf16,
        },
        transposed,
        width: shape.last().copied().unwrap_or(1),
    })
}

/// An error about a tensor, with its file.
pub(crate) fn wrong(shards: &Shards, name: &str, what: impl Into<String>) -> Error {
    match shards.get(name) {
        Ok(placed) => Error::tensor(shards.file(placed).path(), name, what),
        Err(missing) => missing,
    }
}

/// The names that end so, without that end, in the order of names.
pub(crate) fn stems(shards: &Shards, end: &str) -> Vec<String> {
    let infos = shards.infos().filter(|info| !info.aside);
    infos
        .filter_map(|info| Some(info.name.strip_suffix(end)?.to_owned()))
        .collect()
}

/// How many inputs share a scale, if `groups` groups cover `k` inputs.
pub(crate) fn group_size(k: usize, groups: usize) -> Option<usize> {
    (groups > 0 && k.is_multiple_of(groups)).then(|| k / groups)
}
