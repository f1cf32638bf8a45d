//! The crate's one error type: each variant names the file, tensor, key or field, what was expected and what was found.

use crate::{Dtype, Shape};
use std::path::PathBuf;

/// What can be wrong with bytes from outside.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{path}: {action}: {source}")]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
    /// A fault inside the named file.
    #[error("{path}: {source}")]
    In {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: Box<Error>,
    },
    /// No GGUF file at all.
    #[error("not a GGUF file: {found}")]
    NotGguf {
        /// What it looks like and what to do.
        found: String,
    },
    /// A GGUF version this program does not read.
    #[error("GGUF {found}")]
    Version {
        /// The version and what to do.
        found: String,
    },
    /// Bytes end before a field does.
    #[error("{what}: the file ends here, {missing} more bytes were expected; it is truncated, get it again")]
    Truncated {
        /// The field, key or tensor.
        what: String,
        /// Bytes that are not there.
        missing: u64,
    },
    /// A count or length that cannot be true of this file.
    #[error("{what}: {found} is more than the {limit} that can be there")]
    TooLarge {
        /// The field.
        what: String,
        /// The value read.
        found: u64,
        /// The largest value possible.
        limit: u64,
    },
    /// A metadata key with a wrong type or value, or none at all.
    #[error("{key}: expected {expected}, found {found}")]
    Key {
        /// The metadata key.
        key: String,
        /// What a right file has there.
        expected: String,
        /// What this one has.
        found: String,
    },
    /// A tensor entry that cannot be right.
    #[error("tensor {tensor}: expected {expected}, found {found}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What a right file has there.
        expected: String,
        /// What this one has.
        found: String,
    },
    /// Tensors of a type that is removed or was never known.
    #[error(
        "tensor {tensor}: type {id} is {why} ({count} such tensors in the file); convert the model again with a type that ggml knows"
    )]
    UnknownType {
        /// The first such tensor.
        tensor: String,
        /// The type id read.
        id: u32,
        /// Removed, foreign or unknown.
        why: &'static str,
        /// How many tensors have it.
        count: usize,
    },
    /// Parts of a split file that are not there.
    #[error("{count} of {total} parts are missing: {missing}; put them beside {beside}")]
    MissingParts {
        /// How many are missing.
        count: usize,
        /// How many there should be.
        total: usize,
        /// Their names.
        missing: String,
        /// The part that was given.
        beside: String,
    },
    /// A shape that is none.
    #[error("shape {found:?}: expected 1 to 4 dimensions whose product fits 64 bits")]
    Shape {
        /// The dimensions read.
        found: Vec<u64>,
    },
    /// A row that is no whole number of blocks.
    #[error("tensor {tensor}: rows of {row_len} are no whole number of {dtype} blocks of {}", dtype.block_len())]
    Block {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its row length.
        row_len: u64,
    },
    /// A tensor whose bytes do not match its shape.
    #[error("tensor {tensor}: {dtype} {shape} takes {expected} bytes, found {found}")]
    TensorBytes {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Shape,
        /// Bytes it takes.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// A type without a decoder.
    #[error("tensor type {dtype} cannot be decoded to numbers")]
    NoDecoder {
        /// The type.
        dtype: Dtype,
    },
    /// A field of [`crate::ModelConfig`] out of range.
    #[error("model config, {field}: expected {expected}, found {found}")]
    Config {
        /// The field.
        field: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A manifest that cannot be read or contradicts itself or its file.
    #[error("{field}: expected {expected}, found {found}")]
    Manifest {
        /// The field.
        field: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A directory that is no finished checkpoint.
    #[error("{path}: not a checkpoint: {why}")]
    NotACheckpoint {
        /// The directory.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// A layout of bytes this program does not know.
    #[error(
        "tensor {tensor}: layout {layout:?} is not known here; convert again with this version of shardmill, or run the version that wrote it"
    )]
    Layout {
        /// The tensor.
        tensor: String,
        /// The layout's name.
        layout: String,
    },
    /// A chunk of a rank file whose bytes changed.
    #[error(
        "{file}: rank {rank}, chunk {chunk} (bytes {start}..{end}) is damaged, in {tensors}; copy or convert the file again"
    )]
    Chunk {
        /// The rank file.
        file: String,
        /// Its rank.
        rank: usize,
        /// Index of the chunk.
        chunk: usize,
        /// First byte of the chunk.
        start: u64,
        /// Byte after the chunk.
        end: u64,
        /// The damaged tensors, as far as digests tell.
        tensors: String,
    },
    /// Bytes that do not have the digest the manifest gives.
    #[error(
        "{file}: digest is {found}, the manifest says {expected}; the file changed after it was written, copy or convert it again"
    )]
    Digest {
        /// The file.
        file: String,
        /// From the manifest.
        expected: String,
        /// Of the bytes.
        found: String,
    },
}

impl Error {
    /// The same error, said of a file.
    #[must_use]
    pub fn in_file(self, path: impl Into<PathBuf>) -> Self {
        match self {
            Self::In { .. } | Self::Io { .. } | Self::NotACheckpoint { .. } => self,
            other => Self::In { path: path.into(), source: Box::new(other) },
        }
    }

    pub(crate) fn io(path: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), action, source }
    }
}
