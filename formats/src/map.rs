//! Read-only mappings of files: the crate's only unsafe code.
#![expect(
    unsafe_code,
    reason = "a mapping is unsafe to make, because another program may change the file under it"
)]

use crate::Error;
use bytes::Bytes;
use std::fs::File;
use std::path::Path;

/// A file mapped into memory for reading. The file itself is closed again: a mapping needs no descriptor.
#[derive(Debug)]
pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps the whole of a regular file.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file and what was tried.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = open_regular(path)?;
        // SAFETY: the bytes are only ever read, as plain u8 of which every pattern is valid. A program that shortens the
        // file meanwhile makes reads fault; digests in the manifests are how changed bytes are found.
        let map =
            unsafe { memmap2::Mmap::map(&file) }.map_err(|source| Error::io(path, "cannot map", source))?;
        Ok(Self(map))
    }

    /// Maps a file and shares its bytes: slices of the result keep the mapping alive.
    ///
    /// # Errors
    /// As [`MappedFile::open`].
    pub fn bytes(path: &Path) -> Result<Bytes, Error> {
        Self::open(path).map(Bytes::from_owner)
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
        &self.0
    }
}
