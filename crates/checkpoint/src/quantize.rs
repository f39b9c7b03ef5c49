//! From any checkpoint to Kozue's own format, tensor by tensor.
//!
//! Matrices are read, rotated, quantised and written in slices of rows, so the memory that a
//! conversion takes depends on the width of the model and not on its size.

mod conversion;
pub(crate) mod input;
mod plan;
pub(crate) mod report;

use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::{bf16, f16};
use kozue_kernels::packed::TILE;
use kozue_kernels::{Cpu, PackedSpec, QuantError, Quantizer, Rotation};

use crate::affine::Slice;
use crate::destination::{check_apart, check_target};
use crate::error::Error;
use crate::kozue::format_name;
use crate::safetensors::Dtype;
use crate::source::CodeRows;
use crate::writer::Writer;

pub use conversion::{Conversion, Rounded};
use input::Input;
use plan::{Action, Plan, Step};
pub use report::{Report, TensorReport};

/// Rows quantised at a time, a whole number of tiles.
pub(crate) const SLICE: usize = 8 * TILE;
/// Weights after which the memory behind the source is let go of.
const RELEASE: usize = 1 << 25;

/// How many bits a packed weight takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 4 bits with a zero point for each group.
    M,
    /// 8 bits, symmetric.
    L,
}

/// What [`quantize`] is to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bits of a weight.
    pub size: Size,
    /// Those of the embedding table and the head, where they are to be others.
    pub head: Option<Size>,
    /// Inputs that share a scale: 32, 64 or 128.
    pub group: usize,
    /// Whether an existing Kozue checkpoint is replaced.
    pub force: bool,
}

/// How far a conversion is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The tensor in work.
    pub tensor: &'a str,
    /// Weights done.
    pub done: u64,
    /// Weights in the whole model.
    pub total: u64,
}

/// Convert the model at `source` (a Hugging Face directory, a GGUF file, or a drafter's directory)
/// into a new directory `target` in Kozue's format, each weight rounded to the nearest code.
///
/// The directory appears under its name only when it is complete; on an error, or when
/// `progress` breaks, nothing is left behind. `progress` is called after every slice of rows.
///
/// # Errors
/// If the source is damaged or already quantised by Kozue, the target exists (see
/// [`Options::force`]), or writing fails.
pub fn quantize(
    cpu: &Cpu,
    source: &Path,
    target: &Path,
    options: Options,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Report, Error> {
    check_apart(source, target)?;
    check_target(target, options.force)?;
    Conversion::open(source, options)?.write(cpu, target, &mut |_| Ok(None), progress)
}

/// A conversion under way.
pub(crate) struct Run<'a> {
    pub cpu: &'a Cpu,
    pub path: &'a Path,
    pub input: &'a Input,
    pub writer: Writer,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    done: u64,
    total: u64,
    /// Weights read since memory was last let go of.
    held: usize,
}

impl<'a> Run<'a> {
    /// `path` is the source's, for errors; `total` counts the weights that will be read.
    pub fn new(
        cpu: &'a Cpu,
        path: &'a Path,
        input: &'a Input,
        writer: Writer,
        total: u64,
        progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Run<'a> {
        Run {
            cpu,
            path,
            input,
            writer,
            progress,
            done: 0,
            total,
            held: 0,
        }
    }

    /// `rounded` are a packed matrix's codes where somebody else has chosen them.
    fn tensor(
        &mut self,
        step: &Step,
        plan: &Plan,
        rounded: Option<Rounded>,
    ) -> Result<TensorReport, Error> {
        let (to, error) = match &step.action {
            Action::Pack(signs) => {
                let rotation = &plan.rotations[signs];
                let spec = plan.spec(step);
                let error = match rounded {
                    Some(rounded) => self.copy(step, &spec, &rounded)?,
                    None => self.pack(step, plan.quantizer(&step.name), rotation)?,
                };
                (format_name(&spec), error)
            }
            Action::Move(_) => {
                let spec = plan.spec(step);
                (format_name(&spec), self.carry(step, &spec)?)
            }
            Action::Keep(dtype) => (
                dtype.name().to_owned(),
                self.keep(&step.name, &step.shape, *dtype)?,
            ),
        };
        self.input.release(&step.name);
        let bytes = match &step.action {
            Action::Pack(_) | Action::Move(_) => plan.spec(step).bytes() as u64,
            Action::Keep(dtype) => (step.shape.iter().product::<usize>() * dtype.size()) as u64,
        };
        Ok(TensorReport {
            name: step.name.clone(),
            shape: step.shape.clone(),
            from: step.from.clone(),
            to,
            bytes,
            relative_error: Some(error.relative_rms()).filter(|&error| error > 0.0),
            note: step.note.clone(),
        })
    }

