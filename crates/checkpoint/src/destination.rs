//! A directory that appears whole or not at all.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::fields::read_object;
use crate::kozue::CONFIG_KEY;
use crate::safetensors::SafetensorsFile;
use crate::shards::SINGLE;

/// A directory being written beside its final place, as `.NAME.N.tmp`. Dropped before
/// [`Destination::finish`], it is removed.
///
/// It is locked for as long as its writer lives. One without a lock was left behind by a writer
/// that was killed; the next conversion to the same place removes it.
pub(crate) struct Destination {
    target: PathBuf,
    force: bool,
    scratch: PathBuf,
    /// Holds the lock on `scratch`; none where the file system has no locks.
    lock: Option<File>,
    finished: bool,
}

impl Destination {
    /// Start writing what will be `target`. An existing target must be an empty directory, or,
    /// with `force`, a checkpoint of ours.
    pub fn create(target: &Path, force: bool) -> Result<Destination, Error> {
        check_target(target, force)?;
        Destination::begin(target, force)
    }

    fn begin(target: &Path, force: bool) -> Result<Destination, Error> {
        let Some(name) = target.file_name() else {
            return Err(Error::file(target, "give the new directory a name"));
        };
        let parent = parent_of(target);
        fs::create_dir_all(parent).map_err(Error::io(parent, "create"))?;
        remove_abandoned(parent, name);
        let (scratch, lock) = create_hidden(parent, name)?;
        Ok(Destination {
            target: target.to_path_buf(),
            force,
            scratch,
            lock,
            finished: false,
        })
    }

    /// As [`Destination::create`], of a target that will be one file, whose first bytes are `magic`.
    pub fn create_file(target: &Path, magic: &[u8], force: bool) -> Result<Destination, Error> {
        check_file(target, magic, force)?;
        Destination::begin(target, force)
    }

    /// Move the file `name` of the directory to the target in one step.
    pub fn finish_file(self, name: &str, magic: &[u8]) -> Result<(), Error> {
        check_file(&self.target, magic, self.force)?;
        let from = self.scratch.join(name);
        fs::rename(&from, &self.target).map_err(Error::io(&self.target, "create"))?;
        let _ = sync_dir(parent_of(&self.target));
        Ok(())
    }

    /// The directory to write into.
    pub fn dir(&self) -> &Path {
        &self.scratch
    }

    /// Move everything to its final place in one step.
    pub fn finish(mut self) -> Result<(), Error> {
        // Names reach the disk before the old directory is given up.
        sync_dir(&self.scratch).map_err(Error::io(&self.scratch, "write"))?;
        // Another conversion may have made the target in the meantime.
        check_target(&self.target, self.force)?;
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
            // While it is locked: nobody else takes it for abandoned.
            let _ = fs::remove_dir_all(&self.scratch);
        }
        self.lock = None;
    }
}

/// A new directory `.NAME.N.tmp` with its lock. The first N that is free: one that is taken
/// belongs to another conversion.
fn create_hidden(parent: &Path, name: &OsStr) -> Result<(PathBuf, Option<File>), Error> {
    let mut number = 0;
    loop {
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{number}.tmp"));
        let path = parent.join(hidden);
        match fs::create_dir(&path) {
            Ok(()) => match lock(&path) {
                Lock::Ours(file) => return Ok((path, Some(file))),
                Lock::Unknown => return Ok((path, None)),
                // Taken for abandoned in the moment before it was locked.
                Lock::Others if number < 1000 => number += 1,
                Lock::Others => return Err(Error::file(&path, "is being removed; try again")),
            },
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 1000 => {
                number += 1;
            }
            Err(error) => return Err(Error::io(&path, "create")(error)),
        }
    }
}

enum Lock {
    /// Held until the file is dropped, or its process ends in whatever way.
    Ours(File),
    /// Another process has it, or has removed the directory.
    Others,
    /// The system cannot lock here.
    Unknown,
}

/// Lock a directory.
fn lock(dir: &Path) -> Lock {
    let file = match File::open(dir) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Lock::Others,
        Err(_) => return Lock::Unknown,
    };
    match file.try_lock() {
        Ok(()) if is_at(&file, dir) => Lock::Ours(file),
        Ok(()) | Err(TryLockError::WouldBlock) => Lock::Others,
        Err(TryLockError::Error(_)) => Lock::Unknown,
    }
}

