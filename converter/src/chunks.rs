//! Chunks of files, hashed piece by piece.

use crate::Error;
use crate::plan::Placed;
use crate::work::Stage;
use formats::Digest;
use formats::digest::{CHUNK_BYTES, ChunkHasher};
use rustix::io::{ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::{ErrorKind, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Pieces of this many bytes stay in a core's own cache between being read, hashed and written.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// The pieces of chunk `chunk` of a file of `len` bytes.
pub(crate) fn pieces(chunk: u64, len: u64) -> impl Iterator<Item = Range<u64>> {
    let end = ((chunk + 1) * CHUNK_BYTES).min(len);
    let starts = (chunk * CHUNK_BYTES..end).step_by(PIECE_BYTES as usize);
    starts.map(move |start| start..(start + PIECE_BYTES).min(end))
}

/// Hashes a chunk of a file that is mapped too.
///
/// What lies in the page cache is hashed where it lies: to copy it takes as long as to hash it. What does not is read, which is
/// several times faster than faulting cold pages in one by one, and leaves them where mappings find them.
pub(crate) fn hash_mapped(
    path: &Path,
    mapped: &[u8],
    chunk: u64,
    stage: &Stage,
    piece: &mut Vec<u8>,
) -> Result<Digest, Error> {
    let len = mapped.len() as u64;
    let file = File::open(path).map_err(|e| Error::io(path, "cannot open", e))?;
    if !is_cached(&file, chunk * CHUNK_BYTES..((chunk + 1) * CHUNK_BYTES).min(len)) {
        return hash_and(path, chunk, len, stage, piece, |_, _| {});
    }
    let mut hasher = ChunkHasher::new(chunk * CHUNK_BYTES, len);
    for range in pieces(chunk, len) {
        hasher.update(&mapped[range.start as usize..range.end as usize]);
        stage.advance(range.end - range.start);
    }
    Ok(hasher.finish())
}

/// Whether a range of a file is in the page cache, as far as a few of its pages tell.
fn is_cached(file: &File, range: Range<u64>) -> bool {
    const PAGES: u64 = 16;
    let step = ((range.end - range.start) / PAGES).max(1);
    range.step_by(step as usize).all(|at| {
        let mut byte = [0];
        let read = preadv2(file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT);
        // Where the system cannot say, it is read.
        read.is_ok_and(|bytes| bytes == 1)
    })
}

/// Hashes a chunk of a file of `len` bytes as it is read; `also` gets each piece, and where in the file it starts.
pub(crate) fn hash_and(
    path: &Path,
    chunk: u64,
    len: u64,
    stage: &Stage,
    piece: &mut Vec<u8>,
    mut also: impl FnMut(&[u8], u64),
) -> Result<Digest, Error> {
    let file = File::open(path).map_err(|e| Error::io(path, "cannot open", e))?;
    let mut hasher = ChunkHasher::new(chunk * CHUNK_BYTES, len);
    for range in pieces(chunk, len) {
        piece.resize((range.end - range.start) as usize, 0);
        file.read_exact_at(piece, range.start).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => formats::Error::Changed { path: path.to_owned() }.into(),
            _ => Error::io(path, format!("cannot read at byte {}", range.start), e),
        })?;
        hasher.update(piece);
        also(piece, range.start);
        stage.advance(piece.len() as u64);
    }
    Ok(hasher.finish())
}

/// Hashes the tensors that lie in one chunk whole, as the chunk's pieces come by.
pub(crate) struct TensorHasher<'a> {
    placed: &'a [Placed],
    /// The tensor that is being hashed.
    next: usize,
    chunk_end: u64,
    hasher: blake3::Hasher,
    /// Those tensors, with their index in the file.
    pub(crate) finished: Vec<(usize, Digest)>,
}

impl<'a> TensorHasher<'a> {
    pub(crate) fn new(placed: &'a [Placed], chunk: u64) -> Self {
        let start = chunk * CHUNK_BYTES;
        Self {
            placed,
            next: placed.partition_point(|placed| placed.bytes.start < start),
            chunk_end: start + CHUNK_BYTES,
            hasher: blake3::Hasher::new(),
            finished: Vec::new(),
        }
    }

    /// The bytes of the file from `start` on.
    pub(crate) fn update(&mut self, piece: &[u8], start: u64) {
        let end = start + piece.len() as u64;
        let inside = |bytes: &Range<u64>, chunk_end| bytes.start < end && bytes.end <= chunk_end;
        while let Some(Placed { bytes, .. }) =
            self.placed.get(self.next).filter(|placed| inside(&placed.bytes, self.chunk_end))
        {
            let from = bytes.start.max(start) - start;
            self.hasher.update(&piece[from as usize..(bytes.end.min(end) - start) as usize]);
            if bytes.end > end {
                return;
            }
            if !bytes.is_empty() {
                self.finished.push((self.next, self.hasher.finalize().into()));
            }
            self.hasher.reset();
            self.next += 1;
        }
    }
}
