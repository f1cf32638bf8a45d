//! What is in a GGUF file, a checkpoint or one rank file, without converting anything.

mod checkpoint;
mod gguf;
mod rank_file;

use crate::Error;
use crate::similar::{both_spellings, closest};
use formats::TensorName;
use formats::name::LayerRole;
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

/// The native tensor that holds `name`, in either spelling: for a half of kv_b_proj the whole, for other names themselves.
fn native_name(name: &str) -> String {
    let native = match TensorName::parse(name) {
        Some(TensorName::Layer(layer, LayerRole::AttnKB | LayerRole::AttnVB)) => {
            TensorName::Layer(layer, LayerRole::KvBProj).native()
        }
        Some(parsed) => parsed.native(),
        None => None,
    };
    native.unwrap_or_else(|| name.to_owned())
}

/// Of a fused gate and up projection the two native ones; otherwise the names that look like `name`.
fn similar(name: &str, natives: impl Iterator<Item = String>) -> Vec<String> {
    match TensorName::parse(name) {
        Some(TensorName::Layer(layer, LayerRole::ExpertsGateUpProj)) => {
            let halves = [LayerRole::ExpertsGateProj, LayerRole::ExpertsUpProj];
            halves.into_iter().filter_map(|half| TensorName::Layer(layer, half).native()).collect()
        }
        _ => closest(name, both_spellings(natives)),
    }
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
