//! Directories that lalamo writes and Uzu reads: one config.json of settings that name their own
//! type, and tensors under lalamo's names.
//!
//! Two generations are read. Up to 0.15 queries, keys and values are one matrix and gates another;
//! from 0.16 on they are one, and scales and zero points of linear layers lie by group.

mod config;
mod names;
pub(crate) mod speculator;
mod structure;
pub(crate) mod write;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::affine::{Affine, Codes, Zero};
use crate::converted::Converted;
use crate::description::{Description, GenerationDefaults};
use crate::error::Error;
use crate::hugging_face::directory_name;
use crate::shards::Shards;
use crate::source::Source;
use crate::stored::{Dense, Found, Stored, bytes, dimensions, floats, wrong};
use crate::text::plain_tokenizer;

use kozue_kernels::Rotation;
use kozue_kernels::hadamard::BLOCK as MIXED;

/// The setting of config.json that marks such a directory.
pub(crate) const CONFIG_KEY: &str = "decoder_config";

/// Opens a directory whose config.json, at `config_path`, says `map`.
pub(crate) fn open(
    dir: &Path,
    config_path: &Path,
    map: &Map<String, Value>,
) -> Result<Box<dyn Source>, Error> {
    let settings = config::Settings::read(config_path, map)?;
    let model = settings.model(config_path)?;
    let codec = &settings.token_codec_config;
    let generation = &settings.generation_config;
    let (tokenizer, bos) = plain_tokenizer(dir)?;
    let description = Description {
        name: directory_name(dir),
        config: model,
        tokenizer,
        chat_template: codec.prompt_template.clone(),
        bos_token: codec.bos_token.clone(),
        eos_token: codec.eos_token.clone(),
        generation: GenerationDefaults {
            eos: generation.stop_token_ids.clone(),
            bos,
            temperature: generation.temperature,
            top_p: generation.top_p,
            top_k: generation.top_k.filter(|&k| k > 0),
            min_p: generation.min_p,
            repetition_penalty: generation.repetition_penalty,
        },
    };
    let shards = Shards::open(dir, false)?;
    let found = names::find(&shards, &settings, &description.config)?;
    Ok(Box::new(Converted::new(description, shards, found)?))
}

/// How a matrix is stored, as the file's metadata tell under its name and `.spec`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(tag = "type")]
enum Spec {
    #[serde(rename = "FullPrecisionSpec")]
    Full { layout: Layout },
    #[serde(rename = "IntSpec")]
    Int {
        bits: u8,
        group_size: usize,
        is_symmetric: bool,
        layout: Layout,
    },
    #[serde(rename = "MLXSpec")]
    Mlx {
        bits: u8,
        group_size: usize,
        layout: Layout,
    },
    #[serde(rename = "HybridSpec")]
    Hybrid {
        quantization_spec: Box<Spec>,
        adapter_spec: Option<Value>,
        incoherence_block_size: Option<usize>,
        incoherence_processing_mode: Mode,
    },
}

/// What a row of the stored array is.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Layout {
    /// An output.
    OutputInput,
    /// An input; embeddings, whose inputs are tokens.
    InputOutput,
}

/// Which sides are rotated.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    Input,
    Output,
    InputOutput,
}

/// The matrix at `path`, whose rows are outputs of a layer or tokens of an embedding.
fn matrix(
    shards: &Shards,
    found: &mut Found,
    path: &str,
    layout: Layout,
) -> Result<(Stored, [usize; 2]), Error> {
    let spec = spec(shards, path)?;
    let Spec::Hybrid {
        quantization_spec,
        adapter_spec,
        incoherence_block_size,
        incoherence_processing_mode: mode,
    } = spec
    else {
        return plain(shards, found, path, &spec, layout);
    };
    if adapter_spec.is_some() {
        return Err(unsupported(shards, path, "a low-rank adapter"));
    }
    let inner = format!("{path}.quantized");
    let (mut stored, [n, k]) = plain(shards, found, &inner, &quantization_spec, layout)?;
    let Some(block) = incoherence_block_size else {
        return Ok((stored, [n, k]));
    };
    if block != MIXED {
        let what = format!("a rotation over {block} values (those over {MIXED} are)");
        return Err(unsupported(shards, path, &what));
    }
    let Stored::Affine(affine) = &mut stored else {
        return Err(unsupported(shards, path, "a rotation of plain floats"));
    };
    let mut signs = |side: &str, len: usize| {
        let name = format!("{path}.incoherence_signs.{side}_signs");
        found.uses([name.as_str()]);
        read_signs(shards, &name, len)
    };
    // A row of an embedding is an output of it, so its columns are what is rotated there.
    let (columns, rows) = match layout {
        Layout::OutputInput => ("input", "output"),
        Layout::InputOutput => ("output", "input"),
    };
    let (turns_columns, turns_rows) = match (mode, layout) {
        (Mode::InputOutput, _) => (true, true),
        (Mode::Input, Layout::OutputInput) | (Mode::Output, Layout::InputOutput) => (true, false),
        (Mode::Output, Layout::OutputInput) | (Mode::Input, Layout::InputOutput) => (false, true),
    };
    let rotation = |signs: &[i8]| {
        Rotation::from_signs(signs)
            .map_err(|error| wrong(shards, &inner_name(path), error.to_string()))
    };
    if turns_columns {
        affine.rotation = Some(rotation(&signs(columns, k)?)?);
    }
    if turns_rows {
        let signs = signs(rows, n)?;
        if signs.len() % MIXED != 0 {
            return Err(unsupported(shards, path, "a rotation of part of a block"));
        }
        affine.outputs = Some(
            signs
                .chunks(MIXED)
                .map(rotation)
                .collect::<Result<_, _>>()?,
        );
    }
    Ok((stored, [n, k]))
}

