//! Loads weights: the first ones, and others under the running engine.

use super::lanes::Command;
use super::worker::Worker;
use super::{EngineOptions, block_bytes};
use crate::Error;
use crate::device::Device;
use crate::kv_cache::BlockPool;
use crate::load::load;
use crate::metrics::{Load, Metrics, RankLoad, Reloaded};
use crate::rank::{LoadFault, RankGroup, RankPart};
use crate::reload::{How, Obstacle, RankReport, ReloadError, ReloadReport, ReloadRequest};
use crate::reload::{check_same_model, chosen};
use crate::scheduler::{Scheduler, SchedulerLimits};
use crate::status::{RankStatus, Scrubbed, Status};
use crate::upload::Digests;
use crate::verify::{self, Records, Verify};
use formats::checkpoint::Checkpoint;
use formats::manifest::Manifest;
use formats::{Digest, ModelConfig};
use kernels::StepLimits;
use kernels::cuda::CudaError;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant, SystemTime};

/// GPU memory that stays free beside two sets of weights: kernels' scratch grows when it is first needed.
const SPARE_BYTES: usize = 1 << 30;

/// What loading needs to know, and what is loaded.
#[derive(Debug)]
pub(crate) struct Reloader {
    options: EngineOptions,
    limits: StepLimits,
    max_model_len: usize,
    commands: Sender<Command>,
    metrics: Arc<Metrics>,
    records: Records,
    served: Mutex<Served>,
    /// Held by the one reload that runs.
    busy: Mutex<()>,
    reloading: AtomicBool,
    /// Of the loading that runs.
    stop: Mutex<Arc<AtomicBool>>,
    /// The engine ends.
    ended: AtomicBool,
    /// Requests wait until there are weights again.
    in_place: AtomicBool,
}

/// What is loaded.
#[derive(Clone, Debug)]
pub(crate) struct Served {
    pub(crate) dir: PathBuf,
    manifest: Manifest,
    pub(crate) parts: Vec<RankPart>,
    pub(crate) generation: u64,
    loads: Vec<Loaded>,
}

/// How a rank was loaded.
#[derive(Clone, Debug)]
struct Loaded {
    at: SystemTime,
    seconds: f64,
    /// Whether all bytes were read then, or only mapped.
    was_read: bool,
    verified: Verified,
    scrubbed: Option<Scrubbed>,
}

/// What is known of a rank's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verified {
    /// They were held against their digests when they were loaded.
    Now,
    /// This very file was right before.
    Before,
    /// Nothing.
    No,
}

impl Loaded {
    fn gb_per_s(&self, bytes: u64) -> Option<f64> {
        (self.was_read && self.seconds > 0.0).then(|| bytes as f64 / self.seconds / 1e9)
    }
}

/// How loading is done.
struct Loading<'a> {
    options: &'a EngineOptions,
    limits: StepLimits,
    records: &'a Records,
    verify: Verify,
    /// Threads that hold bytes against their digests.
    threads: usize,
    stop: &'a Arc<AtomicBool>,
}

impl Loading<'_> {
    /// Checks the ranks `fresh` where that is asked for and loads all: those that a GPU has already stay where they are.
    fn run(
        &self,
        config: &ModelConfig,
        parts: &mut [RankPart],
        fresh: &[usize],
    ) -> Result<(RankGroup, Vec<(usize, Loaded)>), LoadFault> {
        let on_host = self.options.device.device == Device::Cpu;
        let verdicts: Vec<(usize, Verified)> = fresh
            .iter()
            .map(|&rank| match self.verify {
                Verify::Always => (rank, Verified::Now),
                Verify::Never => (rank, Verified::No),
                Verify::Auto if self.records.has(&parts[rank]) => (rank, Verified::Before),
                Verify::Auto => (rank, Verified::Now),
            })
            .collect();
        let checked =
            || verdicts.iter().filter(|(_, verdict)| *verdict == Verified::Now).map(|(rank, _)| *rank);
        let mut times: Vec<(usize, Duration)> = Vec::new();
        if on_host {
            times = verify::ranks(checked().map(|rank| (rank, &parts[rank])), self.threads, self.stop)?;
        } else {
            checked().for_each(|rank| parts[rank].digests = Digests::Check);
        }
        let begin = Instant::now();
        let group = RankGroup::start(config, parts.to_vec(), self.options, self.limits, self.stop)?;
        let mapping = begin.elapsed();
        for (part, upload) in parts.iter_mut().zip(group.uploads()) {
            part.upload = upload.cloned();
            part.digests = Digests::Skip;
        }
        checked().for_each(|rank| self.records.note(&parts[rank]));
        let loads = verdicts.iter().map(|&(rank, verified)| {
            let upload = parts[rank].upload.as_ref().map(|upload| upload.elapsed);
            let hashing = times.iter().find(|(checked, _)| *checked == rank).map(|(_, time)| *time);
            let was_read = upload.or(hashing);
            let seconds = was_read.unwrap_or(mapping).as_secs_f64();
            let loaded = Loaded {
                at: SystemTime::now(),
                seconds,
                was_read: was_read.is_some(),
                verified,
                scrubbed: None,
            };
            (rank, loaded)
        });
        Ok((group, loads.collect()))
    }
}

