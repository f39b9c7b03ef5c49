//! A file mapped into memory, read only.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::Error;

/// A whole file, mapped. Its pages are loaded when touched and can be dropped by the system.
#[derive(Debug)]
pub(crate) struct Mapping {
    map: Mmap,
    path: PathBuf,
}

impl Mapping {
    /// Map the file at `path`; an empty file maps to no bytes.
    pub fn open(path: &Path) -> Result<Mapping, Error> {
        let file = File::open(path).map_err(Error::io(path, "open"))?;
        let kind = file.metadata().map_err(Error::io(path, "open"))?;
        if !kind.is_file() {
            return Err(Error::file(path, "not a regular file"));
        }
        // SAFETY: the mapping is read only. Another process that
        // truncates the file while it is in use would raise SIGBUS; like every program that
        // maps its inputs we rely on model files being left alone while they run.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path, "map"))?;
        Ok(Mapping {
            map,
            path: path.to_path_buf(),
        })
    }

    /// The mapped file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tell the system that these bytes are not needed for now, so that reading a large file
    /// from end to end does not fill memory. They can still be read: they are loaded again.
    pub fn release(&self, range: Range<usize>) {
        let end = range.end.min(self.map.len());
        let Some(length) = end.checked_sub(range.start) else {
            return;
        };
        if length == 0 {
            return;
        }
        #[cfg(unix)]
        {
            // SAFETY: MADV_DONTNEED on a read-only mapping of a file drops clean pages only; a
            // later read gets the same bytes from the file again. Failure only costs memory.
            let _ = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    range.start,
                    length,
                )
            };
        }
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}
