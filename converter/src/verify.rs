//! Proves that a checkpoint is what was written, that its parts fit together, and, given the source, that they are the
//! source's own tensors.
//!
//! Nothing here uses the code that made the weights: places come from the manifests, and the source's bytes are looked up row
//! by row.

mod source;
mod structure;

use crate::Error;
use crate::chunks;
use crate::work::{Control, Stage};
use formats::checkpoint::{Checkpoint, RankShard};
use formats::digest::{CHUNK_BYTES, root_digest};
use formats::gguf::GgufSet;
use formats::manifest::{
    B3SUMS_FILE, MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, RankManifest, TransformKind,
};
use formats::map::open_regular;
use formats::{Digest, Error as FormatsError};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::io::{Read, Take};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What was proven, or what failed.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The checkpoint.
    #[serde(serialize_with = "crate::lossy_path")]
    pub dir: PathBuf,
    /// True without failures.
    pub ok: bool,
    /// Number of rank files.
    pub ranks: usize,
    /// Files whose digests were computed.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Tensors over all ranks, by name.
    pub tensors: usize,
    /// Those of them of which every rank has only a part.
    pub cut: usize,
    /// What the source proved.
    pub source: Option<SourceReport>,
    /// Duration.
    pub seconds: f64,
    /// One line each.
    pub failures: Vec<String>,
}

/// What the source proved.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SourceReport {
    /// Files of the source.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Tensors compared byte for byte.
    pub copied: usize,
    /// Tensors dequantised again and compared bit for bit.
    pub dequantized: usize,
    /// kv_b_proj tensors joined again and compared bit for bit.
    pub joined: usize,
}

