//! What is in a GGUF file, a checkpoint or one rank file, without converting anything.

mod checkpoint;
mod gguf;
mod rank_file;

use crate::Error;
use serde::Serialize;
use std::io::Read;
use std::path::Path;

/// What was found: the same for people and for programs.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Lines of text.
    pub text: String,
    /// JSON.
    pub json: serde_json::Value,
}

impl Inspection {
    fn new(text: String, report: &impl Serialize) -> Self {
        Self { text, json: serde_json::to_value(report).expect("reports always become JSON") }
    }
}

/// Looks at `path`, or at its tensor `tensor` in either spelling.
///
/// # Errors
/// An error naming the file and what is wrong with it; [`Error::NoSuchTensor`] with the closest names.
pub fn inspect(path: &Path, tensor: Option<&str>) -> Result<Inspection, Error> {
    if path.is_dir() {
        return checkpoint::inspect(path, tensor);
    }
    if looks_like_safetensors(path)? {
        return rank_file::inspect(path, tensor);
    }
    gguf::inspect(path, tensor)
}

/// A length that fits the file, and then the start of a JSON object.
fn looks_like_safetensors(path: &Path) -> Result<bool, Error> {
    let io = |e| Error::io(path, "cannot read", e);
    let file = formats::map::open_regular(path)?;
    let len = file.metadata().map_err(io)?.len();
    let mut head = Vec::new();
    file.take(10).read_to_end(&mut head).map_err(io)?;
    let header = head.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
    Ok(header.is_some_and(|header| header < len) && head.get(8..10) == Some(b"{\""))
}
