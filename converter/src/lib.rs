//! shardmill as a library: GGUF files to native checkpoints. Offline, CPU only.
//!
//! `GgufSet` -> [`arch::describe`] -> [`plan::Plan`] -> [`execute::convert`]; what was written is checked by [`verify`].
//! [`Conversion::prepare`] is all of it that comes before the first byte is written.

pub mod arch;
mod chunks;
pub mod cli;
mod conversion;
mod error;
pub mod execute;
pub mod extract;
pub mod inspect;
mod journal;
mod native;
mod origin;
pub mod partition;
pub mod plan;
mod reference;
pub mod side_files;
mod similar;
mod table;
mod tokenizer;
pub mod transform;
pub mod verify;
pub mod work;
mod writer;

pub use conversion::Conversion;
pub use error::Error;
pub use writer::{Existing, Unfinished};

/// A path in a report: its bytes need not be text, JSON's must.
fn lossy_path<S: serde::Serializer>(path: &std::path::Path, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&path.display())
}
