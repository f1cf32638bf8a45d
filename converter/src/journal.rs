//! The chunks of an unfinished conversion that are on the disk, so that `--resume` need not make them again.
//!
//! A text file in the unfinished directory. Its first line is the conversion's [`Stamp`]; every other line is
//! `RANK CHUNK DIGEST`, written only after the chunk's bytes were flushed. Nothing in it is believed: a chunk is kept only
//! when its bytes still have that digest, so a line that a crash tore or lost costs time and nothing else. The file is also
//! the lock of its directory, which the system lets go of however the program ends.

use crate::Error;
use crate::origin::Stamp;
use crate::writer::sync_data;
use formats::Digest;
use formats::manifest::MAX_MANIFEST_BYTES;
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Its name.
pub(crate) const JOURNAL_FILE: &str = "convert.journal";

/// Chunks that are flushed together: 256 MiB when they are whole.
const BATCH: usize = 16;

/// An open, locked journal.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: Mutex<File>,
    /// By rank and chunk, from earlier runs.
    earlier: HashMap<(usize, u64), Digest>,
    /// Written, but perhaps not on the disk.
    pending: Mutex<Vec<Record>>,
    has_records: AtomicBool,
}

#[derive(Debug)]
struct Record {
    rank: usize,
    chunk: u64,
    digest: Digest,
    path: PathBuf,
}

impl Journal {
    /// Opens or starts the journal of `dir`.
    ///
    /// # Errors
    /// [`Error::Busy`] when another run has it, [`Error::OtherConversion`] when it is not one of `stamp`.
    pub(crate) fn open(dir: &Path, stamp: &Stamp) -> Result<Self, Error> {
        let path = dir.join(JOURNAL_FILE);
        let io = |action, e| Error::io(&path, action, e);
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(|e| io("cannot open", e))?;
        lock(&file, &path, dir)?;
        let len = file.metadata().map_err(|e| io("cannot look at it", e))?.len();
        if len > MAX_MANIFEST_BYTES {
            let difference = format!("expected at most {MAX_MANIFEST_BYTES} bytes of journal, found {len}");
            return Err(Error::OtherConversion { path: dir.to_owned(), difference });
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|e| io("cannot read", e))?;
        let complete = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        file.set_len(complete as u64).map_err(|e| io("cannot shorten", e))?;
        let text = String::from_utf8_lossy(&bytes[..complete]);
        let mut lines = text.lines();
        match lines.next() {
            None => {
                let mut line = serde_json::to_vec(stamp).expect("names and numbers always become JSON");
                line.push(b'\n');
                file.write_all(&line).map_err(|e| io("cannot write", e))?;
                sync_data(&file, &path)?;
            }
            Some(line) => {
                let difference = match serde_json::from_str(line) {
                    Ok(found) => stamp.difference(&found),
                    Err(_) => Some("expected one by this version, found something else".to_owned()),
                };
                if let Some(difference) = difference {
                    return Err(Error::OtherConversion { path: dir.to_owned(), difference });
                }
            }
        }
        let earlier: HashMap<(usize, u64), Digest> = lines.filter_map(parse).collect();
        Ok(Self {
            has_records: AtomicBool::new(!earlier.is_empty()),
            path,
            file: Mutex::new(file),
            earlier,
            pending: Mutex::default(),
        })
    }

    /// The digest that a chunk had when an earlier run flushed it.
    pub(crate) fn earlier(&self, rank: usize, chunk: u64) -> Option<Digest> {
        self.earlier.get(&(rank, chunk)).copied()
    }

    /// Whether any chunk is known to be on the disk.
    pub(crate) fn has_records(&self) -> bool {
        self.has_records.load(Ordering::Relaxed)
    }

    /// Takes note of a chunk that was written to `path`.
    ///
    /// # Errors
    /// [`Error::Io`] when a batch was full and could not be flushed.
    pub(crate) fn record(&self, rank: usize, chunk: u64, digest: Digest, path: PathBuf) -> Result<(), Error> {
        let batch = {
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            pending.push(Record { rank, chunk, digest, path });
            if pending.len() < BATCH {
                return Ok(());
            }
            std::mem::take(&mut *pending)
        };
        self.write(&batch)
    }

    /// Flushes what is left: afterwards every chunk that was recorded is on the disk.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        let batch = std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        if batch.is_empty() { Ok(()) } else { self.write(&batch) }
    }

    fn write(&self, batch: &[Record]) -> Result<(), Error> {
        for path in batch.iter().map(|record| &record.path).collect::<BTreeSet<_>>() {
            let file =
                OpenOptions::new().write(true).open(path).map_err(|e| Error::io(path, "cannot open", e))?;
            sync_data(&file, path)?;
        }
        let lines: String = batch.iter().map(|r| format!("{} {} {}\n", r.rank, r.chunk, r.digest)).collect();
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(lines.as_bytes()).map_err(|e| Error::io(&self.path, "cannot write", e))?;
        sync_data(&file, &self.path)?;
        self.has_records.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// Whether another run is at work in `dir`.
pub(crate) fn is_busy(dir: &Path) -> bool {
    let file = File::open(dir.join(JOURNAL_FILE));
    file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
}

/// Takes the lock that is the file at `path`, for as long as `file` is open.
///
/// # Errors
/// [`Error::Busy`] naming `dir`.
pub(crate) fn lock(file: &File, path: &Path, dir: &Path) -> Result<(), Error> {
    let busy = || Error::Busy { path: dir.to_owned() };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(busy()),
        // A file system that knows no locks: the directory's creation keeps two fresh runs apart.
        Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => {}
        Err(TryLockError::Error(e)) => return Err(Error::io(path, "cannot lock", e)),
    }
    // Whoever held the lock may have finished and taken the file away.
    let here = file.metadata().map_err(|e| Error::io(path, "cannot look at it", e))?;
    match fs::metadata(path) {
        Ok(there) if (there.dev(), there.ino()) == (here.dev(), here.ino()) => Ok(()),
        _ => Err(busy()),
    }
}

fn parse(line: &str) -> Option<((usize, u64), Digest)> {
    let mut words = line.split(' ');
    let (rank, chunk, digest) = (words.next()?, words.next()?, words.next()?);
    let digest = Digest::try_from(digest.to_owned()).ok()?;
    words.next().is_none().then_some(((rank.parse().ok()?, chunk.parse().ok()?), digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_lines_are_no_records() {
        let digest = Digest::of(b"x");
        let line = format!("3 17 {digest}");
        assert_eq!(parse(&line), Some(((3, 17), digest)));
        for end in 0..line.len() {
            assert_eq!(parse(&line[..end]), None, "{:?}", &line[..end]);
        }
        assert_eq!(parse(&format!("{line} 1")), None);
    }
}
