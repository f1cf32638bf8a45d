//! One rank file, or any other safetensors file, by its own header.

use super::gguf::pairs;
use super::{Inspection, of_tensor};
use crate::Error;
use crate::error::human_bytes;
use crate::table::{Align, table};
use formats::TensorName;
use formats::map::MappedFile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Serialize)]
struct Report {
    path: String,
    bytes: u64,
    data_start: u64,
    metadata: BTreeMap<String, String>,
    tensors: Vec<TensorReport>,
}

#[derive(Clone, Serialize)]
struct TensorReport {
    name: String,
    /// The true type where the header can only say U8.
    dtype: String,
    /// Where it is not GGUF's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    layout: Option<String>,
    shape: Vec<u64>,
    /// From and to, in the file.
    bytes: (u64, u64),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Tensor { dtype: String, shape: Vec<u64>, data_offsets: (u64, u64) },
    Metadata(BTreeMap<String, String>),
}

#[derive(Deserialize)]
struct TrueType {
    dtype: String,
    shape: Vec<u64>,
}

pub(super) fn inspect(path: &Path, tensor: Option<&str>) -> Result<Inspection, Error> {
    let report = read(path)?;
    let Some(name) = tensor else {
        return Ok(Inspection::new(text(&report), &report));
    };
    let names = report.tensors.iter().map(|t| t.name.clone());
    of_tensor(path, name, names, |native| {
        let found = report.tensors.iter().find(|t| t.name == native)?;
        Some((details(&report, found), found.clone()))
    })
}

fn details(report: &Report, found: &TensorReport) -> String {
    pairs(&[
        ("file", report.path.clone()),
        ("rank", rank(report)),
        ("native name", found.name.clone()),
        ("GGUF name", TensorName::from_native(&found.name).map(TensorName::gguf).unwrap_or_default()),
        ("type", typed(found)),
        ("shape", format!("{:?}", found.shape)),
        (
            "bytes of the file",
            format!(
                "{}..{}, {}",
                found.bytes.0,
                found.bytes.1,
                human_bytes(found.bytes.1.saturating_sub(found.bytes.0))
            ),
        ),
    ])
}

fn read(path: &Path) -> Result<Report, Error> {
    let bytes = MappedFile::bytes(path)?;
    let refuse = |what: String| Error::Input { path: path.to_owned(), what };
    let length = bytes.first_chunk::<8>().map_or(0, |length| u64::from_le_bytes(*length));
    let data_start = length.saturating_add(8);
    let Some(json) = usize::try_from(data_start).ok().and_then(|end| bytes.get(8..end)) else {
        return Err(refuse(format!(
            "safetensors header of {length} bytes, but the file has {}; get it again",
            bytes.len()
        )));
    };
    let entries: BTreeMap<String, Entry> = serde_json::from_slice(json)
        .map_err(|e| refuse(format!("safetensors header: {e}; get the file again")))?;
    let mut metadata = BTreeMap::new();
    let mut tensors = Vec::new();
    for (name, entry) in entries {
        match entry {
            Entry::Metadata(values) => metadata = values,
            Entry::Tensor { dtype, shape, data_offsets: (from, to) } => {
                let bytes = (data_start.saturating_add(from), data_start.saturating_add(to));
                tensors.push(TensorReport { name, dtype, layout: None, shape, bytes });
            }
        }
    }
    let true_types: BTreeMap<String, TrueType> =
        metadata.get("dtypes").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    for (name, true_type) in true_types {
        if let Some(tensor) = tensors.iter_mut().find(|t| t.name == name) {
            tensor.dtype = true_type.dtype;
            tensor.shape = true_type.shape;
        }
    }
    let mut layouts: BTreeMap<String, String> =
        metadata.get("layouts").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    for tensor in &mut tensors {
        tensor.layout = layouts.remove(&tensor.name);
    }
    metadata.remove("layouts");
    metadata.remove("dtypes");
    tensors.sort_by_key(|t| t.bytes);
    let len = bytes.len() as u64;
    if let Some(tensor) = tensors.iter().find(|t| t.bytes.1 > len) {
        return Err(refuse(format!(
            "tensor {}, from byte {}: the file ends at byte {len}, {} more bytes were expected; it is truncated, get it again",
            tensor.name,
            tensor.bytes.0,
            tensor.bytes.1 - len
        )));
    }
    Ok(Report { path: path.display().to_string(), bytes: bytes.len() as u64, data_start, metadata, tensors })
}

/// Type and layout.
fn typed(tensor: &TensorReport) -> String {
    let TensorReport { dtype, layout, .. } = tensor;
    layout.as_ref().map_or_else(|| dtype.clone(), |layout| format!("{dtype} {layout}"))
}

fn rank(report: &Report) -> String {
    match (report.metadata.get("rank"), report.metadata.get("ranks")) {
        (Some(rank), Some(ranks)) => format!("rank {rank} of {ranks}"),
        _ => "not a rank file of a checkpoint".to_owned(),
    }
}

fn text(report: &Report) -> String {
    let mut text = pairs(&[
        ("file", report.path.clone()),
        ("rank", rank(report)),
        ("size", format!("{}, data from byte {}", human_bytes(report.bytes), report.data_start)),
        ("tensors", report.tensors.len().to_string()),
    ]);
    text.push('\n');
    let rows: Vec<Vec<String>> = report
        .tensors
        .iter()
        .map(|t| {
            let size = human_bytes(t.bytes.1.saturating_sub(t.bytes.0));
            vec![t.name.clone(), typed(t), format!("{:?}", t.shape), t.bytes.0.to_string(), size]
        })
        .collect();
    use Align::{Left, Right};
    let columns = [("tensor", Left), ("type", Left), ("shape", Left), ("at byte", Right), ("size", Right)];
    text.push_str(&table(&columns, &rows));
    text
}