/// Checks the checkpoint in `dir`; with `source`, any part of the GGUF files, also against those.
///
/// # Errors
/// When `dir` is no checkpoint or `source` no GGUF file. What is wrong with the checkpoint is in the report.
pub fn verify(dir: &Path, source: Option<&Path>, control: &Control) -> Result<Report, Error> {
    let start = Instant::now();
    let checkpoint = match Checkpoint::open(dir) {
        Err(e @ FormatsError::NotACheckpoint { .. }) => return Err(e.into()),
        opened => opened,
    };
    let set = source.map(GgufSet::open).transpose()?;
    let mut report = Report {
        dir: dir.to_owned(),
        ok: false,
        ranks: 0,
        files: 0,
        bytes: 0,
        tensors: 0,
        cut: 0,
        source: None,
        seconds: 0.0,
        failures: Vec::new(),
    };
    match checkpoint {
        Ok(checkpoint) => check(&checkpoint, set.as_ref(), control, &mut report)?,
        Err(e) => report.failures.push(e.to_string()),
    }
    // What was found of a source that became another one meanwhile says nothing, of it or of the checkpoint.
    set.as_ref().map_or(Ok(()), GgufSet::check_unchanged)?;
    report.ok = report.failures.is_empty();
    report.seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

fn check(
    checkpoint: &Checkpoint,
    set: Option<&GgufSet>,
    control: &Control,
    report: &mut Report,
) -> Result<(), Error> {
    let manifest = checkpoint.manifest();
    report.ranks = manifest.ranks;
    let shards: Vec<Option<RankShard>> = (0..manifest.ranks)
        .map(|rank| checkpoint.rank(rank).map_err(|e| report.failures.push(e.to_string())).ok())
        .collect();
    check_small_files(checkpoint, report);
    let open: Vec<&RankShard> = shards.iter().flatten().collect();
    for shard in &open {
        // A header that is damaged in one place is wrong in many.
        let mut wrong = structure::header_failures(shard).into_iter();
        if let Some(first) = wrong.next() {
            let more = match wrong.count() {
                0 => String::new(),
                more => format!("; {more} more faults in this header"),
            };
            report.failures.push(first + &more);
        }
    }
    let all: Option<Vec<&RankManifest>> =
        shards.iter().map(|shard| shard.as_ref().map(RankShard::manifest)).collect();
    if let Some(all) = &all {
        report.failures.extend(structure::failures(manifest, all));
        report.tensors = all[0].tensors.len();
        report.cut = structure::cut_count(all[0]);
    }
    let comparison = set.map(|set| source::Comparison::new(manifest, set, &open));
    if let Some(comparison) = &comparison {
        report.failures.extend(comparison.failures());
        report.source = Some(comparison.report());
    }
    let outcome = run(&open, comparison.as_ref(), control)?;
    report.files += open.len();
    report.bytes += open.iter().map(|shard| shard.manifest().bytes).sum::<u64>();
    report.failures.extend(outcome);
    // As of the source: what was found of several files in turn says nothing.
    report
        .failures
        .extend(open.iter().filter_map(|shard| shard.check_unchanged().err()).map(|e| e.to_string()));
    Ok(())
}

/// Manifests, side files and B3SUMS.
fn check_small_files(checkpoint: &Checkpoint, report: &mut Report) {
    let manifest = checkpoint.manifest();
    let mut sums = BTreeMap::new();
    for rank in &manifest.rank_files {
        sums.insert(rank.file.clone(), rank.blake3);
        sums.insert(rank.manifest.clone(), rank.manifest_blake3);
    }
    let mut failures = Vec::new();
    let mut read = |name: &str, bytes: Option<u64>| match hash_small_file(
        &checkpoint.dir().join(name),
        bytes.unwrap_or(MAX_MANIFEST_BYTES),
    ) {
        Ok((bytes, digest)) => {
            report.files += 1;
            report.bytes += bytes;
            Some((bytes, digest))
        }
        Err(e) => {
            report.failures.push(format!("{e}; copy or convert it again"));
            None
        }
    };
    for side in &manifest.files {
        sums.insert(side.file.clone(), side.blake3);
        let Some((bytes, digest)) = read(&side.file, Some(side.bytes)) else { continue };
        if (bytes, digest) != (side.bytes, side.blake3) {
            failures.push(format!(
                "{}: expected {} bytes of digest {}, found {bytes} bytes of {digest}; copy or convert it again",
                side.file, side.bytes, side.blake3,
            ));
        }
    }
    for rank in &manifest.rank_files {
        // Its digest was held against the top manifest when it was opened.
        read(&rank.manifest, None);
    }
    if let Some((_, digest)) = read(MANIFEST_FILE, None) {
        sums.insert(MANIFEST_FILE.to_owned(), digest);
    }
    let expected: BTreeSet<String> = sums.iter().map(|(name, digest)| format!("{digest}  {name}")).collect();
    let most = expected.iter().map(|line| line.len() as u64 + 1).sum();
    match read_at_most(&checkpoint.dir().join(B3SUMS_FILE), most) {
        Ok(bytes) => {
            report.files += 1;
            report.bytes += bytes.len() as u64;
            failures.extend(b3sums_failures(&bytes, &expected));
        }
        Err(e) => failures.push(format!("{e}; copy or convert it again")),
    }
    report.failures.extend(failures);
}

/// Size and digest of a regular file of at most `most` bytes. It is read in pieces: whatever lies there costs no memory.
fn hash_small_file(path: &Path, most: u64) -> Result<(u64, Digest), Error> {
    let mut hasher = blake3::Hasher::new();
    let bytes = std::io::copy(&mut open_at_most(path, most)?, &mut hasher)
        .map_err(|e| Error::io(path, "cannot read", e))?;
    Ok((bytes, hasher.finalize().into()))
}

/// A small regular file, of at most `most` bytes.
///
/// # Errors
/// [`Error::Io`] or [`Error::Input`] naming it.
pub(crate) fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    open_at_most(path, most)?.read_to_end(&mut bytes).map_err(|e| Error::io(path, "cannot read", e))?;
    Ok(bytes)
}

