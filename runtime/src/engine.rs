//! The engine: requests in, a stream of tokens out for each.

use crate::Error;
use crate::batch::Logits;
use crate::device::{Device, DeviceOptions};
use crate::kv_cache::BlockPool;
use crate::rank::{RankGroup, RankStopped};
use crate::sampler::{Sampler, SamplingParams};
use crate::scheduler::{Scheduled, Scheduler, SchedulerLimits};
use crate::sequence::{SeqId, Sequence};
use formats::ModelConfig;
use formats::checkpoint::Checkpoint;
use kernels::StepLimits;
use kernels::step::BLOCK_TOKENS;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use tokio::sync::{mpsc, watch};

/// How a checkpoint is run.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Worker threads over all ranks; `None`: one for each core.
    pub threads: Option<usize>,
    /// Longest prompt plus answer; `None`: what the model was trained for, or what the cache has room for.
    pub max_model_len: Option<usize>,
    /// Sequences that run at the same time.
    pub max_num_seqs: usize,
    /// Prompt tokens in one step; longer prompts go in chunks of this many.
    pub max_num_batched_tokens: usize,
    /// Requests that may wait for a place.
    pub max_waiting: usize,
    /// Which arithmetic runs.
    pub arithmetic: Arithmetic,
    /// What it runs on.
    pub device: DeviceOptions,
    /// Whether every byte is held against its digest before anything is loaded.
    pub verify: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            max_model_len: None,
            max_num_seqs: 16,
            max_num_batched_tokens: 512,
            max_waiting: 256,
            arithmetic: Arithmetic::Fast,
            device: DeviceOptions::default(),
            verify: false,
        }
    }
}

/// Which arithmetic runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// The processor's best.
    Fast,
    /// The slow twin that everything is tested against (`--precise`).
    Reference,
}

/// One sequence to continue.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// Prompt ids, at least one.
    pub prompt: Vec<u32>,
    /// How the next token is chosen.
    pub sampling: SamplingParams,
    /// Most tokens to generate, at least one.
    pub max_tokens: usize,
    /// Tokens that end the sequence; they are not sent.
    pub stop_token_ids: Vec<u32>,
}

/// What a request's stream carries: any number of tokens, then exactly one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next token.
    Token(u32),
    /// The end.
    Finished(FinishReason),
    /// The engine could not go on with this request; what to tell the client.
    Failed(String),
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token, which is named.
    Stop(u32),
    /// `max_tokens`, or the context is full.
    Length,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Prompt and answer do not fit the context.
    #[error(
        "the prompt has {prompt} tokens and the context {max_model_len}; at least one must be left for the answer: shorten the prompt"
    )]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        max_model_len: usize,
    },
    /// A prompt id the vocabulary does not have.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    Vocabulary {
        /// The id.
        id: u32,
        /// Rows of the vocabulary.
        vocab_size: usize,
    },
    /// No prompt.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// Too many requests wait.
    #[error("{waiting} requests wait already: try again later")]
    QueueFull {
        /// How many wait.
        waiting: usize,
    },
    /// The engine has stopped.
    #[error("the engine has stopped: {cause}")]
    Stopped {
        /// Why.
        cause: String,
    },
}

/// The receiving side of one request. Dropping it cancels the request and frees its cache.
pub type EventStream = mpsc::UnboundedReceiver<Event>;

/// The handle that requests go through. Clones share one engine.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    commands: Sender<Command>,
    waiting: Arc<AtomicUsize>,
    stopped: watch::Receiver<Option<String>>,
    max_model_len: usize,
    max_waiting: usize,
    vocab_size: usize,
}

impl EngineHandle {
    /// Queues a request.
    ///
    /// # Errors
    /// [`Refusal`] when it cannot be run, or not now.
    pub fn submit(&self, request: GenerationRequest) -> Result<EventStream, Refusal> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if prompt >= self.max_model_len {
            return Err(Refusal::ContextLength { prompt, max_model_len: self.max_model_len });
        }
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= self.vocab_size) {
            return Err(Refusal::Vocabulary { id, vocab_size: self.vocab_size });
        }
        let waiting = self.waiting.load(Ordering::Relaxed);
        if waiting >= self.max_waiting {
            return Err(Refusal::QueueFull { waiting });
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let (events, stream) = mpsc::unbounded_channel();
        if self.commands.send(Command::Submit(request, events)).is_err() {
            let cause = self.stopped.borrow().clone().unwrap_or_else(|| "it was shut down".to_owned());
            return Err(Refusal::Stopped { cause });
        }
        Ok(stream)
    }

    /// Most tokens of a prompt and its answer together.
    pub fn max_model_len(&self) -> usize {
        self.max_model_len
    }

    /// Rows of the vocabulary: ids must be below.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Waits until the engine has ended, and says why.
    pub async fn stopped(&self) -> String {
        let mut stopped = self.stopped.clone();
        let cause = stopped.wait_for(Option::is_some).await;
        cause.ok().and_then(|cause| cause.clone()).unwrap_or_else(|| "it was shut down".to_owned())
    }
}

