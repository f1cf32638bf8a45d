//! `shardrun` as a library: native checkpoints in, tokens and HTTP out.
//!
//! Data goes one way: `Checkpoint` -> `load` -> `Model`; requests -> `Sequence` -> `Scheduler` -> `Batch` ->
//! `Model::forward` -> logits -> `Sampler` -> `server`. Nothing here knows GGUF or has an architecture's name in it.

pub mod batch;
pub mod bench;
pub mod comm;
pub mod constraint;
pub mod device;
pub mod dialect;
pub mod engine;
mod error;
pub mod generation;
pub mod heap;
pub mod kv_cache;
pub mod load;
pub mod logits;
pub mod logprobs;
pub mod metrics;
mod mla;
pub mod model;
pub mod rank;
pub mod reload;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod server;
pub mod status;
pub mod template;
pub mod text;
pub mod thinking;
pub mod tokenizer;
pub mod upload;
pub mod verify;

pub use error::Error;
