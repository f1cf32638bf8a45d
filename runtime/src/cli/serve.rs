//! `shardrun serve`.

use super::{CheckpointArgs, EngineArgs, Error, INTERRUPTED, at_least_one, print, start_engine};
use clap::Args;
use runtime::dialect::Dialect;
use runtime::engine::{Engine, EngineOptions};
use runtime::server::{Readiness, Server, ServerOptions};
use std::net::SocketAddr;
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
  curl http://127.0.0.1:8000/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is 2+2?\"}]}'

/health says 503 until the model is loaded. Ctrl-C or SIGTERM lets answers end, then exits with 0.")]
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
    #[arg(long, env = "SHARDRUN_SERVED_MODEL_NAME", value_name = "NAME")]
    served_model_name: Option<String>,
    /// Answers that are generated at the same time; more requests wait
    #[arg(long, env = "SHARDRUN_MAX_NUM_SEQS", value_name = "N", value_parser = at_least_one, default_value_t = EngineOptions::default().max_num_seqs)]
    max_num_seqs: usize,
    /// Seconds that answers get to end when the server is stopped
    #[arg(long, env = "SHARDRUN_SHUTDOWN_TIMEOUT", value_name = "SECONDS", default_value_t = 5)]
    shutdown_timeout: u64,
    #[command(flatten)]
    engine: EngineArgs,
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
        let options = ServerOptions {
            shutdown_timeout: Duration::from_secs(self.shutdown_timeout),
            ..ServerOptions::default()
        };
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
        let engine = loaded?.ready(&readiness, address)?;

        let handle = engine.handle();
        tokio::select! {
            () = signals.next() => (),
            cause = handle.stopped() => return Err(Error::Failed(format!("the engine has stopped: {cause}"))),
        }
        // The server may have ended already; then there is nobody to tell.
        let _ = stop.send(());
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
        let engine = start_engine(&self.checkpoint.dir, &self.engine.options(self.max_num_seqs))?;
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
    fn ready(self, readiness: &Readiness, address: SocketAddr) -> Result<Engine, Error> {
        readiness.ready(&self.name, self.engine.handle(), self.dialect);
        let ranks = match self.engine.ranks() {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks"),
        };
        print(&format!("shardrun: serving {} ({ranks}) on http://{address}\n", self.name))?;
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
