//! The text side of a Hugging Face directory: tokenizer, chat template, sampling and stopping.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::config::ConfigFile;
use crate::description::{Description, GenerationDefaults, TokenizerSource};
use crate::error::Error;
use crate::fields::{Fields, exists, pretty, read_object, read_text, shortest};

/// What a checkpoint says of text: the files beside the weights, or a GGUF file's metadata.
pub(crate) struct TextSide {
    pub tokenizer: TokenizerSource,
    pub chat_template: Option<String>,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub generation: GenerationDefaults,
}

impl TextSide {
    /// Read them out of `dir`.
    pub fn read(dir: &Path, config: &ConfigFile) -> Result<TextSide, Error> {
        let (path, tokenizer) = tokenizer_json(dir)?;
        let ids = TokenizerIds::parse(&path, &tokenizer)?;

        let path = dir.join("tokenizer_config.json");
        let map = optional_object(&path)?;
        let settings = Fields::new(&path, &map);
        let bos_token = special_token(&settings, "bos_token")?;
        let eos_token = special_token(&settings, "eos_token")?;
        let chat_template = chat_template(dir, &settings)?;
        let add_bos = settings.flag("add_bos_token")?;

        let path = dir.join("generation_config.json");
        let map = optional_object(&path)?;
        let mut generation = generation(&Fields::new(&path, &map), config, &eos_token, &ids)?;
        generation.bos = match add_bos {
            Some(false) => None,
            Some(true) => bos_token
                .as_deref()
                .and_then(|text| ids.of(text))
                .or(generation.bos),
            // Newer tokenizers say it by the template that they put around a text.
            None => ids.first,
        };
        Ok(TextSide {
            tokenizer: TokenizerSource::Json(tokenizer),
            chat_template,
            bos_token,
            eos_token,
            generation,
        })
    }
}

/// The tokenizer of a directory that has no other file of text, and the token that it puts before a
/// text, if it does.
pub(crate) fn plain_tokenizer(dir: &Path) -> Result<(TokenizerSource, Option<u32>), Error> {
    let (path, tokenizer) = tokenizer_json(dir)?;
    let ids = TokenizerIds::parse(&path, &tokenizer)?;
    Ok((TokenizerSource::Json(tokenizer), ids.first))
}

/// The text of a directory's tokenizer.json, with its path.
fn tokenizer_json(dir: &Path) -> Result<(PathBuf, String), Error> {
    let path = dir.join("tokenizer.json");
    if !exists(&path)? {
        return Err(Error::file(
            &path,
            "is missing; fetch the model's tokenizer.json too",
        ));
    }
    let text = read_text(&path)?;
    Ok((path, text))
}

fn optional_object(path: &Path) -> Result<Map<String, Value>, Error> {
    if exists(path)? {
        read_object(path)
    } else {
        Ok(Map::new())
    }
}

/// The token ids that matter here, out of a tokenizer.json.
struct TokenizerIds {
    added: Vec<(String, u32)>,
    /// The id that the post-processor puts before a text.
    first: Option<u32>,
}

impl TokenizerIds {
    fn parse(path: &Path, text: &str) -> Result<TokenizerIds, Error> {
        // The vocabulary is not needed here and is skipped without being built.
        #[derive(serde::Deserialize)]
        struct Parts {
            #[serde(default)]
            added_tokens: Vec<Added>,
            #[serde(default)]
            post_processor: Value,
        }
        #[derive(serde::Deserialize)]
        struct Added {
            id: u32,
            content: String,
        }
        let parts: Parts = serde_json::from_str(text)
            .map_err(|error| Error::file(path, format!("not a tokenizer.json: {error}")))?;
        let added = parts
            .added_tokens
            .into_iter()
            .map(|token| (token.content, token.id))
            .collect();
        Ok(TokenizerIds {
            added,
            first: first_special(&parts.post_processor),
        })
    }

    fn of(&self, text: &str) -> Option<u32> {
        self.added
            .iter()
            .find(|(content, _)| content == text)
            .map(|&(_, id)| id)
    }
}

/// The special token at the start of a template such as `<s> $A`.
fn first_special(processor: &Value) -> Option<u32> {
    match processor["type"].as_str()? {
        "TemplateProcessing" => {
            let name = processor["single"][0]["SpecialToken"]["id"].as_str()?;
            let id = processor["special_tokens"][name]["ids"][0].as_u64()?;
            u32::try_from(id).ok()
        }
        "Sequence" => processor["processors"]
            .as_array()?
            .iter()
            .find_map(first_special),
        _ => None,
    }
}

/// A token's text, written plainly or as an object with its `content`.
fn special_token(settings: &Fields, name: &str) -> Result<Option<String>, Error> {
    let text = match settings.get(name) {
        None => return Ok(None),
        Some(Value::Object(token)) => token.get("content").and_then(Value::as_str),
        Some(other) => other.as_str(),
    };
    match text {
        Some(text) => Ok(Some(text.to_owned())),
        None => Err(settings.error(name, "expected a string or an object with `content`")),
    }
}

