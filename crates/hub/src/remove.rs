//! Removing models from the cache.

use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::path::PathBuf;

use crate::error::Error;
use crate::folder::{RepoFolder, remove_file};
use crate::name::Name;
use crate::pull::{Hub, names_below};

/// What would be removed; [`Hub::remove`] does it.
pub struct Removal {
    name: Name,
    /// Names in snapshots.
    links: Vec<PathBuf>,
    /// Contents that nothing else needs.
    blobs: Vec<PathBuf>,
    /// Whether nothing of the repository stays.
    whole: bool,
    /// Bytes that become free.
    pub bytes: u64,
    /// Files, counted once for each commit.
    pub files: usize,
}

impl Hub {
    /// What is in the cache under a name: all of a repository, one revision of it, or one file.
    ///
    /// # Errors
    /// If there is nothing of the name.
    pub fn removal(&self, name: &Name) -> Result<Removal, Error> {
        let not_cached = || Error::NotCached {
            name: name.to_string(),
            folder: self.cache().to_path_buf(),
        };
        let folder = self.folder(&name.repo);
        if !folder.path().is_dir() {
            return Err(not_cached());
        }
        let commit = match &name.revision {
            Some(revision) => Some(folder.commit(revision).ok_or_else(not_cached)?),
            None => None,
        };
        let (mut links, mut kept) = (Vec::new(), HashSet::new());
        for cached in self.commits(&name.repo) {
            for file in &cached.files {
                let path = cached.path.join(&file.name);
                let meant = commit
                    .as_ref()
                    .is_none_or(|commit| *commit == cached.commit)
                    && name.file.as_ref().is_none_or(|name| *name == file.name);
                if meant {
                    links.push(path);
                } else if let Ok(blob) = path.canonicalize() {
                    kept.insert(blob);
                }
            }
        }
        let whole = name.file.is_none() && kept.is_empty();
        if links.is_empty() && !whole {
            return Err(not_cached());
        }
        let files = links.len();
        let blobs: HashSet<PathBuf> = if whole {
            let blobs = folder.blobs();
            let below = names_below(&blobs);
            below.iter().map(|name| blobs.join(name)).collect()
        } else {
            let blobs = links.iter().filter_map(|link| link.canonicalize().ok());
            blobs.filter(|blob| !kept.contains(blob)).collect()
        };
        let bytes = blobs
            .iter()
            .filter_map(|blob| Some(fs::metadata(blob).ok()?.len()))
            .sum();
        Ok(Removal {
            name: name.clone(),
            links,
            blobs: blobs.into_iter().collect(),
            whole,
            bytes,
            files,
        })
    }

    /// Remove it.
    ///
    /// # Errors
    /// If another process fetches the model, or the system refuses.
    pub fn remove(&self, removal: &Removal) -> Result<(), Error> {
        let folder = self.folder(&removal.name.repo);
        let _locks = all_locks(&folder, &removal.name)?;
        if removal.whole {
            // The names first: what is cut off here is no model any more.
            for path in [folder.snapshots(), folder.path().to_path_buf()] {
                if path.exists() {
                    fs::remove_dir_all(&path).map_err(Error::io(&path, "remove"))?;
                }
            }
            return Ok(());
        }
        for path in removal.links.iter().chain(&removal.blobs) {
            remove_file(path)?;
        }
        for cached in self.commits(&removal.name.repo) {
            if cached.files.is_empty() {
                fs::remove_dir_all(&cached.path).map_err(Error::io(&cached.path, "remove"))?;
                remove_file(&folder.listing_path(&cached.commit))?;
                for revision in &cached.revisions {
                    remove_file(&folder.refs().join(revision))?;
                }
            }
        }
        Ok(())
    }
}

/// The locks on all files of a repository; an error if another process has one.
fn all_locks(folder: &RepoFolder, name: &Name) -> Result<Vec<File>, Error> {
    let mut held = Vec::new();
    for entry in fs::read_dir(folder.locks()).into_iter().flatten().flatten() {
        let Ok(file) = File::open(entry.path()) else {
            continue;
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Busy {
                    name: name.to_string(),
                });
            }
            _ => held.push(file),
        }
    }
    Ok(held)
}
