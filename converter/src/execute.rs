//! Carries a plan out: every 16 MiB chunk of every rank file is a job of its own, made from the mapped source in pieces that
//! are hashed and written while they are in cache.
//!
//! Memory: one piece and at most one head of kv_b_proj for each worker, below 1 GiB in all, whatever the model's size; mapped
//! pages belong to the page cache.

use crate::Error;
use crate::chunks;
use crate::plan::{Placed, Plan, Planned};
use crate::side_files::{SideFileBytes, json};
use crate::transform::{Scratch, fill};
use crate::work::{Control, Stage};
use crate::writer::{PartialDir, sync};
use formats::digest::{CHUNK_BYTES, ChunkHasher, root_digest};
use formats::gguf::GgufSet;
use formats::manifest::{
    B3SUMS_FILE, FORMAT, FORMAT_VERSION, Layout, MANIFEST_FILE, Manifest, RankFile, RankManifest, SideFile,
    SourceFile, TensorEntry, rank_file_name, rank_manifest_name,
};
use formats::{Digest, TensorView};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What a conversion did.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The checkpoint.
    pub out: PathBuf,
    /// Number of rank files.
    pub ranks: usize,
    /// Tensors in each of them.
    pub tensors: usize,
    /// Tensors of the source that are not in them.
    pub skipped: usize,
    /// Bytes of the source's files.
    pub source_bytes: u64,
    /// Bytes of the rank files.
    pub rank_bytes: u64,
    /// Duration.
    pub seconds: f64,
}

