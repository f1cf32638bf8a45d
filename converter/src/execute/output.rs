//! A rank file that is written past the page cache where the file system allows it.
//!
//! A checkpoint is larger than memory and nobody reads it next: copies in the page cache would cost time and push the source's
//! own pages out. O_DIRECT wants places, lengths and memory at multiples of the disk's block; what does not fit them, the end of
//! a file, is written the ordinary way, and everything is where the kernel or the file system refuses (`open(2)`, O_DIRECT).

use crate::Error;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that are written at a time: large enough for a disk's full speed, small enough that 48 of them stay far below 1 GiB.
pub(crate) const BLOCK_BYTES: usize = 4 << 20;
/// No disk in use has larger blocks; one that had would be written the ordinary way.
const ALIGNMENT: usize = 4096;

/// [`BLOCK_BYTES`] of memory that begin at a multiple of a disk's block.
#[derive(Default)]
pub(super) struct Block {
    memory: Vec<u8>,
}

impl Block {
    /// The first `len` of its bytes, whatever they are.
    ///
    /// # Panics
    /// When `len` is more than [`BLOCK_BYTES`].
    pub(super) fn bytes(&mut self, len: usize) -> &mut [u8] {
        self.memory.resize(BLOCK_BYTES + ALIGNMENT, 0);
        let start = self.memory.as_ptr().align_offset(ALIGNMENT);
        &mut self.memory[start..start + BLOCK_BYTES][..len]
    }
}

/// Whether the output's file system takes O_DIRECT; found out once, by trying.
#[derive(Debug)]
pub(super) struct Direct(AtomicBool);

impl Direct {
    pub(super) fn new() -> Self {
        Self(AtomicBool::new(true))
    }

    fn works(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn give_up(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A rank file, open for one chunk: 1024 ranks are more than a process may keep open.
pub(super) struct Output<'a> {
    path: &'a Path,
    direct: &'a Direct,
    past_cache: Option<File>,
    through_cache: Option<File>,
}

impl<'a> Output<'a> {
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub(super) fn open(path: &'a Path, direct: &'a Direct) -> Result<Self, Error> {
        let mut output = Self { path, direct, past_cache: None, through_cache: None };
        if direct.works() {
            let flags = OFlags::DIRECT.bits() as i32;
            match OpenOptions::new().write(true).custom_flags(flags).open(path) {
                Ok(file) => output.past_cache = Some(file),
                Err(e) if is_refusal(&e) => direct.give_up(),
                Err(e) => return Err(Error::io(path, "cannot open", e)),
            }
        }
        Ok(output)
    }

    /// Writes `bytes`, which a [`Block`] holds, at byte `at`.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file and the place.
    pub(super) fn write(&mut self, bytes: &[u8], at: u64) -> Result<(), Error> {
        let path = self.path;
        let io = |e| Error::io(path, format!("cannot write {} bytes at byte {at}", bytes.len()), e);
        let whole = bytes.len() / ALIGNMENT * ALIGNMENT;
        let mut done = 0;
        if let Some(file) = self.past_cache.as_ref().filter(|_| at.is_multiple_of(ALIGNMENT as u64)) {
            match file.write_all_at(&bytes[..whole], at) {
                Ok(()) => done = whole,
                Err(e) if is_refusal(&e) => {
                    self.direct.give_up();
                    self.past_cache = None;
                }
                Err(e) => return Err(io(e)),
            }
        }
        if done == bytes.len() {
            return Ok(());
        }
        let file = match &mut self.through_cache {
            Some(file) => file,
            none => {
                let file = OpenOptions::new().write(true).open(path);
                none.insert(file.map_err(|e| Error::io(path, "cannot open", e))?)
            }
        };
        file.write_all_at(&bytes[done..], at + done as u64).map_err(io)
    }
}

/// How kernels and file systems say that they do not write past the page cache, or not like this.
fn is_refusal(error: &io::Error) -> bool {
    [Errno::INVAL, Errno::OPNOTSUPP]
        .iter()
        .any(|refusal| error.raw_os_error() == Some(refusal.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// Bytes are where they belong, wherever the file ends and whether or not O_DIRECT works.
    #[test]
    fn both_ways_write_the_same() {
        let folders = [TempDir::new().ok(), TempDir::new_in("/dev/shm").ok()];
        for folder in folders.iter().flatten() {
            for len in [0, 1, 4095, 4096, 4097, 100_000, BLOCK_BYTES, BLOCK_BYTES + 4096, BLOCK_BYTES + 5000]
            {
                let expected: Vec<u8> = (0..len).map(|i| (i * 7 % 253) as u8).collect();
                let given_up = Direct::new();
                given_up.give_up();
                for direct in [&Direct::new(), &given_up] {
                    let path = folder.path().join("file");
                    std::fs::write(&path, vec![0xaa; len]).unwrap();
                    let mut output = Output::open(&path, direct).unwrap();
                    let mut block = Block::default();
                    for (i, part) in expected.chunks(BLOCK_BYTES).enumerate() {
                        let bytes = block.bytes(part.len());
                        bytes.copy_from_slice(part);
                        output.write(bytes, (i * BLOCK_BYTES) as u64).unwrap();
                    }
                    assert!(std::fs::read(&path).unwrap() == expected, "{len} bytes");
                }
            }
        }
    }

    #[test]
    fn a_block_begins_where_disks_want_it() {
        let mut block = Block::default();
        for len in [0, 1, BLOCK_BYTES] {
            let bytes = block.bytes(len);
            assert_eq!((bytes.len(), bytes.as_ptr().align_offset(ALIGNMENT)), (len, 0));
        }
    }
}
