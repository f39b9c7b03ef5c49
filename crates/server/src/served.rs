//! The model that is served.

use crate::calls::CallFormat;
use crate::error::ApiError;
use axum::http::StatusCode;
use kozue_engine::chat::ChatTemplate;
use kozue_engine::grammar::Vocabulary;
use kozue_engine::scheduler::{Listener, Load, Refused, Scheduler};
use kozue_engine::{LanguageModel, Loaded, Request};
use std::any::Any;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

/// What answers requests.
pub trait Backend: Send + Sync {
    /// Takes a request; dropping what comes back gives it up.
    fn submit(&self, request: Request, listener: Listener) -> Result<Box<dyn Any + Send>, Refused>;

    /// What there is to do now.
    fn load(&self) -> Load;
}

impl Backend for Scheduler {
    fn submit(&self, request: Request, listener: Listener) -> Result<Box<dyn Any + Send>, Refused> {
        Ok(Box::new(Scheduler::submit(self, request, listener)?))
    }

    fn load(&self) -> Load {
        Scheduler::load(self)
    }
}

/// A model with its names and what answers for it.
pub struct Served {
    /// The name that clients see.
    pub id: String,
    /// Further names that it answers to; `*` stands for any.
    pub aliases: Vec<String>,
    /// Seconds since 1970 when it was loaded.
    pub created: u64,
    /// Tokenizer, defaults and all.
    pub loaded: Arc<Loaded>,
    /// Tokens of context, prompt and answer together.
    pub context: usize,
    /// How it writes calls of tools.
    pub call_format: CallFormat,
    /// Whether its template shows tools to it.
    pub template_has_tools: bool,
    template: Option<ChatTemplate>,
    /// Made when the first grammar needs it.
    vocabulary: OnceLock<Arc<Vocabulary>>,
    backend: Arc<dyn Backend>,
}

impl Served {
    /// Errors: the chat template does not parse.
    pub fn new(
        loaded: Arc<Loaded>,
        aliases: Vec<String>,
        context: Option<usize>,
        backend: Arc<dyn Backend>,
    ) -> Result<Served, kozue_engine::Error> {
        let description = loaded.description();
        let format = description
            .chat_template
            .as_deref()
            .and_then(CallFormat::of_template);
        let template = match description.chat_template {
            Some(_) => Some(loaded.chat_template()?),
            None => None,
        };
        let longest = loaded.model.max_position();
        Ok(Served {
            id: id_of(&description.name),
            aliases,
            created: now(),
            context: context.unwrap_or(longest).min(longest),
            // Where the template knows no tools, they are described as Hermes does.
            call_format: format.unwrap_or(CallFormat::Json),
            template_has_tools: format.is_some(),
            template,
            vocabulary: OnceLock::new(),
            backend,
            loaded,
        })
    }

    /// What answers.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// The chat template. Errors: there is none.
    pub fn template(&self) -> Result<&ChatTemplate, ApiError> {
        self.template
            .as_ref()
            .ok_or_else(|| kozue_engine::Error::NoChatTemplate.into())
    }

    /// The vocabulary for grammars; the first call takes a moment.
    pub fn vocabulary(&self) -> Result<&Arc<Vocabulary>, kozue_engine::Error> {
        if let Some(vocabulary) = self.vocabulary.get() {
            return Ok(vocabulary);
        }
        let vocabulary = Vocabulary::new(
            &self.loaded.tokenizer,
            &self.loaded.description().generation.eos,
            self.loaded.model.vocab_size(),
        )?;
        Ok(self.vocabulary.get_or_init(|| vocabulary))
    }

    /// Errors: the name is another model's.
    pub fn check_name(&self, name: Option<&str>) -> Result<(), ApiError> {
        let Some(name) = name.filter(|name| !name.is_empty() && *name != "default") else {
            return Ok(());
        };
        let known = name == self.id
            || name == self.loaded.description().name
            || self
                .aliases
                .iter()
                .any(|alias| alias == name || alias == "*");
        if known {
            return Ok(());
        }
        Err(ApiError {
            status: StatusCode::NOT_FOUND,
            ..ApiError::field(
                "model",
                format!(
                    "there is no model {name:?} here: this server runs {:?} (--alias gives it further names)",
                    self.id
                ),
            )
        }
        .code("model_not_found"))
    }
}

/// A model's name as clients can put it into a path, a command or a setting: letters, digits and
/// `. _ - : /`, all else is a dash.
fn id_of(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-:/".contains(c);
    let words = name.split(|c| !plain(c)).filter(|word| !word.is_empty());
    let id = words.collect::<Vec<_>>().join("-");
    // Two slashes or one at an end would be lost in a path.
    let parts = id.split('/').filter(|part| !part.is_empty());
    let id = parts.collect::<Vec<_>>().join("/");
    if id.is_empty() {
        "model".to_string()
    } else {
        id
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::id_of;

    #[test]
    fn ids_have_no_spaces() {
        for (name, id) in [
            ("qwen3_5", "qwen3_5"),
            ("Qwen2.5 Coder 0.5B Instruct", "Qwen2.5-Coder-0.5B-Instruct"),
            (" a  (b)\t\"c\" ", "a-b-c"),
            ("org/name:8b", "org/name:8b"),
            ("/a//b/", "a/b"),
            ("模型", "model"),
            ("", "model"),
        ] {
            assert_eq!(id_of(name), id, "{name:?}");
        }
    }
}
