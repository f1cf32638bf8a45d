//! The engine: requests in, a stream of tokens out for each.

mod lanes;
mod reloader;
mod scrub;
mod together;
mod worker;

pub use together::Together;
pub use worker::not_numbers;

use crate::Error;
use crate::constraint::{Constraint, DeadEnd};
use crate::device::{Device, DeviceOptions};
use crate::kv_cache::{BlockHash, BlockPool};
use crate::logprobs::TokenLogprobs;
use crate::metrics::{Load, Metrics};
use crate::rank::RankGroup;
use crate::reload::{ReloadError, ReloadReport, ReloadRequest};
use crate::sampler::SamplingParams;
use crate::scheduler::PrefixCache;
use crate::status::Status;
use crate::thinking::ThinkingBudget;
use crate::verify::Verify;
use formats::ModelConfig;
use formats::checkpoint::Checkpoint;
use kernels::StepLimits;
use kernels::step::BLOCK_TOKENS;
use lanes::{Command, Lanes};
use reloader::{Reloader, worker};
use scrub::Scrubber;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use worker::{Submission, Ticket};

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
    /// Bytes that the latent caches of all ranks take together; `None`: what `max_num_seqs` sequences of the longest length
    /// take, at most 4 GiB or one such sequence.
    pub kv_cache_bytes: Option<usize>,
    /// Whether prompts may begin with what others have computed.
    pub prefix_cache: PrefixCache,
    /// Which arithmetic runs.
    pub arithmetic: Arithmetic,
    /// What it runs on.
    pub device: DeviceOptions,
    /// Which bytes are held against their digests when they are loaded.
    pub verify: Verify,
    /// Time between two readings of all rank files against their digests; `None`: they are read when they are loaded only.
    pub scrub_interval: Option<Duration>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            max_model_len: None,
            max_num_seqs: 16,
            max_num_batched_tokens: 512,
            max_waiting: 256,
            kv_cache_bytes: None,
            prefix_cache: PrefixCache::On,
            arithmetic: Arithmetic::Fast,
            device: DeviceOptions::default(),
            verify: Verify::Auto,
            scrub_interval: None,
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
    /// Most tokens to generate; 0 where only the prompt's log-probabilities are wanted.
    pub max_tokens: usize,
    /// Tokens that end the sequence; they are not sent.
    pub stop_token_ids: Vec<u32>,
    /// Whether log-probabilities of generated tokens are wanted, and of how many likeliest ones beside each.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// What the answer must be.
    pub constraint: Option<Constraint>,
    /// How long it may think.
    pub thinking: Option<ThinkingBudget>,
    /// Prompts with different salts share nothing in the prefix cache.
    pub cache_salt: Option<BlockHash>,
    /// Which others are answered by the same weights: clones of a request are.
    pub together: Together,
}

impl GenerationRequest {
    /// A request for up to `max_tokens` tokens that nothing ends, drawn from the model's own distribution.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            sampling: SamplingParams::default(),
            max_tokens,
            stop_token_ids: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            constraint: None,
            thinking: None,
            cache_salt: None,
            together: Together::default(),
        }
    }
}

/// What a request's stream carries: log-probabilities of the prompt where they are wanted, `Prompt`, any number of tokens,
/// then exactly one `Finished`, `Failed` or `DeadEnd`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Log-probabilities of the prompt's next tokens, the first of all left out: nothing comes before it.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// The prompt is computed; this many of its tokens came from the prefix cache.
    Prompt {
        /// Tokens that others had computed.
        reused: usize,
    },
    /// The next token.
    Token {
        /// Its id.
        id: u32,
        /// Where they are wanted.
        logprobs: Option<TokenLogprobs>,
    },
    /// The end.
    Finished(FinishReason),
    /// The engine could not go on with this request; what to tell the client.
    Failed(String),
    /// The request's own grammar led to where nothing may follow.
    DeadEnd(DeadEnd),
}

impl Event {
    /// A token without log-probabilities.
    pub fn token(id: u32) -> Self {
        Self::Token { id, logprobs: None }
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token, which is named.
    Stop(u32),
    /// What it must be allows nothing more.
    Complete,
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
    model: Arc<ModelInfo>,
    metrics: Arc<Metrics>,
    /// `None` where ranks were made by hand: there are no files to load from.
    reloader: Option<Arc<Reloader>>,
}

/// What clients may know of the model that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Most tokens of a prompt and its answer together.
    pub max_model_len: usize,
    /// Rows of the vocabulary: ids must be below.
    pub vocab_size: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Requests that may wait for a place, and so the most that can be sent at once.
    pub max_waiting: usize,
    /// Positions that a query attended to when the model was trained, where those were not all: beyond, dense attention is
    /// not what the model knows.
    pub index_topk: Option<usize>,
}

