//! BLAKE3 digests of files and of their chunks.
//!
//! BLAKE3 is a tree: the chaining values of aligned 16 MiB chunks merge into the digest of the whole file, the one that
//! `b3sum` prints. So one pass over the bytes gives both, chunks can be hashed in any order, and a damaged chunk can be named.
//! Source: the BLAKE3 paper, section 2; `blake3::hazmat`.

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use serde::{Deserialize, Serialize};

/// Digests are kept for chunks of this many bytes: a power of two, so that each is a subtree.
pub const CHUNK_BYTES: u64 = 16 << 20;
const _: () = assert!(CHUNK_BYTES.is_power_of_two() && CHUNK_BYTES >= blake3::CHUNK_LEN as u64);

/// A BLAKE3 hash as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of all of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The raw hash.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl From<[u8; 32]> for Digest {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl TryFrom<String> for Digest {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let refuse = || format!("expected 64 hexadecimal digits, found {text:?}");
        blake3::Hash::from_hex(&text).map(Self::from).map_err(|_| refuse())
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// The value of the chunk that starts at `offset` of a file of `file_len` bytes: its chaining value in the file's tree, or,
/// when the file is that one chunk, the file's digest.
///
/// # Panics
/// When `bytes` is not exactly the chunk at `offset`: callers cut files by [`CHUNK_BYTES`].
pub fn chunk_digest(bytes: &[u8], offset: u64, file_len: u64) -> Digest {
    let mut hasher = ChunkHasher::new(offset, file_len);
    hasher.update(bytes);
    hasher.finish()
}

/// [`chunk_digest`] of a chunk that comes in pieces, each hashed while it is in cache.
#[derive(Clone, Debug)]
pub struct ChunkHasher {
    hasher: Hasher,
    /// The chunk is the whole file.
    is_root: bool,
    left: u64,
}

impl ChunkHasher {
    /// For the chunk that starts at `offset` of a file of `file_len` bytes.
    ///
    /// # Panics
    /// When no chunk starts there.
    pub fn new(offset: u64, file_len: u64) -> Self {
        assert!(
            offset.is_multiple_of(CHUNK_BYTES) && offset <= file_len,
            "chunks start at multiples of {CHUNK_BYTES}"
        );
        let is_root = file_len <= CHUNK_BYTES;
        let mut hasher = Hasher::new();
        if !is_root {
            hasher.set_input_offset(offset);
        }
        Self { hasher, is_root, left: CHUNK_BYTES.min(file_len - offset) }
    }

    /// The chunk's next bytes.
    ///
    /// # Panics
    /// When they are more than are left of the chunk.
    pub fn update(&mut self, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= self.left, "no more than a chunk");
        self.left -= bytes.len() as u64;
        self.hasher.update(bytes);
    }

    /// The chunk's value.
    ///
    /// # Panics
    /// Before the whole chunk was hashed.
    pub fn finish(self) -> Digest {
        assert_eq!(self.left, 0, "a whole chunk");
        if self.is_root {
            return Digest::from(self.hasher.finalize());
        }
        Digest(self.hasher.finalize_non_root())
    }
}

/// The digest of a file from the values of all its chunks, in order.
///
/// # Panics
/// Without chunks: an empty file has none and is [`Digest::of`] nothing.
pub fn root_digest(chunks: &[Digest]) -> Digest {
    match chunks {
        [] => panic!("a file of at least one chunk"),
        [only] => *only,
        _ => {
            let (left, right) = chunks.split_at(left_len(chunks.len()));
            Digest::from(merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash))
        }
    }
}

fn subtree(chunks: &[Digest]) -> ChainingValue {
    if let [only] = chunks {
        return only.0;
    }
    let (left, right) = chunks.split_at(left_len(chunks.len()));
    merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
}

/// Chunks of the left subtree: the largest power of two that leaves something for the right one.
fn left_len(chunks: usize) -> usize {
    1 << (chunks - 1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_merge_into_the_digest_of_the_file() {
        let chunk = CHUNK_BYTES as usize;
        for len in [1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 5, 5 * chunk] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
            let chunks: Vec<Digest> = bytes
                .chunks(chunk)
                .enumerate()
                .map(|(i, part)| chunk_digest(part, (i * chunk) as u64, len as u64))
                .collect();
            assert_eq!(root_digest(&chunks), Digest::of(&bytes), "{len} bytes");
            let mut in_pieces = ChunkHasher::new(0, len as u64);
            bytes[..len.min(chunk)].chunks(300_000).for_each(|piece| in_pieces.update(piece));
            assert_eq!(in_pieces.finish(), chunks[0], "{len} bytes");
        }
    }
}
