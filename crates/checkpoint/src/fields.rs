//! Reading settings out of JSON, with the file and the setting's name in every error.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;

/// Read a JSON file whose top level is an object.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, Error> {
    parse_object(path, &read_text(path)?)
}

/// As [`read_object`], of text that came from `path`.
pub(crate) fn parse_object(path: &Path, text: &str) -> Result<Map<String, Value>, Error> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::file(path, "not a JSON object")),
        Err(error) => Err(Error::file(path, format!("not valid JSON: {error}"))),
    }
}

/// Whether there is something at `path`. Where that cannot be told, for want of permission say,
/// it is an error rather than a no.
pub(crate) fn exists(path: &Path) -> Result<bool, Error> {
    path.try_exists().map_err(Error::io(path, "open"))
}

/// The largest text file that is read whole; the largest tokenizers take some 40 MB.
const MAX_TEXT: u64 = 1 << 30;

/// Read a text file.
pub(crate) fn read_text(path: &Path) -> Result<String, Error> {
    let kind = std::fs::metadata(path).map_err(Error::io(path, "read"))?;
    if !kind.is_file() {
        return Err(Error::file(path, "not a regular file"));
    }
    if kind.len() > MAX_TEXT {
        return Err(Error::file(
            path,
            format!("{} bytes are absurd for this file", kind.len()),
        ));
    }
    let bytes = std::fs::read(path).map_err(Error::io(path, "read"))?;
    String::from_utf8(bytes).map_err(|_| Error::file(path, "not UTF-8 text"))
}

/// An object of settings and where it was found. A setting that is `null` counts as absent.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    path: &'a Path,
    /// Name of this object inside the file, empty at the top.
    at: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub fn new(path: &'a Path, map: &'a Map<String, Value>) -> Fields<'a> {
        Fields { path, at: "", map }
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether `name` is there and says that there is none.
    pub fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    pub fn error(&self, name: &str, what: impl Into<String>) -> Error {
        let dot = if self.at.is_empty() { "" } else { "." };
        Error::config(self.path, format!("{}{dot}{name}", self.at), what)
    }

    fn wrong(&self, name: &str, expected: &str) -> Error {
        let shown = self.get(name).map(Value::to_string).unwrap_or_default();
        let shown = match shown.char_indices().nth(40) {
            Some((cut, _)) => format!("{}...", &shown[..cut]),
            None => shown,
        };
        self.error(name, format!("expected {expected}, found {shown}"))
    }

    /// The object `name`, if there is one.
    pub fn object(&self, name: &'a str) -> Result<Option<Fields<'a>>, Error> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields {
                path: self.path,
                at: name,
                map,
            })),
            Some(_) => Err(self.wrong(name, "an object")),
        }
    }

    /// A whole number from 1 to `max`.
    pub fn size(&self, name: &str, max: usize) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(0) => Err(self.error(name, "must not be 0")),
            Some(n) if n <= max as u64 => Ok(Some(n as usize)),
            Some(n) => Err(self.error(name, format!("{n} is absurd (limit {max})"))),
            None => Err(self.wrong(name, "a whole number above 0")),
        }
    }

    /// As [`Fields::size`], an error when absent.
    pub fn required_size(&self, name: &str, max: usize) -> Result<usize, Error> {
        self.size(name, max)?
            .ok_or_else(|| self.error(name, "is missing"))
    }

    /// A finite number above 0.
    pub fn positive(&self, name: &str) -> Result<Option<f64>, Error> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
            Some(x) => Ok(Some(x)),
            None => Err(self.wrong(name, "a number above 0")),
        }
    }

    /// As [`Fields::positive`], of a number that f32 can hold.
    pub fn positive_f32(&self, name: &str) -> Result<Option<f32>, Error> {
        let Some(x) = self.positive(name)? else {
            return Ok(None);
        };
        let x = x as f32;
        if x.is_finite() && x > 0.0 {
            Ok(Some(x))
        } else {
            Err(self.wrong(name, "a usual number"))
        }
    }

    /// A finite number, at least 0.
    pub fn not_negative(&self, name: &str) -> Result<Option<f32>, Error> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value.as_f64().map(|x| x as f32);
        match number.filter(|x| x.is_finite() && *x >= 0.0) {
            Some(x) => Ok(Some(x)),
            None => Err(self.wrong(name, "a number, at least 0")),
        }
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(name, "true or false")),
        }
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>, Error> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(name, "a string")),
        }
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>, Error> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(self.wrong(name, "a list")),
        }
    }

    /// Token ids, written as one number or a list of numbers.
    pub fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, Error> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match value {
            Value::Array(list) => list.iter().map(one).collect(),
            single => one(single).map(|id| vec![id]),
        };
        ids.map(Some)
            .ok_or_else(|| self.wrong(name, "a token id or a list of them"))
    }
}

/// The f64 with the fewest digits that reads back as this f32, so that files say 1e-6 and not
/// 9.999999974752427e-7.
pub(crate) fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// JSON text over several lines, ending with a newline.
pub(crate) fn pretty(map: Map<String, Value>) -> String {
    let mut text = format!("{:#}", Value::Object(map));
    text.push('\n');
    text
}