/// Loads the first weights.
pub(super) fn first(
    dir: &Path,
    checkpoint: &Checkpoint,
    options: &EngineOptions,
    limits: StepLimits,
) -> Result<(RankGroup, Served, Records), Error> {
    let (records, stop) = (Records::of_user(), Arc::default());
    let manifest = checkpoint.manifest();
    if options.verify == Verify::Always {
        verify::small_files(checkpoint)?;
    }
    let mut parts = RankPart::open_all(checkpoint)?;
    let all: Vec<usize> = (0..parts.len()).collect();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let loading =
        Loading { options, limits, records: &records, verify: options.verify, threads, stop: &stop };
    let (group, loads) = loading.run(&manifest.model, &mut parts, &all)?;
    let loads = loads.into_iter().map(|(_, loaded)| loaded).collect();
    let served = Served { dir: dir.to_owned(), manifest: manifest.clone(), parts, generation: 1, loads };
    Ok((group, served, records))
}

impl Served {
    /// For the metrics: `seconds` until every rank was ready.
    pub(super) fn load(&self, seconds: f64) -> Load {
        let ranks = self.parts.iter().zip(&self.loads).map(|(part, load)| {
            let bytes = part.shard.manifest().bytes;
            let is_damaged = load.scrubbed.as_ref().is_some_and(|scrubbed| scrubbed.fault.is_some());
            RankLoad { bytes, seconds: load.seconds, gb_per_s: load.gb_per_s(bytes), is_damaged }
        });
        Load { seconds, generation: self.generation, digest: self.digest(), ranks: ranks.collect() }
    }

    /// The digest of the rank files' digests.
    fn digest(&self) -> String {
        let all: Vec<u8> =
            self.parts.iter().flat_map(|part| *part.shard.manifest().blake3.as_bytes()).collect();
        Digest::of(&all).to_string()
    }
}

impl Reloader {
    pub(super) fn new(
        options: EngineOptions,
        (limits, max_model_len): (StepLimits, usize),
        commands: Sender<Command>,
        metrics: Arc<Metrics>,
        records: Records,
        served: Served,
    ) -> Self {
        Self {
            options,
            limits,
            max_model_len,
            commands,
            metrics,
            records,
            served: Mutex::new(served),
            busy: Mutex::new(()),
            reloading: AtomicBool::new(false),
            stop: Mutex::default(),
            ended: AtomicBool::new(false),
            in_place: AtomicBool::new(false),
        }
    }

