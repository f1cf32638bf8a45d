//! The output directory: written beside its final name, and renamed when everything in it is on the disk.

use crate::Error;
use crate::journal::{self, JOURNAL_FILE, Journal};
use crate::origin::Stamp;
use formats::manifest::MANIFEST_FILE;
use rustix::fs::{CWD, FallocateFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Ending of the directory's name while it is unfinished.
const PARTIAL: &str = ".partial";

/// What becomes of an unfinished directory of an earlier run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfinished {
    /// It is an error.
    Refuse,
    /// It is continued; without one the work starts from the beginning.
    Resume,
}

/// A locked directory beside `out` that holds what is unfinished.
#[derive(Debug)]
pub(crate) struct PartialDir {
    out: PathBuf,
    parent: PathBuf,
    partial: PathBuf,
    journal: Journal,
}

impl PartialDir {
    /// Makes `OUT{infix}.partial`, or goes on with it. Nothing else that exists is touched.
    ///
    /// # Errors
    /// An error naming the directory: another run's, another conversion's, or one that is not to be resumed.
    pub(crate) fn open(
        out: &Path,
        infix: &str,
        unfinished: Unfinished,
        stamp: &Stamp,
    ) -> Result<Self, Error> {
        let (parent, name) = parent_and_name(out)?;
        let partial = parent.join(format!("{name}{infix}{PARTIAL}"));
        let is_new = match fs::create_dir(&partial) {
            Ok(()) => true,
            Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
            Err(e) => return Err(Error::io(&partial, "cannot create the directory", e)),
        };
        if !is_new {
            require_regular_files(&partial)?;
            match unfinished {
                _ if journal::is_busy(&partial) => return Err(Error::Busy { path: partial }),
                Unfinished::Refuse => return Err(Error::Unfinished { path: partial }),
                Unfinished::Resume if !is_ours(&partial)? => {
                    let difference = "it holds other files and no journal".to_owned();
                    return Err(Error::OtherConversion { path: partial, difference });
                }
                Unfinished::Resume => {}
            }
        }
        let journal = match Journal::open(&partial, stamp) {
            Ok(journal) => journal,
            Err(e) => {
                if is_new && !matches!(e, Error::Busy { .. }) {
                    // The error that brought us here is the one to report.
                    let _ = fs::remove_dir_all(&partial);
                }
                return Err(e);
            }
        };
        let dir = Self { out: parent.join(name), parent, partial, journal };
        // Before any byte changes: a manifest that was finished just before a crash must not speak for other bytes.
        dir.remove_manifest()?;
        Ok(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.partial
    }

    pub(crate) fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Refuses early what the disk cannot hold.
    pub(crate) fn require_space(&self, needed: u64) -> Result<(), Error> {
        let mut held = 0;
        let entries =
            fs::read_dir(&self.partial).map_err(|e| Error::io(&self.partial, "cannot list it", e))?;
        for entry in entries.flatten() {
            held += entry.metadata().map_or(0, |metadata| metadata.blocks() * 512);
        }
        require_space(&self.parent, &self.out, needed.saturating_sub(held))
    }

    /// A file of `len` bytes, with its space set aside where the file system can do that.
    pub(crate) fn preallocate(&self, name: &str, len: u64) -> Result<(), Error> {
        let path = self.partial.join(name);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|e| Error::io(&path, "cannot create the file", e))?;
        let action = || format!("cannot set {len} bytes aside");
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                file.set_len(len).map_err(|e| Error::io(&path, action(), e))
            }
            Err(e) => Err(Error::io(&path, action(), e.into())),
        }
    }

    /// Gives the directory its name, unless something of that name appeared meanwhile.
    pub(crate) fn rename(&self) -> Result<(), Error> {
        sync_dir(&self.partial)?;
        rename_new(&self.partial, &self.out)
    }

    /// After [`PartialDir::rename`]: takes the journal away, once the new name is on the disk.
    pub(crate) fn settle(self) -> Result<(), Error> {
        sync_dir(&self.parent)?;
        remove_if_there(&self.out.join(JOURNAL_FILE))?;
        sync_dir(&self.out)
    }

    /// After an error: keeps what is done when there is something to keep and the error is not the input's, and says so.
    pub(crate) fn abandon(self, error: Error) -> Error {
        // Best effort from here on: the error that brought us here is the one to report.
        let _ = self.journal.flush();
        if self.remove_manifest().is_ok() && self.journal.has_records() && !error.is_of_the_input() {
            return Error::Kept { path: self.partial, source: Box::new(error) };
        }
        let _ = self.remove();
        error
    }

    /// Removes the directory and all in it, the journal last, so that what a crash leaves of it is still known as ours.
    pub(crate) fn remove(self) -> Result<(), Error> {
        let io = |e| Error::io(&self.partial, "cannot remove it", e);
        self.remove_manifest()?;
        for entry in fs::read_dir(&self.partial).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.file_name().is_some_and(|name| name != JOURNAL_FILE) {
                remove_if_there(&path)?;
            }
        }
        remove_if_there(&self.partial.join(JOURNAL_FILE))?;
        fs::remove_dir(&self.partial).map_err(io)
    }

    fn remove_manifest(&self) -> Result<(), Error> {
        if remove_if_there(&self.partial.join(MANIFEST_FILE))? { sync_dir(&self.partial) } else { Ok(()) }
    }
}

