//! How fast a checkpoint, or a model that is only sizes, runs on this machine.
//!
//! Steps are the ones that the engine runs for greedy answers, the choice of the token included; the sequences' cache holds
//! zeros, which take as long as numbers. On one GPU without other ranks every kernel is timed too, in one more step.

mod synthetic;

pub use synthetic::SyntheticModel;

use crate::Error;
use crate::batch::{Batch, Logits};
use crate::comm::SharedGpu;
use crate::device::{DeviceOptions, LoadMode};
use crate::engine::{Arithmetic, EngineOptions};
use crate::kv_cache::BlockPool;
use crate::model::{Model, StepFault};
use crate::rank::{Asked, How, RankGroup, RankPart, RankStopped, on_gpu};
use crate::upload::LoadPlan;
use formats::Digest;
use formats::checkpoint::Checkpoint;
use kernels::StepLimits;
use kernels::candidates::{Candidates, Selection};
use kernels::cuda::driver::{Device as Gpu, Timing};
use kernels::cuda::synthetic::copy_rate;
use kernels::cuda::{Cuda, Tiling};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is measured.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Sequences of a decoding step.
    pub batches: Vec<usize>,
    /// Tokens that each of them has before the first step.
    pub contexts: Vec<usize>,
    /// Lengths of prompts.
    pub prompts: Vec<usize>,
    /// Tokens of a prompt in one step.
    pub chunk: usize,
    /// Timed steps of each kind.
    pub steps: usize,
    /// What it runs on.
    pub device: DeviceOptions,
    /// Worker threads, on the processor.
    pub threads: Option<usize>,
}

/// What is run.
#[derive(Clone, Copy, Debug)]
pub enum Subject<'a> {
    /// The checkpoint in a folder.
    Checkpoint(&'a Path),
    /// One rank's share of a model with random weights.
    Synthetic {
        /// The model.
        model: SyntheticModel,
        /// How many ranks it would have.
        ranks: usize,
        /// How many of its layers there are; `None`: all.
        layers: Option<usize>,
        /// Order of its blocks.
        tiling: Tiling,
    },
}

/// All figures.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What ran.
    pub subject: String,
    /// On what.
    pub device: String,
    /// What is not as in service.
    pub notes: Vec<String>,
    /// Bytes that the device reads and writes in a second when it copies its own memory, in GB.
    pub copy_gb_per_s: Option<f64>,
    /// Steps of one token for each sequence.
    pub decode: Vec<Row>,
    /// Whole prompts of one sequence.
    pub prefill: Vec<Row>,
    /// Kernels of single steps.
    pub kernels: Vec<KernelRow>,
    /// BLAKE3 of the last logits: the same on the next run of the same program on the same device.
    pub logits_blake3: String,
}

/// A measured case.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Sequences.
    pub batch: usize,
    /// Tokens before, or of the prompt.
    pub tokens: usize,
    /// Milliseconds of a step, or of the prompt: the median.
    pub ms: f64,
    /// Milliseconds of these that the GPU worked: the median, or the sum over a prompt's steps.
    pub gpu_ms: Option<f64>,
    /// Tokens in a second, over all sequences.
    pub tokens_per_s: f64,
    /// Bytes of weights and cache that a step has to read.
    pub bytes: Option<u64>,
    /// The same in a second, in GB.
    pub gb_per_s: Option<f64>,
    /// Of the copy rate.
    pub share_of_copy: Option<f64>,
}

/// All runs of one kernel with one weight shape in one step.
#[derive(Clone, Debug, Serialize)]
pub struct KernelRow {
    /// Which step.
    pub step: String,
    /// The kernel, with type, rows and columns of its weight.
    pub kernel: String,
    /// Runs.
    pub runs: usize,
    /// Milliseconds of all runs.
    pub ms: f64,
    /// Bytes that they had to read.
    pub bytes: u64,
    /// The same in a second, in GB.
    pub gb_per_s: f64,
    /// Of the copy rate.
    pub share_of_copy: Option<f64>,
}

