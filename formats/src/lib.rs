//! Bytes to meaning: GGUF files, ggml block types and native checkpoints.
//!
//! No threads, no CUDA and no policy: what is cut where, and which tensor becomes which type, is the converter's to
//! decide and the manifest's to say.

pub mod checkpoint;
pub mod config;
pub mod digest;
mod dtype;
mod error;
pub mod gguf;
pub mod layout;
pub mod manifest;
pub mod map;
pub mod name;
pub mod quant;
pub mod reader;
pub mod template;
mod tensor;

pub use config::ModelConfig;
pub use digest::Digest;
pub use dtype::Dtype;
pub use error::{Error, Shown, is_plain};
pub use name::{LayerIdx, TensorName};
pub use tensor::{Shape, TensorView, bytes_of};