/// A single file, written beside its final name and renamed.
pub(crate) struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    parent: PathBuf,
    existing: Existing,
    committed: bool,
}

/// What becomes of an output file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is an error.
    Refuse,
    /// It is replaced when the new one is complete.
    Replace,
}

impl NewFile {
    pub(crate) fn create(path: &Path, existing: Existing) -> Result<(Self, File), Error> {
        let (parent, name) = parent_and_name(path)?;
        // A directory or a device is nothing to replace.
        if existing == Existing::Refuse || !path.is_file() {
            refuse_existing(path)?;
        }
        let partial = parent.join(format!("{name}{PARTIAL}"));
        if partial.symlink_metadata().is_ok() {
            return Err(Error::PartialFile { path: partial });
        }
        let file = create_new(&partial)?;
        Ok((Self { path: path.to_owned(), partial, parent, existing, committed: false }, file))
    }

    pub(crate) fn partial(&self) -> &Path {
        &self.partial
    }

    /// Refuses early what the disk cannot hold.
    pub(crate) fn require_space(&self, needed: u64) -> Result<(), Error> {
        require_space(&self.parent, &self.path, needed)
    }

    pub(crate) fn commit(mut self, file: &File) -> Result<(), Error> {
        sync(file, &self.partial)?;
        match self.existing {
            Existing::Refuse => rename_new(&self.partial, &self.path)?,
            Existing::Replace => rename(&self.partial, &self.path)?,
        }
        self.committed = true;
        sync_dir(&self.parent)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.committed {
            // The error that brought us here is the one to report.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Refuses a directory with anything in it that no conversion leaves there. To open a pipe would wait for its other end, and
/// what is written to a link would go to a file elsewhere.
fn require_regular_files(partial: &Path) -> Result<(), Error> {
    let io = |e| Error::io(partial, "cannot list it", e);
    for entry in fs::read_dir(partial).map_err(io)? {
        let entry = entry.map_err(io)?;
        if !entry.file_type().map_err(io)?.is_file() {
            let what = "expected a regular file, as conversions leave them, found something else; remove it";
            return Err(Error::Input { path: entry.path(), what: what.to_owned() });
        }
    }
    Ok(())
}

/// Whether a directory is one that [`PartialDir`] made: it has a journal, or nothing yet.
fn is_ours(partial: &Path) -> Result<bool, Error> {
    let io = |e| Error::io(partial, "cannot list it", e);
    Ok(partial.join(JOURNAL_FILE).exists() || fs::read_dir(partial).map_err(io)?.next().is_none())
}

/// Takes the journal away from an `out` whose run was interrupted after it had its name; false when `out` is no such one.
///
/// # Errors
/// As [`Journal::open`].
pub(crate) fn settle_interrupted(out: &Path, stamp: &Stamp) -> Result<bool, Error> {
    if !out.join(JOURNAL_FILE).exists() || !out.join(MANIFEST_FILE).exists() {
        return Ok(false);
    }
    let (parent, _) = parent_and_name(out)?;
    let journal = Journal::open(out, stamp)?;
    PartialDir { out: out.to_owned(), parent, partial: out.to_owned(), journal }.settle()?;
    Ok(true)
}

/// A small file of a directory, whole and on the disk when this returns; one of an earlier run is replaced.
pub(crate) fn write_file(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), Error> {
    let path = dir.join(name);
    let partial = dir.join(format!("{name}{PARTIAL}"));
    let mut file = File::create(&partial).map_err(|e| Error::io(&partial, "cannot create the file", e))?;
    file.write_all(bytes)
        .map_err(|e| Error::io(&partial, format!("cannot write {} bytes", bytes.len()), e))?;
    sync(&file, &partial)?;
    rename(&partial, &path)
}

/// Renames, whatever has the new name.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    fs::rename(from, to).map_err(|e| Error::io(to, "cannot give the finished file its name", e))
}

/// Whether there was something to remove.
pub(crate) fn remove_if_there(path: &Path) -> Result<bool, Error> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io(path, "cannot remove it", e)),
    }
}

