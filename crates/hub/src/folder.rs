//! A repository's folder in the cache, in the layout of `huggingface_hub`.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::checksum::Sum;
use crate::error::Error;
use crate::listing::{Listing, RemoteFile};
use crate::name::is_commit;

/// What the folders of models begin with; those of data sets do not.
const MODELS: &str = "models--";

/// One repository's folder.
pub(crate) struct RepoFolder {
    path: PathBuf,
    locks: PathBuf,
}

impl RepoFolder {
    /// The folder of `repo` (`org/name`) in `cache`; it need not exist.
    pub fn new(cache: &Path, repo: &str) -> RepoFolder {
        let name = format!("{MODELS}{}", repo.replace('/', "--"));
        RepoFolder {
            path: cache.join(&name),
            locks: cache.join(".locks").join(name),
        }
    }

    /// The repository that a folder of this name belongs to.
    pub fn repo_of(folder: &str) -> Option<String> {
        let (org, name) = folder.strip_prefix(MODELS)?.split_once("--")?;
        Some(format!("{org}/{name}"))
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of all contents.
    pub fn blobs(&self) -> PathBuf {
        self.path.join("blobs")
    }

    /// The folder of all commits.
    pub fn snapshots(&self) -> PathBuf {
        self.path.join("snapshots")
    }

    /// The folder of all branches and tags.
    pub fn refs(&self) -> PathBuf {
        self.path.join("refs")
    }

    /// The folder of the locks on files being fetched.
    pub fn locks(&self) -> &Path {
        &self.locks
    }

    /// The folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.snapshots().join(commit)
    }

    /// Where contents with this checksum lie.
    pub fn blob(&self, sum: &Sum) -> PathBuf {
        self.blobs().join(sum.digits())
    }

    /// Where they lie while they are fetched.
    pub fn incomplete(&self, sum: &Sum) -> PathBuf {
        self.blobs().join(format!("{}.incomplete", sum.digits()))
    }

    /// The folder of what the hub told of commits.
    fn trees(&self) -> PathBuf {
        self.path.join("trees")
    }

    /// Where a commit's listing is kept.
    pub fn listing_path(&self, commit: &str) -> PathBuf {
        self.trees().join(format!("{commit}.json"))
    }

    /// Make the folder.
    pub fn create(&self) -> Result<(), Error> {
        for folder in [self.blobs(), self.trees(), self.locks.clone()] {
            fs::create_dir_all(&folder).map_err(Error::io(&folder, "create"))?;
        }
        Ok(())
    }

    /// The commit of a revision as far as the cache knows: a commit is its own.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.refs().join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Remember a revision's commit.
    pub fn set_commit(&self, revision: &str, commit: &str) -> Result<(), Error> {
        if revision == commit {
            return Ok(());
        }
        self.write(&self.refs().join(revision), commit.as_bytes())
    }

    /// What the hub told of a commit, where that was kept and is whole.
    pub fn listing(&self, commit: &str) -> Option<Listing> {
        let bytes = fs::read(self.listing_path(commit)).ok()?;
        Listing::from_kept(commit, &bytes)
    }

    /// Keep what the hub told.
    pub fn keep_listing(&self, listing: &Listing) -> Result<(), Error> {
        let path = self.listing_path(&listing.commit);
        let bytes = listing
            .to_kept()
            .map_err(|error| Error::io(&path, "write")(io::Error::other(error)))?;
        self.write(&path, &bytes)
    }

    /// Whether a commit's file is linked and as long as it must be.
    pub fn has(&self, commit: &str, file: &RemoteFile) -> bool {
        has_length(&self.snapshot(commit).join(&file.path), file.size)
    }

    /// Link a blob under its name in a commit.
    pub fn link(&self, commit: &str, file: &RemoteFile) -> Result<(), Error> {
        let place = self.snapshot(commit).join(&file.path);
        if has_length(&place, file.size) {
            return Ok(());
        }
        make_parent(&place)?;
        let blob = self.blob(&file.sum);
        // Out of the name's folders, then out of snapshots/COMMIT.
        let up = "../".repeat(file.path.split('/').count() + 1);
        let target = format!("{up}blobs/{}", file.sum.digits());
        let new = self.scratch();
        let linked = symlink(Path::new(&target), &new).and_then(|()| fs::rename(&new, &place));
        if linked.is_err() {
            // A file system without links: the only name is the one that is needed.
            let _ = fs::remove_file(&new);
            fs::rename(&blob, &place).map_err(Error::io(&place, "create"))?;
        }
        Ok(())
    }

    /// Lock the blob of a checksum, so that one process fetches it. `wait` is called where another
    /// one has the lock, before its end is waited for. Held until the file is dropped.
    pub fn lock(&self, sum: &Sum, wait: impl FnOnce()) -> Result<File, Error> {
        let path = self.locks.join(format!("{}.lock", sum.digits()));
        let open = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        let file = open.map_err(Error::io(&path, "create"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                wait();
                file.lock().map_err(Error::io(&path, "lock"))?;
            }
            // Where nothing can be locked, checksums still find what went wrong.
            Err(TryLockError::Error(error)) => tracing::info!("{}: {error}", path.display()),
        }
        Ok(file)
    }

    /// Write a file so that it is there whole or not at all.
    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        make_parent(path)?;
        let new = self.scratch();
        fs::write(&new, bytes).map_err(Error::io(&new, "write"))?;
        fs::rename(&new, path).map_err(Error::io(path, "write"))
    }

    /// A name that no other process and no other thread of this one uses.
    fn scratch(&self) -> PathBuf {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}.{number}.tmp", std::process::id());
        let path = self.trees().join(name);
        // One of an earlier process with this number.
        let _ = fs::remove_file(&path);
        path
    }
}

/// Whether there is a file of `size` bytes.
pub(crate) fn has_length(path: &Path, size: u64) -> bool {
    fs::metadata(path).is_ok_and(|kind| kind.is_file() && kind.len() == size)
}

/// Remove a file that may not be there.
pub(crate) fn remove_file(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io(path, "remove")(error)),
        _ => Ok(()),
    }
}

fn make_parent(path: &Path) -> Result<(), Error> {
    match path.parent() {
        Some(parent) => fs::create_dir_all(parent).map_err(Error::io(parent, "create")),
        None => Ok(()),
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}
