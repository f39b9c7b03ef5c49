//! What a conversion did, and the files that tell it.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::input::Input;
use super::{Options, Size};
use crate::destination::write_file;
use crate::error::Error;
use crate::fields::pretty;
use crate::kozue::{CONFIG_KEY, FORMAT_VERSION};

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

/// What [`quantize`](super::quantize()) or [`export`](crate::export()) did.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// In the order of the new file.
    pub tensors: Vec<TensorReport>,
    /// What the new format has no place for, one line each.
    pub notes: Vec<String>,
    /// Bytes of the model's tensors in the source.
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

/// config.json, the text side, the report, and the licence of the source.
pub(super) fn write_texts(
    input: &Input,
    source: &Path,
    dir: &Path,
    options: Options,
    report: &Report,
) -> Result<(), Error> {
    let (mut config, texts) = input.texts();
    config.insert(CONFIG_KEY.to_owned(), mark(input.name(), options, report));
    write_file(&dir.join("config.json"), &pretty(config))?;
    for (name, text) in texts {
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
        "size": letter(options.size),
        "head": letter(options.head.unwrap_or(options.size)),
        "group": options.group,
        "bits_per_weight": (report.bits_per_weight() * 1000.0).round() / 1000.0,
        "source": source,
    })
}

fn letter(size: Size) -> &'static str {
    match size {
        Size::M => "M",
        Size::L => "L",
    }
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
pub(crate) fn copy_licence(source: &Path, dir: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(source).map_err(Error::io(source, "read"))?;
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let upper = name.to_string_lossy().to_uppercase();
        let covers = ["LICENSE", "LICENCE", "NOTICE"]
            .iter()
            .any(|word| upper.starts_with(word));
        if covers && entry.path().is_file() {
            let to = dir.join(&name);
            fs::copy(entry.path(), &to).map_err(Error::io(&to, "write"))?;
        }
    }
    Ok(())
}
