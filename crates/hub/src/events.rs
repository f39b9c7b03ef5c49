//! What a caller is told while files are fetched.

use std::path::Path;
use std::time::Duration;

/// Something that a waiting user may want to see.
#[derive(Debug)]
pub enum Event<'a> {
    /// Files are about to be fetched; not told where nothing is missing.
    Start {
        /// The repository, `org/name`.
        repo: &'a str,
        /// How many files.
        files: usize,
        /// Their bytes, together.
        bytes: u64,
        /// Where they go.
        folder: &'a Path,
    },
    /// So much is there.
    Bytes {
        /// The file being fetched.
        file: &'a str,
        /// Bytes that are there, of all that were announced.
        done: u64,
    },
    /// Another process fetches this file; its end is waited for.
    Waiting {
        /// The file.
        file: &'a str,
    },
    /// A request failed and is made again.
    Again {
        /// After this time.
        wait: Duration,
        /// What failed.
        reason: &'a str,
    },
    /// A file that is there is compared with its checksum.
    Checking {
        /// The file.
        file: &'a str,
    },
}
