//! What is logged of a request: a line when its answer has been sent or given up, with the id that its client knows too.

use super::admin::Peer;
use super::api::fresh_id;
use super::body::{Watcher, watched};
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use std::time::Instant;
use tracing::{Instrument, Span};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// A longer id of a client's is not taken over.
const MAX_ID_BYTES: usize = 128;

/// Gives a request its id, the client's own where it sends one that fits a log line, and logs its end.
pub(super) async fn request(mut request: Request, next: Next) -> Response {
    let begin = Instant::now();
    let sent = request.headers().get(&REQUEST_ID).filter(|id| {
        id.len() <= MAX_ID_BYTES && !id.is_empty() && id.as_bytes().iter().all(u8::is_ascii_graphic)
    });
    let id = sent.cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&fresh_id("req-")).expect("letters and digits fit a header")
    });
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let span =
        tracing::info_span!(target: "shardrun::access", "request", id = id.to_str().unwrap_or_default());
    let peer = request.extensions().get::<Peer>().map(|Peer(address)| *address);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = next.run(request).instrument(span.clone()).await;
    response.headers_mut().insert(REQUEST_ID, id);
    let status = response.status().as_u16();
    let entry = Entry { span, begin, peer, method, path, status, bytes: 0, whole: false };
    response.map(|body| watched(body, entry))
}

/// A line of the log, written when it is dropped.
struct Entry {
    span: Span,
    begin: Instant,
    peer: Option<std::net::SocketAddr>,
    method: axum::http::Method,
    path: String,
    status: u16,
    /// Of the body, as far as it was taken.
    bytes: u64,
    /// Whether the client took all of it.
    whole: bool,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let _entered = self.span.enter();
        let ms = self.begin.elapsed().as_secs_f64() * 1e3;
        tracing::info!(
            target: "shardrun::access",
            method = %self.method,
            path = %self.path,
            status = self.status,
            ms = (ms * 1e3).round() / 1e3,
            bytes = self.bytes,
            whole = self.whole,
            peer = self.peer.map(tracing::field::display),
            "answered"
        );
    }
}

impl Watcher for Entry {
    fn taken(&mut self, bytes: u64, is_end: bool) {
        self.bytes += bytes;
        self.whole |= is_end;
    }
}
