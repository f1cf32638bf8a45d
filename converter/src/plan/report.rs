//! A plan for people (a table) and for programs (JSON).

use super::{AxisCut, CutBy, NoTiles, PeakMemory, Plan, Planned, WeightLayout};
use crate::error::human_bytes;
use crate::table::{Align, table};
use crate::work::MAX_THREADS;
use formats::layout::{Layout, mma16};
use formats::manifest::{ExpertCut, Shard, Skipped, TransformKind, rank_file_name};
use formats::{Dtype, ModelConfig, Shape};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Everything that a plan says.
#[derive(Debug, Serialize)]
pub struct PlanReport<'a> {
    /// The model's name.
    pub name: &'a str,
    /// `general.architecture`
    pub architecture: &'a str,
    /// The model.
    pub model: &'a ModelConfig,
    /// Number of rank files.
    pub ranks: usize,
    /// How routed experts are cut.
    pub experts: ExpertCut,
    /// Bytes of the source's files.
    pub source_bytes: u64,
    /// Bytes that the checkpoint takes at most.
    pub disk_bytes: u64,
    /// Memory that the conversion takes at most.
    pub peak_memory: PeakMemory,
    /// How much larger the largest rank file is than the mean; 0 for an even cut.
    pub imbalance: f64,
    /// The rank files.
    pub rank_files: Vec<RankFileReport>,
    /// The tensors.
    pub tensors: Vec<TensorReport<'a>>,
    /// The source's tensors that are left out.
    pub skipped: &'a [Skipped],
}

/// A rank file.
#[derive(Debug, Serialize)]
pub struct RankFileReport {
    /// Its name.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Where its data section starts.
    pub data_start: u64,
}

/// A native tensor.
#[derive(Debug, Serialize)]
pub struct TensorReport<'a> {
    /// Native name.
    pub name: &'a str,
    /// Type in the checkpoint.
    pub dtype: Dtype,
    /// How its bytes are arranged.
    pub layout: &'a Layout,
    /// Over all ranks.
    pub shape: &'a Shape,
    /// What is done to the source's bytes.
    pub transform: TransformKind,
    /// The source's tensors that it is made from.
    pub sources: Vec<SourceReport<'a>>,
    /// What the cut is by; `None` when every rank has all of it.
    pub cut: Option<CutBy>,
    /// Which part each rank has.
    pub shards: Vec<Shard>,
    /// Bytes on each rank.
    pub bytes: Vec<u64>,
}

/// A tensor of the source.
#[derive(Debug, Serialize)]
pub struct SourceReport<'a> {
    /// GGUF name.
    pub name: &'a str,
    /// Type in the source.
    pub dtype: Dtype,
}

