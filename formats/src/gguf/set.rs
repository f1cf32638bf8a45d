//! A model as one GGUF file or as all parts of a split one (`NAME-00001-of-00003.gguf`, as llama-gguf-split writes them).

use super::{GgufFile, Metadata, TensorInfo, index_names};
use crate::map::{FileState, MappedFile};
use crate::{Error, TensorView};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Beyond this a split is no split: its names have five digits.
const MAX_PARTS: u64 = 99_999;

/// One file of a set.
#[derive(Clone, Debug)]
pub struct GgufPart {
    /// Where it lies.
    pub path: PathBuf,
    /// What it holds.
    pub file: GgufFile,
    /// What the file was when it was opened.
    pub state: FileState,
}

/// One file, or all parts of a split model.
#[derive(Clone, Debug)]
pub struct GgufSet {
    parts: Vec<GgufPart>,
    tensors: Vec<(usize, TensorInfo)>,
    index: HashMap<String, usize>,
}

impl GgufSet {
    /// Opens the file, and its sisters when it is one part of several; any part may be named.
    ///
    /// # Errors
    /// [`Error`] naming the file and the fault; all missing parts are named at once.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let first = open_part(path)?;
        let count = first.file.metadata.u64("split.count").map_err(|e| e.in_file(path))?.unwrap_or(1);
        let parts = if count > 1 { open_all(first, count)? } else { vec![first] };
        Self::join(parts)
    }

    /// The files, in order.
    pub fn parts(&self) -> &[GgufPart] {
        &self.parts
    }

    /// The first file's keys, which speak for all.
    pub fn metadata(&self) -> &Metadata {
        &self.parts[0].file.metadata
    }

    /// The path that errors name: the first part's.
    pub fn path(&self) -> &Path {
        &self.parts[0].path
    }

    /// All tensors with the index of their part, in the order of parts and headers.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, &TensorInfo)> {
        self.tensors.iter().map(|(part, info)| (*part, info))
    }

    /// What the headers say of a tensor, and the index of its part.
    pub fn info(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        self.index.get(name).map(|&i| (self.tensors[i].0, &self.tensors[i].1))
    }

    /// A tensor's bytes; `None` when there is no tensor of this name.
    ///
    /// # Errors
    /// None for a set that opened: ranges were checked then.
    pub fn view(&self, name: &str) -> Result<Option<TensorView>, Error> {
        let Some((part, info)) = self.info(name) else { return Ok(None) };
        self.parts[part].file.view(info).map(Some)
    }

    /// Whether all files still are what they were when they were opened, so that all that was read of them belongs together.
    ///
    /// # Errors
    /// [`Error::Changed`], or [`Error::Io`], naming the first that is not.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.parts.iter().try_for_each(|part| part.state.check(&part.path))
    }

    /// Bytes of all files together.
    pub fn total_len(&self) -> u64 {
        self.parts.iter().map(|part| part.file.len()).sum()
    }

    fn join(parts: Vec<GgufPart>) -> Result<Self, Error> {
        let mut tensors: Vec<(usize, TensorInfo)> = Vec::new();
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for (p, part) in parts.iter().enumerate() {
            for info in &part.file.tensors {
                if let Some(other) = seen.insert(&info.name, p) {
                    return Err(Error::Tensor {
                        tensor: info.name.clone(),
                        expected: "every name once over all parts".to_owned(),
                        found: format!(
                            "it in {} and in {}",
                            parts[other].path.display(),
                            part.path.display()
                        ),
                    }
                    .in_file(&part.path));
                }
                tensors.push((p, info.clone()));
            }
        }
        check_architectures(&parts)?;
        let metadata = &parts[0].file.metadata;
        if let Some(expected) = metadata.u64("split.tensors.count").map_err(|e| e.in_file(&parts[0].path))?
            && expected != tensors.len() as u64
        {
            return Err(Error::Key {
                key: "split.tensors.count".to_owned(),
                expected: format!("{expected} tensors over all parts"),
                found: tensors.len().to_string(),
            }
            .in_file(&parts[0].path));
        }
        let index = index_names(tensors.iter().map(|(_, info)| info.name.as_str()));
        Ok(Self { parts, tensors, index })
    }
}

