//! Ranks that share one GPU: each has a stream of its own, and their sums meet in memory that all can see.

use super::{Barrier, Communicator, PeerStopped};
use kernels::cuda::driver::{Device, Event, Memory};
use kernels::cuda::{Buffer, Cuda};
use std::sync::Arc;

/// One rank of several on a GPU. The host orders their streams with events, so nothing waits inside a kernel and the ranks need
/// not run at the same time; for the same reason their steps cannot be recorded.
#[derive(Debug)]
pub struct SharedGpu {
    rank: usize,
    turn: usize,
    exchange: Arc<Exchange>,
}

/// Two sets of parts in turn, as in [`super::Local`].
#[derive(Debug)]
struct Exchange {
    ranks: usize,
    len: usize,
    /// `[ranks, len]` each
    parts: [Buffer; 2],
    /// For each set and rank: its part is there.
    written: [Vec<Event>; 2],
    barrier: Barrier,
}

impl SharedGpu {
    /// One communicator for each of `ranks`, for sums of at most `len` values.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn group(device: &Arc<Device>, ranks: usize, len: usize) -> Result<Vec<Self>, kernels::Error> {
        let all = if ranks > 1 { ranks * len } else { 0 };
        let parts = || Buffer::new(device, all, "the sums of ranks");
        let events = || (0..ranks).map(|_| Event::new(device)).collect::<Result<Vec<_>, _>>();
        let exchange = Arc::new(Exchange {
            ranks,
            len,
            parts: [parts()?, parts()?],
            written: [events()?, events()?],
            barrier: Barrier::new(ranks),
        });
        Ok((0..ranks).map(|rank| Self { rank, turn: 0, exchange: Arc::clone(&exchange) }).collect())
    }
}

impl Communicator<Cuda> for SharedGpu {
    fn all_reduce(&mut self, backend: &mut Cuda, buffer: &mut Buffer, len: usize) -> Result<(), PeerStopped> {
        let Exchange { ranks, len: stride, parts, written, barrier } = &*self.exchange;
        if *ranks == 1 {
            return Ok(());
        }
        let (parts, written) = (&parts[self.turn], &written[self.turn]);
        let stream = Arc::clone(backend.stream());
        let (to, from): (&Memory, &Memory) = (parts.memory(), buffer.memory());
        stream.copy(to, self.rank * stride * 4, from, 0, len * 4);
        written[self.rank].record(&stream);
        // Every event of this turn has been recorded beyond here; none is again before everybody has passed the next barrier.
        barrier.wait()?;
        for (rank, event) in written.iter().enumerate() {
            if rank != self.rank {
                stream.wait(event);
            }
        }
        // Rank order everywhere: every rank computes the same bits.
        backend.sum_parts(parts, *ranks, *stride, len, buffer);
        self.turn ^= 1;
        Ok(())
    }

    fn is_repeatable(&self) -> bool {
        self.exchange.ranks == 1
    }
}

/// A rank that goes away releases the others.
impl Drop for SharedGpu {
    fn drop(&mut self) {
        self.exchange.barrier.stop();
    }
}
