//! A hub that plays tricks, on a port of this machine.
#![allow(dead_code)]

use serde_json::json;
use sha1::{Digest, Sha1};
use sha2::Sha256;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// The commit of `main`.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A file of the repository.
#[derive(Clone)]
pub struct Published {
    pub name: String,
    pub bytes: Vec<u8>,
    /// Whether it has a SHA-256, as large files do.
    pub large: bool,
}

impl Published {
    pub fn new(name: &str, bytes: impl Into<Vec<u8>>, large: bool) -> Published {
        Published {
            name: name.to_owned(),
            bytes: bytes.into(),
            large,
        }
    }

    /// Its checksum: the name of its blob.
    pub fn sum(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
        match self.large {
            true => hex(&Sha256::digest(&self.bytes)),
            false => {
                let header = format!("blob {}\0", self.bytes.len());
                hex(&Sha1::new_with_prefix(header)
                    .chain_update(&self.bytes)
                    .finalize())
            }
        }
    }
}

/// What goes wrong with the next request whose path contains a text.
#[derive(Clone)]
pub enum Fault {
    /// A status, with further headers.
    Status(u16, String),
    /// The connection is cut after so many bytes of the body.
    Cut(usize),
    /// The body ends after so many bytes, and its length was not announced.
    Short(usize),
    /// A length that is not the file's is announced and sent.
    Length(usize),
    /// Further bytes, of a body whose length was not announced.
    Longer,
    /// One byte is another.
    Flip(usize),
    /// The whole file, though a part was asked for.
    Whole,
    /// The body comes after a while.
    Slow(Duration),
    /// Another place.
    Redirect(String),
    /// This text as JSON.
    Answer(String),
}

/// A request that came.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

#[derive(Default)]
struct State {
    files: Vec<Published>,
    /// Revisions and their commits; all have the same files.
    revisions: Vec<(String, String)>,
    faults: Vec<(String, Fault)>,
    seen: Vec<Seen>,
}

/// The server; it ends with the tests.
pub struct FakeHub {
    pub address: String,
    state: Arc<Mutex<State>>,
}

impl FakeHub {
    pub fn start(files: Vec<Published>) -> FakeHub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State {
            files,
            revisions: vec![("main".into(), COMMIT.into())],
            ..State::default()
        }));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                // A client that goes away is no failure of the server.
                thread::spawn(move || serve(stream, &state).ok());
            }
        });
        FakeHub { address, state }
    }

    pub fn fault(&self, part: &str, fault: Fault) {
        let fault = (part.to_owned(), fault);
        self.state.lock().unwrap().faults.push(fault);
    }

    pub fn revision(&self, name: &str, commit: &str) {
        let mut state = self.state.lock().unwrap();
        state.revisions.retain(|(known, _)| known != name);
        state.revisions.push((name.to_owned(), commit.to_owned()));
    }

    pub fn publish(&self, files: Vec<Published>) {
        self.state.lock().unwrap().files = files;
    }

    /// The requests since the last call.
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.lock().unwrap().seen)
    }
}

fn serve(stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut seen = Seen {
        path: path.clone(),
        range: None,
        token: None,
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(": ") else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "range" => seen.range = Some(value.to_owned()),
            "authorization" => seen.token = Some(value.to_owned()),
            _ => {}
        }
    }
    let (fault, answer) = {
        let mut state = state.lock().unwrap();
        state.seen.push(seen.clone());
        let at = state
            .faults
            .iter()
            .position(|(part, _)| path.contains(part));
        let fault = at.map(|at| state.faults.remove(at).1);
        (fault, answer(&state, &path))
    };
    write(stream, fault, answer, seen.range)
}

/// The body, if there is one for the path.
fn answer(state: &State, path: &str) -> Option<Vec<u8>> {
    let path = path.replace("%2F", "/").replace("%20", " ");
    if let Some(revision) = path.strip_prefix("/api/models/org/name/revision/") {
        let revision = revision.strip_suffix("?blobs=true")?;
        let known = |(name, commit): &&(String, String)| name == revision || commit == revision;
        let (_, commit) = state.revisions.iter().find(known)?;
        let siblings: Vec<_> = state
            .files
            .iter()
            .map(|file| {
                let mut entry =
                    json!({"rfilename": file.name, "size": file.bytes.len(), "blobId": file.sum()});
                if file.large {
                    entry["blobId"] = "f".repeat(40).into();
                    entry["lfs"] =
                        json!({"sha256": file.sum(), "size": file.bytes.len(), "pointerSize": 130});
                }
                entry
            })
            .collect();
        return serde_json::to_vec(&json!({"sha": commit, "siblings": siblings})).ok();
    }
    let rest = path.strip_prefix("/org/name/resolve/");
    let name = match rest {
        Some(rest) => rest.split_once('/')?.1,
        None => path.strip_prefix("/cdn/")?,
    };
    let file = state.files.iter().find(|file| file.name == name)?;
    Some(file.bytes.clone())
}

fn write(
    mut out: TcpStream,
    fault: Option<Fault>,
    body: Option<Vec<u8>>,
    range: Option<String>,
) -> std::io::Result<()> {
    let Some(mut body) = body.or_else(|| fault.is_some().then(Vec::new)) else {
        let head = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        return out.write_all(head.as_bytes());
    };
    let whole = body.len();
    let from: usize = range
        .and_then(|range| {
            range
                .strip_prefix("bytes=")?
                .strip_suffix('-')?
                .parse()
                .ok()
        })
        .unwrap_or(0);
    let from = if matches!(fault, Some(Fault::Whole)) {
        0
    } else {
        from
    };
    let mut head = String::from("HTTP/1.1 200 OK\r\n");
    if from > 0 {
        head = format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {from}-{}/{whole}\r\n",
            whole - 1
        );
    }
    body.drain(..from.min(whole));
    let mut announced = Some(body.len());
    match fault {
        None | Some(Fault::Whole) => {}
        Some(Fault::Status(status, headers)) => {
            head = format!("HTTP/1.1 {status} x\r\n{headers}");
            body.clear();
            announced = Some(0);
        }
        Some(Fault::Cut(at)) => body.truncate(at),
        Some(Fault::Short(at)) => {
            body.truncate(at);
            announced = None;
        }
        Some(Fault::Length(length)) => {
            body.resize(length, b'x');
            announced = Some(length);
        }
        Some(Fault::Longer) => {
            body.extend(b"more");
            announced = None;
        }
        Some(Fault::Flip(at)) => body[at] ^= 1,
        Some(Fault::Slow(time)) => thread::sleep(time),
        Some(Fault::Redirect(to)) => {
            head = format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\n");
            body.clear();
            announced = Some(0);
        }
        Some(Fault::Answer(text)) => {
            body = text.into_bytes();
            announced = Some(body.len());
        }
    }
    if let Some(length) = announced {
        head.push_str(&format!("Content-Length: {length}\r\n"));
    }
    head.push_str("Connection: close\r\n\r\n");
    out.write_all(head.as_bytes())?;
    out.write_all(&body)?;
    out.flush()
}
