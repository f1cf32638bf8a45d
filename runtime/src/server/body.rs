//! An answer's body with somebody who sees what is taken of it.

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};

/// Who sees what is taken of a body, and is dropped with it.
pub(super) trait Watcher: Send + Unpin + 'static {
    /// Bytes were taken, and whether these were the last.
    fn taken(&mut self, _bytes: u64, _is_end: bool) {}
}

/// The body, with its watcher.
pub(super) fn watched(body: Body, watcher: impl Watcher) -> Body {
    Body::new(Watched { body, watcher })
}

struct Watched<W> {
    body: Body,
    watcher: W,
}

impl<W: Watcher> HttpBody for Watched<W> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                let is_end = self.body.is_end_stream();
                self.watcher.taken(frame.data_ref().map_or(0, |data| data.len() as u64), is_end);
            }
            Poll::Ready(None) => self.watcher.taken(0, true),
            _ => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
