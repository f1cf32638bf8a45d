//! Machine code on a device.

use super::{Device, check};
use crate::cuda::CudaError;
use crate::cuda::compile::{Unit, architecture};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

/// Kernels of one compiled source, loaded for as long as the process lives.
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
    room: usize,
}

// SAFETY: as for `Device`.
unsafe impl Send for Kernel {}
// SAFETY: as for `Device`.
unsafe impl Sync for Kernel {}

/// Modules by GPU, source and macros.
type Loaded = BTreeMap<(usize, &'static str, Vec<String>), Arc<Module>>;

impl Module {
    /// The kernels of a source, compiled for this GPU and loaded. Ranks of one GPU share them, and they stay for what comes after:
    /// loaded anew for every rank, and with the heap in more parts, 500 reloads of 8 ranks of a small model took 188 s, not 107
    /// (one H200, `reload_stress`).
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`], [`CudaError::Compile`] or the driver's refusal.
    pub fn of(device: &Arc<Device>, unit: &Unit) -> Result<Arc<Self>, CudaError> {
        static LOADED: Mutex<Loaded> = Mutex::new(BTreeMap::new());
        let key = (device.ordinal(), unit.name, unit.defines.clone());
        let known = || LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = known().get(&key) {
            return Ok(Arc::clone(module));
        }
        // Not held while compiling: units compile side by side.
        let code = unit.code(&architecture(device.capability()))?;
        let mut known = known();
        if let Some(module) = known.get(&key) {
            return Ok(Arc::clone(module));
        }
        let module = Self::load(device, &code)?;
        known.insert(key, Arc::clone(&module));
        Ok(module)
    }

    fn load(device: &Arc<Device>, code: &[u8]) -> Result<Arc<Self>, CudaError> {
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
        // A multiprocessor changes its division of memory between cache and blocks only when it is empty: the same for all kernels, or
        // the next one's blocks wait until the last of these has gone.
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        let most = sys::CUshared_carveout::CU_SHAREDMEM_CARVEOUT_MAX_SHARED as c_int;
        // SAFETY: a live function.
        check(unsafe { sys::cuFuncSetAttribute(raw, attribute, most) }, name)?;
        Ok(Kernel { module: Arc::clone(self), raw, name, room: shared_bytes })
    }

    /// A kernel that may use all the shared memory that its own leaves of a block's.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn kernel_with_all_shared(self: &Arc<Self>, name: &'static str) -> Result<Kernel, CudaError> {
        let kernel = self.kernel(name, 0)?;
        let mut own = 0;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: a pointer to an integer and a live function.
        check(unsafe { sys::cuFuncGetAttribute(&raw mut own, attribute, kernel.raw) }, name)?;
        let room = self.device.shared_bytes().saturating_sub(usize::try_from(own).unwrap_or(usize::MAX));
        self.kernel(name, room)
    }

    /// Integers that the source exports under a name.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn integers<const N: usize>(&self, name: &'static str) -> Result<[i32; N], CudaError> {
        self.device.bind()?;
        let text = CString::new(name).expect("names have no zero in them");
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: pointers to an address and a size, a live module and a zero-terminated name.
        let found =
            unsafe { sys::cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, self.raw, text.as_ptr()) };
        check(found, name)?;
        assert_eq!(bytes, N * 4, "integers of {name}");
        let mut values = [0; N];
        // SAFETY: as many bytes as the driver says there are, into memory of that size.
        check(unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), address, bytes) }, name)?;
        Ok(values)
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The most dynamic shared memory that it may be given.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.module.device
    }
}
