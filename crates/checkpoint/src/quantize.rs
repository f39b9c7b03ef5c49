//! From any checkpoint to Kozue's own format, tensor by tensor.
//!
//! Matrices are read, rotated, quantised and written in slices of rows, so the memory that a
//! conversion takes depends on the width of the model and not on its size.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;

use half::{bf16, f16};
use kozue_kernels::hadamard::BLOCK as ROTATED;
use kozue_kernels::packed::TILE;
use kozue_kernels::{Cpu, QuantError, Quantized, Quantizer, Rotation, ZeroKind, Zeros, pack};
use serde_json::{Map, Value, json};

use crate::Checkpoint;
use crate::config::config_json;
use crate::destination::{Destination, check_target, is_kozue, write_file};
use crate::error::Error;
use crate::fields::pretty;
use crate::kozue::{CONFIG_KEY, FORMAT_VERSION, PackedEntry, SIGNS, format_name};
use crate::layout::{Role, layout};
use crate::safetensors::Dtype;
use crate::text::text_files;
use crate::writer::{Planned, Writer};

/// Seed of the signs; the signs themselves are stored, so it may change at any time.
const SEED: u64 = 0x6b6f_7a75_6500_0001;
/// Rows quantised at a time, a whole number of tiles.
const SLICE: usize = 8 * TILE;

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

/// What became of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorReport {
    /// Hugging Face name.
    pub name: String,
    /// Dimensions, outputs first.
    pub shape: Vec<usize>,
    /// How it was stored in the source, and how it is now.
    pub from: String,
    /// See `from`.
    pub to: String,
    /// Bytes that it takes now.
    pub bytes: u64,
    /// Root mean square of the error relative to that of the weights; none if nothing was lost.
    pub relative_error: Option<f64>,
    /// Why a matrix was not quantised.
    pub note: Option<String>,
}

/// What [`quantize`] did.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// In the order of the new file.
    pub tensors: Vec<TensorReport>,
    /// Bytes of the source's tensors that were used.
    pub bytes_before: u64,
    /// Bytes of all tensors written, signs included.
    pub bytes_after: u64,
    /// Weights of the model.
    pub weights: u64,
}

impl Report {
    /// Bits that a weight takes on average, scales and unquantised tensors included.
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.bytes_after as f64 / self.weights as f64
    }
}

/// Convert the model at `source` (a Hugging Face directory or a GGUF file) into a new directory
/// `target` in Kozue's format.
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
    check_target(target, options.force)?;
    if is_kozue(source) {
        return Err(Error::file(
            source,
            "is already quantised by Kozue; quantise the model that it was made from",
        ));
    }
    let checkpoint = Checkpoint::open(source)?;
    let plan = Plan::new(&checkpoint, options)?;
    let destination = Destination::create(target, options.force)?;
    let path = destination.dir().join("model.safetensors");
    let writer = Writer::create(&path, &plan.tensors(), &plan.metadata())?;
    let mut run = Run {
        cpu,
        checkpoint: &checkpoint,
        writer,
        progress,
        done: 0,
        total: plan.weights,
    };
    let mut reports = Vec::new();
    for tensor in &plan.steps {
        reports.push(run.tensor(tensor, &plan)?);
    }
    for (name, rotation) in &plan.rotations {
        let signs: Vec<u8> = rotation
            .signs()
            .iter()
            .map(|&sign| sign as i8 as u8)
            .collect();
        run.progress(name)?;
        run.writer.data(&signs)?;
    }
    run.writer.finish()?;
    let report = Report {
        tensors: reports,
        bytes_before: plan.steps.iter().map(|step| step.bytes_before).sum(),
        bytes_after: plan.tensors().iter().map(Planned::bytes).sum(),
        weights: plan.weights,
    };
    write_texts(&checkpoint, source, destination.dir(), options, &report)?;
    destination.finish()?;
    Ok(report)
}