    /// Loads other weights and lets new requests have them. Takes as long as it takes; the engine goes on meanwhile.
    pub(crate) fn reload(&self, request: &ReloadRequest) -> Result<ReloadReport, ReloadError> {
        let _busy = match self.busy.try_lock() {
            Ok(busy) => busy,
            Err(TryLockError::Poisoned(busy)) => busy.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let cause = "another reload runs: try again when it has ended";
                return Err(ReloadError::new(Obstacle::Conflict, cause));
            }
        };
        self.reloading.store(true, Ordering::Relaxed);
        let done = self.attempt(request);
        self.reloading.store(false, Ordering::Relaxed);
        self.in_place.store(false, Ordering::Relaxed);
        match &done {
            Ok(report) => {
                let loaded = report.ranks.iter().filter(|rank| rank.loaded).count();
                tracing::info!(
                    generation = report.generation,
                    loaded,
                    seconds = report.seconds,
                    "reload: {} of {} ranks from {}",
                    loaded,
                    report.ranks.len(),
                    report.dir.display(),
                );
                self.metrics.reloaded(if loaded == 0 { Reloaded::Nothing } else { Reloaded::Done });
            }
            Err(error) => {
                tracing::warn!("reload: {error}; what was served goes on");
                self.metrics.reloaded(Reloaded::Refused);
            }
        }
        done
    }

    fn attempt(&self, request: &ReloadRequest) -> Result<ReloadReport, ReloadError> {
        let begin = Instant::now();
        let mut old = self.served().clone();
        let dir = request.dir.clone().unwrap_or_else(|| old.dir.clone());
        let checkpoint = Checkpoint::open(&dir)?;
        let manifest = checkpoint.manifest();
        check_same_model(&old.manifest, manifest)?;
        for rank in 0..manifest.ranks {
            checkpoint.rank_manifest(rank).map_err(|error| LoadFault::of(rank)(error.into()))?;
        }
        checkpoint.rank_manifests()?;
        let digests = |manifest: &Manifest, rank: usize| {
            let file = &manifest.rank_files[rank];
            (file.blake3, file.manifest_blake3)
        };
        let is_other = |rank: &usize| digests(&old.manifest, *rank) != digests(manifest, *rank);
        let changed: Vec<usize> = (0..manifest.ranks).filter(is_other).collect();
        let fresh = chosen(request, &changed, manifest.ranks)?;
        let mut parts = old.parts.clone();
        for &rank in &fresh {
            parts[rank] = RankPart::open(&checkpoint, rank).map_err(LoadFault::of(rank))?;
            let shard = &parts[rank].shard;
            // Names, shapes and layouts, before anything is done for it.
            load(std::slice::from_ref(shard), &manifest.model, |placing| {
                Ok(shard.arranged(placing.parts[0].1).map(drop)?)
            })
            .map_err(LoadFault::of(rank))?;
        }
        let mut new = Served {
            dir: dir.clone(),
            manifest: manifest.clone(),
            parts,
            generation: old.generation + u64::from(!fresh.is_empty()),
            loads: old.loads.clone(),
        };
        let mut report = ReloadReport {
            dir,
            generation: new.generation,
            how: How::Nothing,
            why_in_place: None,
            seconds: 0.0,
            seconds_without_weights: 0.0,
            ranks: Vec::new(),
        };
        if fresh.is_empty() {
            *self.served() = new.clone();
        } else {
            // Two sets of weights are enough for any memory.
            self.ask(Command::Settle)?;
            let verify = if request.verify { Verify::Always } else { Verify::Never };
            report.why_in_place = match request.in_place {
                true => None,
                false => self.no_room(&new.parts)?,
            };
            let mut beside = None;
            if !request.in_place && report.why_in_place.is_none() {
                match self.load(&mut new, &fresh, verify) {
                    Ok(group) => beside = Some(group),
                    Err(fault) if is_out_of_memory(&fault.error) => {
                        report.why_in_place = Some(fault.error.to_string());
                    }
                    Err(fault) => return Err(fault.into()),
                }
            }
            match beside {
                Some(group) => {
                    report.how = How::Beside;
                    self.swap(group, new.clone())?;
                }
                None => {
                    report.how = How::InPlace;
                    // Whoever holds a GPU's arena keeps it.
                    fresh.iter().for_each(|&rank| old.parts[rank].upload = None);
                    report.seconds_without_weights = self.exchange(old.clone(), &mut new, &fresh, verify)?;
                }
            }
            self.metrics.loaded(new.load(begin.elapsed().as_secs_f64()));
        }
        report.ranks = (0..new.parts.len()).map(|rank| rank_report(&old, &new, rank, &fresh)).collect();
        report.seconds = begin.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Why two sets of weights do not fit a GPU; `None` where they do, and on the processor, which maps them.
    fn no_room(&self, parts: &[RankPart]) -> Result<Option<String>, ReloadError> {
        let Some(gpus) = self.options.device.open(parts.len())? else { return Ok(None) };
        let served = self.served();
        let model = &served.manifest.model;
        let cache = self.limits.cache_blocks.saturating_mul(block_bytes(model, parts.len(), &self.options));
        let cache = cache / parts.len();
        for gpu in &gpus {
            let own = gpus.iter().zip(parts).filter(|(other, _)| other.ordinal() == gpu.ordinal());
            let wanted = own.fold(SPARE_BYTES, |sum, (_, part)| {
                let manifest = part.shard.manifest();
                let data = if part.upload.is_some() { 0 } else { manifest.bytes - manifest.data_start };
                sum.saturating_add(usize::try_from(data).unwrap_or(usize::MAX)).saturating_add(cache)
            });
            let (free, _) = gpu.memory().map_err(kernels::Error::from).map_err(Error::from)?;
            if wanted > free {
                let gpu = gpu.ordinal();
                return Ok(Some(format!(
                    "GPU {gpu}: {wanted} bytes for new weights, their cache and room to work, {free} are free"
                )));
            }
        }
        Ok(None)
    }

    /// Loads the ranks `fresh` of `new`.
    fn load(&self, new: &mut Served, fresh: &[usize], verify: Verify) -> Result<RankGroup, LoadFault> {
        let stop = self.fresh_stop();
        let loading = Loading {
            options: &self.options,
            limits: self.limits,
            records: &self.records,
            verify,
            threads: beside_threads(),
            stop: &stop,
        };
        let (group, loads) = loading.run(&new.manifest.model, &mut new.parts, fresh)?;
        loads.into_iter().for_each(|(rank, loaded)| new.loads[rank] = loaded);
        Ok(group)
    }

    /// Lets what has begun end, takes the old weights out of memory, and loads the new ones; how long there were none. When the new
    /// ones cannot be loaded after all, the old ones are loaded again, from the files that they came from.
    fn exchange(
        &self,
        mut old: Served,
        new: &mut Served,
        fresh: &[usize],
        verify: Verify,
    ) -> Result<f64, ReloadError> {
        if verify == Verify::Always {
            // While the old ones still are there.
            let stop = self.fresh_stop();
            verify::ranks(fresh.iter().map(|&rank| (rank, &new.parts[rank])), beside_threads(), &stop)?;
        }
        let begin = Instant::now();
        self.in_place.store(true, Ordering::Relaxed);
        let verdicts = if verify == Verify::Always { Verified::Now } else { Verified::No };
        fresh.iter().for_each(|&rank| self.served().parts[rank].upload = None);
        self.ask(Command::Drain)?;
        match self.load(new, fresh, Verify::Never) {
            Ok(group) => {
                fresh.iter().for_each(|&rank| new.loads[rank].verified = verdicts);
                self.swap(group, new.clone())?;
                Ok(begin.elapsed().as_secs_f64())
            }
            Err(_) if self.ended.load(Ordering::Relaxed) => Err(ReloadError::stopped()),
            Err(fault) => {
                let back = self.load(&mut old, fresh, Verify::Never);
                match back {
                    Ok(group) => self.swap(group, old)?,
                    Err(second) => {
                        let cause = format!(
                            "neither the new weights could be loaded ({fault}) nor the old ones again ({second}); start the server again"
                        );
                        // Nobody takes it where the engine has stopped already.
                        let _ = self.commands.send(Command::Fail(cause.clone()));
                        return Err(ReloadError::new(Obstacle::Stopped, cause));
                    }
                }
                Err(fault.into())
            }
        }
    }

    /// Hands new weights to the engine's thread.
    fn swap(&self, group: RankGroup, new: Served) -> Result<(), ReloadError> {
        let worker =
            worker(new.generation, group, &self.options, (self.limits, self.max_model_len), &self.metrics);
        self.ask(|done| Command::Swap(Box::new(worker), done))?;
        *self.served() = new;
        Ok(())
    }

    /// Tells the engine's thread something and waits until it says that it is done.
    fn ask(&self, command: impl FnOnce(Sender<()>) -> Command) -> Result<(), ReloadError> {
        let (sender, done) = channel();
        self.commands.send(command(sender)).map_err(|_| ReloadError::stopped())?;
        done.recv().map_err(|_| ReloadError::stopped())
    }

    /// A flag that gives the loading up that is about to begin.
    fn fresh_stop(&self) -> Arc<AtomicBool> {
        let mut stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        *stop = Arc::new(AtomicBool::new(self.ended.load(Ordering::Relaxed)));
        Arc::clone(&stop)
    }

    /// Gives a reload that runs up and waits for it.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.stop.lock().unwrap_or_else(PoisonError::into_inner).store(true, Ordering::Relaxed);
        drop(self.busy.lock());
    }

    pub(crate) fn served(&self) -> MutexGuard<'_, Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what reading a rank's file again has shown, if it is the one that is served.
    pub(crate) fn note_scrubbed(&self, rank: usize, of: &RankPart, scrubbed: Scrubbed) {
        let mut served = self.served();
        let is_it = served.parts.get(rank).is_some_and(|part| Arc::ptr_eq(&part.watch, &of.watch));
        if is_it {
            self.metrics.scrubbed(rank, scrubbed.fault.is_some());
            served.loads[rank].scrubbed = Some(scrubbed);
        }
    }

    /// Why new requests should go elsewhere, where they should.
    pub(super) fn trouble(&self) -> Option<String> {
        if self.in_place.load(Ordering::Relaxed) {
            return Some("weights are being exchanged: requests wait".to_owned());
        }
        if self.options.device.device != Device::Cpu {
            // What a GPU computes with was right when it was loaded.
            return None;
        }
        let served = self.served();
        let fault = served.loads.iter().find_map(|load| load.scrubbed.as_ref()?.fault.clone())?;
        Some(format!("a rank file that is computed with is damaged: {fault}"))
    }

    pub(super) fn status(&self) -> Status {
        let served = self.served();
        let ranks = served.parts.iter().zip(&served.loads).enumerate().map(|(rank, (part, load))| {
            let manifest = part.shard.manifest();
            RankStatus {
                rank,
                file: part.shard.path().to_owned(),
                bytes: manifest.bytes,
                digest: manifest.blake3.to_string(),
                loaded: crate::status::unix(load.at),
                seconds: load.seconds,
                gb_per_s: load.gb_per_s(manifest.bytes),
                verified: match load.verified {
                    Verified::Now => "when loaded",
                    Verified::Before => "before",
                    Verified::No => "no",
                },
                scrubbed: load.scrubbed.clone(),
            }
        });
        Status {
            dir: served.dir.clone(),
            generation: served.generation,
            digest: served.digest(),
            reloading: self.reloading.load(Ordering::Relaxed),
            ranks: ranks.collect(),
        }
    }
}

