//! What a backend can refuse.

use crate::cpu::Isa;
use crate::cuda::CudaError;
use formats::Dtype;

/// A device's refusal. Arguments of wrong sizes are mistakes of the caller and panic instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A weight type without a product here.
    #[error(
        "weights of type {dtype} have no product on this backend; convert the model from another quantisation"
    )]
    UnsupportedType {
        /// The type.
        dtype: Dtype,
    },
    /// A weight whose shape fits no operation.
    #[error("a weight has shape {found}, expected {expected}")]
    WeightShape {
        /// What an operation takes.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// Scales that are not one for each matrix.
    #[error("{found} scales of a weight, expected {expected}: one for each of its matrices")]
    Scales {
        /// The weight's matrices.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// An instruction set that was asked for by name.
    #[error("this processor has no {isa} instructions; use `Cpu::new`, which chooses what there is")]
    Isa {
        /// The instruction set.
        isa: Isa,
    },
    /// Memory of the host.
    #[error(
        "out of memory for activations and cache: {bytes} bytes wanted; lower --kv-cache-memory, --max-num-seqs or --max-num-batched-tokens"
    )]
    Memory {
        /// Bytes wanted.
        bytes: usize,
    },
    /// The worker threads could not be started.
    #[error("cannot start {threads} worker threads: {cause}")]
    Threads {
        /// How many.
        threads: usize,
        /// The system's answer.
        cause: String,
    },
    /// A step that is too large.
    #[error("a step of {found} tokens: expected at most {most} on a GPU; lower --max-num-batched-tokens")]
    StepRows {
        /// The most.
        most: usize,
        /// What was asked for.
        found: usize,
    },
    /// A GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}
