//! Tensors of other programs' directories, converted when they are asked for.
//!
//! A format's loader says where each of Hugging Face's tensors lies: rows of one or more stored
//! matrices, parts of stored vectors. Matrices of codes go into the kernels' form without loss where
//! it can hold them, else they become 8-bit codes in groups of 32, and a note says so.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use kozue_kernels::packed::TILE;
use kozue_kernels::{
    AlignedBytes, Cpu, DenseKind, DenseMatrix, Matrix, PackedMatrix, PackedSpec, QuantError,
    Quantizer, Rotation, ZeroKind,
};

use crate::affine::Slice;
use crate::error::Error;
use crate::kozue::format_name;
use crate::layout::stays_float;
use crate::shards::Shards;
use crate::source::{CodeRows, InMemory, Note, TensorInfo};
use crate::stored::{Found, Place, Stored};

/// Inputs that share a scale where a matrix has to be quantised again.
const AGAIN: usize = 32;
/// Weights of a matrix that are worth a thread.
const SHARE: usize = 1 << 20;

/// Tensors of an opened directory, of a model or not.
pub(crate) struct Placed {
    shards: Shards,
    found: Found,
    /// What became of matrices, by how they were stored and kept.
    done: Mutex<BTreeMap<(String, String), (usize, QuantError)>>,
}

/// How a matrix is kept in memory.
enum Kept {
    Dense(DenseKind),
    Packed(PackedSpec, Option<Rotation>),
    Again(Option<Rotation>),
}

impl Placed {
    pub fn new(shards: Shards, found: Found) -> Result<Placed, Error> {
        shards.check_floats(|name| found.used.contains(name))?;
        Ok(Placed {
            shards,
            found,
            done: Mutex::default(),
        })
    }

    fn path(&self) -> &Path {
        self.shards.dir()
    }

    fn wrong(&self, name: &str) -> impl Fn(kozue_kernels::Error) -> Error {
        let (path, name) = (self.path().to_path_buf(), name.to_owned());
        move |error| Error::tensor(&path, &name, error.to_string())
    }

    fn parts<'a>(&'a self, place: &'a Place) -> impl Iterator<Item = &'a Stored> {
        place.parts.iter().map(|part| &self.found.stored[part.0])
    }

    fn kept(&self, name: &str, place: &Place) -> Kept {
        let dense = |stored: &Stored| match stored {
            Stored::Dense(dense) => Some(dense.values.kind),
            // As transformers keeps them.
            Stored::Float8(_) => Some(DenseKind::Bf16),
            Stored::Affine(_) => None,
        };
        let mut kinds = self.parts(place).map(dense);
        if let Some(Some(first)) = kinds.next()
            && kinds.all(|kind| kind == Some(first))
        {
            return Kept::Dense(first);
        }
        if stays_float(name) {
            // Decays and rates of a recurrence, whose errors add up over a whole text, and routers.
            return Kept::Dense(DenseKind::F32);
        }
        let form = |stored: &Stored| match stored {
            Stored::Affine(affine) => {
                Some((affine.spec(place.n), affine.rotation.clone(), affine.group))
            }
            _ => None,
        };
        let mut forms = self.parts(place).map(form);
        let first = forms.next().flatten();
        let same = forms.all(|form| form == first);
        match first {
            Some((Some(spec), rotation, _)) if same => Kept::Packed(spec, rotation),
            Some((_, rotation, _)) => Kept::Again(rotation),
            None => Kept::Again(None),
        }
    }

    /// How a matrix is stored, for listings.
    fn stored_name(&self, place: &Place) -> String {
        let format = self.found.format;
        match self.parts(place).next() {
            Some(Stored::Affine(affine)) => {
                let (bits, group) = (affine.codes.bits, affine.group);
                format!("{format} int{bits} group {group}")
            }
            Some(Stored::Dense(dense)) => kind_name(dense.values.kind).to_owned(),
            Some(Stored::Float8(_)) => format!("{format} F8_E4M3"),
            None => format.to_owned(),
        }
    }

