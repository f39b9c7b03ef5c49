//! Connections: accepting, limits of time and number, a graceful end.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::ServiceExt;

/// Bounds of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most bytes of a body.
    pub body: usize,
    /// Most bytes of a request's line and headers.
    pub headers: usize,
    /// Longest wait for the whole of the headers, on an idle connection too.
    pub header_time: Duration,
    /// Longest wait for the whole of a body.
    pub body_time: Duration,
    /// Most connections at a time; more wait to be accepted.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body: 32 << 20,
            headers: 64 << 10,
            header_time: Duration::from_secs(60),
            body_time: Duration::from_secs(60),
            connections: 1024,
        }
    }
}

/// Most headers of a request.
const MOST_HEADERS: usize = 100;

/// Serves until `stop` is ready; then finishes the requests in progress, for at most `grace`.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    stop: impl Future<Output = ()>,
    grace: Duration,
) {
    let places = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            () = &mut stop => break,
        };
        let Some((stream, place)) = accepted else {
            continue;
        };
        // Pieces of a stream are small and wanted at once.
        let _ = stream.set_nodelay(true);
        let router = router.clone();
        let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
            let router = router.clone();
            async move { Ok::<_, Infallible>(answer(router, request, limits.body_time).await) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_time)
            .max_buf_size(limits.headers.max(8 << 10))
            .max_headers(MOST_HEADERS)
            .serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            let _place = place;
            if let Err(error) = connection.await {
                tracing::debug!("a connection ended: {error}");
            }
        });
    }
    drop(listener);
    // Past the grace, connections end with the runtime.
    let _ = tokio::time::timeout(grace, graceful.shutdown()).await;
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, place)),
        Err(error) => {
            // Out of file descriptors, or a client that has gone already: wait, do not spin.
            tracing::warn!("cannot accept a connection: {error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}

async fn answer(
    router: Router,
    request: hyper::Request<Incoming>,
    body_time: Duration,
) -> axum::response::Response {
    let request: Request = request.map(|body| Body::new(crate::slow::Timed::new(body, body_time)));
    match router.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
