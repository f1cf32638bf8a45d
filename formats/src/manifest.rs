//! Manifests of a native checkpoint: `checkpoint.json` ([`Manifest`]) and one `rank-R-of-N.json` for each rank
//! ([`RankManifest`]).
//!
//! A manifest is believed only after [`Manifest::parse`] or [`RankManifest::parse`]: those hold every range, shape and
//! count against the others.

mod ranks;

pub use crate::layout::Layout;

use crate::config::ModelConfig;
use crate::digest::{CHUNK_BYTES, Digest, root_digest};
use crate::tensor::bytes_of;
use crate::{Dtype, Error, Shape, TensorName};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// `format` of every checkpoint.json.
pub const FORMAT: &str = "shardmill-checkpoint";
/// The version written and the only one read.
pub const FORMAT_VERSION: u32 = 1;
/// File name of the top manifest.
pub const MANIFEST_FILE: &str = "checkpoint.json";
/// File name of the digests in b3sum's format.
pub const B3SUMS_FILE: &str = "B3SUMS";
/// A rank file's data section starts at a multiple of this.
pub const DATA_ALIGNMENT: u64 = 4096;
/// Every tensor whose size is a multiple of this starts at one.
pub const TENSOR_ALIGNMENT: u64 = 256;
/// More ranks than this are no deployment.
pub const MAX_RANKS: usize = 1024;
/// A manifest larger than this is not one of ours.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// File name of a rank's weights.
pub fn rank_file_name(rank: usize, ranks: usize) -> String {
    format!("rank-{rank}-of-{ranks}.safetensors")
}

/// File name of a rank's manifest.
pub fn rank_manifest_name(rank: usize, ranks: usize) -> String {
    format!("rank-{rank}-of-{ranks}.json")
}

/// `checkpoint.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`]
    pub format: String,
    /// [`FORMAT_VERSION`]
    pub format_version: u32,
    /// Program and version that wrote it.
    pub tool: String,
    /// The model's name, from `general.name` or the source's file name.
    pub name: String,
    /// Number of rank files.
    pub ranks: usize,
    /// How routed experts are cut.
    pub experts: ExpertCut,
    /// The model.
    pub model: ModelConfig,
    /// The files that it was made from, in order.
    pub sources: Vec<SourceFile>,
    /// The rank files, rank 0 first.
    pub rank_files: Vec<RankFile>,
    /// Files beside the weights: tokenizer, template, generation config.
    pub files: Vec<SideFile>,
    /// Tensors of the source that are not in the checkpoint.
    pub skipped: Vec<Skipped>,
}

/// How routed experts are cut over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertCut {
    /// Every rank holds a slice of every expert.
    Tensor,
    /// Every rank holds some experts whole.
    Expert,
}

/// A file that a checkpoint was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFile {
    /// Its name without folders.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its digest.
    pub blake3: Digest,
}

/// A rank's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankFile {
    /// The rank.
    pub rank: usize,
    /// File name of its weights.
    pub file: String,
    /// Size of that file.
    pub bytes: u64,
    /// Digest of that file.
    pub blake3: Digest,
    /// File name of its manifest.
    pub manifest: String,
    /// Digest of that manifest.
    pub manifest_blake3: Digest,
}

/// A file beside the weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SideFile {
    /// Its name.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Its digest.
    pub blake3: Digest,
}

/// A tensor of the source that is not in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Skipped {
    /// Its name in the source.
    pub tensor: String,
    /// Why it is not needed.
    pub reason: String,
}

/// `rank-R-of-N.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankManifest {
    /// [`FORMAT_VERSION`]
    pub format_version: u32,
    /// The rank.
    pub rank: usize,
    /// Of how many.
    pub ranks: usize,
    /// File name of the weights.
    pub file: String,
    /// Size of that file.
    pub bytes: u64,
    /// Where its data section starts.
    pub data_start: u64,
    /// Digest of the file, as `b3sum` prints it.
    pub blake3: Digest,
    /// [`CHUNK_BYTES`]
    pub chunk_bytes: u64,
    /// For each chunk of the file its chaining value in the file's BLAKE3 tree, from which `blake3` follows; for a file
    /// of one chunk, `blake3` itself.
    pub chunks: Vec<Digest>,
    /// The tensors, in the order of the file.
    pub tensors: Vec<TensorEntry>,
}

