//! One snapshot in one file.
//!
//! ```text
//! "kozcache"                 8 bytes
//! version of the form        u32, 1
//! tokens                     u32, n
//! identity of the model      u64: all that decides its states
//! token ids                  n times u32
//! the state                  as the model writes it
//! XXH3 of all of the above   u64
//! ```
//!
//! All numbers are little-endian. The name says identity, tokens and their hash, so that a folder
//! is known by its names.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const MAGIC: [u8; 8] = *b"kozcache";
const VERSION: u32 = 1;
/// Bytes before the token ids.
const HEAD: usize = 24;
/// Ends the name of a file of this version, and of one that is being written.
const ENDING: &str = ".kozcache1";
const UNFINISHED: &str = ".kozcache-tmp";
/// Names that are tried for a file to be written.
const NAMES: u32 = 1000;

/// What a file's name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    /// Which states these are.
    pub identity: u64,
    /// Number of tokens.
    pub tokens: usize,
    /// Hash of the tokens.
    pub hash: u64,
}

impl Name {
    pub fn new(identity: u64, tokens: &[u32]) -> Name {
        let mut prefixes = Prefixes::new(tokens);
        Name {
            identity,
            tokens: tokens.len(),
            hash: prefixes.hash(tokens.len()),
        }
    }

    /// What a name of this version says; nothing of any other.
    pub fn parse(name: &str) -> Option<Name> {
        let mut parts = name.strip_suffix(ENDING)?.split('-');
        let hex = |part: Option<&str>| u64::from_str_radix(part?, 16).ok();
        let parsed = Name {
            identity: hex(parts.next())?,
            hash: hex(parts.next())?,
            tokens: parts.next()?.parse().ok()?,
        };
        // One spelling only.
        (parsed.file() == name).then_some(parsed)
    }

    pub fn file(&self) -> String {
        let Name {
            identity,
            tokens,
            hash,
        } = self;
        format!("{identity:016x}-{hash:016x}-{tokens}{ENDING}")
    }
}

/// Whether a file of this name is a snapshot, of whatever version and model.
pub(crate) fn is_snapshot(name: &str) -> bool {
    let ending = name.rsplit_once(".kozcache").map(|(_, version)| version);
    ending.is_some_and(|version| version.parse::<u32>().is_ok())
}

/// Hashes of the beginnings of a text, to be asked for from short to long.
pub(crate) struct Prefixes<'t> {
    tokens: &'t [u32],
    read: usize,
    hash: Xxh3,
}

impl<'t> Prefixes<'t> {
    pub fn new(tokens: &'t [u32]) -> Self {
        Prefixes {
            tokens,
            read: 0,
            hash: Xxh3::new(),
        }
    }

    /// The hash of the first `length` tokens.
    pub fn hash(&mut self, length: usize) -> u64 {
        for token in &self.tokens[self.read..length] {
            self.hash.update(&token.to_le_bytes());
        }
        self.read = length;
        self.hash.digest()
    }
}

/// Passes bytes on and hashes them.
pub(crate) struct Hashed<W> {
    to: W,
    hash: Xxh3,
}

impl<W: Write> Hashed<W> {
    pub fn new(to: W) -> Hashed<W> {
        Hashed {
            to,
            hash: Xxh3::new(),
        }
    }

    /// Ends what was written with its hash.
    pub fn finish(mut self) -> io::Result<()> {
        let hash = self.hash.digest();
        self.to.write_all(&hash.to_le_bytes())?;
        self.to.flush()
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A file that is being written under another name. Dropped unfinished, it is removed.
pub(crate) struct Unfinished {
    path: PathBuf,
    /// Locked, so that it is not taken for one that a killed process left behind.
    file: File,
    finished: bool,
}

impl Unfinished {
    fn create(folder: &Path) -> io::Result<Unfinished> {
        let process = std::process::id();
        for number in 0..NAMES {
            let path = folder.join(format!(".{process}-{number}{UNFINISHED}"));
            let mut options = OpenOptions::new();
            options.write(true).create_new(true);
            // Snapshots hold what users wrote.
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            match options.open(&path) {
                Ok(file) => {
                    // Where files cannot be locked, none is ever taken for abandoned.
                    let _ = file.try_lock();
                    return Ok(Unfinished {
                        path,
                        file,
                        finished: false,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Writes a snapshot; `state` writes its state.
    pub fn write(
        folder: &Path,
        identity: u64,
        tokens: &[u32],
        state: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<Unfinished> {
        let unfinished = Unfinished::create(folder)?;
        let mut to = Hashed::new(BufWriter::with_capacity(1 << 20, &unfinished.file));
        to.write_all(&MAGIC)?;
        to.write_all(&VERSION.to_le_bytes())?;
        to.write_all(&(tokens.len() as u32).to_le_bytes())?;
        to.write_all(&identity.to_le_bytes())?;
        for token in tokens {
            to.write_all(&token.to_le_bytes())?;
        }
        state(&mut to)?;
        to.finish()?;
        Ok(unfinished)
    }

    pub fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Gives the file its name, in one step.
    pub fn finish(mut self, folder: &Path, name: &Name) -> io::Result<()> {
        std::fs::rename(&self.path, folder.join(name.file()))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.finished {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes an unfinished file if nobody is writing it.
pub(crate) fn remove_abandoned(path: &Path, name: &str) {
    if !name.ends_with(UNFINISHED) {
        return;
    }
    let lock = File::open(path).map(|file| file.try_lock().map(|()| file));
    match lock {
        Ok(Ok(_held)) => drop(std::fs::remove_file(path)),
        Ok(Err(TryLockError::WouldBlock | TryLockError::Error(_))) | Err(_) => {}
    }
}

/// The bytes of a file of these tokens, and where in them the state lies. Says that the file was
/// used.
///
/// Errors: the file cannot be read (of kind `InvalidData`: it is damaged, or another one than its
/// name says).
pub(crate) fn read(
    path: &Path,
    identity: u64,
    tokens: &[u32],
) -> io::Result<(Vec<u8>, std::ops::Range<usize>)> {
    let mut file = File::open(path)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let state = checked(&bytes, identity, tokens)
        .map_err(|what| io::Error::new(io::ErrorKind::InvalidData, what))?;
    // What was used last is dropped last. The file serves all the same if that cannot be noted.
    let _ = file.set_modified(SystemTime::now());
    Ok((bytes, state))
}

/// Where the state of these tokens lies in the bytes of a file, or what is wrong with it.
fn checked(
    bytes: &[u8],
    identity: u64,
    tokens: &[u32],
) -> Result<std::ops::Range<usize>, &'static str> {
    let Some((body, hash)) = bytes.split_last_chunk() else {
        return Err("it is cut off");
    };
    if xxh3_64(body) != u64::from_le_bytes(*hash) {
        return Err("it is damaged or cut off");
    }
    let mut head = Vec::with_capacity(HEAD);
    head.extend(MAGIC);
    head.extend(VERSION.to_le_bytes());
    head.extend((tokens.len() as u32).to_le_bytes());
    head.extend(identity.to_le_bytes());
    if !body.starts_with(&head) {
        return Err("it is of another version, model or length than its name says");
    }
    let end = HEAD + size_of_val(tokens);
    let stored = body.get(HEAD..end).unwrap_or_default();
    let same = stored.len() == end - HEAD
        && tokens
            .iter()
            .zip(stored.chunks_exact(size_of::<u32>()))
            .all(|(token, stored)| stored == token.to_le_bytes());
    match same {
        true => Ok(end..body.len()),
        false => Err("it is of other tokens than its name says"),
    }
}
