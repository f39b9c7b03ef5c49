//! One file: fetched into `blobs`, as often as the connection is cut from where it stopped, and
//! given its name only when its checksum is right.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use ureq::Body;
use ureq::http::Response;

use crate::checksum::Summing;
use crate::client::{Client, Failure, header, unreachable};
use crate::error::Error;
use crate::events::Event;
use crate::folder::{RepoFolder, has_length, remove_file};
use crate::listing::RemoteFile;

/// A file to fetch, and where from.
pub(crate) struct Download<'a> {
    pub client: &'a Client,
    pub folder: &'a RepoFolder,
    pub repo: &'a str,
    pub commit: &'a str,
    pub file: &'a RemoteFile,
}

/// The part that is there.
struct Part {
    path: PathBuf,
    out: File,
    summing: Summing,
    have: u64,
}

impl Download<'_> {
    /// Fetch the file unless it is there. `before` are the bytes of the files before it.
    pub fn run(&self, before: u64, tell: &mut dyn FnMut(Event)) -> Result<(), Error> {
        let file = self.file;
        let blob = self.folder.blob(&file.sum);
        let waiting = || tell(Event::Waiting { file: &file.path });
        let _lock = self.folder.lock(&file.sum, waiting)?;
        // The process that had the lock may have fetched it.
        if has_length(&blob, file.size) {
            return Ok(());
        }
        let mut part = self.open()?;
        // What an earlier process left is trusted once.
        let mut left_over = part.have > 0;
        let mut patience = self.client.patience();
        loop {
            let had = part.have;
            let mut progress = |have| {
                tell(Event::Bytes {
                    file: &file.path,
                    done: before + have,
                });
            };
            if let Err(failure) = self.attempt(&mut part, &mut progress) {
                if part.have > had {
                    patience.renew();
                }
                patience.wait(failure, tell)?;
                continue;
            }
            let summing = std::mem::replace(&mut part.summing, file.sum.start(file.size));
            if summing.finish() == file.sum.digits() {
                break;
            }
            if !left_over {
                remove_file(&part.path)?;
                return Err(Error::Checksum { file: self.name() });
            }
            left_over = false;
            self.restart(&mut part)?;
        }
        part.out
            .sync_all()
            .map_err(Error::io(&part.path, "write"))?;
        fs::rename(&part.path, &blob).map_err(Error::io(&blob, "create"))
    }

    fn name(&self) -> String {
        format!("{}/{}", self.repo, self.file.path)
    }

    /// Open what an earlier attempt left.
    fn open(&self) -> Result<Part, Error> {
        let path = self.folder.incomplete(&self.file.sum);
        let mut out = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(Error::io(&path, "create"))?;
        let kind = out.metadata().map_err(Error::io(&path, "read"))?;
        let have = if kind.is_file() { kind.len() } else { 0 };
        let mut summing = self.file.sum.start(self.file.size);
        if (1..=self.file.size).contains(&have) {
            summing.read(&mut out).map_err(Error::io(&path, "read"))?;
        }
        let mut part = Part {
            path,
            out,
            summing,
            have,
        };
        if have > self.file.size {
            self.restart(&mut part)?;
        }
        Ok(part)
    }

    /// Begin again with nothing.
    fn restart(&self, part: &mut Part) -> Result<(), Error> {
        if part.have > 0 {
            part.out
                .set_len(0)
                .map_err(Error::io(&part.path, "write"))?;
        }
        part.have = 0;
        part.summing = self.file.sum.start(self.file.size);
        Ok(())
    }

    /// One request for what is missing.
    fn attempt(&self, part: &mut Part, progress: &mut dyn FnMut(u64)) -> Result<(), Failure> {
        let size = self.file.size;
        if part.have == size {
            return Ok(());
        }
        let (client, path) = (self.client, &self.file.path);
        let mut answer = client.file(self.repo, self.commit, path, part.have)?;
        if part.have > 0 && !continues(&answer, part.have) {
            // It sends the whole file, or does not know this place.
            self.restart(part)?;
            if answer.status() != 200 {
                answer = client.file(self.repo, self.commit, path, 0)?;
            }
        }
        if answer.status() == 416 {
            return Err(self.wrong_length(0).into());
        }
        let announced = answer.body().content_length();
        if let Some(length) = announced.filter(|length| *length != size - part.have) {
            return Err(self.wrong_length(length + part.have).into());
        }
        self.take(part, answer, progress)
    }

    /// Take the body in, to its end.
    fn take(
        &self,
        part: &mut Part,
        answer: Response<Body>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let cut = |reason: io::Error| {
            Failure::Connection(unreachable(&self.name(), ureq::Error::from(reason)))
        };
        let mut reader = answer.into_body().into_reader();
        let mut buffer = vec![0; 1 << 17];
        loop {
            let count = match reader.read(&mut buffer) {
                Ok(0) if part.have < self.file.size => {
                    return Err(cut(io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(cut(error)),
            };
            if part.have + count as u64 > self.file.size {
                let found = part.have + count as u64;
                remove_file(&part.path)?;
                return Err(self.wrong_length(found).into());
            }
            let bytes = &buffer[..count];
            self.write(part, bytes)?;
            part.summing.update(bytes);
            part.have += count as u64;
            progress(part.have);
        }
    }

    fn write(&self, part: &mut Part, bytes: &[u8]) -> Result<(), Error> {
        let result = part.out.write_all(bytes);
        if result.is_err() && part.have > 0 {
            // A part of these bytes may be there; the checksum does not know them.
            let _ = part.out.set_len(part.have);
        }
        result.map_err(Error::io(&part.path, "write"))
    }

    fn wrong_length(&self, found: u64) -> Error {
        Error::Length {
            file: self.name(),
            expected: self.file.size,
            found,
        }
    }
}

/// Whether an answer goes on at byte `from`.
fn continues(answer: &Response<Body>, from: u64) -> bool {
    let range = header(answer, "content-range").unwrap_or_default();
    answer.status() == 206 && range.starts_with(&format!("bytes {from}-"))
}

/// Whether a file of the cache has its checksum.
pub(crate) fn is_sound(path: &Path, file: &RemoteFile) -> Result<bool, Error> {
    let matches = file.sum.matches(path, file.size);
    matches.map_err(Error::io(path, "read"))
}
