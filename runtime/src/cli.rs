//! The command line.

mod bench;
mod generate;
mod log;
mod logits;
mod notify;
mod reference;
mod reload;
mod serve;

use clap::builder::FalseyValueParser;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use indicatif::ProgressBar;
use runtime::device::{CommunicatorChoice, Device, DeviceOptions, LoadMode, ordinals};
use runtime::engine::{Arithmetic, Engine, EngineOptions};
use runtime::scheduler::PrefixCache;
use runtime::verify::Verify;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Runs native checkpoints of MLA + mixture-of-experts language models.
#[derive(Debug, Parser)]
#[command(name = "shardrun", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  shardrun serve ./glm-5                          OpenAI-compatible HTTP on 127.0.0.1:8000
  shardrun generate ./glm-5 --prompt 'What is 2+2?'
  shardrun logits ./glm-5 --tokens ids.json --out logits.safetensors
  shardrun bench ./glm-5 --device cuda
  shardrun reload --dir ./glm-5-new               other weights under a running server
  shardrun completions bash > /etc/bash_completion.d/shardrun";

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Serve),
    Generate(generate::Generate),
    Logits(logits::Logits),
    Bench(bench::Bench),
    Reload(reload::Reload),
    Completions(reference::Completions),
    Man(reference::Man),
}

/// What ends a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The command line.
    #[error("{0}")]
    Usage(String),
    /// The checkpoint, or an option that does not suit it.
    #[error(transparent)]
    Checkpoint(#[from] runtime::Error),
    /// A file or address of the command line.
    #[error("{what}: {source}")]
    Io {
        /// Which.
        what: String,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// It ran, and then something failed.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// 1 for what went wrong on the way, 2 for what was wrong from the start.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) | Self::Checkpoint(_) | Self::Io { .. } => 2,
        }
    }

    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// What a process that Ctrl-C ends returns to its shell.
const INTERRUPTED: u8 = 130;

/// Runs the command that the process was started with.
pub(crate) fn run() -> Result<ExitCode, Error> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    log::start(match &cli.command {
        Command::Serve(serve) => serve.log_format,
        _ => log::LogFormat::Text,
    });
    match cli.command {
        Command::Serve(command) => command.run(),
        Command::Generate(command) => command.run(),
        Command::Logits(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Reload(command) => command.run(),
        Command::Completions(command) => command.run(),
        Command::Man(command) => command.run(),
    }
}

/// Help and version go to stdout; anything else is one line.
fn refuse(error: &clap::Error) -> Result<ExitCode, Error> {
    let text = error.render().to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            print(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            Err(Error::Usage(
                "a command is missing: serve, generate, logits, bench, reload, completions or man; see `shardrun --help`"
                    .into(),
            ))
        }
        _ => {
            let cause = text.split("\n\n").next().unwrap_or_default();
            let cause = cause.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ");
            Err(Error::Usage(format!("{cause}; see `{} --help`", asked_for())))
        }
    }
}

/// The program with the command that it was started with, where it knows it.
fn asked_for() -> String {
    let first = std::env::args_os().nth(1).unwrap_or_default();
    let cli = Cli::command();
    match cli.get_subcommands().find(|command| command.get_name() == first) {
        Some(command) => format!("shardrun {}", command.get_name()),
        None => "shardrun".to_owned(),
    }
}

/// Writes to stdout, now. Nobody reading any more is not an error: `false` then.
fn print(text: &str) -> Result<bool, Error> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(source) => Err(Error::io("stdout")(source)),
    }
}

/// How the checkpoint is run.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
struct EngineArgs {
    /// Longest prompt plus answer, in tokens [default: what the model was trained for, or what the cache has room for]
    #[arg(long, env = "SHARDRUN_MAX_MODEL_LEN", value_name = "TOKENS")]
    max_model_len: Option<usize>,
    /// Prompt tokens in one step; longer prompts go in chunks of this many
    #[arg(long, env = "SHARDRUN_MAX_NUM_BATCHED_TOKENS", value_name = "TOKENS", default_value_t = EngineOptions::default().max_num_batched_tokens)]
    max_num_batched_tokens: usize,
    /// Memory of the key-value caches of all ranks together, such as 8GiB or 500MB [default: what --max-num-seqs answers of the longest length take, at most 4GiB]
    #[arg(long, env = "SHARDRUN_KV_CACHE_MEMORY", value_name = "SIZE", value_parser = bytes)]
    kv_cache_memory: Option<usize>,
    /// Compute every prompt whole, even where its beginning is still in the cache
    #[arg(long, env = "SHARDRUN_NO_ENABLE_PREFIX_CACHING", value_parser = FalseyValueParser::new())]
    no_enable_prefix_caching: bool,
    /// Which bytes are held against their digests when they are loaded: auto (rank files that were not found right before), always (every file; --verify alone means this) or never
    #[arg(long, env = "SHARDRUN_VERIFY", value_name = "WHEN", num_args = 0..=1, require_equals = true, default_value = "auto", default_missing_value = "always", value_parser = |text: &str| text.parse::<Verify>())]
    verify: Verify,
    #[command(flatten)]
    device: DeviceArgs,
}

