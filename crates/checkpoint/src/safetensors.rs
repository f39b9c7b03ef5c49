//! The safetensors container: a length, a JSON header, then the bytes of all tensors.
//!
//! Format: <https://github.com/huggingface/safetensors>. Every number of a header is checked
//! against the file before it is used, so a damaged file is an error and nothing else.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::error::Error;
use crate::mapping::Mapping;

/// The format's own limit on the length of a header, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// More dimensions than any weight has.
const MAX_DIMENSIONS: usize = 8;

/// How a tensor's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
    U8,
    I8,
    /// Known to the format, but not read here: its name and the bytes of one value.
    Other(&'static str, usize),
}

impl Dtype {
    fn parse(name: &str) -> Option<Dtype> {
        Some(match name {
            "F32" => Dtype::F32,
            "F16" => Dtype::F16,
            "BF16" => Dtype::Bf16,
            "U8" => Dtype::U8,
            "I8" => Dtype::I8,
            "BOOL" => Dtype::Other("BOOL", 1),
            "F8_E4M3" => Dtype::Other("F8_E4M3", 1),
            "F8_E5M2" => Dtype::Other("F8_E5M2", 1),
            "F8_E8M0" => Dtype::Other("F8_E8M0", 1),
            "U16" => Dtype::Other("U16", 2),
            "I16" => Dtype::Other("I16", 2),
            "U32" => Dtype::Other("U32", 4),
            "I32" => Dtype::Other("I32", 4),
            "U64" => Dtype::Other("U64", 8),
            "I64" => Dtype::Other("I64", 8),
            "F64" => Dtype::Other("F64", 8),
            _ => return None,
        })
    }

    /// The name that the format uses.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::U8 => "U8",
            Dtype::I8 => "I8",
            Dtype::Other(name, _) => name,
        }
    }

    /// Bytes of one value.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U8 | Dtype::I8 => 1,
            Dtype::Other(_, size) => size,
        }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Where its bytes lie in the whole file.
    pub range: Range<usize>,
}

/// A header that was checked against the length of its file.
#[derive(Debug, Default)]
pub(crate) struct Header {
    pub entries: BTreeMap<String, Entry>,
    pub metadata: BTreeMap<String, String>,
}

/// A file with its header read.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    pub map: Arc<Mapping>,
    pub header: Header,
}

impl SafetensorsFile {
    pub fn open(path: &Path) -> Result<SafetensorsFile, Error> {
        let map = Mapping::open(path)?;
        let header = Header::parse(&map).map_err(|what| Error::file(path, what))?;
        Ok(SafetensorsFile {
            map: Arc::new(map),
            header,
        })
    }

    pub fn path(&self) -> &Path {
        self.map.path()
    }

    pub fn bytes(&self, entry: &Entry) -> &[u8] {
        // `parse` checked every range against the length of this same mapping.
        &self.map[entry.range.clone()]
    }
}

impl Header {
    /// Read the header of a whole file; on failure, what is wrong with it.
    pub fn parse(file: &[u8]) -> Result<Header, String> {
        let Some((length, rest)) = file.split_first_chunk::<8>() else {
            return Err(format!(
                "{} bytes are too few for a safetensors file; the download may be incomplete",
                file.len()
            ));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER {
            return Err(format!(
                "header length {length} is absurd (limit {MAX_HEADER}); not a safetensors file"
            ));
        }
        let length = length as usize;
        if length > rest.len() {
            return Err(format!(
                "truncated: the header takes {length} bytes, but only {} follow; fetch the file \
                 again",
                rest.len()
            ));
        }
        let (header, data) = rest.split_at(length);
        let raw: RawHeader = serde_json::from_slice(header)
            .map_err(|error| format!("the header is damaged: {error}"))?;
        raw.check(8 + length, data.len())
    }
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The JSON as written; a list, so that a name given twice is seen.
struct RawHeader {
    entries: Vec<(String, RawEntry)>,
    metadata: BTreeMap<String, String>,
}

impl RawHeader {
    /// Tensors must be named once and cover the data without gap or overlap.
    fn check(self, start: usize, available: usize) -> Result<Header, String> {
        let mut spans = Vec::with_capacity(self.entries.len());
        let mut entries = BTreeMap::new();
        for (name, raw) in self.entries {
            let dtype = Dtype::parse(&raw.dtype)
                .ok_or_else(|| format!("tensor {name}: unknown dtype {:?}", raw.dtype))?;
            let (begin, end) = raw.data_offsets;
            if begin > end || end > available as u64 {
                return Err(format!(
                    "tensor {name}: data at {begin}..{end} does not fit the {available} bytes of \
                     the file; it is truncated or damaged, fetch it again"
                ));
            }
            let (begin, end) = (begin as usize, end as usize);
            let shape = dimensions(&name, &raw.shape)?;
            let size = shape
                .iter()
                .try_fold(dtype.size(), |size, &n| size.checked_mul(n));
            if size != Some(end - begin) {
                return Err(format!(
                    "tensor {name}: {} {shape:?} does not take the {} bytes it is given",
                    dtype.name(),
                    end - begin
                ));
            }
            spans.push((begin, end, name.clone()));
            let range = start + begin..start + end;
            if entries
                .insert(
                    name.clone(),
                    Entry {
                        dtype,
                        shape,
                        range,
                    },
                )
                .is_some()
            {
                return Err(format!("tensor {name} is there twice"));
            }
        }
        spans.sort_unstable();
        let mut covered = 0;
        for (begin, end, name) in spans {
            if begin < covered {
                return Err(format!("tensor {name}: its data overlaps another tensor's"));
            }
            if begin > covered {
                return Err(format!(
                    "{} bytes before tensor {name} belong to no tensor",
                    begin - covered
                ));
            }
            covered = end;
        }
        if covered != available {
            return Err(format!(
                "wrong length: {} bytes after the last tensor belong to nothing",
                available - covered
            ));
        }
        Ok(Header {
            entries,
            metadata: self.metadata,
        })
    }
}

fn dimensions(name: &str, shape: &[u64]) -> Result<Vec<usize>, String> {
    if shape.len() > MAX_DIMENSIONS {
        return Err(format!(
            "tensor {name}: {} dimensions are too many",
            shape.len()
        ));
    }
    shape
        .iter()
        .map(|&n| usize::try_from(n).map_err(|_| format!("tensor {name}: dimension {n} is absurd")))
        .collect()
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader {
                    entries: Vec::new(),
                    metadata: BTreeMap::new(),
                };
                while let Some(name) = map.next_key::<String>()? {
                    let wrong = |error| A::Error::custom(format!("{name}: {error}"));
                    if name == "__metadata__" {
                        let metadata = map.next_value::<Option<_>>().map_err(wrong)?;
                        header.metadata = metadata.unwrap_or_default();
                    } else {
                        let entry = map.next_value().map_err(wrong)?;
                        header.entries.push((name, entry));
                    }
                }
                Ok(header)
            }
        }

        deserializer.deserialize_map(HeaderVisitor)
    }
}
