//! Ranks: one thread each, all of one process and one config, walking through every step together; on a processor one thread for
//! all of them.

mod part;
mod read;

pub use part::{LoadFault, RankPart};
pub use read::{Asked, How, Row};

use crate::Error;
use crate::batch::Batch;
use crate::comm::{Communicator, Local, Nccl, Peer, SharedGpu};
use crate::device::CommunicatorChoice;
use crate::engine::{Arithmetic, EngineOptions};
use crate::load::{Placing, load, mla_shape};
use crate::model::Model;
use crate::upload::{LoadPlan, Upload, upload};
use formats::checkpoint::RankShard;
use formats::layout::Layout;
use formats::manifest::TensorEntry;
use formats::map::FileWatch;
use formats::{Dtype, ModelConfig};
use kernels::cpu::Cpu;
use kernels::cuda::driver::Device as Gpu;
use kernels::cuda::{Cuda, CudaError, Tiling};
use kernels::reference::Reference;
use kernels::{Backend, StepLimits};
use read::Part;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// All ranks of a loaded checkpoint.
#[derive(Debug)]
pub struct RankGroup {
    ranks: Vec<RankHandle>,
    results: Receiver<Stepped>,
    batch: Arc<Batch>,
    logits: Vec<f32>,
    vocab_size: usize,
    /// Files whose mapped bytes are the weights.
    watches: Vec<Arc<FileWatch>>,
}

#[derive(Debug)]
struct RankHandle {
    orders: Option<SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
    logit_rows: Range<usize>,
    part: Arc<Mutex<Part>>,
    /// Where a GPU has its bytes.
    upload: Option<Upload>,
}

impl RankHandle {
    fn part(&self) -> MutexGuard<'_, Part> {
        self.part.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False: its thread has ended.
    fn order(&self, order: Order) -> bool {
        self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok())
    }
}

/// What a rank's thread is told. It answers to what is read, and to a step that failed.
enum Order {
    Step(Arc<Batch>),
    Read(Arc<Vec<Asked>>),
}

/// A rank, and how its step went.
type Stepped = (usize, Result<(), String>);

/// What a rank's thread makes before its first step: the model, and where a GPU has its file.
type Made<B, C> = Result<(Model<B, C>, Option<Upload>), Error>;

/// A rank could not finish a step; the group is of no use any more.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rank {rank} stopped: {cause}")]
pub struct RankStopped {
    /// The rank.
    pub rank: usize,
    /// What it said.
    pub cause: String,
}

