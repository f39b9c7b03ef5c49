//! Metadata values by key and type.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::parse::{self, Kind, Value};
use crate::error::Error;
use crate::mapping::Mapping;

/// The metadata of one file.
pub(super) struct Metadata {
    file: Arc<Mapping>,
    values: HashMap<String, Value>,
}

impl Metadata {
    pub fn new(file: Arc<Mapping>, values: Vec<(String, Value)>) -> Metadata {
        Metadata {
            file,
            values: values.into_iter().collect(),
        }
    }

    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// An error about the value of `key`.
    pub fn wrong(&self, key: &str, what: impl Into<String>) -> Error {
        Error::config(self.path(), key, what)
    }

    /// The value, or an error saying that the file lacks it.
    pub fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, Error> {
        value.ok_or_else(|| self.wrong(key, "missing; the file is no language model that can run"))
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(range)) => std::str::from_utf8(&self.file[range.clone()])
                .map(Some)
                .map_err(|_| self.wrong(key, "not UTF-8")),
            Some(_) => Err(self.wrong(key, "a text is needed")),
        }
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(&Value::Bool(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong(key, "true or false is needed")),
        }
    }

    /// A finite number.
    pub fn float(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(&Value::Float(value)) if value.is_finite() => Ok(Some(value)),
            Some(_) => Err(self.wrong(key, "a finite number is needed")),
        }
    }

    /// A whole number from 0. Where a file gives one for each layer, all must be equal.
    pub fn uint(&self, key: &str) -> Result<Option<u64>, Error> {
        let whole = |value: i64| u64::try_from(value).ok();
        let value = match self.values.get(key) {
            None => return Ok(None),
            Some(&Value::Uint(value)) => Some(value),
            Some(&Value::Int(value)) => whole(value),
            Some(Value::Array { .. }) => {
                let each = self.ints(key)?.unwrap_or_default();
                let first = each.first().copied();
                if each.iter().any(|&value| Some(value) != first) {
                    return Err(self.wrong(key, "layers of different shapes are not supported"));
                }
                first.and_then(whole)
            }
            Some(_) => None,
        };
        match value {
            Some(value) => Ok(Some(value)),
            None => Err(self.wrong(key, "a whole number is needed")),
        }
    }

    /// A size that is used in products: up to 2^24.
    pub fn size(&self, key: &str) -> Result<Option<usize>, Error> {
        match self.uint(key)? {
            Some(value) if value > 1 << 24 => Err(self.wrong(key, format!("{value} is absurd"))),
            value => Ok(value.map(|value| value as usize)),
        }
    }

    /// A token number.
    pub fn token(&self, key: &str) -> Result<Option<u32>, Error> {
        match self.uint(key)? {
            None => Ok(None),
            Some(value) => match u32::try_from(value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(self.wrong(key, format!("{value} is no token number"))),
            },
        }
    }

    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array {
                kind: Kind::Text,
                len,
                bytes,
            }) => parse::texts(&self.file[bytes.clone()], *len)
                .map(Some)
                .map_err(|what| self.wrong(key, what)),
            Some(_) => Err(self.wrong(key, "an array of texts is needed")),
        }
    }

    /// An array of whole numbers of any width, or of truth values as 0 and 1.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<i64>>, Error> {
        let Some(value) = self.values.get(key) else {
            return Ok(None);
        };
        let Value::Array { kind, bytes, .. } = value else {
            return Err(self.wrong(key, "an array of whole numbers is needed"));
        };
        let bytes = &self.file[bytes.clone()];
        let all = match kind {
            Kind::U8 | Kind::Bool => bytes.iter().map(|&value| i64::from(value)).collect(),
            Kind::I8 => bytes.iter().map(|&value| i64::from(value as i8)).collect(),
            Kind::U16 => elements(bytes)
                .map(|b| i64::from(u16::from_le_bytes(b)))
                .collect(),
            Kind::I16 => elements(bytes)
                .map(|b| i64::from(i16::from_le_bytes(b)))
                .collect(),
            Kind::U32 => elements(bytes)
                .map(|b| i64::from(u32::from_le_bytes(b)))
                .collect(),
            Kind::I32 => elements(bytes)
                .map(|b| i64::from(i32::from_le_bytes(b)))
                .collect(),
            // Nothing that is read here is near the end of the range.
            Kind::U64 => elements(bytes)
                .map(|b| i64::try_from(u64::from_le_bytes(b)).unwrap_or(i64::MAX))
                .collect(),
            Kind::I64 => elements(bytes).map(i64::from_le_bytes).collect(),
            Kind::F32 | Kind::F64 | Kind::Text => {
                return Err(self.wrong(key, "an array of whole numbers is needed"));
            }
        };
        Ok(Some(all))
    }

    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array {
                kind: Kind::F32,
                bytes,
                ..
            }) => Ok(Some(
                elements(&self.file[bytes.clone()])
                    .map(f32::from_le_bytes)
                    .collect(),
            )),
            Some(_) => Err(self.wrong(key, "an array of f32 is needed")),
        }
    }
}

fn elements<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}
