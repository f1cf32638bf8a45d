//! Holds a checkpoint's tensors against the source's, row by row.

use super::{SourceReport, source_names};
use crate::origin::TOOL;
use crate::plan::{Options, Plan, Planned, UnknownTensors, WeightLayout, words};
use crate::side_files::side_files;
use crate::{Error, arch, native};
use formats::checkpoint::RankShard;
use formats::config::AttentionConfig;
use formats::gguf::GgufSet;
use formats::layout::{Layout, mma16};
use formats::manifest::{Manifest, Shard, Skipped, TensorEntry, TransformKind};
use formats::name::LayerRole;
use formats::{Digest, Shape, Shown, TensorName, TensorView, quant};
use half::bf16;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Rows of a tensor that one job compares: about this many bytes.
const PIECE_BYTES: u64 = 32 << 20;

pub(super) struct Comparison<'a> {
    manifest: &'a Manifest,
    set: &'a GgufSet,
    first: Option<&'a RankShard>,
    pieces: Vec<Piece<'a>>,
    failures: Vec<String>,
}

/// Some rows of one rank's tensor.
#[derive(Clone)]
pub(super) struct Piece<'a> {
    rank: usize,
    entry: &'a TensorEntry,
    native: TensorView,
    origin: Origin,
    /// From and to, in rows of the rank's part.
    rows: (u64, u64),
}

/// What a native tensor's rows are held against.
#[derive(Clone)]
enum Origin {
    /// The tensor of the same name.
    Same(TensorView),
    /// Rows `from ..` of axis 1 of a fused tensor.
    Fused { view: TensorView, from: u64 },
    /// Halves of kv_b_proj.
    Halves { k_b: TensorView, v_b: TensorView, attention: Box<AttentionConfig> },
}

/// A worker's memory: decoded rows, and the key half of the head at hand.
#[derive(Default)]
pub(super) struct Rows {
    /// Rows of blocks that a strip of tiles was made of.
    strip: Vec<u8>,
    values: Vec<f32>,
    keys: Vec<f32>,
    keys_of: Option<(String, u64)>,
}

impl<'a> Comparison<'a> {
    pub(super) fn new(manifest: &'a Manifest, set: &'a GgufSet, shards: &[&'a RankShard]) -> Self {
        let mut comparison =
            Self { manifest, set, first: shards.first().copied(), pieces: Vec::new(), failures: Vec::new() };
        let found: Vec<u64> = set.parts().iter().map(|part| part.file.len()).collect();
        let expected: Vec<u64> = manifest.sources.iter().map(|source| source.bytes).collect();
        if found != expected {
            comparison.failures.push(format!(
                "{}: not the source of this checkpoint, which was made from {}: sizes are {found:?}, expected {expected:?}",
                set.path().display(),
                source_names(manifest)
            ));
            return comparison;
        }
        comparison.check_model();
        let mut used = HashSet::new();
        for shard in shards {
            for entry in &shard.manifest().tensors {
                match comparison.pieces_of(shard, entry, &mut used) {
                    Ok(pieces) => comparison.pieces.extend(pieces),
                    Err(what) => comparison.failures.push(format!(
                        "rank {}: tensor {}: {what}",
                        shard.manifest().rank,
                        entry.name
                    )),
                }
            }
        }
        // Every rank names every tensor; where none could be opened, that was told of.
        if !shards.is_empty() {
            comparison.check_all_used(&used);
        }
        match comparison.plan(shards) {
            Ok(plan) => {
                comparison.check_skipped(&plan.skipped);
                comparison.check_entries(&plan, shards);
            }
            Err(e) => comparison.failures.push(e.to_string()),
        }
        comparison.check_tool();
        comparison.check_side_files();
        comparison
    }

    pub(super) fn set(&self) -> &'a GgufSet {
        self.set
    }