/// Writes the checkpoint of `plan` to the directory `out`, which must not exist.
///
/// # Errors
/// An error naming the file or tensor; nothing is left behind then.
pub fn convert(
    set: &GgufSet,
    plan: &Plan,
    side_files: &[SideFileBytes],
    out: &Path,
    control: &Control,
) -> Result<Summary, Error> {
    let start = Instant::now();
    let dir = PartialDir::create(out)?;
    let side_bytes: u64 = side_files.iter().map(|file| file.bytes.len() as u64).sum();
    dir.require_space(plan.disk_bytes() + side_bytes)?;
    for layout in &plan.layouts {
        dir.preallocate(&rank_file_name(layout.rank, plan.options.ranks), layout.bytes)?;
    }
    let digests = run(set, plan, &dir, control)?;
    let written = write_manifests(set, plan, side_files, &digests, &dir)?;
    control.check()?;
    dir.commit()?;
    Ok(Summary {
        out: out.to_owned(),
        ranks: plan.options.ranks,
        tensors: plan.tensors.len(),
        skipped: written.skipped.len(),
        source_bytes: plan.source_bytes,
        rank_bytes: written.rank_files.iter().map(|file| file.bytes).sum(),
        seconds: start.elapsed().as_secs_f64(),
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    /// Reads a chunk of a source file for its digest, and so for everyone who maps it.
    Source { part: usize, chunk: u64 },
    /// Makes a chunk of a rank file.
    Rank { rank: usize, chunk: u64 },
}

/// Digests of the chunks of all files.
struct Digests {
    sources: Vec<Vec<Digest>>,
    ranks: Vec<Vec<ChunkDigests>>,
}

/// Digests of a chunk, and of the tensors that lie in it whole, with their index in the file.
struct ChunkDigests {
    chunk: Digest,
    tensors: Vec<(usize, Digest)>,
}

/// A worker's memory.
#[derive(Default)]
struct Memory {
    piece: Vec<u8>,
    scratch: Scratch,
}

fn run(set: &GgufSet, plan: &Plan, dir: &PartialDir, control: &Control) -> Result<Digests, Error> {
    let jobs = jobs(set, plan);
    let views: Vec<Vec<TensorView>> =
        plan.tensors.iter().map(|tensor| views(set, tensor)).collect::<Result<_, Error>>()?;
    let chunks_left: Vec<AtomicU64> =
        plan.layouts.iter().map(|layout| AtomicU64::new(layout.bytes.div_ceil(CHUNK_BYTES))).collect();
    let rank_bytes: u64 = plan.layouts.iter().map(|layout| layout.bytes).sum();
    let stage = control.stage("converting", plan.source_bytes + rank_bytes);
    let maker = Maker { set, plan, views };
    let results = control.run(&jobs, |memory: &mut Memory, job| {
        let digest = match *job {
            Job::Source { part, chunk } => {
                let part = &set.parts()[part];
                let chunk = chunks::hash(&part.path, chunk, part.file.len(), &stage, &mut memory.piece)?;
                ChunkDigests { chunk, tensors: Vec::new() }
            }
            Job::Rank { rank, chunk } => {
                let path = dir.path(&rank_file_name(rank, plan.options.ranks));
                let digest = write_chunk(&maker, rank, chunk, &path, &stage, memory)?;
                if chunks_left[rank].fetch_sub(1, Ordering::AcqRel) == 1 {
                    sync(&open_for_writing(&path)?, &path)?;
                }
                digest
            }
        };
        Ok(digest)
    })?;
    let mut digests = Digests {
        sources: vec![Vec::new(); set.parts().len()],
        ranks: plan.layouts.iter().map(|_| Vec::new()).collect(),
    };
    let mut in_file_order: Vec<(Job, ChunkDigests)> = jobs.into_iter().zip(results).collect();
    in_file_order.sort_by_key(|(job, _)| match *job {
        Job::Source { chunk, .. } | Job::Rank { chunk, .. } => chunk,
    });
    for (job, digest) in in_file_order {
        match job {
            Job::Source { part, .. } => digests.sources[part].push(digest.chunk),
            Job::Rank { rank, .. } => digests.ranks[rank].push(digest),
        }
    }
    Ok(digests)
}

fn views(set: &GgufSet, tensor: &Planned) -> Result<Vec<TensorView>, Error> {
    let view = |name: &str| match set.view(name)? {
        Some(view) => Ok(view),
        None => Err(Error::tensor(set.path(), name, "the tensor that was planned with", "none")),
    };
    tensor.transform.sources().into_iter().map(|source| view(&source.name)).collect()
}

/// All jobs: chunk by chunk over all ranks, so that they read the source about once and in order; each chunk of the source
/// is hashed shortly before the ranks first need it.
fn jobs(set: &GgufSet, plan: &Plan) -> Vec<Job> {
    /// How far ahead of the ranks the source is read, in bytes of a rank file.
    const LEAD: u64 = 4 * CHUNK_BYTES;
    let mut jobs: Vec<(u64, Job)> = Vec::new();
    for layout in &plan.layouts {
        let chunks = 0..layout.bytes.div_ceil(CHUNK_BYTES);
        jobs.extend(chunks.map(|chunk| (chunk * CHUNK_BYTES + LEAD, Job::Rank { rank: layout.rank, chunk })));
    }
    let first_use = first_uses(plan);
    for (part, file) in set.parts().iter().enumerate() {
        let mut tensors: Vec<(&Range<u64>, Option<&Range<u64>>)> =
            file.file.tensors.iter().map(|info| (&info.bytes, first_use.get(info.name.as_str()))).collect();
        tensors.sort_by_key(|(bytes, _)| bytes.start);
        // Chunks that nobody needs are read with the one before.
        let mut key = 0;
        for chunk in 0..file.file.len().div_ceil(CHUNK_BYTES) {
            let range = chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES;
            let first = tensors.partition_point(|(bytes, _)| bytes.end <= range.start);
            let needed = tensors[first..]
                .iter()
                .take_while(|(bytes, _)| bytes.start < range.end)
                .filter_map(|(bytes, place)| place.map(|place| scale(range.start, bytes, place)))
                .min();
            key = needed.unwrap_or(key);
            jobs.push((key, Job::Source { part, chunk }));
        }
    }
    jobs.sort_by_key(|(key, _)| *key);
    jobs.into_iter().map(|(_, job)| job).collect()
}

/// Where in rank 0's file each source tensor ends up first.
fn first_uses(plan: &Plan) -> HashMap<&str, Range<u64>> {
    let mut uses: HashMap<&str, Range<u64>> = HashMap::new();
    for Placed { tensor, bytes } in &plan.layouts[0].placed {
        for source in plan.tensors[*tensor].transform.sources() {
            uses.entry(&source.name).or_insert(bytes.clone());
        }
    }
    uses
}

/// The position in `to` that corresponds to `at` in `from`.
fn scale(at: u64, from: &Range<u64>, to: &Range<u64>) -> u64 {
    let within = u128::from(at.saturating_sub(from.start));
    let length = u128::from((from.end - from.start).max(1));
    to.start + (within * u128::from(to.end - to.start) / length) as u64
}

fn write_chunk(
    maker: &Maker<'_>,
    rank: usize,
    chunk: u64,
    path: &Path,
    stage: &Stage,
    memory: &mut Memory,
) -> Result<ChunkDigests, Error> {
    let len = maker.plan.layouts[rank].bytes;
    let file = open_for_writing(path)?;
    let mut hasher = ChunkHasher::new(chunk * CHUNK_BYTES, len);
    let mut tensors = TensorHasher::new(&maker.plan.layouts[rank].placed, chunk);
    for range in chunks::pieces(chunk, len) {
        maker.fill(rank, &range, memory)?;
        hasher.update(&memory.piece);
        tensors.update(&memory.piece, range.start);
        let action = || format!("cannot write {} bytes at byte {}", memory.piece.len(), range.start);
        file.write_all_at(&memory.piece, range.start).map_err(|e| Error::io(path, action(), e))?;
        stage.advance(memory.piece.len() as u64);
    }
    Ok(ChunkDigests { chunk: hasher.finish(), tensors: tensors.finished })
}

/// Hashes the tensors that lie in one chunk whole, as the chunk's pieces come by.
struct TensorHasher<'a> {
    placed: &'a [Placed],
    /// The tensor that is being hashed.
    next: usize,
    chunk_end: u64,
    hasher: blake3::Hasher,
    /// Those tensors, with their index in the file.
    finished: Vec<(usize, Digest)>,
}

impl<'a> TensorHasher<'a> {
    fn new(placed: &'a [Placed], chunk: u64) -> Self {
        let start = chunk * CHUNK_BYTES;
        Self {
            placed,
            next: placed.partition_point(|placed| placed.bytes.start < start),
            chunk_end: start + CHUNK_BYTES,
            hasher: blake3::Hasher::new(),
            finished: Vec::new(),
        }
    }

    /// The bytes of the file from `start` on.
    fn update(&mut self, piece: &[u8], start: u64) {
        let end = start + piece.len() as u64;
        let inside = |bytes: &Range<u64>, chunk_end| bytes.start < end && bytes.end <= chunk_end;
        while let Some(Placed { bytes, .. }) =
            self.placed.get(self.next).filter(|placed| inside(&placed.bytes, self.chunk_end))
        {
            let from = bytes.start.max(start) - start;
            self.hasher.update(&piece[from as usize..(bytes.end.min(end) - start) as usize]);
            if bytes.end > end {
                return;
            }
            if !bytes.is_empty() {
                self.finished.push((self.next, self.hasher.finalize().into()));
            }
            self.hasher.reset();
            self.next += 1;
        }
    }
}

/// Makes any stretch of any rank's file.
struct Maker<'a> {
    set: &'a GgufSet,
    plan: &'a Plan,
    /// Sources of each tensor.
    views: Vec<Vec<TensorView>>,
}

