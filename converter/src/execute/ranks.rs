//! Some ranks alone, and a checkpoint of ranks that were made apart.

use super::make::{Digests, Files, Sources, Work, run};
use super::manifests::{rank_manifest, write_all};
use super::{Summary, make_ranks};
use crate::Error;
use crate::journal::lock;
use crate::origin::{Origin, Stamp};
use crate::plan::Plan;
use crate::side_files::{SideFileBytes, json};
use crate::verify::read_at_most;
use crate::work::Control;
use crate::writer::{
    PartialDir, Unfinished, parent_and_name, refuse_existing, remove_if_there, rename, sync_dir, write_file,
};
use formats::gguf::GgufSet;
use formats::manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES, rank_file_name, rank_manifest_name};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Ending of the file beside a rank's that says what it was made from; it is there when the rank is whole.
const ORIGIN: &str = ".origin";
/// Held by [`finish`].
const LOCK_FILE: &str = "finish.lock";

/// Makes the files of some ranks and adds them to the directory `out`, which may hold other ranks of the same conversion.
/// Only what these ranks need of the source is read. `out` is no checkpoint before [`finish`].
///
/// # Errors
/// As [`super::convert`]; also when a rank is there already, unless an earlier run is resumed, and when `out` holds ranks of
/// another conversion.
pub fn convert_ranks(
    set: &GgufSet,
    plan: &Plan,
    ranks: &[usize],
    out: &Path,
    unfinished: Unfinished,
    control: &Control,
) -> Result<Summary, Error> {
    let start = Instant::now();
    let all = plan.options.ranks;
    let asked: Vec<usize> = ranks.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
    if let Some(&rank) = asked.iter().find(|&&rank| rank >= all) {
        return Err(Error::NoSuchRank { rank, ranks: all });
    }
    let stamp = Stamp::new(set, plan)?;
    refuse_finished(out)?;
    check_origins(out, &stamp.origin)?;
    let (there, missing): (Vec<usize>, Vec<usize>) =
        asked.iter().partition(|&&rank| origin_path(out, rank, all).exists());
    if unfinished == Unfinished::Refuse
        && let Some(&rank) = there.first()
    {
        return Err(Error::RankExists { path: origin_path(out, rank, all), rank });
    }
    let infix = format!(".ranks-{}-of-{all}", in_words(&asked));
    let dir = PartialDir::open(out, &infix, unfinished, &stamp)?;
    let made = make_ranks(set, plan, &dir, &missing, Sources::Leave, 0, control).and_then(|digests| {
        control.check()?;
        set.check_unchanged()?;
        add(plan, &missing, &digests, &stamp.origin, dir.path(), out, unfinished)?;
        Ok(digests.kept_bytes)
    });
    let kept_bytes = match made {
        Ok(kept_bytes) => kept_bytes,
        Err(e) => return Err(dir.abandon(e)),
    };
    dir.remove()?;
    let there_bytes: u64 = there.iter().map(|&rank| plan.layouts[rank].bytes).sum();
    Ok(Summary::new(out, plan, &asked, Sources::Leave, kept_bytes + there_bytes, start))
}

/// Makes a checkpoint of a directory that holds all ranks of a conversion, after reading all of them and the source once.
///
/// # Errors
/// An error naming the ranks that are not there, or the one whose file is not what its manifest says; `out` is no checkpoint
/// then.
pub fn finish(
    set: &GgufSet,
    plan: &Plan,
    side_files: &[SideFileBytes],
    out: &Path,
    control: &Control,
) -> Result<Summary, Error> {
    let start = Instant::now();
    if !out.is_dir() {
        let what = "there is no such directory; make its ranks first (shardmill convert --rank R)".to_owned();
        return Err(Error::Input { path: out.to_owned(), what });
    }
    let origin = Origin::new(set, plan)?;
    let lock_path = out.join(LOCK_FILE);
    let lock_file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&lock_path)
        .map_err(|e| Error::io(&lock_path, "cannot create the file", e))?;
    lock(&lock_file, &lock_path, out)?;
    let ranks: Vec<usize> = (0..plan.options.ranks).collect();
    let finished = check_and_write(set, plan, side_files, &ranks, &origin, out, control);
    let unlocked = remove_if_there(&lock_path);
    finished?;
    unlocked?;
    // The records go last: as long as one is left, a run that was interrupted here can be repeated.
    for &rank in &ranks {
        remove_if_there(&origin_path(out, rank, ranks.len()))?;
    }
    sync_dir(out)?;
    Ok(Summary::new(out, plan, &ranks, Sources::Hash, 0, start))
}

