//! Threads and the scratch memory of each.

use super::elementwise::SoftmaxState;
use super::integers;
use super::pool::{Pool, Threads};
use super::router;
use crate::Error;

/// Fewer multiply-adds than this are done by the caller: to share them takes about as long.
const WORTH_SHARING: usize = 1 << 16;

/// The backend's own threads; with one thread, the caller.
#[derive(Debug)]
pub(super) struct Workers(Pool<Scratch>);

/// What a task needs beyond its result. Grows to the largest task seen, with no meaning between tasks.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Decoded weights.
    pub weights: Vec<f32>,
    /// Unfinished sums, as lanes.
    pub lanes: Vec<f32>,
    /// Finished sums, scores or the like.
    pub sums: Vec<f32>,
    /// Keys of one head, transposed.
    pub keys: Vec<f32>,
    /// Keys and values of one head.
    pub expanded: Vec<f32>,
    /// Softmax state of each row.
    pub softmax: Vec<SoftmaxState>,
    /// Blocks of weights, taken apart.
    pub blocks: Box<integers::Scratch>,
    /// A token's choice of experts.
    pub router: router::Scratch,
}

impl Workers {
    pub(super) fn new(threads: usize) -> Result<Self, Error> {
        let refusal = |cause: String| Error::Threads { threads, cause };
        if threads == 0 {
            return Err(refusal("at least one is needed".to_owned()));
        }
        Pool::new(threads).map(Self).map_err(|error| refusal(error.to_string()))
    }

    /// How many there are.
    pub(super) fn threads(&self) -> usize {
        self.0.threads()
    }

    /// Calls `task(i, chunk, scratch)` for the chunks of `out`, all of `len` values but the last.
    ///
    /// `work` is the number of multiply-adds in all of them, roughly. Nothing is allocated here.
    pub(super) fn chunks<T: Send>(
        &self,
        out: &mut [T],
        len: usize,
        work: usize,
        task: impl Fn(usize, &mut [T], &mut Scratch) + Sync,
    ) {
        let on = if work < WORTH_SHARING { Threads::Caller } else { Threads::All };
        self.0.chunks(out, len, on, task);
    }
}

/// The first `len` values of `buffer`, which grows if it has to. They have no meaning yet.
pub(super) fn grown<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
