//! `shardrun serve`.

use super::log::LogFormat;
use super::notify;
use super::{CheckpointArgs, EngineArgs, Error, INTERRUPTED, at_least_one, bytes, print, start_engine};
use axum::http::HeaderValue;
use clap::Args;
use runtime::dialect::Dialect;
use runtime::engine::{Engine, EngineOptions};
use runtime::reload::ReloadRequest;
use runtime::server::{ApiKeys, Readiness, Server, ServerOptions, Tls};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Serves a checkpoint over OpenAI-compatible HTTP
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shardrun serve ./glm-5
  shardrun serve ./glm-5 --host 0.0.0.0 --port 9000 --served-model-name glm-5
  SHARDRUN_PORT=9000 shardrun serve ./glm-5
  shardrun serve ./glm-5 --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile chain.pem --ssl-keyfile key.pem
  curl http://127.0.0.1:8000/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is 2+2?\"}]}'

/health says 503 until the model is loaded. Ctrl-C or SIGTERM lets answers end, then exits with 0; SIGHUP is `shardrun reload`.")]
pub(super) struct Serve {
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// Address to listen on
    #[arg(long, env = "SHARDRUN_HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes any that is free
    #[arg(long, env = "SHARDRUN_PORT", default_value_t = 8000)]
    port: u16,
    /// The model's name in requests [default: the checkpoint's]
    #[arg(long, env = "SHARDRUN_SERVED_MODEL_NAME", value_name = "NAME", value_parser = model_name)]
    served_model_name: Option<String>,
    /// Answers that are generated at the same time; more requests wait
    #[arg(long, env = "SHARDRUN_MAX_NUM_SEQS", value_name = "N", value_parser = at_least_one, default_value_t = EngineOptions::default().max_num_seqs)]
    max_num_seqs: usize,
    /// Requests that may wait for a place; more are refused with status 429
    #[arg(long, env = "SHARDRUN_MAX_QUEUED_REQUESTS", value_name = "N", value_parser = at_least_one, default_value_t = EngineOptions::default().max_waiting)]
    max_queued_requests: usize,
    /// Seconds that answers get to end when the server is stopped
    #[arg(long, env = "SHARDRUN_SHUTDOWN_TIMEOUT", value_name = "SECONDS", default_value_t = 5)]
    shutdown_timeout: u64,
    /// How log lines on stderr look; json has a line for every request
    #[arg(long, env = "SHARDRUN_LOG_FORMAT", value_name = "FORMAT", value_enum, default_value_t)]
    pub(super) log_format: LogFormat,
    /// Seconds between two readings of all rank files against their digests; 0 is off
    #[arg(long, env = "SHARDRUN_SCRUB_INTERVAL", value_name = "SECONDS", default_value_t = 0)]
    scrub_interval: u64,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Who may ask, and how much.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
struct AccessArgs {
    /// Key that requests must have; may be given several times. Other users of the machine can see it: --api-key-file and SHARDRUN_API_KEY are better
    #[arg(long, env = "SHARDRUN_API_KEY", value_name = "KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// File with keys, one on each line
    #[arg(long, env = "SHARDRUN_API_KEY_FILE", value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Origin whose pages may ask from a browser, scheme and host, or * for all; may be given several times
    #[arg(long, env = "SHARDRUN_ALLOWED_ORIGINS", value_name = "ORIGIN", value_delimiter = ',', value_parser = origin)]
    allowed_origins: Vec<HeaderValue>,
    /// Certificate chain for TLS, PEM; without it the server speaks plain HTTP
    #[arg(long, env = "SHARDRUN_SSL_CERTFILE", value_name = "FILE", requires = "ssl_keyfile")]
    ssl_certfile: Option<PathBuf>,
    /// Key of the certificate, PEM
    #[arg(long, env = "SHARDRUN_SSL_KEYFILE", value_name = "FILE", requires = "ssl_certfile")]
    ssl_keyfile: Option<PathBuf>,
    /// Largest request
    #[arg(long, env = "SHARDRUN_MAX_REQUEST_SIZE", value_name = "SIZE", value_parser = bytes, default_value = "32MiB")]
    max_request_size: usize,
    /// Seconds that a client may take to send a request's head, and again its body
    #[arg(long, env = "SHARDRUN_READ_TIMEOUT", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), default_value_t = 30)]
    read_timeout: u64,
    /// Seconds that an answer may take [default: as long as it takes]
    #[arg(long, env = "SHARDRUN_REQUEST_TIMEOUT", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    request_timeout: Option<u64>,
    /// Connections at the same time; more wait
    #[arg(long, env = "SHARDRUN_MAX_CONNECTIONS", value_name = "N", value_parser = at_least_one, default_value_t = ServerOptions::default().max_connections)]
    max_connections: usize,
}

impl AccessArgs {
    fn options(&self) -> Result<ServerOptions, Error> {
        let mut keys = Vec::new();
        if let Some(path) = &self.api_key_file {
            keys.extend(read_keys(path)?);
        }
        keys.extend(self.api_key.iter().cloned());
        if keys.iter().any(|key| !is_key(key)) {
            let expected = "--api-key: expected a key of printable ASCII characters without spaces";
            return Err(Error::Usage(expected.to_owned()));
        }
        let tls = match (&self.ssl_certfile, &self.ssl_keyfile) {
            (Some(certificates), Some(key)) => Some(Tls::open(certificates, key).map_err(Error::Usage)?),
            _ => None,
        };
        Ok(ServerOptions {
            max_body_bytes: self.max_request_size,
            read_timeout: Duration::from_secs(self.read_timeout),
            request_timeout: self.request_timeout.map(Duration::from_secs),
            max_connections: self.max_connections.min(tokio::sync::Semaphore::MAX_PERMITS),
            api_keys: ApiKeys::new(keys.iter().map(String::as_str)),
            allowed_origins: self.allowed_origins.clone(),
            tls,
            ..ServerOptions::default()
        })
    }
}

/// Keys of a file. An empty one would leave the server open, which nobody means who names it.
pub(super) fn read_keys(path: &Path) -> Result<Vec<String>, Error> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path.display().to_string()))?;
    let keys: Vec<String> =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    let fault = |what: &str| Err(Error::Usage(format!("{}: {what}", path.display())));
    if keys.is_empty() {
        return fault("expected keys, one on each line, found none");
    }
    if let Some(at) = keys.iter().position(|key| !is_key(key)) {
        return fault(&format!("key {}: expected printable ASCII characters without spaces", at + 1));
    }
    Ok(keys)
}

