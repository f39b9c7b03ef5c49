//! What tells the weights of one model from those of another.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;

/// A hash of all bytes that a model at `path` computes with: a GGUF file, or a directory's
/// config.json and safetensors files with their names. Reads every weight once.
///
/// # Errors
/// If a file cannot be read.
pub fn fingerprint(path: &Path) -> Result<u64, Error> {
    let mut hash = Xxh3::new();
    if path.is_dir() {
        for file in weight_files(path)? {
            if let Some(name) = file.file_name() {
                hash.update(name.as_encoded_bytes());
            }
            add(&mut hash, &file)?;
        }
    } else {
        add(&mut hash, path)?;
    }
    Ok(hash.digest())
}

fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(Error::io(dir, "read"))? {
        let path = entry.map_err(Error::io(dir, "read"))?.path();
        let weights = path
            .extension()
            .is_some_and(|ending| ending == "safetensors");
        if weights || path.file_name().is_some_and(|name| name == "config.json") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn add(hash: &mut Xxh3, path: &Path) -> Result<(), Error> {
    let mut file = File::open(path).map_err(Error::io(path, "open"))?;
    let length = file.metadata().map_err(Error::io(path, "open"))?.len();
    hash.update(&length.to_le_bytes());
    let mut bytes = vec![0; 1 << 20];
    loop {
        match file.read(&mut bytes).map_err(Error::io(path, "read"))? {
            0 => return Ok(()),
            read => hash.update(&bytes[..read]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_every_name_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str, bytes: &[u8]| fs::write(path(name), bytes).unwrap();
        write("config.json", b"{}");
        write("model.safetensors", &[7; 3 << 20]);
        let first = fingerprint(folder.path()).unwrap();
        // What is not computed with does not count.
        write("README.md", b"words");
        assert_eq!(fingerprint(folder.path()).unwrap(), first);
        let mut weights = vec![7; 3 << 20];
        weights[2 << 20] = 8;
        write("model.safetensors", &weights);
        assert_ne!(fingerprint(folder.path()).unwrap(), first);
        write("model.safetensors", &[7; 3 << 20]);
        assert_eq!(fingerprint(folder.path()).unwrap(), first);
        fs::rename(path("model.safetensors"), path("other.safetensors")).unwrap();
        assert_ne!(fingerprint(folder.path()).unwrap(), first);
        assert!(fingerprint(&path("gone.gguf")).is_err());
    }
}