    /// Write a matrix that was rounded elsewhere.
    fn copy(
        &mut self,
        step: &Step,
        spec: &PackedSpec,
        rounded: &Rounded,
    ) -> Result<QuantError, Error> {
        if rounded.bytes.len() != spec.bytes() {
            let what = format!("{} packed bytes, not {}", rounded.bytes.len(), spec.bytes());
            return Err(Error::tensor(self.path, &step.name, what));
        }
        self.writer.data(&rounded.bytes)?;
        self.advance(&step.name, spec.n * spec.k)?;
        Ok(rounded.error)
    }

    /// Quantise a matrix slice by slice.
    fn pack(
        &mut self,
        step: &Step,
        quantizer: &Quantizer,
        rotation: &Rotation,
    ) -> Result<QuantError, Error> {
        let (n, k) = (step.shape[0], step.shape[1]);
        let mut error = QuantError::default();
        let mut rows = Vec::new();
        for first in (0..n).step_by(SLICE) {
            self.read(&step.name, k, first, SLICE.min(n - first), &mut rows)?;
            self.release(&step.name, rows.len());
            let quantized = quantizer
                .quantize(self.cpu, &rows, k, Some(rotation))
                .map_err(|error| self.wrong(&step.name, first, error))?;
            error += quantized.error;
            let bytes = quantized.pack(self.cpu);
            let bytes = bytes.map_err(|error| self.wrong(&step.name, first, error))?;
            self.writer.data(&bytes)?;
            self.advance(&step.name, rows.len())?;
        }
        Ok(error)
    }

    /// Move a matrix's codes, which were chosen before, slice by slice.
    fn carry(&mut self, step: &Step, spec: &PackedSpec) -> Result<QuantError, Error> {
        let mut error = QuantError::default();
        let Some(codes) = self.input.codes(&step.name) else {
            return Err(Error::missing(self.path, &step.name));
        };
        for first in (0..spec.n).step_by(SLICE) {
            let rows = first..(first + SLICE).min(spec.n);
            let part = PackedSpec {
                n: rows.len(),
                ..*spec
            };
            let (bytes, lost) = code_rows(self.cpu, codes.as_ref(), rows)
                .pack(&part)
                .map_err(|what| Error::tensor(self.path, &step.name, what))?;
            error += lost;
            self.writer.data(&bytes)?;
            self.release(&step.name, part.n * part.k);
            self.advance(&step.name, part.n * part.k)?;
        }
        Ok(error)
    }

    /// Copy a tensor as floats.
    pub fn keep(&mut self, name: &str, shape: &[usize], dtype: Dtype) -> Result<QuantError, Error> {
        let mut error = QuantError::default();
        if let &[n, k] = shape {
            let mut rows = Vec::new();
            for first in (0..n).step_by(SLICE) {
                self.read(name, k, first, SLICE.min(n - first), &mut rows)?;
                self.release(name, rows.len());
                self.floats(name, dtype, &rows, &mut error)?;
                self.advance(name, rows.len())?;
            }
        } else {
            let len = shape.iter().product();
            let values = self.input.vector(name, len)?;
            self.floats(name, dtype, &values, &mut error)?;
            self.advance(name, len)?;
        }
        Ok(error)
    }

    /// Append floats of a tensor; what rounding loses is added to `error`.
    pub fn floats(
        &mut self,
        name: &str,
        dtype: Dtype,
        values: &[f32],
        error: &mut QuantError,
    ) -> Result<(), Error> {
        let bytes = encode(dtype, values, error);
        let bytes = bytes.map_err(|what| Error::tensor(self.path, name, what))?;
        self.writer.data(&bytes)
    }