/// Whether an open directory is still the one that has the name.
#[cfg(unix)]
fn is_at(file: &File, dir: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    match (file.metadata(), fs::symlink_metadata(dir)) {
        (Ok(open), Ok(named)) => same(open, named),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_at(_: &File, dir: &Path) -> bool {
    dir.is_dir()
}

/// Remove the directories `.NAME.N.tmp` whose writers were killed. What cannot be removed, or
/// may still be written, stays.
fn remove_abandoned(parent: &Path, name: &OsStr) {
    let Some(prefix) = name.to_str().map(|name| format!(".{name}.")) else {
        return;
    };
    let is_hidden = |name: &str| {
        let number = name
            .strip_prefix(&prefix)
            .and_then(|rest| rest.strip_suffix(".tmp"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_hidden)
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Lock::Ours(_held) = lock(&entry.path())
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// An error if `target` is the source itself, which would be replaced by what is made of it.
pub(crate) fn check_apart(source: &Path, target: &Path) -> Result<(), Error> {
    match (fs::canonicalize(source), fs::canonicalize(target)) {
        (Ok(source), Ok(same)) if source == same => Err(Error::file(
            target,
            "is the source itself; name another place",
        )),
        _ => Ok(()),
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
    if !is_kozue(target) && !is_exported(target) {
        return Err(Error::file(
            target,
            "exists, is not empty and was not written by Kozue; name another place",
        ));
    }
    if !force {
        return Err(Error::file(
            target,
            "exists; use --force to replace this checkpoint",
        ));
    }
    for entry in fs::read_dir(target).map_err(Error::io(target, "read"))? {
        let entry = entry.map_err(Error::io(target, "read"))?;
        if !may_be_written(&entry) {
            return Err(Error::file(
                target,
                format!(
                    "{} in it was not written by a conversion and would be lost; move it away or name another place",
                    entry.file_name().display()
                ),
            ));
        }
    }
    Ok(())
}

/// Whether a conversion may have written this entry of a directory: drafters in folders of their
/// own and notes are their users'.
fn may_be_written(entry: &fs::DirEntry) -> bool {
    let name = entry.file_name();
    let ending = Path::new(&name).extension().and_then(OsStr::to_str);
    entry.file_type().is_ok_and(|kind| kind.is_file())
        && ending.is_some_and(|ending| ["json", "jinja", "safetensors"].contains(&ending))
}

/// As [`check_target`], of a file whose first bytes are `magic`.
pub(crate) fn check_file(target: &Path, magic: &[u8], force: bool) -> Result<(), Error> {
    match fs::symlink_metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io(target, "create")(error)),
        Ok(kind) if !kind.is_file() => {
            return Err(Error::file(
                target,
                "exists and is no file; name another place",
            ));
        }
        Ok(_) => {}
    }
    let mut first = vec![0; magic.len()];
    let read = File::open(target).and_then(|mut file| io::Read::read_exact(&mut file, &mut first));
    if read.is_err() || first != magic {
        return Err(Error::file(
            target,
            "exists and is another kind of file; name another place",
        ));
    }
    if !force {
        return Err(Error::file(
            target,
            "exists; use --force to replace this file",
        ));
    }
    Ok(())
}

/// Whether a directory's config.json says that it is ours.
pub(crate) fn is_kozue(dir: &Path) -> bool {
    read_object(&dir.join("config.json")).is_ok_and(|map| map.contains_key(CONFIG_KEY))
}

/// What the metadata of weights that were exported have, with the name of this program.
pub(crate) const WRITER_KEY: &str = "writer";
/// See [`WRITER_KEY`].
pub(crate) const WRITER: &str = "kozue";

/// Whether a directory's weights say that they were exported by us.
fn is_exported(dir: &Path) -> bool {
    SafetensorsFile::open(&dir.join(SINGLE)).is_ok_and(|file| {
        file.header
            .metadata
            .get(WRITER_KEY)
            .is_some_and(|writer| writer == WRITER)
    })
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

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn hidden(parent: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(parent)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_killed_writers_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let parent = parent.path();
        let others = [".out.1.old", ".out.x.tmp", ".outer.0.tmp", ".out.2.tmp.bak"];
        for name in others.iter().chain(&[".out.0.tmp", ".out.7.tmp"]) {
            fs::create_dir(parent.join(name)).unwrap();
            fs::write(parent.join(name).join("model.safetensors"), "x").unwrap();
        }
        // A file of such a name is none of ours.
        fs::write(parent.join(".out.5.tmp"), "x").unwrap();
        let target = parent.join("out");
        let first = Destination::create(&target, false).unwrap();
        assert_eq!(first.dir(), parent.join(".out.0.tmp"));
        assert!(!first.dir().join("model.safetensors").exists());
        assert!(!parent.join(".out.7.tmp").exists());
        // A second writer leaves the first one's directory alone.
        let second = Destination::create(&target, false).unwrap();
        assert!(first.dir().exists());
        assert_eq!(second.dir(), parent.join(".out.1.tmp"));
        drop(second);
        drop(first);
        let mut expected: Vec<String> = others.map(str::to_owned).to_vec();
        expected.push(".out.5.tmp".to_owned());
        expected.sort();
        assert_eq!(hidden(parent), expected);
    }

    #[test]
    fn the_later_of_two_writers_does_not_replace_the_earlier() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("out");
        let first = Destination::create(&target, false).unwrap();
        let second = Destination::create(&target, false).unwrap();
        fs::write(first.dir().join("a"), "first").unwrap();
        fs::write(second.dir().join("a"), "second").unwrap();
        first.finish().unwrap();
        let error = second.finish().unwrap_err().to_string();
        assert!(error.contains("exists"), "{error}");
        assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "first");
        assert_eq!(hidden(parent.path()), ["out"]);
    }
}
