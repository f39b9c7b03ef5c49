//! A layer's matrices as the source has them, and as they were rounded.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use kozue_checkpoint::{Checkpoint, Conversion, Error as Stored, Progress, Rounded, Tensors};
use kozue_kernels::{
    Cpu, Gram, Matrix, PackedMatrix, PackedSpec, Quadratic, QuantError, Quantizer,
};

/// Rows read and rounded at a time: whole tiles, and tasks for many threads.
const SLICE: usize = 1536;

/// Rounding, and how far it is.
pub(super) struct Work<'a> {
    pub cpu: &'a Cpu,
    conversion: &'a Conversion,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    done: u64,
    total: u64,
}

impl<'a> Work<'a> {
    pub fn new(
        cpu: &'a Cpu,
        conversion: &'a Conversion,
        progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Work<'a> {
        Work {
            cpu,
            conversion,
            progress,
            done: 0,
            total: conversion.packed_weights(),
        }
    }

    /// Tells what is being done; an error if it is to stop.
    pub fn stage(&mut self, tensor: &str) -> Result<(), Stored> {
        match (self.progress)(Progress {
            tensor,
            done: self.done,
            total: self.total,
        }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Stored::Stopped),
        }
    }

    /// Passes over matrices that are there already.
    pub fn skip(&mut self, done: &[String]) -> Result<(), Stored> {
        for name in done {
            let (spec, _) = self.conversion.packed(name)?;
            self.done += (spec.n * spec.k) as u64;
        }
        self.stage(done.last().map_or("", |name| name))
    }

    /// Passes on how far writing is, which takes what little is left.
    pub fn write(&mut self, written: Progress<'_>) -> ControlFlow<()> {
        let left = u128::from(self.total - self.done) * u128::from(written.done);
        (self.progress)(Progress {
            tensor: written.tensor,
            done: self.done + (left / u128::from(written.total.max(1))) as u64,
            total: self.total,
        })
    }

    /// A matrix's codes: for the least of a form, or to the nearest.
    pub fn round(&mut self, name: &str, form: Option<&Quadratic>) -> Result<Rounded, Stored> {
        let (cpu, conversion) = (self.cpu, self.conversion);
        let quantizer = conversion.quantizer(name);
        pack(cpu, conversion, quantizer, name, form, &mut |weights| {
            self.done += weights;
            self.stage(name)
        })
    }
}

/// A matrix's packed bytes, slice by slice.
fn pack(
    cpu: &Cpu,
    conversion: &Conversion,
    quantizer: &Quantizer,
    name: &str,
    form: Option<&Quadratic>,
    done: &mut dyn FnMut(u64) -> Result<(), Stored>,
) -> Result<Rounded, Stored> {
    let (PackedSpec { n, k, .. }, rotation) = conversion.packed(name)?;
    let mut bytes = Vec::with_capacity(quantizer.spec(n, k).bytes());
    let mut error = QuantError::default();
    let mut rows = Vec::new();
    for first in (0..n).step_by(SLICE) {
        rows.resize(SLICE.min(n - first) * k, 0.0);
        conversion.read(cpu, name, k, first, &mut rows)?;
        let wrong = |error| conversion.wrong(name, first, error);
        let found = match form {
            Some(form) => quantizer.quantize_under(cpu, &rows, k, Some(rotation), form),
            None => quantizer.quantize(cpu, &rows, k, Some(rotation)),
        };
        let found = found.map_err(wrong)?;
        error += found.error;
        bytes.extend_from_slice(&found.pack(cpu).map_err(wrong)?);
        done(rows.len() as u64)?;
    }
    conversion.release(name);
    Ok(Rounded { bytes, error })
}

/// Matrices that share their inputs, and what was seen of those.
type Watched = (Vec<String>, Arc<Gram>);

/// A layer as the source has it, in 8 bits, which change nothing that could be told here and are
/// quicker than floats. Its inputs are added up.
pub(super) struct Preview<'a> {
    cpu: &'a Cpu,
    conversion: &'a Conversion,
    model: &'a Checkpoint,
    watched: Mutex<Vec<Watched>>,
}

impl<'a> Preview<'a> {
    pub fn new(cpu: &'a Cpu, conversion: &'a Conversion, model: &'a Checkpoint) -> Preview<'a> {
        Preview {
            cpu,
            conversion,
            model,
            watched: Mutex::default(),
        }
    }

    /// The packed matrices that were loaded, by their common inputs.
    pub fn watched(self) -> Vec<Watched> {
        self.watched
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tensors for Preview<'_> {
    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Stored> {
        if !self.conversion.packs(name) {
            return self.model.matrix(name, n, k);
        }
        let (_, rotation) = self.conversion.packed(name)?;
        let wrong = |error| self.conversion.wrong(name, 0, error);
        let quantizer = Quantizer::int8(64).map_err(wrong)?;
        let rounded = pack(
            self.cpu,
            self.conversion,
            &quantizer,
            name,
            None,
            &mut |_| Ok(()),
        )?;
        let spec = quantizer.spec(n, k);
        let matrix = PackedMatrix::new(spec, Some(rotation.clone()), rounded.bytes);
        Ok(Matrix::Packed(matrix.map_err(wrong)?))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Stored> {
        self.model.vector(name, len)
    }

    fn watch(&self, names: &[String]) -> Option<Arc<Gram>> {
        let packed = names.iter().filter(|name| self.conversion.packs(name));
        let names: Vec<String> = packed.cloned().collect();
        let (spec, _) = self.conversion.packed(names.first()?).ok()?;
        let gram = Arc::new(Gram::new(spec.k));
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.push((names, gram.clone()));
        Some(gram)
    }
}

/// A layer as it was rounded.
pub(super) struct Calibrated<'a> {
    model: &'a Checkpoint,
    matrices: HashMap<&'a str, PackedMatrix>,
}

impl<'a> Calibrated<'a> {
    pub fn new(
        conversion: &Conversion,
        model: &'a Checkpoint,
        done: &'a [(String, Rounded)],
    ) -> Result<Calibrated<'a>, Stored> {
        let matrices = done.iter().map(|(name, rounded)| {
            let (spec, rotation) = conversion.packed(name)?;
            let matrix = PackedMatrix::new(spec, Some(rotation.clone()), rounded.bytes.clone());
            let matrix = matrix.map_err(|error| conversion.wrong(name, 0, error))?;
            Ok((name.as_str(), matrix))
        });
        Ok(Calibrated {
            model,
            matrices: matrices.collect::<Result<_, Stored>>()?,
        })
    }
}

impl Tensors for Calibrated<'_> {
    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Stored> {
        match self.matrices.get(name) {
            Some(matrix) => Ok(Matrix::Packed(matrix.clone())),
            None => self.model.matrix(name, n, k),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Stored> {
        self.model.vector(name, len)
    }
}
