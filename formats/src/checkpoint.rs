//! Reading a native checkpoint: manifests checked against each other and their files, rank files mapped.

use crate::digest::chunk_digest;
use crate::manifest::{Layout, MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, RankManifest, TensorEntry};
use crate::map::{FileState, FileWatch, MappedFile, open_regular};
use crate::{Digest, Error, TensorView};
use bytes::Bytes;
use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A directory that a conversion finished.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    manifest: Manifest,
}

/// One rank's weights, mapped.
#[derive(Clone, Debug)]
pub struct RankShard {
    path: PathBuf,
    manifest: RankManifest,
    index: HashMap<String, usize>,
    bytes: Bytes,
    /// What the file was when it was mapped.
    state: FileState,
}

impl Checkpoint {
    /// Opens a checkpoint by its top manifest.
    ///
    /// # Errors
    /// [`Error::NotACheckpoint`] when there is none; otherwise an error naming the file and the field.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let not_a_checkpoint =
            |why: &str| Err(Error::NotACheckpoint { path: dir.to_owned(), why: why.to_owned() });
        if !dir.exists() {
            return not_a_checkpoint("there is no such directory");
        }
        if dir.is_file() {
            return not_a_checkpoint("it is a file; name the directory that `shardmill convert` wrote");
        }
        let path = dir.join(MANIFEST_FILE);
        if !path.exists() {
            return not_a_checkpoint(
                "it has no checkpoint.json, so no conversion finished here; run `shardmill convert` again",
            );
        }
        let manifest = Manifest::parse(&read_capped(&path)?).map_err(|e| e.in_file(&path))?;
        Ok(Self { dir: dir.to_owned(), manifest })
    }

    /// The top manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A rank's manifest, held against the digest that the top manifest gives.
    ///
    /// # Errors
    /// An error naming the file and the field.
    ///
    /// # Panics
    /// When `rank` is not one of the manifest's.
    pub fn rank_manifest(&self, rank: usize) -> Result<RankManifest, Error> {
        let entry = &self.manifest.rank_files[rank];
        let path = self.dir.join(&entry.manifest);
        let bytes = read_capped(&path)?;
        let found = Digest::of(&bytes);
        if found != entry.manifest_blake3 {
            return Err(Error::Digest {
                file: path.display().to_string(),
                expected: entry.manifest_blake3.to_string(),
                found: found.to_string(),
            });
        }
        let manifest = RankManifest::parse(&bytes).map_err(|e| e.in_file(&path))?;
        let same = (manifest.rank, manifest.ranks, manifest.bytes, manifest.blake3)
            == (rank, self.manifest.ranks, entry.bytes, entry.blake3);
        if !same {
            return Err(Error::Manifest {
                field: "rank, ranks, bytes, blake3".to_owned(),
                expected: format!("what {MANIFEST_FILE} says of rank {rank}"),
                found: "something else; convert the model again".to_owned(),
            }
            .in_file(&path));
        }
        Ok(manifest)
    }

    /// Every rank's manifest, held against each other: the same tensors everywhere, whose parts make up the whole.
    ///
    /// # Errors
    /// An error naming the file and the field or tensor.
    pub fn rank_manifests(&self) -> Result<Vec<RankManifest>, Error> {
        let manifests =
            (0..self.manifest.ranks).map(|rank| self.rank_manifest(rank)).collect::<Result<Vec<_>, _>>()?;
        self.manifest.check_ranks(&manifests).map_err(|e| e.in_file(&self.dir))?;
        Ok(manifests)
    }

    /// Maps a rank's weights. Sizes and places are checked; the bytes themselves are not read.
    ///
    /// # Errors
    /// An error naming the file, what was expected and what was found.
    ///
    /// # Panics
    /// When `rank` is not one of the manifest's.
    pub fn rank(&self, rank: usize) -> Result<RankShard, Error> {
        let manifest = self.rank_manifest(rank)?;
        let path = self.dir.join(&manifest.file);
        let (bytes, state) = MappedFile::bytes_and_state(&path)?;
        if bytes.len() as u64 != manifest.bytes {
            return Err(Error::Manifest {
                field: "size".to_owned(),
                expected: format!("{} bytes, as the manifest says", manifest.bytes),
                found: format!("{}; copy or convert the file again", bytes.len()),
            }
            .in_file(&path));
        }
        let header = bytes.first_chunk::<8>().map(|len| u64::from_le_bytes(*len));
        if header.and_then(|len| len.checked_add(8)) != Some(manifest.data_start) {
            return Err(Error::Manifest {
                field: "safetensors header".to_owned(),
                expected: format!("a length of {}", manifest.data_start.saturating_sub(8)),
                found: format!(
                    "{}; copy or convert the file again",
                    header.map_or("none".to_owned(), |n| n.to_string())
                ),
            }
            .in_file(&path));
        }
        let index = manifest.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(RankShard { path, manifest, index, bytes, state })
    }
}

impl RankShard {
    /// Its manifest.
    pub fn manifest(&self) -> &RankManifest {
        &self.manifest
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Whether the file still is what it was when it was mapped.
    ///
    /// # Errors
    /// [`Error::Changed`], or [`Error::Io`], naming it.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.state.check(&self.path)
    }