fn inner_name(path: &str) -> String {
    format!("{path}.quantized.weights")
}

fn unsupported(shards: &Shards, path: &str, what: &str) -> Error {
    Error::tensor(shards.dir(), path, format!("{what} is not supported"))
}

/// What the metadata say of the matrix at `path`.
fn spec(shards: &Shards, path: &str) -> Result<Spec, Error> {
    let key = format!("{path}.spec");
    let mut metadata = shards.metadata();
    let Some((file, text)) = metadata.find_map(|(file, all)| Some((file, all.get(&key)?))) else {
        return Err(Error::missing(shards.dir(), &key));
    };
    serde_json::from_str(text).map_err(|error| {
        let what = format!("its metadata are damaged or of an unknown kind: {error}");
        Error::tensor(file, path, what)
    })
}

fn plain(
    shards: &Shards,
    found: &mut Found,
    path: &str,
    spec: &Spec,
    layout: Layout,
) -> Result<(Stored, [usize; 2]), Error> {
    let weights = format!("{path}.weights");
    let (bits, group, stored_layout, kind) = match *spec {
        Spec::Full { layout: stored } => {
            let [rows, columns] = dimensions(shards, &weights)?;
            let mut values = floats(shards, &weights, &[rows, columns], false)?;
            found.uses([weights.as_str()]);
            let shape = if stored == layout {
                [rows, columns]
            } else {
                values.transposed = true;
                [columns, rows]
            };
            let dense = Dense {
                k: shape[1],
                values,
            };
            return Ok((Stored::Dense(dense), shape));
        }
        Spec::Int {
            bits,
            group_size,
            is_symmetric,
            layout,
        } => (bits, group_size, layout, Some(is_symmetric)),
        Spec::Mlx {
            bits,
            group_size,
            layout,
        } => (bits, group_size, layout, None),
        Spec::Hybrid { .. } => return Err(unsupported(shards, path, "a hybrid of a hybrid")),
    };
    if ![4, 8].contains(&bits) || group == 0 || stored_layout != layout {
        let what = format!("{bits} bits in groups of {group}, in this order,");
        return Err(unsupported(shards, path, &what));
    }
    let scales = format!("{path}.scales");
    let [n, row_bytes] = dimensions(shards, &weights)?;
    let [rows, columns] = dimensions(shards, &scales)?;
    // By group, with outputs padded to a multiple of 4, or by output.
    let by_group = rows != n;
    let (groups, shape) = if by_group {
        (rows, [rows, n.next_multiple_of(4)])
    } else {
        (columns, [n, columns])
    };
    let k = groups * group;
    if row_bytes * 8 != k * usize::from(bits) {
        let what = format!("{row_bytes} bytes a row do not hold {groups} groups of {group}");
        return Err(wrong(shards, &weights, what));
    }
    let codes = bytes(shards, &weights, &["U8"], &[n, row_bytes])?;
    found.uses([weights.as_str(), &scales]);
    let zero = match kind {
        Some(true) => Zero::Symmetric,
        Some(false) => {
            let name = format!("{path}.zero_points");
            let width = (shape[1] * usize::from(bits)).div_ceil(8);
            let points = bytes(shards, &name, &["U8"], &[shape[0], width])?;
            found.uses([name.as_str()]);
            let points = Codes {
                stacked: by_group,
                transposed: by_group,
                ..Codes::rows(points, bits, width)
            };
            Zero::Points(points, 0)
        }
        None => {
            let name = format!("{path}.biases");
            found.uses([name.as_str()]);
            Zero::Minima(floats(shards, &name, &shape, by_group)?)
        }
    };
    let affine = Affine {
        n,
        k,
        group,
        codes: Codes::rows(codes, bits, row_bytes),
        scales: floats(shards, &scales, &shape, by_group)?,
        zero,
        rotation: None,
        outputs: None,
        order: None,
    };
    Ok((Stored::Affine(Box::new(affine)), [n, k]))
}

/// Signs of a rotation, each 1 or -1 in 32 bits.
fn read_signs(shards: &Shards, name: &str, len: usize) -> Result<Vec<i8>, Error> {
    let stored = bytes(shards, name, &["I32"], &[len])?;
    let sign = |bytes: &[u8; 4]| match i32::from_le_bytes(*bytes) {
        sign @ (1 | -1) => Ok(sign as i8),
        other => Err(wrong(
            shards,
            name,
            format!("{other} is no sign; 1 and -1 are"),
        )),
    };
    stored.as_chunks::<4>().0.iter().map(sign).collect()
}
