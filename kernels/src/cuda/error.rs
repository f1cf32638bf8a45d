//! What CUDA can refuse.

/// A refusal or fault of a GPU, its driver or the compiler.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver.
    #[error(
        "no NVIDIA driver on this machine (libcuda.so.1 cannot be loaded): install NVIDIA's driver, or run with --device cpu"
    )]
    NoDriver,
    /// No compiler.
    #[error(
        "NVIDIA's compiler library NVRTC is missing (libnvrtc.so.13 or .12): install the CUDA toolkit or `pip install nvidia-cuda-nvrtc`, and name the library with {variable} if it lies elsewhere"
    )]
    NoCompiler {
        /// The environment variable.
        variable: &'static str,
    },
    /// A GPU that is not there.
    #[error(
        "GPU {ordinal}: there is no such GPU, the driver shows {count}; name others with --device or --devices"
    )]
    NoSuchDevice {
        /// The number asked for.
        ordinal: usize,
        /// GPUs there are.
        count: usize,
    },
    /// A GPU that is too old.
    #[error(
        "GPU {ordinal} ({name}): compute capability {}.{} is not supported, expected {}.{} or newer (A100, RTX 30 and later)",
        capability.0, capability.1, least.0, least.1
    )]
    Capability {
        /// Its number.
        ordinal: usize,
        /// Its name.
        name: String,
        /// What it has.
        capability: (i32, i32),
        /// What is needed.
        least: (i32, i32),
    },
    /// A GPU on which nothing more fits, not even what a program needs to begin.
    #[error(
        "GPU {ordinal} ({name}): its memory is full; `nvidia-smi` says which programs have it: end one, or choose another GPU with --device cuda:N or --devices"
    )]
    Full {
        /// Its number.
        ordinal: usize,
        /// Its name.
        name: String,
    },
    /// Memory.
    #[error(
        "GPU {ordinal}: out of memory for {what}: {bytes} bytes wanted, {free} of {total} free; use more ranks or a smaller quantisation, or lower --max-model-len and --max-num-seqs"
    )]
    OutOfMemory {
        /// The GPU.
        ordinal: usize,
        /// What it was for.
        what: String,
        /// Bytes wanted.
        bytes: usize,
        /// Bytes free.
        free: usize,
        /// Bytes in all.
        total: usize,
    },
    /// Two GPUs that cannot read each other's memory.
    #[error(
        "GPU {from} cannot reach the memory of GPU {to}: expected peer-to-peer access; check `nvidia-smi topo -p2p r`, ACS and IOMMU settings"
    )]
    NoPeerAccess {
        /// The one that reads.
        from: usize,
        /// The one that is read.
        to: usize,
    },
    /// No NCCL.
    #[error(
        "NVIDIA's library for sums over GPUs, NCCL, is missing (libnccl.so.2): install it or `pip install nvidia-nccl-cu13`, and name the library with {variable} if it lies elsewhere; or choose --communicator peer"
    )]
    NoNccl {
        /// The environment variable.
        variable: &'static str,
    },
    /// A source that does not compile.
    #[error("kernels/cu/{file} does not compile with NVRTC {}.{} and {options}: {why}", version.0, version.1)]
    Compile {
        /// The file.
        file: String,
        /// The compiler's options.
        options: String,
        /// The compiler's version.
        version: (i32, i32),
        /// Its log.
        why: String,
    },
    /// Anything else that the driver says.
    #[error("the GPU failed in {call}: {cause}")]
    Driver {
        /// What was asked for.
        call: &'static str,
        /// The driver's words.
        cause: String,
    },
}