impl RankGroup {
    /// Loads every rank on a thread of its own and waits until all are ready; if one is not, none stays. `stop` ends it early when
    /// it is set, and is set by the first rank that fails.
    ///
    /// # Errors
    /// [`LoadFault`] of the first rank that failed, naming file and tensor.
    pub fn start(
        config: &ModelConfig,
        parts: Vec<RankPart>,
        options: &EngineOptions,
        limits: StepLimits,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self, LoadFault> {
        let ranks = parts.len();
        let threads = threads_of(options.threads);
        let config = Arc::new(config.clone());
        let gpus = options.device.open(ranks)?;
        let (longest, vocab_size) = (limits.max_rows * config.hidden_size, config.vocab_size);
        let mut launch = Launch::new(ranks);
        let mut watches = Vec::new();
        match gpus {
            None => {
                watches.extend(parts.iter().map(|part| Arc::clone(&part.watch)));
                let shards = parts.into_iter().map(|part| part.shard);
                match options.arithmetic {
                    Arithmetic::Fast => {
                        let (config, alone) = (Arc::clone(&config), Local::group(1, longest).remove(0));
                        let shards: Vec<RankShard> = shards.collect();
                        let make = move || joined(Cpu::new(threads)?, alone, &shards, &config, limits);
                        launch.spawn(0, |link| link.run(|| Ok((make()?, None))))?;
                    }
                    Arithmetic::Reference => {
                        for (rank, (shard, end)) in shards.zip(Local::group(ranks, longest)).enumerate() {
                            let config = Arc::clone(&config);
                            let make = move || own(Reference::new(), end, &shard, &config, limits);
                            launch.spawn(rank, |link| link.run(|| Ok((make()?, None))))?;
                        }
                    }
                }
            }
            Some(gpus) => {
                if options.arithmetic == Arithmetic::Reference {
                    let expected = "--device cpu with it: the slow arithmetic is the processor's".to_owned();
                    let found = "--device cuda".to_owned();
                    return Err(Error::Option { option: "--precise", expected, found }.into());
                }
                let (mode, threads) = (options.device.load_mode, (threads / ranks).max(2));
                let plan = LoadPlan { mode, threads, stop: Arc::clone(stop) };
                let one = gpus.iter().all(|gpu| gpu.ordinal() == gpus[0].ordinal());
                let on_gpus = OnGpus { parts, gpus: &gpus, config, limits, plan };
                match options.device.communicator {
                    CommunicatorChoice::Auto | CommunicatorChoice::Local if one => {
                        let ends = SharedGpu::group(&gpus[0], ranks, longest)?;
                        on_gpus.spawn(&mut launch, ends, |_, _| Ok(()))?;
                    }
                    CommunicatorChoice::Local => {
                        let expected = "one GPU for all ranks, with --devices".to_owned();
                        let found = "several GPUs".to_owned();
                        return Err(Error::Option { option: "--communicator local", expected, found }.into());
                    }
                    CommunicatorChoice::Nccl => {
                        on_gpus.spawn(&mut launch, Nccl::group(&gpus)?, Nccl::test)?
                    }
                    choice @ (CommunicatorChoice::Auto | CommunicatorChoice::Peer) => {
                        match Peer::group(&gpus, longest) {
                            Ok(ends) => on_gpus.spawn(&mut launch, ends, Peer::test)?,
                            Err(kernels::Error::Cuda(why @ CudaError::NoPeerAccess { .. }))
                                if choice == CommunicatorChoice::Auto =>
                            {
                                tracing::warn!("{why}; sums go through NCCL");
                                on_gpus.spawn(&mut launch, Nccl::group(&gpus)?, Nccl::test)?;
                            }
                            Err(error) => return Err(error.into()),
                        }
                    }
                }
            }
        }
        let mut group = launch.finish(vocab_size, stop)?;
        group.watches = watches;
        Ok(group)
    }

    /// A group of ranks that are made by these functions, each on the thread of its rank.
    ///
    /// # Errors
    /// [`LoadFault`] of the first that failed.
    pub fn of<B, C, F>(makes: Vec<F>, vocab_size: usize) -> Result<Self, LoadFault>
    where
        B: Backend,
        C: Communicator<B>,
        F: FnOnce() -> Result<Model<B, C>, Error> + Send + 'static,
    {
        let mut launch = Launch::new(makes.len());
        for (rank, make) in makes.into_iter().enumerate() {
            launch.spawn(rank, |link| link.run(|| Ok((make()?, None))))?;
        }
        launch.finish(vocab_size, &Arc::default())
    }

    /// Where GPUs have the ranks' files; none where ranks are on the processor.
    pub fn uploads(&self) -> impl Iterator<Item = Option<&Upload>> {
        self.ranks.iter().map(|handle| handle.upload.as_ref())
    }

    /// Rows of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Begins a step on all ranks: `fill` makes the batch. [`RankGroup::read`] ends it.
    ///
    /// # Errors
    /// [`RankStopped`] when a rank has failed before.
    pub fn step(&mut self, fill: impl FnOnce(&mut Batch)) -> Result<(), RankStopped> {
        // Every rank drops its handle before it reports, so this one is the last.
        let unique = Arc::make_mut(&mut self.batch);
        unique.clear();
        fill(unique);
        for (rank, handle) in self.ranks.iter().enumerate() {
            if !handle.order(Order::Step(Arc::clone(&self.batch))) {
                return Err(RankStopped { rank, cause: "its thread has ended".to_owned() });
            }
        }
        Ok(())
    }

    /// Lets every rank read its part, and waits until all have.
    fn order_read(&self, asked: &Arc<Vec<Asked>>) -> Result<(), RankStopped> {
        for handle in &self.ranks {
            // One that failed in the step has ended, and its report waits to be heard.
            let _ = handle.order(Order::Read(Arc::clone(asked)));
        }
        self.wait()?;
        // What was written to a mapped file is what was computed with.
        if let Some(rank) = self.watches.iter().position(|watch| !watch.is_unchanged()) {
            return Err(RankStopped { rank, cause: RankPart::written_to(&self.watches[rank]) });
        }
        Ok(())
    }

    /// Waits for every rank. A rank that lost a peer is not the cause: the peer is.
    fn wait(&self) -> Result<(), RankStopped> {
        let mut failed: Option<RankStopped> = None;
        for _ in &self.ranks {
            let Ok((rank, result)) = self.results.recv() else {
                return Err(failed
                    .unwrap_or(RankStopped { rank: 0, cause: "all rank threads have ended".to_owned() }));
            };
            let Err(cause) = result else { continue };
            let is_follower = cause == crate::comm::PeerStopped.to_string();
            if failed.is_none() || !is_follower {
                failed = Some(RankStopped { rank, cause });
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Drop for RankGroup {
    fn drop(&mut self) {
        for handle in &mut self.ranks {
            handle.orders = None;
        }
        for handle in &mut self.ranks {
            // A panic was reported when it happened.
            let _ = handle.thread.take().map(JoinHandle::join);
        }
    }
}

/// What ranks on GPUs are made of.
struct OnGpus<'a> {
    parts: Vec<RankPart>,
    gpus: &'a [Arc<Gpu>],
    config: Arc<ModelConfig>,
    limits: StepLimits,
    plan: LoadPlan,
}

impl OnGpus<'_> {
    /// Starts their threads. Sums are put to `test` before anything depends on them.
    fn spawn<C: Communicator<Cuda> + Send + 'static>(
        self,
        launch: &mut Launch,
        ends: Vec<C>,
        test: impl Fn(&C, &mut Cuda) -> Result<(), Error> + Copy + Send + 'static,
    ) -> Result<(), Error> {
        let Self { parts, gpus, config, limits, plan } = self;
        for (((rank, part), gpu), end) in parts.into_iter().enumerate().zip(gpus).zip(ends) {
            let (gpu, config, plan) = (Arc::clone(gpu), Arc::clone(&config), plan.clone());
            let make = move || {
                let mut backend = Cuda::new(&gpu)?;
                test(&end, &mut backend)?;
                on_gpu(backend, end, &part, &config, limits, &plan)
            };
            launch.spawn(rank, |link| link.run(make))?;
        }
        Ok(())
    }
}

/// Ranks whose threads have been started and are not all ready.
struct Launch {
    ranks: Vec<RankHandle>,
    ready: (SyncSender<Ready>, Receiver<Ready>),
    results: (SyncSender<Stepped>, Receiver<Stepped>),
}

/// A rank's first word.
struct Ready {
    rank: usize,
    loaded: Result<(Range<usize>, Option<Upload>), Error>,
}

impl Launch {
    fn new(ranks: usize) -> Self {
        Self { ranks: Vec::with_capacity(ranks), ready: sync_channel(ranks), results: sync_channel(ranks) }
    }

    fn spawn(&mut self, rank: usize, run: impl FnOnce(Link) + Send + 'static) -> Result<(), Error> {
        // A step and what is read of it.
        let (sender, orders) = sync_channel(2);
        let part = Arc::new(Mutex::new(Part::default()));
        let (ready, results) = (self.ready.0.clone(), self.results.0.clone());
        let link = Link { rank, ready, orders, results, part: Arc::clone(&part) };
        let thread = std::thread::Builder::new()
            .name(format!("rank-{rank}"))
            .spawn(move || run(link))
            .map_err(|e| kernels::Error::Threads { threads: rank + 1, cause: e.to_string() })?;
        let (orders, thread) = (Some(sender), Some(thread));
        self.ranks.push(RankHandle { orders, thread, logit_rows: 0..0, part, upload: None });
        Ok(())
    }

    /// Waits until all are ready.
    fn finish(self, vocab_size: usize, stop: &AtomicBool) -> Result<RankGroup, LoadFault> {
        let (Self { ranks, ready: (sender, ready), results: (_, results) }, batch) = (self, Arc::default());
        drop(sender);
        let expected = ranks.len();
        // From here on its end waits for the threads: a process must not go while some of them talk to a GPU.
        let mut group =
            RankGroup { ranks, results, batch, logits: Vec::new(), vocab_size, watches: Vec::new() };
        let mut failed: Option<LoadFault> = None;
        for _ in 0..expected {
            let Ok(Ready { rank, loaded }) = ready.recv() else {
                let ended = || Error::Stopped("a rank's thread ended while loading".to_owned()).into();
                return Err(failed.unwrap_or_else(ended));
            };
            match loaded {
                Ok((rows, upload)) => {
                    group.ranks[rank].logit_rows = rows;
                    group.ranks[rank].upload = upload;
                }
                Err(error) => {
                    stop.store(true, Ordering::Relaxed);
                    // Those that stop because of it are not the cause.
                    failed.get_or_insert_with(|| LoadFault::of(rank)(error));
                }
            }
        }
        failed.map_or(Ok(group), Err)
    }
}

/// A rank thread's ends of the channels.
struct Link {
    rank: usize,
    ready: SyncSender<Ready>,
    orders: Receiver<Order>,
    results: SyncSender<Stepped>,
    part: Arc<Mutex<Part>>,
}

impl Link {
    /// Makes the model, says whether that went well, and runs every step that comes.
    fn run<B: Backend, C: Communicator<B>>(self, make: impl FnOnce() -> Made<B, C>) {
        let Self { rank, ready, orders, results, part } = self;
        let made = catch_unwind(AssertUnwindSafe(make));
        let made = made.unwrap_or_else(|panic| Err(Error::Stopped(panic_text(&*panic))));
        let (mut model, upload) = match made {
            Ok(made) => made,
            Err(error) => {
                // The group may be gone already, because another rank failed first.
                let _ = ready.send(Ready { rank, loaded: Err(error) });
                return;
            }
        };
        if ready.send(Ready { rank, loaded: Ok((model.logit_rows(), upload)) }).is_err() {
            return;
        }
        drop(ready);
        while let Ok(order) = orders.recv() {
            let reports = matches!(order, Order::Read(_));
            let done = catch_unwind(AssertUnwindSafe(|| match order {
                Order::Step(batch) => model.forward(&batch),
                Order::Read(asked) => {
                    part.lock().unwrap_or_else(PoisonError::into_inner).read(&mut model, &asked)
                }
            }));
            let result = match done {
                Ok(done) => done.map_err(|stopped| stopped.to_string()),
                Err(panic) => Err(panic_text(&*panic)),
            };
            if result.is_err() {
                // Before reporting: peers may be waiting for this rank in the middle of the step.
                drop(model);
                let _ = results.send((rank, result));
                return;
            }
            if reports && results.send((rank, result)).is_err() {
                return;
            }
        }
    }
}

/// All ranks as one on a processor, whose threads share every operation: nothing that all ranks compute alike is computed twice, and
/// nothing is waited for. Its weights are the mapped files.
fn joined(
    backend: Cpu,
    communicator: Local,
    shards: &[RankShard],
    config: &ModelConfig,
    limits: StepLimits,
) -> Result<Model<Cpu, Local>, Error> {
    let weights = load(shards, config, |Placing { parts, axis, scales }| {
        let views = parts.iter().map(|(shard, entry)| shard.view(entry)).collect::<Result<_, _>>()?;
        let tensor = || parts[0].1.name.clone();
        backend
            .joined_weight(views, *axis, scales)
            .map_err(|source| Error::Weight { tensor: tensor(), source })
    })?;
    Model::new(backend, communicator, weights, config, limits)
}

/// One rank in ordinary memory. Its weights are the mapped file.
fn own(
    backend: Reference,
    communicator: Local,
    shard: &RankShard,
    config: &ModelConfig,
    limits: StepLimits,
) -> Result<Model<Reference, Local>, Error> {
    let weights = load(std::slice::from_ref(shard), config, |Placing { parts, scales, .. }| {
        let (shard, entry) = parts[0];
        let view = shard.view(entry)?;
        let placed = match &scales[..] {
            [] => backend.weight(view),
            scales => backend.scaled_weight(view, scales),
        };
        placed.map_err(|source| Error::Weight { tensor: entry.name.clone(), source })
    })?;
    Model::new(backend, communicator, weights, config, limits)
}

/// A rank on a GPU: its weights are views of an arena there.
pub(crate) fn on_gpu<C: Communicator<Cuda>>(
    backend: Cuda,
    communicator: C,
    part: &RankPart,
    config: &ModelConfig,
    limits: StepLimits,
    plan: &LoadPlan,
) -> Made<Cuda, C> {
    let shard = &part.shard;
    let matrices: Vec<(Dtype, Tiling)> =
        shard.manifest().tensors.iter().map(|entry| (entry.dtype, tiling(entry))).collect();
    let shape = mla_shape(config, 1);
    let uploaded = std::thread::scope(|scope| {
        // Both take seconds, one the disk and the bus, the other processors.
        let device = backend.device();
        scope.spawn(move || Cuda::compile_for(device, &matrices, &shape));
        match &part.upload {
            Some(there) => Ok(there.clone()),
            None => upload(part, device, plan),
        }
    })?;
    if part.upload.is_none() {
        let seconds = uploaded.elapsed.as_secs_f64();
        tracing::info!(
            "{}: {} bytes to GPU {} in {seconds:.2} s ({:.1} GB/s, {:?} reads)",
            shard.path().display(),
            uploaded.bytes,
            backend.device().ordinal(),
            uploaded.bytes as f64 / seconds / 1e9,
            uploaded.mode,
        );
    }
    let converted = RefCell::new(BTreeMap::<Dtype, (usize, u64)>::new());
    let data_start = shard.manifest().data_start;
    let weights = load(std::slice::from_ref(shard), config, |Placing { parts, scales, .. }| {
        let (_, entry) = parts[0];
        let view = shard.arranged(entry)?;
        if (!backend.keeps(entry.dtype) || !scales.is_empty()) && entry.shape.dims().len() > 1 {
            let mut converted = converted.borrow_mut();
            let (tensors, more) = converted.entry(entry.dtype).or_default();
            *tensors += 1;
            *more += 2 * entry.shape.elements();
        }
        let placed = match &scales[..] {
            [] => backend.weight_in(&uploaded.arena, entry.bytes.0 - data_start, &view, tiling(entry)),
            scales => backend.scaled_weight(view, scales),
        };
        placed.map_err(|source| Error::Weight { tensor: entry.name.clone(), source })
    })?;
    for (dtype, (tensors, more)) in converted.into_inner() {
        tracing::warn!(
            "{}: {tensors} tensors of type {dtype} have no kernel on a GPU, or none with scales of their own, and were decoded to BF16: {more} more bytes of memory, {} bits to read for each weight instead of {:.1}",
            shard.path().display(),
            16,
            dtype.block_bytes() as f64 * 8.0 / dtype.block_len() as f64,
        );
    }
    Ok((Model::new(backend, communicator, weights, config, limits)?, Some(uploaded)))
}

/// Order of a tensor's blocks; a layout that is unknown is refused when the tensor is looked up.
fn tiling(entry: &TensorEntry) -> Tiling {
    match entry.layout {
        Layout::Mma16 => Tiling::Tiles,
        Layout::Ggml | Layout::Unknown(_) => Tiling::Rows,
    }
}

/// Worker threads of all ranks together.
fn threads_of(given: Option<usize>) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    given.unwrap_or_else(cores).max(1)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a fault in the program: {}", text.unwrap_or("panic without a message"))
}
