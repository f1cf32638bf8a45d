//! Read-only mappings of files, and what happens when one is cut short: the crate's only unsafe code.
#![expect(
    unsafe_code,
    reason = "a mapping is unsafe to make, because another program may change the file under it; so is the handler of what happens then"
)]

use crate::Error;
use bytes::Bytes;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A file mapped into memory for reading. The file itself is closed again: a mapping needs no descriptor.
#[derive(Debug)]
pub struct MappedFile(memmap2::Mmap);

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
        Ok(Self(map))
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

/// What [`end_on_fault`] writes.
static LAST_LINE: OnceLock<&'static str> = OnceLock::new();

/// Makes the program say `line` on stderr and end with exit code 2 when a mapped page cannot be had (SIGBUS): its file became
/// shorter, or its disk fails. Without this the system ends it without a word. Nothing else runs: no destructor, no flush.
///
/// `line` ends with a line break. The first call's line is the one that is written.
///
/// # Errors
/// The system's, when it takes no handler.
pub fn end_on_fault(line: &'static str) -> std::io::Result<()> {
    LAST_LINE.get_or_init(|| line);
    let handler: extern "C" fn(libc::c_int) = fault;
    // SAFETY: a sigaction is plain numbers and pointers, of which all zeroes are none.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    // SAFETY: the handler has the signature that an action without SA_SIGINFO calls, lives as long as the program and calls
    // what a handler may; both pointers are to a live action, or null, which asks for no former one.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// All threads of a program may come here at once.
extern "C" fn fault(_signal: libc::c_int) {
    static FIRST: AtomicBool = AtomicBool::new(true);
    if !FIRST.swap(false, Ordering::Relaxed) {
        loop {
            // SAFETY: waits for a signal and touches nothing; a handler may call it. The first thread is about to end the program.
            unsafe { libc::pause() };
        }
    }
    let line = LAST_LINE.get().copied().unwrap_or_default();
    // SAFETY: the pointer and the length are of one static text, and a handler may call both functions (POSIX, 2.4.3). A stderr
    // that takes nothing is no reason to go on.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
        libc::_exit(2);
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
