//! OpenAI's HTTP interfaces, as vLLM's users know them, and Anthropic's.

mod accept;
mod admin;
mod answer;
mod anthropic;
mod api;
mod auth;
mod body;
mod chat;
mod completions;
mod error;
mod fields;
mod form;
mod known;
mod log;
mod messages;
mod openai;
mod openapi;
mod request;
mod responses;
mod routes;
mod shape;
mod tokens;
mod tool_grammar;

pub use accept::Tls;
pub use auth::ApiKeys;

use crate::dialect::Dialect;
use crate::engine::{EngineHandle, EventStream, GenerationRequest, ModelInfo, Refusal};
use crate::reload::{ReloadError, ReloadReport, ReloadRequest};
use crate::status::Status;
use axum::http::HeaderValue;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
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

    /// What clients may know of the model.
    fn model(&self) -> ModelInfo;

    /// What it counts, in Prometheus' text format, labelled with this name.
    fn metrics(&self, model: &str) -> String;

    /// Loads other weights; waits until that is done.
    ///
    /// # Errors
    /// [`ReloadError`]: everything is as it was.
    fn reload(&self, request: &ReloadRequest) -> Result<ReloadReport, ReloadError>;

    /// What is served now, where that is known.
    fn status(&self) -> Option<Status>;

    /// Why new requests should go elsewhere, where they should.
    fn trouble(&self) -> Option<String>;
}

impl Backend for EngineHandle {
    fn submit(&self, request: GenerationRequest) -> Result<EventStream, Refusal> {
        Self::submit(self, request)
    }

    fn model(&self) -> ModelInfo {
        Self::model(self).clone()
    }

    fn metrics(&self, model: &str) -> String {
        Self::metrics(self).render(model)
    }

    fn reload(&self, request: &ReloadRequest) -> Result<ReloadReport, ReloadError> {
        Self::reload(self, request)
    }

    fn status(&self) -> Option<Status> {
        Self::status(self)
    }

    fn trouble(&self) -> Option<String> {
        Self::trouble(self)
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
    /// How long a client may take to send a request's head, and again its body.
    pub read_timeout: Duration,
    /// How long an answer may take; `None`: as long as it takes.
    pub request_timeout: Option<Duration>,
    /// Connections at the same time; more wait.
    pub max_connections: usize,
    /// Who may ask.
    pub api_keys: ApiKeys,
    /// Pages of which origins may ask from a browser; `*` is all.
    pub allowed_origins: Vec<HeaderValue>,
    /// Encryption; without it the server speaks plain HTTP.
    pub tls: Option<Tls>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            max_body_bytes: 32 << 20,
            ping: Duration::from_secs(15),
            shutdown_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(30),
            request_timeout: None,
            max_connections: 4096,
            api_keys: ApiKeys::default(),
            allowed_origins: Vec::new(),
            tls: None,
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
    /// Whether it was said that a prompt is longer than what the model attends to.
    said_dense: AtomicBool,
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
        let state = State {
            options,
            started: unix_time(),
            ready: OnceLock::new(),
            said_dense: AtomicBool::new(false),
        };
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
        let options = &self.state.options;
        let limits = accept::Limits {
            connections: options.max_connections,
            read_timeout: options.read_timeout,
            grace: options.shutdown_timeout,
        };
        let tls = options.tls.clone();
        accept::serve(self.listener, routes::router(self.state), tls, limits, shutdown).await
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
