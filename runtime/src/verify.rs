//! Bytes of a checkpoint held against their digests.

mod records;

pub use records::Records;

use crate::Error;
use crate::rank::{LoadFault, RankPart};
use formats::checkpoint::Checkpoint;
use formats::manifest::{B3SUMS_FILE, MANIFEST_FILE};
use formats::{Digest, Error as FormatError};
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Which bytes are held against their digests when a checkpoint is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Rank files that have no record of having been right (see [`Records`]).
    #[default]
    Auto,
    /// Every file of the checkpoint.
    Always,
    /// None.
    Never,
}

impl FromStr for Verify {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "always" | "true" | "yes" | "on" | "1" => Ok(Self::Always),
            "never" | "false" | "no" | "off" | "0" | "" => Ok(Self::Never),
            _ => Err("expected auto, always or never".to_owned()),
        }
    }
}

/// Checks a rank's file chunk by chunk on `threads` threads, through its mapping; how long that took.
///
/// # Errors
/// The first damaged chunk, naming rank, chunk and tensors; [`Error::Stopped`] when `stop` is set.
pub fn weights(part: &RankPart, threads: usize, stop: &AtomicBool) -> Result<Duration, Error> {
    let begin = Instant::now();
    let chunks = part.shard.manifest().chunks.len();
    let next = AtomicUsize::new(0);
    let first: Mutex<Option<(usize, FormatError)>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, chunks.max(1)) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let chunk = next.fetch_add(1, Ordering::Relaxed);
                    if chunk >= chunks {
                        return;
                    }
                    let Err(error) = part.shard.check_chunk(chunk) else { continue };
                    let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                    if first.as_ref().is_none_or(|(other, _)| chunk < *other) {
                        *first = Some((chunk, error));
                    }
                }
            });
        }
    });
    if stop.load(Ordering::Relaxed) {
        return Err(Error::Stopped("checking was given up".to_owned()));
    }
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error.into()),
        None => Ok(begin.elapsed()),
    }
}

/// Checks these ranks one after the other; how long each took.
///
/// # Errors
/// [`LoadFault`] of the first that is damaged.
pub fn ranks<'a>(
    parts: impl IntoIterator<Item = (usize, &'a RankPart)>,
    threads: usize,
    stop: &AtomicBool,
) -> Result<Vec<(usize, Duration)>, LoadFault> {
    let check = |(rank, part)| Ok((rank, weights(part, threads, stop).map_err(LoadFault::of(rank))?));
    parts.into_iter().map(check).collect()
}

/// Checks the files beside the weights and the top manifest, the latter by its line of B3SUMS.
///
/// # Errors
/// The file that changed.
pub fn small_files(checkpoint: &Checkpoint) -> Result<(), Error> {
    for side in &checkpoint.manifest().files {
        check_file(&checkpoint.dir().join(&side.file), &side.blake3.to_string())?;
    }
    check_file(&checkpoint.dir().join(MANIFEST_FILE), &manifest_digest(checkpoint)?)
}

/// The digest of the top manifest, which no manifest can hold.
fn manifest_digest(checkpoint: &Checkpoint) -> Result<String, Error> {
    let path = checkpoint.dir().join(B3SUMS_FILE);
    let sums = String::from_utf8_lossy(&read(&path)?).into_owned();
    let line = sums.lines().find_map(|line| line.strip_suffix(MANIFEST_FILE)?.strip_suffix("  "));
    line.map(str::to_owned).ok_or_else(|| {
        let why = format!("no line for {MANIFEST_FILE}; copy or convert it again");
        Error::File { path, why }
    })
}

fn check_file(path: &Path, expected: &str) -> Result<(), Error> {
    let found = Digest::of(&read(path)?).to_string();
    if found == expected {
        return Ok(());
    }
    Err(FormatError::Digest { file: path.display().to_string(), expected: expected.to_owned(), found }.into())
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|e| {
        let why = format!("cannot read: {e}; copy or convert it again");
        Error::File { path: path.to_owned(), why }
    })
}
