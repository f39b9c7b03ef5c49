//! What the hub tells of a commit: its files, their lengths and checksums.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checksum::Sum;
use crate::error::Error;
use crate::name::{is_commit, is_hex};

/// The version of the form in which listings are kept.
const FORMAT: u32 = 1;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    /// Its name in the repository, with `/` between folders.
    pub path: String,
    /// Its length in bytes.
    pub size: u64,
    /// Its checksum.
    pub sum: Sum,
    /// What git calls it: of a large file, only what points to it.
    pub git: String,
}

/// All files of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listing {
    /// The commit's hash.
    pub commit: String,
    /// Its files.
    pub files: Vec<RemoteFile>,
}

/// A listing as it is kept, in the form of `huggingface_hub`.
#[derive(Serialize, Deserialize)]
struct Tree {
    format_version: u32,
    files: BTreeMap<String, TreeFile>,
}

#[derive(Serialize, Deserialize)]
struct TreeFile {
    size: u64,
    blob_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lfs_sha256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lfs_size: Option<u64>,
}

impl Listing {
    /// Read the hub's answer to `/api/models/REPO/revision/REVISION?blobs=true`.
    pub fn from_answer(repo: &str, answer: &Value) -> Result<Listing, Error> {
        let wrong = |what: String| Error::Listing {
            repo: repo.to_owned(),
            what,
        };
        let commit = answer["sha"].as_str();
        let commit = commit.ok_or_else(|| wrong("names no commit".into()))?;
        let files = answer["siblings"].as_array();
        let files = files.ok_or_else(|| wrong("is missing".into()))?;
        let file = |value: &Value| {
            let path = value["rfilename"].as_str();
            let path = path.ok_or_else(|| wrong("has a file without a name".into()))?;
            let large = &value["lfs"];
            let git = value["blobId"].as_str();
            let (size, sum) = if large.is_object() {
                let sum = large["sha256"].as_str().map(|sum| Sum::Sha256(sum.into()));
                (large["size"].as_u64(), sum)
            } else {
                (value["size"].as_u64(), git.map(|sum| Sum::Git(sum.into())))
            };
            match (size, sum, git) {
                (Some(size), Some(sum), Some(git)) => Ok(RemoteFile {
                    path: path.to_owned(),
                    size,
                    sum,
                    git: git.to_owned(),
                }),
                _ => Err(wrong(format!("has no length or no checksum of {path}"))),
            }
        };
        let listing = Listing {
            commit: commit.to_owned(),
            files: files.iter().map(file).collect::<Result<_, _>>()?,
        };
        listing.check().map_err(wrong)?;
        Ok(listing)
    }

    /// Read a listing that was kept; `None` where it is damaged or of another form.
    pub fn from_kept(commit: &str, bytes: &[u8]) -> Option<Listing> {
        let tree: Tree = serde_json::from_slice(bytes).ok()?;
        let file = |(path, file): (String, TreeFile)| RemoteFile {
            path,
            size: file.lfs_size.unwrap_or(file.size),
            sum: match file.lfs_sha256 {
                Some(sum) => Sum::Sha256(sum),
                None => Sum::Git(file.blob_id.clone()),
            },
            git: file.blob_id,
        };
        let listing = Listing {
            commit: commit.to_owned(),
            files: tree.files.into_iter().map(file).collect(),
        };
        (tree.format_version == FORMAT && listing.check().is_ok()).then_some(listing)
    }

    /// The listing as it is kept.
    pub fn to_kept(&self) -> serde_json::Result<Vec<u8>> {
        let file = |file: &RemoteFile| {
            let (lfs_sha256, lfs_size) = match &file.sum {
                Sum::Sha256(sum) => (Some(sum.clone()), Some(file.size)),
                Sum::Git(_) => (None, None),
            };
            let kept = TreeFile {
                size: file.size,
                blob_id: file.git.clone(),
                lfs_sha256,
                lfs_size,
            };
            (file.path.clone(), kept)
        };
        serde_json::to_vec_pretty(&Tree {
            format_version: FORMAT,
            files: self.files.iter().map(file).collect(),
        })
    }

    /// Whether every name in it may be the name of a file; says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        if !is_commit(&self.commit) {
            return Err(format!("is of {:?}, which is no commit", self.commit));
        }
        for file in &self.files {
            if !is_safe_path(&file.path) {
                let what = "which is no name within the repository; nothing was fetched";
                return Err(format!("has a file {:?}, {what}", file.path));
            }
            if !file.sum.is_valid() || !is_hex(&file.git, 40) {
                return Err(format!("has no true checksum of {}", file.path));
            }
        }
        Ok(())
    }

    /// The file of this name.
    pub fn get(&self, path: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// Whether a name stays within the folder that it is put into, on every system.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let part = |part: &str| !part.is_empty() && part != "." && part != "..";
    path.split('/').all(part) && !path.contains(|c: char| c == '\\' || c == ':' || c.is_control())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn answer(path: &str, blob: &str) -> Value {
        json!({"sha": COMMIT, "siblings": [
            {"rfilename": "m.gguf", "size": 5, "blobId": COMMIT,
             "lfs": {"sha256": "a".repeat(64), "size": 5, "pointerSize": 130}},
            {"rfilename": path, "size": 3, "blobId": blob},
        ]})
    }

    #[test]
    fn large_files_have_a_sha256_and_small_ones_their_name_in_git() {
        let listing = Listing::from_answer("a/b", &answer("x/config.json", COMMIT)).unwrap();
        assert_eq!(
            listing.get("m.gguf").unwrap().sum,
            Sum::Sha256("a".repeat(64))
        );
        assert_eq!(
            listing.get("x/config.json").unwrap().sum,
            Sum::Git(COMMIT.into())
        );
        // As another program writes it.
        let kept = json!({"format_version": 1, "files": {
            "m.gguf": {"size": 5, "blob_id": COMMIT, "lfs_sha256": "a".repeat(64), "lfs_size": 5,
                       "xet_hash": "b".repeat(64)},
            "x/config.json": {"size": 3, "blob_id": COMMIT},
        }});
        let read = |kept: &[u8]| Listing::from_kept(COMMIT, kept);
        assert_eq!(
            read(&serde_json::to_vec(&kept).unwrap()),
            Some(listing.clone())
        );
        assert_eq!(read(&listing.to_kept().unwrap()), Some(listing));
        let mut newer = kept.clone();
        newer["format_version"] = 2.into();
        let mut evil = kept;
        evil["files"]["../x"] = json!({"size": 3, "blob_id": COMMIT});
        for wrong in [newer, evil, json!({})] {
            assert_eq!(read(&serde_json::to_vec(&wrong).unwrap()), None);
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for path in [
            "../x",
            "a/../../x",
            "/etc/x",
            "a//b",
            "",
            ".",
            "a\\b",
            "..\\x",
            "C:x",
            "a\0b",
            "a/",
        ] {
            let error = Listing::from_answer("a/b", &answer(path, COMMIT)).unwrap_err();
            assert!(error.to_string().contains("nothing was fetched"), "{error}");
        }
        // A checksum becomes a file's name too.
        for blob in ["../../x", "", "ABCDEF0123456789abcdef0123456789abcdef01"] {
            let error = Listing::from_answer("a/b", &answer("x", blob)).unwrap_err();
            assert!(error.to_string().contains("checksum of x"), "{error}");
        }
        let mut other = answer("x", COMMIT);
        other["sha"] = "../main".into();
        assert!(Listing::from_answer("a/b", &other).is_err());
    }
}
