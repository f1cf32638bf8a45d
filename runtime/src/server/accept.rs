//! Connections: accepted, limited, encrypted where that is asked for, and ended.

use super::admin::Peer;
use super::body::{Watcher, watched};
use axum::extract::{self, Request};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Extension, Router};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate and its key, ready to encrypt with.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads a chain of certificates, the server's first, and the key of that one, both PEM.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn open(certificates: &Path, key: &Path) -> Result<Self, String> {
        let fault = |path: &Path, expected: &str, error: &dyn std::fmt::Display| {
            format!("{}: expected {expected}: {error}", path.display())
        };
        let expected = "PEM certificates";
        let chain = CertificateDer::pem_file_iter(certificates)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| fault(certificates, expected, &error))?;
        if chain.is_empty() {
            return Err(fault(certificates, expected, &"there is none in it"));
        }
        let secret =
            PrivateKeyDer::from_pem_file(key).map_err(|error| fault(key, "a PEM private key", &error))?;
        let mut config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(chain, secret)
            .map_err(|error| fault(key, "the key of the certificate", &error))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}

/// What bounds connections.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) connections: usize,
    /// For a request's head, and for the handshake.
    pub(super) read_timeout: Duration,
    /// For answers to end once the server is told to stop.
    pub(super) grace: Duration,
}

/// Serves until `shutdown` resolves; then takes no more connections and waits for answers to end.
pub(super) async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<Tls>,
    limits: Limits,
    shutdown: impl Future<Output = ()>,
) -> std::io::Result<()> {
    // One request after the other on a connection is all that clients of such a server do.
    let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.read_timeout);
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(limits.connections));
    tokio::pin!(shutdown);
    loop {
        let place = tokio::select! {
            place = Arc::clone(&places).acquire_owned() => place.expect("it is never closed"),
            () = &mut shutdown => break,
        };
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, or the client is gone: the next one may fare better.
                    tracing::warn!("accept: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            () = &mut shutdown => break,
        };
        // Small chunks should leave at once.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("set_nodelay: {error}");
        }
        let (builder, router, tls, watcher) =
            (builder.clone(), router.clone(), tls.clone(), graceful.watcher());
        let (timeout, router) = (limits.read_timeout, router.layer(Extension(Peer(peer))));
        tokio::spawn(async move {
            match tls {
                None => answer(stream, &builder, router, watcher, timeout).await,
                Some(tls) => match tokio::time::timeout(timeout, tls.0.accept(stream)).await {
                    Ok(Ok(stream)) => answer(stream, &builder, router, watcher, timeout).await,
                    Ok(Err(error)) => tracing::debug!("TLS: {error}"),
                    Err(_) => tracing::debug!("TLS: the handshake took too long"),
                },
            }
            drop(place);
        });
    }
    drop(listener);
    // Answers that go on for longer are cut off.
    let _ = tokio::time::timeout(limits.grace, graceful.shutdown()).await;
    Ok(())
}

async fn answer<S>(
    stream: S,
    builder: &auto::Builder<TokioExecutor>,
    router: Router,
    watcher: hyper_util::server::graceful::Watcher,
    timeout: Duration,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let activity = Arc::new(Activity::default());
    let service = TowerToHyperService::new(
        router.layer(middleware::from_fn_with_state(Arc::clone(&activity), note_activity)),
    );
    // With upgrades the builder would take HTTP/2 too, and its hundreds of requests on a connection.
    let connection = watcher.watch(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        ended = connection => if let Err(error) = ended {
            // Clients go away as they like.
            tracing::debug!("connection: {error}");
        },
        // hyper waits for ever for the first byte of a request, and connections that say nothing would take every place.
        () = activity.idle(timeout) => tracing::debug!("connection: idle"),
    }
}

/// What happens on a connection.
#[derive(Debug, Default)]
struct Activity {
    /// Requests so far.
    begun: AtomicU64,
    /// Those whose answers have been sent, or given up.
    ended: AtomicU64,
}

impl Activity {
    /// Resolves when no request was open for this long.
    async fn idle(&self, timeout: Duration) {
        loop {
            let before = self.begun.load(Ordering::Acquire);
            tokio::time::sleep(timeout).await;
            let begun = self.begun.load(Ordering::Acquire);
            if begun == before && self.ended.load(Ordering::Acquire) == begun {
                return;
            }
        }
    }
}

/// Counts a request as open until its answer's body is dropped.
struct Open(Arc<Activity>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::AcqRel);
    }
}

impl Watcher for Open {}

async fn note_activity(
    extract::State(activity): extract::State<Arc<Activity>>,
    request: Request,
    next: Next,
) -> Response {
    activity.begun.fetch_add(1, Ordering::AcqRel);
    let open = Open(activity);
    next.run(request).await.map(|body| watched(body, open))
}