/// A running engine. Dropping it stops it.
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
    name: String,
    ranks: usize,
}

impl Engine {
    /// Opens a checkpoint, verifies it if asked to, loads every rank and starts to take requests.
    ///
    /// # Errors
    /// [`Error`] naming the file, tensor or option; then nothing is left running.
    pub fn start(dir: &Path, options: &EngineOptions) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(dir)?;
        let manifest = checkpoint.manifest();
        if options.verify {
            match options.device.device {
                Device::Cpu => crate::verify::verify(&checkpoint)?,
                // Rank files are checked on their way to the GPU.
                Device::Cuda(_) => crate::verify::verify_small_files(&checkpoint)?,
            }
        }
        let (limits, max_model_len) = limits(&manifest.model, manifest.ranks, options)?;
        let group = RankGroup::start(&checkpoint, options, limits)?;
        let (commands, inbox) = channel();
        let (stopped_tx, stopped) = watch::channel(None);
        let waiting = Arc::new(AtomicUsize::new(0));
        let scheduler_limits = SchedulerLimits {
            max_num_seqs: options.max_num_seqs,
            max_num_batched_tokens: options.max_num_batched_tokens,
        };
        let worker = Worker {
            group,
            scheduler: Scheduler::new(scheduler_limits, BlockPool::new(limits.cache_blocks)),
            clients: HashMap::new(),
            next_id: 0,
            waiting: Arc::clone(&waiting),
            max_model_len,
            plan: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                let cause = worker.run(&inbox);
                // Nobody may be waiting for it.
                let _ = stopped_tx.send(Some(cause));
            })
            .map_err(|e| Error::Stopped(format!("cannot start the engine's thread: {e}")))?;
        let handle = EngineHandle {
            commands,
            waiting,
            stopped,
            max_model_len,
            max_waiting: options.max_waiting,
            vocab_size: manifest.model.vocab_size,
        };
        Ok(Self { handle, thread: Some(thread), name: manifest.name.clone(), ranks: manifest.ranks })
    }

    /// The way in.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// The model's name, as the checkpoint gives it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Ends what runs and waits for it.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        // A closed channel means that it has ended already.
        let _ = self.handle.commands.send(Command::Stop);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Memory that the latent caches of all ranks may take together, unless a longer context is asked for.
const CACHE_BYTES: usize = 4 << 30;

/// Sizes of buffers and cache, and the context length that they allow.
fn limits(model: &ModelConfig, ranks: usize, options: &EngineOptions) -> Result<(StepLimits, usize), Error> {
    let at_least_one = |option, value: usize| match value {
        0 => Err(Error::Option { option, expected: "at least 1".to_owned(), found: "0".to_owned() }),
        _ => Ok(value),
    };
    let seqs = at_least_one("--max-num-seqs", options.max_num_seqs)?;
    let chunk = at_least_one("--max-num-batched-tokens", options.max_num_batched_tokens)?;
    let width = model.attention.kv_lora_rank + model.attention.qk_rope_head_dim;
    let block_bytes = BLOCK_TOKENS * width * size_of::<f32>() * model.layers.len() * ranks;
    let affordable = (CACHE_BYTES / block_bytes).max(1);
    let max_model_len = match options.max_model_len {
        None => model.max_position_embeddings.min(affordable * BLOCK_TOKENS),
        Some(len) if (2..=model.max_position_embeddings).contains(&len) => len,
        Some(len) => {
            return Err(Error::Option {
                option: "--max-model-len",
                expected: format!(
                    "2 to {}, the positions that the model was trained for",
                    model.max_position_embeddings
                ),
                found: len.to_string(),
            });
        }
    };
    let one = BlockPool::blocks_for(max_model_len);
    let cache_blocks = one.saturating_mul(seqs).min(affordable).max(one);
    Ok((StepLimits { max_rows: seqs + chunk, max_logit_rows: seqs + chunk, cache_blocks }, max_model_len))
}

#[derive(Debug)]
enum Command {
    Submit(GenerationRequest, mpsc::UnboundedSender<Event>),
    Stop,
}

/// What the engine keeps of a request while its sequence lives.
#[derive(Debug)]
struct Client {
    sampler: Sampler,
    stop_token_ids: Vec<u32>,
    events: mpsc::UnboundedSender<Event>,
}

