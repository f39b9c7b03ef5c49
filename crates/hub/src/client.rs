//! Requests to the hub: who asks, where redirects lead, what its refusals mean, and when a request
//! is made again.

use std::fmt::Write as _;
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use ureq::http::{Response, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

use crate::error::Error;
use crate::events::Event;
use crate::listing::Listing;
use crate::settings::Settings;

/// Redirects of one request.
const MOST_REDIRECTS: usize = 10;

/// A server that is silent for so long is taken for dead.
const SILENCE: Duration = Duration::from_secs(60);

/// Time to connect in.
const CONNECT: Duration = Duration::from_secs(20);

/// Requests that fail in a row before the user is told.
const ATTEMPTS: u32 = 5;

/// The longest wait that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(120);

/// Bytes of the longest list of files.
const LONGEST_LIST: u64 = 64 << 20;

/// Why a request failed, and whether it may be made again.
pub(crate) enum Failure {
    /// Nothing will change by asking again.
    Final(Error),
    /// The connection failed.
    Connection(Error),
    /// The server asks for patience, perhaps for so long.
    Later(Error, Option<Duration>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Final(error)
    }
}

/// Makes requests.
pub(crate) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    pause: Duration,
}

impl Client {
    /// A client with these settings.
    pub fn new(settings: &Settings) -> Result<Client, Error> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // Followed here: the token must not go along.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .user_agent(concat!("kozue/", env!("CARGO_PKG_VERSION")))
            .proxy(settings.proxies.then(Proxy::try_from_env).flatten());
        if let Some(path) = &settings.certificates {
            let text = std::fs::read(path).map_err(Error::io(
                path,
                "read the certificates that SSL_CERT_FILE names",
            ))?;
            let certificates = parse_pem(&text).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            let roots: Vec<_> = certificates.collect();
            config = config.tls_config(
                TlsConfig::builder()
                    .root_certs(RootCerts::new_with_certs(&roots))
                    .build(),
            );
        }
        Ok(Client {
            agent: config.build().new_agent(),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
            pause: settings.pause,
        })
    }

    /// How long to go on asking.
    pub fn patience(&self) -> Patience {
        Patience {
            left: ATTEMPTS - 1,
            pause: self.pause,
            first: self.pause,
        }
    }

    /// The files of a revision.
    pub fn listing(
        &self,
        repo: &str,
        revision: &str,
        tell: &mut dyn FnMut(Event),
    ) -> Result<Listing, Error> {
        let revision_part = escaped(revision, "");
        let url = format!(
            "{}/api/models/{repo}/revision/{revision_part}?blobs=true",
            self.endpoint
        );
        let mut patience = self.patience();
        loop {
            let answer = self.get(&url, repo, &format!("model or revision ({revision})"), 0);
            match answer.and_then(|answer| self.json(repo, answer)) {
                Ok(answer) => return Listing::from_answer(repo, &answer),
                // Nothing was done yet, so the user is told at once that there is no network.
                Err(Failure::Connection(error)) => return Err(error),
                Err(failure) => patience.wait(failure, tell)?,
            }
        }
    }

    fn json(&self, repo: &str, answer: Response<Body>) -> Result<Value, Failure> {
        let body = answer.into_body().into_with_config().limit(LONGEST_LIST);
        let bytes = body
            .read_to_vec()
            .map_err(|error| Failure::Connection(unreachable(&self.endpoint, error)))?;
        let parsed = serde_json::from_slice(&bytes);
        parsed.map_err(|_| {
            Failure::Final(Error::Listing {
                repo: repo.to_owned(),
                what: format!("is no JSON: is {} a hub?", self.endpoint),
            })
        })
    }

    /// Start to fetch a file of a commit, from byte `from` on. The answer's status is 200 (from
    /// the beginning after all), 206 or 416.
    pub fn file(
        &self,
        repo: &str,
        commit: &str,
        path: &str,
        from: u64,
    ) -> Result<Response<Body>, Failure> {
        let url = format!(
            "{}/{repo}/resolve/{commit}/{}",
            self.endpoint,
            escaped(path, "/")
        );
        self.get(&url, repo, &format!("file ({path})"), from)
    }

    /// One request with its redirects. `what` is what a 404 says there is none of.
    fn get(&self, url: &str, repo: &str, what: &str, from: u64) -> Result<Response<Body>, Failure> {
        let refused = |target: &str, what| Error::Redirect {
            repo: repo.to_owned(),
            target: target.to_owned(),
            what,
        };
        let mut target = parse(url).ok_or_else(|| refused(url, "which is no address"))?;
        let home = origin(&target);
        for _ in 0..MOST_REDIRECTS {
            // Compression would change lengths and places.
            let mut request = self
                .agent
                .get(target.clone())
                .header("accept-encoding", "identity");
            if let Some(token) = self.token.as_ref().filter(|_| origin(&target) == home) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header("range", format!("bytes={from}-"));
            }
            let answer = request.call().map_err(|error| {
                Failure::Connection(unreachable(target.host().unwrap_or_default(), error))
            })?;
            let status = answer.status().as_u16();
            if !matches!(status, 301 | 302 | 303 | 307 | 308) {
                return match status {
                    200 | 206 | 416 => Ok(answer),
                    _ => Err(self.refusal(&answer, repo, what)),
                };
            }
            let place = header(&answer, "location").unwrap_or_default();
            let next = follow(&target, &place)
                .ok_or_else(|| refused(&place, "which is no address that can be followed"))?;
            if target.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                return Err(refused(&place, "which is not encrypted").into());
            }
            target = next;
        }
        Err(refused(url, "and on and on").into())
    }

    fn refusal(&self, answer: &Response<Body>, repo: &str, what: &str) -> Failure {
        let repo = repo.to_owned();
        let status = answer.status().as_u16();
        let forbidden = |repo: String| Error::Forbidden {
            page: format!("{}/{repo}", self.endpoint),
            repo,
        };
        let gated = header(answer, "x-error-code").is_some_and(|code| code == "GatedRepo");
        let wait = header(answer, "retry-after")
            .and_then(|seconds| seconds.trim().parse().ok())
            .map(Duration::from_secs);
        match status {
            401 | 403 if gated => Failure::Final(forbidden(repo)),
            401 => Failure::Final(Error::Unauthorized {
                repo,
                what: match self.token {
                    Some(_) => {
                        "it does not accept the token: check the name, and HF_TOKEN or the token file"
                    }
                    None => {
                        "there is no such model, or it is private: check the name, or set HF_TOKEN to a token that may read it"
                    }
                },
            }),
            403 => Failure::Final(forbidden(repo)),
            404 => Failure::Final(Error::NotFound {
                repo,
                what: what.to_owned(),
            }),
            429 => {
                let text = wait.map_or(String::new(), |wait| {
                    format!(" and wants {} s of rest", wait.as_secs())
                });
                Failure::Later(Error::TooMany { repo, wait: text }, wait)
            }
            408 | 500..=599 => Failure::Later(Error::Status { repo, status }, wait),
            _ => Failure::Final(Error::Status { repo, status }),
        }
    }
}

