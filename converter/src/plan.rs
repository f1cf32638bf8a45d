//! The plan of a conversion: a pure function of the files' headers, the model and the options.

mod groups;
mod html;
mod layout;
mod report;

pub use layout::{Placed, RankLayout};
pub(crate) use layout::{safetensors_dtype, safetensors_shape};
pub use report::PlanReport;
pub(crate) use report::{stored, words};

use crate::arch::Model;
use crate::chunks::PIECE_BYTES;
use crate::execute::BLOCK_BYTES;
use crate::native::{self, Cut, NativeTensor, Need, Stored};
use crate::partition::{Partition, head_unit};
use crate::transform::{Half, HeadDims, KvB, PIECE, Region, SourceTensor, Transform};
use crate::work::MAX_THREADS;
use crate::{Error, arch};
use formats::config::{FfnConfig, IndexerRole};
use formats::gguf::GgufSet;
use formats::layout::{Layout, mma16};
use formats::manifest::{ExpertCut, Shard, Skipped};
use formats::name::{LayerRole, ModelRole};
use formats::{Dtype, LayerIdx, Shape, TensorName, bytes_of, quant};
use serde::Serialize;
use std::collections::HashSet;

/// What a user chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Rank files to make, 1 to [`formats::manifest::MAX_RANKS`].
    pub ranks: usize,
    /// How routed experts are cut.
    pub experts: ExpertCut,
    /// What becomes of tensors that no table knows.
    pub unknown: UnknownTensors,
    /// How weights are arranged.
    pub layout: WeightLayout,
}

/// How the weights that products read are arranged, as far as their types and shapes allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// As GGUF has them.
    Ggml,
    /// In tiles for tensor cores; whatever does not fit, and embeddings, whose rows are looked up one by one, as GGUF has them.
    Mma16,
}

/// What becomes of tensors that no table knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownTensors {
    /// They are an error.
    Refuse,
    /// They are left out and listed.
    Skip,
}

/// Everything that a conversion will do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The model.
    pub model: Model,
    /// The options it was made with.
    pub options: Options,
    /// The native tensors: trunk, indexers, MTP layers, each in the order of execution.
    pub tensors: Vec<Planned>,
    /// The source's tensors that are left out.
    pub skipped: Vec<Skipped>,
    /// One for each rank.
    pub layouts: Vec<RankLayout>,
    /// Bytes of the source's files.
    pub source_bytes: u64,
    /// Bytes of them that are header: metadata, vocabulary and the list of tensors.
    pub source_header_bytes: u64,
}

/// Memory that a conversion takes at most; mapped files are not counted, their pages can be dropped at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PeakMemory {
    /// Bytes for headers, vocabulary, plan and manifests.
    pub base: u64,
    /// Bytes for each thread.
    pub per_thread: u64,
    /// Bytes with as many threads as a conversion ever has.
    pub most: u64,
}

/// One native tensor.
#[derive(Clone, Debug)]
pub struct Planned {
    /// What it is.
    pub role: TensorName,
    /// Native name.
    pub name: String,
    /// Over all ranks.
    pub shape: Shape,
    /// How it is made.
    pub transform: Transform,
    /// How its bytes are arranged, on every rank alike.
    pub layout: Layout,
    /// How it is cut; `None` when every rank has all of it.
    pub cut: Option<AxisCut>,
    /// The native tensor that its values are multiplied by when they are used.
    pub scale: Option<String>,
}

/// A cut of one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisCut {
    /// The axis, 0 outermost.
    pub axis: usize,
    /// The indices of each rank.
    pub partition: Partition,
    /// What the indices are.
    pub by: CutBy,
}

/// What the indices of a cut axis are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CutBy {
    /// Attention heads, of `per_head` indices each.
    Heads {
        /// Indices of one head.
        per_head: u64,
    },
    /// Columns of a down projection, or the rows of gate and up that make them.
    Width,
    /// Rows of the vocabulary.
    Vocabulary,
    /// Whole experts.
    Experts,
}

/// Why a tensor stays in rows of blocks though tiles were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoTiles {
    /// It is no copy of the source's blocks.
    Computed,
    /// Its rows are looked up one by one.
    LookedUp,
    /// Products in tiles know of no scale.
    Scaled,
    /// No kernel multiplies this type in tiles.
    Type(Dtype),
    /// Some rank's part is no whole number of tiles.
    Parts,
}

