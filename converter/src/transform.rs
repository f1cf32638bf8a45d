//! What is done to the source's bytes, and the bytes of any stretch of a rank's part of the result.
//!
//! Every stretch is a pure function of the source, so a rank file can be made in any order and by any number of threads.

#[cfg(test)]
mod tests;
mod tiles;

use crate::Error;
use formats::layout::Layout;
use formats::manifest::TransformKind;
use formats::{Dtype, Shape, TensorView, quant};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use std::ops::Range;

/// A tensor of the GGUF files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// GGUF name.
    pub name: String,
    /// Its type.
    pub dtype: Dtype,
    /// Row-major, with the dimensions of length 1 that GGUF leaves out.
    pub shape: Shape,
}

/// How a native tensor is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transform {
    /// The source's own bytes.
    Copy(SourceTensor),
    /// The source's own bytes of one half of axis 1: gate or up of a fused `[E, 2 * Fe, hidden]`.
    CopyHalf {
        /// The fused tensor.
        source: SourceTensor,
        /// Which half.
        half: Half,
    },
    /// Every value as F32.
    Dequantize(SourceTensor),
    /// kv_b_proj in BF16.
    JoinKvB {
        /// What it is made of.
        from: KvB,
        /// Head count and widths.
        heads: HeadDims,
    },
}

/// Halves of a fused gate and up projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Gate.
    First,
    /// Up.
    Second,
}

/// What kv_b_proj is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvB {
    /// `attn_k_b` `[H, R, nope]`, `attn_v_b` `[H, v, R]`, and the joined tensor when the file has it too: it must agree.
    Halves {
        /// The key half, each head transposed.
        k_b: SourceTensor,
        /// The value half.
        v_b: SourceTensor,
        /// `attn_kv_b`
        joined: Option<SourceTensor>,
    },
    /// `attn_kv_b` `[H * (nope + v), R]`.
    Joined(SourceTensor),
}

/// Widths of one head's part of kv_b_proj.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadDims {
    /// Key rows.
    pub nope: usize,
    /// Value rows.
    pub v: usize,
    /// Columns: `kv_lora_rank`.
    pub r: usize,
}

impl HeadDims {
    fn rows(self) -> usize {
        self.nope + self.v
    }

    /// BF16 bytes of one head.
    fn bytes(self) -> u64 {
        (self.rows() * self.r * 2) as u64
    }
}

impl Transform {
    /// What manifests call it.
    pub fn kind(&self) -> TransformKind {
        match self {
            Self::Copy(_) | Self::CopyHalf { .. } => TransformKind::Copy,
            Self::Dequantize(_) => TransformKind::Dequantize,
            Self::JoinKvB { .. } => TransformKind::JoinKvB,
        }
    }

    /// The source tensors, in the order that `fill` takes their views.
    pub fn sources(&self) -> Vec<&SourceTensor> {
        match self {
            Self::Copy(source) | Self::CopyHalf { source, .. } | Self::Dequantize(source) => vec![source],
            Self::JoinKvB { from: KvB::Joined(source), .. } => vec![source],
            Self::JoinKvB { from: KvB::Halves { k_b, v_b, joined }, .. } => {
                [k_b, v_b].into_iter().chain(joined).collect()
            }
        }
    }

    /// Type of the result.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::Copy(source) | Self::CopyHalf { source, .. } => source.dtype,
            Self::Dequantize(_) => Dtype::F32,
            Self::JoinKvB { .. } => Dtype::BF16,
        }
    }
}

/// A rank's part of a result: all of it, or a range of one axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Region {
    Whole,
    Range { axis: usize, indices: Range<u64> },
}

impl Region {
    /// Elements of a row of it.
    fn columns(&self, source: &SourceTensor) -> u64 {
        match self {
            Self::Range { axis, indices } if axis + 1 == source.shape.dims().len() => {
                indices.end - indices.start
            }
            _ => source.shape.row_len(),
        }
    }
}

