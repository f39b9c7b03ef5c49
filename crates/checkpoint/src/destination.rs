//! A directory that appears whole or not at all.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::fields::read_object;
use crate::kozue::CONFIG_KEY;

/// A directory being written beside its final place. Dropped before [`Destination::finish`], it
/// is removed.
pub(crate) struct Destination {
    target: PathBuf,
    scratch: PathBuf,
    finished: bool,
}

impl Destination {
    /// Start writing what will be `target`. An existing target must be an empty directory, or,
    /// with `force`, a checkpoint of ours.
    pub fn create(target: &Path, force: bool) -> Result<Destination, Error> {
        check_target(target, force)?;
        let Some(name) = target.file_name() else {
            return Err(Error::file(target, "give the new directory a name"));
        };
        let parent = parent_of(target);
        fs::create_dir_all(parent).map_err(Error::io(parent, "create"))?;
        let scratch = create_hidden(parent, name)?;
        Ok(Destination {
            target: target.to_path_buf(),
            scratch,
            finished: false,
        })
    }

    /// The directory to write into.
    pub fn dir(&self) -> &Path {
        &self.scratch
    }

    /// Move everything to its final place in one step.
    pub fn finish(mut self) -> Result<(), Error> {
        // Names reach the disk before the old directory is given up.
        sync_dir(&self.scratch).map_err(Error::io(&self.scratch, "write"))?;
        let old = self.scratch.with_extension("old");
        let replaces = self.target.exists();
        if replaces {
            fs::rename(&self.target, &old).map_err(Error::io(&self.target, "replace"))?;
        }
        if let Err(error) = fs::rename(&self.scratch, &self.target) {
            if replaces {
                // Best effort: the old directory is whole, under one name or the other.
                let _ = fs::rename(&old, &self.target);
            }
            return Err(Error::io(&self.target, "create")(error));
        }
        self.finished = true;
        let _ = sync_dir(parent_of(&self.target));
        if replaces {
            fs::remove_dir_all(&old).map_err(Error::io(&old, "remove"))?;
        }
        Ok(())
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_dir_all(&self.scratch);
        }
    }
}

/// A new directory `.NAME.N.tmp`. The first N that is free: one that is taken belongs to another
/// conversion, under way or cut off by force.
fn create_hidden(parent: &Path, name: &OsStr) -> Result<PathBuf, Error> {
    let mut number = 0;
    loop {
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{number}.tmp"));
        let path = parent.join(hidden);
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 1000 => {
                number += 1;
            }
            Err(error) => return Err(Error::io(&path, "create")(error)),
        }
    }
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// An error unless `target` may be written or replaced.
pub(crate) fn check_target(target: &Path, force: bool) -> Result<(), Error> {
    let kind = match fs::symlink_metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io(target, "create")(error)),
        Ok(kind) => kind,
    };
    if !kind.is_dir() {
        return Err(Error::file(
            target,
            "exists and is no directory; name another place",
        ));
    }
    let mut entries = fs::read_dir(target).map_err(Error::io(target, "read"))?;
    if entries.next().is_none() {
        return Ok(());
    }
    if !is_kozue(target) {
        return Err(Error::file(
            target,
            "exists, is not empty and is no Kozue checkpoint; name another place",
        ));
    }
    if !force {
        return Err(Error::file(
            target,
            "exists; use --force to replace this checkpoint",
        ));
    }
    Ok(())
}

/// Whether a directory's config.json says that it is ours.
pub(crate) fn is_kozue(dir: &Path) -> bool {
    read_object(&dir.join("config.json")).is_ok_and(|map| map.contains_key(CONFIG_KEY))
}

#[cfg(unix)]
fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(not(unix))]
fn sync_dir(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Write a whole file and see that it reached the disk.
pub(crate) fn write_file(path: &Path, text: &str) -> Result<(), Error> {
    let write = || {
        let mut file = File::create(path)?;
        io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()
    };
    write().map_err(Error::io(path, "write"))
}
