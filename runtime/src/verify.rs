//! Every byte of a checkpoint held against its digest, before anything is loaded from it.

use crate::Error;
use formats::checkpoint::{Checkpoint, RankShard};
use formats::manifest::{B3SUMS_FILE, MANIFEST_FILE};
use formats::{Digest, Error as FormatError};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Checks all rank files chunk by chunk, on all cores, the files beside them, and the top manifest by the line of B3SUMS.
///
/// # Errors
/// The first damaged chunk, naming rank, chunk and tensors; or the other file that changed.
pub fn verify(checkpoint: &Checkpoint) -> Result<(), Error> {
    verify_small_files(checkpoint)?;
    let manifest = checkpoint.manifest();
    let shards = (0..manifest.ranks).map(|rank| checkpoint.rank(rank)).collect::<Result<Vec<_>, _>>()?;
    let chunks: Vec<(&RankShard, usize)> = shards
        .iter()
        .flat_map(|shard| (0..shard.manifest().chunks.len()).map(move |chunk| (shard, chunk)))
        .collect();
    let next = AtomicUsize::new(0);
    let first: Mutex<Option<(usize, FormatError)>> = Mutex::new(None);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(chunks.len()) {
            scope.spawn(|| {
                while let Some((i, (shard, chunk))) = claim(&next, &chunks) {
                    let Err(error) = shard.check_chunk(*chunk) else { continue };
                    let mut first = first.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    if first.as_ref().is_none_or(|(other, _)| i < *other) {
                        *first = Some((i, error));
                    }
                }
            });
        }
    });
    match first.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some((_, error)) => Err(error.into()),
        None => Ok(()),
    }
}

/// Checks the files beside the weights and the top manifest, for callers that check the weights themselves.
///
/// # Errors
/// The file that changed.
pub fn verify_small_files(checkpoint: &Checkpoint) -> Result<(), Error> {
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

fn claim<'a, T>(next: &AtomicUsize, items: &'a [T]) -> Option<(usize, &'a T)> {
    let i = next.fetch_add(1, Ordering::Relaxed);
    items.get(i).map(|item| (i, item))
}