/// Memory that [`fill`] uses again and again: at most a piece of a tensor or one head of kv_b_proj.
#[derive(Default)]
pub(crate) struct Scratch {
    values: Vec<f32>,
    joined: Vec<f32>,
    head: Vec<u8>,
    /// A tile that is wanted in part.
    tile: Vec<u8>,
    /// Which head that is: its source and index.
    head_at_hand: Option<(String, u64)>,
}

/// Elements that are dequantised at a time; a multiple of every block length.
pub(crate) const PIECE: u64 = 1 << 16;

/// Writes bytes `from .. from + out.len()` of the region of `transform`'s result in a layout that fits it into `out`.
///
/// `views` are the sources in the order of [`Transform::sources`].
///
/// # Errors
/// [`Error::NotFinite`], for a block's scales or, where they are computed with, for any value; [`Error::JoinedDiffers`].
pub(crate) fn fill(
    transform: &Transform,
    views: &[TensorView],
    region: &Region,
    layout: &Layout,
    from: u64,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Error> {
    let mut copied = |source: &SourceTensor, half| {
        let (runs, view) = (Runs::of(source, region, half), &views[0]);
        match layout {
            Layout::Ggml => copy(source, &runs, view, from, out),
            Layout::Mma16 => {
                tiles::copy(source, &runs, view, region.columns(source), from, out, &mut scratch.tile)
            }
            Layout::Unknown(name) => panic!("nobody plans the unknown layout {name}"),
        }
    };
    match transform {
        Transform::Copy(source) => copied(source, None),
        Transform::CopyHalf { source, half } => copied(source, Some(*half)),
        Transform::Dequantize(source) => dequantize(source, &views[0], from, out, scratch),
        Transform::JoinKvB { from: parts, heads } => join(parts, *heads, views, region, from, out, scratch),
    }
}

/// A region's bytes in the source: `run` bytes at `first`, and again every `stride` bytes.
#[derive(Debug, PartialEq, Eq)]
struct Runs {
    first: u64,
    run: u64,
    stride: u64,
}

impl Runs {
    fn of(source: &SourceTensor, region: &Region, half: Option<Half>) -> Self {
        let dims = source.shape.dims();
        // Bytes of `n` indices of an axis with everything inside them.
        let bytes = |axis: usize, n: u64| {
            let elements = dims[axis + 1..].iter().product::<u64>() * n;
            source.dtype.bytes_for(elements).expect("cuts are at block boundaries")
        };
        let total = bytes(0, dims[0]);
        let width = |axis: usize| if half.is_some() && axis == 1 { dims[1] / 2 } else { dims[axis] };
        let skipped = |axis: usize| match half {
            Some(Half::Second) if axis == 1 => dims[1] / 2,
            _ => 0,
        };
        match (region, half) {
            (Region::Whole, None) => Self { first: 0, run: total, stride: total },
            (Region::Range { axis, indices }, None) => Self {
                first: bytes(*axis, indices.start),
                run: bytes(*axis, indices.end - indices.start),
                stride: bytes(*axis, dims[*axis]),
            },
            // Every expert's half is a run of its own.
            (Region::Whole, Some(_)) => {
                Self { first: bytes(1, skipped(1)), run: bytes(1, width(1)), stride: bytes(1, dims[1]) }
            }
            (Region::Range { axis: 0, indices }, Some(_)) => Self {
                first: bytes(0, indices.start) + bytes(1, skipped(1)),
                run: if indices.is_empty() { 0 } else { bytes(1, width(1)) },
                stride: bytes(1, dims[1]),
            },
            (Region::Range { axis, indices }, Some(_)) => {
                assert_eq!(*axis, 1, "gate and up are cut by expert or by row");
                Self {
                    first: bytes(1, skipped(1) + indices.start),
                    run: bytes(1, indices.end - indices.start),
                    stride: bytes(1, dims[1]),
                }
            }
        }
    }

    /// Where in the source byte `at` of the region is.
    fn place(&self, at: u64) -> usize {
        (self.first + at / self.run * self.stride + at % self.run) as usize
    }

    /// Where in the source bytes `from .. from + len` of the region are, run by run.
    fn ranges(&self, from: u64, len: usize) -> impl Iterator<Item = Range<usize>> {
        let (mut at, end) = (from, from + len as u64);
        std::iter::from_fn(move || {
            if at == end {
                return None;
            }
            let n = (self.run - at % self.run).min(end - at);
            let start = self.place(at);
            at += n;
            Some(start..start + n as usize)
        })
    }
}

fn copy(
    source: &SourceTensor,
    runs: &Runs,
    view: &TensorView,
    from: u64,
    out: &mut [u8],
) -> Result<(), Error> {
    let bytes = view.bytes();
    let mut rest = out;
    for range in runs.ranges(from, rest.len()) {
        let (now, later) = rest.split_at_mut(range.len());
        now.copy_from_slice(&bytes[range.clone()]);
        rest = later;
        check_finite(source, bytes, range)?;
    }
    Ok(())
}

/// Looks at every block that begins in a range of the source's bytes, while it is in cache.
fn check_finite(source: &SourceTensor, bytes: &[u8], range: Range<usize>) -> Result<(), Error> {
    let block = source.dtype.block_bytes();
    let (first, end) = (range.start.div_ceil(block), range.end.div_ceil(block));
    match quant::first_not_finite(source.dtype, &bytes[first * block..end * block]) {
        None => Ok(()),
        Some(within) => Err(not_finite(source, bytes, first + within)),
    }
}

/// The error of a block with a scale that is no number.
fn not_finite(source: &SourceTensor, bytes: &[u8], block: usize) -> Error {
    let SourceTensor { name, dtype, .. } = source;
    let mut values = vec![0.0; dtype.block_len()];
    let bytes = &bytes[block * dtype.block_bytes()..(block + 1) * dtype.block_bytes()];
    let decoded = quant::decode(*dtype, bytes, &mut values);
    let value = values.into_iter().find(|x| decoded.is_ok() && !x.is_finite()).unwrap_or(f32::NAN);
    Error::NotFinite { tensor: name.clone(), value: value.to_string(), place: place(*dtype, block as u64) }
}

/// A block in words.
fn place(dtype: Dtype, block: u64) -> String {
    if dtype.is_plain() { format!("element {block}") } else { format!("block {block} of {dtype}") }
}

fn dequantize(
    source: &SourceTensor,
    view: &TensorView,
    from: u64,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Error> {
    let total = source.shape.elements();
    let mut element = from / 4;
    let mut rest = out;
    while !rest.is_empty() {
        let block = element / PIECE * PIECE;
        let piece =
            decode(source, view, block..(block + PIECE).min(total), f32::INFINITY, &mut scratch.values)?;
        let skipped = (element - block) as usize;
        let n = (piece.len() - skipped).min(rest.len() / 4);
        let (now, later) = rest.split_at_mut(n * 4);
        for (bytes, value) in now.chunks_exact_mut(4).zip(&piece[skipped..]) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        element += n as u64;
        rest = later;
    }
    Ok(())
}

fn join(
    parts: &KvB,
    heads: HeadDims,
    views: &[TensorView],
    region: &Region,
    from: u64,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Error> {
    let first_row = match region {
        Region::Whole => 0,
        Region::Range { indices, .. } => indices.start,
    };
    let first_head = first_row / heads.rows() as u64;
    let (mut at, mut done) = (from, 0);
    while done < out.len() {
        let head = first_head + at / heads.bytes();
        join_head(parts, heads, views, head, scratch)?;
        let within = (at % heads.bytes()) as usize;
        let n = (scratch.head.len() - within).min(out.len() - done);
        out[done..done + n].copy_from_slice(&scratch.head[within..within + n]);
        at += n as u64;
        done += n;
    }
    Ok(())
}

/// Leaves the BF16 rows of one head in `scratch.head`, unless they are there from the stretch before.
fn join_head(
    parts: &KvB,
    heads: HeadDims,
    views: &[TensorView],
    head: u64,
    scratch: &mut Scratch,
) -> Result<(), Error> {
    let source = match parts {
        KvB::Joined(joined) => joined,
        KvB::Halves { k_b, .. } => k_b,
    };
    if scratch.head_at_hand.as_ref().is_some_and(|(name, index)| *name == source.name && *index == head) {
        return Ok(());
    }
    scratch.head_at_hand = None;
    make_head(parts, heads, views, head, scratch)?;
    scratch.head_at_hand = Some((source.name.clone(), head));
    Ok(())
}

fn make_head(
    parts: &KvB,
    heads: HeadDims,
    views: &[TensorView],
    head: u64,
    scratch: &mut Scratch,
) -> Result<(), Error> {
    let HeadDims { nope, v, r } = heads;
    let elements = |rows: usize| head * (rows * r) as u64..(head + 1) * (rows * r) as u64;
    let Scratch { values, joined, head: out, .. } = scratch;
    out.resize(heads.bytes() as usize, 0);
    let (k_b, v_b, also) = match parts {
        KvB::Joined(source) => {
            round(decode(source, &views[0], elements(nope + v), BF16_LIMIT, values)?, out);
            return Ok(());
        }
        KvB::Halves { k_b, v_b, joined } => (k_b, v_b, joined),
    };
    let (keys, rest) = out.split_at_mut(nope * r * 2);
    let k = decode(k_b, &views[0], elements(nope), BF16_LIMIT, values)?;
    joined.clear();
    joined.extend((0..nope * r).map(|i| k[i % r * nope + i / r]));
    round(joined, keys);
    round(decode(v_b, &views[1], elements(v), BF16_LIMIT, values)?, rest);
    let Some(source) = also else { return Ok(()) };
    let mut other = vec![0; out.len()];
    round(decode(source, &views[2], elements(nope + v), BF16_LIMIT, values)?, &mut other);
    let differs = other.chunks_exact(r * 2).zip(out.chunks_exact(r * 2)).position(|(a, b)| a != b);
    differs.map_or(Ok(()), |row| {
        Err(Error::JoinedDiffers {
            joined: source.name.clone(),
            parts: format!("{} and {}", k_b.name, v_b.name),
            row: head * (nope + v) as u64 + row as u64,
        })
    })
}

/// Rounds to BF16, to nearest even, little-endian.
fn round(values: &[f32], out: &mut [u8]) {
    const AT_ONCE: usize = 1024;
    let mut rounded = [bf16::ZERO; AT_ONCE];
    for (values, out) in values.chunks(AT_ONCE).zip(out.chunks_mut(AT_ONCE * 2)) {
        let rounded = &mut rounded[..values.len()];
        rounded.convert_from_f32_slice(values);
        for (bytes, value) in out.chunks_exact_mut(2).zip(rounded) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
}

/// Magnitudes from here on round to infinity in BF16.
const BF16_LIMIT: f32 = f32::from_bits(0x7f7f_8000);

/// Decodes a range of whole blocks and refuses what is no number below `limit` in magnitude.
fn decode<'a>(
    source: &SourceTensor,
    view: &TensorView,
    elements: Range<u64>,
    limit: f32,
    values: &'a mut Vec<f32>,
) -> Result<&'a [f32], Error> {
    let bytes_for = |n| source.dtype.bytes_for(n).expect("whole rows are whole blocks");
    let bytes = bytes_for(elements.start) as usize..bytes_for(elements.end) as usize;
    values.resize((elements.end - elements.start) as usize, 0.0);
    quant::decode(source.dtype, &view.bytes()[bytes], values)?;
    match values.iter().position(|x| x.is_nan() || x.abs() >= limit) {
        None => Ok(values),
        Some(i) => Err(Error::NotFinite {
            tensor: source.name.clone(),
            value: values[i].to_string(),
            place: place(source.dtype, (elements.start + i as u64) / source.dtype.block_len() as u64),
        }),
    }
}
