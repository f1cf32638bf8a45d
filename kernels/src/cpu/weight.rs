//! Weights as the checkpoint stores them.

use super::integers::Meet;
use super::isa::{Kernel, Proven, Vector};
use crate::Error;
use crate::rounding;
use crate::shape::{dims_of, scale_each};
use formats::quant::{Block, ForBlock, dispatch};
use formats::{Dtype, TensorView};
use std::marker::PhantomData;
use std::ops::Range;

/// A weight in the checkpoint's own blocks, sharing the bytes of the view that it was made of.
pub struct Weight {
    view: TensorView,
    decode: Decode,
    /// Products with rounded activations; `None`: activations stay as they are.
    pub(super) meet: Option<Meet>,
    /// Rows of a matrix, of each one in a stack; 1 for a vector.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// What each matrix is multiplied by; empty: nothing.
    scales: Vec<f32>,
}

/// Decodes whole blocks with a given instruction set.
#[derive(Clone, Copy)]
struct Decode(fn(Proven, &[u8], &mut [f32]));

impl Weight {
    pub(super) fn new(view: TensorView) -> Result<Self, Error> {
        let [_, rows, cols] = dims_of(&view)?;
        let decode = dispatch(view.dtype(), Compile).ok_or(Error::UnsupportedType { dtype: view.dtype() })?;
        Ok(Self { meet: Meet::of(view.dtype()), view, decode, rows, cols, scales: Vec::new() })
    }

    pub(super) fn scaled(view: TensorView, scales: &[f32]) -> Result<Self, Error> {
        let scales = scale_each(&view, scales)?;
        Ok(Self { scales, ..Self::new(view)? })
    }

    /// Decodes `columns` of row `row` of the matrix or, counted through, the stack; they begin and end at blocks.
    pub(super) fn decode(&self, isa: Proven, row: usize, columns: Range<usize>, out: &mut [f32]) {
        let bytes = &self.bytes_of(row..row + 1)[self.len_of(columns.start)..self.len_of(columns.end)];
        (self.decode.0)(isa, bytes, out);
        if let Some(scale) = self.scale(row) {
            out.iter_mut().for_each(|value| *value *= scale);
        }
    }

    /// What the blocks of row `row` are multiplied by besides, counted through the stack.
    pub(super) fn scale(&self, row: usize) -> Option<f32> {
        (!self.scales.is_empty()).then(|| self.scales[row / self.rows])
    }

    /// The blocks of some rows of the matrix or, counted through, the stack.
    pub(super) fn bytes_of(&self, rows: Range<usize>) -> &[u8] {
        &self.view.bytes()[rows.start * self.row_bytes()..rows.end * self.row_bytes()]
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.len_of(self.cols)
    }

    /// Columns that share a factor when activations are rounded for this weight.
    pub(super) fn rounding(&self) -> Option<usize> {
        rounding::block_len(self.view.dtype())
    }

    /// Bytes of whole blocks.
    fn len_of(&self, elements: usize) -> usize {
        let dtype = self.view.dtype();
        elements / dtype.block_len() * dtype.block_bytes()
    }
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weight({} {})", self.view.dtype(), self.view.shape())
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
