//! Machine code on a device.

use super::{Device, check};
use crate::cuda::CudaError;
use cudarc::driver::sys;
use std::ffi::{CString, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Kernels of one compiled source.
#[derive(Debug)]
pub struct Module {
    device: Arc<Device>,
    raw: sys::CUmodule,
}

// SAFETY: as for `Device`.
unsafe impl Send for Module {}
// SAFETY: as for `Device`.
unsafe impl Sync for Module {}

/// One kernel. It lives as long as its module.
#[derive(Debug)]
pub struct Kernel {
    module: Arc<Module>,
    pub(super) raw: sys::CUfunction,
    pub(super) name: &'static str,
}

// SAFETY: as for `Device`.
unsafe impl Send for Kernel {}
// SAFETY: as for `Device`.
unsafe impl Sync for Kernel {}

impl Module {
    /// Loads machine code.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(device: &Arc<Device>, code: &[u8]) -> Result<Arc<Self>, CudaError> {
        device.bind()?;
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the driver reads an ELF image whose own header says how long it is; it came whole from the compiler.
        check(unsafe { sys::cuModuleLoadData(raw.as_mut_ptr(), code.as_ptr().cast()) }, "cuModuleLoadData")?;
        // SAFETY: written on success.
        Ok(Arc::new(Self { device: Arc::clone(device), raw: unsafe { raw.assume_init() } }))
    }

    /// A kernel by name, which may use up to `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn kernel(self: &Arc<Self>, name: &'static str, shared_bytes: usize) -> Result<Kernel, CudaError> {
        let text = CString::new(name).expect("kernel names have no zero in them");
        let mut raw = MaybeUninit::uninit();
        // SAFETY: a pointer to a function handle, a live module and a zero-terminated name.
        check(unsafe { sys::cuModuleGetFunction(raw.as_mut_ptr(), self.raw, text.as_ptr()) }, name)?;
        // SAFETY: written on success.
        let raw = unsafe { raw.assume_init() };
        if shared_bytes > 48 << 10 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = c_int::try_from(shared_bytes).expect("shared memory of a block is small");
            // SAFETY: a live function.
            check(unsafe { sys::cuFuncSetAttribute(raw, attribute, bytes) }, name)?;
        }
        Ok(Kernel { module: Arc::clone(self), raw, name })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: loaded in `new`; kernels keep their module alive. Nothing can be done about a refusal.
            let _ = unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.module.device
    }
}