    /// What the file was when it was mapped.
    pub fn state(&self) -> &FileState {
        &self.state
    }

    /// Opens the file again, to watch whether its bytes stay what they were when it was mapped.
    ///
    /// # Errors
    /// [`Error::Changed`], or [`Error::Io`], naming it.
    pub fn watch(&self) -> Result<FileWatch, Error> {
        FileWatch::open(&self.path, &self.state)
    }

    /// Holds chunk `chunk` of the file against its digest.
    ///
    /// # Errors
    /// [`Error::Chunk`] naming rank, chunk and the tensors in it.
    ///
    /// # Panics
    /// When the manifest has no such chunk.
    pub fn check_chunk(&self, chunk: usize) -> Result<(), Error> {
        let manifest = &self.manifest;
        let range = manifest.chunk(chunk);
        let bytes = &self.bytes[range.start as usize..range.end as usize];
        if chunk_digest(bytes, range.start, manifest.bytes) == manifest.chunks[chunk] {
            return Ok(());
        }
        Err(self.damaged_chunk(chunk))
    }

    /// What to say of a chunk whose digest is wrong: its place, and the tensors that are damaged, as far as digests tell.
    ///
    /// # Panics
    /// When the manifest has no such chunk.
    pub fn damaged_chunk(&self, chunk: usize) -> Error {
        let range = self.manifest.chunk(chunk);
        self.damaged(chunk, &self.bytes[range.start as usize..range.end as usize])
    }

    /// The same of a chunk that was read to `bytes`, whatever is mapped.
    ///
    /// # Panics
    /// When the manifest has no such chunk, or these are not as many bytes.
    pub fn damaged(&self, chunk: usize, bytes: &[u8]) -> Error {
        let manifest = &self.manifest;
        let range = manifest.chunk(chunk);
        Error::Chunk {
            file: self.path.display().to_string(),
            rank: manifest.rank,
            chunk,
            start: range.start,
            end: range.end,
            tensors: self.damaged_in(&range, bytes),
        }
    }

    /// The tensors of a range whose own digests are wrong; when there are none, all that have no digest of their own.
    fn damaged_in(&self, range: &Range<u64>, bytes: &[u8]) -> String {
        const SHOWN: usize = 3;
        let place = |at: u64| at.checked_sub(range.start).map(|at| at as usize);
        // Where a manifest gives a tensor a digest that crosses chunks, this one says nothing of it.
        let own = |entry: &TensorEntry| bytes.get(place(entry.bytes.0)?..place(entry.bytes.1)?);
        let wrong = |entry: &TensorEntry| Some(entry.blake3? != Digest::of(own(entry)?));
        let (mut damaged, mut suspects) = (Vec::new(), Vec::new());
        if range.start < self.manifest.data_start {
            suspects.push("the header");
        }
        for entry in self.manifest.tensors_in(range) {
            match wrong(entry) {
                Some(true) => damaged.push(entry.name.as_str()),
                Some(false) => {}
                None => suspects.push(&entry.name),
            }
        }
        let names = if damaged.is_empty() { suspects } else { damaged };
        let shown = names[..names.len().min(SHOWN)].join(", ");
        match names.len().saturating_sub(SHOWN) {
            0 => shown,
            more => format!("{shown} and {more} more"),
        }
    }

    /// The entry of a tensor by its native name.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.index.get(name).map(|&i| &self.manifest.tensors[i])
    }

    /// A tensor whose bytes are rows of blocks.
    ///
    /// # Errors
    /// [`Error::Layout`] or [`Error::OtherLayout`] when they are arranged in another way.
    pub fn view(&self, entry: &TensorEntry) -> Result<TensorView, Error> {
        if entry.layout == Layout::Mma16 {
            let (tensor, layout) = (entry.name.clone(), entry.layout.name().to_owned());
            return Err(Error::OtherLayout { tensor, layout }.in_file(&self.path));
        }
        self.arranged(entry)
    }

    /// A tensor's bytes in the layout that its entry names; type and shape are those of the tensor, whatever the order.
    ///
    /// # Errors
    /// [`Error::Layout`] when nothing is known of it here.
    pub fn arranged(&self, entry: &TensorEntry) -> Result<TensorView, Error> {
        if let Layout::Unknown(layout) = &entry.layout {
            return Err(
                Error::Layout { tensor: entry.name.clone(), layout: layout.clone() }.in_file(&self.path)
            );
        }
        let bytes = self.bytes.slice(entry.bytes.0 as usize..entry.bytes.1 as usize);
        TensorView::new(&entry.name, entry.dtype, entry.shape.clone(), bytes)
            .map_err(|e| e.in_file(&self.path))
    }
}

/// A small file, whole.
fn read_capped(path: &Path) -> Result<Vec<u8>, Error> {
    let io = |source| Error::io(path, "cannot read", source);
    let file = open_regular(path)?;
    let mut bytes = Vec::new();
    file.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_MANIFEST_BYTES {
        let found = bytes.len() as u64;
        return Err(
            Error::TooLarge { what: "manifest".to_owned(), found, limit: MAX_MANIFEST_BYTES }.in_file(path)
        );
    }
    Ok(bytes)
}
