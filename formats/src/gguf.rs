//! GGUF versions 2 and 3: one file ([`GgufFile`]), or all parts of a split model ([`GgufSet`]).
//!
//! Source: the GGUF specification in ggml's repository and what llama.cpp b11434 writes. Every count and length is held
//! against the bytes that are left before anything is allocated for it.

mod metadata;
mod set;

pub use metadata::{Array, Metadata, Value, ValueType};
pub use set::{GgufPart, GgufSet};

use crate::reader::Reader;
use crate::tensor::bytes_of;
use crate::{Dtype, Error, Shape, TensorView};
use bytes::Bytes;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Name length, dimension count, one dimension, type and offset.
const LEAST_TENSOR_BYTES: usize = 8 + 4 + 4 + 8;
/// Key length, value type and one byte of value.
const LEAST_KEY_BYTES: usize = 8 + 4 + 1;

/// What the header says of one tensor.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Its GGUF name.
    pub name: String,
    /// Its type.
    pub dtype: Dtype,
    /// Row-major shape: GGUF's `ne` reversed.
    pub shape: Shape,
    /// Where its bytes lie in the file.
    pub bytes: Range<u64>,
}

/// One parsed GGUF file. Parsing reads the header alone; tensors are slices of the bytes.
#[derive(Clone, Debug)]
pub struct GgufFile {
    /// 2 or 3.
    pub version: u32,
    /// All keys.
    pub metadata: Metadata,
    /// All tensors, in the order of the header.
    pub tensors: Vec<TensorInfo>,
    /// Where the data section starts.
    pub data_start: u64,
    bytes: Bytes,
}

impl GgufFile {
    /// Parses the header and checks every tensor against the file's length and the others.
    ///
    /// # Errors
    /// [`Error`] naming the field, key or tensor; never a panic, whatever the bytes.
    pub fn parse(bytes: Bytes) -> Result<Self, Error> {
        let mut reader = Reader::new(&bytes);
        let version = header_version(&mut reader)?;
        let tensor_count = reader.count(LEAST_TENSOR_BYTES, "tensor count")?;
        let key_count = reader.count(LEAST_KEY_BYTES, "metadata key count")?;
        let metadata = Metadata::read(&mut reader, &bytes, key_count)?;
        let alignment = alignment(&metadata)?;
        let raw = read_tensors(&mut reader, tensor_count)?;
        let data_start = (reader.position() as u64).next_multiple_of(alignment);
        let tensors = place(raw, data_start, alignment, bytes.len() as u64)?;
        Ok(Self { version, metadata, tensors, data_start, bytes })
    }

    /// The file's size in bytes.
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Never true: a file without a header does not parse.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The tensor's bytes with their type and shape.
    ///
    /// # Errors
    /// None for an `info` of this file, whose range was checked when it was parsed.
    pub fn view(&self, info: &TensorInfo) -> Result<TensorView, Error> {
        let bytes = self.bytes.slice(info.bytes.start as usize..info.bytes.end as usize);
        TensorView::new(&info.name, info.dtype, info.shape.clone(), bytes)
    }
}

fn header_version(reader: &mut Reader<'_>) -> Result<u32, Error> {
    let start = reader.clone();
    let head = start.clone().take(MAGIC.len().min(start.remaining()), "magic")?;
    if head.is_empty() || !MAGIC.starts_with(head) {
        return Err(Error::NotGguf { found: describe(start) });
    }
    reader.take(MAGIC.len(), "magic")?;
    match reader.u32("version")? {
        version @ (2 | 3) => Ok(version),
        1 => Err(Error::Version {
            found: "version 1 (32-bit lengths) is not read here; convert the model again with a llama.cpp of after August 2023"
                .to_owned(),
        }),
        v if matches!(v.swap_bytes(), 1..=3) => Err(Error::Version {
            found: format!(
                "is big-endian (version reads as {v:#010x}); convert it on, or for, a little-endian machine (gguf-py's gguf_convert_endian)"
            ),
        }),
        v => Err(Error::Version { found: format!("version {v} is not known here; versions 2 and 3 are read") }),
    }
}

