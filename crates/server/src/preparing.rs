//! The work before a request goes to the engine: reading, rendering, tokenizing, grammars.

use crate::app::App;
use crate::error::ApiError;
use crate::served::Served;
use axum::body::Bytes;
use axum::http::StatusCode;
use kozue_engine::memory::release_unused;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Requests prepared at a time: a body of many megabytes needs much more while it is read.
const AT_A_TIME: usize = 2;

/// Bodies from this size on leave so much freed memory behind that it is given back at once.
const LARGE: usize = 1 << 20;

/// Places for requests to be prepared.
pub struct Places(Arc<Semaphore>);

impl Default for Places {
    fn default() -> Places {
        Places(Arc::new(Semaphore::new(AT_A_TIME)))
    }
}

/// Prepares a request on a thread for it, so that the server's own threads stay free.
pub async fn prepare<T: Send + 'static>(
    app: &Arc<App>,
    body: Bytes,
    work: impl FnOnce(&Served, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let failed = |error: &dyn std::fmt::Display| {
        tracing::error!("preparing a request failed: {error}");
        let message = "preparing the request failed";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    };
    let place = Arc::clone(&app.places.0).acquire_owned().await;
    let place = place.map_err(|error| failed(&error))?;
    let app = Arc::clone(app);
    let result = tokio::task::spawn_blocking(move || {
        let large = body.len() >= LARGE;
        let result = work(&app.served, &body);
        drop(body);
        if large {
            release_unused();
        }
        drop(place);
        result
    });
    result.await.unwrap_or_else(|error| Err(failed(&error)))
}