fn check_and_write(
    set: &GgufSet,
    plan: &Plan,
    side_files: &[SideFileBytes],
    ranks: &[usize],
    origin: &Origin,
    out: &Path,
    control: &Control,
) -> Result<(), Error> {
    let all = ranks.len();
    let records = check_origins(out, origin)?;
    if out.join(MANIFEST_FILE).exists() {
        return if records == 0 { refuse_existing(out) } else { Ok(()) };
    }
    let missing: Vec<usize> =
        ranks.iter().copied().filter(|&rank| !origin_path(out, rank, all).exists()).collect();
    if !missing.is_empty() {
        let ranks = format!("ranks {} of {all}", in_words(&missing));
        return Err(Error::MissingRanks { path: out.to_owned(), ranks });
    }
    let differs = |rank| Error::RankDiffers { path: out.to_owned(), rank, origin: origin_name(rank, all) };
    for &rank in ranks {
        let path = out.join(rank_file_name(rank, all));
        let metadata = fs::metadata(&path).map_err(|e| Error::io(&path, "cannot read its size", e))?;
        if metadata.len() != plan.layouts[rank].bytes {
            return Err(differs(rank));
        }
    }
    let work = Work { set, plan, dir: out, ranks, sources: Sources::Hash, files: Files::Hash };
    let digests = run(&work, "finishing", control)?;
    for &rank in ranks {
        let path = out.join(rank_manifest_name(rank, all));
        let found = read_at_most(&path, MAX_MANIFEST_BYTES)?;
        if found != json(&rank_manifest(plan, rank, &digests.ranks[&rank])) {
            return Err(differs(rank));
        }
    }
    control.check()?;
    set.check_unchanged()?;
    write_all(set, plan, side_files, &digests, out)?;
    sync_dir(out)
}

/// Moves finished ranks from `from` to `out`; each is there with its record, or not at all.
///
/// Other runs may have added theirs since the work began: what is there is looked at again while nobody else adds, and one of
/// the same conversion stays as it is.
fn add(
    plan: &Plan,
    ranks: &[usize],
    digests: &Digests,
    origin: &Origin,
    from: &Path,
    out: &Path,
    unfinished: Unfinished,
) -> Result<(), Error> {
    match fs::create_dir(out) {
        Ok(()) => sync_dir(&parent_and_name(out)?.0)?,
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
        Err(e) => return Err(Error::io(out, "cannot create the directory", e)),
    }
    let _lock = wait_for(out)?;
    refuse_finished(out)?;
    check_origins(out, origin)?;
    let all = plan.options.ranks;
    for &rank in ranks {
        let path = origin_path(out, rank, all);
        match unfinished {
            _ if !path.exists() => {}
            Unfinished::Refuse => return Err(Error::RankExists { path, rank }),
            Unfinished::Resume => continue,
        }
        let (file, manifest) = (rank_file_name(rank, all), rank_manifest_name(rank, all));
        write_file(from, &manifest, &json(&rank_manifest(plan, rank, &digests.ranks[&rank])))?;
        for name in [&file, &manifest] {
            rename(&from.join(name), &out.join(name))?;
        }
        sync_dir(out)?;
        write_file(out, &origin_name(rank, all), &json(origin))?;
    }
    sync_dir(out)
}

/// Waits until no other run adds to `out`, which takes it no longer than some names and a flush; held until the file is closed.
fn wait_for(out: &Path) -> Result<File, Error> {
    let dir = File::open(out).map_err(|e| Error::io(out, "cannot open the directory", e))?;
    match dir.lock() {
        Ok(()) => Ok(dir),
        // A file system that knows no locks, or none of directories: what is there was looked at before.
        Err(e) if matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput) => Ok(dir),
        Err(e) => Err(Error::io(out, "cannot lock", e)),
    }
}

/// Nothing is added to a checkpoint, or to what is no directory.
fn refuse_finished(out: &Path) -> Result<(), Error> {
    if out.is_dir() && !out.join(MANIFEST_FILE).exists() { Ok(()) } else { refuse_existing(out) }
}

/// Holds the record of every rank in `out` against this conversion; how many there are.
fn check_origins(out: &Path, expected: &Origin) -> Result<usize, Error> {
    let io = |e| Error::io(out, "cannot list it", e);
    let entries = match fs::read_dir(out) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(0),
        entries => entries.map_err(io)?,
    };
    let mut count = 0;
    for entry in entries {
        let path = entry.map_err(io)?.path();
        if !path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(ORIGIN)) {
            continue;
        }
        let bytes = read_at_most(&path, MAX_MANIFEST_BYTES)?;
        let difference = match serde_json::from_slice(&bytes) {
            Ok(found) => expected.difference(&found),
            Err(_) => Some("expected one by this version, found something else".to_owned()),
        };
        if let Some(difference) = difference {
            return Err(Error::OtherConversion { path, difference });
        }
        count += 1;
    }
    Ok(count)
}

fn origin_name(rank: usize, ranks: usize) -> String {
    format!("rank-{rank}-of-{ranks}{ORIGIN}")
}

fn origin_path(out: &Path, rank: usize, ranks: usize) -> PathBuf {
    out.join(origin_name(rank, ranks))
}

/// `0-3,7`: sorted ranks with runs joined.
fn in_words(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        single => single.iter().map(usize::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(",")
}