/// Runs all cases. `progress` is told what comes next.
///
/// # Errors
/// [`Error`] naming the file, tensor, option or device.
pub fn run(
    subject: Subject<'_>,
    options: &BenchOptions,
    mut progress: impl FnMut(&str),
) -> Result<Report, Error> {
    progress("loading");
    let mut bench = Bench::open(subject, options)?;
    let rate = match &mut bench.runner {
        Runner::One(model) => {
            model.backend_mut().time_steps()?;
            Some(copy_rate(model.backend()).map_err(kernels::Error::from)?)
        }
        Runner::Group(_) => None,
    };
    let mut report = Report {
        subject: bench.subject.clone(),
        device: bench.device.clone(),
        notes: bench.notes.clone(),
        copy_gb_per_s: rate.map(|rate| rate / 1e9),
        decode: Vec::new(),
        prefill: Vec::new(),
        kernels: Vec::new(),
        logits_blake3: String::new(),
    };
    for &context in &options.contexts {
        for &batch in &options.batches {
            progress(&format!("decoding {batch} x context {context}"));
            let ms = bench.decode(batch, context, options.steps)?;
            let trace = bench.trace(|bench| bench.decode(batch, context, 1).map(drop))?;
            let bytes = trace.as_ref().map(|trace| trace.iter().map(|timing| timing.cost.bytes).sum());
            report.decode.push(Row::new([batch, context], ms, batch, bytes, rate));
            let first = context == options.contexts[0];
            if let Some(trace) = trace.filter(|_| first && (batch == 1 || batch == 8)) {
                report.kernels.extend(summary(&format!("decode {batch} x {context}"), &trace, rate));
            }
        }
    }
    report.logits_blake3 = bench.digest()?;
    for &tokens in &options.prompts {
        progress(&format!("prompt of {tokens} tokens"));
        let runs = if tokens <= 1024 { 3 } else { 1 };
        bench.prefill(tokens.min(options.chunk), options.chunk)?;
        let mut times =
            (0..runs).map(|_| bench.prefill(tokens, options.chunk)).collect::<Result<Vec<_>, _>>()?;
        report.prefill.push(Row::new([1, tokens], median(&mut times), tokens, None, rate));
    }
    if let Some(&tokens) = options.prompts.first() {
        let chunk = options.chunk;
        if let Some(trace) = bench.trace(|bench| bench.prefill(tokens.min(chunk), chunk).map(drop))? {
            report.kernels.extend(summary(&format!("prompt of {}", tokens.min(chunk)), &trace, rate));
        }
    }
    Ok(report)
}

impl Row {
    fn new(
        [batch, tokens]: [usize; 2],
        Times { wall, gpu }: Times,
        produced: usize,
        bytes: Option<u64>,
        rate: Option<f64>,
    ) -> Self {
        let seconds = wall.as_secs_f64();
        let per_s = bytes.map(|bytes| bytes as f64 / seconds);
        Self {
            batch,
            tokens,
            ms: seconds * 1e3,
            gpu_ms: gpu.map(|gpu| gpu.as_secs_f64() * 1e3),
            tokens_per_s: produced as f64 / seconds,
            bytes,
            gb_per_s: per_s.map(|per_s| per_s / 1e9),
            share_of_copy: per_s.zip(rate).map(|(per_s, rate)| per_s / rate),
        }
    }
}

/// How long something took: in all, and on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Times {
    wall: Duration,
    gpu: Option<Duration>,
}

/// Something that runs steps.
enum Runner {
    /// One rank, on this thread.
    One(Box<Model<Cuda, SharedGpu>>),
    /// Any checkpoint.
    Group(RankGroup),
}

struct Bench {
    runner: Runner,
    batch: Batch,
    candidates: Vec<Candidates>,
    vocab_size: usize,
    blocks: Vec<u32>,
    subject: String,
    device: String,
    notes: Vec<String>,
}

impl Bench {
    fn open(subject: Subject<'_>, options: &BenchOptions) -> Result<Self, Error> {
        let longest = |lengths: &[usize]| lengths.iter().copied().max().unwrap_or(0);
        let batch = longest(&options.batches).max(1);
        let per_sequence = BlockPool::blocks_for(longest(&options.contexts) + options.steps + 8);
        let blocks = (batch * per_sequence).max(BlockPool::blocks_for(longest(&options.prompts)));
        let chunk = options.chunk.min(longest(&options.prompts)).max(1);
        let limits = StepLimits {
            max_rows: chunk.max(batch).max(16),
            max_logit_rows: batch.max(16),
            cache_blocks: blocks,
        };
        let (runner, vocab_size, subject, device, notes) = match subject {
            Subject::Checkpoint(dir) => Self::checkpoint(dir, options, limits)?,
            Subject::Synthetic { model, ranks, layers, tiling } => Self::synthetic(
                model,
                [ranks, layers.unwrap_or(usize::MAX)],
                tiling,
                &options.device,
                limits,
            )?,
        };
        let blocks = BlockPool::new(blocks).take(blocks).expect("a new pool is all free");
        Ok(Self {
            runner,
            batch: Batch::default(),
            candidates: Vec::new(),
            vocab_size,
            blocks,
            subject,
            device,
            notes,
        })
    }

