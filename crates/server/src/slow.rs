//! Bodies that must arrive in time.

use axum::body::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Sleep;

/// A body with a deadline for all of it.
pub struct Timed<B> {
    body: B,
    deadline: Pin<Box<Sleep>>,
}

impl<B> Timed<B> {
    /// From now on.
    pub fn new(body: B, time: Duration) -> Timed<B> {
        Timed {
            body,
            deadline: Box::pin(tokio::time::sleep(time)),
        }
    }
}

/// Why a body failed.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// It took too long.
    #[error("the body did not arrive in time")]
    Late,
    /// The connection broke.
    #[error("{0}")]
    Broken(String),
}

impl<B> Body for Timed<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(
                frame.map(|frame| frame.map_err(|error| BodyError::Broken(error.to_string()))),
            );
        }
        match self.deadline.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Some(Err(BodyError::Late))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