/// What is done with one tensor.
struct Step {
    name: String,
    shape: Vec<usize>,
    from: String,
    bytes_before: u64,
    action: Action,
    note: Option<String>,
}

enum Action {
    /// Packed, rotated by the signs of this name.
    Pack(String),
    /// Kept as floats of this type.
    Keep(Dtype),
}

/// Everything that is known before the first weight is read.
struct Plan {
    quantizer: Quantizer,
    steps: Vec<Step>,
    rotations: BTreeMap<String, Rotation>,
    weights: u64,
}

impl Plan {
    fn new(checkpoint: &Checkpoint, options: Options) -> Result<Plan, Error> {
        let wrong = |error: kozue_kernels::Error| Error::file(checkpoint.path(), error.to_string());
        let quantizer = match options.size {
            Size::M => Quantizer::int4(options.group),
            Size::L => Quantizer::int8(options.group),
        };
        let quantizer = quantizer.map_err(wrong)?;
        let infos: BTreeMap<&str, _> = checkpoint
            .tensors()
            .into_iter()
            .map(|info| (info.name.as_str(), info))
            .collect();
        let mut plan = Plan {
            quantizer,
            steps: Vec::new(),
            rotations: BTreeMap::new(),
            weights: 0,
        };
        for slot in layout(&checkpoint.description().config) {
            let Some(info) = infos.get(slot.name.as_str()) else {
                return Err(Error::missing(checkpoint.path(), &slot.name));
            };
            plan.weights += slot.shape.iter().product::<usize>() as u64;
            let stored = match info.format.as_str() {
                "BF16" => Dtype::Bf16,
                "F16" => Dtype::F16,
                // Quantised by another program: its values as they are.
                _ => Dtype::F32,
            };
            let (action, note) = match (slot.role, &slot.shape[..]) {
                (Role::Matrix, &[_, k]) if k.is_multiple_of(ROTATED) => {
                    let signs = format!("{SIGNS}{k}");
                    if !plan.rotations.contains_key(&signs) {
                        let rotation = Rotation::from_seed(k, SEED).map_err(wrong)?;
                        plan.rotations.insert(signs.clone(), rotation);
                    }
                    (Action::Pack(signs), None)
                }
                (Role::Matrix, &[_, k]) => {
                    let kept = if stored == Dtype::F32 {
                        Dtype::Bf16
                    } else {
                        stored
                    };
                    let note = format!("kept dense: {k} inputs are no multiple of {ROTATED}");
                    (Action::Keep(kept), Some(note))
                }
                _ => (Action::Keep(stored), None),
            };
            plan.steps.push(Step {
                name: slot.name,
                shape: slot.shape,
                from: info.format.clone(),
                bytes_before: info.bytes,
                action,
                note,
            });
        }
        // Packed tensors take whole cache lines and come first; then wider values before
        // narrower ones, so that every tensor is aligned without padding between them.
        plan.steps.sort_by_key(|step| match step.action {
            Action::Pack(_) => 0,
            Action::Keep(dtype) => 8 - dtype.size(),
        });
        Ok(plan)
    }

    /// What the header lists, in order.
    fn tensors(&self) -> Vec<Planned> {
        let steps = self.steps.iter().map(|step| {
            let name = step.name.clone();
            match step.action {
                Action::Pack(_) => {
                    let bytes = self.quantizer.spec(step.shape[0], step.shape[1]).bytes();
                    Planned {
                        name,
                        dtype: Dtype::U8,
                        shape: vec![bytes],
                    }
                }
                Action::Keep(dtype) => Planned {
                    name,
                    dtype,
                    shape: step.shape.clone(),
                },
            }
        });
        let signs = self.rotations.iter().map(|(name, rotation)| Planned {
            name: name.clone(),
            dtype: Dtype::I8,
            shape: vec![rotation.k()],
        });
        steps.chain(signs).collect()
    }

