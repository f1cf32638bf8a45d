//! Weights as the checkpoint stores them.

use super::integers::Meet;
use super::isa::{Kernel, Proven, Vector};
use crate::Error;
use crate::rounding;
use crate::shape::{dims, dims_of, scale_each};
use formats::quant::{Block, ForBlock, SUPER_BLOCK, dispatch};
use formats::{Dtype, Shape, TensorView};
use std::marker::PhantomData;
use std::ops::Range;

/// A weight in the checkpoint's own blocks, sharing the bytes of the views that it was made of.
pub struct Weight {
    dtype: Dtype,
    whole: Shape,
    /// In order; none is empty unless it is the only one.
    parts: Vec<Part>,
    axis: Axis,
    decode: Decode,
    /// Products with rounded activations; `None`: activations stay as they are.
    pub(super) meet: Option<Meet>,
    /// Rows of a matrix, of each one in a stack; 1 for a vector.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// What each matrix is multiplied by; empty: nothing.
    scales: Vec<f32>,
    /// Where the parts' columns begin and, last, end: each is rounded as blocks of its own.
    columns: Vec<usize>,
}

/// What one view has of a weight.
struct Part {
    view: TensorView,
    /// Which matrices, rows of each or columns.
    range: Range<usize>,
    row_bytes: usize,
}

/// What the parts of a weight have one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Matrices,
    Rows,
    Columns,
}

/// How activations are rounded for a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rounding<'a> {
    /// Columns that share a factor.
    pub block_len: usize,
    /// Where runs of columns begin and, last, end, each of which begins with a block.
    pub columns: &'a [usize],
}

/// Rows of blocks that lie together.
pub(super) struct Segment<'a> {
    pub bytes: &'a [u8],
    pub row_bytes: usize,
    pub cols: usize,
    /// The rounded activations' block that its columns begin with.
    pub first_block: usize,
}

/// Decodes whole blocks with a given instruction set.
#[derive(Clone, Copy)]
struct Decode(fn(Proven, &[u8], &mut [f32]));

impl Weight {
    pub(super) fn new(view: TensorView) -> Result<Self, Error> {
        Self::joined(vec![view], 0, &[])
    }

    pub(super) fn scaled(view: TensorView, scales: &[f32]) -> Result<Self, Error> {
        Self::joined(vec![view], 0, scales)
    }

    /// Of views that were cut along dimension `axis`, times a scale for each matrix unless there are none.
    ///
    /// # Panics
    /// When there is no view, or it has fewer dimensions.
    pub(super) fn joined(views: Vec<TensorView>, axis: usize, scales: &[f32]) -> Result<Self, Error> {
        let first = views.first().expect("a weight has a part");
        let (dtype, shape) = (first.dtype(), first.shape().clone());
        let decode = dispatch(dtype, Compile).ok_or(Error::UnsupportedType { dtype })?;
        // Dimensions that a weight lacks are its first.
        let dim = axis + dims(&shape)?.len() - shape.dims().len();
        let mut parts: Vec<Part> = Vec::with_capacity(views.len());
        let mut len = 0;
        for view in views {
            if view.dtype() != dtype || view.shape().with_dim(axis, 1) != shape.with_dim(axis, 1) {
                let found = format!("{dtype} {shape} and {} {}", view.dtype(), view.shape());
                return Err(Error::WeightShape { expected: "parts of one type and shape", found });
            }
            let dims = dims_of(&view)?;
            let row_bytes = dims[2] / dtype.block_len() * dtype.block_bytes();
            parts.push(Part { view, range: len..len + dims[dim], row_bytes });
            len += dims[dim];
        }
        match len {
            0 => parts.truncate(1),
            _ => parts.retain(|part| !part.range.is_empty()),
        }
        let whole = shape.with_dim(axis, len as u64);
        let [_, rows, cols] = dims(&whole)?;
        let scales = if scales.is_empty() { Vec::new() } else { scale_each(&whole, scales)? };
        let axis = [Axis::Matrices, Axis::Rows, Axis::Columns][dim];
        let mut columns = vec![0, cols];
        if axis == Axis::Columns {
            columns.splice(1..1, parts[1..].iter().map(|part| part.range.start));
        }
        Ok(Self { parts, axis, decode, meet: Meet::of(dtype), rows, cols, scales, columns, whole, dtype })
    }

    /// Decodes `columns` of row `row` of the matrix or, counted through, the stack; they begin and end at blocks.
    pub(super) fn decode(&self, isa: Proven, row: usize, columns: Range<usize>, out: &mut [f32]) {
        if self.axis == Axis::Columns {
            for part in &self.parts {
                let from = columns.start.max(part.range.start);
                let to = columns.end.min(part.range.end);
                if from < to {
                    let out = &mut out[from - columns.start..to - columns.start];
                    self.decode_part(isa, part, row, from - part.range.start..to - part.range.start, out);
                }
            }
        } else {
            let (part, row) = self.find(row);
            self.decode_part(isa, part, row, columns, out);
        }
        if let Some(scale) = self.scale(row) {
            out.iter_mut().for_each(|value| *value *= scale);
        }
    }