    /// The weights of some rows of a matrix, as stored.
    fn read(&self, place: &Place, first: usize, out: &mut [f32]) {
        let k = place.k;
        let (mut start, end) = (0, first + out.len() / k);
        for &(stored, from, count) in &place.parts {
            let wanted = first.max(start)..end.min(start + count);
            if !wanted.is_empty() {
                let out = &mut out[(wanted.start - first) * k..(wanted.end - first) * k];
                let from = from + wanted.start - start;
                self.found.stored[stored].rows(from..from + wanted.len(), out);
            }
            start += count;
        }
    }

    fn float_matrix(
        &self,
        name: &str,
        place: &Place,
        kind: DenseKind,
    ) -> Result<(Matrix, QuantError), Error> {
        let (n, k) = (place.n, place.k);
        let mut error = QuantError::default();
        let bytes = match (&place.parts[..], self.parts(place).next()) {
            // As it lies in the file.
            (&[(_, first, _)], Some(Stored::Dense(dense))) if !dense.values.transposed => {
                let size = k * kind.bytes();
                dense
                    .values
                    .bytes
                    .part(first * size..(first + n) * size)
                    .map_err(self.wrong(name))?
            }
            _ => {
                let mut bytes = Vec::with_capacity(n * k * kind.bytes());
                let mut row = vec![0.0; k];
                for index in 0..n {
                    self.read(place, index, &mut row);
                    for value in &row {
                        let stored = match kind {
                            DenseKind::F32 => {
                                bytes.extend(value.to_le_bytes());
                                *value
                            }
                            DenseKind::F16 => {
                                let stored = f16::from_f32(*value);
                                bytes.extend(stored.to_le_bytes());
                                stored.to_f32()
                            }
                            DenseKind::Bf16 => {
                                let stored = bf16::from_f32(*value);
                                bytes.extend(stored.to_le_bytes());
                                stored.to_f32()
                            }
                        };
                        error.squared_error += f64::from(stored - value).powi(2);
                        error.squared_norm += f64::from(*value).powi(2);
                    }
                }
                bytes.into()
            }
        };
        let matrix = DenseMatrix::new(kind, n, k, bytes).map_err(self.wrong(name))?;
        Ok((Matrix::Dense(matrix), error))
    }

    /// Makes a matrix tile by tile, on all cores if it is large.
    fn packed(
        &self,
        name: &str,
        spec: PackedSpec,
        rotation: Option<Rotation>,
        tile: &(dyn Fn(usize, PackedSpec) -> Result<(AlignedBytes, QuantError), String> + Sync),
    ) -> Result<(Matrix, QuantError), Error> {
        spec.check().map_err(self.wrong(name))?;
        let mut bytes = AlignedBytes::zeroed(spec.bytes());
        let size = spec.bytes() / spec.tiles();
        let work: Vec<_> = bytes
            .chunks_exact_mut(size)
            .map(|out| Mutex::new((out, Ok(QuantError::default()))))
            .collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let cpu = Cpu::new(Some((spec.n * spec.k / SHARE).clamp(1, threads)));
        cpu.run(work.len(), &|index| {
            let rows = PackedSpec {
                n: TILE.min(spec.n - index * TILE),
                ..spec
            };
            let made = tile(index * TILE, rows);
            let mut work = work[index].lock().unwrap_or_else(PoisonError::into_inner);
            work.1 = made.map(|(bytes, error)| {
                work.0.copy_from_slice(&bytes);
                error
            });
        });
        let mut total = QuantError::default();
        for work in work {
            let (_, made) = work.into_inner().unwrap_or_else(PoisonError::into_inner);
            total += made.map_err(|what| Error::tensor(self.path(), name, what))?;
        }
        let matrix = PackedMatrix::new(spec, rotation, bytes).map_err(self.wrong(name))?;
        Ok((Matrix::Packed(matrix), total))
    }

    /// Codes in the kernels' form.
    fn tile(
        &self,
        place: &Place,
        first: usize,
        spec: PackedSpec,
    ) -> Result<(AlignedBytes, QuantError), String> {
        let rows = first..first + spec.n;
        let slice = self.slice(place, rows, &spec);
        slice
            .pack(&spec)
            .map_err(|what| format!("rows from {first} on: {what}"))
    }

