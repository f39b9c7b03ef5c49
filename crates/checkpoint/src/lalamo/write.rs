//! Writing directories as lalamo does from 0.16 on.
//!
//! Codes, zero points and signs are moved as they are; scales get the type of floats that is asked
//! for. Rows that are floats in the source but share a matrix of lalamo's with codes are rounded to
//! codes of that kind.

mod codes;
mod settings;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use kozue_kernels::{PackedSpec, QuantError, Rotation, ZeroKind};
use serde_json::json;

use super::structure::{Joined, Plain, Run as Rows, Structure, structure};
use super::{Layout, Mode, Spec};
use crate::Checkpoint;
use crate::affine::Slice;
use crate::destination::{WRITER, WRITER_KEY};
use crate::error::Error;
use crate::export::Floats;
use crate::kozue::format_name;
use crate::quantize::{Report, Run, SLICE, TensorReport, code_rows};
use crate::safetensors::Dtype;
use crate::writer::{Planned, Writer};

use kozue_kernels::hadamard::BLOCK as MIXED;

use codes::{Kind, PADDED, arranged, kind, narrow, quantizer, regrouped};

/// See [`crate::export::Plan`].
pub(crate) struct Plan<'a> {
    checkpoint: &'a Checkpoint,
    structure: Structure,
    /// How each joined matrix is stored.
    kinds: Vec<Kind>,
    steps: Vec<Step>,
    metadata: BTreeMap<String, String>,
    notes: Vec<String>,
}

/// What was lost of a joined matrix.
#[derive(Clone, Copy, Default)]
struct Lost {
    /// By the type of floats: scales where it is codes.
    floats: QuantError,
    /// Of rows that became codes.
    rounded: QuantError,
}

struct Step {
    planned: Planned,
    content: Content,
}

/// What a tensor of the new file holds; numbers are those of joined matrices.
enum Content {
    Plain(usize),
    Biases(usize),
    Floats(usize),
    Codes(usize),
    Scales(usize),
    Zeros(usize),
    Signs(Rotation),
}