impl Plan {
    /// The plan as data.
    pub fn report(&self) -> PlanReport<'_> {
        let ranks = self.options.ranks;
        let tensors = self.tensors.iter().map(|tensor| TensorReport {
            name: &tensor.name,
            dtype: tensor.dtype(),
            layout: &tensor.layout,
            shape: &tensor.shape,
            transform: tensor.transform.kind(),
            sources: tensor
                .transform
                .sources()
                .into_iter()
                .map(|source| SourceReport { name: &source.name, dtype: source.dtype })
                .collect(),
            cut: tensor.cut.map(|cut| cut.by),
            shards: (0..ranks).map(|rank| tensor.shard(rank)).collect(),
            bytes: (0..ranks).map(|rank| tensor.shard_bytes(rank)).collect(),
        });
        PlanReport {
            name: &self.model.name,
            architecture: self.model.architecture,
            model: &self.model.config,
            ranks,
            experts: self.options.experts,
            source_bytes: self.source_bytes,
            disk_bytes: self.disk_bytes(),
            peak_memory: self.peak_memory(),
            imbalance: self.imbalance(),
            rank_files: self
                .layouts
                .iter()
                .map(|layout| RankFileReport {
                    file: rank_file_name(layout.rank, ranks),
                    bytes: layout.bytes,
                    data_start: layout.data_start,
                })
                .collect(),
            tensors: tensors.collect(),
            skipped: &self.skipped,
        }
    }

    /// The plan as lines of text.
    pub fn text(&self) -> String {
        let config = &self.model.config;
        let mut text = String::new();
        let moe = config.moe.as_ref().map_or(String::new(), |moe| {
            format!(", {} experts ({} per token)", moe.n_routed_experts, moe.num_experts_per_tok)
        });
        let mtp = match config.mtp_layers.len() {
            0 => String::new(),
            n => format!(" + {n} MTP"),
        };
        let _ = writeln!(
            text,
            "{} ({}): {}{mtp} layers, hidden {}, {} heads{moe}, vocabulary {}\n",
            self.model.name,
            self.model.architecture,
            config.layers.len(),
            config.hidden_size,
            config.attention.num_attention_heads,
            config.vocab_size,
        );
        let (columns, rows) = self.role_rows();
        text.push_str(&table(&columns, &rows));
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\n{}", self.cut_text());
        let _ = writeln!(
            text,
            "disk needed: {} (the source is {})",
            human_bytes(self.disk_bytes()),
            human_bytes(self.source_bytes)
        );
        let _ = writeln!(text, "memory needed: {}", self.memory_text());
        if let Some(tiles) = self.tiles_text() {
            let _ = writeln!(text, "layout mma16: {tiles}");
        }
        text.push_str(&self.skipped_text());
        text
    }

    /// How many tensors are in tiles, and why the others are not; `None` when nobody asked for tiles.
    fn tiles_text(&self) -> Option<String> {
        if self.options.layout != WeightLayout::Mma16 {
            return None;
        }
        let reasons: Vec<Option<NoTiles>> =
            self.tensors.iter().map(|tensor| tensor.keeps_from_tiles(self.options.ranks)).collect();
        let count =
            |wanted: &dyn Fn(NoTiles) -> bool| reasons.iter().flatten().filter(|&&r| wanted(r)).count();
        let names = |types: &mut dyn Iterator<Item = Dtype>| {
            types
                .map(|dtype| dtype.to_string())
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>()
                .join(", ")
        };
        let others = names(&mut reasons.iter().flatten().filter_map(|reason| match reason {
            NoTiles::Type(dtype) => Some(*dtype),
            _ => None,
        }));
        let taken = names(&mut mma16::MULTIPLIED.into_iter());
        let stay = [
            (
                count(&|r| matches!(r, NoTiles::Type(_))),
                format!("of types that it does not take ({others}; it takes {taken})"),
            ),
            (count(&|r| r == NoTiles::Parts), "whose parts are no whole tiles on every rank".to_owned()),
            (count(&|r| r == NoTiles::LookedUp), "whose rows are looked up".to_owned()),
            (count(&|r| r == NoTiles::Scaled), "which are multiplied by a scale of their own".to_owned()),
            (count(&|r| r == NoTiles::Computed), "in the precision that they need".to_owned()),
        ];
        let tiled = reasons.iter().filter(|reason| reason.is_none()).count();
        let mut text = format!("{tiled} tensors in tiles");
        for (count, why) in stay.iter().filter(|(count, _)| *count > 0) {
            let _ = write!(text, "; {count} stay ggml, {why}");
        }
        Some(text)
    }

    /// How even the rank files are.
    pub(super) fn cut_text(&self) -> String {
        let ranks = self.options.ranks;
        let sizes = || self.layouts.iter().map(|layout| layout.bytes);
        let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
        if ranks == 1 {
            return format!("1 rank file of {}", human_bytes(most));
        }
        if least == most {
            return format!("{ranks} rank files of {} each: an even cut", human_bytes(most));
        }
        format!(
            "{ranks} rank files of {} to {}: the largest is {:.1} % above the mean",
            human_bytes(least),
            human_bytes(most),
            self.imbalance() * 100.0
        )
    }

    pub(super) fn memory_text(&self) -> String {
        let PeakMemory { base, per_thread, most } = self.peak_memory();
        format!(
            "at most {} and {} for each thread, {} with {MAX_THREADS}, the most there are",
            human_bytes(base),
            human_bytes(per_thread),
            human_bytes(most)
        )
    }

    pub(super) fn imbalance(&self) -> f64 {
        let sizes = || self.layouts.iter().map(|layout| layout.bytes);
        let mean = sizes().sum::<u64>() as f64 / self.layouts.len() as f64;
        sizes().max().map_or(0.0, |most| most as f64 / mean - 1.0)
    }

    /// The tensors by role: columns, and a row for all tensors of a role that have the same types and the same cut; the last
    /// row is the total.
    pub(super) fn role_rows(&self) -> (Vec<(&'static str, Align)>, Vec<Vec<String>>) {
        struct Alike {
            key: [String; 5],
            count: usize,
            bytes: Vec<u64>,
        }
        let ranks = self.options.ranks;
        let mut alike: Vec<Alike> = Vec::new();
        for tensor in &self.tensors {
            let key = [
                role(tensor),
                from(tensor),
                stored(tensor.dtype(), &tensor.layout),
                words(tensor.transform.kind()).to_owned(),
                cut(tensor.cut.as_ref()),
            ];
            let index = alike.iter().position(|alike| alike.key == key).unwrap_or_else(|| {
                alike.push(Alike { key, count: 0, bytes: vec![0; ranks] });
                alike.len() - 1
            });
            alike[index].count += 1;
            for (rank, bytes) in alike[index].bytes.iter_mut().enumerate() {
                *bytes += tensor.shard_bytes(rank);
            }
        }
        let mut rows: Vec<Vec<String>> = alike
            .iter()
            .map(|Alike { key: [role, from, to, transform, cut], count, bytes }| {
                [role, &count.to_string(), from, to, transform, cut, &spread(bytes)]
                    .map(String::clone)
                    .to_vec()
            })
            .collect();
        let totals: Vec<u64> =
            (0..ranks).map(|rank| alike.iter().map(|alike| alike.bytes[rank]).sum()).collect();
        let blank = String::new;
        let count = self.tensors.len().to_string();
        rows.push(vec!["total".to_owned(), count, blank(), blank(), blank(), blank(), spread(&totals)]);
        use Align::{Left, Right};
        let columns = vec![
            ("tensor", Left),
            ("count", Right),
            ("from", Left),
            ("to", Left),
            ("transform", Left),
            ("cut", Left),
            ("bytes per rank", Right),
        ];
        (columns, rows)
    }

    /// The tensors that are left out, by reason, in the order of the source.
    pub(super) fn skipped_by_reason(&self) -> Vec<(&str, Vec<&str>)> {
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for Skipped { tensor, reason } in &self.skipped {
            match reasons.iter_mut().find(|(known, _)| known == reason) {
                Some((_, tensors)) => tensors.push(tensor),
                None => reasons.push((reason, vec![tensor])),
            }
        }
        reasons
    }

    fn skipped_text(&self) -> String {
        let mut text = match self.skipped.len() {
            0 => return "skipped: nothing\n".to_owned(),
            n => format!("skipped: {n}\n"),
        };
        for (reason, tensors) in self.skipped_by_reason() {
            let _ = writeln!(text, "  {}: {reason}", some_names(&tensors));
        }
        text
    }
}

