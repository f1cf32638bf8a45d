//! A rank file's way into a GPU's memory.
//!
//! Several threads claim chunks of the file. Each has a piece or two of page-locked memory: while one is on its way to the device,
//! the other is filled. The arena on the device is laid out exactly like the file's data section, so tensors are views of it.
//! Digests are checked, where that is asked for, while a chunk is in the processor's cache.

use crate::Error;
use crate::device::LoadMode;
use crate::rank::RankPart;
use formats::checkpoint::RankShard;
use formats::digest::{CHUNK_BYTES, chunk_digest};
use kernels::cuda::driver::{Device, Memory, Staging, Stream};
use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Threads of a rank. One H200's bus is full with twelve of them.
pub const MOST_THREADS: usize = 16;
/// A chunk where no digest is checked.
const UNCHECKED_BYTES: u64 = 4 << 20;
/// Page-locked memory of a rank.
const STAGING_BYTES: u64 = 256 << 20;
/// What a direct read's place and length must be multiples of.
const SECTOR: u64 = 4096;

/// Whether bytes are held against the manifest's digests on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digests {
    /// Every chunk is.
    Check,
    /// None is.
    Skip,
}

/// How an upload went.
#[derive(Clone, Debug)]
pub struct Upload {
    /// The file's data section on the device.
    pub arena: Arc<Memory>,
    /// Bytes read.
    pub bytes: u64,
    /// How long it took, the making of the arena and the page-locked memory included.
    pub elapsed: Duration,
    /// How the file was read: `Buffered` or `Direct`.
    pub mode: LoadMode,
}

/// How rank files get onto GPUs.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// How they are read.
    pub mode: LoadMode,
    /// Threads that read each.
    pub threads: usize,
    /// Set when nobody needs it any more: another rank has failed, or the engine ends.
    pub stop: Arc<AtomicBool>,
}

/// Copies the data section of a rank's file to `device`.
///
/// # Errors
/// [`Error`] naming the file, and chunk and tensors when a digest is wrong.
pub fn upload(part: &RankPart, device: &Arc<Device>, plan: &LoadPlan) -> Result<Upload, Error> {
    let (started, shard) = (Instant::now(), &part.shard);
    let manifest = shard.manifest();
    let bytes = usize::try_from(manifest.bytes - manifest.data_start).unwrap_or(usize::MAX);
    let what = format!("the weights in {}", shard.path().display());
    let arena = Arc::new(Memory::new(device, bytes, &what).map_err(kernels::Error::from)?);
    let source = Source::open(part, plan.mode)?;
    let chunk_bytes = match part.digests {
        Digests::Check => CHUNK_BYTES,
        Digests::Skip => UNCHECKED_BYTES,
    };
    let chunks = usize::try_from(manifest.bytes.div_ceil(chunk_bytes)).unwrap_or(usize::MAX);
    let threads = plan.threads.clamp(1, MOST_THREADS).min(chunks);
    let job = Job {
        shard,
        digests: part.digests,
        device,
        arena: &arena,
        source: &source,
        plan,
        chunk_bytes,
        threads,
        started,
        done: AtomicU64::new(0),
        told: AtomicU64::new(0),
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        fault: Mutex::new(None),
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| job.work(chunks));
        }
    });
    match job.fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        // Chunks that no digest is held against may be of before and after.
        None if !part.watch.is_unchanged() => {
            Err(formats::Error::Changed { path: shard.path().to_owned() }.into())
        }
        None => Ok(Upload { arena, bytes: manifest.bytes, elapsed: started.elapsed(), mode: source.mode() }),
    }
}

struct Job<'a> {
    shard: &'a RankShard,
    digests: Digests,
    device: &'a Arc<Device>,
    arena: &'a Arc<Memory>,
    source: &'a Source,
    plan: &'a LoadPlan,
    chunk_bytes: u64,
    threads: usize,
    started: Instant,
    /// Bytes so far.
    done: AtomicU64,
    /// When that was said last, in milliseconds from the start.
    told: AtomicU64,
    next: AtomicUsize,
    failed: AtomicBool,
    /// Of the first chunk that failed, so that two runs say the same.
    fault: Mutex<Option<(usize, Error)>>,
}