impl EngineArgs {
    fn options(&self, max_num_seqs: usize) -> EngineOptions {
        EngineOptions {
            threads: self.device.threads,
            max_model_len: self.max_model_len,
            max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            arithmetic: self.device.arithmetic(),
            kv_cache_bytes: self.kv_cache_memory,
            prefix_cache: if self.no_enable_prefix_caching { PrefixCache::Off } else { PrefixCache::On },
            device: self.device.options(),
            verify: self.verify,
            ..EngineOptions::default()
        }
    }
}

/// What it runs on.
#[derive(Debug, Args)]
struct DeviceArgs {
    /// cpu; cuda: one GPU for each rank; cuda:0,1: these GPUs
    #[arg(long, env = "SHARDRUN_DEVICE", value_name = "DEVICE", default_value = "cpu", value_parser = |text: &str| text.parse::<Device>())]
    device: Device,
    /// GPUs that ranks share, dealt out in turn: 0 puts all ranks on one
    #[arg(long, env = "SHARDRUN_DEVICES", value_name = "LIST", value_parser = GpuList::read)]
    devices: Option<GpuList>,
    /// How rank files are read on their way to a GPU: auto, buffered or direct
    #[arg(long, env = "SHARDRUN_LOAD_MODE", value_name = "MODE", default_value = "auto", value_parser = |text: &str| text.parse::<LoadMode>())]
    load_mode: LoadMode,
    /// How ranks on GPUs add up: auto, local (all on one GPU), peer (GPUs that write into each other's memory) or nccl (NVIDIA's library, for GPUs that cannot)
    #[arg(long, env = "SHARDRUN_COMMUNICATOR", value_name = "KIND", default_value = "auto", value_parser = |text: &str| text.parse::<CommunicatorChoice>())]
    communicator: CommunicatorChoice,
    /// Worker threads over all ranks [default: one for each core]
    #[arg(long, env = "SHARDRUN_THREADS", value_name = "N", value_parser = thread_count)]
    threads: Option<usize>,
    /// Compute with the slow arithmetic that everything is tested against
    #[arg(long, env = "SHARDRUN_PRECISE", value_parser = FalseyValueParser::new())]
    precise: bool,
}

/// Numbers of GPUs: one value of the command line, not several.
#[derive(Clone, Debug)]
struct GpuList(Vec<usize>);

impl GpuList {
    fn read(text: &str) -> Result<Self, String> {
        ordinals(text).map(Self)
    }
}

impl DeviceArgs {
    fn options(&self) -> DeviceOptions {
        DeviceOptions {
            device: self.device.clone(),
            shared: self.devices.as_ref().map_or_else(Vec::new, |list| list.0.clone()),
            load_mode: self.load_mode,
            communicator: self.communicator,
        }
    }

    fn arithmetic(&self) -> Arithmetic {
        if self.precise { Arithmetic::Reference } else { Arithmetic::Fast }
    }
}

/// More threads than this are a slip of the hand.
fn thread_count(text: &str) -> Result<usize, String> {
    const MOST: usize = 1024;
    at_least_one(text).and_then(|n| if n <= MOST { Ok(n) } else { Err(format!("expected at most {MOST}")) })
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least 1 is needed".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("not a whole number".into()),
    }
}

/// A number of bytes: `1073741824`, `512MiB`, `8 GB`, `1.5g`. Units of a thousand end with `B` alone.
fn bytes(text: &str) -> Result<usize, String> {
    const EXPECTED: &str = "expected a size such as 8GiB, 500MB or 1073741824";
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| EXPECTED)?;
    let unit = text[digits..].trim().to_lowercase();
    let (prefix, step) = match unit.strip_suffix("ib") {
        Some(prefix) => (prefix, 1024.0f64),
        None => match unit.strip_suffix('b') {
            Some(prefix) => (prefix, 1000.0),
            None => (unit.as_str(), 1024.0),
        },
    };
    let power = ["", "k", "m", "g", "t"].iter().position(|known| *known == prefix).ok_or(EXPECTED)?;
    let size = number * step.powi(i32::try_from(power).expect("there are five"));
    // Beyond a few PB nothing has memory, and floats still count in bytes below.
    if (1.0..1e16).contains(&size) { Ok(size as usize) } else { Err(EXPECTED.to_owned()) }
}

/// Loads a checkpoint, with a spinner where stderr is a terminal.
fn start_engine(dir: &Path, options: &EngineOptions) -> Result<Engine, Error> {
    let spinner = ProgressBar::new_spinner().with_message(format!("loading {}", dir.display()));
    spinner.enable_steady_tick(Duration::from_millis(100));
    let engine = Engine::start(dir, options);
    spinner.finish_and_clear();
    Ok(engine?)
}

/// The checkpoint's folder.
#[derive(Debug, Args)]
struct CheckpointArgs {
    /// Folder of the checkpoint, as `shardmill convert` writes it
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_have_units() {
        for (text, size) in [
            ("1073741824", 1 << 30),
            ("8GiB", 8 << 30),
            ("8 gib", 8 << 30),
            ("500MB", 500_000_000),
            ("1.5k", 1536),
            ("2T", 2 << 40),
            ("7b", 7),
        ] {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        for text in ["", "GiB", "-1", "1e3", "8X", "8GiBs", "0", "0.0001", "1..2", "99999999T", "nan"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
