//! What is in the cache.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::Error;
use crate::folder::RepoFolder;
use crate::name::is_commit;
use crate::pull::{Hub, names_below};

/// One commit of a repository in the cache.
#[derive(Clone, Debug)]
pub struct Cached {
    /// `org/name`.
    pub repo: String,
    /// The commit's hash.
    pub commit: String,
    /// Branches and tags that mean it.
    pub revisions: Vec<String>,
    /// Its folder.
    pub path: PathBuf,
    /// Its files, sorted by name.
    pub files: Vec<CachedFile>,
}

/// A file of a commit.
#[derive(Clone, Debug)]
pub struct CachedFile {
    /// Its name, with `/` between folders.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// When it was last read, as far as the system keeps that.
    pub used: Option<SystemTime>,
}

impl Hub {
    /// All commits of all models in the cache, sorted by name.
    ///
    /// # Errors
    /// If the cache cannot be read; one that does not exist is empty.
    pub fn cached(&self) -> Result<Vec<Cached>, Error> {
        let entries = match fs::read_dir(self.cache()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(Error::io(self.cache(), "read"))?,
        };
        let mut repos: Vec<String> = entries
            .flatten()
            .filter_map(|entry| RepoFolder::repo_of(entry.file_name().to_str()?))
            .collect();
        repos.sort();
        Ok(repos.iter().flat_map(|repo| self.commits(repo)).collect())
    }

    /// The commits of one repository.
    pub(crate) fn commits(&self, repo: &str) -> Vec<Cached> {
        let folder = self.folder(repo);
        let refs: Vec<(String, Option<String>)> = names_below(&folder.refs())
            .into_iter()
            .map(|revision| (revision.clone(), folder.commit(&revision)))
            .collect();
        let mut commits: Vec<String> = fs::read_dir(folder.snapshots())
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|commit| is_commit(commit))
            .collect();
        commits.sort();
        let cached = |commit: String| {
            let path = folder.snapshot(&commit);
            Cached {
                repo: repo.to_owned(),
                revisions: refs
                    .iter()
                    .filter(|(_, of)| of.as_ref() == Some(&commit))
                    .map(|(revision, _)| revision.clone())
                    .collect(),
                files: names_below(&path)
                    .into_iter()
                    .filter_map(|name| file(&path, name))
                    .collect(),
                path,
                commit,
            }
        };
        commits.into_iter().map(cached).collect()
    }
}

fn file(snapshot: &Path, name: String) -> Option<CachedFile> {
    let kind = fs::metadata(snapshot.join(&name)).ok()?;
    Some(CachedFile {
        name,
        size: kind.len(),
        used: kind.accessed().ok(),
    })
}
