//! Hugging Face directories: config.json, safetensors, tokenizer and chat template.

use std::path::Path;

use kozue_kernels::Matrix;
use serde_json::{Map, Value};

use crate::config::ConfigFile;
use crate::converted::Converted;
use crate::description::Description;
use crate::error::Error;
use crate::fields::Fields;
use crate::shards::Shards;
use crate::source::{Note, Source, TensorInfo};
use crate::text::TextSide;
use crate::{awq, compressed_tensors, float8, gptq, mlx};

/// A directory as transformers saves it.
pub(crate) struct HuggingFace {
    description: Description,
    shards: Shards,
}

impl HuggingFace {
    /// `config` is what the directory's config.json says.
    pub fn open(dir: &Path, config: ConfigFile) -> Result<HuggingFace, Error> {
        let shards = Shards::open(dir, config.model.tied)?;
        shards.check_floats(|_| false)?;
        Ok(HuggingFace {
            description: describe(dir, config)?,
            shards,
        })
    }
}

/// Opens a directory whose config.json, at `config_path`, says `map` and `config`: as transformers
/// saves it, or as one of the programs that quantise such directories left it.
pub(crate) fn open(
    dir: &Path,
    config_path: &Path,
    map: &Map<String, Value>,
    config: ConfigFile,
) -> Result<Box<dyn Source>, Error> {
    let fields = Fields::new(config_path, map);
    let text = fields.object("text_config")?;
    let either = |name| match fields.object(name)? {
        Some(settings) => Ok(Some(settings)),
        None => text.map_or(Ok(None), |text| text.object(name)),
    };
    let settings = either("quantization_config")?;
    let method = match settings {
        Some(settings) => settings.text("quant_method")?,
        None => None,
    };
    let mlx = either(mlx::CONFIG_KEY)?;
    if method.is_none() && mlx.is_none() && settings.is_none() {
        return Ok(Box::new(HuggingFace::open(dir, config)?));
    }
    let shards = Shards::open(dir, config.model.tied)?;
    let found = match (method, settings, mlx) {
        (Some("gptq"), Some(settings), _) => gptq::find(&shards, &settings)?,
        (Some("awq"), Some(settings), _) => awq::find(&shards, &settings)?,
        (Some("fp8" | "fbgemm_fp8"), Some(settings), _) => float8::find(&shards, &settings)?,
        (Some("compressed-tensors"), Some(settings), _) => {
            compressed_tensors::find(&shards, &settings)?
        }
        (None, _, Some(settings)) | (None, Some(settings), None) => {
            mlx::find(&shards, &settings, &config.model)?
        }
        (method, ..) => {
            let what = format!(
                "{:?} is not supported; Kozue reads gptq, awq, fp8, compressed-tensors and MLX's",
                method.unwrap_or_default()
            );
            return Err(fields.error("quantization_config.quant_method", what));
        }
    };
    let description = describe(dir, config)?;
    Ok(Box::new(Converted::new(description, shards, found)?))
}

/// The description of a directory, from its config.json and the files beside it.
pub(crate) fn describe(dir: &Path, config: ConfigFile) -> Result<Description, Error> {
    let text = TextSide::read(dir, &config)?;
    Ok(Description {
        name: directory_name(dir),
        config: config.model,
        tokenizer: text.tokenizer,
        chat_template: text.chat_template,
        bos_token: text.bos_token,
        eos_token: text.eos_token,
        generation: text.generation,
    })
}

/// The directory's name; in the Hugging Face cache, where that is a hash, the repository's.
pub(crate) fn directory_name(dir: &Path) -> String {
    // "." and ".." have a name once they are resolved.
    let full = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    let part = |path: &Path| Some(path.file_name()?.to_string_lossy().into_owned());
    // models--OWNER--NAME/snapshots/HASH
    let cached = full
        .parent()
        .filter(|parent| parent.ends_with("snapshots"))
        .and_then(|snapshots| part(snapshots.parent()?))
        .and_then(|folder| {
            Some(
                folder
                    .strip_prefix("models--")?
                    .rsplit("--")
                    .next()?
                    .to_owned(),
            )
        });
    cached
        .or_else(|| part(&full))
        .unwrap_or_else(|| "model".to_owned())
}

impl Source for HuggingFace {
    fn description(&self) -> &Description {
        &self.description
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        self.shards.infos().collect()
    }

    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        self.shards.matrix(name, n, k)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        self.shards.vector(name, len)
    }

    fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error> {
        self.shards.rows(name, k, first, out)
    }

    fn release(&self, name: &str) {
        self.shards.release(name);
    }

    fn notes(&self) -> Vec<Note> {
        Vec::new()
    }
}
