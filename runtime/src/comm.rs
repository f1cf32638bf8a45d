//! How ranks add up their partial sums.

mod gpu;
mod peer;

pub use gpu::SharedGpu;
pub use peer::Peer;

use kernels::{Backend, HostBuffer};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};

/// Another rank has given up, so this step cannot be finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another rank stopped")]
pub struct PeerStopped;

/// Sums over all ranks.
pub trait Communicator<B: Backend> {
    /// Replaces the first `len` values of `buffer` by their sum over all ranks, the same bits on each.
    ///
    /// # Errors
    /// [`PeerStopped`] when another rank will never arrive.
    fn all_reduce(&mut self, backend: &mut B, buffer: &mut B::Buffer, len: usize) -> Result<(), PeerStopped>;

    /// Whether a device may repeat its sums without being asked for each: the host has no part in them.
    fn is_repeatable(&self) -> bool;
}

/// Ranks as threads of one process, through ordinary memory.
#[derive(Debug)]
pub struct Local {
    rank: usize,
    turn: usize,
    exchange: Arc<Exchange>,
}

/// What the threads share. Two sets of slots in turn: a rank may write the next sum's part while others still read the
/// last one's, and cannot come back to those slots before everybody has passed the barrier between.
#[derive(Debug)]
struct Exchange {
    slots: [Vec<RwLock<Vec<f32>>>; 2],
    barrier: Barrier,
}

impl Local {
    /// One communicator for each of `ranks`, for sums of at most `len` values.
    pub fn group(ranks: usize, len: usize) -> Vec<Self> {
        let slots = || (0..ranks).map(|_| RwLock::new(vec![0.0; if ranks > 1 { len } else { 0 }])).collect();
        let exchange = Arc::new(Exchange { slots: [slots(), slots()], barrier: Barrier::new(ranks) });
        (0..ranks).map(|rank| Self { rank, turn: 0, exchange: Arc::clone(&exchange) }).collect()
    }
}

impl<B: Backend<Buffer = HostBuffer>> Communicator<B> for Local {
    fn all_reduce(
        &mut self,
        _backend: &mut B,
        buffer: &mut HostBuffer,
        len: usize,
    ) -> Result<(), PeerStopped> {
        let slots = &self.exchange.slots[self.turn];
        if slots.len() == 1 {
            return Ok(());
        }
        let values = &mut buffer.values_mut()[..len];
        slots[self.rank].write().unwrap_or_else(PoisonError::into_inner)[..len].copy_from_slice(values);
        self.exchange.barrier.wait()?;
        // Rank order everywhere: every rank computes the same bits.
        for (rank, slot) in slots.iter().enumerate() {
            let part = slot.read().unwrap_or_else(PoisonError::into_inner);
            match rank {
                0 => values.copy_from_slice(&part[..len]),
                _ => values.iter_mut().zip(&part[..len]).for_each(|(sum, x)| *sum += x),
            }
        }
        self.turn ^= 1;
        Ok(())
    }

    fn is_repeatable(&self) -> bool {
        self.exchange.slots[0].len() == 1
    }
}

/// A rank that goes away releases the others.
impl Drop for Local {
    fn drop(&mut self) {
        self.exchange.barrier.stop();
    }
}

/// A barrier that does not wait for ranks that are gone.
#[derive(Debug)]
struct Barrier {
    ranks: usize,
    state: Mutex<BarrierState>,
    all_here: Condvar,
}

#[derive(Debug)]
struct BarrierState {
    waiting: usize,
    round: u64,
    stopped: bool,
}

impl Barrier {
    fn new(ranks: usize) -> Self {
        let state = BarrierState { waiting: 0, round: 0, stopped: false };
        Self { ranks, state: Mutex::new(state), all_here: Condvar::new() }
    }

    fn wait(&self) -> Result<(), PeerStopped> {
        let mut state = self.lock();
        if state.stopped {
            return Err(PeerStopped);
        }
        state.waiting += 1;
        if state.waiting == self.ranks {
            state.waiting = 0;
            state.round += 1;
            self.all_here.notify_all();
            return Ok(());
        }
        let round = state.round;
        while state.round == round {
            if state.stopped {
                return Err(PeerStopped);
            }
            state = self.all_here.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    fn stop(&self) {
        self.lock().stopped = true;
        self.all_here.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, BarrierState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::reference::Reference;

    fn reduce(local: &mut Local, values: &mut HostBuffer, len: usize) -> Result<(), PeerStopped> {
        local.all_reduce(&mut Reference::new(), values, len)
    }

    #[test]
    fn every_rank_gets_the_same_sum_many_times() {
        let threads: Vec<_> = Local::group(5, 3)
            .into_iter()
            .enumerate()
            .map(|(rank, mut local)| {
                std::thread::spawn(move || {
                    for round in 0..500 {
                        let mut buffer = HostBuffer::zeros(3);
                        buffer.values_mut().copy_from_slice(&[rank as f32, round as f32, 7.0]);
                        reduce(&mut local, &mut buffer, 2).unwrap();
                        assert_eq!(buffer.values(), [10.0, 5.0 * round as f32, 7.0]);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn a_rank_that_goes_away_releases_the_others() {
        let mut group = Local::group(3, 1);
        let gone = group.pop().unwrap();
        let threads: Vec<_> = group
            .into_iter()
            .map(|mut local| std::thread::spawn(move || reduce(&mut local, &mut HostBuffer::zeros(1), 1)))
            .collect();
        drop(gone);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), Err(PeerStopped));
        }
    }
}
