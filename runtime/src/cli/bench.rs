//! `shardrun bench`.

use super::{DeviceArgs, Error, at_least_one, print};
use clap::Args;
use indicatif::ProgressBar;
use kernels::cuda::Tiling;
use runtime::bench::{BenchOptions, KernelRow, Report, Row, Subject, SyntheticModel, run};
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Measures how fast a checkpoint runs, or a model of random weights
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shardrun bench ./glm-5 --device cuda
  shardrun bench --synthetic glm5 --rank-of 8 --device cuda
  shardrun bench --synthetic glm5 --rank-of 8 --layers 8 --batch 1 --context 2048 --prefill 0 --device cuda --json

GB/s are bytes of weights and cache that a step has to read, over its time; their share is of the rate at which the GPU copies
its own memory, reading and writing, in the same run. With several tokens, experts count once for each visit, at most all.")]
pub(super) struct Bench {
    /// Folder of the checkpoint, as `shardmill convert` writes it
    #[arg(value_name = "DIR", required_unless_present = "synthetic", conflicts_with = "synthetic")]
    dir: Option<PathBuf>,
    /// One rank's share of this model with random weights, made on the GPU: glm5
    #[arg(long, value_name = "MODEL", value_parser = |text: &str| text.parse::<SyntheticModel>())]
    synthetic: Option<SyntheticModel>,
    /// How many ranks the synthetic model would have
    #[arg(long, value_name = "N", requires = "synthetic", value_parser = at_least_one, default_value_t = 1)]
    rank_of: usize,
    /// Take only the first layers of the synthetic model
    #[arg(long, value_name = "N", requires = "synthetic", value_parser = at_least_one)]
    layers: Option<usize>,
    /// Layout of the synthetic model's weights: mma16 or ggml
    #[arg(long, value_name = "LAYOUT", requires = "synthetic", default_value = "mma16", value_parser = tiling)]
    layout: Tiling,
    /// Sequences of a decoding step
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = batch, default_values_t = BenchOptions::default().batches)]
    batch: Vec<usize>,
    /// Tokens that each sequence has before
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = length, default_values_t = BenchOptions::default().contexts)]
    context: Vec<usize>,
    /// Lengths of prompts; 0 for none
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = length, default_values_t = BenchOptions::default().prompts)]
    prefill: Vec<usize>,
    /// Prompt tokens in one step
    #[arg(long, value_name = "TOKENS", value_parser = chunk, default_value_t = BenchOptions::default().chunk)]
    chunk: usize,
    /// Timed steps of each kind
    #[arg(long, value_name = "N", value_parser = batch, default_value_t = BenchOptions::default().steps)]
    steps: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Longer than any model's context is a slip of the hand.
fn length(text: &str) -> Result<usize, String> {
    const MOST: usize = 1 << 20;
    match text.parse() {
        Ok(number) if number <= MOST => Ok(number),
        _ => Err(format!("expected a number of tokens, at most {MOST}")),
    }
}

fn tiling(text: &str) -> Result<Tiling, String> {
    match text {
        "mma16" => Ok(Tiling::Tiles),
        "ggml" => Ok(Tiling::Rows),
        _ => Err("expected mma16 or ggml".to_owned()),
    }
}

fn batch(text: &str) -> Result<usize, String> {
    at_least_one(text).and_then(|n| if n <= 1024 { Ok(n) } else { Err("expected at most 1024".to_owned()) })
}

fn chunk(text: &str) -> Result<usize, String> {
    at_least_one(text)
        .and_then(|n| if n <= 65_535 { Ok(n) } else { Err("expected at most 65535".to_owned()) })
}

