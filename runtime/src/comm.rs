//! How ranks add up their partial sums.

mod gpu;
mod nccl;
mod peer;

pub use gpu::SharedGpu;
pub use nccl::Nccl;
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

/// Longer sums are shared: each rank adds up a part of the values and takes the others' parts from them.
const SHARED_FROM: usize = 1 << 14;

/// What the threads share. Two sets of slots in turn: a rank may write the next sum's part while others still read the
/// last one's, and cannot come back to those slots before everybody has passed the barrier between.
#[derive(Debug)]
struct Exchange {
    slots: [Vec<RwLock<Vec<f32>>>; 2],
    /// Each rank's part of a shared sum.
    sums: [Vec<RwLock<Vec<f32>>>; 2],
    barrier: Barrier,
}

impl Local {
    /// One communicator for each of `ranks`, for sums of at most `len` values.
    pub fn group(ranks: usize, len: usize) -> Vec<Self> {
        let of = |len: usize| {
            (0..ranks).map(|_| RwLock::new(vec![0.0; if ranks > 1 { len } else { 0 }])).collect()
        };
        let (slots, part) = ([of(len), of(len)], len.div_ceil(ranks));
        let exchange = Arc::new(Exchange { slots, sums: [of(part), of(part)], barrier: Barrier::new(ranks) });
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
        if len < SHARED_FROM {
            add_up(slots, 0, values);
        } else {
            let (sums, part) = (&self.exchange.sums[self.turn], len.div_ceil(slots.len()));
            let part_of = |rank: usize| (rank * part).min(len)..((rank + 1) * part).min(len);
            let own = part_of(self.rank);
            let mut sum = sums[self.rank].write().unwrap_or_else(PoisonError::into_inner);
            add_up(slots, own.start, &mut sum[..own.len()]);
            drop(sum);
            self.exchange.barrier.wait()?;
            for (rank, sum) in sums.iter().enumerate() {
                let part = part_of(rank);
                let sum = sum.read().unwrap_or_else(PoisonError::into_inner);
                values[part.clone()].copy_from_slice(&sum[..part.len()]);
            }
        }
        self.turn ^= 1;
        Ok(())
    }

    fn is_repeatable(&self) -> bool {
        self.exchange.slots[0].len() == 1
    }
}

/// `sums` of all slots from the value `first` on. In the order of ranks everywhere: the same bits whoever adds up.
fn add_up(slots: &[RwLock<Vec<f32>>], first: usize, sums: &mut [f32]) {
    for (rank, slot) in slots.iter().enumerate() {
        let slot = slot.read().unwrap_or_else(PoisonError::into_inner);
        let part = &slot[first..][..sums.len()];
        match rank {
            0 => sums.copy_from_slice(part),
            _ => sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x),
        }
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
    fn long_sums_are_those_of_short_ones() {
        for len in [SHARED_FROM, SHARED_FROM + 3] {
            let threads: Vec<_> = Local::group(5, len + 9)
                .into_iter()
                .enumerate()
                .map(|(rank, mut local)| {
                    std::thread::spawn(move || {
                        // Of fractions some sums are rounded otherwise in any other order.
                        let part = |rank: usize, i: usize| 1.0 / (1.5 + (rank * 7 + i % 1000) as f32);
                        for _ in 0..5 {
                            let mut buffer = HostBuffer::zeros(len + 9);
                            let values = buffer.values_mut().iter_mut().enumerate();
                            values.for_each(|(i, value)| *value = part(rank, i));
                            reduce(&mut local, &mut buffer, len).unwrap();
                            for (i, &value) in buffer.values().iter().enumerate() {
                                let sum = (1..5).fold(part(0, i), |sum, rank| sum + part(rank, i));
                                assert_eq!(
                                    value,
                                    if i < len { sum } else { part(rank, i) },
                                    "value {i} of {len}"
                                );
                            }
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        }
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
