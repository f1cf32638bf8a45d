//! Chunks of rank files as jobs: each is made from the mapped source in pieces that are hashed while they are in cache, and
//! written some pieces at a time; or, when it is there already, hashed.

use super::output::{BLOCK_BYTES, Block, Direct, Output};
use crate::Error;
use crate::chunks::{self, TensorHasher};
use crate::journal::Journal;
use crate::plan::{Placed, Plan, Planned};
use crate::transform::{Scratch, fill};
use crate::work::{Control, Stage};
use formats::digest::{CHUNK_BYTES, ChunkHasher};
use formats::gguf::GgufSet;
use formats::manifest::rank_file_name;
use formats::{Digest, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is to be read and made.
pub(super) struct Work<'a> {
    pub(super) set: &'a GgufSet,
    pub(super) plan: &'a Plan,
    /// Where the rank files lie.
    pub(super) dir: &'a Path,
    /// Which of them.
    pub(super) ranks: &'a [usize],
    pub(super) sources: Sources,
    pub(super) files: Files<'a>,
}

/// What becomes of the source's own digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sources {
    /// The whole source is read for them.
    Hash,
    /// They are not needed.
    Leave,
}

/// What becomes of the rank files.
#[derive(Clone, Copy, Debug)]
pub(super) enum Files<'a> {
    /// They are made, but for the chunks that an earlier run's journal proves.
    Make(&'a Journal),
    /// They are there, and only hashed.
    Hash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    /// Reads a chunk of a source file for its digest, and so for everyone who maps it.
    Source { part: usize, chunk: u64 },
    /// Makes a chunk of a rank file.
    Rank { rank: usize, chunk: u64 },
}

/// Digests of the chunks of all files.
pub(super) struct Digests {
    /// By part of the source; empty without [`Sources::Hash`].
    pub(super) sources: Vec<Vec<Digest>>,
    /// By rank.
    pub(super) ranks: BTreeMap<usize, Vec<ChunkDigests>>,
    /// Bytes of the chunks that were kept from an earlier run.
    pub(super) kept_bytes: u64,
}

/// Digests of a chunk, and of the tensors that lie in it whole, with their index in the file.
pub(super) struct ChunkDigests {
    pub(super) chunk: Digest,
    pub(super) tensors: Vec<(usize, Digest)>,
}

/// A worker's memory.
#[derive(Default)]
struct Memory {
    /// Of a file that is read.
    piece: Vec<u8>,
    /// Of a file that is written.
    block: Block,
    scratch: Scratch,
}