impl<'a> Plan<'a> {
    pub fn new(checkpoint: &'a Checkpoint, floats: Floats) -> Result<Plan<'a>, Error> {
        let structure = structure(&checkpoint.description().config, true);
        settings::check(checkpoint)?;
        let mut plan = Plan {
            kinds: structure
                .joined
                .iter()
                .map(|joined| kind(checkpoint, joined))
                .collect(),
            checkpoint,
            structure,
            steps: Vec::new(),
            metadata: BTreeMap::from([(WRITER_KEY.to_owned(), WRITER.to_owned())]),
            notes: Vec::new(),
        };
        for number in 0..plan.structure.joined.len() {
            plan.matrix(number, floats.dtype());
        }
        for (number, plain) in plan.structure.plain.iter().enumerate() {
            // Of a convolution's shape lalamo has no middle.
            let shape: Vec<usize> = match plain.shape[..] {
                [channels, 1, taps] => vec![channels, taps],
                _ => plain.shape.clone(),
            };
            plan.steps.push(step(
                &plain.path,
                Dtype::F32,
                &shape,
                Content::Plain(number),
            ));
        }
        // Wider values first, so that every tensor is aligned without padding.
        plan.steps.sort_by_key(|step| 8 - step.planned.dtype.size());
        if checkpoint
            .tensors()
            .iter()
            .any(|info| info.name.starts_with(crate::layout::MTP))
        {
            plan.notes
                .push("the multi-token prediction head: left out, as lalamo has none".to_owned());
        }
        Ok(plan)
    }

    /// The tensors and the spec of a joined matrix.
    fn matrix(&mut self, number: usize, floats: Dtype) {
        let joined = &self.structure.joined[number];
        let (n, path, layout) = (joined.n(), &joined.path, joined.layout);
        let steps = &mut self.steps;
        if let Some(biases) = &joined.biases {
            steps.push(step(biases, floats, &[n], Content::Biases(number)));
        }
        let spec = match &self.kinds[number] {
            Kind::Floats => {
                let shape = [n, joined.k];
                let name = format!("{path}.weights");
                steps.push(step(&name, floats, &shape, Content::Floats(number)));
                Spec::Full { layout }
            }
            Kind::Codes(form, rotation) => {
                let (bits, groups) = (usize::from(form.bits), form.groups());
                let inner = match rotation {
                    Some(_) => format!("{path}.quantized"),
                    None => path.clone(),
                };
                let mut put = |end: &str, dtype, shape: [usize; 2], content| {
                    steps.push(step(&format!("{inner}.{end}"), dtype, &shape, content));
                };
                let by_group = layout == Layout::OutputInput;
                let (rows, width) = if by_group {
                    (groups, n.next_multiple_of(PADDED))
                } else {
                    (n, groups)
                };
                put(
                    "weights",
                    Dtype::U8,
                    [n, joined.k * bits / 8],
                    Content::Codes(number),
                );
                put("scales", floats, [rows, width], Content::Scales(number));
                let quantized = match form.zero {
                    ZeroKind::Min => {
                        put("biases", floats, [rows, width], Content::Zeros(number));
                        Spec::Mlx {
                            bits: form.bits,
                            group_size: form.group,
                            layout,
                        }
                    }
                    zero => {
                        if zero == ZeroKind::Point {
                            let shape = [rows, (width * bits).div_ceil(8)];
                            put("zero_points", Dtype::U8, shape, Content::Zeros(number));
                        }
                        Spec::Int {
                            bits: form.bits,
                            group_size: form.group,
                            is_symmetric: zero == ZeroKind::Symmetric,
                            layout,
                        }
                    }
                };
                match rotation {
                    None => quantized,
                    Some(rotation) => {
                        // A row of an embedding is an output of it.
                        let (side, mode) = match layout {
                            Layout::OutputInput => ("input", Mode::Input),
                            Layout::InputOutput => ("output", Mode::Output),
                        };
                        let name = format!("{path}.incoherence_signs.{side}_signs");
                        let content = Content::Signs(rotation.clone());
                        steps.push(step(&name, Dtype::Other("I32", 4), &[joined.k], content));
                        Spec::Hybrid {
                            quantization_spec: Box::new(quantized),
                            adapter_spec: None,
                            incoherence_block_size: Some(MIXED),
                            incoherence_processing_mode: mode,
                        }
                    }
                }
            }
        };
        self.metadata
            .insert(format!("{path}.spec"), json!(spec).to_string());
    }

    fn size(&self, content: &Content) -> usize {
        let joined = &self.structure.joined;
        match content {
            Content::Floats(number)
            | Content::Codes(number)
            | Content::Scales(number)
            | Content::Zeros(number) => joined[*number].n() * joined[*number].k,
            _ => 0,
        }
    }

    /// What of a matrix of codes was floats before.
    fn rounded(&self, joined: &Joined, lost: QuantError) -> Option<String> {
        let was_floats = |run: &&Rows| {
            self.checkpoint
                .source
                .codes(&format!("{}.weight", run.name))
                .is_none()
        };
        let names: Vec<&str> = joined
            .runs
            .iter()
            .filter(was_floats)
            .filter_map(|run| run.name.rsplit('.').next())
            .collect();
        let error = 100.0 * lost.relative_rms();
        (!names.is_empty())
            .then(|| format!("{} rounded to codes, error {error:.3}%", names.join(", ")))
    }

    fn tensor(&self, run: &mut Run, step: &Step, lost: &mut [Lost]) -> Result<(), Error> {
        let Planned { name, dtype, .. } = &step.planned;
        match &step.content {
            Content::Signs(rotation) => {
                let bytes: Vec<u8> = rotation
                    .signs()
                    .iter()
                    .flat_map(|&sign| (sign as i32).to_le_bytes())
                    .collect();
                run.writer.data(&bytes)
            }
            Content::Plain(number) => {
                let Plain { name, shape, .. } = &self.structure.plain[*number];
                let values = run.input.vector(name, shape.iter().product())?;
                run.floats(name, *dtype, &values, &mut QuantError::default())
            }
            Content::Biases(number) => {
                let joined = &self.structure.joined[*number];
                for part in &joined.runs {
                    let name = format!("{}.bias", part.name);
                    let all = run.input.vector(&name, self.len(&name)?)?;
                    let values = &all[part.first..part.first + part.count];
                    run.floats(&name, *dtype, values, &mut lost[*number].floats)?;
                }
                Ok(())
            }
            Content::Floats(number) => {
                let joined = &self.structure.joined[*number];
                let mut rows = Vec::new();
                for part in &joined.runs {
                    let source = format!("{}.weight", part.name);
                    for at in (0..part.count).step_by(SLICE) {
                        let count = SLICE.min(part.count - at);
                        run.read(&source, joined.k, part.first + at, count, &mut rows)?;
                        run.release(&source, rows.len());
                        run.floats(&source, *dtype, &rows, &mut lost[*number].floats)?;
                        run.advance(name, rows.len())?;
                    }
                }
                Ok(())
            }
            Content::Codes(number) => {
                let Kind::Codes(spec, _) = &self.kinds[*number] else {
                    return Ok(());
                };
                self.slices(run, *number, name, &mut |run, slice, error| {
                    lost[*number].rounded += error;
                    run.writer.data(&narrow(&slice.codes, spec.bits))
                })
            }
            Content::Scales(number) | Content::Zeros(number) => {
                let Kind::Codes(spec, _) = &self.kinds[*number] else {
                    return Ok(());
                };
                let zeros = matches!(step.content, Content::Zeros(_));
                let mut values = Vec::new();
                self.slices(run, *number, name, &mut |_, slice, _| {
                    values.extend(if zeros { slice.zeros } else { slice.scales });
                    Ok(())
                })?;
                let joined = &self.structure.joined[*number];
                let (values, width) = arranged(values, joined.layout, joined.n(), spec.groups());
                if *dtype != Dtype::U8 {
                    return run.floats(name, *dtype, &values, &mut lost[*number].floats);
                }
                let top = f32::from((1u16 << spec.bits) - 1);
                if let Some(wrong) = values.iter().find(|zero| !(0.0..=top).contains(*zero)) {
                    let what = format!(
                        "has a zero point of {wrong}, but lalamo's have {} bits; choose --format hf",
                        spec.bits
                    );
                    return Err(Error::tensor(run.path, name, what));
                }
                for row in values.chunks_exact(width) {
                    let row: Vec<u8> = row.iter().map(|&zero| zero as u8).collect();
                    run.writer.data(&narrow(&row, spec.bits))?;
                }
                Ok(())
            }
        }
    }

    /// Values of a vector of the source.
    fn len(&self, name: &str) -> Result<usize, Error> {
        let info = self.checkpoint.reads.get(name);
        let info = info.ok_or_else(|| Error::missing(self.checkpoint.path(), name))?;
        Ok(info.shape.iter().product())
    }

    /// Every row of a matrix of codes, in slices, with what rounding floats to codes lost.
    fn slices(
        &self,
        run: &mut Run,
        number: usize,
        name: &str,
        take: &mut dyn FnMut(&mut Run, Slice, QuantError) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let joined = &self.structure.joined[number];
        let Kind::Codes(spec, rotation) = &self.kinds[number] else {
            return Ok(());
        };
        for part in &joined.runs {
            let source = format!("{}.weight", part.name);
            let codes = self.checkpoint.source.codes(&source);
            for at in (0..part.count).step_by(SLICE) {
                let count = SLICE.min(part.count - at);
                let rows = part.first + at..part.first + at + count;
                let (slice, error) = match &codes {
                    Some(codes) => {
                        let own = codes.spec();
                        let slice = code_rows(run.cpu, codes.as_ref(), rows);
                        (regrouped(slice, &own, spec), QuantError::default())
                    }
                    None => self.round(run, &source, joined.k, rows, spec, rotation.as_ref())?,
                };
                take(run, slice, error)?;
                run.release(&source, count * joined.k);
                run.advance(name, count * joined.k)?;
            }
        }
        Ok(())
    }

    /// Rows of floats as codes of a kind that [`quantizer`] makes.
    fn round(
        &self,
        run: &Run,
        source: &str,
        k: usize,
        rows: Range<usize>,
        spec: &PackedSpec,
        rotation: Option<&Rotation>,
    ) -> Result<(Slice, QuantError), Error> {
        let wrong = |what: String| Error::tensor(run.path, source, what);
        let quantizer = quantizer(spec).ok_or_else(|| wrong("cannot be rounded".to_owned()))?;
        let mut values = Vec::new();
        run.read(source, k, rows.start, rows.len(), &mut values)?;
        let made = quantizer
            .quantize(run.cpu, &values, k, rotation)
            .map_err(|error| wrong(error.to_string()))?;
        let zeros = match spec.zero {
            ZeroKind::Point => made.zeros.iter().map(|&zero| f32::from(zero)).collect(),
            _ => Vec::new(),
        };
        let slice = Slice {
            scales: made.scales.iter().map(|scale| scale.to_f32()).collect(),
            zeros,
            codes: made.codes,
        };
        Ok((slice, made.error))
    }
}

impl crate::export::Plan for Plan<'_> {
    fn values(&self) -> u64 {
        self.steps
            .iter()
            .map(|step| self.size(&step.content) as u64)
            .sum()
    }

