//! What can go wrong between a name and a model on disk: one line each, saying what, where and
//! what to do.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model cannot be had, listed or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is no name of a model.
    #[error("{name:?} is no name of a model on the hub: {what}")]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// An environment variable, or a file beside it, makes no sense.
    #[error("{name}: {what}")]
    Setting {
        /// The variable or file.
        name: String,
        /// What is wrong, and what to do.
        what: String,
    },
    /// The operating system refused.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// There is no room left, found out while writing.
    #[error("{path}: the disk is full: make room, then give the same command again; it goes on where it stopped", path = path.display())]
    Full {
        /// The file being written.
        path: PathBuf,
    },
    /// There is too little room, found out before.
    #[error("{repo}: {needed} bytes are missing, but only {free} are free in {folder}: make room, or set HF_HUB_CACHE to a folder on a larger disk", folder = folder.display())]
    Space {
        /// The repository.
        repo: String,
        /// Bytes still to be fetched.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// The cache's folder.
        folder: PathBuf,
    },
    /// The hub does not know who asks, or hides the repository from them.
    #[error("{repo}: the hub refuses (401): {what}")]
    Unauthorized {
        /// The repository.
        repo: String,
        /// What to do.
        what: &'static str,
    },
    /// The hub knows who asks and does not let them.
    #[error(
        "{repo}: the hub does not let you have it (403): accept its terms at {page}, and set HF_TOKEN to a token that may read it"
    )]
    Forbidden {
        /// The repository.
        repo: String,
        /// Its page.
        page: String,
    },
    /// No such repository, or no such revision of it.
    #[error("{repo}: the hub has no such {what} (404): check the name")]
    NotFound {
        /// The repository.
        repo: String,
        /// What there is none of.
        what: String,
    },
    /// Too many requests, and the waits that were asked for did not help.
    #[error(
        "{repo}: the hub answers too many requests (429){wait}: try again later, or set HF_TOKEN"
    )]
    TooMany {
        /// The repository.
        repo: String,
        /// How long the hub wants to be left alone, as text to put in; may be empty.
        wait: String,
    },
    /// An answer that is neither success nor one of the refusals above.
    #[error("{repo}: the hub answers {status}: try again later")]
    Status {
        /// The repository.
        repo: String,
        /// The status.
        status: u16,
    },
    /// No connection, or it broke and could not be had again.
    #[error("{host} cannot be reached ({reason}): check the network; what was fetched is kept")]
    Unreachable {
        /// The server.
        host: String,
        /// Why.
        reason: String,
    },
    /// A redirect that must not be followed.
    #[error("{repo}: the hub sends on to {target:?}, {what}")]
    Redirect {
        /// The repository.
        repo: String,
        /// Where to.
        target: String,
        /// Why not.
        what: &'static str,
    },
    /// The hub's answer cannot be used.
    #[error("{repo}: the hub's list of files {what}")]
    Listing {
        /// The repository.
        repo: String,
        /// What is wrong.
        what: String,
    },
    /// The files of the repository are not what is asked for.
    #[error("{repo}: {what}")]
    Choice {
        /// The repository.
        repo: String,
        /// What is wrong, and what to do.
        what: String,
    },
    /// It is not in the cache, or not whole, and the network must not be used.
    #[error("{name} is not whole in the cache ({folder}), and HF_HUB_OFFLINE forbids to fetch it: unset that, or copy the model there", folder = folder.display())]
    Offline {
        /// The name.
        name: String,
        /// The cache's folder.
        folder: PathBuf,
    },
    /// A file has another length than the hub's list says.
    #[error(
        "{file} has {found} bytes, but the hub's list says {expected}: try again later, or report it where the model is from"
    )]
    Length {
        /// Repository and file.
        file: String,
        /// Length in the list.
        expected: u64,
        /// Length that came, or was announced.
        found: u64,
    },
    /// A file's contents are not those that the hub's list names.
    #[error(
        "{file} was damaged on its way (its checksum is wrong), and was thrown away: try again, or report it where the model is from"
    )]
    Checksum {
        /// Repository and file.
        file: String,
    },
    /// Nothing of this name in the cache.
    #[error("{name} is not in the cache ({folder}): kozue list shows what is", folder = folder.display())]
    NotCached {
        /// The name.
        name: String,
        /// The cache's folder.
        folder: PathBuf,
    },
    /// Another process is fetching.
    #[error("{name} is being fetched by another process: end that first")]
    Busy {
        /// The name.
        name: String,
    },
}

impl Error {
    /// From an error of the system, for `map_err`.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::Full {
                path: path.to_path_buf(),
            },
            _ => Error::Io {
                path: path.to_path_buf(),
                action,
                source,
            },
        }
    }
}