/// The first few names, and how many more there are.
pub(super) fn some_names(names: &[&str]) -> String {
    const NAMED: usize = 3;
    let named = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// The native name with the layer's number left out.
fn role(tensor: &Planned) -> String {
    match tensor.role.layer() {
        None => tensor.name.clone(),
        // model.layers.N.
        Some(_) => format!("...{}", tensor.name.splitn(4, '.').last().unwrap_or_default()),
    }
}

fn from(tensor: &Planned) -> String {
    let types: Vec<&str> = tensor.transform.sources().iter().map(|source| source.dtype.name()).collect();
    types.join(" + ")
}

/// A type, with its layout where that is not GGUF's own.
pub(crate) fn stored(dtype: Dtype, layout: &Layout) -> String {
    match layout {
        Layout::Ggml => dtype.to_string(),
        other => format!("{dtype} {other}"),
    }
}

/// A transform in words.
pub(crate) fn words(kind: TransformKind) -> &'static str {
    match kind {
        TransformKind::Copy => "copy",
        TransformKind::Dequantize => "dequantize",
        TransformKind::JoinKvB => "join kv_b",
    }
}

fn cut(cut: Option<&AxisCut>) -> String {
    let Some(AxisCut { partition, by, .. }) = cut else { return "replicated".to_owned() };
    let (what, per) = match *by {
        CutBy::Heads { per_head } => ("heads", per_head),
        CutBy::Width => ("width", 1),
        CutBy::Vocabulary => ("vocabulary", 1),
        CutBy::Experts => ("experts", 1),
    };
    let len = |rank| {
        let range = partition.range(rank);
        (range.end - range.start) / per
    };
    let (most, least) = (len(0), len(partition.ranks() - 1));
    let share = if most == least { most.to_string() } else { format!("{most} or {}", least.min(most)) };
    format!("{what}: {share} of {}", partition.len() / per)
}

pub(super) fn spread(bytes: &[u64]) -> String {
    let (least, most) = (bytes.iter().min().copied().unwrap_or(0), bytes.iter().max().copied().unwrap_or(0));
    if least == most { human_bytes(most) } else { format!("{} to {}", human_bytes(least), human_bytes(most)) }
}
