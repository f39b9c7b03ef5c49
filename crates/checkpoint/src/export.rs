//! From any checkpoint to the formats of other programs, tensor by tensor.
//!
//! As in [`quantize`](crate::quantize()), memory depends on the width of the model and not on its size,
//! and what is written appears under its name only when it is complete.

mod hugging_face;

use std::ops::ControlFlow;
use std::path::Path;

use kozue_kernels::Cpu;

use crate::Checkpoint;
use crate::description::{Description, Family, ModelConfig, RopeScaling, TokenizerSource};
use crate::destination::{Destination, check_apart, check_file, check_target};
use crate::error::Error;
use crate::gguf;
use crate::lalamo;
use crate::quantize::input::Input;
use crate::quantize::report::copy_licence;
use crate::quantize::{Progress, Report, Run};
use crate::safetensors::Dtype;
use crate::shards::SINGLE;
use crate::writer::Writer;

/// How a GGUF file begins.
const GGUF: &[u8] = b"GGUF";
/// What it is called until it is complete.
const GGUF_FILE: &str = "model.gguf";

/// What [`export`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A directory as transformers saves it: plain floats under Hugging Face's names.
    HuggingFace,
    /// A directory of lalamo, which Uzu reads: codes where the source has codes, else floats.
    Lalamo,
    /// A GGUF file, which llama.cpp and what builds on it read.
    Gguf,
}

/// How floats are stored: weights that are no codes, and the scales of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Floats {
    /// 8 bits of precision.
    Bf16,
    /// 11 bits of precision, between 6e-8 and 65504.
    F16,
    /// 24 bits of precision.
    F32,
    /// Codes of 8 bits in blocks of 32; only GGUF has them.
    Q8_0,
}

/// What [`export`] is to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// The format.
    pub format: Format,
    /// The type of floats.
    pub floats: Floats,
    /// Whether what Kozue wrote to the same place before is replaced.
    pub force: bool,
}

/// What a format makes of each tensor: everything that is known before the first weight is read.
pub(crate) trait Plan {
    /// Values that will be read in all, for the progress.
    fn values(&self) -> u64;
    /// The file, with its header.
    fn writer(&self, path: &Path) -> Result<Writer, Error>;
    /// Reads every tensor and writes what becomes of it.
    fn write(&self, run: Run) -> Result<Report, Error>;
    /// Writes what a directory holds beside the weights.
    fn write_texts(&self, _dir: &Path) -> Result<(), Error> {
        Ok(())
    }
}

impl Floats {
    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Floats::Bf16 => Dtype::Bf16,
            Floats::F16 => Dtype::F16,
            // `export` lets Q8_0 through to GGUF alone.
            Floats::F32 | Floats::Q8_0 => Dtype::F32,
        }
    }
}

/// Write the model at `source` as `target` in another program's format. `progress` is called after
/// every slice of rows; where it breaks, nothing is left behind.
///
/// # Errors
/// If the source is damaged, the format cannot hold the model, the target exists (see
/// [`ExportOptions::force`]), or writing fails.
pub fn export(
    cpu: &Cpu,
    source: &Path,
    target: &Path,
    options: ExportOptions,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Report, Error> {
    let file = options.format == Format::Gguf;
    check_apart(source, target)?;
    if file {
        check_file(target, GGUF, options.force)?;
    } else {
        check_target(target, options.force)?;
        if options.floats == Floats::Q8_0 {
            let what = "cannot be made: only --format gguf has q8_0; choose bf16, f16 or f32";
            return Err(Error::file(target, what));
        }
    }
    let input = Input::open(source)?;
    let input = &input;
    let Input::Model(checkpoint) = input else {
        return Err(Error::file(
            source,
            "is a drafter's folder; only models are exported",
        ));
    };
    let destination = if file {
        Destination::create_file(target, GGUF, options.force)?
    } else {
        Destination::create(target, options.force)?
    };
    let dir = destination.dir();
    let weights = dir.join(if file { GGUF_FILE } else { SINGLE });
    let plan: Box<dyn Plan> = match options.format {
        Format::HuggingFace => Box::new(hugging_face::Plan::new(input, options.floats)),
        Format::Lalamo => Box::new(lalamo::write::Plan::new(checkpoint, options.floats)?),
        Format::Gguf => Box::new(gguf::write::Plan::new(input, checkpoint, options.floats)?),
    };
    let (writer, values) = (plan.writer(&weights)?, plan.values());
    let mut report = plan.write(Run::new(cpu, source, input, writer, values, progress))?;
    plan.write_texts(dir)?;
    if source.is_dir() && !file {
        copy_licence(source, dir)?;
    }
    let written = Checkpoint::open(if file { &weights } else { dir })?;
    check(
        source,
        checkpoint.description(),
        written.description(),
        &mut report,
    )?;
    drop(written);
    if file {
        destination.finish_file(GGUF_FILE, GGUF)?;
    } else {
        destination.finish()?;
    }
    Ok(report)
}

/// Compares what was written with what was read: an error if it is another model, a line for each
/// setting of the text side that the format has no place for.
fn check(
    source: &Path,
    before: &Description,
    after: &Description,
    report: &mut Report,
) -> Result<(), Error> {
    if !is_same(&before.config, &after.config) {
        let what = "the format cannot hold a model of this shape; choose another --format";
        return Err(Error::file(source, what));
    }
    // GGUF has a tokenizer's parts, from which its text is made anew.
    let text = |description: &Description| match &description.tokenizer {
        TokenizerSource::Json(text) => Some(text.clone()),
        TokenizerSource::Gguf(_) => None,
    };
    let sorted = |ids: &[u32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    let tokenizer = match (text(before), text(after)) {
        (Some(before), Some(after)) => before == after,
        _ => true,
    };
    let (a, b) = (&before.generation, &after.generation);
    let same = [
        ("the tokenizer", tokenizer),
        (
            "the chat template",
            before.chat_template == after.chat_template,
        ),
        ("the token before a text", a.bos == b.bos),
        (
            "the tokens that end an answer",
            sorted(&a.eos) == sorted(&b.eos),
        ),
        (
            "the defaults of sampling",
            (
                a.temperature,
                a.top_p,
                a.top_k,
                a.min_p,
                a.repetition_penalty,
            ) == (
                b.temperature,
                b.top_p,
                b.top_k,
                b.min_p,
                b.repetition_penalty,
            ),
        ),
    ];
    let lost = same.iter().filter(|(_, same)| !same);
    report.notes.extend(
        lost.map(|(what, _)| format!("{what}: changed, as the format has no place for it")),
    );
    Ok(())
}

/// Whether two descriptions are of the same model; rotary frequencies may be told in two ways, in f32.
fn is_same(a: &ModelConfig, b: &ModelConfig) -> bool {
    let frequencies = |config: &ModelConfig| config.attention.rope.inverse_frequencies();
    let near = |(a, b): (f64, f64)| (a / b - 1.0).abs() < 1e-6;
    let plain = |config: &ModelConfig| {
        let mut config = config.clone();
        config.attention.rope.theta = f64::from(config.attention.rope.theta as f32);
        config.attention.rope.scaling = RopeScaling::None;
        if let Some(sliding) = &mut config.attention.sliding {
            sliding.rope.theta = f64::from(sliding.rope.theta as f32);
        } else if config.family == Family::Mistral {
            // Without windows it is a Llama, and GGUF calls it so.
            config.family = Family::Llama;
        }
        config
    };
    plain(a) == plain(b) && frequencies(a).into_iter().zip(frequencies(b)).all(near)
}
