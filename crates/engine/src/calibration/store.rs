//! The parts of a calibration that are done, on disk until the whole is.
//!
//! A folder beside the target holds `identity`, a line that says what the parts were made from, a
//! file for each part:
//!
//! ```text
//! for each matrix: length of its name, name; two f64 of what was lost; length of its bytes, bytes
//! xxh3 of all that
//! ```
//!
//! and `stream`, where the text has come to:
//!
//! ```text
//! number of layers behind it; the residual stream, f32
//! xxh3 of all that
//! ```
//!
//! Lengths and counts are u64, all numbers little-endian. Files made from something else are removed;
//! one that is damaged is made anew.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use kozue_checkpoint::{Error as Stored, Rounded};
use kozue_kernels::QuantError;
use kozue_model::Walk;
use xxhash_rust::xxh3::xxh3_64;

use crate::cache_file::Hashed;
use crate::error::Error;

/// Ends the name of a part's file, and of one that is being written.
const PART: &str = "part";
const UNFINISHED: &str = "tmp";
const STREAM: &str = "stream";

/// The folder, locked for as long as this lives.
pub(super) struct Store {
    folder: PathBuf,
    _lock: File,
    /// In which part a matrix is.
    parts: HashMap<String, usize>,
    /// The part that was last asked for a matrix: those of a layer are asked for one after the other.
    open: Option<(usize, Part)>,
}

type Part = Vec<(String, Rounded)>;

impl Store {
    /// The folder of `target`, without what other settings than `identity` left in it.
    ///
    /// # Errors
    /// If it cannot be made, or another process is at work in it.
    pub fn open(target: &Path, identity: &str) -> Result<Store, Error> {
        let name = target.file_name().ok_or_else(|| {
            Error::Model(format!(
                "{}: give the new directory a name",
                target.display()
            ))
        })?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(".calibration");
        let folder = target.with_file_name(hidden);
        let told = |error: io::Error| failed(&folder, error);
        let path = folder.join("identity");
        let foreign = match fs::symlink_metadata(&folder) {
            Ok(kind) if kind.is_dir() => !path.exists() && !is_empty(&folder),
            found => found.is_ok(),
        };
        if foreign {
            return Err(Error::Model(format!(
                "{}: is in the way of the calibration and was not made by one; move it away, or name another target",
                folder.display()
            )));
        }
        fs::create_dir_all(&folder).map_err(told)?;
        let mut options = OpenOptions::new();
        let file = options
            .create(true)
            .append(true)
            .open(&path)
            .map_err(told)?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(Error::Model(format!(
                "{}: another calibration is writing there; wait for it, or name another target",
                folder.display()
            )));
        }
        let before = fs::read(&path).map_err(told)?;
        if before != identity.as_bytes() {
            for entry in fs::read_dir(&folder).map_err(told)? {
                let path = entry.map_err(told)?.path();
                let ours = |end| end == PART || end == UNFINISHED;
                if path.extension().is_some_and(ours) || path.ends_with(STREAM) {
                    fs::remove_file(&path).map_err(told)?;
                }
            }
            file.set_len(0).map_err(told)?;
            (&file).write_all(identity.as_bytes()).map_err(told)?;
        }
        Ok(Store {
            folder,
            _lock: file,
            parts: HashMap::new(),
            open: None,
        })
    }

    fn path(&self, index: usize) -> PathBuf {
        self.folder.join(format!("{index}.{PART}"))
    }

    /// The matrices of a part, if it is done.
    ///
    /// # Errors
    /// If it is there and cannot be read.
    pub fn part(&mut self, index: usize) -> Result<Option<Part>, Error> {
        let part = read(&self.path(index))?.and_then(|bytes| parse(&bytes));
        for (name, _) in part.iter().flatten() {
            self.parts.insert(name.clone(), index);
        }
        Ok(part)
    }

    /// Keeps the matrices of a part.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn put(&mut self, index: usize, part: &[(String, Rounded)]) -> Result<(), Error> {
        write(&self.path(index), |to| write_part(part, to))?;
        self.open = None;
        for (name, _) in part {
            self.parts.insert(name.clone(), index);
        }
        Ok(())
    }

    /// A matrix out of the parts that were put or read.
    ///
    /// # Errors
    /// If its part has gone since.
    pub fn matrix(&mut self, name: &str) -> Result<Option<Rounded>, Stored> {
        let Some(&index) = self.parts.get(name) else {
            return Ok(None);
        };
        let path = self.path(index);
        let gone = |source| Stored::Io {
            path: path.clone(),
            action: "read",
            source,
        };
        let damaged = || gone(io::Error::from(io::ErrorKind::InvalidData));
        let part = match self.open.take() {
            Some((open, part)) if open == index => part,
            _ => parse(&fs::read(&path).map_err(gone)?).ok_or_else(damaged)?,
        };
        let (_, part) = self.open.insert((index, part));
        let found = part.iter().find(|(of, _)| of == name);
        let (_, rounded) = found.ok_or_else(damaged)?;
        Ok(Some(rounded.clone()))
    }

    /// Keeps where the text has come to, `reached` layers on.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn put_stream(&self, reached: usize, walk: &Walk) -> Result<(), Error> {
        write(&self.folder.join(STREAM), |to| {
            to.write_all(&(reached as u64).to_le_bytes())?;
            walk.write_to(to)
        })
    }

    /// What was last kept of the text's way: the number of layers, and the bytes of the walk.
    ///
    /// # Errors
    /// If it is there and cannot be read.
    pub fn stream(&self) -> Result<Option<(usize, Vec<u8>)>, Error> {
        let Some(mut bytes) = read(&self.folder.join(STREAM))? else {
            return Ok(None);
        };
        let reached = checked(&bytes).and_then(|mut bytes| {
            let reached = u64::from_le_bytes(*taken(&mut bytes)?);
            usize::try_from(reached).ok()
        });
        let sum = size_of::<u64>();
        Ok(reached.map(|reached| {
            bytes.truncate(bytes.len() - sum);
            (reached, bytes.split_off(sum))
        }))
    }

    /// After an error: the folder stays if something in it is of use, and then the error says so.
    pub fn leave(self, error: Error) -> Error {
        let mut parts = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_part = |entry: fs::DirEntry| entry.path().extension().is_some_and(|end| end == PART);
        if parts.any(is_part) {
            return Error::Unfinished {
                what: error.to_string(),
                folder: self.folder,
            };
        }
        self.remove();
        error
    }

    /// Removes the folder, whose parts are all in the target now or of no use.
    pub fn remove(self) {
        // What is left over does no harm: the next calibration to the same place removes it.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A file's bytes, if it is there.
fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(|error| failed(path, error)),
    }
}