impl EngineHandle {
    /// Queues a request.
    ///
    /// # Errors
    /// [`Refusal`] when it cannot be run, or not now.
    pub fn submit(&self, request: GenerationRequest) -> Result<EventStream, Refusal> {
        let ModelInfo { max_model_len, vocab_size, max_waiting, .. } = *self.model;
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if prompt + request.max_tokens.min(1) > max_model_len {
            return Err(Refusal::ContextLength { prompt, max_model_len });
        }
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(Refusal::Vocabulary { id, vocab_size });
        }
        let ticket = Ticket::draw(&self.waiting, max_waiting)?;
        let (events, stream) = mpsc::unbounded_channel();
        let submission = Submission { request, events, ticket, arrival: Instant::now() };
        if self.commands.send(Command::Submit(Box::new(submission))).is_err() {
            return Err(Refusal::Stopped { cause: self.cause() });
        }
        Ok(stream)
    }

    /// What clients may know of the model.
    pub fn model(&self) -> &ModelInfo {
        &self.model
    }

    /// What it counts.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Loads other weights of the same model and lets new requests have them; waits until that is done. What has begun ends on
    /// the weights that it began with.
    ///
    /// # Errors
    /// [`ReloadError`]: everything is as it was.
    pub fn reload(&self, request: &ReloadRequest) -> Result<ReloadReport, ReloadError> {
        self.reloader.as_ref().ok_or_else(ReloadError::stopped)?.reload(request)
    }

    /// What is served now; `None` where ranks were made by hand.
    pub fn status(&self) -> Option<Status> {
        self.reloader.as_ref().map(|reloader| reloader.status())
    }

    /// Why new requests should go elsewhere, where they should.
    pub fn trouble(&self) -> Option<String> {
        if let Some(cause) = &*self.stopped.borrow() {
            return Some(format!("the engine has stopped: {cause}"));
        }
        self.reloader.as_ref()?.trouble()
    }

    fn cause(&self) -> String {
        self.stopped.borrow().clone().unwrap_or_else(|| "it was shut down".to_owned())
    }

    /// Waits until the engine has ended, and says why.
    pub async fn stopped(&self) -> String {
        let mut stopped = self.stopped.clone();
        let cause = stopped.wait_for(Option::is_some).await;
        cause.ok().and_then(|cause| cause.clone()).unwrap_or_else(|| "it was shut down".to_owned())
    }
}

impl ModelInfo {
    /// What to say of a prompt of `tokens` tokens, where this program is not what the model was trained as.
    pub fn dense_warning(&self, tokens: usize) -> Option<String> {
        let topk = self.index_topk.filter(|&topk| tokens > topk)?;
        Some(format!(
            "a prompt has {tokens} tokens: beyond {topk} the model was trained with sparse attention, and this program attends to all of them, which is not the same"
        ))
    }
}

/// A running engine. Dropping it stops it.
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
    scrubber: Option<Scrubber>,
    name: String,
}