impl Planned {
    /// Type in the checkpoint.
    pub fn dtype(&self) -> Dtype {
        self.transform.dtype()
    }

    /// Which part rank `rank` has.
    pub fn shard(&self, rank: usize) -> Shard {
        match &self.cut {
            None => Shard::REPLICATED,
            Some(AxisCut { axis, partition, .. }) => {
                let range = partition.range(rank);
                Shard::Cut { axis: *axis, start: range.start, len: range.end - range.start }
            }
        }
    }

    /// Shape of that part.
    pub fn shard_shape(&self, rank: usize) -> Shape {
        match self.shard(rank) {
            Shard::Whole(_) => self.shape.clone(),
            Shard::Cut { axis, len, .. } => self.shape.with_dim(axis, len),
        }
    }

    /// Bytes of that part.
    pub fn shard_bytes(&self, rank: usize) -> u64 {
        let whole = bytes_of(self.dtype(), &self.shape).expect("rows are whole blocks");
        match self.shard(rank) {
            Shard::Whole(_) => whole,
            Shard::Cut { axis, len, .. } => {
                (u128::from(whole) * u128::from(len) / u128::from(self.shape.dims()[axis].max(1))) as u64
            }
        }
    }

    /// Why it cannot be arranged in tiles that products read, on every rank; `None` when it can.
    fn keeps_from_tiles(&self, ranks: usize) -> Option<NoTiles> {
        let looked_up = matches!(
            self.role,
            TensorName::Model(ModelRole::EmbedTokens) | TensorName::Layer(_, LayerRole::MtpEmbedTokens)
        );
        let copied = matches!(self.transform, Transform::Copy(_) | Transform::CopyHalf { .. });
        // The first rank has the longest part, the last one the shortest, and there are no others.
        let whole = |rank| Layout::Mma16.fits(self.dtype(), &self.shard_shape(rank));
        match self.dtype() {
            _ if !copied => Some(NoTiles::Computed),
            _ if looked_up => Some(NoTiles::LookedUp),
            _ if self.scale.is_some() => Some(NoTiles::Scaled),
            dtype if !mma16::MULTIPLIED.contains(&dtype) => Some(NoTiles::Type(dtype)),
            _ if ![0, ranks - 1].into_iter().all(whole) => Some(NoTiles::Parts),
            _ => None,
        }
    }

    pub(crate) fn region(&self, rank: usize) -> Region {
        match &self.cut {
            None => Region::Whole,
            Some(cut) => Region::Range { axis: cut.axis, indices: cut.partition.range(rank) },
        }
    }
}

impl Plan {
    /// Reads the model and decides on everything.
    ///
    /// # Errors
    /// An error naming the file and the key or tensor.
    pub fn new(set: &GgufSet, options: Options) -> Result<Self, Error> {
        let model = arch::describe(set)?;
        let mut planner = Planner { set, model: &model, options, used: HashSet::new() };
        let natives = native::tensors(&model.config, options.experts).map_err(|e| e.in_file(set.path()))?;
        let mut made = Vec::with_capacity(natives.len());
        for native in &natives {
            made.extend(planner.made_by(native)?.map(|transform| (native, transform)));
        }
        // Cuts come of several tensors' types and shapes, so all of these were held against the metadata before.
        let planned = |(native, transform): (&NativeTensor, _)| {
            planner.plan(native, transform).map(|planned| (native.part, planned))
        };
        let mut parts = made.into_iter().map(planned).collect::<Result<Vec<_>, _>>()?;
        let skipped = planner.skipped()?;
        parts.sort_by_key(|(part, _)| *part);
        let tensors: Vec<Planned> = parts.into_iter().map(|(_, planned)| planned).collect();
        let layouts = RankLayout::all(&tensors, options.ranks);
        let source_header_bytes = set.parts().iter().map(|part| part.file.data_start).sum();
        Ok(Self {
            model,
            options,
            tensors,
            skipped,
            layouts,
            source_bytes: set.total_len(),
            source_header_bytes,
        })
    }

