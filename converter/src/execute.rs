//! Carries a plan out: every 16 MiB chunk of every rank file is a job of its own.
//!
//! A whole conversion works in `OUT.partial` and renames it. One of some ranks works beside OUT too, moves what is finished
//! into OUT, and leaves a record of what it was made from; [`finish`] makes a checkpoint of OUT when all ranks are there.
//!
//! Memory: a block of some pieces and at most one head of kv_b_proj for each worker, below 1 GiB in all, whatever the model's
//! size; mapped pages belong to the page cache.

mod make;
mod manifests;
mod output;
mod ranks;

pub use ranks::{convert_ranks, finish};

use crate::Error;
use crate::origin::Stamp;
use crate::plan::Plan;
use crate::side_files::SideFileBytes;
use crate::work::Control;
use crate::writer::{PartialDir, Unfinished, refuse_existing, settle_interrupted};
use formats::gguf::GgufSet;
use formats::manifest::rank_file_name;
use make::{Digests, Files, Sources, Work, run};
pub(crate) use output::BLOCK_BYTES;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What a conversion did.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The checkpoint.
    #[serde(serialize_with = "crate::lossy_path")]
    pub out: PathBuf,
    /// Number of rank files.
    pub ranks: usize,
    /// Tensors in each of them.
    pub tensors: usize,
    /// Tensors of the source that are not in them.
    pub skipped: usize,
    /// Bytes of the source's files.
    pub source_bytes: u64,
    /// Bytes of them that were needed: all, or, of some ranks alone, those that these ranks are made from.
    pub read_bytes: u64,
    /// Bytes of the rank files.
    pub rank_bytes: u64,
    /// Bytes of them that an earlier, interrupted run had made.
    pub kept_bytes: u64,
    /// Duration.
    pub seconds: f64,
}

impl Summary {
    fn new(
        out: &Path,
        plan: &Plan,
        ranks: &[usize],
        sources: Sources,
        kept_bytes: u64,
        start: Instant,
    ) -> Self {
        Self {
            out: out.to_owned(),
            ranks: ranks.len(),
            tensors: plan.tensors.len(),
            skipped: plan.skipped.len(),
            source_bytes: plan.source_bytes,
            read_bytes: match sources {
                Sources::Hash => plan.source_bytes,
                Sources::Leave => plan.source_bytes_of(ranks),
            },
            rank_bytes: ranks.iter().map(|&rank| plan.layouts[rank].bytes).sum(),
            kept_bytes,
            seconds: start.elapsed().as_secs_f64(),
        }
    }
}

/// Writes the checkpoint of `plan` to the directory `out`, which must not exist.
///
/// # Errors
/// An error naming the file or tensor. What is done is kept beside `out` for [`Unfinished::Resume`] when the error is not the
/// input's ([`Error::Kept`]); otherwise nothing is left behind.
pub fn convert(
    set: &GgufSet,
    plan: &Plan,
    side_files: &[SideFileBytes],
    out: &Path,
    unfinished: Unfinished,
    control: &Control,
) -> Result<Summary, Error> {
    let start = Instant::now();
    let stamp = Stamp::new(set, plan)?;
    let ranks: Vec<usize> = (0..plan.options.ranks).collect();
    if unfinished == Unfinished::Resume && settle_interrupted(out, &stamp)? {
        let summary = Summary::new(out, plan, &ranks, Sources::Hash, 0, start);
        return Ok(Summary { kept_bytes: summary.rank_bytes, ..summary });
    }
    refuse_existing(out)?;
    let dir = PartialDir::open(out, "", unfinished, &stamp)?;
    let side_bytes: u64 = side_files.iter().map(|file| file.bytes.len() as u64).sum();
    let made = make_ranks(set, plan, &dir, &ranks, Sources::Hash, side_bytes, control).and_then(|digests| {
        set.check_unchanged()?;
        manifests::write_all(set, plan, side_files, &digests, dir.path())?;
        control.check()?;
        dir.rename()?;
        Ok(digests.kept_bytes)
    });
    let kept_bytes = match made {
        Ok(kept_bytes) => kept_bytes,
        Err(e) => return Err(dir.abandon(e)),
    };
    dir.settle()?;
    Ok(Summary::new(out, plan, &ranks, Sources::Hash, kept_bytes, start))
}

/// Makes some rank files in the unfinished directory.
fn make_ranks(
    set: &GgufSet,
    plan: &Plan,
    dir: &PartialDir,
    ranks: &[usize],
    sources: Sources,
    more_bytes: u64,
    control: &Control,
) -> Result<Digests, Error> {
    dir.require_space(plan.disk_bytes_of(ranks.iter().copied()) + more_bytes)?;
    for &rank in ranks {
        dir.preallocate(&rank_file_name(rank, plan.options.ranks), plan.layouts[rank].bytes)?;
        control.check()?;
    }
    let files = Files::Make(dir.journal());
    run(&Work { set, plan, dir: dir.path(), ranks, sources, files }, "converting", control)
}
