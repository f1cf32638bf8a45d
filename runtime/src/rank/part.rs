//! What a rank is loaded from, and how that can fail.

use crate::Error;
use crate::upload::{Digests, Upload};
use formats::checkpoint::{Checkpoint, RankShard};
use formats::map::FileWatch;
use std::sync::Arc;

/// A rank's file, mapped and open, so that it stays the same file whatever becomes of its name.
#[derive(Clone, Debug)]
pub struct RankPart {
    /// Its weights, mapped.
    pub shard: RankShard,
    /// The open file.
    pub watch: Arc<FileWatch>,
    /// Where a GPU has its bytes already: then they are not read again.
    pub upload: Option<Upload>,
    /// Whether bytes are checked on their way to a GPU.
    pub digests: Digests,
}

impl RankPart {
    /// Opens and maps one rank's file. Its bytes are not read.
    ///
    /// # Errors
    /// [`Error`] naming the file.
    ///
    /// # Panics
    /// When the manifest has no such rank.
    pub fn open(checkpoint: &Checkpoint, rank: usize) -> Result<Self, Error> {
        let shard = checkpoint.rank(rank)?;
        let watch = Arc::new(shard.watch()?);
        Ok(Self { shard, watch, upload: None, digests: Digests::Skip })
    }

    /// All ranks of a checkpoint, whose manifests are held against each other first.
    ///
    /// # Errors
    /// [`Error`] naming the file.
    pub fn open_all(checkpoint: &Checkpoint) -> Result<Vec<Self>, Error> {
        checkpoint.rank_manifests()?;
        (0..checkpoint.manifest().ranks).map(|rank| Self::open(checkpoint, rank)).collect()
    }

    /// What to say when its file is not what it was any more.
    pub(super) fn written_to(watch: &FileWatch) -> String {
        format!(
            "{}: it was written to, or became shorter, while it was served, so the weights are no longer those that were loaded; start the server again, and write new weights beside those that are served (then rename, or name their folder to `shardrun reload`), never into them",
            watch.path().display()
        )
    }
}

/// Why ranks could not be loaded.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct LoadFault {
    /// The rank that it was, where it was one.
    pub rank: Option<usize>,
    /// What was wrong.
    pub error: Error,
}

impl LoadFault {
    /// A fault of one rank.
    pub fn of(rank: usize) -> impl FnOnce(Error) -> Self {
        move |error| Self { rank: Some(rank), error }
    }
}

impl From<Error> for LoadFault {
    fn from(error: Error) -> Self {
        Self { rank: None, error }
    }
}

impl From<kernels::Error> for LoadFault {
    fn from(error: kernels::Error) -> Self {
        Error::from(error).into()
    }
}

impl From<LoadFault> for Error {
    fn from(fault: LoadFault) -> Self {
        fault.error
    }
}
