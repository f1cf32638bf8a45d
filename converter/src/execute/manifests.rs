//! The manifests of a checkpoint and the files beside the weights.

use super::make::{ChunkDigests, Digests};
use crate::Error;
use crate::origin::TOOL;
use crate::plan::Plan;
use crate::side_files::{SideFileBytes, json};
use crate::writer::{sync_dir, write_file};
use formats::Digest;
use formats::digest::{CHUNK_BYTES, root_digest};
use formats::gguf::GgufSet;
use formats::manifest::{
    B3SUMS_FILE, FORMAT, FORMAT_VERSION, MANIFEST_FILE, Manifest, RankFile, RankManifest, SideFile,
    SourceFile, TensorEntry, rank_file_name, rank_manifest_name,
};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Writes everything but the weights, checkpoint.json last.
///
/// # Errors
/// [`Error::Io`] naming the file.
pub(super) fn write_all(
    set: &GgufSet,
    plan: &Plan,
    side_files: &[SideFileBytes],
    digests: &Digests,
    dir: &Path,
) -> Result<(), Error> {
    let ranks = plan.options.ranks;
    let mut sums: BTreeMap<String, Digest> = BTreeMap::new();
    let mut rank_files = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let manifest = rank_manifest(plan, rank, &digests.ranks[&rank]);
        let name = rank_manifest_name(rank, ranks);
        let bytes = json(&manifest);
        write_file(dir, &name, &bytes)?;
        let manifest_blake3 = Digest::of(&bytes);
        sums.insert(manifest.file.clone(), manifest.blake3);
        sums.insert(name.clone(), manifest_blake3);
        rank_files.push(RankFile {
            rank,
            file: manifest.file,
            bytes: manifest.bytes,
            blake3: manifest.blake3,
            manifest: name,
            manifest_blake3,
        });
    }
    let mut files = Vec::with_capacity(side_files.len());
    for SideFileBytes { name, bytes } in side_files {
        write_file(dir, name, bytes)?;
        let blake3 = Digest::of(bytes);
        sums.insert((*name).to_owned(), blake3);
        files.push(SideFile { file: (*name).to_owned(), bytes: bytes.len() as u64, blake3 });
    }
    let sources = set
        .parts()
        .iter()
        .zip(&digests.sources)
        .map(|(part, chunks)| SourceFile {
            name: part.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: part.file.len(),
            blake3: root_digest(chunks),
        })
        .collect();
    let manifest = Manifest {
        format: FORMAT.to_owned(),
        format_version: FORMAT_VERSION,
        tool: TOOL.to_owned(),
        name: plan.model.name.clone(),
        ranks,
        experts: plan.options.experts,
        model: plan.model.config.clone(),
        sources,
        rank_files,
        files,
        skipped: plan.skipped.clone(),
    };
    let bytes = json(&manifest);
    sums.insert(MANIFEST_FILE.to_owned(), Digest::of(&bytes));
    write_file(dir, B3SUMS_FILE, b3sums(&sums).as_bytes())?;
    // What the manifest speaks of is on the disk by name before it is there itself.
    sync_dir(dir)?;
    write_file(dir, MANIFEST_FILE, &bytes)
}

/// The digests of all files as `b3sum` prints them and `b3sum --check` reads them.
fn b3sums(sums: &BTreeMap<String, Digest>) -> String {
    sums.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect()
}

/// What a rank's manifest says.
pub(super) fn rank_manifest(plan: &Plan, rank: usize, digests: &[ChunkDigests]) -> RankManifest {
    let layout = &plan.layouts[rank];
    let chunks: Vec<Digest> = digests.iter().map(|digests| digests.chunk).collect();
    let own: HashMap<usize, Digest> =
        digests.iter().flat_map(|digests| digests.tensors.iter().copied()).collect();
    let tensors = layout.placed.iter().enumerate().map(|(index, placed)| {
        let tensor = &plan.tensors[placed.tensor];
        TensorEntry {
            name: tensor.name.clone(),
            dtype: tensor.dtype(),
            layout: tensor.layout.clone(),
            shape: tensor.shard_shape(rank),
            full_shape: tensor.shape.clone(),
            shard: tensor.shard(rank),
            bytes: (placed.bytes.start, placed.bytes.end),
            transform: tensor.transform.kind(),
            source: tensor.transform.sources().into_iter().map(|source| source.name.clone()).collect(),
            scale: tensor.scale.clone(),
            blake3: own.get(&index).copied(),
        }
    });
    RankManifest {
        format_version: FORMAT_VERSION,
        rank,
        ranks: plan.options.ranks,
        file: rank_file_name(rank, plan.options.ranks),
        bytes: layout.bytes,
        data_start: layout.data_start,
        blake3: root_digest(&chunks),
        chunk_bytes: CHUNK_BYTES,
        chunks,
        tensors: tensors.collect(),
    }
}
