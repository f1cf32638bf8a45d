//! Threads and the scratch memory of each.

use super::elementwise::SoftmaxState;
use super::router;
use crate::Error;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Mutex, PoisonError};

/// Fewer multiply-adds than this are done by the caller: waking threads takes about as long.
const WORTH_WAKING: usize = 1 << 17;

/// The backend's own threads; with one thread, the caller.
#[derive(Debug)]
pub(super) struct Workers {
    /// `None` with one thread.
    pool: Option<ThreadPool>,
    /// One for each thread. A thread only ever takes its own, so no lock is waited for.
    scratch: Vec<Mutex<Scratch>>,
}

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
    /// A token's choice of experts.
    pub router: router::Scratch,
}

impl Workers {
    pub(super) fn new(threads: usize) -> Result<Self, Error> {
        let refusal = |cause: String| Error::Threads { threads, cause };
        if threads == 0 {
            return Err(refusal("at least one is needed".to_owned()));
        }
        let pool = match threads {
            1 => None,
            _ => Some(
                ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .thread_name(|i| format!("cpu-{i}"))
                    .build()
                    .map_err(|e| refusal(e.to_string()))?,
            ),
        };
        Ok(Self { pool, scratch: (0..threads).map(|_| Mutex::default()).collect() })
    }

    /// Calls `task(i, chunk, scratch)` for the chunks of `out`, all of `len` values but the last.
    ///
    /// `work` is the number of multiply-adds in all of them, roughly. Without threads nothing is allocated here.
    pub(super) fn chunks(
        &self,
        out: &mut [f32],
        len: usize,
        work: usize,
        task: impl Fn(usize, &mut [f32], &mut Scratch) + Sync,
    ) {
        if out.is_empty() {
            return;
        }
        let in_turn = |index: usize, chunk: &mut [f32]| {
            let thread = self.pool.as_ref().and_then(ThreadPool::current_thread_index).unwrap_or(0);
            let mut scratch = self.scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
            task(index, chunk, &mut scratch);
        };
        match &self.pool {
            Some(pool) if work >= WORTH_WAKING => pool.install(|| {
                out.par_chunks_mut(len).enumerate().for_each(|(index, chunk)| in_turn(index, chunk));
            }),
            _ => out.chunks_mut(len).enumerate().for_each(|(index, chunk)| in_turn(index, chunk)),
        }
    }
}

/// The first `len` values of `buffer`, which grows if it has to. They have no meaning yet.
pub(super) fn grown<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