/// What fits into a header.
fn is_key(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic())
}

fn model_name(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("expected a name, found nothing".into()) } else { Ok(text.to_owned()) }
}

fn origin(text: &str) -> Result<HeaderValue, String> {
    const EXPECTED: &str = "expected scheme and host, such as https://example.com, or *";
    let is_origin = text.split_once("://").is_some_and(|(scheme, host)| {
        !scheme.is_empty() && !host.is_empty() && !host.contains(['/', '*', ' '])
    });
    if text != "*" && !is_origin {
        return Err(EXPECTED.to_owned());
    }
    HeaderValue::from_str(text).map_err(|_| EXPECTED.to_owned())
}

impl Serve {
    pub(super) fn run(self) -> Result<ExitCode, Error> {
        let runtime = tokio::runtime::Runtime::new().map_err(Error::io("cannot start threads"))?;
        let code = runtime.block_on(self.serve());
        // A client that never reads its answer must not keep the process.
        runtime.shutdown_background();
        code
    }

    async fn serve(self) -> Result<ExitCode, Error> {
        let mut signals = Signals::listen()?;
        let mut hangup = signal(SignalKind::hangup()).map_err(Error::io("cannot listen for signals"))?;
        let options = ServerOptions {
            shutdown_timeout: Duration::from_secs(self.shutdown_timeout),
            ..self.access.options()?
        };
        let scheme = if options.tls.is_some() { "https" } else { "http" };
        let (host, port) = (self.host.clone(), self.port);
        let server = Server::bind(&host, port, options)
            .await
            .map_err(Error::io(format!("cannot listen on {host}:{port}")))?;
        let address = server.local_addr().map_err(Error::io("the address of the server"))?;
        let readiness = server.readiness();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let serving = tokio::spawn(server.run(async move {
            // The sender going away means the same.
            let _ = stopped.await;
        }));

        let loading = tokio::task::spawn_blocking(move || self.load());
        let loaded = tokio::select! {
            loaded = loading => loaded.map_err(|error| Error::Failed(format!("loading: {error}")))?,
            // Loading cannot be stopped half-way, but the process can: at once, because a GPU's driver must not be taken down under
            // threads that talk to it.
            () = signals.next() => signal_hook::low_level::exit(INTERRUPTED.into()),
        };
        let engine = loaded?.ready(&readiness, scheme, address)?;

        let handle = engine.handle();
        let cause = loop {
            tokio::select! {
                () = signals.next() => break None,
                cause = handle.stopped() => break Some(format!("the engine has stopped: {cause}")),
                _ = hangup.recv() => {
                    let handle = handle.clone();
                    // Whatever comes of it is in the log.
                    tokio::task::spawn_blocking(move || handle.reload(&ReloadRequest::default()));
                }
            }
        };
        notify::tell("STOPPING=1");
        // The server may have ended already; then there is nobody to tell.
        let _ = stop.send(());
        if let Some(cause) = cause {
            // Clients get to read why their answers end.
            let _ = serving.await;
            return Err(Error::Failed(cause));
        }
        tokio::select! {
            served = serving => match served {
                Ok(served) => served.map_err(Error::io("the server"))?,
                Err(error) => return Err(Error::Failed(format!("the server: {error}"))),
            },
            () = signals.next() => return Ok(ExitCode::from(INTERRUPTED)),
        }
        engine.shutdown();
        Ok(ExitCode::SUCCESS)
    }