    pub(super) fn failures(&self) -> Vec<String> {
        self.failures.clone()
    }

    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece<'a>> {
        self.pieces.iter().cloned()
    }

    pub(super) fn report(&self) -> SourceReport {
        SourceReport::new(self.set, self.first.map(RankShard::manifest))
    }

    pub(super) fn digest_failure(&self, part: usize, found: Digest) -> Option<String> {
        let expected = self.manifest.sources.get(part)?.blake3;
        (found != expected).then(|| {
            format!(
                "{}: digest is {found}, the checkpoint was made from {expected}; it is another file or has changed",
                self.set.parts()[part].path.display()
            )
        })
    }

    fn check_model(&mut self) {
        match arch::describe(self.set) {
            Ok(model) if model.config == self.manifest.model => {}
            Ok(_) => {
                self.failures.push("checkpoint.json: model is not what the source's metadata say".to_owned())
            }
            Err(e) => self.failures.push(e.to_string()),
        }
    }

    /// Every tensor of the source is in the checkpoint, or listed with the reason why not.
    fn check_all_used(&mut self, used: &HashSet<String>) {
        let skipped: HashSet<&str> = self.manifest.skipped.iter().map(|s| s.tensor.as_str()).collect();
        for (_, info) in self.set.tensors() {
            if !used.contains(&info.name) && !skipped.contains(info.name.as_str()) {
                self.failures
                    .push(format!("tensor {}: neither in the checkpoint nor listed as skipped", info.name));
            }
        }
    }

    /// What a conversion of the source with the checkpoint's own options does.
    fn plan(&self, shards: &[&RankShard]) -> Result<Plan, Error> {
        let tiles =
            shards.iter().flat_map(|shard| &shard.manifest().tensors).any(|t| t.layout == Layout::Mma16);
        let options = Options {
            ranks: self.manifest.ranks,
            experts: self.manifest.experts,
            unknown: UnknownTensors::Skip,
            layout: if tiles { WeightLayout::Mma16 } else { WeightLayout::Ggml },
        };
        Plan::new(self.set, options)
    }

    /// Manifests say of every tensor what it was made from and how. Bytes alone do not tell: those of an F32 tensor are the same
    /// copied and dequantised.
    fn check_entries(&mut self, plan: &Plan, shards: &[&RankShard]) {
        let planned: HashMap<&str, &Planned> =
            plan.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        for shard in shards {
            let manifest = shard.manifest();
            for entry in &manifest.tensors {
                // What the model has no use for was told of by name.
                let Some(planned) = planned.get(entry.name.as_str()) else { continue };
                let sources = planned.transform.sources().into_iter().map(|source| source.name.as_str());
                let differs = |field: &str, expected: String, found: String| {
                    (expected != found).then(|| {
                        format!(
                            "rank {}: tensor {}: {field}: expected {expected}, found {}; convert the model again",
                            manifest.rank,
                            entry.name,
                            Shown(&found)
                        )
                    })
                };
                let faults = [
                    differs("source", sources.collect::<Vec<_>>().join(" and "), entry.source.join(" and ")),
                    differs(
                        "transform",
                        words(planned.transform.kind()).to_owned(),
                        words(entry.transform).to_owned(),
                    ),
                    differs(
                        "scale",
                        planned.scale.clone().unwrap_or_default(),
                        entry.scale.clone().unwrap_or_default(),
                    ),
                    differs("layout", planned.layout.name().to_owned(), entry.layout.name().to_owned()),
                ];
                self.failures.extend(faults.into_iter().flatten());
            }
        }
    }

    /// A checkpoint may be of another version of this program, of another program it is not.
    fn check_tool(&mut self) {
        let tool = &self.manifest.tool;
        let version = TOOL.split_once(' ').and_then(|(name, _)| tool.strip_prefix(name)?.strip_prefix(' '));
        let numbers = |version: &str| {
            version.split('.').count() == 3 && version.split('.').all(|n| n.parse::<u32>().is_ok())
        };
        if !version.is_some_and(numbers) {
            self.failures.push(format!(
                "checkpoint.json: tool: expected {TOOL} or another version of it, found {}; convert the model again",
                Shown(tool)
            ));
        }
    }

    /// What is listed as skipped is what a conversion leaves out, with its reasons, and nothing else.
    fn check_skipped(&mut self, expected: &[Skipped]) {
        // Another version may have other words for its reasons.
        let same = |a: &Skipped, b: &Skipped| {
            a.tensor == b.tensor && (a.reason == b.reason || !self.is_of_this_version())
        };
        let listed = &self.manifest.skipped;
        let mut failures = Vec::new();
        for (i, skipped) in listed.iter().enumerate() {
            let known = expected.iter().any(|other| same(skipped, other));
            if !known || listed[..i].iter().any(|earlier| earlier.tensor == skipped.tensor) {
                failures.push(format!(
                    "checkpoint.json: skipped: {} ({}) is not what a conversion of the source leaves out",
                    Shown(&skipped.tensor),
                    Shown(&skipped.reason)
                ));
            }
        }
        // Tensors of the source that are missing here were told of above.
        let absent = expected.iter().filter(|skipped| self.set.info(&skipped.tensor).is_none());
        for skipped in absent.filter(|skipped| !listed.iter().any(|other| same(skipped, other))) {
            failures.push(format!("checkpoint.json: skipped: {} is not listed", Shown(&skipped.tensor)));
        }
        self.failures.extend(failures);
    }

    fn is_of_this_version(&self) -> bool {
        self.manifest.tool == TOOL
    }

    /// The files beside the weights are those that the source's metadata make.
    fn check_side_files(&mut self) {
        let expected = match side_files(self.set) {
            Ok(files) => files,
            Err(e) => return self.failures.push(e.to_string()),
        };
        let expected: BTreeMap<&str, Digest> =
            expected.iter().map(|file| (file.name, Digest::of(&file.bytes))).collect();
        let listed: BTreeMap<&str, Digest> =
            self.manifest.files.iter().map(|file| (file.file.as_str(), file.blake3)).collect();
        let names: BTreeSet<&str> = expected.keys().chain(listed.keys()).copied().collect();
        for name in names {
            let what = match (expected.get(name), listed.get(name)) {
                (Some(a), Some(b)) if a == b => continue,
                (Some(_), Some(_)) if !self.is_of_this_version() => continue,
                (Some(_), Some(_)) => "is not what the source's metadata make",
                (Some(_), None) => "the source's metadata make it, and it is not listed",
                (None, _) => "is listed, and the source has nothing to make it from",
            };
            self.failures
                .push(format!("checkpoint.json: files: {}: {what}; convert the model again", Shown(name)));
        }
    }

    fn pieces_of(
        &self,
        shard: &'a RankShard,
        entry: &'a TensorEntry,
        used: &mut HashSet<String>,
    ) -> Result<Vec<Piece<'a>>, String> {
        let native = shard.arranged(entry).map_err(|e| e.to_string())?;
        let origin = self.origin(entry, used)?;
        let row_bytes = native.row_bytes().max(1) as u64;
        // Whole strips, where the layout has them.
        let step = (PIECE_BYTES / row_bytes).max(1).next_multiple_of(mma16::ROWS as u64);
        let rows = if native.bytes().is_empty() { 0 } else { native.shape().rows() };
        let starts = (0..rows).step_by(step as usize);
        Ok(starts
            .map(|start| Piece {
                rank: shard.manifest().rank,
                entry,
                native: native.clone(),
                origin: origin.clone(),
                rows: (start, (start + step).min(rows)),
            })
            .collect())
    }

    fn origin(&self, entry: &TensorEntry, used: &mut HashSet<String>) -> Result<Origin, String> {
        let name = TensorName::from_native(&entry.name).ok_or("no native name")?;
        let mut view = |name: TensorName| {
            let view = self.set.view(&name.gguf()).ok().flatten()?;
            used.insert(name.gguf());
            Some(view)
        };
        let sister = |role| match name {
            TensorName::Layer(layer, _) => TensorName::Layer(layer, role),
            _ => name,
        };
        let missing = || format!("the source has no {}", name.gguf());
        let width = entry.full_shape.dims().get(1).copied().unwrap_or(0);
        let origin = match name {
            TensorName::Layer(_, LayerRole::KvBProj) => {
                let joined = view(name);
                match (view(sister(LayerRole::AttnKB)), view(sister(LayerRole::AttnVB)), joined) {
                    (Some(k_b), Some(v_b), _) => Origin::Halves {
                        k_b,
                        v_b,
                        attention: Box::new(self.manifest.model.attention.clone()),
                    },
                    (_, _, Some(joined)) => Origin::Same(joined),
                    _ => return Err("the source has neither attn_k_b and attn_v_b nor attn_kv_b".to_owned()),
                }
            }
            TensorName::Layer(_, role @ (LayerRole::ExpertsGateProj | LayerRole::ExpertsUpProj)) => {
                match view(name) {
                    Some(own) => Origin::Same(own),
                    None => {
                        let from = if role == LayerRole::ExpertsUpProj { width } else { 0 };
                        Origin::Fused {
                            view: view(sister(LayerRole::ExpertsGateUpProj)).ok_or_else(missing)?,
                            from,
                        }
                    }
                }
            }
            TensorName::ModelScale(_) | TensorName::LayerScale(..) => {
                // The scale of a fused tensor is that of both its halves.
                let source = native::scale_source(name, |name| self.set.info(name).is_some());
                let source = TensorName::from_gguf(&source).and_then(&mut view);
                Origin::Same(source.ok_or_else(missing)?)
            }
            _ => Origin::Same(view(name).ok_or_else(missing)?),
        };
        origin.check(entry)?;
        Ok(origin)
    }
}