fn require_space(parent: &Path, out: &Path, needed: u64) -> Result<(), Error> {
    let stat =
        rustix::fs::statvfs(parent).map_err(|e| Error::io(parent, "cannot read its free space", e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < needed {
        return Err(Error::NoSpace { path: out.to_owned(), needed, free });
    }
    Ok(())
}

/// Waits until a file's bytes are on the disk.
fn sync(file: &File, path: &Path) -> Result<(), Error> {
    file.sync_all().map_err(|e| Error::io(path, "cannot flush it to the disk", e))
}

/// As [`sync`], without times and other things that reading does not need.
pub(crate) fn sync_data(file: &File, path: &Path) -> Result<(), Error> {
    file.sync_data().map_err(|e| Error::io(path, "cannot flush it to the disk", e))
}

pub(crate) fn sync_dir(path: &Path) -> Result<(), Error> {
    let dir = File::open(path).map_err(|e| Error::io(path, "cannot open the directory", e))?;
    sync(&dir, path)
}

fn create_new(path: &Path) -> Result<File, Error> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|e| Error::io(path, "cannot create the file", e))
}

fn rename_new(from: &Path, to: &Path) -> Result<(), Error> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => return Ok(()),
        Err(Errno::EXIST | Errno::NOTEMPTY) => refuse_existing(to)?,
        // A file system without that flag: look, then rename.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => refuse_existing(to)?,
        Err(e) => return Err(Error::io(to, "cannot give the finished output its name", e.into())),
    }
    fs::rename(from, to).map_err(|e| Error::io(to, "cannot give the finished output its name", e))
}

/// Nothing of this name must exist.
pub(crate) fn refuse_existing(path: &Path) -> Result<(), Error> {
    match path.symlink_metadata() {
        Ok(metadata) => Err(Error::OutputExists {
            path: path.to_owned(),
            kind: if metadata.is_dir() { "directory" } else { "file" },
        }),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io(path, "cannot look at it", e)),
    }
}

pub(crate) fn parent_and_name(path: &Path) -> Result<(PathBuf, String), Error> {
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name else { return Err(Error::OutputName { path: path.to_owned() }) };
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Err(Error::OutputName { path: path.to_owned() }),
    };
    if !parent.is_dir() {
        return Err(Error::NoParent { path: parent.to_owned(), name: name.to_owned() });
    }
    Ok((parent.to_owned(), name.to_owned()))
}