/// The first part's keys speak for all, so another part must not speak of another model.
fn check_architectures(parts: &[GgufPart]) -> Result<(), Error> {
    const KEY: &str = "general.architecture";
    let name = |part: &GgufPart| match part.file.metadata.str(KEY) {
        Ok(name) => Ok(name.map(str::to_owned)),
        Err(e) => Err(e.in_file(&part.path)),
    };
    let Some(expected) = name(&parts[0])? else { return Ok(()) };
    for part in &parts[1..] {
        if let Some(found) = name(part)?.filter(|found| *found != expected) {
            let expected = format!("{expected}, as in {}", parts[0].path.display());
            return Err(Error::Key { key: KEY.to_owned(), expected, found }.in_file(&part.path));
        }
    }
    Ok(())
}

fn open_part(path: &Path) -> Result<GgufPart, Error> {
    let (bytes, state) = MappedFile::bytes_and_state(path)?;
    let file = GgufFile::parse(bytes).map_err(|e| hint_at_pieces(e, path).in_file(path))?;
    Ok(GgufPart { path: path.to_owned(), file, state })
}

/// A file cut into pieces by name (`x.gguf.part1of2`, `x.gguf-split-a`) fails as truncated or as no GGUF: say why.
fn hint_at_pieces(error: Error, path: &Path) -> Error {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let piece = name.contains(".gguf.part") || name.contains(".gguf-split") || name.contains("-split-a");
    if !piece {
        return error;
    }
    Error::NotGguf {
        found: "its name says that it is one piece of a file cut by bytes; join the pieces in order with `cat PIECE1 PIECE2 ... > model.gguf`"
            .to_owned(),
    }
}

fn open_all(given: GgufPart, count: u64) -> Result<Vec<GgufPart>, Error> {
    let path = given.path.clone();
    if count > MAX_PARTS {
        return Err(
            Error::TooLarge { what: "split.count".to_owned(), found: count, limit: MAX_PARTS }.in_file(path)
        );
    }
    let Some((stem, own)) = split_name(&path, count) else {
        return Err(Error::Key {
            key: "split.count".to_owned(),
            expected: format!("a file named ...-00001-of-{count:05}.gguf, because the metadata says it is one of {count} parts"),
            found: format!(
                "{}; give the parts their names back, or merge them with `llama-gguf-split --merge` (joining parts with cat does not work)",
                path.file_name().unwrap_or_default().to_string_lossy()
            ),
        }
        .in_file(path));
    };
    let sister = |i: u64| path.with_file_name(format!("{stem}-{i:05}-of-{count:05}.gguf"));
    let missing: Vec<String> = (1..=count)
        .map(sister)
        .filter(|p| !p.exists())
        .map(|p| p.file_name().unwrap_or_default().to_string_lossy().into_owned())
        .collect();
    if !missing.is_empty() {
        return Err(Error::MissingParts {
            count: missing.len(),
            total: count as usize,
            missing: missing.join(", "),
            beside: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        }
        .in_file(path));
    }
    let mut given = Some(given);
    let mut parts = Vec::with_capacity(count as usize);
    for i in 1..=count {
        let part = match given.take_if(|_| i == own) {
            Some(part) => part,
            None => open_part(&sister(i))?,
        };
        check_part(&part, i - 1, count)?;
        parts.push(part);
    }
    Ok(parts)
}

fn check_part(part: &GgufPart, number: u64, count: u64) -> Result<(), Error> {
    for (key, expected) in [("split.no", number), ("split.count", count)] {
        let found = part.file.metadata.u64(key).map_err(|e| e.in_file(&part.path))?;
        if found != Some(expected) {
            return Err(Error::Key {
                key: key.to_owned(),
                expected: expected.to_string(),
                found: found.map_or("no such key".to_owned(), |n| n.to_string()),
            }
            .in_file(&part.path));
        }
    }
    Ok(())
}

/// `NAME-00002-of-00003.gguf` -> (`NAME`, 2), when the last number is `count`.
fn split_name(path: &Path, count: u64) -> Option<(String, u64)> {
    let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, total) = name.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five = |s: &str| (s.len() == 5).then(|| s.parse::<u64>().ok()).flatten();
    let number = five(number)?;
    (five(total)? == count && (1..=count).contains(&number)).then(|| (stem.to_owned(), number))
}
