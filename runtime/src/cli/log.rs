//! Where log lines go, and how they look.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object in each line.
    Json,
}

/// Log lines go to stderr. `SHARDRUN_LOG` says which; without it warnings and reloads do, and in JSON everything from `info` on:
/// whoever collects lines wants the requests too.
pub(super) fn start(format: LogFormat) {
    let usual = match format {
        LogFormat::Text => "warn,runtime::engine::reloader=info",
        LogFormat::Json => "info",
    };
    let filter = EnvFilter::try_from_env("SHARDRUN_LOG").unwrap_or_else(|_| usual.into());
    let lines = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(filter)
        // A stderr that takes nothing, such as a full disk's, must not end the program: the complaint would go there too.
        .log_internal_errors(false);
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}
