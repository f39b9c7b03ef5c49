//! Snapshots of sequences in a folder, which outlive the process.
//!
//! One file each ([`crate::cache_file`]), written beside its place and renamed, by a thread of
//! its own. Several processes may share a folder: names say what files are, files are checked
//! whenever they are read, and whoever needs room drops what was not used for longest, of
//! whatever model. What is read is only ever what was computed, so answers do not depend on it.

use crate::cache_file::{Name, Prefixes, Unfinished, is_snapshot, read, remove_abandoned};
use crate::error::Error;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::SystemTime;

/// Tokens that a file must save, beyond what there is without it: fewer are read sooner again.
const WORTH: usize = 64;

/// Snapshots that wait to be written. Further ones are not written.
const WAITING: usize = 8;

/// Where snapshots are kept between runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderOptions {
    /// The folder; made where there is none.
    pub path: PathBuf,
    /// Most bytes of all files.
    pub bytes: u64,
    /// What tells states that may be used from others ([`crate::Loaded::state_identity`]).
    pub identity: u64,
}

/// Files that this process knows of, by tokens and their hash. Others may have dropped them.
type Index = BTreeMap<usize, Vec<u64>>;

/// A snapshot to be written.
struct Job<S> {
    tokens: Vec<u32>,
    state: Arc<S>,
}

/// The snapshots in a folder.
pub(crate) struct CacheFolder<S> {
    options: FolderOptions,
    index: Arc<Mutex<Index>>,
    /// None once the folder could not be written.
    writer: Option<(SyncSender<Job<S>>, JoinHandle<()>)>,
    off: Arc<AtomicBool>,
}

fn lock(index: &Mutex<Index>) -> MutexGuard<'_, Index> {
    // Nothing is left half done while the lock is held.
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a file saves nearly as much as one of `tokens` would.
fn served(index: &Mutex<Index>, tokens: &[u32]) -> bool {
    let mut prefixes = Prefixes::new(tokens);
    let near = (tokens.len() + 1).saturating_sub(WORTH);
    let index = lock(index);
    let mut files = index.range(near..=tokens.len());
    files.any(|(&length, hashes)| hashes.contains(&prefixes.hash(length)))
}

fn forget(index: &Mutex<Index>, name: &Name) {
    let mut index = lock(index);
    if let Some(hashes) = index.get_mut(&name.tokens) {
        hashes.retain(|hash| *hash != name.hash);
        if hashes.is_empty() {
            index.remove(&name.tokens);
        }
    }
}

impl<S: Send + Sync + 'static> CacheFolder<S> {
    /// The snapshots in a folder, known by their names; `write` writes a state. A folder that
    /// cannot be used is as good as none, and said to be so in the log.
    pub fn open(
        options: FolderOptions,
        write: fn(&S, &mut dyn Write) -> io::Result<()>,
    ) -> CacheFolder<S> {
        let mut index = Index::new();
        let listed = create(&options.path).and_then(|()| list(&options.path));
        let mut folder = CacheFolder {
            index: Arc::default(),
            writer: None,
            off: Arc::default(),
            options,
        };
        let files = match listed {
            Ok(files) => files,
            Err(error) => {
                turned_off(&folder.options.path, &error);
                return folder;
            }
        };
        for file in files {
            let name = file.name.filter(|n| n.identity == folder.options.identity);
            if let Some(name) = name {
                index.entry(name.tokens).or_default().push(name.hash);
            }
        }
        folder.index = Arc::new(Mutex::new(index));
        let (sender, jobs) = sync_channel(WAITING);
        let writer = Writer {
            options: folder.options.clone(),
            index: Arc::clone(&folder.index),
            off: Arc::clone(&folder.off),
            write,
        };
        let thread = std::thread::Builder::new()
            .name("kozue-cache".to_string())
            .spawn(move || writer.work(&jobs));
        match thread {
            Ok(thread) => folder.writer = Some((sender, thread)),
            Err(error) => turned_off(&folder.options.path, &error),
        }
        folder
    }

    /// The longest snapshot that `prompt` goes on from, by one token at least, if it has so many
    /// tokens more than `held` that reading it pays; `state` makes a state of its bytes. Files
    /// that cannot be used are dropped on the way.
    ///
    /// It is read at once, on the caller's time: that takes less than the pass that it saves.
    pub fn longest<T>(
        &mut self,
        prompt: &[u32],
        held: usize,
        state: impl Fn(&[u8]) -> Result<T, Error>,
    ) -> Option<(usize, T)> {
        for name in self.candidates(prompt, held) {
            let path = self.options.path.join(name.file());
            let tokens = &prompt[..name.tokens];
            let read = read(&path, name.identity, tokens).and_then(|(bytes, at)| {
                state(&bytes[at]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
            });
            match read {
                Ok(state) => return Some((name.tokens, state)),
                Err(error) => {
                    forget(&self.index, &name);
                    if error.kind() == io::ErrorKind::InvalidData {
                        tracing::warn!("{}: {error}; it is dropped", path.display());
                        let _ = fs::remove_file(&path);
                    }
                }
            }
        }
        None
    }

    /// Files whose tokens `text` begins with, but not all of it, the longest first.
    fn candidates(&self, text: &[u32], held: usize) -> Vec<Name> {
        let mut prefixes = Prefixes::new(text);
        let index = lock(&self.index);
        let mut names = Vec::new();
        for (&tokens, hashes) in
            index.range(held.saturating_add(WORTH)..text.len().max(held + WORTH))
        {
            let hash = prefixes.hash(tokens);
            if hashes.contains(&hash) {
                names.push(Name {
                    identity: self.options.identity,
                    tokens,
                    hash,
                });
            }
        }
        names.reverse();
        names
    }

    /// Has a snapshot written, unless a file saves nearly as much, or many wait to be written.
    pub fn keep(&mut self, tokens: &[u32], state: &Arc<S>) {
        let Some((sender, _)) = &self.writer else {
            return;
        };
        if self.off.load(Ordering::Relaxed) || tokens.len() < WORTH {
            return;
        }
        if !served(&self.index, tokens) {
            // Where the queue is full, the snapshot is not written: decoding never waits.
            let _ = sender.try_send(Job {
                tokens: tokens.to_vec(),
                state: Arc::clone(state),
            });
        }
    }
}