    fn metadata(&self) -> BTreeMap<String, String> {
        let mut metadata = BTreeMap::from([("format".to_owned(), "kozue".to_owned())]);
        for step in &self.steps {
            if let Action::Pack(signs) = &step.action {
                let spec = self.quantizer.spec(step.shape[0], step.shape[1]);
                let entry = PackedEntry::new(&spec, Some(signs.clone()));
                metadata.insert(step.name.clone(), json!(entry).to_string());
            }
        }
        metadata
    }
}

/// A conversion under way.
struct Run<'a> {
    cpu: &'a Cpu,
    checkpoint: &'a Checkpoint,
    writer: Writer,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    done: u64,
    total: u64,
}

impl Run<'_> {
    fn tensor(&mut self, step: &Step, plan: &Plan) -> Result<TensorReport, Error> {
        let (to, error) = match &step.action {
            Action::Pack(signs) => {
                let rotation = &plan.rotations[signs];
                let spec = plan.quantizer.spec(step.shape[0], step.shape[1]);
                (
                    format_name(&spec),
                    self.pack(step, &plan.quantizer, rotation)?,
                )
            }
            Action::Keep(dtype) => (dtype.name().to_owned(), self.keep(step, *dtype)?),
        };
        self.checkpoint.source.release(&step.name);
        let bytes = match &step.action {
            Action::Pack(_) => plan.quantizer.spec(step.shape[0], step.shape[1]).bytes() as u64,
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
            let quantized = quantizer
                .quantize(self.cpu, &rows, k, Some(rotation))
                .map_err(|error| self.wrong(&step.name, first, error))?;
            error += quantized.error;
            for bytes in pack_tiles(self.cpu, &quantized) {
                let bytes = bytes.map_err(|error| self.wrong(&step.name, first, error))?;
                self.writer.data(&bytes)?;
            }
            self.advance(&step.name, rows.len())?;
        }
        Ok(error)
    }

    /// Copy a tensor as floats.
    fn keep(&mut self, step: &Step, dtype: Dtype) -> Result<QuantError, Error> {
        let mut error = QuantError::default();
        if let &[n, k] = &step.shape[..] {
            let mut rows = Vec::new();
            for first in (0..n).step_by(SLICE) {
                self.read(&step.name, k, first, SLICE.min(n - first), &mut rows)?;
                self.writer.data(&encode(dtype, &rows, &mut error))?;
                self.advance(&step.name, rows.len())?;
            }
        } else {
            let len = step.shape.iter().product();
            let values = self.checkpoint.source.vector(&step.name, len)?;
            self.writer.data(&encode(dtype, &values, &mut error))?;
            self.advance(&step.name, len)?;
        }
        Ok(error)
    }

    /// Read `count` rows into `rows`, on all threads.
    fn read(
        &self,
        name: &str,
        k: usize,
        first: usize,
        count: usize,
        rows: &mut Vec<f32>,
    ) -> Result<(), Error> {
        rows.resize(count * k, 0.0);
        let source = &self.checkpoint.source;
        let parts: Vec<Mutex<(&mut [f32], Result<(), Error>)>> = rows
            .chunks_mut(TILE * k)
            .map(|part| Mutex::new((part, Ok(()))))
            .collect();
        self.cpu.run(parts.len(), &|part| {
            let mut slot = parts[part]
                .lock()
                .unwrap_or_else(|poison| poison.into_inner());
            let (rows, result) = &mut *slot;
            *result = source.rows(name, k, first + part * TILE, rows);
        });
        parts.into_iter().try_for_each(|part| {
            part.into_inner()
                .unwrap_or_else(|poison| poison.into_inner())
                .1
        })
    }

    fn wrong(&self, name: &str, first: usize, error: kozue_kernels::Error) -> Error {
        let what = format!("{error} (counted from row {first})");
        Error::tensor(self.checkpoint.path(), name, what)
    }

    fn advance(&mut self, tensor: &str, weights: usize) -> Result<(), Error> {
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

/// The packed bytes of a slice, one part for each tile of rows.
fn pack_tiles(
    cpu: &Cpu,
    slice: &Quantized,
) -> Vec<Result<kozue_kernels::AlignedBytes, kozue_kernels::Error>> {
    let whole = *slice.spec();
    let (k, groups) = (whole.k, whole.groups());
    let parts: Vec<_> = (0..whole.tiles()).map(|_| Mutex::new(None)).collect();
    cpu.run(parts.len(), &|tile| {
        let rows = tile * TILE..((tile + 1) * TILE).min(whole.n);
        let spec = kozue_kernels::PackedSpec {
            n: rows.len(),
            ..whole
        };
        let scales = &slice.scales[rows.start * groups..rows.end * groups];
        let zeros = match whole.zero {
            ZeroKind::Symmetric => Zeros::Symmetric,
            _ => Zeros::Point(&slice.zeros[rows.start * groups..rows.end * groups]),
        };
        let bytes = pack(
            &spec,
            &slice.codes[rows.start * k..rows.end * k],
            scales,
            zeros,
        );
        *parts[tile]
            .lock()
            .unwrap_or_else(|poison| poison.into_inner()) = Some(bytes);
    });
    // `run` returns after every task, so no part is empty.
    parts
        .into_iter()
        .filter_map(|part| {
            part.into_inner()
                .unwrap_or_else(|poison| poison.into_inner())
        })
        .collect()
}

/// Floats as they are stored; what rounding loses is added to `error`.
fn encode(dtype: Dtype, values: &[f32], error: &mut QuantError) -> Vec<u8> {
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
        error.squared_error += f64::from(stored - value).powi(2);
        error.squared_norm += f64::from(value).powi(2);
    }
    bytes
}

