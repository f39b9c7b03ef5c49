//! The chat page: one file, which needs nothing but this server.

use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};

/// The page may talk to this server and load nothing else.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub async fn page() -> Response {
    let headers: [(HeaderName, &str); 2] = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (CONTENT_TYPE, "text/html; charset=utf-8"),
    ];
    (headers, include_str!("page.html")).into_response()
}
