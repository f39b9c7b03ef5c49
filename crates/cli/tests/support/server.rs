//! The server as a program.

use super::{kozue, tiny};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server of a tiny model at a free port.
pub struct Server {
    child: Child,
    pub address: String,
    folder: tempfile::TempDir,
}

impl Server {
    pub fn start(args: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let mut child = kozue(folder.path())
            .args(["serve", tiny("qwen3_5").to_str().unwrap(), "--port", "0"])
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Warnings may come first. Nobody reads what comes later.
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let line = lines.find(|line| line.as_ref().unwrap().contains("http://"));
        let line = line.expect("it says where it listens").unwrap();
        let (start, address) = line.trim().rsplit_once("http://").expect(&line);
        assert_eq!(start, "kozue: qwen3_5 at ");
        Server {
            address: address.to_string(),
            child,
            folder,
        }
    }

    pub fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    pub fn post(&self, body: &str) -> TcpStream {
        let length = body.len();
        self.send(&format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
    }

    pub fn signal(&self) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args(["-TERM", &id]).status().unwrap();
        assert!(status.success());
    }

    pub fn wait(&mut self) -> i32 {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().expect("it ends by itself");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the server does not end");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = &self.folder;
    }
}