/// One tensor of a rank file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Native name.
    pub name: String,
    /// True element type; the safetensors header can only say U8 for block types.
    pub dtype: Dtype,
    /// Arrangement of the bytes.
    pub layout: Layout,
    /// What this rank has.
    pub shape: Shape,
    /// The whole tensor over all ranks.
    pub full_shape: Shape,
    /// Which part this rank has.
    pub shard: Shard,
    /// Where its bytes lie in the file, from and to.
    pub bytes: (u64, u64),
    /// What was done to the source's bytes.
    pub transform: TransformKind,
    /// The source's tensors that it was made from.
    pub source: Vec<String>,
    /// The tensor that its values are multiplied by when they are used: one F32 number, or, of a stack, one for each expert.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<String>,
    /// Digest of its bytes when they lie in one chunk with others, so that damage there can be given a name; a tensor that
    /// crosses chunks is named by theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<Digest>,
}

/// Which part of a tensor a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Shard {
    /// A range of one axis of the full shape.
    Cut {
        /// The axis, 0 outermost.
        axis: usize,
        /// First index.
        start: u64,
        /// Number of indices; 0 when this rank has none.
        len: u64,
    },
    /// All of it.
    Whole(Replicated),
}

/// The word `replicated`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replicated {
    /// Every rank has the whole tensor.
    Replicated,
}

impl Shard {
    /// All of the tensor on every rank.
    pub const REPLICATED: Self = Self::Whole(Replicated::Replicated);
}

impl std::fmt::Display for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole(_) => f.write_str("all of it"),
            Self::Cut { axis, start, len } => write!(f, "axis {axis}, {len} from {start}"),
        }
    }
}

/// What was done to the source's bytes before they were cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransformKind {
    /// Nothing: the source's own bytes.
    Copy,
    /// Every value as F32.
    Dequantize,
    /// `attn_k_b` (transposed) and `attn_v_b`, or a joined `attn_kv_b`, as BF16 rows of kv_b_proj.
    JoinKvB,
}

impl Manifest {
    /// Reads and checks a top manifest.
    ///
    /// # Errors
    /// [`Error::Manifest`] or [`Error::Config`] naming the field.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let value: serde_json::Value = json(bytes)?;
        let format = value.get("format").and_then(serde_json::Value::as_str).unwrap_or("none");
        check("format", format == FORMAT, FORMAT, format)?;
        let version = value.get("format_version").and_then(serde_json::Value::as_u64).unwrap_or(0);
        check(
            "format_version",
            version == u64::from(FORMAT_VERSION),
            "1: convert the model again with this version",
            version,
        )?;
        let manifest: Self = json(bytes)?;
        manifest.validate()?;
        Ok(manifest)
    }

    fn validate(&self) -> Result<(), Error> {
        check("ranks", (1..=MAX_RANKS).contains(&self.ranks), "1 to 1024", self.ranks)?;
        check("rank_files", self.rank_files.len() == self.ranks, "one for each rank", self.rank_files.len())?;
        for (rank, file) in self.rank_files.iter().enumerate() {
            let expected = rank_file_name(rank, self.ranks);
            check(&format!("rank_files[{rank}].rank"), file.rank == rank, &rank.to_string(), file.rank)?;
            check(&format!("rank_files[{rank}].file"), file.file == expected, &expected, &file.file)?;
            let expected = rank_manifest_name(rank, self.ranks);
            check(
                &format!("rank_files[{rank}].manifest"),
                file.manifest == expected,
                &expected,
                &file.manifest,
            )?;
        }
        for (i, side) in self.files.iter().enumerate() {
            let plain = !side.file.is_empty()
                && !side.file.starts_with('.')
                && !side.file.contains(['/', '\\', '\0']);
            check(&format!("files[{i}].file"), plain, "a file name without folders", &side.file)?;
        }
        self.model.validate()
    }
}