    /// Codes of some rows of a matrix that is kept as codes.
    fn slice(&self, place: &Place, rows: Range<usize>, spec: &PackedSpec) -> Slice {
        let mut all = Slice::default();
        let mut start = 0;
        for &(stored, from, count) in &place.parts {
            let wanted = rows.start.max(start)..rows.end.min(start + count);
            if let Stored::Affine(affine) = &self.found.stored[stored]
                && !wanted.is_empty()
            {
                let from = from + wanted.start - start;
                all.extend(affine.read(from..from + wanted.len(), spec));
            }
            start += count;
        }
        all
    }

    fn convert(&self, name: &str, place: &Place) -> Result<(Matrix, String, QuantError), Error> {
        match self.kept(name, place) {
            Kept::Dense(kind) => {
                let (matrix, error) = self.float_matrix(name, place, kind)?;
                Ok((matrix, kind_name(kind).to_owned(), error))
            }
            Kept::Packed(spec, rotation) => {
                let tile = |first, rows| self.tile(place, first, rows);
                let (matrix, error) = self.packed(name, spec, rotation, &tile)?;
                Ok((matrix, format_name(&spec), error))
            }
            Kept::Again(rotation) => {
                let quantizer = Quantizer::int8(AGAIN).map_err(self.wrong(name))?;
                let spec = quantizer.spec(place.n, place.k);
                let one = Cpu::new(Some(1));
                let tile = |first: usize, rows: PackedSpec| {
                    let mut values = vec![0.0; rows.n * rows.k];
                    self.read(place, first, &mut values);
                    let made = quantizer
                        .quantize(&one, &values, rows.k, rotation.as_ref())
                        .map_err(|error| error.to_string())?;
                    let bytes = made.pack(&one).map_err(|error| error.to_string())?;
                    Ok((bytes, made.error))
                };
                let (matrix, error) = self.packed(name, spec, rotation.clone(), &tile)?;
                Ok((
                    matrix,
                    format!("{}, quantised again", format_name(&spec)),
                    error,
                ))
            }
        }
    }

    fn find(&self, name: &str, n: usize, k: usize) -> Result<Option<&Place>, Error> {
        match self.found.matrices.get(name) {
            Some(place) if (place.n, place.k) != (n, k) => Err(Error::shape(
                self.path(),
                name,
                &[place.n, place.k],
                &[n, k],
            )),
            place => Ok(place),
        }
    }
}

/// A matrix that is kept as codes.
struct PlacedCodes<'a> {
    source: &'a Placed,
    place: &'a Place,
    spec: PackedSpec,
    rotation: Option<Rotation>,
}

impl CodeRows for PlacedCodes<'_> {
    fn spec(&self) -> PackedSpec {
        self.spec
    }

    fn rotation(&self) -> Option<Rotation> {
        self.rotation.clone()
    }

    fn rows(&self, rows: Range<usize>) -> Slice {
        self.source.slice(self.place, rows, &self.spec)
    }
}

fn kind_name(kind: DenseKind) -> &'static str {
    match kind {
        DenseKind::F32 => "F32",
        DenseKind::F16 => "F16",
        DenseKind::Bf16 => "BF16",
    }
}

impl Placed {
    pub fn tensors(&self) -> Vec<TensorInfo> {
        let plain = self
            .shards
            .infos()
            .filter(|info| !self.found.used.contains(&info.name));
        let matrices = self.found.matrices.iter().map(|(name, place)| {
            let shape = vec![place.n, place.k];
            let memory = match self.kept(name, place) {
                Kept::Dense(kind) => InMemory {
                    format: kind_name(kind).to_owned(),
                    bytes: (place.n * place.k * kind.bytes()) as u64,
                    mapped: place.parts.len() == 1
                        && matches!(self.parts(place).next(), Some(Stored::Dense(_))),
                    lossy: false,
                },
                Kept::Packed(spec, _) => InMemory {
                    format: format_name(&spec),
                    bytes: spec.bytes() as u64,
                    mapped: false,
                    lossy: false,
                },
                Kept::Again(_) => InMemory {
                    format: format!("int8 group {AGAIN}"),
                    bytes: Quantizer::int8(AGAIN).map_or(0, |quantizer| {
                        quantizer.spec(place.n, place.k).bytes() as u64
                    }),
                    mapped: false,
                    lossy: true,
                },
            };
            let weights = (place.n * place.k) as u64;
            let bytes = match self.parts(place).next() {
                Some(Stored::Affine(affine)) => {
                    let groups = (place.n * affine.groups()) as u64;
                    let zero = match affine.zero.kind() {
                        ZeroKind::Symmetric => 0,
                        ZeroKind::Point => u64::from(affine.codes.bits),
                        ZeroKind::Min => 16,
                    };
                    let scale = 8 * affine.scales.kind.bytes() as u64;
                    (weights * u64::from(affine.codes.bits) + groups * (scale + zero)) / 8
                }
                Some(Stored::Dense(dense)) => weights * dense.values.kind.bytes() as u64,
                Some(Stored::Float8(_)) | None => weights,
            };
            TensorInfo {
                name: name.clone(),
                format: self.stored_name(place),
                shape,
                bytes,
                memory,
                aside: false,
            }
        });
        let vectors = self.found.vectors.iter().map(|(name, place)| TensorInfo {
            name: name.clone(),
            format: "F32".to_owned(),
            shape: place.shape.clone(),
            bytes: InMemory::f32(&place.shape).bytes,
            memory: InMemory::f32(&place.shape),
            aside: false,
        });
        matrices.chain(vectors).chain(plain).collect()
    }