    fn load(self) -> Result<Loaded, Error> {
        // What is wrong with the folder itself comes before what its files lack.
        formats::checkpoint::Checkpoint::open(&self.checkpoint.dir).map_err(runtime::Error::from)?;
        let dialect = Dialect::open(&self.checkpoint.dir)?;
        let options = EngineOptions {
            max_waiting: self.max_queued_requests,
            scrub_interval: Some(self.scrub_interval).filter(|&seconds| seconds > 0).map(Duration::from_secs),
            ..self.engine.options(self.max_num_seqs)
        };
        let engine = start_engine(&self.checkpoint.dir, &options)?;
        let name = self.served_model_name.unwrap_or_else(|| engine.name().to_owned());
        Ok(Loaded { name, dialect, engine })
    }
}

struct Loaded {
    name: String,
    dialect: Dialect,
    engine: Engine,
}

impl Loaded {
    /// Opens the server to requests and says where it is.
    fn ready(self, readiness: &Readiness, scheme: &str, address: SocketAddr) -> Result<Engine, Error> {
        readiness.ready(&self.name, self.engine.handle(), self.dialect);
        let ranks = match self.engine.ranks() {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks"),
        };
        notify::tell("READY=1");
        print(&format!("shardrun: serving {} ({ranks}) on {scheme}://{address}\n", self.name))?;
        Ok(self.engine)
    }
}

/// Ctrl-C and SIGTERM.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn listen() -> Result<Self, Error> {
        let listen = |kind| signal(kind).map_err(Error::io("cannot listen for signals"));
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => (),
            _ = self.terminate.recv() => (),
        }
    }
}