impl Origin {
    /// Whether types and sizes allow a comparison at all.
    fn check(&self, entry: &TensorEntry) -> Result<(), String> {
        let (view, times) = match self {
            Self::Same(view) => (view, 1),
            Self::Fused { view, .. } => (view, 2),
            Self::Halves { k_b, v_b, attention: a } => {
                let [heads, nope, v, rank] =
                    [a.num_attention_heads, a.qk_nope_head_dim, a.v_head_dim, a.kv_lora_rank]
                        .map(|n| n as u64);
                let is = |shape: &Shape, rows: u64, columns: u64| {
                    (shape.rows(), shape.row_len()) == (rows, columns)
                };
                // Sizes of a model are at most 2^31 each, so a product of two fits.
                let fits = is(k_b.shape(), heads * rank, nope)
                    && is(v_b.shape(), heads * v, rank)
                    && is(&entry.full_shape, heads * (nope + v), rank);
                let found = || {
                    format!(
                        "{}, the source's halves are {} and {}",
                        entry.full_shape,
                        k_b.shape(),
                        v_b.shape()
                    )
                };
                return if fits { Ok(()) } else { Err(found()) };
            }
        };
        if times == 2 && entry.full_shape.dims().len() != 3 {
            return Err(format!("{}, expected one matrix for each expert", entry.full_shape));
        }
        let rows_fit = u128::from(view.shape().elements()) == u128::from(entry.full_shape.elements()) * times
            && view.shape().row_len() == entry.full_shape.row_len();
        if !rows_fit {
            return Err(format!("{}, the source has {}", entry.full_shape, view.shape()));
        }
        if entry.transform == TransformKind::Copy && view.dtype() != entry.dtype {
            return Err(format!("a copy of type {}, the source has {}", entry.dtype, view.dtype()));
        }
        Ok(())
    }
}