impl Bench {
    pub(super) fn run(self) -> Result<ExitCode, Error> {
        let options = BenchOptions {
            batches: self.batch.clone(),
            contexts: self.context.clone(),
            prompts: self.prefill.iter().copied().filter(|&tokens| tokens > 0).collect(),
            chunk: self.chunk,
            steps: self.steps,
            device: self.device.options(),
            threads: self.device.threads,
        };
        let subject = match (&self.dir, self.synthetic) {
            (Some(dir), _) => Subject::Checkpoint(dir),
            (None, Some(model)) => {
                Subject::Synthetic { model, ranks: self.rank_of, layers: self.layers, tiling: self.layout }
            }
            (None, None) => return Err(Error::Usage("a folder or --synthetic is missing".to_owned())),
        };
        let spinner = ProgressBar::new_spinner();
        spinner.enable_steady_tick(Duration::from_millis(100));
        let report = run(subject, &options, |next| spinner.set_message(next.to_owned()));
        spinner.finish_and_clear();
        let report = report?;
        let text = if self.json {
            let json = serde_json::to_string(&report).map_err(|error| Error::Failed(error.to_string()))?;
            format!("{json}\n")
        } else {
            table(&report)
        };
        print(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn table(report: &Report) -> String {
    let mut text = format!("{}\n{}\n", report.subject, report.device);
    let line = |text: &mut String, line: String| {
        text.push_str(line.trim_end());
        text.push('\n');
    };
    for note in &report.notes {
        line(&mut text, format!("note: {note}"));
    }
    if let Some(rate) = report.copy_gb_per_s {
        line(&mut text, format!("copies its own memory at {rate:.0} GB/s, read and write"));
    }
    for (title, tokens, rows) in
        [("decode", "context", &report.decode), ("prompt", "tokens", &report.prefill)]
    {
        if rows.is_empty() {
            continue;
        }
        line(&mut text, String::new());
        line(
            &mut text,
            format!(
                "{title:8} {:>5} {tokens:>8} {:>10} {:>10} {:>10} {:>9} {:>7} {:>6}",
                "batch", "ms", "ms on GPU", "tokens/s", "MB", "GB/s", "share"
            ),
        );
        for Row { batch, tokens, ms, gpu_ms, tokens_per_s, bytes, gb_per_s, share_of_copy } in rows {
            let gpu = gpu_ms.map_or(String::new(), |ms| format!("{ms:.3}"));
            let mb = bytes.map_or(String::new(), |bytes| format!("{:.1}", bytes as f64 / 1e6));
            let gb = gb_per_s.map_or(String::new(), |gb| format!("{gb:.0}"));
            let share = share_of_copy.map_or(String::new(), |share| format!("{:.0} %", share * 100.0));
            let row = format!(
                "{:8} {batch:>5} {tokens:>8} {ms:>10.3} {gpu:>10} {tokens_per_s:>10.1} {mb:>9} {gb:>7} {share:>6}",
                ""
            );
            line(&mut text, row);
        }
    }
    let mut step = "";
    for KernelRow { step: of, kernel, runs, ms, bytes, gb_per_s, share_of_copy } in &report.kernels {
        if of != step {
            step = of;
            let all: f64 = report.kernels.iter().filter(|row| row.step == *of).map(|row| row.ms).sum();
            line(&mut text, String::new());
            line(
                &mut text,
                format!(
                    "{:44} {:>5} {:>9} {:>9} {:>9} {:>7} {:>6}",
                    format!("kernels of {of}: {all:.3} ms"),
                    "runs",
                    "ms",
                    "us each",
                    "MB",
                    "GB/s",
                    "share"
                ),
            );
        }
        let each = ms * 1e3 / *runs as f64;
        let (mb, gb, share) = match bytes {
            0 => (String::new(), String::new(), String::new()),
            _ => (
                format!("{:.1}", *bytes as f64 / 1e6),
                format!("{gb_per_s:.0}"),
                share_of_copy.map_or(String::new(), |share| format!("{:.0} %", share * 100.0)),
            ),
        };
        line(&mut text, format!("{kernel:44} {runs:>5} {ms:>9.3} {each:>9.1} {mb:>9} {gb:>7} {share:>6}"));
    }
    // Writing to a string cannot fail.
    let _ = write!(text, "\nlogits {}\n", report.logits_blake3);
    text
}