/// Opens a regular file of at most `most` bytes; of one that grows meanwhile no more are read.
fn open_at_most(path: &Path, most: u64) -> Result<Take<File>, Error> {
    let file = open_regular(path)?;
    let found = file.metadata().map_err(|e| Error::io(path, "cannot look at it", e))?.len();
    if found > most {
        let what = format!("expected at most {most} bytes, found {found}");
        return Err(Error::Input { path: path.to_owned(), what });
    }
    Ok(file.take(most))
}

/// Lines of B3SUMS that are not those of the manifests, or of checkpoint.json itself.
fn b3sums_failures(bytes: &[u8], expected: &BTreeSet<String>) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let found: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    let wrong =
        found.difference(expected).map(|line| format!("{B3SUMS_FILE}: {line:?} is not what the files say"));
    let missing =
        expected.difference(&found).map(|line| format!("{B3SUMS_FILE}: the line {line:?} is not there"));
    wrong.chain(missing).collect()
}

enum Job<'a> {
    /// Hash a chunk of a rank file.
    Chunk { shard: &'a RankShard, chunk: usize },
    /// Hash a chunk of a source file.
    Source { part: usize, chunk: u64 },
    /// Hold rows of a rank's tensor against the source.
    Compare(source::Piece<'a>),
    /// Hold a replicated tensor against rank 0's.
    Replica { first: &'a RankShard, shard: &'a RankShard, tensor: &'a str },
}

enum Outcome {
    Fine,
    Failure(String),
    /// Of a source file's chunk.
    Digest(Digest),
}

#[derive(Default)]
struct Memory {
    piece: Vec<u8>,
    rows: source::Rows,
}

/// Reads everything once, in the order of the files; tensors are compared soon after their chunks were read.
fn run(
    shards: &[&RankShard],
    comparison: Option<&source::Comparison<'_>>,
    control: &Control,
) -> Result<Vec<String>, Error> {
    const BEHIND: u64 = 4 * CHUNK_BYTES;
    let mut jobs: Vec<(u64, Job<'_>)> = Vec::new();
    for shard in shards {
        let chunks = 0..shard.manifest().chunks.len();
        jobs.extend(chunks.map(|chunk| (chunk as u64 * CHUNK_BYTES, Job::Chunk { shard, chunk })));
    }
    let mut total: u64 = shards.iter().map(|shard| shard.manifest().bytes).sum();
    let longest = shards.iter().map(|shard| shard.manifest().bytes).max().unwrap_or(0);
    match comparison {
        Some(comparison) => {
            let parts = comparison.set().parts();
            let source_bytes = comparison.set().total_len();
            total += source_bytes;
            let mut before = 0;
            for (part, file) in parts.iter().enumerate() {
                for chunk in 0..file.file.len().div_ceil(CHUNK_BYTES) {
                    let at = u128::from(before + chunk * CHUNK_BYTES);
                    let key = at * u128::from(longest) / u128::from(source_bytes.max(1));
                    jobs.push((key as u64, Job::Source { part, chunk }));
                }
                before += file.file.len();
            }
            jobs.extend(comparison.pieces().map(|piece| (piece.file_end() + BEHIND, Job::Compare(piece))));
        }
        None => jobs.extend(replicas(shards).map(|(key, job)| (key + BEHIND, job))),
    }
    jobs.sort_by_key(|(key, _)| *key);
    let stage = control.stage("verifying", total);
    let outcomes = control.run(&jobs, |memory: &mut Memory, (_, job)| {
        let outcome = match job {
            Job::Chunk { shard, chunk } => check_chunk(shard, *chunk, &stage, &mut memory.piece),
            Job::Source { part, chunk } => {
                let file = &comparison.expect("source chunks belong to a comparison").set().parts()[*part];
                let mapped = file.file.bytes();
                Outcome::Digest(chunks::hash_mapped(&file.path, mapped, *chunk, &stage, &mut memory.piece)?)
            }
            Job::Compare(piece) => piece.compare(&mut memory.rows)?.map_or(Outcome::Fine, Outcome::Failure),
            Job::Replica { first, shard, tensor } => compare_replica(first, shard, tensor),
        };
        Ok(outcome)
    })?;
    let mut failures = Vec::new();
    // A file that cannot be opened any more fails once, not with each of its chunks.
    let mut told = HashSet::new();
    let mut source_chunks: BTreeMap<usize, Vec<(u64, Digest)>> = BTreeMap::new();
    for ((_, job), outcome) in jobs.iter().zip(outcomes) {
        match (job, outcome) {
            (_, Outcome::Fine) => {}
            (_, Outcome::Failure(failure)) => {
                if told.insert(failure.clone()) {
                    failures.push(failure);
                }
            }
            (Job::Source { part, chunk }, Outcome::Digest(digest)) => {
                source_chunks.entry(*part).or_default().push((*chunk, digest));
            }
            (_, Outcome::Digest(_)) => unreachable!("only source chunks give a digest"),
        }
    }
    if let Some(comparison) = comparison {
        for (part, mut chunks) in source_chunks {
            chunks.sort_unstable_by_key(|(chunk, _)| *chunk);
            let digests: Vec<Digest> = chunks.into_iter().map(|(_, digest)| digest).collect();
            failures.extend(comparison.digest_failure(part, root_digest(&digests)));
        }
    }
    Ok(failures)
}

/// As [`RankShard::check_chunk`], but fast where the chunk is not in memory.
fn check_chunk(shard: &RankShard, chunk: usize, stage: &Stage, piece: &mut Vec<u8>) -> Outcome {
    let manifest = shard.manifest();
    match chunks::hash_mapped(shard.path(), shard.bytes(), chunk as u64, stage, piece) {
        Ok(digest) if digest == manifest.chunks[chunk] => return Outcome::Fine,
        Ok(_) => {}
        Err(e) => return Outcome::Failure(format!("rank {}: {e}", manifest.rank)),
    }
    Outcome::Failure(shard.damaged_chunk(chunk).to_string())
}

/// Jobs that hold every replicated tensor of ranks 1, 2, ... against rank 0's.
fn replicas<'a>(shards: &'a [&'a RankShard]) -> impl Iterator<Item = (u64, Job<'a>)> {
    let first = shards.first().copied();
    shards.iter().skip(1).flat_map(move |&shard| {
        let replicated = shard.manifest().tensors.iter().filter(|t| structure::is_replicated(t));
        replicated.filter_map(move |t| {
            first.map(|first| (t.bytes.1, Job::Replica { first, shard, tensor: t.name.as_str() }))
        })
    })
}

fn compare_replica(first: &RankShard, shard: &RankShard, tensor: &str) -> Outcome {
    let bytes = |shard: &RankShard| {
        let entry = shard.entry(tensor)?;
        Some(shard.bytes().slice(entry.bytes.0 as usize..entry.bytes.1 as usize))
    };
    if bytes(first) == bytes(shard) {
        return Outcome::Fine;
    }
    Outcome::Failure(format!(
        "rank {}: tensor {tensor} is replicated, but differs from rank {}'s; convert the model again",
        shard.manifest().rank,
        first.manifest().rank
    ))
}

/// Counts tensors by what was done to them.
fn count(manifest: &RankManifest, kind: TransformKind) -> usize {
    manifest.tensors.iter().filter(|t| t.transform == kind).count()
}

impl SourceReport {
    fn new(set: &GgufSet, manifest: Option<&RankManifest>) -> Self {
        let of = |kind| manifest.map_or(0, |manifest| count(manifest, kind));
        Self {
            files: set.parts().len(),
            bytes: set.total_len(),
            copied: of(TransformKind::Copy),
            dequantized: of(TransformKind::Dequantize),
            joined: of(TransformKind::JoinKvB),
        }
    }
}

/// The sources that a manifest names, for messages.
fn source_names(manifest: &Manifest) -> String {
    manifest.sources.iter().map(|source| source.name.as_str()).collect::<Vec<_>>().join(", ")
}
