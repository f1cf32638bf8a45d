//! Chunks of files, hashed piece by piece.

use crate::Error;
use crate::work::Stage;
use formats::Digest;
use formats::digest::{CHUNK_BYTES, ChunkHasher};
use std::fs::File;
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

/// Hashes a chunk of a file of `len` bytes.
///
/// It is read, not mapped: that is several times faster than faulting cold pages in one by one, and leaves them where mappings
/// find them.
pub(crate) fn hash(
    path: &Path,
    chunk: u64,
    len: u64,
    stage: &Stage,
    piece: &mut Vec<u8>,
) -> Result<Digest, Error> {
    let file = File::open(path).map_err(|e| Error::io(path, "cannot open", e))?;
    let mut hasher = ChunkHasher::new(chunk * CHUNK_BYTES, len);
    for range in pieces(chunk, len) {
        piece.resize((range.end - range.start) as usize, 0);
        file.read_exact_at(piece, range.start)
            .map_err(|e| Error::io(path, format!("cannot read at byte {}", range.start), e))?;
        hasher.update(piece);
        stage.advance(piece.len() as u64);
    }
    Ok(hasher.finish())
}
