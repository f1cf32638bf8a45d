//! GGUF files of any architecture.

use super::Inspection;
use crate::Error;
use crate::error::human_bytes;
use crate::similar::closest;
use crate::table::{Align, table};
use formats::gguf::{GgufSet, TensorInfo, Value};
use formats::name::LayerRole;
use formats::{Dtype, Shape, TensorName, quant};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// Values of a tensor that are shown.
const SHOWN: usize = 8;

#[derive(Serialize)]
struct Report {
    path: String,
    version: u32,
    bytes: u64,
    files: Vec<FileReport>,
    metadata: BTreeMap<String, String>,
    types: Vec<TypeReport>,
    tensors: Vec<TensorReport>,
}

#[derive(Serialize)]
struct FileReport {
    name: String,
    bytes: u64,
    tensors: usize,
}

#[derive(Serialize)]
struct TypeReport {
    dtype: Dtype,
    tensors: usize,
    bytes: u64,
}

#[derive(Serialize)]
struct TensorReport {
    name: String,
    /// What a native checkpoint calls it, where it has it in this form.
    native: Option<String>,
    dtype: Dtype,
    shape: Shape,
    bytes: u64,
    file: String,
    offset: u64,
}

#[derive(Serialize)]
struct TensorDetails {
    #[serde(flatten)]
    tensor: TensorReport,
    row_bytes: u64,
    block_len: usize,
    block_bytes: usize,
    first_values: Vec<f32>,
}

pub(super) fn inspect(path: &Path, tensor: Option<&str>) -> Result<Inspection, Error> {
    let set = GgufSet::open(path)?;
    match tensor {
        None => Ok(whole(&set)),
        Some(name) => one(&set, name),
    }
}

fn whole(set: &GgufSet) -> Inspection {
    let report = Report {
        path: set.path().display().to_string(),
        version: set.parts()[0].file.version,
        bytes: set.total_len(),
        files: set
            .parts()
            .iter()
            .enumerate()
            .map(|(i, part)| FileReport {
                name: file_name(set, i),
                bytes: part.file.len(),
                tensors: part.file.tensors.len(),
            })
            .collect(),
        metadata: set.metadata().iter().map(|(key, value)| (key.to_owned(), value.to_string())).collect(),
        types: types(set.tensors().map(|(_, info)| (info.dtype, info.bytes.end - info.bytes.start))),
        tensors: set.tensors().map(|(part, info)| tensor_report(set, part, info)).collect(),
    };
    let mut text = String::new();
    let count = report.files.len();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{}: GGUF version {}, {}, {} tensors, {} keys, {} in {count} {}\n",
        report.path,
        report.version,
        set.metadata().value("general.architecture").and_then(Value::as_str).unwrap_or("no architecture"),
        report.tensors.len(),
        report.metadata.len(),
        human_bytes(report.bytes),
        if count == 1 { "file" } else { "files" }
    );
    use Align::{Left, Right};
    let keys: Vec<Vec<String>> =
        set.metadata().iter().map(|(key, value)| vec![key.to_owned(), value.to_string()]).collect();
    text.push_str(&table(&[("key", Left), ("value", Left)], &keys));
    text.push('\n');
    text.push_str(&types_table(&report.types));
    text.push('\n');
    if count > 1 {
        let files: Vec<Vec<String>> = report
            .files
            .iter()
            .map(|file| vec![file.name.clone(), file.tensors.to_string(), human_bytes(file.bytes)])
            .collect();
        text.push_str(&table(&[("file", Left), ("tensors", Right), ("size", Right)], &files));
        text.push('\n');
    }
    let rows: Vec<Vec<String>> = report
        .tensors
        .iter()
        .map(|t| vec![t.name.clone(), t.dtype.to_string(), t.shape.to_string(), human_bytes(t.bytes)])
        .collect();
    text.push_str(&table(&[("tensor", Left), ("type", Left), ("shape", Left), ("size", Right)], &rows));
    Inspection::new(text, &report)
}