impl Engine {
    /// Opens a checkpoint, verifies it if asked to, loads every rank and starts to take requests.
    ///
    /// # Errors
    /// [`Error`] naming the file, tensor or option; then nothing is left running.
    pub fn start(dir: &Path, options: &EngineOptions) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(dir)?;
        let manifest = checkpoint.manifest();
        let (limits, max_model_len) = limits(&manifest.model, manifest.ranks, options)?;
        if options.device.device == Device::Cpu {
            check_memory(limits.cache_blocks.saturating_mul(block_bytes(
                &manifest.model,
                manifest.ranks,
                options,
            )))?;
        }
        let begin = Instant::now();
        let (group, served, records) = reloader::first(dir, &checkpoint, options, limits)?;
        let load = served.load(begin.elapsed().as_secs_f64());
        let sizes = (limits, max_model_len);
        let mut engine =
            Self::of(manifest.name.clone(), &manifest.model, (group, manifest.ranks), sizes, options, load)?;
        let (commands, metrics) = (engine.handle.commands.clone(), Arc::clone(&engine.handle.metrics));
        let reloader = Arc::new(Reloader::new(options.clone(), sizes, commands, metrics, records, served));
        if let Some(interval) = options.scrub_interval {
            let scrubber = Scrubber::start(Arc::clone(&reloader), interval)
                .map_err(|e| Error::Stopped(format!("cannot start the scrubbing thread: {e}")))?;
            engine.scrubber = Some(scrubber);
        }
        engine.handle.reloader = Some(reloader);
        Ok(engine)
    }

    /// An engine on ranks that were made by hand, which have no files to be loaded from again.
    ///
    /// # Errors
    /// [`Error`] naming the option that does not suit the model.
    pub fn with(
        group: RankGroup,
        ranks: usize,
        model: &ModelConfig,
        options: &EngineOptions,
    ) -> Result<Self, Error> {
        let sizes = limits(model, ranks, options)?;
        Self::of("model".to_owned(), model, (group, ranks), sizes, options, Load::default())
    }

    /// Sizes that [`Engine::with`] expects the ranks to be made for.
    ///
    /// # Errors
    /// As [`Engine::with`].
    pub fn limits(model: &ModelConfig, ranks: usize, options: &EngineOptions) -> Result<StepLimits, Error> {
        Ok(limits(model, ranks, options)?.0)
    }

    fn of(
        name: String,
        model: &ModelConfig,
        (group, ranks): (RankGroup, usize),
        (limits, max_model_len): (StepLimits, usize),
        options: &EngineOptions,
        load: Load,
    ) -> Result<Self, Error> {
        let metrics = Arc::new(Metrics::new(limits.cache_blocks, load));
        let (commands, inbox) = channel();
        let (stopped_tx, stopped) = watch::channel(None);
        let waiting = Arc::new(AtomicUsize::new(0));
        let worker = worker(1, group, options, (limits, max_model_len), &metrics);
        let lanes = Lanes::new(worker, max_model_len, Arc::clone(&metrics));
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                let cause = lanes.run(&inbox);
                // Nobody may be waiting for it.
                let _ = stopped_tx.send(Some(cause));
            })
            .map_err(|e| Error::Stopped(format!("cannot start the engine's thread: {e}")))?;
        let handle = EngineHandle {
            commands,
            waiting,
            stopped,
            model: Arc::new(ModelInfo {
                max_model_len,
                vocab_size: model.vocab_size,
                ranks,
                max_waiting: options.max_waiting,
                index_topk: model.indexer.as_ref().map(|indexer| indexer.index_topk),
            }),
            metrics,
            reloader: None,
        };
        Ok(Self { handle, thread: Some(thread), scrubber: None, name })
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
        self.handle.model.ranks
    }

    /// Ends what runs and waits for it.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        // A closed channel means that it has ended already.
        let _ = self.handle.commands.send(Command::Stop);
        let _ = self.thread.take().map(JoinHandle::join);
        self.scrubber = None;
        if let Some(reloader) = &self.handle.reloader {
            reloader.end();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Memory that the latent caches of all ranks may take together, unless a longer context or another size is asked for.
const CACHE_BYTES: usize = 4 << 30;

/// Bytes that a block takes on all ranks.
fn block_bytes(model: &ModelConfig, ranks: usize, options: &EngineOptions) -> usize {
    let width = model.attention.kv_lora_rank + model.attention.qk_rope_head_dim;
    let (value, caches) = match (&options.device.device, options.arithmetic) {
        // All ranks are one there.
        (Device::Cpu, Arithmetic::Fast) => (size_of::<f32>(), 1),
        (Device::Cpu, Arithmetic::Reference) => (size_of::<f32>(), ranks),
        // F16.
        (Device::Cuda(_), _) => (2, ranks),
    };
    BLOCK_TOKENS * width * value * model.layers.len() * caches
}

/// Asks for the cache's memory once before a rank does, who could only give up: untouched memory costs nothing.
fn check_memory(bytes: usize) -> Result<(), Error> {
    Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| Error::Option {
        option: "--kv-cache-memory",
        expected: "what this machine has".to_owned(),
        found: format!("{bytes} bytes"),
    })
}

/// Sizes of buffers and cache, and the context length that they allow.
fn limits(model: &ModelConfig, ranks: usize, options: &EngineOptions) -> Result<(StepLimits, usize), Error> {
    let at_least_one = |option, value: usize| match value {
        0 => Err(Error::Option { option, expected: "at least 1".to_owned(), found: "0".to_owned() }),
        _ => Ok(value),
    };
    let seqs = at_least_one("--max-num-seqs", options.max_num_seqs)?;
    let chunk = at_least_one("--max-num-batched-tokens", options.max_num_batched_tokens)?;
    let block_bytes = block_bytes(model, ranks, options);
    let too_small = |blocks: usize, what: String| Error::Option {
        option: "--kv-cache-memory",
        expected: format!("at least {} bytes, which {what} takes on all ranks", blocks * block_bytes),
        found: options.kv_cache_bytes.unwrap_or(CACHE_BYTES).to_string(),
    };
    let affordable = options.kv_cache_bytes.unwrap_or(CACHE_BYTES) / block_bytes;
    if affordable == 0 && options.kv_cache_bytes.is_some() {
        return Err(too_small(1, format!("a block of {BLOCK_TOKENS} tokens")));
    }
    // Blocks have 32-bit numbers.
    let affordable = affordable.clamp(1, u32::MAX as usize - 1);
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
    let cache_blocks = match options.kv_cache_bytes {
        Some(_) if affordable < one => {
            return Err(too_small(one, format!("one sequence of {max_model_len} tokens")));
        }
        Some(_) => affordable,
        None => one.saturating_mul(seqs).min(affordable).max(one),
    };
    Ok((StepLimits { max_rows: seqs + chunk, max_logit_rows: seqs + chunk, cache_blocks }, max_model_len))
}