    fn checkpoint(
        dir: &Path,
        options: &BenchOptions,
        limits: StepLimits,
    ) -> Result<(Runner, usize, String, String, Vec<String>), Error> {
        let checkpoint = Checkpoint::open(dir)?;
        let manifest = checkpoint.manifest();
        let subject = format!("{} ({} ranks)", manifest.name, manifest.ranks);
        let vocab_size = manifest.model.vocab_size;
        let gpus = options.device.open(manifest.ranks)?;
        let (runner, device, notes) = match gpus.as_deref() {
            Some([gpu]) => {
                checkpoint.rank_manifests()?;
                let plan = LoadPlan { mode: options.device.load_mode, threads: 8, stop: Arc::default() };
                let (backend, end) = alone(gpu, &limits, manifest.model.hidden_size)?;
                let part = RankPart::open(&checkpoint, 0)?;
                let (model, _) = on_gpu(backend, end, &part, &manifest.model, limits, &plan)?;
                (Runner::One(Box::new(model)), name_of(gpu), Vec::new())
            }
            gpus => {
                let engine = EngineOptions {
                    arithmetic: Arithmetic::Fast,
                    threads: options.threads,
                    device: options.device.clone(),
                    ..EngineOptions::default()
                };
                let parts = RankPart::open_all(&checkpoint)?;
                let group = RankGroup::start(&manifest.model, parts, &engine, limits, &Arc::default())?;
                let device = match gpus {
                    Some(gpus) => gpus.iter().map(|gpu| name_of(gpu)).collect::<Vec<_>>().join(", "),
                    None => "processor".to_owned(),
                };
                let notes = vec!["kernels are timed on one GPU with one rank only".to_owned()];
                (Runner::Group(group), device, notes)
            }
        };
        Ok((runner, vocab_size, subject, device, notes))
    }

    fn synthetic(
        model: SyntheticModel,
        [ranks, layers]: [usize; 2],
        tiling: Tiling,
        device: &DeviceOptions,
        limits: StepLimits,
    ) -> Result<(Runner, usize, String, String, Vec<String>), Error> {
        let all = synthetic::layer_count(model);
        let layers = if layers == usize::MAX { all } else { layers };
        if !(1..=all).contains(&layers) {
            let expected = format!("1 to {all}, the model's layers");
            return Err(Error::Option { option: "--layers", expected, found: layers.to_string() });
        }
        let Some(gpus) = device.open(1)? else {
            let expected = "--device cuda: synthetic weights are made on a GPU".to_owned();
            return Err(Error::Option { option: "--synthetic", expected, found: "--device cpu".to_owned() });
        };
        let config = synthetic::config(model, layers);
        let (backend, end) = alone(&gpus[0], &limits, config.hidden_size)?;
        let weights = synthetic::weights(&backend, &config, ranks, tiling)?;
        let vocab_size = weights.logit_rows.len();
        let one = Model::new(backend, end, weights, &config, limits)?;
        let notes = vec![
            "weights are random".to_owned(),
            format!("sums over the {ranks} ranks are left out: each has its own part only"),
        ];
        let subject = format!("{model:?}, one rank of {ranks}, {layers} of {all} layers, Q4_K_M types");
        Ok((Runner::One(Box::new(one)), vocab_size, subject, name_of(&gpus[0]), notes))
    }

    /// A step as the engine runs it for greedy answers.
    fn step(&mut self) -> Result<(), Error> {
        let (rows, likeliest) = (self.batch.logit_rows().len(), Selection::default());
        self.candidates.clear();
        match &mut self.runner {
            Runner::One(model) => {
                let stopped = |fault: StepFault| Error::Stopped(fault.to_string());
                model.forward(&self.batch).map_err(stopped)?;
                let asked: Vec<(usize, &Selection)> = (0..rows).map(|row| (row, &likeliest)).collect();
                model.candidates(&asked, &mut self.candidates).map_err(stopped)?;
                Ok(model.finish()?)
            }
            Runner::Group(group) => {
                let stopped = |stopped: RankStopped| Error::Stopped(stopped.to_string());
                let batch = &self.batch;
                group.step(|to| to.copy_from(batch)).map_err(stopped)?;
                let how = How::Chosen(Arc::new(likeliest));
                let asked = (0..rows).map(|row| Asked { row, how: how.clone() }).collect();
                group.read(asked).map_err(stopped)?;
                Ok(())
            }
        }
    }

    /// The logits of the last step.
    fn logits(&mut self) -> Result<Vec<f32>, Error> {
        let rows = self.batch.logit_rows().len();
        let mut logits = vec![0.0; rows * self.vocab_size];
        match &mut self.runner {
            Runner::One(model) => {
                model.read(0..rows, &mut logits);
                model.finish()?;
            }
            Runner::Group(group) => {
                let read = group.read_whole().map_err(|stopped| Error::Stopped(stopped.to_string()))?;
                logits.copy_from_slice(read);
            }
        }
        Ok(logits)
    }

