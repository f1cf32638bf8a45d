//! What is done to the source's bytes, and the bytes of any stretch of a rank's part of the result.
//!
//! Every stretch is a pure function of the source, so a rank file can be made in any order and by any number of threads.

use crate::Error;
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

/// Memory that [`fill`] uses again and again: at most a piece of a tensor or one head of kv_b_proj.
#[derive(Default)]
pub(crate) struct Scratch {
    values: Vec<f32>,
    joined: Vec<f32>,
    head: Vec<u8>,
    /// Which head that is: its source and index.
    head_at_hand: Option<(String, u64)>,
}

/// Elements that are dequantised at a time; a multiple of every block length.
pub(crate) const PIECE: u64 = 1 << 16;

/// Writes bytes `from .. from + out.len()` of the region of `transform`'s result into `out`.
///
/// `views` are the sources in the order of [`Transform::sources`].
///
/// # Errors
/// [`Error::NotFinite`], for a block's scales or, where they are computed with, for any value; [`Error::JoinedDiffers`].
pub(crate) fn fill(
    transform: &Transform,
    views: &[TensorView],
    region: &Region,
    from: u64,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Error> {
    match transform {
        Transform::Copy(source) => copy(source, &Runs::of(source, region, None), &views[0], from, out),
        Transform::CopyHalf { source, half } => {
            copy(source, &Runs::of(source, region, Some(*half)), &views[0], from, out)
        }
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

    /// Where in the source bytes `from .. from + len` of the region are, run by run.
    fn ranges(&self, from: u64, len: usize) -> impl Iterator<Item = Range<usize>> {
        let (mut at, end) = (from, from + len as u64);
        std::iter::from_fn(move || {
            if at == end {
                return None;
            }
            let within = at % self.run;
            let n = (self.run - within).min(end - at);
            let start = self.first + at / self.run * self.stride + within;
            at += n;
            Some(start as usize..(start + n) as usize)
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
    let block = source.dtype.block_bytes();
    let mut rest = out;
    for range in runs.ranges(from, rest.len()) {
        let (now, later) = rest.split_at_mut(range.len());
        now.copy_from_slice(&bytes[range.clone()]);
        rest = later;
        // Each block is looked at where it begins, while it is in cache.
        let (first, end) = (range.start.div_ceil(block), range.end.div_ceil(block));
        if let Some(within) = quant::first_not_finite(source.dtype, &bytes[first * block..end * block]) {
            return Err(not_finite(source, bytes, first + within));
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn source(name: &str, dtype: Dtype, dims: &[u64]) -> SourceTensor {
        SourceTensor { name: name.to_owned(), dtype, shape: Shape::new(dims).unwrap() }
    }

    fn view(source: &SourceTensor, bytes: Vec<u8>) -> TensorView {
        TensorView::new(&source.name, source.dtype, source.shape.clone(), Bytes::from(bytes)).unwrap()
    }

    /// Values that say where they come from.
    fn counting(elements: u64) -> Vec<u8> {
        (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect()
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    /// Fills a region in pieces of an odd size, so that every seam is crossed.
    fn filled(transform: &Transform, views: &[TensorView], region: &Region, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut scratch = Scratch::default();
        for (i, piece) in bytes.chunks_mut(12).enumerate() {
            fill(transform, views, region, i as u64 * 12, piece, &mut scratch).unwrap();
        }
        bytes
    }

    #[test]
    fn copies_are_the_indices_of_the_region() {
        let dims = [3u64, 4, 6];
        let tensor = source("t", Dtype::F32, &dims);
        let views = [view(&tensor, counting(72))];
        let transform = Transform::Copy(tensor);
        for axis in 0..3 {
            for start in 0..=dims[axis] {
                for end in start..=dims[axis] {
                    let kept = |index: [u64; 3]| (start..end).contains(&index[axis]);
                    let all = (0..3).flat_map(|a| (0..4).flat_map(move |b| (0..6).map(move |c| [a, b, c])));
                    let expected: Vec<f32> =
                        all.filter(|&i| kept(i)).map(|[a, b, c]| ((a * 4 + b) * 6 + c) as f32).collect();
                    let region = Region::Range { axis, indices: start..end };
                    let found = filled(&transform, &views, &region, expected.len() * 4);
                    assert_eq!(floats(&found), expected, "axis {axis}, {start}..{end}");
                }
            }
        }
        assert_eq!(filled(&transform, &views, &Region::Whole, 288), counting(72));
    }

    #[test]
    fn halves_of_a_fused_tensor_are_cut_by_expert_and_by_row() {
        let fused = source("t", Dtype::F32, &[3, 4, 6]);
        let views = [view(&fused, counting(72))];
        for (half, skipped) in [(Half::First, 0), (Half::Second, 2)] {
            let transform = Transform::CopyHalf { source: fused.clone(), half };
            let regions = [
                (Region::Whole, 0..3, 0..2),
                (Region::Range { axis: 0, indices: 1..3 }, 1..3, 0..2),
                (Region::Range { axis: 0, indices: 2..2 }, 2..2, 0..2),
                (Region::Range { axis: 1, indices: 1..2 }, 0..3, 1..2),
            ];
            for (region, experts, rows) in regions {
                let rows = || rows.clone();
                let expected: Vec<f32> = experts
                    .flat_map(|e: u64| {
                        rows().flat_map(move |r: u64| {
                            (0..6).map(move |c| (e * 24 + (r + skipped) * 6 + c) as f32)
                        })
                    })
                    .collect();
                assert_eq!(
                    floats(&filled(&transform, &views, &region, expected.len() * 4)),
                    expected,
                    "{region:?}"
                );
            }
        }
    }

    #[test]
    fn block_types_are_cut_between_blocks() {
        let tensor = source("t", Dtype::Q8_0, &[2, 96]);
        let bytes: Vec<u8> = (0..204).map(|i| i as u8).collect();
        let views = [view(&tensor, bytes.clone())];
        let region = Region::Range { axis: 1, indices: 32..96 };
        let found = filled(&Transform::Copy(tensor), &views, &region, 136);
        assert_eq!(found, [&bytes[34..102], &bytes[136..204]].concat());
    }

    #[test]
    fn heads_are_nope_rows_transposed_back_and_then_v_rows() {
        let dims = HeadDims { nope: 3, v: 2, r: 4 };
        let k_b = source("k_b", Dtype::F32, &[2, 4, 3]);
        let v_b = source("v_b", Dtype::F32, &[2, 2, 4]);
        let views = [view(&k_b, counting(24)), view(&v_b, counting(16))];
        let transform = Transform::JoinKvB { from: KvB::Halves { k_b, v_b, joined: None }, heads: dims };
        let mut expected: Vec<f32> = Vec::new();
        for head in 0..2 {
            expected.extend((0..3).flat_map(|n| (0..4).map(move |r| ((head * 4 + r) * 3 + n) as f32)));
            expected.extend((0..2).flat_map(|v| (0..4).map(move |r| ((head * 2 + v) * 4 + r) as f32)));
        }
        let bf16 = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
        };
        assert_eq!(bf16(&filled(&transform, &views, &Region::Whole, 80)), expected);
        let second = Region::Range { axis: 0, indices: 5..10 };
        assert_eq!(bf16(&filled(&transform, &views, &second, 40)), expected[20..]);
    }

    #[test]
    fn what_is_no_number_is_named() {
        let tensor = source("blk.0.attn_norm.weight", Dtype::F32, &[4]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut bytes = counting(4);
            bytes[8..12].copy_from_slice(&bad.to_le_bytes());
            let views = [view(&tensor, bytes)];
            let transform = Transform::Dequantize(tensor.clone());
            let error = fill(&transform, &views, &Region::Whole, 0, &mut [0; 16], &mut Scratch::default())
                .unwrap_err();
            let said = error.to_string();
            assert!(said.contains("blk.0.attn_norm.weight") && said.contains(&bad.to_string()), "{said}");
            assert!(said.contains("element 2;"), "{said}");
        }
    }

    /// Wherever a piece or a part begins, a block is looked at once.
    #[test]
    fn a_scale_that_is_no_number_is_named_in_copies_too() {
        let tensor = source("blk.1.ffn_up_exps.weight", Dtype::Q8_0, &[2, 4, 96]);
        let good: Vec<u8> = (0..24 * 34u32).map(|i| if i % 34 == 1 { 0x20 } else { 1 }).collect();
        for block in 0..24 {
            let mut bytes = good.clone();
            bytes[block * 34..block * 34 + 2].copy_from_slice(&0x7c00u16.to_le_bytes());
            let views = [view(&tensor, bytes)];
            let transform = Transform::Copy(tensor.clone());
            let expert = block / 12;
            for (region, len) in [
                (Region::Whole, 24 * 34),
                (Region::Range { axis: 0, indices: 0..1 }, 12 * 34),
                (Region::Range { axis: 1, indices: 1..3 }, 12 * 34),
                (Region::Range { axis: 2, indices: 64..96 }, 8 * 34),
            ] {
                let inside = match &region {
                    Region::Range { axis: 0, .. } => expert == 0,
                    Region::Range { axis: 1, .. } => matches!(block / 3 % 4, 1 | 2),
                    Region::Range { .. } => block % 3 == 2,
                    Region::Whole => true,
                };
                let mut out = vec![0; len];
                let mut scratch = Scratch::default();
                let pieces = out.chunks_mut(50).enumerate();
                let found: Vec<String> = pieces
                    .filter_map(|(i, piece)| {
                        fill(&transform, &views, &region, i as u64 * 50, piece, &mut scratch).err()
                    })
                    .map(|e| e.to_string())
                    .collect();
                assert_eq!(found.len(), usize::from(inside), "{region:?}: {found:?}");
                let name = format!(
                    "blk.1.ffn_up_exps.weight: expected finite numbers, found inf in block {block} of"
                );
                assert!(found.iter().all(|said| said.contains(&name)), "{found:?}");
            }
        }
    }

    #[test]
    fn values_beyond_bf16_are_refused_and_the_largest_are_kept() {
        let tensor = source("kv_b", Dtype::F32, &[2, 2]);
        let heads = HeadDims { nope: 1, v: 1, r: 2 };
        let transform = Transform::JoinKvB { from: KvB::Joined(tensor.clone()), heads };
        let join = |x: f32| {
            let bytes = [1.0, x, 2.0, 3.0f32].iter().flat_map(|x| x.to_le_bytes()).collect();
            let mut out = [0; 8];
            fill(&transform, &[view(&tensor, bytes)], &Region::Whole, 0, &mut out, &mut Scratch::default())
                .map(|()| bf16::from_le_bytes([out[2], out[3]]))
        };
        assert!(join(f32::MAX).is_err());
        assert_eq!(join(-f32::from(bf16::MAX)).unwrap(), bf16::MIN);
        // Halves go to the even neighbour.
        assert_eq!(join(1.0 + 1.0 / 256.0).unwrap(), bf16::ONE);
        assert_eq!(join(1.0 + 3.0 / 256.0).unwrap().to_f32(), 1.0 + 4.0 / 256.0);
    }
}