/// config.json, the text side, the report, and the licence of the source.
fn write_texts(
    checkpoint: &Checkpoint,
    source: &Path,
    dir: &Path,
    options: Options,
    report: &Report,
) -> Result<(), Error> {
    let description = checkpoint.description();
    let mut config = config_json(&description.config);
    config.insert(
        CONFIG_KEY.to_owned(),
        mark(&description.name, options, report),
    );
    write_file(&dir.join("config.json"), &pretty(config))?;
    for (name, text) in text_files(description) {
        write_file(&dir.join(name), &text)?;
    }
    write_file(&dir.join("quantization.json"), &pretty(report_json(report)))?;
    if source.is_dir() {
        copy_licence(source, dir)?;
    }
    Ok(())
}

fn mark(source: &str, options: Options, report: &Report) -> Value {
    json!({
        "version": FORMAT_VERSION,
        "size": match options.size { Size::M => "M", Size::L => "L" },
        "group": options.group,
        "bits_per_weight": (report.bits_per_weight() * 1000.0).round() / 1000.0,
        "source": source,
    })
}

fn report_json(report: &Report) -> Map<String, Value> {
    let tensors = report.tensors.iter().map(|tensor| {
        let mut map = Map::new();
        map.insert("from".to_owned(), json!(tensor.from));
        map.insert("to".to_owned(), json!(tensor.to));
        if let Some(error) = tensor.relative_error {
            map.insert(
                "relative_error".to_owned(),
                json!((error * 1e6).round() / 1e6),
            );
        }
        if let Some(note) = &tensor.note {
            map.insert("note".to_owned(), json!(note));
        }
        (tensor.name.clone(), Value::Object(map))
    });
    Map::from_iter([("tensors".to_owned(), Value::Object(tensors.collect()))])
}

/// Licences travel with the weights that they cover.
fn copy_licence(source: &Path, dir: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(source).map_err(Error::io(source, "read"))?;
    let mut seen = BTreeSet::new();
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let upper = name.to_string_lossy().to_uppercase();
        let covers = ["LICENSE", "LICENCE", "NOTICE"]
            .iter()
            .any(|word| upper.starts_with(word));
        if covers && entry.path().is_file() && seen.insert(name.clone()) {
            let to = dir.join(&name);
            fs::copy(entry.path(), &to).map_err(Error::io(&to, "write"))?;
        }
    }
    Ok(())
}
