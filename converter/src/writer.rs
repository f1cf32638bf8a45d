//! The output directory: written beside its final name, and renamed when everything in it is on the disk.

use crate::Error;
use rustix::fs::{CWD, FallocateFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Ending of the directory's name while it is unfinished.
const PARTIAL: &str = ".partial";

/// A directory that becomes `out` by [`PartialDir::commit`], and disappears without it.
#[derive(Debug)]
pub(crate) struct PartialDir {
    out: PathBuf,
    parent: PathBuf,
    partial: PathBuf,
    committed: bool,
}

impl PartialDir {
    /// Makes `OUT.partial`. Nothing that exists is touched.
    pub(crate) fn create(out: &Path) -> Result<Self, Error> {
        let (parent, name) = parent_and_name(out)?;
        refuse_existing(out)?;
        let partial = parent.join(format!("{name}{PARTIAL}"));
        match fs::create_dir(&partial) {
            Ok(()) => Ok(Self { out: parent.join(name), parent, partial, committed: false }),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                Err(Error::PartialExists { path: partial, kind: "directory" })
            }
            Err(e) => Err(Error::io(&partial, "cannot create the directory", e)),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.partial.join(name)
    }

    /// Refuses early what the disk cannot hold.
    pub(crate) fn require_space(&self, needed: u64) -> Result<(), Error> {
        require_space(&self.parent, &self.out, needed)
    }

    /// A new file of `len` bytes, with its space set aside where the file system can do that.
    pub(crate) fn preallocate(&self, name: &str, len: u64) -> Result<(), Error> {
        let path = self.path(name);
        let file = create_new(&path)?;
        let action = || format!("cannot set {len} bytes aside");
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                file.set_len(len).map_err(|e| Error::io(&path, action(), e))
            }
            Err(e) => Err(Error::io(&path, action(), e.into())),
        }
    }

    /// A new, small file, on the disk when this returns.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.path(name);
        let mut file = create_new(&path)?;
        file.write_all(bytes)
            .map_err(|e| Error::io(&path, format!("cannot write {} bytes", bytes.len()), e))?;
        sync(&file, &path)
    }

    /// Gives the directory its name, unless something of that name appeared meanwhile.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        sync_dir(&self.partial)?;
        rename_new(&self.partial, &self.out)?;
        self.committed = true;
        sync_dir(&self.parent)
    }
}

impl Drop for PartialDir {
    fn drop(&mut self) {
        if !self.committed {
            // The error that brought us here is the one to report.
            let _ = fs::remove_dir_all(&self.partial);
        }
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
            return Err(Error::PartialExists { path: partial, kind: "file" });
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
            Existing::Replace => fs::rename(&self.partial, &self.path)
                .map_err(|e| Error::io(&self.path, "cannot give the finished file its name", e))?,
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
pub(crate) fn sync(file: &File, path: &Path) -> Result<(), Error> {
    file.sync_all().map_err(|e| Error::io(path, "cannot flush it to the disk", e))
}

fn sync_dir(path: &Path) -> Result<(), Error> {
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

fn refuse_existing(path: &Path) -> Result<(), Error> {
    match path.symlink_metadata() {
        Ok(metadata) => Err(Error::OutputExists {
            path: path.to_owned(),
            kind: if metadata.is_dir() { "directory" } else { "file" },
        }),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io(path, "cannot look at it", e)),
    }
}

fn parent_and_name(path: &Path) -> Result<(PathBuf, String), Error> {
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
