//! Streams, and the events and graphs that order and repeat their work.

use super::{Device, Memory, check};
use crate::cuda::CudaError;
use crate::cuda::driver::Kernel;
use cudarc::driver::sys;
use formats::Dtype;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A queue of work of one device. The first fault of anything that went into it stays.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    pub(super) raw: sys::CUstream,
    fault: Mutex<Option<CudaError>>,
    tracing: AtomicBool,
    trace: Mutex<Vec<Traced>>,
}

/// A kernel's run, by the events around it.
#[derive(Debug)]
struct Traced {
    name: &'static str,
    cost: Cost,
    start: Event,
    end: Event,
}

/// What a kernel took.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The kernel.
    pub name: &'static str,
    /// What it had to read.
    pub cost: Cost,
    /// How long it ran, with its start.
    pub milliseconds: f32,
}

// SAFETY: as for `Device`.
unsafe impl Send for Stream {}
// SAFETY: as for `Device`.
unsafe impl Sync for Stream {}

impl Stream {
    /// A queue that waits for no other.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>, CudaError> {
        device.bind()?;
        let mut raw = MaybeUninit::uninit();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a pointer to a stream handle, written on success.
        check(unsafe { sys::cuStreamCreate(raw.as_mut_ptr(), flags) }, "cuStreamCreate")?;
        // SAFETY: written above.
        let raw = unsafe { raw.assume_init() };
        Ok(Arc::new(Self {
            device: Arc::clone(device),
            raw,
            fault: Mutex::new(None),
            tracing: AtomicBool::new(false),
            trace: Mutex::default(),
        }))
    }

    /// From now on every kernel is timed, which costs time.
    pub fn start_trace(&self) {
        self.lock_trace().clear();
        self.tracing.store(true, Ordering::Relaxed);
    }

    /// What ran since [`Stream::start_trace`], in order.
    ///
    /// # Errors
    /// The device's fault.
    pub fn end_trace(&self) -> Result<Vec<Timing>, CudaError> {
        self.tracing.store(false, Ordering::Relaxed);
        self.finish()?;
        let traced = std::mem::take(&mut *self.lock_trace());
        let timing = |Traced { name, cost, start, end }| {
            Ok(Timing { name, cost, milliseconds: Event::milliseconds_since(&end, &start)? })
        };
        traced.into_iter().map(timing).collect()
    }

    /// Whether kernels are being timed.
    pub fn is_tracing(&self) -> bool {
        self.tracing.load(Ordering::Relaxed)
    }

    fn lock_trace(&self) -> MutexGuard<'_, Vec<Traced>> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn event(&self) -> Option<Event> {
        let event = self.record(Event::new(&self.device))?;
        event.record(self);
        Some(event)
    }

    /// Whose it is.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// As other libraries take it.
    pub(in crate::cuda) fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Keeps the first fault.
    pub fn record<T>(&self, result: Result<T, CudaError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                None
            }
        }
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// The first fault.
    pub fn finish(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        self.record(check(unsafe { sys::cuStreamSynchronize(self.raw) }, "the work of a step"));
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone().map_or(Ok(()), Err)
    }

    /// Copies host bytes to `to`. They may change after the return.
    pub fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let at = to.at(offset, bytes.len());
        // SAFETY: the range was checked, and the driver has read pageable memory when it returns; `finish` makes sure that
        // this holds for pinned memory too.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(at, bytes.as_ptr().cast(), bytes.len(), self.raw) };
        self.record(check(copied, "a copy to the device"));
        // SAFETY: the stream lives.
        self.record(check(unsafe { sys::cuStreamSynchronize(self.raw) }, "a copy to the device"));
    }

    /// Copies bytes of `from` to the host, after all work before it.
    pub fn read(&self, from: &Memory, offset: usize, bytes: &mut [u8]) {
        if bytes.is_empty() {
            return;
        }
        let at = from.at(offset, bytes.len());
        // SAFETY: the range was checked and `bytes` is exclusive until the synchronisation below.
        let copied =
            unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), at, bytes.len(), self.raw) };
        self.record(check(copied, "a copy from the device"));
        // SAFETY: the stream lives.
        self.record(check(unsafe { sys::cuStreamSynchronize(self.raw) }, "the work of a step"));
    }

    /// Copies between devices' memory.
    pub fn copy(&self, to: &Memory, to_offset: usize, from: &Memory, from_offset: usize, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let (to, from) = (to.at(to_offset, bytes), from.at(from_offset, bytes));
        // SAFETY: both ranges were checked.
        self.record(check(
            unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw) },
            "a copy on the device",
        ));
    }

    /// Zeroes memory.
    pub fn zero(&self, memory: &Memory) {
        // SAFETY: all of the memory and no more.
        let result = unsafe { sys::cuMemsetD8Async(memory.address, 0, memory.bytes, self.raw) };
        self.record(check(result, "zeroing memory"));
    }

    /// Lets later work wait for `event`.
    pub fn wait(&self, event: &Event) {
        // SAFETY: both live; the driver keeps what it needs of the event.
        self.record(check(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) }, "cuStreamWaitEvent"));
    }

    /// Puts a kernel into the queue. A refusal is recorded.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameter types, in order, and the kernel stays inside the memory that they
    /// lead to, which lives until the work is done.
    pub unsafe fn launch(&self, kernel: &Kernel, shape: Launch, arguments: &mut [*mut c_void]) {
        let [x, y, z] = shape.grid;
        if x == 0 || y == 0 || z == 0 {
            return;
        }
        let start = if self.is_tracing() { self.event() } else { None };
        let mut early: sys::CUlaunchAttribute = sys::CUlaunchAttribute_st {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        early.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: self.raw,
            attrs: &raw mut early,
            numAttrs: u32::from(shape.start == Start::Early),
        };
        // SAFETY: the caller's promises about kernel and arguments; the attribute lives until the call returns.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel.raw, arguments.as_mut_ptr(), std::ptr::null_mut())
        };
        self.record(check(launched, kernel.name));
        if let Some(start) = start
            && let Some(end) = self.event()
        {
            self.lock_trace().push(Traced { name: kernel.name, cost: shape.cost, start, end });
        }
    }

    /// Begins to record instead of running.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) }, "cuStreamBeginCapture")
    }

    /// What was recorded, ready to run.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn end_capture(&self) -> Result<Graph, CudaError> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: a pointer to a graph handle.
        check(unsafe { sys::cuStreamEndCapture(self.raw, &raw mut graph) }, "cuStreamEndCapture")?;
        let mut raw = MaybeUninit::uninit();
        // SAFETY: a graph that capture made; the executable is independent of it.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(raw.as_mut_ptr(), graph, 0) };
        // SAFETY: made above and not used again.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        check(made, "cuGraphInstantiate")?;
        // SAFETY: written on success.
        Ok(Graph { raw: unsafe { raw.assume_init() } })
    }

    /// Runs what was recorded.
    pub fn run(&self, graph: &Graph) {
        // SAFETY: both live.
        self.record(check(unsafe { sys::cuGraphLaunch(graph.raw, self.raw) }, "cuGraphLaunch"));
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made in `new`. Nothing can be done about a refusal.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// How many blocks of how many threads, and their dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks in x, y, z. None in one of them: nothing runs.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// What it has to read, for whoever counts that.
    pub cost: Cost,
    /// When it may start.
    pub start: Start,
}

