//! `shardrun` as a library: native checkpoints in, tokens and HTTP out.
//!
//! Data goes one way: `Checkpoint` -> `load` -> `Model`; requests -> `Sequence` -> `Scheduler` -> `Batch` ->
//! `Model::forward` -> logits -> `Sampler` -> `server`. Nothing here knows GGUF or has an architecture's name in it.

pub mod engine;
mod error;
pub mod sampler;
pub mod server;
pub mod template;
pub mod tokenizer;

pub use error::Error;