fn one(set: &GgufSet, name: &str) -> Result<Inspection, Error> {
    let own = TensorName::from_native(name).map_or(name.to_owned(), TensorName::gguf);
    let Some((part, info)) = set.info(name).or_else(|| set.info(&own)) else {
        let names = set.tensors().flat_map(|(_, info)| {
            [Some(info.name.clone()), TensorName::from_gguf(&info.name).and_then(TensorName::native)]
        });
        let similar = match TensorName::parse(name) {
            // In most files it is in two halves.
            Some(TensorName::Layer(layer, LayerRole::KvBProj)) => [LayerRole::AttnKB, LayerRole::AttnVB]
                .map(|half| TensorName::Layer(layer, half).gguf())
                .to_vec(),
            _ => closest(name, names.flatten()),
        };
        return Err(Error::NoSuchTensor { path: set.path().to_owned(), name: name.to_owned(), similar });
    };
    let view = set.parts()[part].file.view(info)?;
    let block_len = info.dtype.block_len();
    let head = (SHOWN.next_multiple_of(block_len) as u64).min(info.shape.elements());
    let mut values = vec![0.0; head as usize];
    let bytes = info.dtype.bytes_for(head).unwrap_or(0) as usize;
    let first_values = match quant::decode(info.dtype, &view.bytes()[..bytes], &mut values) {
        Ok(()) => values.into_iter().take(SHOWN).collect(),
        Err(_) => Vec::new(),
    };
    let details = TensorDetails {
        tensor: tensor_report(set, part, info),
        row_bytes: view.row_bytes() as u64,
        block_len,
        block_bytes: info.dtype.block_bytes(),
        first_values,
    };
    let t = &details.tensor;
    let rows = [
        ("GGUF name", t.name.clone()),
        (
            "native name",
            t.native.clone().unwrap_or("none: a checkpoint has it in another form or not at all".to_owned()),
        ),
        (
            "type",
            format!("{}: blocks of {} values in {} bytes", t.dtype, block_len, info.dtype.block_bytes()),
        ),
        ("shape", t.shape.to_string()),
        ("bytes", format!("{} from byte {} of {}", t.bytes, t.offset, t.file)),
        ("row", format!("{} bytes", details.row_bytes)),
        ("first values", format!("{:?}", details.first_values)),
    ];
    let text = pairs(&rows);
    Ok(Inspection::new(text, &details))
}

fn tensor_report(set: &GgufSet, part: usize, info: &TensorInfo) -> TensorReport {
    TensorReport {
        name: info.name.clone(),
        native: TensorName::from_gguf(&info.name).and_then(TensorName::native),
        dtype: info.dtype,
        shape: info.shape.clone(),
        bytes: info.bytes.end - info.bytes.start,
        file: file_name(set, part),
        offset: info.bytes.start,
    }
}

fn file_name(set: &GgufSet, part: usize) -> String {
    set.parts()[part].path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn types(tensors: impl Iterator<Item = (Dtype, u64)>) -> Vec<TypeReport> {
    let mut types: BTreeMap<Dtype, (usize, u64)> = BTreeMap::new();
    for (dtype, bytes) in tensors {
        let entry = types.entry(dtype).or_default();
        *entry = (entry.0 + 1, entry.1 + bytes);
    }
    types.into_iter().map(|(dtype, (tensors, bytes))| TypeReport { dtype, tensors, bytes }).collect()
}

fn types_table(types: &[TypeReport]) -> String {
    let rows: Vec<Vec<String>> = types
        .iter()
        .map(|t| vec![t.dtype.to_string(), t.tensors.to_string(), human_bytes(t.bytes)])
        .collect();
    table(&[("type", Align::Left), ("tensors", Align::Right), ("size", Align::Right)], &rows)
}

/// Names and values, aligned.
pub(super) fn pairs(rows: &[(&str, String)]) -> String {
    let wide = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:wide$}  {value}\n")).collect()
}
