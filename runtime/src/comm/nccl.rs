//! Ranks on several GPUs of one machine whose sums NCCL makes.

use super::peer::prove;
use super::{Communicator, PeerStopped};
use crate::Error;
use kernels::cuda::driver::Device;
use kernels::cuda::nccl::NcclSum;
use kernels::cuda::{Buffer, Cuda};
use std::sync::Arc;

/// One rank of several GPUs. The host asks for every sum: what NCCL does for one is not part of a recorded step.
#[derive(Debug)]
pub struct Nccl(NcclSum);

impl Nccl {
    /// One communicator for each rank, whose GPUs are given, all different.
    ///
    /// # Errors
    /// No library, or its refusal.
    pub fn group(devices: &[Arc<Device>]) -> Result<Vec<Self>, kernels::Error> {
        Ok(NcclSum::group(devices)?.into_iter().map(Self).collect())
    }

    /// Adds up known numbers with all ranks, which call this at the same time, before anything depends on it.
    ///
    /// # Errors
    /// [`Error::Stopped`] when sums are wrong.
    pub fn test(&self, backend: &mut Cuda) -> Result<(), Error> {
        let causes = "NCCL_DEBUG=INFO says what NCCL chose";
        prove([self.0.rank(), self.0.ranks()], backend, causes, |stream, buffer, len| {
            self.0.sum(stream, buffer, len)
        })
    }
}

impl Communicator<Cuda> for Nccl {
    fn all_reduce(&mut self, backend: &mut Cuda, buffer: &mut Buffer, len: usize) -> Result<(), PeerStopped> {
        let stream = Arc::clone(backend.stream());
        self.0.sum(&stream, buffer, len);
        Ok(())
    }

    fn is_repeatable(&self) -> bool {
        false
    }
}