impl Maker<'_> {
    /// Leaves bytes `range` of a rank's file in `memory.piece`.
    fn fill(&self, rank: usize, range: &Range<u64>, memory: &mut Memory) -> Result<(), Error> {
        let layout = &self.plan.layouts[rank];
        let Memory { piece, scratch } = memory;
        piece.resize((range.end - range.start) as usize, 0);
        let overlap = |bytes: &Range<u64>| bytes.start.max(range.start)..bytes.end.min(range.end);
        let within =
            |bytes: &Range<u64>| (bytes.start - range.start) as usize..(bytes.end - range.start) as usize;
        let header = overlap(&(0..layout.data_start));
        if !header.is_empty() {
            let bytes = &self.plan.header(rank)[header.start as usize..header.end as usize];
            piece[within(&header)].copy_from_slice(bytes);
        }
        let first = layout.placed.partition_point(|placed| placed.bytes.end <= range.start);
        for placed in layout.placed[first..].iter().take_while(|placed| placed.bytes.start < range.end) {
            let bytes = overlap(&placed.bytes);
            if bytes.is_empty() {
                continue;
            }
            let tensor = &self.plan.tensors[placed.tensor];
            let from = bytes.start - placed.bytes.start;
            let out = &mut piece[within(&bytes)];
            fill(&tensor.transform, &self.views[placed.tensor], &tensor.region(rank), from, out, scratch)
                .map_err(|e| e.in_file(source_path(self.set, tensor)))?;
        }
        Ok(())
    }
}

