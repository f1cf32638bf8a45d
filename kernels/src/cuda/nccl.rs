//! Sums over GPUs by NVIDIA's NCCL, loaded when it is needed: for GPUs that do not reach each other's memory.
#![expect(unsafe_code, reason = "loading a library and calling into it")]

use super::driver::{Device, Stream};
use super::{Buffer, CudaError};
use libloading::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Names the library, where the loader does not find it by itself.
pub const LIBRARY_VARIABLE: &str = "SHARDRUN_NCCL";

/// `ncclFloat32` and `ncclSum` of nccl.h, version 2.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

type Raw = *mut c_void;

/// One rank's end.
#[derive(Debug)]
pub struct NcclSum {
    rank: usize,
    all: Arc<Communicators>,
}

/// The ends of all ranks. The first that goes away ends all: others may be waiting for it inside a kernel.
#[derive(Debug)]
struct Communicators {
    raw: Vec<Raw>,
    ended: AtomicBool,
}

// SAFETY: NCCL's communicators may be used from any thread, each by one at a time, and aborted while they are used.
unsafe impl Send for Communicators {}
// SAFETY: as above.
unsafe impl Sync for Communicators {}

impl NcclSum {
    /// One end for each rank, whose GPUs are given, all different.
    ///
    /// # Errors
    /// [`CudaError::NoNccl`], or the library's refusal.
    pub fn group(devices: &[Arc<Device>]) -> Result<Vec<Self>, CudaError> {
        type InitAll = unsafe extern "C" fn(*mut Raw, c_int, *const c_int) -> c_int;
        let int = |n: usize| c_int::try_from(n).expect("GPUs are few");
        let ordinals: Vec<c_int> = devices.iter().map(|device| int(device.ordinal())).collect();
        let mut raw = vec![std::ptr::null_mut(); devices.len()];
        // SAFETY: as many communicators and GPUs as it is told.
        let made = unsafe {
            symbol::<InitAll>(b"ncclCommInitAll\0")?(raw.as_mut_ptr(), int(devices.len()), ordinals.as_ptr())
        };
        check(made, "ncclCommInitAll")?;
        let all = Arc::new(Communicators { raw, ended: AtomicBool::new(false) });
        Ok((0..devices.len()).map(|rank| Self { rank, all: Arc::clone(&all) }).collect())
    }

    /// Which rank this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.all.raw.len()
    }

    /// Replaces the first `len` values of `buffer` by their sum over all ranks, which all call this with the same `len`. A refusal is recorded
    /// in the stream.
    pub fn sum(&self, stream: &Stream, buffer: &mut Buffer, len: usize) {
        type AllReduce =
            unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
        buffer.holds(len);
        let values = buffer.address() as *mut c_void;
        let done = stream.device().bind().and_then(|()| {
            let sum = symbol::<AllReduce>(b"ncclAllReduce\0")?;
            // SAFETY: `len` values in place, checked above, in a live stream of the communicator's GPU.
            let result =
                unsafe { sum(values, values, len, FLOAT32, SUM, self.all.raw[self.rank], stream.handle()) };
            check(result, "ncclAllReduce")
        });
        stream.record(done);
    }
}

impl Drop for NcclSum {
    fn drop(&mut self) {
        type Abort = unsafe extern "C" fn(Raw) -> c_int;
        if self.all.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Ok(abort) = symbol::<Abort>(b"ncclCommAbort\0") {
            for &raw in &self.all.raw {
                // SAFETY: made in `group` and aborted once; NCCL lets another thread be inside a call. Nothing can be done about a refusal.
                let _ = unsafe { abort(raw) };
            }
        }
    }
}

/// The library of this process.
fn library() -> Result<&'static Library, CudaError> {
    static LOADED: OnceLock<Option<Library>> = OnceLock::new();
    let names = std::env::var_os(LIBRARY_VARIABLE)
        .map_or_else(|| ["libnccl.so.2", "libnccl.so"].map(PathBuf::from).to_vec(), |path| vec![path.into()]);
    // SAFETY: NCCL's initialisers have no requirements.
    let open = || names.iter().find_map(|name| unsafe { Library::new(name) }.ok());
    LOADED.get_or_init(open).as_ref().ok_or(CudaError::NoNccl { variable: LIBRARY_VARIABLE })
}

/// A function of the library.
fn symbol<T>(name: &[u8]) -> Result<Symbol<'static, T>, CudaError> {
    // SAFETY: callers name a function of NCCL with the type that its header has had since version 2.4.
    unsafe { library()?.get(name) }
        .map_err(|error| CudaError::Driver { call: "NCCL", cause: error.to_string() })
}

fn check(result: c_int, call: &'static str) -> Result<(), CudaError> {
    type Text = unsafe extern "C" fn(c_int) -> *const c_char;
    if result == 0 {
        return Ok(());
    }
    // SAFETY: it takes any number and returns a static string.
    let text = unsafe { CStr::from_ptr(symbol::<Text>(b"ncclGetErrorString\0")?(result)) };
    Err(CudaError::Driver { call, cause: text.to_string_lossy().into_owned() })
}
