//! From a name to a place on disk.

use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::client::Client;
use crate::download::{Download, is_sound};
use crate::error::Error;
use crate::events::Event;
use crate::folder::{RepoFolder, has_length, remove_file};
use crate::listing::{Listing, RemoteFile};
use crate::name::Name;
use crate::settings::Settings;
use crate::space;

/// Which files of a repository make the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The files, in the order in which they get their names. With the last one a reader takes the
    /// folder for a model, so it comes when all others are there.
    pub files: Vec<String>,
    /// The file to open; the folder where `None`.
    pub open: Option<String>,
}

/// Chooses among the names of a repository's files; the error says what is wrong and what to do.
pub type Choose<'a> = dyn Fn(&[&str]) -> Result<Choice, String> + 'a;

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The file or folder to open.
    pub path: PathBuf,
    /// The commit's hash.
    pub commit: String,
    /// How many files it has.
    pub files: usize,
    /// Bytes that had to be fetched.
    pub fetched: u64,
}

/// The hub and its cache.
pub struct Hub {
    settings: Settings,
}

impl Hub {
    /// The hub with these settings; asks nobody anything.
    pub fn new(settings: Settings) -> Hub {
        Hub { settings }
    }

    /// The cache's folder.
    pub fn cache(&self) -> &Path {
        &self.settings.cache
    }

    /// The model of a name: as it is in the cache if it is whole there, with no question to the
    /// hub; else fetched.
    ///
    /// # Errors
    /// If it cannot be had.
    pub fn find(
        &self,
        name: &Name,
        choose: &Choose,
        tell: &mut dyn FnMut(Event),
    ) -> Result<Found, Error> {
        let folder = self.folder(&name.repo);
        if let Some(commit) = folder.commit(name.revision()) {
            match folder.listing(&commit) {
                Some(listing) => {
                    if let Ok(choice) = chosen(name, &listing, choose)
                        && files(name, &listing, &choice)?
                            .iter()
                            .all(|file| folder.has(&commit, file))
                    {
                        return Ok(found(&folder, &commit, &choice, 0));
                    }
                }
                // Fetched by another program. Whether it is whole only the hub knows; without it,
                // what is there counts, and whoever opens it sees what is missing.
                None if self.settings.offline => return self.as_it_is(name, &commit, choose),
                None => {
                    return match self.fetch(name, choose, false, tell) {
                        Err(error @ Error::Unreachable { .. }) => {
                            self.as_it_is(name, &commit, choose).map_err(|_| error)
                        }
                        other => other,
                    };
                }
            }
        }
        self.fetch(name, choose, false, tell)
    }

    /// The newest version of a name, with every byte checked, those that are there already too.
    ///
    /// # Errors
    /// If it cannot be had.
    pub fn pull(
        &self,
        name: &Name,
        choose: &Choose,
        tell: &mut dyn FnMut(Event),
    ) -> Result<Found, Error> {
        self.fetch(name, choose, true, tell)
    }

    pub(crate) fn folder(&self, repo: &str) -> RepoFolder {
        RepoFolder::new(&self.settings.cache, repo)
    }

    fn as_it_is(&self, name: &Name, commit: &str, choose: &Choose) -> Result<Found, Error> {
        let folder = self.folder(&name.repo);
        let there = names_below(&folder.snapshot(commit));
        let there: Vec<&str> = there.iter().map(String::as_str).collect();
        let choice = choose(&there).map_err(|_| self.offline(name))?;
        Ok(found(&folder, commit, &choice, 0))
    }

    fn offline(&self, name: &Name) -> Error {
        Error::Offline {
            name: name.to_string(),
            folder: self.settings.cache.clone(),
        }
    }

