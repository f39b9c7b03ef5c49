//! Bodies of requests.

use crate::app::App;
use crate::error::ApiError;
use crate::sampling_fields::SamplingFields;
use crate::slow::BodyError;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value as Json;
use std::sync::Arc;

/// The bytes of a body.
pub struct Whole(pub Bytes);

/// A body that is too large is read on to this many times the limit, so that its sender hears of
/// the refusal instead of a broken connection.
const READ_ON: usize = 4;

impl FromRequest<Arc<App>> for Whole {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Whole, ApiError> {
        let limit = app.body_limit;
        let mut body = request.into_body();
        let mut bytes = Vec::new();
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match is_late(&error) {
                true => ApiError::new(StatusCode::REQUEST_TIMEOUT, BodyError::Late.to_string()),
                false => bad(format!("the body cannot be read: {error}")),
            })?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            length += data.len();
            if length <= limit {
                bytes.extend_from_slice(&data);
            } else if length > limit.saturating_mul(READ_ON) {
                break;
            } else {
                bytes = Vec::new();
            }
        }
        if length > limit {
            let message =
                format!("the body is larger than the {limit} bytes that this server takes");
            return Err(
                ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("body_too_large")
            );
        }
        Ok(Whole(bytes.into()))
    }
}

fn is_late(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if matches!(error.downcast_ref(), Some(BodyError::Late)) {
            return true;
        }
        next = error.source();
    }
    false
}

/// Reads a JSON body, and in it what says how tokens are drawn; the two are read one after the
/// other, as serde's flattening forgets which field is wrong. Errors: no JSON, or a field with a
/// wrong type, by its path.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<(T, SamplingFields), ApiError> {
    let body = object(body)?;
    let sampling = fields(&body)?;
    Ok((fields(body)?, sampling))
}

fn object(body: &[u8]) -> Result<Json, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err(bad("the body is empty: send a JSON object".to_string()));
    }
    let value: Json = serde_json::from_slice(body)
        .map_err(|error| bad(format!("the body is not valid JSON: {error}")))?;
    if !value.is_object() {
        return Err(bad("the body must be a JSON object".to_string()));
    }
    Ok(value)
}

fn fields<'de, T: Deserialize<'de>>(
    body: impl Deserializer<'de, Error = serde_json::Error>,
) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let path = error.path().to_string();
        let message = plain(&error.inner().to_string());
        match path.as_str() {
            "." => bad(message),
            path => ApiError::field(path, format!("{path}: {message}")),
        }
    })
}

/// What was expected, in words that say nothing of this program's types.
fn plain(message: &str) -> String {
    let Some((found, expected)) = message.rsplit_once(", expected ") else {
        return message.to_string();
    };
    let expected = match expected {
        "usize" | "u64" | "u32" | "u8" => "a whole number, not negative",
        "i64" | "i32" => "a whole number",
        "f32" | "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        kind if kind.starts_with("struct ") => "an object",
        other => other,
    };
    format!("{found}, expected {expected}")
}

fn bad(message: String) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, message)
}

/// One thing or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl From<OneOrMany> for Vec<String> {
    fn from(texts: OneOrMany) -> Vec<String> {
        match texts {
            OneOrMany::One(text) => vec![text],
            OneOrMany::Many(texts) => texts,
        }
    }
}

/// A seed: any whole number of 64 bits.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a whole number of 64 bits")]
pub enum Seed {
    /// Not negative.
    Natural(u64),
    /// Negative.
    Integer(i64),
}

impl From<Seed> for u64 {
    fn from(seed: Seed) -> u64 {
        match seed {
            Seed::Natural(seed) => seed,
            Seed::Integer(seed) => seed as u64,
        }
    }
}

/// The text of a message: whole or in parts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of parts with a type")]
pub enum Content {
    /// Whole.
    Text(String),
    /// In parts.
    Parts(Vec<ContentPart>),
}

/// A part of a message.
#[derive(Clone, Debug, Deserialize)]
pub struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
}

impl Content {
    /// The text of all parts, one a line. `path` names the field in an error: a part that is no
    /// text.
    pub fn text(self, path: &str) -> Result<String, ApiError> {
        let parts = match self {
            Content::Text(text) => return Ok(text),
            Content::Parts(parts) => parts,
        };
        let mut texts = Vec::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate() {
            let text = match part.kind.as_str() {
                "text" | "input_text" | "output_text" | "reasoning_text" => part.text,
                "refusal" => part.refusal,
                kind => {
                    let path = format!("{path}[{index}]");
                    let message = format!(
                        "{path}: parts of type {kind:?} are not supported: this model reads text"
                    );
                    return Err(ApiError::field(path, message));
                }
            };
            texts.push(text.ok_or_else(|| {
                let path = format!("{path}[{index}].text");
                ApiError::field(path.clone(), format!("{path} is missing"))
            })?);
        }
        Ok(texts.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Example {
        list: Vec<Inner>,
        stop: Option<OneOrMany>,
        seed: Option<Seed>,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Inner {
        number: f32,
        count: Option<usize>,
    }

    #[test]
    fn errors_name_the_field() {
        for (body, param, words) in [
            ("", None, "empty"),
            ("{\"list\": [", None, "not valid JSON"),
            ("[1]", None, "object"),
            ("{}", None, "missing field `list`"),
            (
                "{\"list\": [{\"number\": 1}, {\"number\": \"x\"}]}",
                Some("list[1].number"),
                "expected a number",
            ),
            (
                "{\"list\": [{\"number\": 1, \"count\": -1}]}",
                Some("list[0].count"),
                "integer `-1`, expected a whole number, not negative",
            ),
            (
                "{\"list\": [true]}",
                Some("list[0]"),
                "boolean `true`, expected an object",
            ),
            ("{\"list\": 1}", Some("list"), "expected a list"),
            (
                "{\"list\": [], \"stop\": 3}",
                Some("stop"),
                "a text or a list of texts",
            ),
            (
                "{\"list\": [], \"seed\": 1.5}",
                Some("seed"),
                "whole number",
            ),
        ] {
            let error = parse::<Example>(body.as_bytes()).unwrap_err();
            assert_eq!(error.param.as_deref(), param, "{body}");
            assert!(error.message.contains(words), "{}", error.message);
            assert!(!error.message.contains('\n'));
            assert_eq!(error.status, StatusCode::BAD_REQUEST);
        }
        let deep = "[".repeat(100_000);
        assert!(parse::<Example>(deep.as_bytes()).is_err());
    }

    #[test]
    fn seeds_may_be_negative() {
        let (example, _) = parse::<Example>(b"{\"list\": [], \"seed\": -1}").unwrap();
        assert_eq!(example.seed.map(u64::from), Some(u64::MAX));
    }
}