impl Piece<'_> {
    /// Where in the rank file the piece ends.
    pub(super) fn file_end(&self) -> u64 {
        self.entry.bytes.0 + self.rows.1 * self.native.row_bytes() as u64
    }

    /// The first row that is not the source's, as a line.
    pub(super) fn compare(&self, memory: &mut Rows) -> Result<Option<String>, Error> {
        let row_bytes = self.native.row_bytes();
        let mut strip = std::mem::take(&mut memory.strip);
        let mut wrong = None;
        for row in self.rows.0..self.rows.1 {
            let at = row as usize * row_bytes;
            let found = match self.entry.layout {
                Layout::Mma16 => {
                    let within = row as usize % mma16::ROWS;
                    if within == 0 {
                        let tiles = &self.native.bytes()[at..at + mma16::ROWS * row_bytes];
                        let columns = self.native.shape().row_len() as usize;
                        mma16::restore_strip(self.native.dtype(), columns, tiles, &mut strip);
                    }
                    &strip[within * row_bytes..(within + 1) * row_bytes]
                }
                _ => &self.native.bytes()[at..at + row_bytes],
            };
            if !self.row_is_right(row, found, memory)? {
                wrong = Some(row);
                break;
            }
        }
        memory.strip = strip;
        Ok(wrong.map(|row| {
            format!(
                "rank {}: tensor {}: row {row} of its part is not what {} says; convert the model again",
                self.rank,
                self.entry.name,
                self.entry.source.join(" and ")
            )
        }))
    }

    fn row_is_right(&self, row: u64, found: &[u8], memory: &mut Rows) -> Result<bool, Error> {
        let columns = self.columns();
        match (&self.origin, self.entry.transform) {
            (Origin::Same(view), kind) => {
                let row = self.full_row(row, &self.entry.full_shape, 0);
                compare_row(view, row, columns, kind, found, &mut memory.values)
            }
            (Origin::Fused { view, from }, kind) => {
                let dims = self.entry.full_shape.dims();
                let row = self.full_row(row, &self.entry.full_shape.with_dim(1, 2 * dims[1]), *from);
                compare_row(view, row, columns, kind, found, &mut memory.values)
            }
            (Origin::Halves { k_b, v_b, attention }, _) => {
                let row = self.full_row(row, &self.entry.full_shape, 0);
                let (nope, v) = (attention.qk_nope_head_dim as u64, attention.v_head_dim as u64);
                let (head, within) = (row / (nope + v), row % (nope + v));
                if within >= nope {
                    let row = head * v + within - nope;
                    return compare_row(v_b, row, columns, TransformKind::JoinKvB, found, &mut memory.values);
                }
                let rank = attention.kv_lora_rank;
                memory.load_keys(&self.entry.name, k_b, head, rank)?;
                let column = memory.keys.iter().skip(within as usize).step_by(nope as usize);
                Ok(found.len() == rank * 2
                    && column
                        .zip(found.chunks_exact(2))
                        .all(|(x, bytes)| bf16::from_f32(*x).to_le_bytes() == *bytes))
            }
        }
    }

    /// The row of the source that row `row` of the rank's part is, where the source's shape is `shape` and its axis 1
    /// starts `from` rows earlier.
    fn full_row(&self, row: u64, shape: &Shape, from: u64) -> u64 {
        let local = self.native.shape().dims();
        let full = shape.dims();
        let outer = local.len() - 1;
        let mut index = vec![0; outer];
        let mut rest = row;
        for axis in (0..outer).rev() {
            index[axis] = rest % local[axis];
            rest /= local[axis];
        }
        if let Shard::Cut { axis, start, .. } = self.entry.shard
            && axis < outer
        {
            index[axis] += start;
        }
        if let Some(second) = index.get_mut(1) {
            *second += from;
        }
        index.iter().zip(full).fold(0, |row, (i, len)| row * len + i)
    }

    /// First column and number of columns of the rank's part.
    fn columns(&self) -> (u64, u64) {
        match self.entry.shard {
            Shard::Cut { axis, start, len } if axis + 1 == self.entry.full_shape.dims().len() => (start, len),
            _ => (0, self.entry.full_shape.row_len()),
        }
    }
}