    /// Read `count` rows into `rows`, on all threads.
    pub fn read(
        &self,
        name: &str,
        k: usize,
        first: usize,
        count: usize,
        rows: &mut Vec<f32>,
    ) -> Result<(), Error> {
        rows.resize(count * k, 0.0);
        read_rows(self.cpu, self.input, name, k, first, rows)
    }

    /// Let go of what was read of a tensor, now and then: a large embedding alone would fill
    /// gigabytes with pages that are never looked at again.
    pub fn release(&mut self, name: &str, weights: usize) {
        self.held += weights;
        if self.held >= RELEASE {
            self.input.release(name);
            self.held = 0;
        }
    }

    fn wrong(&self, name: &str, first: usize, error: kozue_kernels::Error) -> Error {
        wrong(self.path, name, first, error)
    }

    pub fn advance(&mut self, tensor: &str, weights: usize) -> Result<(), Error> {
        self.done += weights as u64;
        self.progress(tensor)
    }

    fn progress(&mut self, tensor: &str) -> Result<(), Error> {
        match (self.progress)(Progress {
            tensor,
            done: self.done,
            total: self.total,
        }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Stopped),
        }
    }
}

/// An error about a tensor of the source at `path`; `first` is the row that it is counted from.
fn wrong(path: &Path, name: &str, first: usize, error: kozue_kernels::Error) -> Error {
    let counted = match first {
        0 => String::new(),
        _ => format!(" (counted from row {first})"),
    };
    Error::tensor(path, name, format!("{error}{counted}"))
}

/// Rows `first ..` of a matrix, as many as `rows` holds, on all threads.
fn read_rows(
    cpu: &Cpu,
    input: &Input,
    name: &str,
    k: usize,
    first: usize,
    rows: &mut [f32],
) -> Result<(), Error> {
    let parts: Vec<Mutex<&mut [f32]>> = rows.chunks_mut(TILE * k).map(Mutex::new).collect();
    let failed = Mutex::new(None);
    cpu.run(parts.len(), &|part| {
        let mut rows = locked(&parts[part]);
        if let Err(error) = input.rows(name, k, first + part * TILE, &mut rows) {
            *locked(&failed) = Some(error);
        }
    });
    locked(&failed).take().map_or(Ok(()), Err)
}

/// Rows of codes, read on all threads.
pub(crate) fn code_rows(cpu: &Cpu, codes: &dyn CodeRows, rows: Range<usize>) -> Slice {
    let parts: Vec<_> = rows
        .clone()
        .step_by(TILE)
        .map(|first| (first, Mutex::new(Slice::default())))
        .collect();
    cpu.run(parts.len(), &|part| {
        let (first, slice) = &parts[part];
        *locked(slice) = codes.rows(*first..(first + TILE).min(rows.end));
    });
    let mut all = Slice::default();
    for (_, slice) in parts {
        all.extend(slice.into_inner().unwrap_or_else(PoisonError::into_inner));
    }
    all
}

/// A lock's content, also after a panic elsewhere, which then ends the whole run anyway.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Floats as they are stored; what rounding loses is added to `error`.
///
/// # Errors
/// The first value that is not finite, or is not as stored.
pub(crate) fn encode(
    dtype: Dtype,
    values: &[f32],
    error: &mut QuantError,
) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.size());
    for &value in values {
        let stored = match dtype {
            Dtype::Bf16 => {
                let stored = bf16::from_f32(value);
                bytes.extend_from_slice(&stored.to_le_bytes());
                stored.to_f32()
            }
            Dtype::F16 => {
                let stored = f16::from_f32(value);
                bytes.extend_from_slice(&stored.to_le_bytes());
                stored.to_f32()
            }
            _ => {
                bytes.extend_from_slice(&value.to_le_bytes());
                value
            }
        };
        if !stored.is_finite() {
            return Err(unfit(value, dtype.name()));
        }
        error.squared_error += f64::from(stored - value).powi(2);
        error.squared_norm += f64::from(value).powi(2);
    }
    Ok(bytes)
}

/// What is said of a value that a type does not hold.
pub(crate) fn unfit(value: f32, dtype: &str) -> String {
    match value.is_finite() {
        true => format!("has a value of {value}, too large for {dtype}"),
        false => format!("has a value that is {value}; the checkpoint is damaged"),
    }
}