/// Does the work; every byte that was made is on the disk when this returns.
///
/// # Errors
/// An error naming the file or tensor.
pub(super) fn run(work: &Work<'_>, name: &'static str, control: &Control) -> Result<Digests, Error> {
    let Work { set, plan, dir, ranks, .. } = *work;
    let jobs = jobs(work);
    let views: Vec<Vec<TensorView>> =
        plan.tensors.iter().map(|tensor| views(set, tensor)).collect::<Result<_, Error>>()?;
    let kept_bytes = AtomicU64::new(0);
    let source_bytes = if work.sources == Sources::Hash { plan.source_bytes } else { 0 };
    let rank_bytes: u64 = ranks.iter().map(|&rank| plan.layouts[rank].bytes).sum();
    let stage = control.stage(name, source_bytes + rank_bytes);
    let maker = Maker { set, plan, views };
    let direct = Direct::new();
    let results = control.run(&jobs, |memory: &mut Memory, job| match *job {
        Job::Source { part, chunk } => {
            let part = &set.parts()[part];
            let chunk = chunks::hash_mapped(&part.path, part.file.bytes(), chunk, &stage, &mut memory.piece)?;
            Ok(ChunkDigests { chunk, tensors: Vec::new() })
        }
        Job::Rank { rank, chunk } => {
            let path = dir.join(rank_file_name(rank, plan.options.ranks));
            let Files::Make(journal) = work.files else {
                return hash_chunk(plan, rank, chunk, &path, &stage, memory);
            };
            if let Some(earlier) = journal.earlier(rank, chunk) {
                let digests = hash_chunk(plan, rank, chunk, &path, &stage, memory)?;
                if digests.chunk == earlier {
                    let len = plan.layouts[rank].bytes;
                    kept_bytes.fetch_add(CHUNK_BYTES.min(len - chunk * CHUNK_BYTES), Ordering::Relaxed);
                    return Ok(digests);
                }
            }
            let mut output = Output::open(&path, &direct)?;
            let digests = write_chunk(&maker, rank, chunk, &mut output, &stage, memory)?;
            journal.record(rank, chunk, digests.chunk, path)?;
            Ok(digests)
        }
    })?;
    if let Files::Make(journal) = work.files {
        journal.flush()?;
    }
    let mut digests = Digests {
        sources: vec![Vec::new(); set.parts().len()],
        ranks: ranks.iter().map(|&rank| (rank, Vec::new())).collect(),
        kept_bytes: kept_bytes.into_inner(),
    };
    let mut in_file_order: Vec<(Job, ChunkDigests)> = jobs.into_iter().zip(results).collect();
    in_file_order.sort_by_key(|(job, _)| match *job {
        Job::Source { chunk, .. } | Job::Rank { chunk, .. } => chunk,
    });
    for (job, digest) in in_file_order {
        match job {
            Job::Source { part, .. } => digests.sources[part].push(digest.chunk),
            Job::Rank { rank, .. } => digests.ranks.entry(rank).or_default().push(digest),
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
fn jobs(work: &Work<'_>) -> Vec<Job> {
    /// How far ahead of the ranks the source is read, in bytes of a rank file.
    const LEAD: u64 = 4 * CHUNK_BYTES;
    let Work { set, plan, ranks, .. } = *work;
    let mut jobs: Vec<(u64, Job)> = Vec::new();
    for layout in ranks.iter().map(|&rank| &plan.layouts[rank]) {
        let chunks = 0..layout.bytes.div_ceil(CHUNK_BYTES);
        jobs.extend(chunks.map(|chunk| (chunk * CHUNK_BYTES + LEAD, Job::Rank { rank: layout.rank, chunk })));
    }
    let first_use = first_uses(plan);
    let parts = if work.sources == Sources::Hash { set.parts() } else { &[] };
    for (part, file) in parts.iter().enumerate() {
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
    for Placed { tensor, bytes } in plan.layouts[0].placed.iter() {
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
    output: &mut Output<'_>,
    stage: &Stage,
    memory: &mut Memory,
) -> Result<ChunkDigests, Error> {
    let len = maker.plan.layouts[rank].bytes;
    let mut hasher = ChunkHasher::new(chunk * CHUNK_BYTES, len);
    let mut tensors = TensorHasher::new(&maker.plan.layouts[rank].placed, chunk);
    let Memory { block, scratch, .. } = memory;
    let mut pieces = chunks::pieces(chunk, len).peekable();
    while let Some(start) = pieces.peek().map(|piece| piece.start) {
        let mut filled = 0;
        while let Some(piece) = pieces.next_if(|piece| piece.end - start <= BLOCK_BYTES as u64) {
            let bytes = &mut block.bytes((piece.end - start) as usize)[filled..];
            maker.fill(rank, &piece, bytes, scratch)?;
            hasher.update(bytes);
            tensors.update(bytes, piece.start);
            filled += bytes.len();
        }
        output.write(block.bytes(filled), start)?;
        stage.advance(filled as u64);
    }
    Ok(ChunkDigests { chunk: hasher.finish(), tensors: tensors.finished })
}

/// The digests of a chunk that is there.
fn hash_chunk(
    plan: &Plan,
    rank: usize,
    chunk: u64,
    path: &Path,
    stage: &Stage,
    memory: &mut Memory,
) -> Result<ChunkDigests, Error> {
    let layout = &plan.layouts[rank];
    let mut tensors = TensorHasher::new(&layout.placed, chunk);
    let update = |piece: &[u8], start| tensors.update(piece, start);
    let chunk = chunks::hash_and(path, chunk, layout.bytes, stage, &mut memory.piece, update)?;
    Ok(ChunkDigests { chunk, tensors: tensors.finished })
}

/// Makes any stretch of any rank's file.
struct Maker<'a> {
    set: &'a GgufSet,
    plan: &'a Plan,
    /// Sources of each tensor.
    views: Vec<Vec<TensorView>>,
}

impl Maker<'_> {
    /// Writes bytes `range` of a rank's file to `piece`.
    fn fill(
        &self,
        rank: usize,
        range: &Range<u64>,
        piece: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let layout = &self.plan.layouts[rank];
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
            let views = &self.views[placed.tensor];
            fill(&tensor.transform, views, &tensor.region(rank), &tensor.layout, from, out, scratch)
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