/// Writes a file with its checksum, whole or not at all.
fn write(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Error> {
    let unfinished = path.with_extension(UNFINISHED);
    let written = File::create(&unfinished).and_then(|file| {
        let mut to = Hashed::new(BufWriter::with_capacity(1 << 20, &file));
        content(&mut to)?;
        to.finish()?;
        file.sync_all()
    });
    let written = written.map_err(|error| failed(&unfinished, error));
    let named =
        written.and_then(|()| fs::rename(&unfinished, path).map_err(|error| failed(path, error)));
    named.inspect_err(|_| {
        let _ = fs::remove_file(&unfinished);
    })
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error::Model(format!("{}: {error}", path.display()))
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

fn write_part(part: &[(String, Rounded)], to: &mut dyn Write) -> io::Result<()> {
    let block = |block: &[u8], to: &mut dyn Write| {
        to.write_all(&(block.len() as u64).to_le_bytes())?;
        to.write_all(block)
    };
    for (name, rounded) in part {
        block(name.as_bytes(), to)?;
        to.write_all(&rounded.error.squared_error.to_le_bytes())?;
        to.write_all(&rounded.error.squared_norm.to_le_bytes())?;
        block(&rounded.bytes, to)?;
    }
    Ok(())
}

/// What comes before the checksum, if that is right.
fn checked(bytes: &[u8]) -> Option<&[u8]> {
    let (bytes, sum) = bytes.split_last_chunk()?;
    (xxh3_64(bytes) == u64::from_le_bytes(*sum)).then_some(bytes)
}

fn parse(bytes: &[u8]) -> Option<Part> {
    let mut bytes = checked(bytes)?;
    let mut part = Vec::new();
    while !bytes.is_empty() {
        let name = String::from_utf8(block(&mut bytes)?.to_vec()).ok()?;
        let error = QuantError {
            squared_error: f64::from_le_bytes(*taken(&mut bytes)?),
            squared_norm: f64::from_le_bytes(*taken(&mut bytes)?),
        };
        let bytes = block(&mut bytes)?.to_vec();
        part.push((name, Rounded { bytes, error }));
    }
    Some(part)
}

fn taken<'b, const N: usize>(bytes: &mut &'b [u8]) -> Option<&'b [u8; N]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(taken)
}

fn block<'b>(bytes: &mut &'b [u8]) -> Option<&'b [u8]> {
    let len = usize::try_from(u64::from_le_bytes(*taken(bytes)?)).ok()?;
    let (block, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    Some(block)
}