    /// Bytes of all rank files and an upper bound for the manifests beside them.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes_of(0..self.options.ranks)
    }

    /// As [`Plan::disk_bytes`], of some ranks alone.
    pub(crate) fn disk_bytes_of(&self, ranks: impl ExactSizeIterator<Item = usize>) -> u64 {
        const BYTES_PER_ENTRY: u64 = 1024;
        const BYTES_PER_CHUNK: u64 = 80;
        let entries = (self.tensors.len() * ranks.len()) as u64 * BYTES_PER_ENTRY;
        let files: u64 = ranks.map(|rank| self.layouts[rank].bytes).sum();
        files + entries + files / formats::digest::CHUNK_BYTES * BYTES_PER_CHUNK
    }

    /// Bytes of the source that some ranks are made from: of a tensor that is cut, those of their parts.
    pub(crate) fn source_bytes_of(&self, ranks: &[usize]) -> u64 {
        let bytes = |tensor: &Planned| -> u64 {
            let sources = tensor.transform.sources().into_iter();
            sources.filter_map(|source| bytes_of(source.dtype, &source.shape)).sum()
        };
        let needed = |tensor: &Planned| match tensor.cut {
            None => bytes(tensor),
            Some(AxisCut { partition, .. }) => {
                let whole = match tensor.transform {
                    Transform::CopyHalf { .. } => bytes(tensor) / 2,
                    _ => bytes(tensor),
                };
                let indices: u64 = ranks
                    .iter()
                    .map(|&rank| partition.range(rank))
                    .map(|range| range.end - range.start)
                    .sum();
                (u128::from(whole) * u128::from(indices) / u128::from(partition.len().max(1))) as u64
            }
        };
        self.tensors.iter().map(needed).sum()
    }

    /// What a conversion takes at most.
    pub fn peak_memory(&self) -> PeakMemory {
        /// The program itself, its stacks and what its allocator keeps.
        const PROGRAM: u64 = 24 << 20;
        /// The vocabulary is held parsed, looked up by text, and as the JSON that is written.
        const COPIES_OF_HEADER: u64 = 12;
        /// A tensor's place and digest on one rank.
        const BYTES_PER_ENTRY: u64 = 128;
        /// An entry of the one manifest that is being written, as data and as JSON.
        const BYTES_PER_WRITTEN: u64 = 4096;
        let attention = &self.model.config.attention;
        let head = (attention.qk_nope_head_dim + attention.v_head_dim) * attention.kv_lora_rank;
        let entries = (self.tensors.len() * self.options.ranks) as u64 * BYTES_PER_ENTRY;
        let written = self.tensors.len() as u64 * BYTES_PER_WRITTEN;
        let base = PROGRAM + self.source_header_bytes * COPIES_OF_HEADER + entries + written;
        // A piece that is read, a block that is written, values in f32, and a head of kv_b_proj: decoded, transposed, and
        // rounded twice.
        let per_thread = PIECE_BYTES + BLOCK_BYTES as u64 + PIECE * 4 + head as u64 * (4 + 4 + 2 + 2);
        PeakMemory { base, per_thread, most: base + per_thread * MAX_THREADS as u64 }
    }
}

struct Planner<'a> {
    set: &'a GgufSet,
    model: &'a Model,
    options: Options,
    /// GGUF names that native tensors are made from.
    used: HashSet<String>,
}

