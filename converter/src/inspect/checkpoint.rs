//! Native checkpoints.

use super::gguf::pairs;
use super::{Inspection, of_tensor};
use crate::Error;
use crate::error::human_bytes;
use crate::plan::{stored, words};
use crate::table::{Align, table};
use formats::checkpoint::Checkpoint;
use formats::manifest::{ExpertCut, Layout, Manifest, RankManifest, Shard, TensorEntry, TransformKind};
use formats::{Dtype, Shape, TensorName};
use serde::Serialize;
use std::path::Path;

#[derive(Serialize)]
struct Report<'a> {
    path: String,
    #[serde(flatten)]
    manifest: &'a Manifest,
    tensors: Vec<TensorReport<'a>>,
}

#[derive(Serialize)]
struct TensorReport<'a> {
    name: &'a str,
    gguf: Option<String>,
    dtype: Dtype,
    full_shape: &'a Shape,
    transform: TransformKind,
    layout: &'a Layout,
    source: &'a [String],
    /// The native tensor that its values are multiplied by.
    #[serde(skip_serializing_if = "Option::is_none")]
    scale: Option<&'a str>,
    /// One for each rank.
    shards: Vec<ShardReport<'a>>,
}

#[derive(Serialize)]
struct ShardReport<'a> {
    rank: usize,
    file: &'a str,
    shard: Shard,
    shape: &'a Shape,
    bytes: (u64, u64),
}

pub(super) fn inspect(dir: &Path, tensor: Option<&str>) -> Result<Inspection, Error> {
    let checkpoint = Checkpoint::open(dir)?;
    let manifest = checkpoint.manifest();
    let ranks =
        (0..manifest.ranks).map(|rank| checkpoint.rank_manifest(rank)).collect::<Result<Vec<_>, _>>()?;
    match tensor {
        None => Ok(whole(dir, manifest, &ranks)),
        Some(name) => one(dir, name, &ranks),
    }
}

fn whole(dir: &Path, manifest: &Manifest, ranks: &[RankManifest]) -> Inspection {
    let m = &manifest.model;
    let names = |names: Vec<&str>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let bytes: u64 = manifest.rank_files.iter().map(|file| file.bytes).sum();
    let mtp = match m.mtp_layers.len() {
        0 => String::new(),
        n => format!(" + {n} MTP"),
    };
    let experts = match (&m.moe, manifest.experts) {
        (None, _) => "none".to_owned(),
        (Some(moe), cut) => format!(
            "{}, {} per token, every rank has {}",
            moe.n_routed_experts,
            moe.num_experts_per_tok,
            match cut {
                ExpertCut::Tensor => "a slice of each",
                ExpertCut::Expert => "some of them whole",
            }
        ),
    };
    let mut text = pairs(&[
        ("checkpoint", dir.display().to_string()),
        ("name", manifest.name.clone()),
        ("written by", manifest.tool.clone()),
        ("made from", names(manifest.sources.iter().map(|source| source.name.as_str()).collect())),
        (
            "model",
            format!(
                "{}{mtp} layers, hidden {}, {} heads, vocabulary {}",
                m.layers.len(),
                m.hidden_size,
                m.attention.num_attention_heads,
                m.vocab_size
            ),
        ),
        ("experts", experts),
        ("ranks", format!("{}, {} in all", manifest.ranks, human_bytes(bytes))),
        ("other files", names(manifest.files.iter().map(|file| file.file.as_str()).collect())),
        ("skipped", format!("{} tensors", manifest.skipped.len())),
    ]);
    text.push('\n');
    let rows: Vec<Vec<String>> = ranks[0]
        .tensors
        .iter()
        .map(|t| {
            vec![
                t.name.clone(),
                stored(t.dtype, &t.layout),
                t.full_shape.to_string(),
                t.shard.to_string(),
                human_bytes(t.bytes.1 - t.bytes.0),
            ]
        })
        .collect();
    use Align::{Left, Right};
    let columns =
        [("tensor", Left), ("type", Left), ("shape", Left), ("on rank 0", Left), ("size there", Right)];
    text.push_str(&table(&columns, &rows));
    let report = Report {
        path: dir.display().to_string(),
        manifest,
        tensors: ranks[0].tensors.iter().map(|t| tensor_report(t, ranks)).collect(),
    };
    Inspection::new(text, &report)
}

fn one(dir: &Path, name: &str, ranks: &[RankManifest]) -> Result<Inspection, Error> {
    let names = ranks[0].tensors.iter().map(|t| t.name.clone());
    of_tensor(dir, name, names, |native| {
        let entry = ranks[0].tensor(native)?;
        let report = tensor_report(entry, ranks);
        Some((details(entry, &report), report))
    })
}

fn details(entry: &TensorEntry, report: &TensorReport<'_>) -> String {
    let mut facts = vec![
        ("native name", entry.name.clone()),
        ("GGUF name", report.gguf.clone().unwrap_or_default()),
        ("type", entry.dtype.to_string()),
        ("shape", entry.full_shape.to_string()),
        ("made by", format!("{} from {}", words(entry.transform), entry.source.join(" and "))),
        ("layout", String::from(entry.layout.clone())),
    ];
    facts.extend(entry.scale.iter().map(|scale| ("multiplied by", scale.clone())));
    let mut text = pairs(&facts);
    text.push('\n');
    let rows: Vec<Vec<String>> = report
        .shards
        .iter()
        .map(|s| {
            vec![
                s.rank.to_string(),
                s.shard.to_string(),
                s.shape.to_string(),
                format!("{}..{}", s.bytes.0, s.bytes.1),
            ]
        })
        .collect();
    use Align::{Left, Right};
    text.push_str(&table(
        &[("rank", Right), ("part", Left), ("shape", Left), ("bytes of the file", Left)],
        &rows,
    ));
    text
}

fn tensor_report<'a>(entry: &'a TensorEntry, ranks: &'a [RankManifest]) -> TensorReport<'a> {
    let shards = ranks.iter().filter_map(|rank| {
        let own = rank.tensor(&entry.name)?;
        Some(ShardReport {
            rank: rank.rank,
            file: &rank.file,
            shard: own.shard,
            shape: &own.shape,
            bytes: own.bytes,
        })
    });
    TensorReport {
        name: &entry.name,
        gguf: TensorName::from_native(&entry.name).map(TensorName::gguf),
        dtype: entry.dtype,
        full_shape: &entry.full_shape,
        transform: entry.transform,
        layout: &entry.layout,
        source: &entry.source,
        scale: entry.scale.as_deref(),
        shards: shards.collect(),
    }
}
