//! Memory of the host that a device reads.

use super::{Device, Event, Memory, Stream, check};
use crate::cuda::CudaError;
use cudarc::driver::sys;
use memmap2::{Advice, MmapMut, MmapOptions};
use std::sync::Arc;

/// A large page, where the processor has any.
const LARGE_PAGE: usize = 2 << 20;

/// Page-locked memory of the host that travels to a device while the host goes on.
///
/// It is ordinary memory in large pages that the driver is told of: of its own, in small ones, the driver made 2 GB a second and
/// filling it was a third slower (one H200, 16 cores).
#[derive(Debug)]
pub struct Staging {
    memory: MmapMut,
    /// Of its bytes, the first at a large page.
    start: usize,
    bytes: usize,
    sent: Event,
}

impl Staging {
    /// `bytes` of it, zeroed.
    ///
    /// # Errors
    /// The driver's or the system's refusal.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        const CALL: &str = "page-locked memory";
        let sent = Event::new(device)?;
        let bytes = bytes.max(1);
        let refused = |error: std::io::Error| CudaError::Driver { call: CALL, cause: error.to_string() };
        let whole = bytes.next_multiple_of(LARGE_PAGE);
        let mut memory = MmapOptions::new().len(whole + LARGE_PAGE).map_anon().map_err(refused)?;
        // Slower without.
        let _ = memory.advise(Advice::HugePage);
        let start = memory.as_ptr().align_offset(LARGE_PAGE).min(LARGE_PAGE);
        let first = memory[start..].as_mut_ptr().cast();
        // SAFETY: `whole` bytes from `start` on are mapped, and stay so until `drop` has taken them back.
        check(unsafe { sys::cuMemHostRegister_v2(first, whole, 0) }, CALL)?;
        Ok(Self { memory, start, bytes, sent })
    }

    /// The memory, once what was sent before has left it.
    ///
    /// # Errors
    /// The device's fault.
    pub fn fill(&mut self) -> Result<&mut [u8], CudaError> {
        self.sent.finish()?;
        Ok(&mut self.memory[self.start..self.start + self.bytes])
    }

    /// Sends `len` bytes from `start` on to `to`. [`Staging::fill`] waits for it.
    pub fn send(&self, start: usize, len: usize, stream: &Stream, to: &Memory, offset: usize) {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.bytes),
            "bytes beyond the staging memory"
        );
        if len > 0 {
            let at = to.at(offset, len);
            let from = self.memory[self.start + start..].as_ptr().cast();
            // SAFETY: both ranges were checked, and nobody writes the memory before the event below has happened.
            let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(at, from, len, stream.raw) };
            stream.record(check(copied, "a copy to the device"));
        }
        self.sent.record(stream);
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A copy may still read it; after a fault none does.
        let _ = self.sent.finish();
        let first = self.memory[self.start..].as_mut_ptr().cast();
        // SAFETY: registered in `new`. Nothing can be done about a refusal.
        let _ = unsafe { sys::cuMemHostUnregister(first) };
    }
}
