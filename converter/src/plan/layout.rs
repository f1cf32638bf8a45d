//! Where each tensor lies in a rank's file, and the safetensors header that says so.

use super::{Plan, Planned};
use crate::partition::Partition;
use formats::Dtype;
use formats::layout::Layout;
use formats::manifest::{DATA_ALIGNMENT, FORMAT_VERSION, TENSOR_ALIGNMENT};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// A rank's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// The rank.
    pub rank: usize,
    /// Length of the header, and where the data section starts.
    pub data_start: u64,
    /// Size of the file.
    pub bytes: u64,
    /// The tensors, in the order of the file, without holes. Ranks whose parts are alike share them.
    pub placed: Arc<[Placed]>,
}

/// A tensor's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Index into `Plan::tensors`.
    pub tensor: usize,
    /// Bytes of the file.
    pub bytes: Range<u64>,
}

impl RankLayout {
    /// The files of all ranks. Of a thousand only a few differ in more than their number.
    pub(super) fn all(tensors: &[Planned], ranks: usize) -> Vec<Self> {
        let mut partitions: Vec<Partition> = Vec::new();
        for cut in tensors.iter().filter_map(|tensor| tensor.cut) {
            if !partitions.contains(&cut.partition) {
                partitions.push(cut.partition);
            }
        }
        let mut known: HashMap<(u32, Vec<u64>), Self> = HashMap::new();
        let layout = |rank: usize| {
            let len = |partition: &Partition| {
                let range = partition.range(rank);
                range.end - range.start
            };
            // All that a header says of a rank: its digits, and the sizes of its parts.
            let digits = rank.checked_ilog10().unwrap_or(0);
            let alike = known
                .entry((digits, partitions.iter().map(len).collect()))
                .or_insert_with(|| Self::new(tensors, rank, ranks));
            Self { rank, ..alike.clone() }
        };
        (0..ranks).map(layout).collect()
    }

    /// Places tensors without holes, and yet each at a multiple of the largest power of two up to
    /// [`TENSOR_ALIGNMENT`] that divides its size: larger divisors come first.
    fn new(tensors: &[Planned], rank: usize, ranks: usize) -> Self {
        let mut order: Vec<(u32, usize, u64)> = tensors
            .iter()
            .enumerate()
            .map(|(i, tensor)| {
                let size = tensor.shard_bytes(rank);
                let divisor = size.trailing_zeros().min(TENSOR_ALIGNMENT.trailing_zeros());
                (TENSOR_ALIGNMENT.trailing_zeros() - divisor, i, size)
            })
            .collect();
        order.sort_unstable();
        let mut end = 0;
        let relative: Vec<Placed> = order
            .into_iter()
            .map(|(_, tensor, size)| {
                let start = end;
                end += size;
                Placed { tensor, bytes: start..end }
            })
            .collect();
        let data_start = header(tensors, &relative, rank, ranks).len() as u64;
        let placed = relative
            .into_iter()
            .map(|p| Placed { bytes: p.bytes.start + data_start..p.bytes.end + data_start, ..p })
            .collect();
        Self { rank, data_start, bytes: end + data_start, placed }
    }
}

impl Plan {
    /// The first [`RankLayout::data_start`] bytes of a rank's file: length, JSON, spaces.
    pub fn header(&self, rank: usize) -> Vec<u8> {
        let layout = &self.layouts[rank];
        let relative: Vec<Placed> = layout
            .placed
            .iter()
            .map(|p| Placed {
                bytes: p.bytes.start - layout.data_start..p.bytes.end - layout.data_start,
                tensor: p.tensor,
            })
            .collect();
        header(&self.tensors, &relative, rank, self.options.ranks)
    }
}

/// What the header says of one tensor, in the format's own words.
#[derive(Serialize)]
struct Entry {
    dtype: &'static str,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// True type and shape of a tensor that the header can only call U8.
#[derive(Serialize)]
struct TrueType {
    dtype: Dtype,
    shape: Vec<u64>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Value {
    Metadata(BTreeMap<&'static str, String>),
    Tensor(Entry),
}

/// Keys are sorted, so that equal plans give equal bytes.
fn header(tensors: &[Planned], placed: &[Placed], rank: usize, ranks: usize) -> Vec<u8> {
    let mut true_types: BTreeMap<&str, TrueType> = BTreeMap::new();
    let mut entries: BTreeMap<&str, Value> = BTreeMap::new();
    for place in placed {
        let tensor = &tensors[place.tensor];
        let shape = tensor.shard_shape(rank);
        let entry = Entry {
            dtype: safetensors_dtype(tensor.dtype()).unwrap_or("U8"),
            shape: safetensors_shape(tensor.dtype(), shape.dims()),
            data_offsets: [place.bytes.start, place.bytes.end],
        };
        if safetensors_dtype(tensor.dtype()).is_none() {
            let true_type = TrueType { dtype: tensor.dtype(), shape: shape.dims().to_vec() };
            true_types.insert(&tensor.name, true_type);
        }
        entries.insert(&tensor.name, Value::Tensor(entry));
    }
    let dtypes = serde_json::to_string(&true_types).expect("names and numbers always become JSON");
    let mut metadata = BTreeMap::from([
        ("format", "shardmill".to_owned()),
        ("format_version", FORMAT_VERSION.to_string()),
        ("rank", rank.to_string()),
        ("ranks", ranks.to_string()),
        ("dtypes", dtypes),
    ]);
    let layouts: BTreeMap<&str, &Layout> = placed
        .iter()
        .map(|place| &tensors[place.tensor])
        .filter(|tensor| tensor.layout != Layout::Ggml)
        .map(|tensor| (tensor.name.as_str(), &tensor.layout))
        .collect();
    if !layouts.is_empty() {
        let layouts = serde_json::to_string(&layouts).expect("names always become JSON");
        metadata.insert("layouts", layouts);
    }
    entries.insert("__metadata__", Value::Metadata(metadata));
    let json = serde_json::to_vec(&entries).expect("names and numbers always become JSON");
    let total = (8 + json.len()).next_multiple_of(DATA_ALIGNMENT as usize);
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(&(total as u64 - 8).to_le_bytes());
    bytes.extend_from_slice(&json);
    bytes.resize(total, b' ');
    bytes
}

/// The format's name of a type; `None` for block types, which it does not know.
pub(crate) fn safetensors_dtype(dtype: Dtype) -> Option<&'static str> {
    match dtype {
        Dtype::F64 => Some("F64"),
        Dtype::F32 => Some("F32"),
        Dtype::F16 => Some("F16"),
        Dtype::BF16 => Some("BF16"),
        Dtype::I8 => Some("I8"),
        Dtype::I16 => Some("I16"),
        Dtype::I32 => Some("I32"),
        Dtype::I64 => Some("I64"),
        _ => None,
    }
}

/// The shape that the header gives: rows of block types are counted in bytes.
pub(crate) fn safetensors_shape(dtype: Dtype, dims: &[u64]) -> Vec<u64> {
    let mut shape = dims.to_vec();
    if safetensors_dtype(dtype).is_none()
        && let Some(last) = shape.last_mut()
    {
        *last = dtype.bytes_for(*last).expect("rows are whole blocks");
    }
    shape
}
