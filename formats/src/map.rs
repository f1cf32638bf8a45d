//! Read-only mappings of files, and what happens when one is cut short: the crate's only unsafe code.
#![expect(
    unsafe_code,
    reason = "a mapping is unsafe to make, because another program may change the file under it; so is the handler of what happens then"
)]

mod fault;

pub use fault::end_on_fault;

use crate::Error;
use bytes::Bytes;
use fault::Named;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A file mapped into memory for reading. The file itself is closed again: a mapping needs no descriptor.
#[derive(Debug)]
pub struct MappedFile {
    /// Before the mapping, so that it goes first.
    _named: Named,
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps the whole of a regular file.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file and what was tried.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::of(&open_regular(path)?, path)
    }

    /// As [`MappedFile::open`], of a file that is open.
    fn of(file: &File, path: &Path) -> Result<Self, Error> {
        // SAFETY: the bytes are only ever read, as plain u8 of which every pattern is valid. A program that shortens the
        // file meanwhile makes reads fault, see `end_on_fault`; digests in the manifests are how changed bytes are found.
        let map =
            unsafe { memmap2::Mmap::map(file) }.map_err(|source| Error::io(path, "cannot map", source))?;
        Ok(Self { _named: Named::new(&map, path), map })
    }

    /// Maps a file and shares its bytes: slices of the result keep the mapping alive.
    ///
    /// # Errors
    /// As [`MappedFile::open`].
    pub fn bytes(path: &Path) -> Result<Bytes, Error> {
        Self::open(path).map(Bytes::from_owner)
    }

    /// As [`MappedFile::bytes`], with what the file was just before.
    ///
    /// # Errors
    /// As [`MappedFile::open`].
    pub fn bytes_and_state(path: &Path) -> Result<(Bytes, FileState), Error> {
        let file = open_regular(path)?;
        let metadata = file.metadata().map_err(|source| Error::io(path, "cannot look at it", source))?;
        Ok((Bytes::from_owner(Self::of(&file, path)?), FileState::new(&metadata)))
    }
}

/// Which file a path named at some time, and when it was last written to. Two that are equal are of the same bytes, unless
/// someone put the clock back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileState {
    /// Device and inode.
    file: (u64, u64),
    len: u64,
    modified: (i64, i64),
    /// Of the bytes, the name or the rights: a program that sets the time of writing back cannot set this one.
    changed: (i64, i64),
}

impl FileState {
    fn new(metadata: &Metadata) -> Self {
        Self {
            file: (metadata.dev(), metadata.ino()),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Which file it is and what its times are, in words that are equal where states are: device, inode, length, both times.
    pub fn words(&self) -> [i128; 7] {
        let (device, inode) = self.file;
        [
            device.into(),
            inode.into(),
            self.len.into(),
            self.modified.0.into(),
            self.modified.1.into(),
            self.changed.0.into(),
            self.changed.1.into(),
        ]
    }

    /// When it was last written to, in seconds and nanoseconds since 1970.
    pub fn modified(&self) -> (i64, i64) {
        self.modified
    }

    /// Whether the path still names the same file and nobody wrote to it.
    ///
    /// # Errors
    /// [`Error::Changed`], or [`Error::Io`] when it cannot be looked at; both name the file.
    pub fn check(&self, path: &Path) -> Result<(), Error> {
        let metadata =
            std::fs::metadata(path).map_err(|source| Error::io(path, "cannot look at it again", source))?;
        if Self::new(&metadata) == *self { Ok(()) } else { Err(Error::Changed { path: path.to_owned() }) }
    }
}

/// A file whose bytes are in use, and whether they still are those that were there when it was looked at first. Its name may
/// meanwhile go to another file, and it may lose its own.
#[derive(Debug)]
pub struct FileWatch {
    file: File,
    path: PathBuf,
    len: u64,
    modified: (i64, i64),
}

impl FileWatch {
    /// Opens the file that was in `state` when it was looked at.
    ///
    /// # Errors
    /// [`Error::Changed`] when it is another one by now, or [`Error::Io`]; both name it.
    pub fn open(path: &Path, state: &FileState) -> Result<Self, Error> {
        let file = open_regular(path)?;
        let metadata = file.metadata().map_err(|source| Error::io(path, "cannot look at it", source))?;
        if FileState::new(&metadata) != *state {
            return Err(Error::Changed { path: path.to_owned() });
        }
        Ok(Self { file, path: path.to_owned(), len: state.len, modified: state.modified })
    }

    /// Whether nobody has written to it or changed its length. Takes a microsecond.
    pub fn is_unchanged(&self) -> bool {
        self.file
            .metadata()
            .is_ok_and(|now| now.len() == self.len && (now.mtime(), now.mtime_nsec()) == self.modified)
    }

    /// The file, to be read.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The name that it had when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Opens a regular file. Anything else is refused before it is opened: opening a pipe would wait for its other end.
///
/// # Errors
/// [`Error::Io`] naming the file and what it is.
pub fn open_regular(path: &Path) -> Result<File, Error> {
    let metadata = std::fs::metadata(path).map_err(|source| Error::io(path, "cannot open", source))?;
    if !metadata.is_file() {
        let kind = if metadata.is_dir() { "is a directory" } else { "is not a regular file" };
        return Err(Error::io(path, "cannot open", std::io::Error::other(format!("it {kind}"))));
    }
    File::open(path).map_err(|source| Error::io(path, "cannot open", source))
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}
