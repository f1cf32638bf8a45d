//! The runtime's one error type.

use std::path::PathBuf;

/// What can keep a checkpoint from being loaded or served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The checkpoint's bytes.
    #[error(transparent)]
    Format(#[from] formats::Error),
    /// The device.
    #[error("tensor {tensor}: {source}")]
    Weight {
        /// The tensor.
        tensor: String,
        /// The device's refusal.
        source: kernels::Error,
    },
    /// The device, for something that is no weight.
    #[error(transparent)]
    Device(#[from] kernels::Error),
    /// A rank or the engine ended before its time.
    #[error("{0}")]
    Stopped(String),
    /// An option that cannot be met.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// The command line's name of it.
        option: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A file of the checkpoint beside the weights.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        why: String,
    },
}