impl Job<'_> {
    fn work(&self, chunks: usize) {
        let mut claimed = None;
        if let Err(error) = self.chunks(chunks, &mut claimed) {
            self.failed.store(true, Ordering::Relaxed);
            let chunk = claimed.unwrap_or(chunks);
            let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
            if fault.as_ref().is_none_or(|(other, _)| chunk < *other) {
                *fault = Some((chunk, error));
            }
        }
    }

    fn chunks(&self, chunks: usize, claimed: &mut Option<usize>) -> Result<(), Error> {
        let refused = kernels::Error::from;
        self.device.bind().map_err(refused)?;
        let stream = Stream::new(self.device).map_err(refused)?;
        let most = self.shard.manifest().bytes.next_multiple_of(SECTOR);
        let size = usize::try_from(self.chunk_bytes.min(most)).expect("a chunk fits memory");
        // One that is hashed is filled for longer than it travels.
        let count = (STAGING_BYTES / self.threads as u64 / size as u64).clamp(1, 2) as usize;
        let staging = |_| Staging::new(self.device, size).map_err(refused);
        let mut pieces = (0..count).map(staging).collect::<Result<Vec<_>, _>>()?;
        for turn in (0..count).cycle() {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if self.plan.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped("loading was given up".to_owned()));
            }
            if chunk >= chunks || self.failed.load(Ordering::Relaxed) {
                break;
            }
            *claimed = Some(chunk);
            self.chunk(chunk, &mut pieces[turn], &stream)?;
        }
        stream.finish().map_err(refused)?;
        Ok(())
    }

    fn chunk(&self, chunk: usize, piece: &mut Staging, stream: &Stream) -> Result<(), Error> {
        let manifest = self.shard.manifest();
        let start = chunk as u64 * self.chunk_bytes;
        let range = start..manifest.bytes.min(start + self.chunk_bytes);
        let len = usize::try_from(range.end - range.start).expect("a chunk fits memory");
        let bytes = piece.fill().map_err(kernels::Error::from)?;
        self.source.read(range.start, len, bytes).map_err(|error| Error::File {
            path: self.shard.path().to_owned(),
            why: format!("cannot read: {error}"),
        })?;
        if self.digests == Digests::Check
            && chunk_digest(&bytes[..len], range.start, manifest.bytes) != manifest.chunks[chunk]
        {
            return Err(self.shard.damaged_chunk(chunk).into());
        }
        let header = usize::try_from(manifest.data_start.saturating_sub(range.start)).unwrap_or(len).min(len);
        let to = (range.start + header as u64).saturating_sub(manifest.data_start);
        piece.send(header, len - header, stream, self.arena, usize::try_from(to).unwrap_or(usize::MAX));
        self.tell(self.done.fetch_add(len as u64, Ordering::Relaxed) + len as u64);
        Ok(())
    }

    /// Says from time to time how far this rank is.
    fn tell(&self, done: u64) {
        const EVERY: u64 = 2_000;
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let told = self.told.load(Ordering::Relaxed);
        let due = now >= told + EVERY;
        if !due || self.told.compare_exchange(told, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let all = self.shard.manifest().bytes;
        let rate = done as f64 / 1e6 / now as f64;
        tracing::info!(
            "{}: {:.1} of {:.1} GB on GPU {}, {rate:.1} GB/s, {:.0} s left",
            self.shard.path().display(),
            done as f64 / 1e9,
            all as f64 / 1e9,
            self.device.ordinal(),
            (all - done) as f64 / 1e9 / rate,
        );
    }
}

/// An open rank file.
enum Source {
    Buffered(File),
    /// Without the page cache, and with it for what cannot be read so.
    Direct(File, File),
}

impl Source {
    fn open(part: &RankPart, mode: LoadMode) -> Result<Self, Error> {
        let io = |error: std::io::Error| Error::File {
            path: part.shard.path().to_owned(),
            why: format!("cannot open it again: {error}"),
        };
        let buffered = part.watch.file().try_clone().map_err(io)?;
        let direct = match mode {
            LoadMode::Buffered => false,
            LoadMode::Direct => true,
            LoadMode::Auto => resident_share(&buffered, part.shard.manifest().bytes) < 0.5,
        };
        if direct {
            let flag = i32::try_from(OFlags::DIRECT.bits()).expect("an open flag");
            // The same file, whatever has its name by now. A file system that cannot do it says so here.
            let path = format!("/proc/self/fd/{}", buffered.as_raw_fd());
            if let Ok(file) = File::options().read(true).custom_flags(flag).open(path) {
                return Ok(Self::Direct(file, buffered));
            }
        }
        Ok(Self::Buffered(buffered))
    }

    fn mode(&self) -> LoadMode {
        match self {
            Self::Buffered(_) => LoadMode::Buffered,
            Self::Direct(..) => LoadMode::Direct,
        }
    }

    /// `len` bytes from `offset`, a multiple of [`SECTOR`], to the start of `bytes`, which has room for the rest of a sector.
    fn read(&self, offset: u64, len: usize, bytes: &mut [u8]) -> std::io::Result<()> {
        let (direct, buffered) = match self {
            Self::Buffered(file) => (None, file),
            Self::Direct(direct, buffered) => (Some(direct), buffered),
        };
        let mut got = 0;
        if let Some(direct) = direct {
            let room = len.next_multiple_of(SECTOR as usize).min(bytes.len());
            while got < len {
                match direct.read_at(&mut bytes[got..room], offset + got as u64) {
                    Ok(0) => break,
                    Ok(n) => got += n,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    // The tail of a file, on some file systems.
                    Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => break,
                    Err(error) => return Err(error),
                }
                if !got.is_multiple_of(SECTOR as usize) {
                    break;
                }
            }
        }
        if got < len {
            buffered.read_exact_at(&mut bytes[got..len], offset + got as u64).map_err(|error| match error
                .kind()
            {
                std::io::ErrorKind::UnexpectedEof => std::io::Error::other(format!(
                    "it ends before byte {}, which its manifest names; copy or convert it again",
                    offset + len as u64
                )),
                _ => error,
            })?;
        }
        Ok(())
    }
}

/// Which share of a file lies in the page cache, by samples: reads that may not wait. Where the file system has no such
/// reads, all of it, because then there is no disk to go around the cache for.
fn resident_share(file: &File, len: u64) -> f64 {
    const SAMPLES: u64 = 64;
    let (mut resident, mut asked) = (0u32, 0u32);
    for i in 0..SAMPLES {
        let mut byte = [0];
        let at = len / SAMPLES * i + len / SAMPLES / 2;
        match rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT) {
            Ok(1) => resident += 1,
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(_) => return 1.0,
        }
        asked += 1;
    }
    f64::from(resident) / f64::from(asked.max(1))
}