/// The file of a tensor's first source.
fn source_path<'a>(set: &'a GgufSet, tensor: &Planned) -> &'a Path {
    let source = &tensor.transform.sources()[0].name;
    set.info(source).map_or(set.path(), |(part, _)| &set.parts()[part].path)
}

/// Files are opened for each chunk: 1024 ranks are more than a process may keep open.
fn open_for_writing(path: &Path) -> Result<File, Error> {
    OpenOptions::new().write(true).open(path).map_err(|e| Error::io(path, "cannot open", e))
}

/// Writes everything but the weights, checkpoint.json last.
fn write_manifests(
    set: &GgufSet,
    plan: &Plan,
    side_files: &[SideFileBytes],
    digests: &Digests,
    dir: &PartialDir,
) -> Result<Manifest, Error> {
    let ranks = plan.options.ranks;
    let mut sums: BTreeMap<String, Digest> = BTreeMap::new();
    let mut rank_files = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let manifest = rank_manifest(plan, rank, &digests.ranks[rank]);
        let name = rank_manifest_name(rank, ranks);
        let bytes = json(&manifest);
        dir.write(&name, &bytes)?;
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
        dir.write(name, bytes)?;
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
        tool: concat!("shardmill ", env!("CARGO_PKG_VERSION")).to_owned(),
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
    dir.write(B3SUMS_FILE, b3sums(&sums).as_bytes())?;
    dir.write(MANIFEST_FILE, &bytes)?;
    Ok(manifest)
}

/// The digests of all files as `b3sum` prints them and `b3sum --check` reads them.
pub(crate) fn b3sums(sums: &BTreeMap<String, Digest>) -> String {
    sums.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect()
}

fn rank_manifest(plan: &Plan, rank: usize, digests: &[ChunkDigests]) -> RankManifest {
    let layout = &plan.layouts[rank];
    let chunks: Vec<Digest> = digests.iter().map(|digests| digests.chunk).collect();
    let own: HashMap<usize, Digest> =
        digests.iter().flat_map(|digests| digests.tensors.iter().copied()).collect();
    let tensors = layout.placed.iter().enumerate().map(|(index, placed)| {
        let tensor = &plan.tensors[placed.tensor];
        TensorEntry {
            name: tensor.name.clone(),
            dtype: tensor.dtype(),
            layout: Layout::Ggml,
            shape: tensor.shard_shape(rank),
            full_shape: tensor.shape.clone(),
            shard: tensor.shard(rank),
            bytes: (placed.bytes.start, placed.bytes.end),
            transform: tensor.transform.kind(),
            source: tensor.transform.sources().into_iter().map(|source| source.name.clone()).collect(),
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
