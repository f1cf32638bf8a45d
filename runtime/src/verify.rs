//! Every byte of a checkpoint held against its digest, before anything is loaded from it.

use crate::Error;
use formats::checkpoint::{Checkpoint, RankShard};
use formats::{Digest, Error as FormatError};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Checks all rank files chunk by chunk, on all cores, and the files beside them.
///
/// # Errors
/// The first damaged chunk, naming rank, chunk and tensors; or the file beside that changed.
pub fn verify(checkpoint: &Checkpoint) -> Result<(), Error> {
    let manifest = checkpoint.manifest();
    for side in &manifest.files {
        let path = checkpoint.dir().join(&side.file);
        let bytes = std::fs::read(&path).map_err(|e| Error::File {
            path: path.clone(),
            why: format!("cannot read: {e}; convert the model again"),
        })?;
        let found = Digest::of(&bytes);
        if found != side.blake3 {
            let (file, expected) = (path.display().to_string(), side.blake3.to_string());
            return Err(FormatError::Digest { file, expected, found: found.to_string() }.into());
        }
    }
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

fn claim<'a, T>(next: &AtomicUsize, items: &'a [T]) -> Option<(usize, &'a T)> {
    let i = next.fetch_add(1, Ordering::Relaxed);
    items.get(i).map(|item| (i, item))
}
