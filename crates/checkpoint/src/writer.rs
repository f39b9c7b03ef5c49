//! Writing a file, safetensors or another, whose tensors are made one after the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::safetensors::Dtype;

/// Data start at a multiple of this, so that packed tiles keep to cache lines.
const ALIGNMENT: usize = 64;

/// A tensor to come: all that the header says of it.
pub(crate) struct Planned {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl Planned {
    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        self.shape
            .iter()
            .fold(self.dtype.size() as u64, |size, &n| size * n as u64)
    }
}

/// A file whose header is written and whose data come in the planned order.
pub(crate) struct Writer {
    file: File,
    path: PathBuf,
    left: u64,
}

impl Writer {
    /// Create the file and write its header.
    pub fn create(
        path: &Path,
        plan: &[&Planned],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Writer, Error> {
        let (header, left) = header(plan, metadata);
        Writer::with_header(path, &header, left)
    }

    /// Create the file with a header of whatever format, which `left` bytes of data will follow.
    pub fn with_header(path: &Path, header: &[u8], left: u64) -> Result<Writer, Error> {
        let file = File::create(path).map_err(Error::io(path, "write"))?;
        let mut writer = Writer {
            file,
            path: path.to_path_buf(),
            left,
        };
        writer.put(header)?;
        Ok(writer)
    }

    /// Append bytes of the next tensor.
    pub fn data(&mut self, bytes: &[u8]) -> Result<(), Error> {
        debug_assert!(bytes.len() as u64 <= self.left, "more data than planned");
        self.left -= bytes.len() as u64;
        self.put(bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .write_all(bytes)
            .map_err(Error::io(&self.path, "write"))
    }

    /// See that everything was given and has reached the disk.
    pub fn finish(self) -> Result<(), Error> {
        if self.left != 0 {
            let short = io::Error::other(format!("{} bytes were not made", self.left));
            return Err(Error::io(&self.path, "write")(short));
        }
        self.file.sync_all().map_err(Error::io(&self.path, "write"))
    }
}

/// The length and text of the header, and the number of bytes that follow.
fn header(plan: &[&Planned], metadata: &BTreeMap<String, String>) -> (Vec<u8>, u64) {
    let mut map = Map::new();
    map.insert("__metadata__".to_owned(), json!(metadata));
    let mut offset = 0;
    for planned in plan {
        let end = offset + planned.bytes();
        let entry = json!({
            "dtype": planned.dtype.name(), "shape": planned.shape, "data_offsets": [offset, end],
        });
        map.insert(planned.name.clone(), entry);
        offset = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    // The format allows a header to end in spaces.
    let padded = (8 + text.len()).next_multiple_of(ALIGNMENT) - 8;
    text.resize(padded, b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    (header, offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(len: usize) -> Planned {
        Planned {
            name: "a".to_owned(),
            dtype: Dtype::U8,
            shape: vec![len],
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_one_line() {
        let full = Path::new("/dev/full");
        let error = Writer::create(full, &[&plan(4)], &BTreeMap::new()).err();
        assert_eq!(
            error.expect("a full disk takes nothing").to_string(),
            "/dev/full: cannot write: No space left on device (os error 28)"
        );
    }

    #[test]
    fn data_that_fall_short_are_an_error() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("short");
        let mut writer =
            Writer::create(&path, &[&plan(4)], &BTreeMap::new()).expect("it is writable");
        writer.data(&[1, 2]).expect("it is writable");
        let error = writer.finish().expect_err("2 of 4 bytes");
        assert!(
            error
                .to_string()
                .ends_with("cannot write: 2 bytes were not made")
        );
    }
}