impl RankManifest {
    /// Reads and checks a rank's manifest.
    ///
    /// # Errors
    /// [`Error::Manifest`] naming the field, or the tensor.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let manifest: Self = json(bytes)?;
        manifest.validate()?;
        Ok(manifest)
    }

    /// The entry of a tensor, by its native name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.iter().find(|entry| entry.name == name)
    }

    /// The tensors that have bytes in a range of the file.
    pub fn tensors_in(&self, range: &Range<u64>) -> impl Iterator<Item = &TensorEntry> {
        self.tensors.iter().filter(move |entry| entry.bytes.0 < range.end && entry.bytes.1 > range.start)
    }

    /// The bytes of chunk `index`.
    pub fn chunk(&self, index: usize) -> Range<u64> {
        let start = index as u64 * self.chunk_bytes;
        start..(start + self.chunk_bytes).min(self.bytes)
    }

    fn validate(&self) -> Result<(), Error> {
        check("format_version", self.format_version == FORMAT_VERSION, "1", self.format_version)?;
        check("ranks", (1..=MAX_RANKS).contains(&self.ranks), "1 to 1024", self.ranks)?;
        check("rank", self.rank < self.ranks, &format!("less than {}", self.ranks), self.rank)?;
        let expected = rank_file_name(self.rank, self.ranks);
        check("file", self.file == expected, &expected, &self.file)?;
        check("chunk_bytes", self.chunk_bytes == CHUNK_BYTES, &CHUNK_BYTES.to_string(), self.chunk_bytes)?;
        let chunks = self.bytes.div_ceil(CHUNK_BYTES);
        check(
            "chunks",
            self.chunks.len() as u64 == chunks,
            &format!("{chunks} for {} bytes", self.bytes),
            self.chunks.len(),
        )?;
        let root = if self.chunks.is_empty() { Digest::of(&[]) } else { root_digest(&self.chunks) };
        check(
            "chunks",
            root == self.blake3,
            &format!("values that merge into blake3, {}", self.blake3),
            root,
        )?;
        let aligned = self.data_start.is_multiple_of(DATA_ALIGNMENT) && self.data_start <= self.bytes;
        check(
            "data_start",
            aligned,
            &format!("a multiple of {DATA_ALIGNMENT} inside the file"),
            self.data_start,
        )?;
        let mut end = self.data_start;
        let mut names = HashSet::new();
        for entry in &self.tensors {
            let field = |name: &str| format!("tensor {}, {name}", entry.name);
            check(&field("name"), names.insert(entry.name.as_str()), "every name once", "it twice")?;
            check(
                &field("bytes"),
                entry.bytes.0 == end,
                &format!("a start at {end}, where the one before ends"),
                entry.bytes.0,
            )?;
            end = entry.bytes.1;
            entry.validate(self.bytes)?;
        }
        let by_name: HashMap<&str, &TensorEntry> =
            self.tensors.iter().map(|entry| (entry.name.as_str(), entry)).collect();
        for entry in &self.tensors {
            if let Some(scale) = &entry.scale {
                entry.check_scale(scale, by_name.get(scale.as_str()).copied())?;
            }
            entry.check_names_of_scales(|name| by_name.contains_key(name))?;
        }
        check("bytes", end == self.bytes, &format!("{end}, where the last tensor ends"), self.bytes)
    }
}