/// What a file without the magic looks like, and what to do about it.
fn describe(mut start: Reader<'_>) -> String {
    let left = start.remaining();
    let head = start.take(left.min(512), "head").unwrap_or_default();
    let text = String::from_utf8_lossy(head).trim_start().to_ascii_lowercase();
    if head.is_empty() {
        return "the file is empty; get it again".to_owned();
    }
    if text.starts_with("version https://git-lfs") {
        return "it is a Git LFS pointer, not the model; run `git lfs pull` where it came from".to_owned();
    }
    if text.starts_with("<!doctype html") || text.starts_with("<html") || text.starts_with("<?xml") {
        return "it is an HTML page, not the model; download the file itself (on Hugging Face: /resolve/, not /blob/)".to_owned();
    }
    if head.starts_with(b"lmgg") || head.starts_with(b"fmgg") || head.starts_with(b"tjgg") {
        return "it is a file of the time before GGUF (ggml, ggmf or ggjt); convert the original model again"
            .to_owned();
    }
    if head.starts_with(b"PK\x03\x04") {
        return "it is a ZIP archive (perhaps a PyTorch checkpoint); unpack it, or convert it to GGUF first"
            .to_owned();
    }
    if head.len() > 9 && head[8] == b'{' && head[9] == b'"' {
        return "it is a safetensors file; convert it to GGUF first".to_owned();
    }
    if head.iter().all(|&b| b == 0) {
        return "it starts with zeros: an unfinished download; get it again".to_owned();
    }
    let magic: String =
        head.iter().take(4).flat_map(|b| std::ascii::escape_default(*b)).map(char::from).collect();
    format!("the magic is \"{magic}\", expected \"GGUF\"; this is some other kind of file")
}

fn alignment(metadata: &Metadata) -> Result<u64, Error> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.value(KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    match value {
        Value::U32(n) if *n != 0 && n.is_multiple_of(8) => Ok(u64::from(*n)),
        other => Err(Error::Key {
            key: KEY.to_owned(),
            expected: "a u32 that is a non-zero multiple of 8".to_owned(),
            found: other.to_string(),
        }),
    }
}

struct RawTensor {
    name: String,
    dtype: Dtype,
    shape: Shape,
    offset: u64,
    size: u64,
}

fn read_tensors(reader: &mut Reader<'_>, count: usize) -> Result<Vec<RawTensor>, Error> {
    // A count that fits a 400 GB file can still be a lie: grow from here.
    let expected = count.min(1 << 12);
    let mut names = HashSet::with_capacity(expected);
    let mut unknown: Option<(String, u32)> = None;
    let (mut same_type, mut other_types) = (0, 0);
    let mut tensors = Vec::with_capacity(expected);
    for index in 0..count {
        let name = reader.name(&format!("name of tensor {index}"))?.to_owned();
        let what = format!("header's entry of tensor {name}");
        let shape = read_shape(reader, &what, &name)?;
        let id = reader.u32(&what)?;
        let offset = reader.u64(&what)?;
        if !names.insert(name.clone()) {
            return Err(Error::Tensor {
                tensor: name,
                expected: "every name once".to_owned(),
                found: "two tensors of this name; the file is damaged, convert the model again".to_owned(),
            });
        }
        let Some(dtype) = Dtype::from_id(id) else {
            let (_, first) = unknown.get_or_insert((name, id));
            *(if *first == id { &mut same_type } else { &mut other_types }) += 1;
            continue;
        };
        let size = bytes_of(dtype, &shape).ok_or_else(|| size_error(&name, dtype, &shape))?;
        tensors.push(RawTensor { name, dtype, shape, offset, size });
    }
    match unknown {
        Some((tensor, id)) => Err(Error::UnknownType {
            tensor,
            id,
            why: why_unknown(id),
            count: same_type,
            others: other_types,
        }),
        None => Ok(tensors),
    }
}

