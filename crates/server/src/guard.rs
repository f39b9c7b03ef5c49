//! Who may ask: keys, hosts, origins.
//!
//! A web page anywhere can make its visitor's browser send requests to servers on the visitor's
//! own machine. Without a key two headers that a page cannot forge are checked: `Host` must not
//! be a foreign name (which stops pages whose name was rebound to this machine), and `Origin`,
//! where there is one, must be this server itself. No answer carries CORS headers.

use crate::app::App;
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// The server's rules.
#[derive(Default)]
pub struct Guard {
    /// Any of these is needed; none = no key is needed.
    pub keys: Vec<String>,
    /// Names of this server besides IP addresses and localhost.
    pub hosts: Vec<String>,
}

impl Guard {
    /// Errors: 401 without a good key, 403 from a foreign host or origin.
    pub fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.keys.is_empty() {
            // Probes of routers and orchestrators carry no key; the chat page asks for it.
            let open = matches!(uri.path(), "/" | "/health");
            return match open || self.knows_key(headers) {
                true => Ok(()),
                false => Err(ApiError::new(
                    StatusCode::UNAUTHORIZED,
                    "this server needs its API key: send it as Authorization: Bearer KEY",
                )
                .code("invalid_api_key")),
            };
        }
        let host = uri
            .authority()
            .map(|authority| authority.as_str())
            .or_else(|| headers.get(HOST).and_then(|host| host.to_str().ok()));
        let host = host.unwrap_or_default();
        if !self.is_own(host) {
            return Err(ApiError::new(
                StatusCode::FORBIDDEN,
                "this Host is not known here: use the server's address, or name the host with --allow-host",
            )
            .code("unknown_host"));
        }
        match headers.get(ORIGIN) {
            Some(origin) if !is_same(origin.to_str().unwrap_or_default(), host) => {
                Err(ApiError::new(
                    StatusCode::FORBIDDEN,
                    "pages of other origins may not use this server",
                )
                .code("foreign_origin"))
            }
            _ => Ok(()),
        }
    }

    fn knows_key(&self, headers: &HeaderMap) -> bool {
        let bearer = headers
            .get(AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        // Anthropic's clients send it this way.
        let own = headers.get("x-api-key").map(|value| value.as_bytes());
        [bearer, own].into_iter().flatten().any(|given| {
            // All keys are compared, each in a time that does not depend on its letters.
            self.keys.iter().fold(false, |known, key| {
                known | bool::from(key.as_bytes().ct_eq(given))
            })
        })
    }

    fn is_own(&self, host: &str) -> bool {
        let name = host_name(host);
        name.parse::<IpAddr>().is_ok()
            || name.eq_ignore_ascii_case("localhost")
            || self.hosts.iter().any(|own| name.eq_ignore_ascii_case(own))
    }
}

/// Host without port; an IPv6 address without its brackets.
fn host_name(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split(']').next().unwrap_or_default();
    }
    host.rsplit_once(':').map_or(host, |(name, _)| name)
}

fn is_same(origin: &str, host: &str) -> bool {
    origin
        .split_once("://")
        .is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host))
}

/// Lets a request through or refuses it.
pub async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match app.guard.check(request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderName;

    fn ask(guard: &Guard, path: &str, headers: &[(&str, &str)]) -> Result<(), u16> {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap()))
            .collect();
        guard
            .check(&path.parse().unwrap(), &headers)
            .map_err(|error| error.status.as_u16())
    }

    #[test]
    fn keys() {
        let guard = Guard {
            keys: vec!["secret".into(), "other".into()],
            hosts: Vec::new(),
        };
        for header in [
            ("authorization", "Bearer secret"),
            ("authorization", "Bearer other"),
            ("x-api-key", "secret"),
        ] {
            assert_eq!(
                ask(&guard, "/v1/models", &[header, ("host", "evil.example")]),
                Ok(())
            );
        }
        for header in [
            ("authorization", "Bearer secre"),
            ("authorization", "Bearer secret2"),
            ("authorization", "Bearer "),
            ("authorization", "secret"),
            ("x-api-key", "Secret"),
            ("host", "localhost"),
        ] {
            assert_eq!(ask(&guard, "/v1/models", &[header]), Err(401), "{header:?}");
        }
        assert_eq!(ask(&guard, "/health", &[]), Ok(()));
    }

    #[test]
    fn hosts() {
        let guard = Guard {
            keys: Vec::new(),
            hosts: vec!["my.host".into()],
        };
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "127.0.0.1:8000",
            "[::1]:8000",
            "10.1.2.3",
            "My.Host:80",
        ] {
            assert_eq!(ask(&guard, "/", &[("host", host)]), Ok(()), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:8000",
            "[::1",
            "[evil]:1",
        ] {
            let allowed = host == "[::1";
            let outcome = ask(&guard, "/", &[("host", host)]);
            assert_eq!(outcome.is_ok(), allowed, "{host}");
        }
        assert_eq!(ask(&guard, "/", &[]), Err(403));
    }

    #[test]
    fn origins() {
        let guard = Guard::default();
        let from = |origin| {
            ask(
                &guard,
                "/",
                &[("host", "127.0.0.1:8000"), ("origin", origin)],
            )
        };
        assert_eq!(from("http://127.0.0.1:8000"), Ok(()));
        for origin in [
            "http://127.0.0.1:3000",
            "http://evil.example",
            "null",
            "http://localhost:8000",
        ] {
            assert_eq!(from(origin), Err(403), "{origin}");
        }
    }
}