    /// Ask the hub, and fetch what is missing; with `check`, also what is there and damaged.
    fn fetch(
        &self,
        name: &Name,
        choose: &Choose,
        check: bool,
        tell: &mut dyn FnMut(Event),
    ) -> Result<Found, Error> {
        if self.settings.offline {
            return Err(self.offline(name));
        }
        let repo = name.repo.as_str();
        let client = Client::new(&self.settings)?;
        let listing = client.listing(repo, name.revision(), tell)?;
        let choice = chosen(name, &listing, choose)?;
        let files = files(name, &listing, &choice)?;
        let commit = listing.commit.as_str();
        let folder = self.folder(repo);
        folder.create()?;
        let mut missing = Vec::new();
        for &file in &files {
            if !self.is_there(&folder, commit, file, check, tell)?
                // Two names of the same contents.
                && !missing.iter().any(|other: &&RemoteFile| other.sum == file.sum)
            {
                missing.push(file);
            }
        }
        let bytes = missing
            .iter()
            .fold(0, |sum: u64, file| sum.saturating_add(file.size));
        if !missing.is_empty() {
            self.check_space(&folder, repo, &missing)?;
            tell(Event::Start {
                repo,
                files: missing.len(),
                bytes,
                folder: folder.path(),
            });
        }
        let mut before = 0;
        for file in missing {
            let download = Download {
                client: &client,
                folder: &folder,
                repo,
                commit,
                file,
            };
            download.run(before, tell)?;
            before += file.size;
            tell(Event::Bytes {
                file: &file.path,
                done: before,
            });
        }
        // One that another program wrote may tell more.
        if folder.listing(commit).is_none() {
            folder.keep_listing(&listing)?;
        }
        for file in files {
            folder.link(commit, file)?;
        }
        folder.set_commit(name.revision(), commit)?;
        Ok(found(&folder, commit, &choice, bytes))
    }

    /// Whether a file's contents are in the cache; damaged ones are removed.
    fn is_there(
        &self,
        folder: &RepoFolder,
        commit: &str,
        file: &RemoteFile,
        check: bool,
        tell: &mut dyn FnMut(Event),
    ) -> Result<bool, Error> {
        let blob = folder.blob(&file.sum);
        // Where there are no links, the contents lie under their name.
        let named = folder.snapshot(commit).join(&file.path);
        let Some(path) = [&blob, &named].into_iter().find(|path| path.exists()) else {
            return Ok(false);
        };
        let mut sound = has_length(path, file.size);
        if sound && check {
            tell(Event::Checking { file: &file.path });
            sound = is_sound(path, file)?;
        }
        if !sound {
            remove_file(path)?;
        }
        Ok(sound)
    }

    fn check_space(
        &self,
        folder: &RepoFolder,
        repo: &str,
        missing: &[&RemoteFile],
    ) -> Result<(), Error> {
        let needed = missing.iter().fold(0, |sum: u64, file| {
            let part = fs::metadata(folder.incomplete(&file.sum)).map_or(0, |kind| kind.len());
            sum.saturating_add(file.size.saturating_sub(part))
        });
        match space::free(&folder.blobs()) {
            Some(free) if free < needed => Err(Error::Space {
                repo: repo.to_owned(),
                needed,
                free,
                folder: self.settings.cache.clone(),
            }),
            _ => Ok(()),
        }
    }
}

fn chosen(name: &Name, listing: &Listing, choose: &Choose) -> Result<Choice, Error> {
    let paths: Vec<&str> = listing.files.iter().map(|f| f.path.as_str()).collect();
    choose(&paths).map_err(|what| Error::Choice {
        repo: name.repo.clone(),
        what,
    })
}

/// The chosen files in the listing.
fn files<'a>(
    name: &Name,
    listing: &'a Listing,
    choice: &Choice,
) -> Result<Vec<&'a RemoteFile>, Error> {
    let get = |path: &String| {
        listing.get(path).ok_or_else(|| Error::Choice {
            repo: name.repo.clone(),
            what: format!("there is no file {path}"),
        })
    };
    choice.files.iter().map(get).collect()
}

fn found(folder: &RepoFolder, commit: &str, choice: &Choice, fetched: u64) -> Found {
    let snapshot = folder.snapshot(commit);
    let path = match &choice.open {
        Some(file) => snapshot.join(file),
        None => snapshot.clone(),
    };
    if let Some(file) = choice.files.last() {
        touch(&snapshot.join(file));
    }
    Found {
        path,
        commit: commit.to_owned(),
        files: choice.files.len(),
        fetched,
    }
}

/// Say that a file was used now: systems keep that time seldom or not at all.
fn touch(path: &Path) {
    let times = FileTimes::new().set_accessed(SystemTime::now());
    // A cache of somebody else is used all the same.
    let _ = File::open(path).and_then(|file| file.set_times(times));
}

/// The names of all files below a folder, with `/` between folders.
pub(crate) fn names_below(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![(folder.to_path_buf(), String::new())];
    while let Some((folder, prefix)) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let name = format!("{prefix}{name}");
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push((entry.path(), format!("{name}/"))),
                // A link into nothing is no file.
                Ok(_) if entry.path().is_file() => names.push(name),
                _ => {}
            }
        }
    }
    names.sort();
    names
}
