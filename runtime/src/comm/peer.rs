//! Ranks on several GPUs of one machine that reach each other's memory.

use super::{Barrier, Communicator, PeerStopped};
use crate::Error;
use kernels::Backend;
use kernels::cuda::driver::{Device, Stream};
use kernels::cuda::peer::PeerSum;
use kernels::cuda::{Buffer, Cuda};
use std::sync::Arc;

/// One rank of several GPUs. Sums are kernels that wait for each other, so steps can be recorded.
#[derive(Debug)]
pub struct Peer {
    sum: PeerSum,
    barrier: Arc<Barrier>,
}

impl Peer {
    /// One communicator for each rank, whose GPUs are given, for sums of mostly at most `len` values.
    ///
    /// # Errors
    /// The device's refusal, also when two GPUs cannot reach each other.
    pub fn group(devices: &[Arc<Device>], len: usize) -> Result<Vec<Self>, kernels::Error> {
        let barrier = Arc::new(Barrier::new(devices.len()));
        let ends = PeerSum::group(devices, len)?;
        Ok(ends.into_iter().map(|sum| Self { sum, barrier: Arc::clone(&barrier) }).collect())
    }

    /// Adds up known numbers with all ranks, which call this at the same time, before anything depends on it.
    ///
    /// # Errors
    /// [`Error::Stopped`] when sums are wrong, or do not arrive within ten seconds.
    pub fn test(&self, backend: &mut Cuda) -> Result<(), Error> {
        self.barrier.wait().map_err(|stopped| Error::Stopped(stopped.to_string()))?;
        let causes = "usual causes are PCIe access control (ACS) and the IOMMU, which send GPUs' writes another way: turn them off in the firmware";
        let (rank, ranks) = (self.sum.rank(), self.sum.ranks());
        prove([rank, ranks], backend, causes, |stream, buffer, len| self.sum.sum(stream, buffer, len))
    }
}

/// Adds up known numbers with `sum` on the `rank`-th of `ranks`.
pub(super) fn prove(
    [rank, ranks]: [usize; 2],
    backend: &mut Cuda,
    causes: &str,
    sum: impl Fn(&Stream, &mut Buffer, usize),
) -> Result<(), Error> {
    const LEN: usize = 10_000;
    const ROUNDS: usize = 20;
    let ordinal = backend.device().ordinal();
    let fault =
        |why: String| Error::Stopped(format!("GPU {ordinal}: sums over {ranks} GPUs {why}; {causes}"));
    let mut buffer = backend.zeros(LEN)?;
    for round in 0..ROUNDS {
        // Whole numbers, so that sums are exact; another length each time.
        let len = LEN - round * 37;
        let value = |rank: usize, i: usize| (rank * 31 + i % 97 + round) as f32;
        let mine: Vec<f32> = (0..len).map(|i| value(rank, i)).collect();
        backend.write(&mut buffer, &mine);
        let stream = Arc::clone(backend.stream());
        sum(&stream, &mut buffer, len);
        let mut found = vec![f32::NAN; len];
        backend.read(&buffer, 0..len, &mut found);
        backend.finish().map_err(|error| fault(format!("did not arrive ({error})")))?;
        let expected = |i: usize| (0..ranks).map(|rank| value(rank, i)).sum::<f32>();
        if let Some(i) = (0..len).find(|&i| found[i] != expected(i)) {
            return Err(fault(format!(
                "are wrong (value {i} of round {round}: expected {}, found {})",
                expected(i),
                found[i]
            )));
        }
    }
    Ok(())
}

impl Communicator<Cuda> for Peer {
    fn all_reduce(&mut self, backend: &mut Cuda, buffer: &mut Buffer, len: usize) -> Result<(), PeerStopped> {
        let stream = Arc::clone(backend.stream());
        self.sum.sum(&stream, buffer, len);
        Ok(())
    }

    fn is_repeatable(&self) -> bool {
        true
    }
}

/// A rank that goes away releases those that wait for the test; in a sum, the kernels' own limit does.
impl Drop for Peer {
    fn drop(&mut self) {
        self.barrier.stop();
    }
}
