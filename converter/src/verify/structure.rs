//! Whether the manifests of all ranks, the safetensors headers and the model fit together.

use crate::native::{self, Cut, Need};
use crate::plan::{safetensors_dtype, safetensors_shape};
use formats::checkpoint::RankShard;
use formats::layout::Layout;
use formats::manifest::{Manifest, RankManifest, Shard, TensorEntry};
use formats::{LayerIdx, TensorName};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};

pub(super) fn is_replicated(entry: &TensorEntry) -> bool {
    matches!(entry.shard, Shard::Whole(_))
}

pub(super) fn cut_count(manifest: &RankManifest) -> usize {
    manifest.tensors.iter().filter(|t| !is_replicated(t)).count()
}

/// What the safetensors header of a rank file says otherwise than its manifest.
pub(super) fn header_failures(shard: &RankShard) -> Vec<String> {
    let manifest = shard.manifest();
    let fail = |what: String| vec![format!("{}: safetensors header: {what}", manifest.file)];
    let json = &shard.bytes()[8..manifest.data_start as usize];
    let header: BTreeMap<String, Value> = match serde_json::from_slice(json) {
        Ok(header) => header,
        Err(e) => return fail(format!("not JSON: {e}; copy or convert the file again")),
    };
    let mut failures = Vec::new();
    if header.len() != manifest.tensors.len() + 1 {
        failures.extend(fail(format!(
            "expected {} tensors and __metadata__, found {} entries",
            manifest.tensors.len(),
            header.len()
        )));
    }
    let mut expect = |tensor: &str, field: &str, expected: Value, found: Option<&Value>| {
        if found != Some(&expected) {
            let found = found.map_or("nothing".to_owned(), Value::to_string);
            failures.extend(fail(format!("{tensor}, {field}: expected {expected}, found {found}")));
        }
    };
    let metadata = header.get("__metadata__");
    let in_metadata = |key: &str| metadata.and_then(|m| m.get(key));
    expect("__metadata__", "rank", manifest.rank.to_string().into(), in_metadata("rank"));
    expect("__metadata__", "ranks", manifest.ranks.to_string().into(), in_metadata("ranks"));
    let true_types: Value = in_metadata("dtypes")
        .and_then(Value::as_str)
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or(Value::Null);
    let layouts: Value = in_metadata("layouts")
        .and_then(Value::as_str)
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or(Value::Null);
    for entry in &manifest.tensors {
        let layout = layouts.get(&entry.name).cloned().unwrap_or_else(|| Layout::Ggml.name().into());
        expect(&entry.name, "layout", entry.layout.name().into(), Some(&layout));
        let found = header.get(&entry.name);
        let field = |name: &str| found.and_then(|f| f.get(name));
        let offsets = [entry.bytes.0 - manifest.data_start, entry.bytes.1 - manifest.data_start];
        let dtype = safetensors_dtype(entry.dtype);
        expect(&entry.name, "dtype", dtype.unwrap_or("U8").into(), field("dtype"));
        expect(
            &entry.name,
            "shape",
            safetensors_shape(entry.dtype, entry.shape.dims()).into(),
            field("shape"),
        );
        expect(&entry.name, "data_offsets", offsets.to_vec().into(), field("data_offsets"));
        if dtype.is_none() {
            let found = true_types.get(&entry.name).and_then(|t| t.get("dtype"));
            expect(&entry.name, "true dtype", entry.dtype.name().into(), found);
        }
    }
    failures
}

/// What does not fit between the ranks, or between them and the model.
pub(super) fn failures(manifest: &Manifest, ranks: &[&RankManifest]) -> Vec<String> {
    let mut failures: Vec<String> =
        manifest.rank_faults(ranks).into_iter().map(|fault| fault.to_string()).collect();
    let by_name: Vec<HashMap<&str, &TensorEntry>> =
        ranks.iter().map(|rank| rank.tensors.iter().map(|t| (t.name.as_str(), t)).collect()).collect();
    failures.extend(model_failures(manifest, &by_name));
    failures
}

/// What the model asks for and the ranks do not have, or have otherwise.
fn model_failures(manifest: &Manifest, ranks: &[HashMap<&str, &TensorEntry>]) -> Vec<String> {
    let natives = match native::tensors(&manifest.model, manifest.experts) {
        Ok(natives) => natives,
        Err(e) => return vec![e.to_string()],
    };
    let mut failures = Vec::new();
    let listed: HashSet<String> = natives.iter().filter_map(|native| native.name.native()).collect();
    // What the cuts of a layer's tensors have to agree in: heads, or indices of one width.
    let mut ranges: HashMap<(TensorName, usize), (u64, u64)> = HashMap::new();
    for native in &natives {
        let Some(name) = native.name.native() else { continue };
        let Some(first) = ranks[0].get(name.as_str()) else {
            if native.need == Need::Required {
                failures.push(format!("tensor {name}: the model needs it, no rank has it"));
            }
            continue;
        };
        if first.full_shape != native.shape {
            failures
                .push(format!("tensor {name}: the model needs {}, found {}", native.shape, first.full_shape));
            continue;
        }
        let expected_axis = match native.cut {
            Cut::Replicated => None,
            Cut::Vocabulary | Cut::Experts => Some(0),
            Cut::Heads { axis, .. } | Cut::Width { axis, .. } => Some(axis),
        };
        for (rank, tensors) in ranks.iter().enumerate() {
            let Some(entry) = tensors.get(name.as_str()) else { continue };
            let (axis, start, len) = match entry.shard {
                Shard::Whole(_) => (None, 0, 0),
                Shard::Cut { axis, start, len } => (Some(axis), start, len),
            };
            if axis != expected_axis {
                failures.push(format!(
                    "tensor {name}: rank {rank} has it cut at {axis:?}, expected {expected_axis:?}"
                ));
                continue;
            }
            let (group, per) = match (native.cut, native.name) {
                (Cut::Heads { per_head, .. }, TensorName::Layer(layer, _)) => {
                    (TensorName::Layer(layer, formats::name::LayerRole::OProj), per_head)
                }
                (Cut::Width { down, .. }, TensorName::Layer(layer, _)) => (TensorName::Layer(layer, down), 1),
                _ => continue,
            };
            let range = (start / per, len / per);
            let whole = start.is_multiple_of(per) && len.is_multiple_of(per);
            if !whole || *ranges.entry((group, rank)).or_insert(range) != range {
                failures.push(format!(
                    "tensor {name}: rank {rank} has {len} from {start}, which are not the heads or columns that it has of {}",
                    group.native().unwrap_or_default()
                ));
            }
        }
    }
    // Layers beyond the model's are listed already.
    let layers = manifest.model.all_layers().count();
    let beyond = |name| {
        TensorName::from_native(name)
            .and_then(TensorName::layer)
            .is_some_and(|LayerIdx(layer)| layer >= layers)
    };
    let mut unknown: Vec<&str> =
        ranks[0].keys().copied().filter(|&name| !listed.contains(name) && !beyond(name)).collect();
    unknown.sort_unstable();
    failures.extend(unknown.into_iter().map(|name| format!("tensor {name}: the model has no such tensor")));
    failures
}
