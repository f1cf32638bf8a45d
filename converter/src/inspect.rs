//! What is in a GGUF file, a checkpoint or one rank file, without converting anything.

mod checkpoint;
mod gguf;
mod rank_file;

use crate::Error;
use crate::similar::{both_spellings, closest};
use formats::name::LayerRole;
use formats::{LayerIdx, TensorName};
use serde::Serialize;
use std::collections::BTreeMap;
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

/// The native tensors that hold `name`, in either spelling: for a half of kv_b_proj the whole, for a fused gate and up projection
/// both, for other names themselves.
fn native_names(name: &str) -> Vec<String> {
    const HALVES: &[LayerRole] = &[LayerRole::ExpertsGateProj, LayerRole::ExpertsUpProj];
    let of = |name: fn(LayerIdx, LayerRole) -> TensorName, layer, roles: &[LayerRole]| {
        roles.iter().filter_map(|&role| name(layer, role).native()).collect()
    };
    match TensorName::parse(name) {
        Some(TensorName::Layer(layer, LayerRole::AttnKB | LayerRole::AttnVB)) => {
            of(TensorName::Layer, layer, &[LayerRole::KvBProj])
        }
        Some(TensorName::Layer(layer, LayerRole::ExpertsGateUpProj)) => of(TensorName::Layer, layer, HALVES),
        Some(TensorName::LayerScale(layer, LayerRole::ExpertsGateUpProj)) => {
            of(TensorName::LayerScale, layer, HALVES)
        }
        parsed => vec![parsed.and_then(TensorName::native).unwrap_or_else(|| name.to_owned())],
    }
}

/// What `find` finds of all native tensors that hold `name`: of one itself, of two both, in JSON as `tensors`.
///
/// # Errors
/// [`Error::NoSuchTensor`] when one of them is not there.
fn of_tensor<R: Serialize>(
    path: &Path,
    name: &str,
    natives: impl Iterator<Item = String>,
    find: impl Fn(&str) -> Option<(String, R)>,
) -> Result<Inspection, Error> {
    let found: Option<Vec<(String, R)>> = native_names(name).iter().map(|native| find(native)).collect();
    let Some(found) = found else {
        let similar = closest(name, both_spellings(natives));
        return Err(Error::NoSuchTensor { path: path.to_owned(), name: name.to_owned(), similar });
    };
    let (texts, reports): (Vec<String>, Vec<R>) = found.into_iter().unzip();
    let text = texts.join("\n");
    Ok(match &reports[..] {
        [report] => Inspection::new(text, report),
        tensors => Inspection::new(text, &BTreeMap::from([("tensors", tensors)])),
    })
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
