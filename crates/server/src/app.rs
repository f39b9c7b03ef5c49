//! What all requests share, and where each path leads.

use crate::error::{ApiError, Dialect};
use crate::guard::{self, Guard};
use crate::metrics::Metrics;
use crate::preparing::Places;
use crate::served::Served;
use crate::{anthropic, openai, page};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::sync::Arc;

/// State of the server.
pub struct App {
    /// The model.
    pub served: Served,
    /// Counters.
    pub metrics: Metrics,
    /// Who may ask.
    pub guard: Guard,
    /// Bounds what is prepared at a time.
    pub places: Places,
    /// Most bytes of a body.
    pub body_limit: usize,
}

/// The server's paths.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*id}", get(openai::models::one))
        .route("/v1/chat/completions", post(openai::chat::answer))
        .route("/v1/completions", post(openai::completions::answer))
        .route("/v1/responses", post(openai::responses::answer))
        .route("/v1/messages", post(anthropic::messages::answer))
        .route(
            "/v1/messages/count_tokens",
            post(anthropic::messages::count),
        )
        .route("/v1/embeddings", post(openai::models::embeddings))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(
            Arc::clone(&app),
            guard::check,
        ))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), finish))
        .with_state(app)
}

/// Gives errors the shape of the API that was asked, and counts.
async fn finish(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let dialect = Dialect::of_path(request.uri().path());
    let path = request
        .extensions()
        .get::<MatchedPath>()
        .map(|path| path.as_str().to_string());
    let head = request.method() == Method::HEAD;
    let mut response = next.run(request).await;
    let status = response.status();
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let allow = response.headers_mut().remove(header::ALLOW);
        response = error.response(dialect);
        if let Some(allow) = allow {
            response.headers_mut().insert(header::ALLOW, allow);
        }
        if head {
            *response.body_mut() = axum::body::Body::empty();
        }
    }
    app.metrics
        .requested(known_path(path.as_deref()), status.as_u16());
    response
}

/// Labels of metrics are the server's own paths, never a client's words.
fn known_path(path: Option<&str>) -> &'static str {
    const PATHS: [&str; 12] = [
        "/",
        "/health",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/v1/models/{*id}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ];
    PATHS
        .into_iter()
        .find(|known| path == Some(known))
        .unwrap_or("other")
}

async fn health(State(app): State<Arc<App>>) -> Json<Value> {
    let load = app.served.backend().load();
    Json(json!({
        "status": "ok", "model": app.served.id,
        "running": load.running, "waiting": load.waiting,
    }))
}

async fn metrics(State(app): State<Arc<App>>) -> Response<String> {
    let text = app.metrics.text(app.served.backend().load());
    let mut response = Response::new(text);
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
    );
    response
}

async fn openapi() -> Response {
    let headers = [(header::CONTENT_TYPE, "application/json")];
    (headers, include_str!("openapi.json")).into_response()
}

async fn unknown(request: Request) -> ApiError {
    let path = request.uri().path();
    let shown: String = path.chars().take(100).collect();
    let message = format!("there is nothing at {shown}: /openapi.json lists what there is");
    ApiError::new(StatusCode::NOT_FOUND, message).code("unknown_url")
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!(
        "{} cannot be used with {}",
        request.method(),
        request.uri().path()
    );
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
}
