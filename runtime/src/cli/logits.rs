//! `shardrun logits`.

use super::{CheckpointArgs, DeviceArgs, Error, at_least_one, print};
use clap::Args;
use runtime::engine::EngineOptions;
use runtime::logits::{self, LogitsOptions};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Computes the logits of a token sequence, for audits and tests
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shardrun logits ./glm-5 --tokens ids.json --out logits.safetensors
  echo '[1, 2, 3]' > ids.json; shardrun logits ./glm-5 --tokens ids.json --out last.safetensors --last 1 --precise

The file has `tokens` [T] and `positions` [N] as I32 and `logits` [N, vocabulary] as F32.")]
pub(super) struct Logits {
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// File with the token ids, a JSON list
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,
    /// safetensors file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Keep the logits of this many last positions only
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    last: Option<usize>,
    /// Print what was written as a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

impl Logits {
    pub(super) fn run(self) -> Result<ExitCode, Error> {
        let tokens = read_tokens(&self.tokens)?;
        check_out(&self.out, &self.tokens)?;
        let options = LogitsOptions {
            arithmetic: self.device.arithmetic(),
            threads: self.device.threads,
            chunk: EngineOptions::default().max_num_batched_tokens,
            device: self.device.options(),
        };
        let logits = logits::run(&self.checkpoint.dir, &tokens, self.last, &options)?;
        write(&self.out, &tokens, &logits)?;
        let (positions, vocab_size) = (logits.positions, logits.vocab_size);
        if self.json {
            let written = json!({"out": self.out, "tokens": tokens.len(), "positions": positions, "vocab_size": vocab_size});
            print(&format!("{written}\n"))?;
        } else {
            print(&format!("{}: logits of {positions} positions, {vocab_size} each\n", self.out.display()))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn read_tokens(path: &Path) -> Result<Vec<u32>, Error> {
    let name = path.display().to_string();
    let fault =
        |why: String| Error::Usage(format!("--tokens {name}: expected a JSON list of token ids, {why}"));
    let json = std::fs::read(path).map_err(Error::io(format!("--tokens {name}")))?;
    let ids: Vec<Value> = serde_json::from_slice(&json).map_err(|error| fault(format!("found {error}")))?;
    ids.iter()
        .enumerate()
        .map(|(at, id)| {
            // I32 is what the file stores.
            let id = id.as_u64().filter(|&id| id <= i32::MAX.cast_unsigned().into());
            let id = id.and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| fault(format!("entry {at} is {}", ids[at])))
        })
        .collect()
}

/// An output that would replace the input, or something that is no file, is a slip of the hand.
fn check_out(out: &Path, tokens: &Path) -> Result<(), Error> {
    let refuse = |why: &str| Err(Error::Usage(format!("--out {}: {why}; name another file", out.display())));
    if out.exists() && !out.is_file() {
        return refuse("it is no regular file");
    }
    match (out.canonicalize(), tokens.canonicalize()) {
        (Ok(out), Ok(tokens)) if out == tokens => refuse("it is the file of --tokens"),
        _ => Ok(()),
    }
}

/// Writes a sibling first, so that a file of this name is a whole one.
fn write(path: &Path, tokens: &[u32], logits: &logits::Logits) -> Result<(), Error> {
    let fault = |error: SafeTensorError| Error::Usage(format!("--out {}: {error}", path.display()));
    let first = tokens.len() - logits.positions;
    let positions: Vec<u8> = (first..tokens.len())
        .flat_map(|position| i32::try_from(position).expect("a context is shorter than 2^31").to_le_bytes())
        .collect();
    let ids: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
    let values: Vec<u8> = logits.values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensors = [
        ("tokens", TensorView::new(Dtype::I32, vec![tokens.len()], &ids)),
        ("positions", TensorView::new(Dtype::I32, vec![logits.positions], &positions)),
        ("logits", TensorView::new(Dtype::F32, vec![logits.positions, logits.vocab_size], &values)),
    ];
    let tensors = tensors
        .into_iter()
        .map(|(name, view)| Ok((name, view.map_err(fault)?)))
        .collect::<Result<Vec<_>, Error>>()?;
    let file = safetensors::serialize(tensors, None).map_err(fault)?;
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = std::fs::write(&partial, file).and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        // What matters is the first fault.
        let _ = std::fs::remove_file(&partial);
    }
    written.map_err(Error::io(format!("--out {}", path.display())))
}