/// When a kernel may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// When the one before it has ended.
    InTurn,
    /// As soon as the one before it lets it: the kernel itself waits before it reads what others wrote.
    Early,
}

/// What a kernel has to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cost {
    /// Bytes of weights and cache.
    pub bytes: u64,
    /// Type, rows and columns of the weight, if there is one.
    pub weight: Option<(Dtype, usize, usize)>,
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: as for `Device`.
unsafe impl Send for Event {}
// SAFETY: as for `Device`.
unsafe impl Sync for Event {}

impl Event {
    /// An event that has happened.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        device.bind()?;
        let mut raw = MaybeUninit::uninit();
        // SAFETY: a pointer to an event handle, written on success.
        check(unsafe { sys::cuEventCreate(raw.as_mut_ptr(), 0) }, "cuEventCreate")?;
        // SAFETY: written above.
        Ok(Self { device: Arc::clone(device), raw: unsafe { raw.assume_init() } })
    }

    /// Happens when the work that is in `stream` now is done.
    pub fn record(&self, stream: &Stream) {
        // SAFETY: both live.
        stream.record(check(unsafe { sys::cuEventRecord(self.raw, stream.raw) }, "cuEventRecord"));
    }

    /// Waits until it has happened.
    ///
    /// # Errors
    /// The device's fault.
    pub fn finish(&self) -> Result<(), CudaError> {
        // SAFETY: the event lives.
        check(unsafe { sys::cuEventSynchronize(self.raw) }, "cuEventSynchronize")
    }

    /// Milliseconds from `earlier` to this event, both of which have happened.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: a pointer to a float and two live events.
        let result = unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, earlier.raw, self.raw) };
        check(result, "cuEventElapsedTime")?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made in `new`. Nothing can be done about a refusal.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// Recorded work.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
}

// SAFETY: as for `Device`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `end_capture`. Nothing can be done about a refusal.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}