/// The engine's work on one set of weights.
pub(super) fn worker(
    generation: u64,
    group: RankGroup,
    options: &EngineOptions,
    (limits, max_model_len): (StepLimits, usize),
    metrics: &Arc<Metrics>,
) -> Worker {
    let scheduler_limits = SchedulerLimits {
        max_num_seqs: options.max_num_seqs,
        max_num_batched_tokens: options.max_num_batched_tokens,
        prefix_cache: options.prefix_cache,
    };
    let scheduler = Scheduler::new(scheduler_limits, BlockPool::new(limits.cache_blocks));
    Worker::new(generation, group, scheduler, max_model_len, Arc::clone(metrics))
}

/// Threads that check bytes while others compute.
fn beside_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1))
}

fn rank_report(old: &Served, new: &Served, rank: usize, fresh: &[usize]) -> RankReport {
    let (manifest, load) = (new.parts[rank].shard.manifest(), &new.loads[rank]);
    RankReport {
        rank,
        loaded: fresh.contains(&rank),
        bytes: manifest.bytes,
        seconds: load.seconds,
        gb_per_s: load.gb_per_s(manifest.bytes),
        verified: load.verified != Verified::No,
        old_digest: old.parts[rank].shard.manifest().blake3.to_string(),
        new_digest: manifest.blake3.to_string(),
    }
}

fn is_out_of_memory(error: &Error) -> bool {
    let (Error::Device(device) | Error::Weight { source: device, .. }) = error else { return false };
    matches!(device, kernels::Error::Cuda(CudaError::OutOfMemory { .. }))
}
