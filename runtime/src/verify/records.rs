//! Which rank files have been right before, so that a start need not read them whole.
//!
//! A record says which file it was (device, inode, length, the times of its last write and last change) and which digest its
//! bytes had. It counts for exactly that file and digest: writing, copying, renaming or another manifest makes the file unseen
//! again. What no record can tell is a disk that loses bits by itself; `--verify=always` and `--scrub-interval` are for that.

use crate::rank::RankPart;
use formats::Digest;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// More records than this are not kept: the oldest go.
const MOST: usize = 4096;
/// A record is smaller.
const MOST_BYTES: u64 = 64 << 10;

/// The folder of records: `$XDG_CACHE_HOME/shardrun/verified`, or below `$HOME/.cache`; where neither is set there are none.
#[derive(Clone, Debug)]
pub struct Records(Option<PathBuf>);

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    path: PathBuf,
    state: [i128; 7],
    blake3: Digest,
}

impl Record {
    fn of(part: &RankPart) -> Self {
        let manifest = part.shard.manifest();
        let path = std::path::absolute(part.shard.path()).unwrap_or_else(|_| part.shard.path().to_owned());
        Self { path, state: part.shard.state().words(), blake3: manifest.blake3 }
    }

    fn file(&self, folder: &Path) -> PathBuf {
        let name = Digest::of(self.path.as_os_str().as_encoded_bytes()).to_string();
        folder.join(format!("{}.json", &name[..32]))
    }
}

impl Records {
    /// The user's, by the rules of the XDG base directory specification.
    pub fn of_user() -> Self {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
        Self(cache.map(|cache| cache.join("shardrun").join("verified")))
    }

    /// Those of a folder.
    pub fn at(folder: &Path) -> Self {
        Self(Some(folder.to_owned()))
    }

    /// Whether this very file was found right before. A record that cannot be read, or is none, is no record.
    pub fn has(&self, part: &RankPart) -> bool {
        let Some(folder) = &self.0 else { return false };
        let record = Record::of(part);
        let mut text = String::new();
        let read = std::fs::File::open(record.file(folder))
            .and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text));
        read.is_ok() && serde_json::from_str::<Record>(&text).is_ok_and(|found| found == record)
    }

    /// Notes that this file was found right. One that was written to meanwhile is not noted, and a record that cannot be
    /// written costs the next start time only.
    pub fn note(&self, part: &RankPart) {
        let Some(folder) = &self.0 else { return };
        if !part.watch.is_unchanged() {
            return;
        }
        let record = Record::of(part);
        if let Err(error) = write(folder, &record) {
            tracing::debug!("{}: no record of {}: {error}", folder.display(), record.path.display());
        }
    }
}

/// Under another name first, so that no reader sees a part.
fn write(folder: &Path, record: &Record) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let path = record.file(folder);
    if !path.exists() {
        make_room(folder)?;
    }
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = std::fs::write(&partial, serde_json::to_vec(record)?);
    let renamed = written.and_then(|()| std::fs::rename(&partial, &path));
    if renamed.is_err() {
        // What matters is the first fault.
        let _ = std::fs::remove_file(&partial);
    }
    renamed
}

fn make_room(folder: &Path) -> std::io::Result<()> {
    let mut records: Vec<(SystemTime, PathBuf)> = std::fs::read_dir(folder)?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
        })
        .collect();
    if records.len() < MOST {
        return Ok(());
    }
    records.sort_unstable();
    // Some at a time, or every new record would list them all.
    records.iter().take(records.len() - MOST / 2).try_for_each(|(_, path)| std::fs::remove_file(path))
}