/// chat_template.jinja, else chat_template.json, else tokenizer_config.json.
fn chat_template(dir: &Path, settings: &Fields) -> Result<Option<String>, Error> {
    let path = dir.join("chat_template.jinja");
    if exists(&path)? {
        return read_text(&path).map(Some);
    }
    let path = dir.join("chat_template.json");
    if exists(&path)? {
        let map = read_object(&path)?;
        return template_value(&Fields::new(&path, &map));
    }
    template_value(settings)
}

/// One template, or a list of named ones of which `default` is meant.
fn template_value(fields: &Fields) -> Result<Option<String>, Error> {
    const NAME: &str = "chat_template";
    match fields.get(NAME) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(list)) => {
            let named = |wanted: &str| {
                list.iter()
                    .find(|item| item["name"].as_str() == Some(wanted))
            };
            let chosen = named("default").or(if list.len() == 1 { list.first() } else { None });
            match chosen.and_then(|item| item["template"].as_str()) {
                Some(text) => Ok(Some(text.to_owned())),
                None => Err(fields.error(NAME, "its list has no template named \"default\"")),
            }
        }
        Some(_) => Err(fields.error(NAME, "expected a string or a list of named templates")),
    }
}

fn generation(
    file: &Fields,
    config: &ConfigFile,
    eos_token: &Option<String>,
    ids: &TokenizerIds,
) -> Result<GenerationDefaults, Error> {
    let eos = match file.token_ids("eos_token_id")? {
        Some(eos) => eos,
        // Without a generation_config.json, a chat model's end of turn is often known to the
        // tokenizer alone.
        None => {
            let mut eos = config.eos.clone().unwrap_or_default();
            let spoken = eos_token.as_deref().and_then(|text| ids.of(text));
            eos.extend(spoken.filter(|id| !eos.contains(id)));
            eos
        }
    };
    let temperature = match file.flag("do_sample")? {
        Some(false) => Some(0.0),
        _ => file.not_negative("temperature")?,
    };
    Ok(GenerationDefaults {
        eos,
        bos: match file.token_ids("bos_token_id")? {
            Some(ids) => ids.first().copied(),
            None => config.bos,
        },
        temperature,
        top_p: file.not_negative("top_p")?,
        top_k: match file.get("top_k") {
            // 0 switches the limit off.
            Some(value) if value.as_u64() == Some(0) => None,
            _ => file.size("top_k", u32::MAX as usize)?.map(|k| k as u32),
        },
        min_p: file.not_negative("min_p")?,
        repetition_penalty: file.positive_f32("repetition_penalty")?,
    })
}

/// The files, by name, that [`TextSide::read`] reads back.
pub(crate) fn text_files(description: &Description) -> Vec<(&'static str, String)> {
    let tokenizer = match &description.tokenizer {
        TokenizerSource::Json(text) | TokenizerSource::Gguf(text) => text.clone(),
    };
    let mut files = vec![("tokenizer.json", tokenizer)];
    let generation = &description.generation;

    let mut settings = Map::new();
    settings.insert("add_bos_token".to_owned(), json!(generation.bos.is_some()));
    put(&mut settings, "bos_token", &description.bos_token);
    put(&mut settings, "eos_token", &description.eos_token);
    files.push(("tokenizer_config.json", pretty(settings)));

    let mut sampling = Map::new();
    if !generation.eos.is_empty() {
        sampling.insert("eos_token_id".to_owned(), json!(generation.eos));
    }
    put(&mut sampling, "bos_token_id", &generation.bos);
    match generation.temperature {
        Some(0.0) => put(&mut sampling, "do_sample", &Some(false)),
        temperature => {
            put(&mut sampling, "do_sample", &temperature.map(|_| true));
            put_number(&mut sampling, "temperature", temperature);
        }
    }
    put_number(&mut sampling, "top_p", generation.top_p);
    put(&mut sampling, "top_k", &generation.top_k);
    put_number(&mut sampling, "min_p", generation.min_p);
    put_number(
        &mut sampling,
        "repetition_penalty",
        generation.repetition_penalty,
    );
    files.push(("generation_config.json", pretty(sampling)));

    if let Some(template) = &description.chat_template {
        files.push(("chat_template.jinja", template.clone()));
    }
    files
}

fn put<T: serde::Serialize>(map: &mut Map<String, Value>, name: &str, value: &Option<T>) {
    if let Some(value) = value {
        map.insert(name.to_owned(), json!(value));
    }
}

fn put_number(map: &mut Map<String, Value>, name: &str, value: Option<f32>) {
    put(map, name, &value.map(shortest));
}