impl<S> Drop for CacheFolder<S> {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.writer.take() {
            // What waits is still written.
            drop(sender);
            let _ = thread.join();
        }
    }
}

fn turned_off(path: &Path, error: &io::Error) {
    tracing::warn!("{}: no more snapshots are written: {error}", path.display());
}

/// Makes the folder, for this user alone.
fn create(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// A snapshot in the folder.
struct Listed {
    path: PathBuf,
    /// Nothing for one of another version.
    name: Option<Name>,
    bytes: u64,
    used: SystemTime,
}

/// All snapshots of a folder, of whatever model. What killed writers left behind is removed.
fn list(folder: &Path) -> io::Result<Vec<Listed>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let file_name = entry.file_name();
        let Some(text) = file_name.to_str() else {
            continue;
        };
        remove_abandoned(&entry.path(), text);
        // Another process may drop files meanwhile.
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        if is_snapshot(text) && metadata.is_file() {
            files.push(Listed {
                path: entry.path(),
                name: Name::parse(text),
                bytes: metadata.len(),
                used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            });
        }
    }
    Ok(files)
}

/// The thread that writes.
struct Writer<S> {
    options: FolderOptions,
    index: Arc<Mutex<Index>>,
    off: Arc<AtomicBool>,
    write: fn(&S, &mut dyn Write) -> io::Result<()>,
}

impl<S> Writer<S> {
    fn work(&self, jobs: &Receiver<Job<S>>) {
        for job in jobs {
            // Another may have been written while this one waited.
            if self.off.load(Ordering::Relaxed) || served(&self.index, &job.tokens) {
                continue;
            }
            if let Err(error) = self.write(&job) {
                self.off.store(true, Ordering::Relaxed);
                turned_off(&self.options.path, &error);
            }
        }
    }

    fn write(&self, job: &Job<S>) -> io::Result<()> {
        let FolderOptions {
            path,
            bytes,
            identity,
        } = &self.options;
        let state = |to: &mut dyn Write| (self.write)(&job.state, to);
        let file = Unfinished::write(path, *identity, &job.tokens, state)?;
        let needed = file.bytes()?;
        if needed > *bytes {
            return Ok(());
        }
        self.make_room(bytes - needed)?;
        let name = Name::new(*identity, &job.tokens);
        match file.finish(path, &name) {
            // Another process took it for abandoned, in the moment before it was locked.
            Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_dir() => return Ok(()),
            result => result?,
        }
        let mut index = lock(&self.index);
        let hashes = index.entry(name.tokens).or_default();
        if !hashes.contains(&name.hash) {
            hashes.push(name.hash);
        }
        Ok(())
    }

    /// Drops the files that were not used for longest until the rest has at most so many bytes.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        let mut files = list(&self.options.path)?;
        files.sort_by_key(|file| file.used);
        let mut held: u64 = files.iter().map(|file| file.bytes).sum();
        for file in files {
            if held <= bytes {
                break;
            }
            match fs::remove_file(&file.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => held -= file.bytes,
            }
            let name = file.name.filter(|n| n.identity == self.options.identity);
            if let Some(name) = name {
                forget(&self.index, &name);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
