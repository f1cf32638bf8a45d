//! OpenAI's HTTP interface, as vLLM's users know it.

mod answer;
mod api;
mod error;
mod fields;
mod messages;
mod request;
mod routes;

use crate::dialect::Dialect;
use crate::engine::{EngineHandle, EventStream, GenerationRequest, Refusal};
use axum::serve::ListenerExt;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;

/// What the server needs of an engine.
pub trait Backend: Send + Sync + 'static {
    /// Queues a request. Dropping the stream cancels it.
    ///
    /// # Errors
    /// [`Refusal`] when it cannot be run, or not now.
    fn submit(&self, request: GenerationRequest) -> Result<EventStream, Refusal>;

    /// Most tokens of a prompt and its answer together.
    fn max_model_len(&self) -> usize;
}

impl Backend for EngineHandle {
    fn submit(&self, request: GenerationRequest) -> Result<EventStream, Refusal> {
        Self::submit(self, request)
    }

    fn max_model_len(&self) -> usize {
        self.model().max_model_len
    }
}

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Largest body, in bytes.
    pub max_body_bytes: usize,
    /// Longest silence of a stream, after which a comment is sent.
    pub ping: Duration,
    /// How long answers may take to end once the server is told to stop.
    pub shutdown_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            max_body_bytes: 32 << 20,
            ping: Duration::from_secs(15),
            shutdown_timeout: Duration::from_secs(5),
        }
    }
}

/// A server that has its address. Until it is [`Readiness::ready`] it says that the model is loading.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    state: Arc<State>,
}

/// Tells a server that its model is loaded.
#[derive(Clone, Debug)]
pub struct Readiness(Arc<State>);

#[derive(Debug)]
struct State {
    options: ServerOptions,
    /// Unix time in seconds.
    started: u64,
    ready: OnceLock<Ready>,
}

#[derive(Clone)]
struct Ready {
    /// The name that `model` must have.
    model: Arc<str>,
    backend: Arc<dyn Backend>,
    dialect: Arc<Dialect>,
}

impl std::fmt::Debug for Ready {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ready({})", self.model)
    }
}

impl Server {
    /// Takes an address; port 0 is any free one.
    ///
    /// # Errors
    /// The operating system does not give it.
    pub async fn bind(host: &str, port: u16, options: ServerOptions) -> std::io::Result<Self> {
        let listener = TcpListener::bind((host, port)).await?;
        let state = State { options, started: unix_time(), ready: OnceLock::new() };
        Ok(Self { listener, state: Arc::new(state) })
    }

    /// The address that clients connect to.
    ///
    /// # Errors
    /// The operating system does not say.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// For who loads the model.
    pub fn readiness(&self) -> Readiness {
        Readiness(Arc::clone(&self.state))
    }

    /// Serves until `shutdown` resolves, then takes no more connections and gives answers the shutdown timeout to end.
    ///
    /// # Errors
    /// The operating system closes the listener.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send + 'static) -> std::io::Result<()> {
        let grace = self.state.options.shutdown_timeout;
        let (stop, stopped) = tokio::sync::oneshot::channel();
        // Small chunks should leave at once.
        let listener = self.listener.tap_io(|stream| {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!("set_nodelay: {error}");
            }
        });
        let serving = axum::serve(listener, routes::router(self.state)).with_graceful_shutdown(async move {
            shutdown.await;
            // The other side waits as long as this one serves.
            let _ = stop.send(());
        });
        let timeout = async move {
            match stopped.await {
                Ok(()) => tokio::time::sleep(grace).await,
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            served = serving => served,
            () = timeout => Ok(()),
        }
    }
}

impl Readiness {
    /// From now on requests for `model` are answered. Only the first call counts.
    pub fn ready(&self, model: &str, backend: impl Backend, dialect: Dialect) {
        self.0.ready.get_or_init(|| Ready {
            model: model.into(),
            backend: Arc::new(backend),
            dialect: Arc::new(dialect),
        });
    }
}

fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
