//! Checksums: SHA-256 for large files, git's own (SHA-1 over a header and the contents) for small
//! ones.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::name::is_hex;

/// A checksum, in small letters of base 16.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sum {
    /// Of the contents.
    Sha256(String),
    /// SHA-1 of `blob LENGTH\0` and the contents, as git names them.
    Git(String),
}

impl Sum {
    /// Its digits, which name the file in the cache.
    pub fn digits(&self) -> &str {
        match self {
            Sum::Sha256(digits) | Sum::Git(digits) => digits,
        }
    }

    /// Whether it has as many digits as it must have.
    pub fn is_valid(&self) -> bool {
        match self {
            Sum::Sha256(digits) => is_hex(digits, 64),
            Sum::Git(digits) => is_hex(digits, 40),
        }
    }

    /// A sum of this kind over `size` bytes to come.
    pub fn start(&self, size: u64) -> Summing {
        match self {
            Sum::Sha256(_) => Summing::Sha256(Sha256::new()),
            Sum::Git(_) => Summing::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }

    /// Whether a file of `size` bytes has this checksum.
    pub fn matches(&self, path: &Path, size: u64) -> io::Result<bool> {
        let mut summing = self.start(size);
        summing.read(&mut File::open(path)?)?;
        Ok(summing.finish() == self.digits())
    }
}

/// A checksum in progress.
pub(crate) enum Summing {
    Sha256(Sha256),
    Git(Sha1),
}

impl Summing {
    /// Take bytes in.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Summing::Sha256(sum) => sum.update(bytes),
            Summing::Git(sum) => sum.update(bytes),
        }
    }

    /// Take all of a file in.
    pub fn read(&mut self, file: &mut File) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 18];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => self.update(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Its digits.
    pub fn finish(self) -> String {
        let bytes = match self {
            Summing::Sha256(sum) => sum.finalize().to_vec(),
            Summing::Git(sum) => sum.finalize().to_vec(),
        };
        bytes.iter().fold(String::new(), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_sums() {
        let sum = |kind: Sum, text: &str| {
            let mut summing = kind.start(text.len() as u64);
            let (first, second) = text.split_at(text.len() / 2);
            summing.update(first.as_bytes());
            summing.update(second.as_bytes());
            summing.finish()
        };
        // The example of FIPS 180-4, and what `git hash-object` says of "hello\n".
        assert_eq!(
            sum(Sum::Sha256(String::new()), "abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(
            sum(Sum::Git(String::new()), "hello\n"),
            "ce013625030ba8dba906f756967f9e9ca394464a"
        );
    }
}