impl TensorEntry {
    /// A scale is in the same file and has one number for the tensor, or one for each matrix of its stack that is here.
    fn check_scale(&self, name: &str, scale: Option<&Self>) -> Result<(), Error> {
        let field = format!("tensor {}, scale", self.name);
        let Some(scale) = scale else {
            return check(&field, false, "a tensor of this file", name);
        };
        let one_each = |shape: &Shape| match shape.dims() {
            [experts, _, _] => [*experts],
            _ => [1],
        };
        let fits = scale.dtype == Dtype::F32
            && scale.layout == Layout::Ggml
            && scale.scale.is_none()
            && scale.full_shape.dims() == one_each(&self.full_shape)
            && scale.shape.dims() == one_each(&self.shape);
        let expected = format!("F32 {:?}", one_each(&self.shape));
        check(&field, fits, &expected, format!("{name}: {} {}", scale.dtype, scale.shape))?;
        check(&field, self.layout == Layout::Ggml, "none in a layout of products without one", &self.layout)
    }

    /// A weight names the scale that is its own and no other, and no scale is there for nothing: whoever uses the weight alone
    /// would use other numbers.
    fn check_names_of_scales(&self, there: impl Fn(&str) -> bool) -> Result<(), Error> {
        let Some(name) = TensorName::from_native(&self.name) else {
            let found = self.scale.as_deref().unwrap_or("none");
            return check(&format!("tensor {}, scale", self.name), self.scale.is_none(), "none", found);
        };
        if let Some(weight) = name.scaled().and_then(TensorName::native) {
            check(&format!("tensor {}", self.name), there(&weight), &format!("{weight} beside it"), "none")?;
        }
        let own = name.scale().and_then(TensorName::native).filter(|scale| there(scale));
        let [expected, found] = [&own, &self.scale].map(|scale| scale.as_deref().unwrap_or("none"));
        check(&format!("tensor {}, scale", self.name), own == self.scale, expected, found)
    }

    fn validate(&self, file_bytes: u64) -> Result<(), Error> {
        let field = |name: &str| format!("tensor {}, {name}", self.name);
        let (start, end) = self.bytes;
        check(
            &field("bytes"),
            start <= end && end <= file_bytes,
            "a range inside the file",
            format!("{start}..{end}"),
        )?;
        let size = bytes_of(self.dtype, &self.shape);
        check(
            &field("bytes"),
            size == Some(end - start),
            &format!("{} {}", self.dtype, self.shape),
            format!("{} bytes", end - start),
        )?;
        check(
            &field("full_shape"),
            bytes_of(self.dtype, &self.full_shape).is_some(),
            "whole blocks",
            &self.full_shape,
        )?;
        if !matches!(self.layout, Layout::Unknown(_)) {
            check(
                &field("layout"),
                self.layout.fits(self.dtype, &self.shape),
                "one that its type and shape allow",
                &self.layout,
            )?;
        }
        match self.shard {
            Shard::Whole(_) => check(
                &field("shape"),
                self.shape == self.full_shape,
                &self.full_shape.to_string(),
                &self.shape,
            ),
            Shard::Cut { axis, start, len } => {
                let dims = self.full_shape.dims();
                check(&field("shard.axis"), axis < dims.len(), &format!("less than {}", dims.len()), axis)?;
                let inside = start.checked_add(len).is_some_and(|end| end <= dims[axis]);
                check(
                    &field("shard"),
                    inside,
                    &format!("a range of {}", dims[axis]),
                    format!("{len} from {start}"),
                )?;
                let expected = self.full_shape.with_dim(axis, len);
                check(&field("shape"), self.shape == expected, &expected.to_string(), &self.shape)
            }
        }
    }
}

fn json<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|e| Error::Manifest {
        field: format!("line {}, column {}", e.line(), e.column()),
        expected: "a manifest that shardmill wrote".to_owned(),
        found: e.to_string(),
    })
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "numbers and texts alike, and nothing is formatted while all is well"
)]
fn check(field: &str, holds: bool, expected: &str, found: impl ToString) -> Result<(), Error> {
    if holds {
        return Ok(());
    }
    Err(Error::Manifest { field: field.to_owned(), expected: expected.to_owned(), found: found.to_string() })
}