impl Rows {
    /// Decodes the key half `[R, nope]` of one head, unless it is the one at hand.
    fn load_keys(&mut self, tensor: &str, k_b: &TensorView, head: u64, rank: usize) -> Result<(), Error> {
        if self.keys_of.as_ref().is_some_and(|(name, of)| name == tensor && *of == head) {
            return Ok(());
        }
        let rows = head as usize * rank..(head as usize + 1) * rank;
        let bytes = &k_b.bytes()[rows.start * k_b.row_bytes()..rows.end * k_b.row_bytes()];
        self.keys.resize(rank * k_b.shape().row_len() as usize, 0.0);
        quant::decode(k_b.dtype(), bytes, &mut self.keys)?;
        self.keys_of = Some((tensor.to_owned(), head));
        Ok(())
    }
}

fn compare_row(
    view: &TensorView,
    row: u64,
    (first, len): (u64, u64),
    kind: TransformKind,
    found: &[u8],
    values: &mut Vec<f32>,
) -> Result<bool, Error> {
    let at = row as usize * view.row_bytes();
    let source = &view.bytes()[at..at + view.row_bytes()];
    if kind == TransformKind::Copy {
        let offset = |n| view.dtype().bytes_for(n).map(|n| n as usize);
        let (Some(from), Some(to)) = (offset(first), offset(first + len)) else { return Ok(false) };
        return Ok(source[from..to] == *found);
    }
    values.resize(view.shape().row_len() as usize, 0.0);
    quant::decode(view.dtype(), source, values)?;
    let values = &values[first as usize..(first + len) as usize];
    Ok(match kind {
        TransformKind::JoinKvB => {
            found.len() == values.len() * 2
                && values
                    .iter()
                    .zip(found.chunks_exact(2))
                    .all(|(x, b)| bf16::from_f32(*x).to_le_bytes() == *b)
        }
        _ => {
            found.len() == values.len() * 4
                && values.iter().zip(found.chunks_exact(4)).all(|(x, b)| x.to_le_bytes() == *b)
        }
    })
}
