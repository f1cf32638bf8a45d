//! Memory of the host that a device reads.

use super::{Device, Event, Memory, Stream, check};
use crate::cuda::CudaError;
use cudarc::driver::sys;
use std::sync::Arc;

/// Page-locked memory of the host that travels to a device while the host goes on.
#[derive(Debug)]
pub struct Staging {
    pointer: *mut u8,
    bytes: usize,
    sent: Event,
}

// SAFETY: the memory belongs to the value alone.
unsafe impl Send for Staging {}

impl Staging {
    /// `bytes` of it, zeroed. Plain memory, not write-combined: the host reads it too.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        let sent = Event::new(device)?;
        let bytes = bytes.max(1);
        let mut pointer = std::ptr::null_mut();
        // SAFETY: a pointer to a pointer and a size above 0.
        check(unsafe { sys::cuMemHostAlloc(&raw mut pointer, bytes, 0) }, "cuMemHostAlloc")?;
        let pointer = pointer.cast::<u8>();
        // SAFETY: `bytes` of memory were allocated there.
        unsafe { pointer.write_bytes(0, bytes) };
        Ok(Self { pointer, bytes, sent })
    }

    /// The memory, once what was sent before has left it.
    ///
    /// # Errors
    /// The device's fault.
    pub fn fill(&mut self) -> Result<&mut [u8], CudaError> {
        self.sent.finish()?;
        // SAFETY: allocated and initialised in `new`, and no copy reads it any more.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) })
    }

    /// Sends `len` bytes from `start` on to `to`. [`Staging::fill`] waits for it.
    pub fn send(&self, start: usize, len: usize, stream: &Stream, to: &Memory, offset: usize) {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.bytes),
            "bytes beyond the staging memory"
        );
        if len > 0 {
            let at = to.at(offset, len);
            // SAFETY: both ranges were checked, and nobody writes the memory before the event below has happened.
            let copied =
                unsafe { sys::cuMemcpyHtoDAsync_v2(at, self.pointer.add(start).cast(), len, stream.raw) };
            stream.record(check(copied, "a copy to the device"));
        }
        self.sent.record(stream);
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A copy may still read it; after a fault none does.
        let _ = self.sent.finish();
        // SAFETY: allocated in `new`. Nothing can be done about a refusal.
        let _ = unsafe { sys::cuMemFreeHost(self.pointer.cast()) };
    }
}