/// The engine's thread.
struct Worker {
    group: RankGroup,
    scheduler: Scheduler,
    clients: HashMap<SeqId, Client>,
    next_id: u64,
    waiting: Arc<AtomicUsize>,
    max_model_len: usize,
    plan: Vec<Scheduled>,
}

impl Worker {
    /// Runs until it is told to stop or a rank fails; returns why.
    fn run(mut self, inbox: &Receiver<Command>) -> String {
        let cause = loop {
            // With nothing to do, sleep until something comes.
            if self.clients.is_empty() {
                match inbox.recv() {
                    Ok(Command::Submit(request, events)) => self.admit(request, events),
                    Ok(Command::Stop) | Err(_) => break "it was shut down".to_owned(),
                }
            }
            match self.drain(inbox) {
                ControlFlow::Continue(()) => {}
                ControlFlow::Break(()) => break "it was shut down".to_owned(),
            }
            self.drop_cancelled();
            self.scheduler.schedule(&mut self.plan);
            self.waiting.store(self.scheduler.waiting(), Ordering::Relaxed);
            if self.plan.is_empty() {
                continue;
            }
            if let Err(stopped) = self.step() {
                break stopped.to_string();
            }
        };
        for client in self.clients.into_values() {
            // The client may have gone at the same moment.
            let _ = client.events.send(Event::Failed(cause.clone()));
        }
        cause
    }

    fn drain(&mut self, inbox: &Receiver<Command>) -> ControlFlow<()> {
        loop {
            match inbox.try_recv() {
                Ok(Command::Submit(request, events)) => self.admit(request, events),
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return ControlFlow::Break(()),
                Err(TryRecvError::Empty) => return ControlFlow::Continue(()),
            }
        }
    }

    fn admit(&mut self, request: GenerationRequest, events: mpsc::UnboundedSender<Event>) {
        let id = SeqId(self.next_id);
        self.next_id += 1;
        let max_len = request.prompt.len().saturating_add(request.max_tokens).min(self.max_model_len);
        let sampler = Sampler::new(&request.sampling);
        self.scheduler.add(Sequence::new(id, request.prompt, max_len));
        self.clients.insert(id, Client { sampler, stop_token_ids: request.stop_token_ids, events });
    }

    fn drop_cancelled(&mut self) {
        let scheduler = &mut self.scheduler;
        self.clients.retain(|id, client| {
            let gone = client.events.is_closed();
            if gone {
                scheduler.remove(*id);
            }
            !gone
        });
    }

    fn step(&mut self) -> Result<(), RankStopped> {
        let Self { group, scheduler, clients, plan, .. } = self;
        let vocab_size = group.vocab_size();
        let logits = group.step(|batch| {
            for part in &*plan {
                let sequence = scheduler.sequence(part.id).expect("only running sequences are scheduled");
                let cached = sequence.cached();
                let rows = if part.sample { Logits::Last } else { Logits::None };
                batch.push(&sequence.tokens()[cached..cached + part.tokens], cached, sequence.blocks(), rows);
            }
        })?;
        let mut rows = logits.chunks_exact_mut(vocab_size);
        for &part in &*plan {
            if !part.sample {
                scheduler.advance(part, None);
                continue;
            }
            let row = rows.next().expect("a row of logits for every sampled sequence");
            if let Some(fault) = not_numbers(row) {
                scheduler.remove(part.id);
                if let Some(client) = clients.remove(&part.id) {
                    // The client may have gone at the same moment.
                    let _ = client.events.send(Event::Failed(fault));
                }
                continue;
            }
            let client = clients.get_mut(&part.id).expect("every sequence has its client");
            let token = client.sampler.sample(row);
            if client.stop_token_ids.contains(&token) {
                finish(scheduler, clients, part.id, FinishReason::Stop(token));
                continue;
            }
            // A client that went away is found before the next step.
            let _ = client.events.send(Event::Token(token));
            scheduler.advance(part, Some(token));
            if scheduler.sequence(part.id).is_some_and(Sequence::is_full) {
                finish(scheduler, clients, part.id, FinishReason::Length);
            }
        }
        Ok(())
    }
}

/// What to say of logits that no token can be drawn from: weights that are no numbers make them, and a sampler would answer
/// with whatever token comes first.
pub fn not_numbers(logits: &[f32]) -> Option<String> {
    let at = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY)?;
    Some(format!(
        "the model's logits are no finite numbers (token {at}: {}), so the checkpoint's weights are damaged: `shardmill verify` it with its source",
        logits[at]
    ))
}

fn finish(scheduler: &mut Scheduler, clients: &mut HashMap<SeqId, Client>, id: SeqId, reason: FinishReason) {
    scheduler.remove(id);
    if let Some(client) = clients.remove(&id) {
        // The client may have gone at the same moment.
        let _ = client.events.send(Event::Finished(reason));
    }
}