/// How often, and after which waits, a failed request is made again.
pub(crate) struct Patience {
    left: u32,
    pause: Duration,
    first: Duration,
}

impl Patience {
    /// Wait before the next attempt; an error if there is none.
    pub fn wait(&mut self, failure: Failure, tell: &mut dyn FnMut(Event)) -> Result<(), Error> {
        let (error, asked) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Connection(error) => (error, None),
            Failure::Later(error, asked) => (error, asked),
        };
        if self.left == 0 || asked.is_some_and(|asked| asked > LONGEST_WAIT) {
            return Err(error);
        }
        let wait = asked.unwrap_or(self.pause).max(self.pause);
        tell(Event::Again {
            wait,
            reason: &error.to_string(),
        });
        sleep(wait);
        self.left -= 1;
        self.pause *= 2;
        Ok(())
    }

    /// Something came: the next failure is a first one.
    pub fn renew(&mut self) {
        self.left = ATTEMPTS - 1;
        self.pause = self.first;
    }
}

/// A connection's failure, in a user's words.
pub(crate) fn unreachable(host: &str, error: ureq::Error) -> Error {
    let reason = match error {
        ureq::Error::HostNotFound => "its name is not known".to_owned(),
        ureq::Error::Timeout(_) => "it does not answer".to_owned(),
        error => {
            let mut text = error.to_string();
            if text.contains("certificate") {
                text.push_str("; SSL_CERT_FILE may name a file with further certificates");
            }
            text
        }
    };
    Error::Unreachable {
        host: host.to_owned(),
        reason,
    }
}

/// A header's text.
pub(crate) fn header(answer: &Response<Body>, name: &str) -> Option<String> {
    Some(answer.headers().get(name)?.to_str().ok()?.to_owned())
}

/// Scheme, host and port: what a token is for.
fn origin(uri: &Uri) -> (String, String, u16) {
    let scheme = uri.scheme_str().unwrap_or_default().to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(match scheme.as_str() {
        "https" => 443,
        _ => 80,
    });
    (
        scheme,
        uri.host().unwrap_or_default().to_ascii_lowercase(),
        port,
    )
}

/// An address with a scheme and a host.
fn parse(text: &str) -> Option<Uri> {
    // Signed addresses come with characters that only strict readers mind.
    let uri: Uri = escaped(text, "/:?#[]@!$&'()*+,;=%").parse().ok()?;
    matches!(uri.scheme_str(), Some("http" | "https")).then_some(uri)
}

/// Where a redirect's `location` leads.
fn follow(from: &Uri, location: &str) -> Option<Uri> {
    if location.starts_with("//") {
        return parse(&format!("{}:{location}", from.scheme_str()?));
    }
    if location.starts_with('/') {
        return parse(&format!(
            "{}://{}{location}",
            from.scheme_str()?,
            from.authority()?
        ));
    }
    parse(location)
}

/// Percent-encoded, but for letters, digits, `-_.~` and what `kept` has.
fn escaped(text: &str, kept: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
        if plain || kept.as_bytes().contains(&byte) {
            out.push(byte as char);
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_where_they_say() {
        let from = parse("https://hub.example:8443/a/b?c").unwrap();
        for (location, expected) in [
            ("/x/y?z=1", Some("https://hub.example:8443/x/y?z=1")),
            ("//cdn.example/x", Some("https://cdn.example/x")),
            (
                "http://cdn.example/x y\"",
                Some("http://cdn.example/x%20y%22"),
            ),
            (
                "https://cdn.example/x%2By",
                Some("https://cdn.example/x%2By"),
            ),
            ("x/y", None),
            ("", None),
            ("ftp://cdn.example/x", None),
        ] {
            let found = follow(&from, location).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), expected, "{location}");
        }
        // The default port is the same place, another one is not.
        let place = |text| origin(&parse(text).unwrap());
        assert_eq!(
            place("https://Hub.example/a"),
            place("https://hub.example:443/b")
        );
        assert_ne!(
            place("https://hub.example/"),
            place("https://hub.example:8443/")
        );
        assert_ne!(place("https://hub.example/"), place("http://hub.example/"));
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(escaped("refs/pr/1", ""), "refs%2Fpr%2F1");
        assert_eq!(escaped("a b/\u{e9}#.gguf", "/"), "a%20b/%C3%A9%23.gguf");
    }
}
