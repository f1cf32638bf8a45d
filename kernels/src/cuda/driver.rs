//! NVIDIA's driver behind a fence: devices, memory, streams, events, modules and graphs that free themselves.
//!
//! What is left to a caller's care, and therefore `unsafe`, is [`Stream::launch`] alone: nobody can check what a kernel does.
#![expect(unsafe_code, reason = "every call into the driver is one")]

mod module;
mod staging;
mod stream;

pub use module::{Kernel, Module};
pub use staging::Staging;
pub use stream::{Cost, Event, Graph, Launch, Start, Stream, Timing};

use super::CudaError;
use cudarc::driver::sys;
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Oldest compute capability whose instructions the kernels use: cp.async and bf16 conversions.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);

/// A GPU and its primary context.
#[derive(Debug)]
pub struct Device {
    context: sys::CUcontext,
    raw: sys::CUdevice,
    ordinal: usize,
    name: String,
    capability: (i32, i32),
    multiprocessors: usize,
    shared_bytes: usize,
}

// SAFETY: the driver's handles may be used from any thread; each call binds the context to its thread first.
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks what it has to.
unsafe impl Sync for Device {}

fn check(result: sys::CUresult, call: &'static str) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Driver { call, cause: text_of(result) })
}

fn text_of(result: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, or there would be no result; it writes a pointer to a static string or null.
    unsafe { sys::cuGetErrorString(result, &raw mut text) };
    if text.is_null() {
        return format!("error {}", result as u32);
    }
    // SAFETY: not null, so a static string of the driver.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl Device {
    /// Number of GPUs that the driver shows.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], or the driver's refusal.
    pub fn count() -> Result<usize, CudaError> {
        // SAFETY: loading the driver's library runs its initialisers, which is what it is for.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // SAFETY: the library is there; no argument.
        let initialised = unsafe { sys::cuInit(0) };
        if initialised == sys::CUresult::CUDA_ERROR_NO_DEVICE {
            return Ok(0);
        }
        check(initialised, "cuInit")?;
        let mut count = 0;
        // SAFETY: a pointer to an integer.
        check(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "cuDeviceGetCount")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// [`CudaError`] when there is no driver, no such GPU, or it is too old.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let count = Self::count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(CudaError::NoSuchDevice { ordinal, count })?;
        let mut raw = 0;
        // SAFETY: a pointer to a device handle and an ordinal below the count.
        check(unsafe { sys::cuDeviceGet(&raw mut raw, number) }, "cuDeviceGet")?;
        let mut name = [0; 128];
        // SAFETY: the driver writes at most the length it is given, zero-terminated.
        check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, raw) }, "cuDeviceGetName")?;
        // SAFETY: zero-terminated, as above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: a pointer to an integer and a valid device.
            check(unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, raw) }, "cuDeviceGetAttribute")?;
            Ok::<_, CudaError>(value)
        };
        use sys::CUdevice_attribute as Attribute;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < LEAST_CAPABILITY {
            return Err(CudaError::Capability { ordinal, name, capability, least: LEAST_CAPABILITY });
        }
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut context = MaybeUninit::uninit();
        // SAFETY: a pointer to a context handle, which is written on success.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(context.as_mut_ptr(), raw) };
        if retained == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(CudaError::Full { ordinal, name });
        }
        check(retained, "cuDevicePrimaryCtxRetain")?;
        let device = Self {
            // SAFETY: written above.
            context: unsafe { context.assume_init() },
            raw,
            ordinal,
            name,
            capability,
            multiprocessors: usize::try_from(multiprocessors).unwrap_or(1),
            shared_bytes: usize::try_from(shared).unwrap_or(0),
        };
        device.bind()?;
        Ok(Arc::new(device))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The name that the driver gives it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Major and minor.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Streaming multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// The most shared memory of a block.
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Makes this the device of the calling thread.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, "cuCtxSetCurrent")
    }

    /// Bytes of its memory: free and in all.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two pointers to sizes.
        check(unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// Lets kernels of this device read and write the memory of `other`.
    ///
    /// # Errors
    /// [`CudaError::NoPeerAccess`] when the two cannot, or the driver's refusal.
    pub fn enable_peer(&self, other: &Self) -> Result<(), CudaError> {
        let mut can = 0;
        // SAFETY: a pointer to an integer and two valid devices.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.raw, other.raw) };
        check(asked, "cuDeviceCanAccessPeer")?;
        if can == 0 {
            return Err(CudaError::NoPeerAccess { from: self.ordinal, to: other.ordinal });
        }
        self.bind()?;
        // SAFETY: the other context lives as long as `other`, and access ends with either.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => check(result, "cuCtxEnablePeerAccess"),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. Nothing can be done about a refusal.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.raw) };
    }
}

/// Memory of a device.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// `bytes` of memory without meaning; at least one.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] saying what it was for.
    pub fn new(device: &Arc<Device>, bytes: usize, what: &str) -> Result<Self, CudaError> {
        device.bind()?;
        let bytes = bytes.max(1);
        let mut address = 0;
        // SAFETY: a pointer to an address and a size above 0.
        match unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = device.memory().unwrap_or((0, 0));
                let (what, ordinal) = (what.to_owned(), device.ordinal);
                Err(CudaError::OutOfMemory { what, bytes, free, total, ordinal })
            }
            result => {
                check(result, "cuMemAlloc")?;
                Ok(Self { device: Arc::clone(device), address, bytes })
            }
        }
    }

    /// Its first byte, as kernels see it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whose it is.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn at(&self, offset: usize, len: usize) -> sys::CUdeviceptr {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{len} bytes at {offset} of {} on the device", self.bytes);
        self.address + offset as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated in `new`; the driver waits for work that uses it. Nothing can be done about a refusal.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