    fn decode_part(&self, isa: Proven, part: &Part, row: usize, columns: Range<usize>, out: &mut [f32]) {
        let bytes = &part.rows(row..row + 1)[self.len_of(columns.start)..self.len_of(columns.end)];
        (self.decode.0)(isa, bytes, out);
    }

    /// The bytes of some rows of BF16 that lie together and are multiplied by nothing besides.
    pub(super) fn upper(&self, rows: Range<usize>) -> Option<&[u8]> {
        let plain = self.dtype == Dtype::BF16 && self.scales.is_empty() && self.run(rows.clone()) == rows;
        if !plain {
            return None;
        }
        let mut segments = self.segments(rows);
        segments.next().map(|segment| segment.bytes).filter(|_| segments.next().is_none())
    }

    /// What the blocks of row `row` are multiplied by besides, counted through the stack.
    pub(super) fn scale(&self, row: usize) -> Option<f32> {
        (!self.scales.is_empty()).then(|| self.scales[row / self.rows])
    }

    /// Of some rows of one matrix, counted through the stack, the first ones, which lie together.
    pub(super) fn run(&self, rows: Range<usize>) -> Range<usize> {
        if self.parts.len() == 1 || self.axis != Axis::Rows {
            return rows;
        }
        let row = rows.start % self.rows;
        let part = self.parts.iter().find(|part| part.range.contains(&row)).expect("a row of a part");
        rows.start..rows.end.min(rows.start + (part.range.end - row))
    }

    /// The blocks of rows that lie together: one run of columns, or one of each part that has columns.
    pub(super) fn segments(&self, rows: Range<usize>) -> impl Iterator<Item = Segment<'_>> {
        let parts = match self.axis {
            Axis::Columns => &self.parts[..],
            Axis::Matrices | Axis::Rows => std::slice::from_ref(self.find(rows.start).0),
        };
        let mut block = 0;
        parts.iter().map(move |part| {
            let (first, cols) = match self.axis {
                Axis::Columns => (rows.start, part.range.len()),
                Axis::Matrices | Axis::Rows => (self.find(rows.start).1, self.cols),
            };
            let first_block = block;
            block += cols.div_ceil(SUPER_BLOCK);
            let bytes = part.rows(first..first + rows.len());
            Segment { bytes, row_bytes: part.row_bytes, cols, first_block }
        })
    }

    /// The same of the first of some rows that lie together; none of none.
    pub(super) fn segments_after(&self, rows: &Range<usize>) -> impl Iterator<Item = Segment<'_>> {
        let run = (!rows.is_empty()).then(|| self.run(rows.clone()));
        run.into_iter().flat_map(|run| self.segments(run))
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.len_of(self.cols)
    }

    /// How activations are rounded for this weight; `None`: they stay as they are.
    pub(super) fn rounding(&self) -> Option<Rounding<'_>> {
        let block_len = rounding::block_len(self.dtype)?;
        Some(Rounding { block_len, columns: &self.columns })
    }

    /// Where a row that is counted through the stack lies, unless each part has some of its columns.
    fn find(&self, row: usize) -> (&Part, usize) {
        let (matrix, in_matrix) = match self.parts.len() {
            1 => return (&self.parts[0], row),
            _ => (row / self.rows, row % self.rows),
        };
        let by_matrix = self.axis == Axis::Matrices;
        let at = if by_matrix { matrix } else { in_matrix };
        let part = self.parts.iter().find(|part| part.range.contains(&at)).expect("a row of a part");
        match by_matrix {
            true => (part, (matrix - part.range.start) * self.rows + in_matrix),
            false => (part, matrix * part.range.len() + in_matrix - part.range.start),
        }
    }

    /// Bytes of whole blocks.
    fn len_of(&self, elements: usize) -> usize {
        elements / self.dtype.block_len() * self.dtype.block_bytes()
    }
}

impl Part {
    fn rows(&self, rows: Range<usize>) -> &[u8] {
        &self.view.bytes()[rows.start * self.row_bytes..rows.end * self.row_bytes]
    }
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weight({} {})", self.dtype, self.whole)
    }
}

struct Compile;

impl ForBlock for Compile {
    type Output = Decode;

    fn call<B: Block>(self) -> Decode {
        match B::DTYPE {
            Dtype::BF16 => Decode(|isa, bytes, out| isa.run(DecodeUpper { bytes }, out)),
            _ => Decode(|isa, bytes, out| isa.run(DecodeRun { bytes, block: PhantomData::<B> }, out)),
        }
    }
}

struct DecodeRun<'a, B> {
    bytes: &'a [u8],
    block: PhantomData<B>,
}

impl<B: Block> Kernel for DecodeRun<'_, B> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        B::decode_run(self.bytes, out);
    }
}

/// BF16, the upper halves of f32. What the compiler makes of its shift by 16 takes bytes apart.
struct DecodeUpper<'a> {
    bytes: &'a [u8],
}

impl Kernel for DecodeUpper<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let (halves, rest) = self.bytes.as_chunks::<2>().0.as_chunks::<L>();
        let (out, out_rest) = out.as_chunks_mut::<L>();
        for (out, halves) in out.iter_mut().zip(halves) {
            V::load_upper(halves).store(out);
        }
        for (out, half) in out_rest.iter_mut().zip(rest) {
            *out = f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16);
        }
    }
}