    pub fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        let Some(place) = self.find(name, n, k)? else {
            return self.shards.matrix(name, n, k);
        };
        let (matrix, to, error) = self.convert(name, place)?;
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, total) = done.entry((self.stored_name(place), to)).or_default();
        *count += 1;
        *total += error;
        Ok(matrix)
    }

    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        if let Some(place) = self.found.matrices.get(name) {
            if place.n * place.k != len {
                return Err(Error::shape(self.path(), name, &[place.n, place.k], &[len]));
            }
            let mut values = vec![0.0; len];
            self.read(place, 0, &mut values);
            return Ok(values);
        }
        let Some(place) = self.found.vectors.get(name) else {
            return self.shards.vector(name, len);
        };
        if place.shape.iter().product::<usize>() != len {
            return Err(Error::shape(self.path(), name, &place.shape, &[len]));
        }
        let mut values = Vec::with_capacity(len);
        for (stored, first, count) in &place.parts {
            let shape = &self.shards.get(stored)?.entry.shape;
            let all = self.shards.vector(stored, shape.iter().product())?;
            let part = first
                .checked_add(*count)
                .and_then(|end| all.get(*first..end));
            let part = part.ok_or_else(|| Error::shape(self.path(), stored, shape, &[len]))?;
            values.extend(part.iter().map(|value| value + place.add));
        }
        Ok(values)
    }

    pub fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error> {
        let Some(place) = self.found.matrices.get(name) else {
            return self.shards.rows(name, k, first, out);
        };
        let count = out.len().checked_div(k).unwrap_or(0);
        let end = first.checked_add(count);
        if place.k != k || count * k != out.len() || end.is_none_or(|end| end > place.n) {
            let asked = [first.saturating_add(count), k];
            return Err(Error::shape(self.path(), name, &[place.n, place.k], &asked));
        }
        self.read(place, first, out);
        Ok(())
    }

    pub fn codes(&self, name: &str) -> Option<Box<dyn CodeRows + '_>> {
        let place = self.found.matrices.get(name)?;
        match self.kept(name, place) {
            Kept::Packed(spec, rotation) => Some(Box::new(PlacedCodes {
                source: self,
                place,
                spec,
                rotation,
            })),
            _ => None,
        }
    }

    pub fn release(&self, name: &str) {
        // What several places share is let go of by the system when it needs the memory.
        if !self.found.matrices.contains_key(name) {
            self.shards.release(name);
        }
    }

    pub fn notes(&self) -> Vec<Note> {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let note = |((from, to), (count, error)): (&(String, String), &(usize, QuantError))| {
            let s = if *count == 1 { "" } else { "s" };
            let loss = error.relative_rms();
            let change = if loss > 0.0 {
                format!("relative error {loss:.2e}")
            } else {
                "without loss".to_owned()
            };
            Note {
                text: format!("{from}: {count} tensor{s} as {to}, {change}"),
                lossy: loss > 0.0,
            }
        };
        let same = |(from, to): &(String, String)| from == to;
        let changed = done.iter().filter(|(key, _)| !same(key));
        changed.map(note).collect()
    }
}
