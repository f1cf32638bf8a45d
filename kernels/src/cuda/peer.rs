//! Sums over GPUs of one machine that reach each other's memory: one kernel, no host.
#![expect(
    unsafe_code,
    reason = "launching a kernel is unsafe: nobody can check what it does with its pointers"
)]

use super::compile::Unit;
use super::driver::{Cost, Device, Kernel, Launch, Memory, Module, Start, Stream};
use super::{Buffer, CudaError};
use std::ptr::from_mut;
use std::sync::Arc;

/// As in peer.cu.
const BLOCKS: usize = 32;
/// As in peer.cu.
const CHUNK: usize = 1024;
/// As in peer.cu.
const THREADS: u32 = 512;
/// Values of a sum; longer ones go in pieces.
const CAPACITY: usize = 1 << 20;

/// One rank's end.
#[derive(Debug)]
pub struct PeerSum {
    kernel: Kernel,
    rank: usize,
    mailboxes: Arc<Vec<Memory>>,
    /// The mailboxes' addresses, on this rank's GPU.
    addresses: Memory,
    /// Sums so far, by block.
    counts: Memory,
    capacity: usize,
}

impl PeerSum {
    /// One end for each rank, whose GPUs are given, for sums that are mostly at most `len` values long.
    ///
    /// # Errors
    /// [`CudaError::NoPeerAccess`], or the device's refusal.
    pub fn group(devices: &[Arc<Device>], len: usize) -> Result<Vec<Self>, CudaError> {
        for device in devices {
            for other in devices.iter().filter(|other| other.ordinal() != device.ordinal()) {
                device.enable_peer(other)?;
            }
        }
        let ranks = devices.len();
        let capacity = len.min(CAPACITY).next_multiple_of(64);
        let bytes = flag_bytes(ranks) + 2 * ranks * capacity * 4;
        let mailbox = |device| zeroed(device, bytes);
        let mailboxes = Arc::new(devices.iter().map(mailbox).collect::<Result<Vec<_>, _>>()?);
        let addresses: Vec<u8> = mailboxes.iter().flat_map(|memory| memory.address().to_ne_bytes()).collect();
        let end = |(rank, device): (usize, &Arc<Device>)| {
            let module = Module::of(device, &Unit::peer())?;
            let stream = Stream::new(device)?;
            let on_device = Memory::new(device, addresses.len(), "addresses of mailboxes")?;
            stream.write(&on_device, 0, &addresses);
            stream.finish()?;
            Ok(Self {
                kernel: module.kernel("peer_sum", 0)?,
                rank,
                mailboxes: Arc::clone(&mailboxes),
                addresses: on_device,
                counts: zeroed(device, BLOCKS * 4)?,
                capacity,
            })
        };
        devices.iter().enumerate().map(end).collect()
    }

    /// Which rank this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.mailboxes.len()
    }

    /// Replaces the first `len` values of `buffer` by their sum over all ranks, which all call this with the same `len`. A rank
    /// that does not come within ten seconds is a fault of the device.
    pub fn sum(&self, stream: &Stream, buffer: &mut Buffer, len: usize) {
        buffer.holds(len);
        let ranks = self.ranks();
        for start in (0..len).step_by(self.capacity) {
            let part = self.capacity.min(len - start);
            let grid = u32::try_from(part.div_ceil(CHUNK).min(BLOCKS)).expect("few blocks");
            let int = |n: usize| i32::try_from(n).expect("a sum's sizes are small");
            let shape = Launch {
                grid: [grid, 1, 1],
                threads: THREADS,
                shared_bytes: 0,
                cost: Cost::default(),
                start: Start::InTurn,
            };
            // SAFETY: the part lies in the buffer, which was checked; mailboxes have room for `capacity` values of every rank
            // twice and live as long as `self`, which outlives its stream's work.
            unsafe {
                stream.launch(
                    &self.kernel,
                    shape,
                    &mut [
                        from_mut(&mut { buffer.address() + (start * 4) as u64 }).cast(),
                        from_mut(&mut { self.addresses.address() }).cast(),
                        from_mut(&mut { self.counts.address() }).cast(),
                        from_mut(&mut { int(self.rank) }).cast(),
                        from_mut(&mut { int(ranks) }).cast(),
                        from_mut(&mut { int(part) }).cast(),
                        from_mut(&mut { int(self.capacity) }).cast(),
                        from_mut(&mut { flag_bytes(ranks) as u64 }).cast(),
                    ],
                );
            }
        }
    }
}

fn flag_bytes(ranks: usize) -> usize {
    (ranks * BLOCKS * 4).next_multiple_of(256)
}

fn zeroed(device: &Arc<Device>, bytes: usize) -> Result<Memory, CudaError> {
    let memory = Memory::new(device, bytes, "sums over GPUs")?;
    let stream = Stream::new(device)?;
    stream.zero(&memory);
    stream.finish()?;
    Ok(memory)
}