impl Planner<'_> {
    /// How a tensor is made; `None` for one that need not be there and is not.
    fn made_by(&mut self, native: &NativeTensor) -> Result<Option<Transform>, Error> {
        let there = |name: &str| self.set.info(name).is_some();
        if let Some(missing) = native::missing_source(native.name, there) {
            return match native.need {
                Need::Optional => Ok(None),
                Need::Required => Err(self.missing(&missing, native)),
            };
        }
        let transform = self.transform(native)?;
        for source in transform.sources() {
            self.used.insert(source.name.clone());
        }
        Ok(Some(transform))
    }

    fn plan(&self, native: &NativeTensor, transform: Transform) -> Result<Planned, Error> {
        let cut = self.cut(native, &transform)?;
        let name = native.name.native().expect("native tensors have a native name");
        let shape = native.shape.clone();
        let scale = native.name.scale().filter(|&scale| {
            native.stored == Stored::AsIs && {
                native::missing_source(scale, |name| self.set.info(name).is_some()).is_none()
            }
        });
        let scale = scale.and_then(TensorName::native);
        let mut planned =
            Planned { role: native.name, name, shape, transform, layout: Layout::Ggml, cut, scale };
        if self.options.layout == WeightLayout::Mma16
            && planned.keeps_from_tiles(self.options.ranks).is_none()
        {
            planned.layout = Layout::Mma16;
        }
        Ok(planned)
    }

    fn transform(&self, native: &NativeTensor) -> Result<Transform, Error> {
        let own = native.name.gguf();
        match (native.stored, native.name) {
            (Stored::F32, _) => Ok(Transform::Dequantize(self.source(&own, &native.shape)?)),
            (Stored::KvB, TensorName::Layer(layer, _)) => self.join(layer, native),
            (_, TensorName::Layer(layer, role @ (LayerRole::ExpertsGateProj | LayerRole::ExpertsUpProj)))
                if self.set.info(&own).is_none() =>
            {
                let fused = TensorName::Layer(layer, LayerRole::ExpertsGateUpProj).gguf();
                let sister = match role {
                    LayerRole::ExpertsGateProj => LayerRole::ExpertsUpProj,
                    _ => LayerRole::ExpertsGateProj,
                };
                let sister = TensorName::Layer(layer, sister).gguf();
                // Its own half of the fused tensor would be left out without a word.
                if let Some((part, _)) = self.set.info(&sister) {
                    let path = &self.set.parts()[part].path;
                    let expected = format!("no such tensor beside {fused}, which has its values too");
                    let found = format!("it, and no {own}; convert the original model again");
                    return Err(Error::tensor(path, &sister, expected, found));
                }
                let width = native.shape.dims()[1];
                Ok(Transform::CopyHalf {
                    source: self.source(&fused, &native.shape.with_dim(1, 2 * width))?,
                    half: if role == LayerRole::ExpertsGateProj { Half::First } else { Half::Second },
                })
            }
            (_, TensorName::ModelScale(_) | TensorName::LayerScale(..)) => self.scale(native),
            _ => Ok(Transform::Copy(self.source(&own, &native.shape)?)),
        }
    }

    /// What a weight is multiplied by, its own or that of a fused gate and up projection.
    fn scale(&self, native: &NativeTensor) -> Result<Transform, Error> {
        let name = native::scale_source(native.name, |name| self.set.info(name).is_some());
        let source = self.source(&name, &native.shape)?;
        if source.dtype != Dtype::F32 {
            let found = format!("{}; convert the original model again", source.dtype);
            let path =
                &self.set.info(&name).map_or(self.set.path(), |(part, _)| &self.set.parts()[part].path);
            return Err(Error::tensor(path, &name, "F32, as scales are", found));
        }
        Ok(Transform::Copy(source))
    }

    fn join(&self, layer: LayerIdx, native: &NativeTensor) -> Result<Transform, Error> {
        let a = &self.model.config.attention;
        let heads = HeadDims { nope: a.qk_nope_head_dim, v: a.v_head_dim, r: a.kv_lora_rank };
        let [h, nope, v, r] = [a.num_attention_heads, heads.nope, heads.v, heads.r].map(|n| n as u64);
        let shape = |dims: [u64; 3]| Shape::new(&dims).expect("a part of kv_b_proj, whose product fits");
        let name = |role| TensorName::Layer(layer, role).gguf();
        let there = |role| self.set.info(&name(role)).is_some();
        let joined = || self.source(&name(LayerRole::KvBProj), &native.shape);
        let from = if there(LayerRole::AttnKB) && there(LayerRole::AttnVB) {
            KvB::Halves {
                k_b: self.source(&name(LayerRole::AttnKB), &shape([h, r, nope]))?,
                v_b: self.source(&name(LayerRole::AttnVB), &shape([h, v, r]))?,
                joined: there(LayerRole::KvBProj).then(joined).transpose()?,
            }
        } else {
            KvB::Joined(joined()?)
        };
        Ok(Transform::JoinKvB { from, heads })
    }

    fn cut(&self, native: &NativeTensor, transform: &Transform) -> Result<Option<AxisCut>, Error> {
        let ranks = self.options.ranks;
        let dims = native.shape.dims();
        let (axis, partition, by) = match native.cut {
            Cut::Replicated => return Ok(None),
            Cut::Vocabulary => (0, Partition::new(dims[0], 1, ranks), CutBy::Vocabulary),
            Cut::Experts => (0, Partition::new(dims[0], 1, ranks), CutBy::Experts),
            Cut::Heads { axis, per_head } => {
                let a = &self.model.config.attention;
                let unit = head_unit(a.v_head_dim as u64, self.block_len(native.name, LayerRole::OProj));
                let heads = Partition::new(a.num_attention_heads as u64, unit, ranks);
                (axis, heads.map(|heads| heads.scaled(per_head)), CutBy::Heads { per_head })
            }
            Cut::Width { axis, down } => {
                (axis, Partition::new(dims[axis], self.block_len(native.name, down), ranks), CutBy::Width)
            }
        };
        match partition {
            Some(partition) => Ok(Some(AxisCut { axis, partition, by })),
            None => {
                let source = transform.sources()[0];
                let expected = format!("an axis {axis} of whole blocks");
                Err(Error::tensor(self.set.path(), &source.name, expected, native.shape.to_string()))
            }
        }
    }

    /// Block length of the tensor with `role` in the same layer.
    fn block_len(&self, name: TensorName, role: LayerRole) -> u64 {
        let TensorName::Layer(layer, _) = name else { return 1 };
        let info = self.set.info(&TensorName::Layer(layer, role).gguf());
        info.map_or(1, |(_, info)| info.dtype.block_len() as u64)
    }

    /// A source tensor of the expected shape, with numbers in it.
    fn source(&self, name: &str, expected: &Shape) -> Result<SourceTensor, Error> {
        let Some((part, info)) = self.set.info(name) else {
            return Err(Error::tensor(self.set.path(), name, format!("shape {expected}"), "no such tensor"));
        };
        let path = &self.set.parts()[part].path;
        // GGUF leaves out outer dimensions of length 1.
        let inner =
            |shape: &Shape| -> Vec<u64> { shape.dims().iter().copied().skip_while(|&n| n == 1).collect() };
        if inner(&info.shape) != inner(expected) {
            return Err(Error::tensor(
                path,
                name,
                format!("shape {expected}, which the metadata asks for"),
                format!("{}; the file contradicts itself, convert the original model again", info.shape),
            ));
        }
        if quant::decoder(info.dtype).is_none() {
            let count = self.set.tensors().filter(|(_, other)| other.dtype == info.dtype).count();
            let found = format!("{} ({count} such tensors); convert the original model again", info.dtype);
            return Err(Error::tensor(path, name, "a type that weights have", found));
        }
        Ok(SourceTensor { name: name.to_owned(), dtype: info.dtype, shape: expected.clone() })
    }

    fn missing(&self, name: &str, native: &NativeTensor) -> Error {
        let full_indexer = matches!(native.name, TensorName::Layer(_, role) if role.is_indexer())
            .then_some(", because this layer selects positions with an indexer of its own");
        Error::tensor(
            self.set.path(),
            name,
            format!(
                "this tensor, for {}{}",
                native.name.native().unwrap_or_default(),
                full_indexer.unwrap_or_default()
            ),
            "no such tensor; the file is incomplete, get it again or convert the original model again",
        )
    }

    /// The tensors that no native tensor is made from, each with the reason; unknown ones are an error unless allowed.
    fn skipped(&self) -> Result<Vec<Skipped>, Error> {
        let mut skipped = Vec::new();
        let mut unknown: Vec<(usize, &str)> = Vec::new();
        if let Some((layers, reason)) = &self.model.unused_mtp {
            for layer in layers.clone() {
                let prefix = format!("blk.{layer}.");
                if !self.set.tensors().any(|(_, info)| info.name.starts_with(&prefix)) {
                    skipped.push(Skipped { tensor: format!("{prefix}*"), reason: reason.clone() });
                }
            }
        }
        for (part, info) in self.set.tensors().filter(|(_, info)| !self.used.contains(&info.name)) {
            if let Some(reason) = self.input_scale(&info.name) {
                skipped.push(Skipped { tensor: info.name.clone(), reason });
                continue;
            }
            let needed = |weight: &String| self.used.contains(weight) || self.reason(weight).is_none();
            if let Some(weight) = scaled_by(&info.name).filter(needed) {
                return Err(Error::tensor(
                    &self.set.parts()[part].path,
                    &info.name,
                    "scales of weights that are kept in their own type, named as llama.cpp names them (X.scale of X.weight)",
                    format!(
                        "one of {weight}; leaving it out would change the model, convert the original model again"
                    ),
                ));
            }
            if let Some(expected) = self.contradiction(&info.name) {
                let found =
                    "it as well, and leaving it out would change the model; convert the original model again";
                return Err(Error::tensor(&self.set.parts()[part].path, &info.name, expected, found));
            }
            match self.reason(&info.name) {
                Some(reason) => skipped.push(Skipped { tensor: info.name.clone(), reason }),
                None => unknown.push((part, &info.name)),
            }
        }
        match (unknown.first(), self.options.unknown) {
            (Some(&(part, tensor)), UnknownTensors::Refuse) => {
                return Err(Error::UnknownTensor {
                    path: self.set.parts()[part].path.clone(),
                    tensor: tensor.to_owned(),
                    count: unknown.len(),
                    architecture: self.model.architecture.to_owned(),
                });
            }
            _ => skipped.extend(unknown.into_iter().map(|(_, tensor)| Skipped {
                tensor: tensor.to_owned(),
                reason: "not known for this model; left out with --allow-unknown".to_owned(),
            })),
        }
        Ok(skipped)
    }

    /// Why a scale of a weight's input is left out; `None` for other tensors.
    fn input_scale(&self, name: &str) -> Option<String> {
        let base = name.strip_suffix(".input_scale")?;
        TensorName::from_gguf(&format!("{base}.weight"))?;
        Some(
            "it is for products with quantised activations, and activations are not quantised here"
                .to_owned(),
        )
    }

    /// What a layer has instead of a tensor that cannot be beside it; `None` for other tensors.
    fn contradiction(&self, name: &str) -> Option<String> {
        let TensorName::Layer(LayerIdx(layer), role) = TensorName::from_gguf(name)? else { return None };
        if self.model.unused_mtp.as_ref().is_some_and(|(layers, _)| layers.contains(&layer)) {
            return None;
        }
        let ffn = self.model.config.all_layers().nth(layer)?.ffn;
        Some(match role {
            _ if role.is_indexer() || role.is_mtp() => return None,
            LayerRole::QProj => format!("attn_q_a and attn_q_b alone in layer {layer}, for its queries"),
            LayerRole::QAProj | LayerRole::QALayernorm | LayerRole::QBProj => {
                format!("attn_q alone in layer {layer}, for its queries")
            }
            LayerRole::AttnKB | LayerRole::AttnVB => {
                format!("both halves of kv_b in layer {layer}, or attn_kv_b alone")
            }
            LayerRole::ExpertsGateUpProj => format!("gate and up projections alone in layer {layer}"),
            LayerRole::SharedExpertsGateProj
            | LayerRole::SharedExpertsUpProj
            | LayerRole::SharedExpertsDownProj
                if matches!(ffn, FfnConfig::Moe { .. }) =>
            {
                format!("no shared experts in layer {layer}, because expert_shared_count is 0")
            }
            _ => match ffn {
                FfnConfig::Dense { .. } => format!("the tensors of a dense layer in layer {layer}"),
                FfnConfig::Moe { .. } => {
                    format!("the tensors of a mixture-of-experts layer in layer {layer}")
                }
            },
        })
    }

    /// Why a tensor that no native tensor is made from is not needed; `None` when nothing is known of it.
    fn reason(&self, name: &str) -> Option<String> {
        if name == "rope_freqs.weight" {
            return Some("rotary frequencies are computed from the metadata".to_owned());
        }
        let config = &self.model.config;
        let name = TensorName::from_gguf(name)?;
        let (layer, role) = match name.scaled().unwrap_or(name) {
            TensorName::Layer(LayerIdx(layer), role) if layer < self.model.block_count => (layer, role),
            // A model uses each of its own tensors that it has, so this is the scale of one that is not there.
            _ => return None,
        };
        if let Some((layers, reason)) = &self.model.unused_mtp
            && layers.contains(&layer)
        {
            return Some(reason.clone());
        }
        let layer_config = config.all_layers().nth(layer)?;
        let reason = match role {
            _ if role.is_indexer() => match layer_config.indexer {
                _ if config.indexer.is_none() => "this model has no indexer".to_owned(),
                Some(IndexerRole::Shared) => {
                    format!(
                        "layer {layer} shares the selection of an earlier layer and has no use for an indexer"
                    )
                }
                _ => format!(
                    "the indexer of multi-token-prediction layer {layer} is not complete, so it is not used"
                ),
            },
            _ if role.is_mtp() => format!("layer {layer} is no multi-token-prediction layer"),
            _ => return None,
        };
        Some(reason)
    }
}

/// The weight that a tensor is a scale of, under whichever name. Leaving one out would silently change all its values.
fn scaled_by(name: &str) -> Option<String> {
    const ENDINGS: [&str; 4] = [".weight.scale", ".weight_scale_2", ".weight_scale", ".scale"];
    let base = ENDINGS.iter().find_map(|ending| name.strip_suffix(ending))?;
    let weight = format!("{base}.weight");
    TensorName::from_gguf(&weight).map(|_| weight)
}