fn size_error(name: &str, dtype: Dtype, shape: &Shape) -> Error {
    if !shape.row_len().is_multiple_of(dtype.block_len() as u64) {
        return Error::Block { tensor: name.to_owned(), dtype, row_len: shape.row_len() };
    }
    Error::Tensor {
        tensor: name.to_owned(),
        expected: "a size that fits 64 bits".to_owned(),
        found: format!("{dtype} {shape}"),
    }
}

fn why_unknown(id: u32) -> &'static str {
    match id {
        4 | 5 | 31..=33 | 36..=38 => "removed from ggml",
        97..=400 => "not ggml's (the range is used by ik_llama.cpp's own quantisations)",
        _ => "unknown",
    }
}

fn read_shape(reader: &mut Reader<'_>, what: &str, name: &str) -> Result<Shape, Error> {
    let dims = reader.u32(what)?;
    if dims as usize > Shape::MAX_DIMS {
        return Err(Error::Tensor {
            tensor: name.to_owned(),
            expected: "at most 4 dimensions".to_owned(),
            found: dims.to_string(),
        });
    }
    let mut shape = Vec::with_capacity(Shape::MAX_DIMS);
    for _ in 0..dims {
        shape.push(reader.u64(what)?);
    }
    // ggml keeps a scalar as one value.
    if shape.is_empty() {
        shape.push(1);
    }
    shape.reverse();
    Shape::new(&shape).map_err(|_| Error::Tensor {
        tensor: name.to_owned(),
        expected: "dimensions whose product fits 64 bits".to_owned(),
        found: format!("{shape:?}"),
    })
}

/// Turns offsets into ranges of the file and refuses ranges that lie outside it, are misaligned or overlap.
fn place(
    raw: Vec<RawTensor>,
    data_start: u64,
    alignment: u64,
    file_len: u64,
) -> Result<Vec<TensorInfo>, Error> {
    let mut tensors = Vec::with_capacity(raw.len());
    for t in raw {
        if !t.offset.is_multiple_of(alignment) {
            return Err(Error::Tensor {
                tensor: t.name,
                expected: format!("an offset that is a multiple of the alignment, {alignment}"),
                found: t.offset.to_string(),
            });
        }
        let start = data_start.checked_add(t.offset);
        let end = start.and_then(|start| start.checked_add(t.size));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(Error::Tensor {
                tensor: t.name,
                expected: "an end that fits 64 bits".to_owned(),
                found: format!("offset {}, {} bytes", t.offset, t.size),
            });
        };
        if end > file_len {
            let what = format!("tensor {}", t.name);
            return Err(Error::Truncated { what, at: start, len: file_len, missing: end - file_len });
        }
        tensors.push(TensorInfo { name: t.name, dtype: t.dtype, shape: t.shape, bytes: start..end });
    }
    let mut by_start: Vec<&TensorInfo> = tensors.iter().filter(|t| !t.bytes.is_empty()).collect();
    by_start.sort_by_key(|t| t.bytes.start);
    for pair in by_start.windows(2) {
        if pair[1].bytes.start < pair[0].bytes.end {
            return Err(Error::Tensor {
                tensor: pair[1].name.clone(),
                expected: format!("bytes after those of {}", pair[0].name),
                found: format!(
                    "an overlap of {} bytes; the file is damaged, convert the model again",
                    pair[0].bytes.end - pair[1].bytes.start
                ),
            });
        }
    }
    Ok(tensors)
}

/// Index of tensor names over any number of files.
fn index_names<'a>(names: impl Iterator<Item = &'a str>) -> HashMap<String, usize> {
    names.enumerate().map(|(i, name)| (name.to_owned(), i)).collect()
}