    fn timed_step(&mut self) -> Result<Times, Error> {
        let start = Instant::now();
        self.step()?;
        let wall = start.elapsed();
        let gpu = match &self.runner {
            Runner::One(model) => model.backend().step_milliseconds(),
            Runner::Group(_) => None,
        };
        Ok(Times { wall, gpu: gpu.map(|ms| Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3)) })
    }

    /// The median time of a step.
    fn decode(&mut self, batch: usize, context: usize, steps: usize) -> Result<Times, Error> {
        /// Steps that make memory, record, and repeat for the first time.
        const WARM_UP: usize = 3;
        let per_sequence = BlockPool::blocks_for(context + steps + WARM_UP);
        let mut times = Vec::with_capacity(steps);
        for step in 0..WARM_UP + steps {
            self.batch.clear();
            for sequence in 0..batch {
                let token = u32::try_from((sequence * 7919 + step * 104_729) % self.vocab_size).unwrap_or(0);
                let blocks = &self.blocks[sequence * per_sequence..][..per_sequence];
                self.batch.push(&[token], context + step, blocks, Logits::Last);
            }
            let times_of_step = self.timed_step()?;
            if step >= WARM_UP {
                times.push(times_of_step);
            }
        }
        Ok(median(&mut times))
    }

    /// The time of a whole prompt, up to its last token's logits.
    fn prefill(&mut self, tokens: usize, chunk: usize) -> Result<Times, Error> {
        let ids: Vec<u32> =
            (0..tokens).map(|i| u32::try_from(i * 104_729 % self.vocab_size).unwrap_or(0)).collect();
        let mut times = Times::default();
        let mut cached = 0;
        for part in ids.chunks(chunk) {
            self.batch.clear();
            let last = cached + part.len() == tokens;
            let blocks = &self.blocks[..BlockPool::blocks_for(cached + part.len())];
            self.batch.push(part, cached, blocks, if last { Logits::Last } else { Logits::None });
            let step = self.timed_step()?;
            times.wall += step.wall;
            times.gpu = step.gpu.map(|gpu| times.gpu.unwrap_or_default() + gpu);
            cached += part.len();
        }
        Ok(times)
    }

    /// What the kernels of the last step of `run` took; `None` where they cannot be timed.
    fn trace(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<Option<Vec<Timing>>, Error> {
        let Runner::One(model) = &self.runner else { return Ok(None) };
        let stream = Arc::clone(model.backend().stream());
        stream.start_trace();
        run(self)?;
        let mut trace = stream.end_trace().map_err(kernels::Error::from)?;
        // Every step begins with the embedding.
        let last = trace.iter().rposition(|timing| timing.name == "embed").unwrap_or(0);
        Ok(Some(trace.split_off(last)))
    }

    fn digest(&mut self) -> Result<String, Error> {
        let bytes: Vec<u8> = self.logits()?.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(Digest::of(&bytes).to_string())
    }
}

/// A backend, and the end of a rank without others.
fn alone(gpu: &Arc<Gpu>, limits: &StepLimits, hidden: usize) -> Result<(Cuda, SharedGpu), Error> {
    let mut ends = SharedGpu::group(gpu, 1, limits.max_rows * hidden)?;
    Ok((Cuda::new(gpu)?, ends.remove(0)))
}

fn name_of(gpu: &Gpu) -> String {
    format!("GPU {} ({})", gpu.ordinal(), gpu.name())
}

fn median(times: &mut [Times]) -> Times {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Runs of the same kernel with the same weight shape, put together; the longest first.
fn summary(step: &str, trace: &[Timing], rate: Option<f64>) -> Vec<KernelRow> {
    let mut rows: Vec<KernelRow> = Vec::new();
    for timing in trace {
        let kernel = match timing.cost.weight {
            Some((dtype, rows, cols)) => format!("{} {dtype} {rows} x {cols}", timing.name),
            None => timing.name.to_owned(),
        };
        let at = rows.iter().position(|row| row.kernel == kernel).unwrap_or_else(|| {
            let (step, kernel) = (step.to_owned(), kernel);
            let (ms, gb_per_s, share_of_copy) = (0.0, 0.0, None);
            rows.push(KernelRow { step, kernel, runs: 0, ms, bytes: 0, gb_per_s, share_of_copy });
            rows.len() - 1
        });
        let row = &mut rows[at];
        row.runs += 1;
        row.ms += f64::from(timing.milliseconds);
        row.bytes += timing.cost.bytes;
    }
    for row in &mut rows {
        let per_s = row.bytes as f64 / row.ms * 1e3;
        row.gb_per_s = per_s / 1e9;
        row.share_of_copy = rate.map(|rate| per_s / rate);
    }
    rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    rows
}

/// How rank files are read when nothing else is said.
impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            batches: vec![1, 2, 4, 8, 16],
            contexts: vec![128, 2048],
            prompts: vec![512, 2048],
            chunk: 2048,
            steps: 16,
            device: DeviceOptions { load_mode: LoadMode::Auto, ..DeviceOptions::default() },
            threads: None,
        }
    }
}
