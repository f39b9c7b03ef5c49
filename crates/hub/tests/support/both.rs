//! Both sides: a hub that plays tricks, and a cache that is filled from it.
#![allow(dead_code)]

use crate::support::{FakeHub, Published};
use kozue_hub::{Choice, Error, Found, Hub, Name, Settings};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

/// A hub's folder on this side and the hub on the other.
pub struct Both {
    pub server: FakeHub,
    pub folder: TempDir,
}

/// Contents that are not the same anywhere.
pub fn weights() -> Vec<u8> {
    (0..300_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

pub fn files() -> Vec<Published> {
    vec![
        Published::new("README.md", "not fetched", false),
        Published::new("sub/weights.bin", weights(), true),
        Published::new("empty", "", false),
        Published::new("config.json", "{}", false),
    ]
}

impl Both {
    pub fn new() -> Both {
        Both {
            server: FakeHub::start(files()),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub fn settings(&self) -> Settings {
        Settings {
            endpoint: self.server.address.clone(),
            cache: self.folder.path().join("hub"),
            token: None,
            offline: false,
            proxies: false,
            certificates: None,
            pause: Duration::from_millis(1),
        }
    }

    pub fn hub(&self) -> Hub {
        Hub::new(self.settings())
    }

    pub fn find(&self, name: &str) -> Result<Found, Error> {
        self.hub()
            .find(&Name::parse(name).unwrap(), &choose, &mut |_| ())
    }

    pub fn pull(&self, name: &str) -> Result<Found, Error> {
        self.hub()
            .pull(&Name::parse(name).unwrap(), &choose, &mut |_| ())
    }

    pub fn repo(&self) -> PathBuf {
        self.folder.path().join("hub/models--org--name")
    }

    pub fn blob(&self, name: &str) -> PathBuf {
        let file = files().into_iter().find(|file| file.name == name).unwrap();
        self.repo().join("blobs").join(file.sum())
    }

    pub fn incomplete(&self, name: &str) -> PathBuf {
        self.blob(name).with_extension("incomplete")
    }

    /// The requests for files, each with the place where it began.
    pub fn ranges(&self) -> Vec<Option<String>> {
        let seen = self.server.seen().into_iter();
        seen.filter(|seen| seen.path.contains("weights"))
            .map(|seen| seen.range)
            .collect()
    }

    pub fn nothing_to_load(&self) {
        assert!(!self.repo().join("snapshots").exists());
        assert!(!self.repo().join("refs").exists());
    }
}

/// Everything but the README, config.json last.
pub fn choose(names: &[&str]) -> Result<Choice, String> {
    let wanted = names.iter().filter(|name| **name != "README.md");
    let files: Vec<String> = wanted.map(|name| name.to_string()).collect();
    if files.is_empty() {
        return Err("nothing is there".into());
    }
    Ok(Choice { files, open: None })
}

pub fn whole(found: &Found) {
    assert_eq!(
        fs::read(found.path.join("sub/weights.bin")).unwrap(),
        weights()
    );
    assert_eq!(fs::read(found.path.join("config.json")).unwrap(), b"{}");
    assert_eq!(fs::read(found.path.join("empty")).unwrap(), b"");
}

pub fn message(result: Result<Found, Error>) -> String {
    let text = result.unwrap_err().to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}
