//! Logits of every position of a token sequence: for audits and tests.

use crate::Error;
use crate::batch::Logits as Rows;
use crate::device::DeviceOptions;
use crate::engine::{Arithmetic, EngineOptions, not_numbers};
use crate::kv_cache::BlockPool;
use crate::rank::{RankGroup, RankPart, RankStopped};
use formats::checkpoint::Checkpoint;
use kernels::StepLimits;
use std::path::Path;
use std::sync::Arc;

/// What a [`LogitsRunner`] computed.
#[derive(Clone, Debug)]
pub struct Logits {
    /// `[positions, vocab_size]`, row-major.
    pub values: Vec<f32>,
    /// Positions whose logits were kept: the last ones.
    pub positions: usize,
    /// Width of a row.
    pub vocab_size: usize,
}

/// How a [`LogitsRunner`] computes.
#[derive(Clone, Debug)]
pub struct LogitsOptions {
    /// Which arithmetic runs.
    pub arithmetic: Arithmetic,
    /// Worker threads over all ranks; `None`: one for each core.
    pub threads: Option<usize>,
    /// Tokens of one step: longer sequences go in chunks of this many.
    pub chunk: usize,
    /// What it runs on.
    pub device: DeviceOptions,
}

/// Runs `tokens` through the checkpoint in `dir`, chunk by chunk, with dense attention.
///
/// # Errors
/// As [`LogitsRunner::open`] and [`LogitsRunner::run`].
pub fn run(
    dir: &Path,
    tokens: &[u32],
    last: Option<usize>,
    options: &LogitsOptions,
) -> Result<Logits, Error> {
    LogitsRunner::open(dir, options)?.run(tokens, last)
}

/// A loaded checkpoint that sequences are run through one after the other.
#[derive(Debug)]
pub struct LogitsRunner {
    group: RankGroup,
    blocks: Vec<u32>,
    chunk: usize,
    max_len: usize,
}

impl LogitsRunner {
    /// Loads the checkpoint in `dir`.
    ///
    /// # Errors
    /// [`Error`] naming the file and tensor.
    pub fn open(dir: &Path, options: &LogitsOptions) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(dir)?;
        let max_len = checkpoint.manifest().model.max_position_embeddings;
        let chunk = options.chunk.clamp(1, max_len);
        let blocks = BlockPool::blocks_for(max_len);
        let limits = StepLimits { max_rows: chunk, max_logit_rows: chunk, cache_blocks: blocks };
        let engine = EngineOptions {
            arithmetic: options.arithmetic,
            threads: options.threads,
            device: options.device.clone(),
            ..EngineOptions::default()
        };
        let (model, parts) = (&checkpoint.manifest().model, RankPart::open_all(&checkpoint)?);
        let group = RankGroup::start(model, parts, &engine, limits, &Arc::default())?;
        let blocks = BlockPool::new(blocks).take(blocks).expect("a new pool is all free");
        Ok(Self { group, blocks, chunk, max_len })
    }

    /// The logits of the last `last` positions of `tokens`, or of all.
    ///
    /// # Errors
    /// [`Error::Option`] naming `--tokens` or `--last` when it does not fit the model; [`Error::Stopped`] when a rank fails.
    pub fn run(&mut self, tokens: &[u32], last: Option<usize>) -> Result<Logits, Error> {
        let vocab_size = self.group.vocab_size();
        check_tokens(tokens, vocab_size, self.max_len)?;
        let kept = last.unwrap_or(tokens.len());
        if !(1..=tokens.len()).contains(&kept) {
            let expected = format!("1 to {}, the number of tokens", tokens.len());
            return Err(Error::Option { option: "--last", expected, found: kept.to_string() });
        }
        let first_kept = tokens.len() - kept;
        let mut values = Vec::with_capacity(kept * vocab_size);
        for (i, part) in tokens.chunks(self.chunk).enumerate() {
            let cached = i * self.chunk;
            let wanted = (cached + part.len()).saturating_sub(first_kept).min(part.len());
            let rows = if wanted > 0 { Rows::All } else { Rows::None };
            let stopped = |e: RankStopped| Error::Stopped(e.to_string());
            self.group.step(|batch| batch.push(part, cached, &self.blocks, rows)).map_err(stopped)?;
            let logits = self.group.read_whole().map_err(stopped)?;
            if let Some(fault) = not_numbers(logits) {
                return Err(Error::Stopped(fault));
            }
            values.extend_from_slice(&logits[logits.len() - wanted * vocab_size..]);
        }
        Ok(Logits { values, positions: kept, vocab_size })
    }
}

fn check_tokens(tokens: &[u32], vocab_size: usize, max_len: usize) -> Result<(), Error> {
    let refuse = |expected: String, found: String| Err(Error::Option { option: "--tokens", expected, found });
    if tokens.is_empty() {
        return refuse("at least one token id".to_owned(), "an empty list".to_owned());
    }
    if tokens.len() > max_len {
        return refuse(format!("at most {max_len} token ids, the model's context"), tokens.len().to_string());
    }
    match tokens.iter().find(|&&id| id as usize >= vocab_size) {
        Some(id) => refuse(format!("ids below {vocab_size}, the vocabulary"), id.to_string()),
        None => Ok(()),
    }
}
