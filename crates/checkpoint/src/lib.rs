//! Checkpoints: one description and one way to read tensors, whatever the format.
//!
//! [`Checkpoint::open`] reads Hugging Face directories, GGUF files, Kozue's own directories and those
//! of some other programs (`docs/formats.md`); [`quantize`] writes Kozue's, which
//! `docs/checkpoint.md` documents.

mod affine;
mod awq;
mod compressed_tensors;
mod config;
mod converted;
pub mod description;
mod destination;
mod drafter;
mod error;
mod export;
mod fields;
mod fingerprint;
mod float8;
mod fused_experts;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod gguf;
mod gptq;
mod hugging_face;
mod kozue;
mod lalamo;
mod layout;
mod mapping;
mod mlx;
mod placed;
mod quantize;
mod reads;
mod repository;
mod resident;
mod safetensors;
mod shards;
mod source;
mod stored;
mod text;
mod writer;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use kozue_kernels::Matrix;

pub use description::Description;
pub use drafter::{
    DFLASH, DFlashConfig, DraftMask, Drafter, DrafterKind, Network, SPECULATOR, WEAVER,
    WeaverConfig,
};
pub use error::Error;
pub use export::{ExportOptions, Floats, Format, export};
pub use fingerprint::fingerprint;
pub use layout::{EMBED, HEAD};
pub use quantize::{Conversion, Options, Progress, Report, Rounded, Size, TensorReport, quantize};
pub use reads::Tensors;
pub use repository::{RepositoryFiles, repository_files};
pub use source::{InMemory, Note, TensorInfo};

use config::ConfigFile;
use fields::{exists, read_object};
use gguf::Gguf;
use kozue::Kozue;
use reads::Reads;
use source::Source;

/// An opened model: its description and its tensors, checked against each other.
pub struct Checkpoint {
    source: Box<dyn Source>,
    reads: Reads,
}

impl Checkpoint {
    /// Open the model at `path`: a directory with a config.json (Hugging Face's or Kozue's), or
    /// a GGUF file. Tensors are mapped, not read; names and shapes are all checked here.
    pub fn open(path: &Path) -> Result<Checkpoint, Error> {
        let source = open_source(path)?;
        let tensors = source.tensors();
        layout::check(path, &source.description().config, &tensors)?;
        Ok(Checkpoint {
            reads: Reads::new(path, tensors),
            source,
        })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        self.reads.path()
    }

    /// All that is known of the model besides its tensors.
    pub fn description(&self) -> &Description {
        self.source.description()
    }

    /// Whether there is a tensor of this name that is not set aside.
    pub fn has(&self, name: &str) -> bool {
        self.reads.get(name).is_some_and(|info| !info.aside)
    }

    /// Whether there is a tensor of this name, set aside or not; either can be read.
    pub fn holds(&self, name: &str) -> bool {
        self.reads.get(name).is_some()
    }

    /// The matrix `name` with `n` outputs and `k` inputs; mapped wherever the format allows.
    pub fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        self.reads.mark(name)?;
        self.source.matrix(name, n, k)
    }

    /// The tensor `name` of `len` values, flattened (`[c, 1, k]` gives `c * k`), as f32.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        self.reads.mark(name)?;
        self.source.vector(name, len)
    }

    /// Rows `first ..` of a matrix with `k` inputs, as many as fit `out`, exactly as stored.
    ///
    /// # Errors
    /// If there are no such rows.
    pub fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error> {
        self.source.rows(name, k, first, out)
    }

    /// Check that every tensor was read, save those recognised as belonging to other parts.
    pub fn finish(&self) -> Result<(), Error> {
        self.reads.finish()
    }

    /// Every tensor, sorted by name.
    pub fn tensors(&self) -> Vec<&TensorInfo> {
        self.reads.all()
    }

    /// What was done to the values at load, one note for each kind of tensor; empty if they are as
    /// stored.
    pub fn source_notes(&self) -> Vec<Note> {
        self.source.notes()
    }
}

impl Tensors for Checkpoint {
    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        Checkpoint::matrix(self, name, n, k)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        Checkpoint::vector(self, name, len)
    }
}

/// Choose the loader by what lies at `path`.
fn open_source(path: &Path) -> Result<Box<dyn Source>, Error> {
    let not_a_model = |what: &str| {
        Err(Error::NotAModel {
            path: path.to_path_buf(),
            what: what.to_owned(),
        })
    };
    let kind = std::fs::metadata(path).map_err(Error::io(path, "open"))?;
    if !kind.is_dir() {
        if !kind.is_file() {
            // Opening a pipe would wait for its writer.
            return not_a_model("no regular file; give a GGUF file or a model's directory");
        }
        let mut magic = [0; 4];
        let mut file = File::open(path).map_err(Error::io(path, "open"))?;
        let named = path
            .extension()
            .is_some_and(|extension| extension == "gguf");
        if named || file.read_exact(&mut magic).is_ok() && magic == *b"GGUF" {
            return Ok(Box::new(Gguf::open(path)?));
        }
        return not_a_model("a file that is no GGUF; give a GGUF file or a model's directory");
    }
    let config_path = path.join("config.json");
    if !exists(&config_path)? {
        return not_a_model("there is no config.json; give a model's directory or a GGUF file");
    }
    let map = read_object(&config_path)?;
    if drafter::marks(&map).is_some() {
        return not_a_model(
            "a drafter's folder; give the model that it was made for, and this folder with --draft-model",
        );
    }
    if map.contains_key(lalamo::CONFIG_KEY) {
        return lalamo::open(path, &config_path, &map);
    }
    let config = ConfigFile::from_object(&config_path, &map)?;
    if map.contains_key(kozue::CONFIG_KEY) {
        Ok(Box::new(Kozue::open(path, &config_path, &map, config)?))
    } else {
        hugging_face::open(path, &config_path, &map, config)
    }
}