    fn writer(&self, path: &Path) -> Result<Writer, Error> {
        let planned: Vec<&Planned> = self.steps.iter().map(|step| &step.planned).collect();
        Writer::create(path, &planned, &self.metadata)
    }

    fn write(&self, mut run: Run) -> Result<Report, Error> {
        let mut lost = vec![Lost::default(); self.structure.joined.len()];
        for step in &self.steps {
            self.tensor(&mut run, step, &mut lost)?;
        }
        run.writer.finish()?;
        let all = self.checkpoint.tensors();
        let info = |name: &str| all.iter().find(|info| info.name == name);
        let matrices = self
            .structure
            .joined
            .iter()
            .enumerate()
            .map(|(number, joined)| {
                let first = format!("{}.weight", joined.runs[0].name);
                let (to, note) = match &self.kinds[number] {
                    Kind::Floats => (None, None),
                    Kind::Codes(spec, _) => (
                        Some(format_name(spec)),
                        self.rounded(joined, lost[number].rounded),
                    ),
                };
                let inside =
                    |step: &&Step| step.planned.name.starts_with(&format!("{}.", joined.path));
                TensorReport {
                    name: joined.path.clone(),
                    shape: vec![joined.n(), joined.k],
                    from: info(&first).map_or(String::new(), |info| info.format.clone()),
                    to: to.unwrap_or_else(|| {
                        self.steps
                            .iter()
                            .find(inside)
                            .map_or("", |step| step.planned.dtype.name())
                            .to_owned()
                    }),
                    bytes: self
                        .steps
                        .iter()
                        .filter(inside)
                        .map(|step| step.planned.bytes())
                        .sum(),
                    relative_error: Some(lost[number].floats.relative_rms())
                        .filter(|&error| error > 0.0),
                    note,
                }
            });
        let layout = crate::layout::layout(&self.checkpoint.description().config);
        Ok(Report {
            tensors: matrices.collect(),
            notes: self.notes.clone(),
            bytes_before: run.input.bytes(),
            bytes_after: self.steps.iter().map(|step| step.planned.bytes()).sum(),
            weights: layout
                .iter()
                .map(|slot| slot.shape.iter().product::<usize>() as u64)
                .sum(),
        })
    }

    fn write_texts(&self, dir: &Path) -> Result<(), Error> {
        settings::write_texts(self.checkpoint, dir)
    }
}

fn step(name: &str, dtype: Dtype, shape: &[usize], content: Content) -> Step {
    Step {
        planned: Planned {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
        },
        content,
    }
}
