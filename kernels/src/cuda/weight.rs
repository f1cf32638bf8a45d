//! Weights on a device: views of an arena, or memory of their own.

use super::compile::{Form, Tiling, WEIGHT_TYPES};
use super::driver::{Cost, Memory, Stream};
use crate::Error;
use crate::shape::{dims, dims_of, scale_each};
use formats::{Dtype, Shape, TensorView, quant};
use std::sync::Arc;

/// A weight in the checkpoint's own blocks. Where that type has no kernel it is BF16, and vectors are F32.
#[derive(Debug)]
pub struct Weight {
    pub(super) form: Form,
    pub(super) experts: usize,
    /// Rows of a matrix, of each one in a stack; 1 for a vector.
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) address: u64,
    /// The largest magnitude of a vector; 0 of a matrix.
    pub(super) largest: f32,
    /// What it lies in.
    _memory: Arc<Memory>,
}

/// How a tensor is to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// As it is.
    Own,
    /// As this type.
    As(Dtype),
}

/// How a tensor of this type and shape is stored; a vector is F32 whatever its type.
pub(super) fn storage(dtype: Dtype, is_vector: bool) -> Storage {
    match (is_vector, dtype) {
        (_, Dtype::F32) => Storage::Own,
        (true, _) => Storage::As(Dtype::F32),
        (false, dtype) if WEIGHT_TYPES.contains(&dtype) => Storage::Own,
        (false, _) => Storage::As(Dtype::BF16),
    }
}

/// Bytes that kernels read at a time.
fn alignment(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::F32 => 4,
        Dtype::MXFP4 => 1,
        _ => 2,
    }
}

impl Weight {
    /// Takes over what lies at `offset` of `arena`, or converts `view`, which has the same bytes, to a type with kernels.
    pub(super) fn in_arena(
        stream: &Stream,
        arena: &Arc<Memory>,
        offset: u64,
        view: &TensorView,
        tiling: Tiling,
    ) -> Result<Self, Error> {
        let [experts, rows, cols] = dims_of(view)?;
        let address = arena.address() + offset;
        let is_vector = view.shape().dims().len() == 1;
        let bytes = view.bytes().len() as u64;
        assert!(offset + bytes <= arena.bytes() as u64, "a tensor beyond its arena");
        let aligned = address.is_multiple_of(alignment(view.dtype()));
        if storage(view.dtype(), is_vector) != Storage::Own || !aligned {
            return Self::alone(stream, view, tiling);
        }
        let (form, largest) = (Form { dtype: view.dtype(), tiling }, largest(view));
        Ok(Self { form, experts, rows, cols, address, largest, _memory: Arc::clone(arena) })
    }

    /// Copies `view` into memory of its own, in a type with kernels.
    pub(super) fn alone(stream: &Stream, view: &TensorView, tiling: Tiling) -> Result<Self, Error> {
        let [experts, rows, cols] = dims_of(view)?;
        let (dtype, converted) = match storage(view.dtype(), view.shape().dims().len() == 1) {
            Storage::Own => (view.dtype(), None),
            Storage::As(to) => (to, Some(convert(view, to, &vec![1.0; experts])?)),
        };
        let bytes: &[u8] = converted.as_deref().unwrap_or(view.bytes());
        let memory = Arc::new(Memory::new(stream.device(), bytes.len(), "a weight")?);
        stream.write(&memory, 0, bytes);
        let (form, address) = (Form { dtype, tiling }, memory.address());
        Ok(Self { form, experts, rows, cols, address, largest: largest(view), _memory: memory })
    }

    /// Copies rows of blocks into memory of its own as BF16, or F32 where they are vectors or F32 already, each matrix multiplied by
    /// its scale: no kernel takes scales of its own.
    pub(super) fn scaled(stream: &Stream, view: &TensorView, scales: &[f32]) -> Result<Self, Error> {
        let [experts, rows, cols] = dims_of(view)?;
        let scales = scale_each(view.shape(), scales)?;
        let is_vector = view.shape().dims().len() == 1;
        let dtype = if is_vector || view.dtype() == Dtype::F32 { Dtype::F32 } else { Dtype::BF16 };
        let bytes = convert(view, dtype, &scales)?;
        let memory = Arc::new(Memory::new(stream.device(), bytes.len(), "a weight")?);
        stream.write(&memory, 0, &bytes);
        let form = Form { dtype, tiling: Tiling::Rows };
        let largest = largest(view) * scales.first().map_or(1.0, |scale| scale.abs());
        Ok(Self { form, experts, rows, cols, address: memory.address(), largest, _memory: memory })
    }

    /// A weight that was made on the device: `memory` holds it, in a type with kernels.
    pub(super) fn made(form: Form, shape: &Shape, largest: f32, memory: Arc<Memory>) -> Result<Self, Error> {
        let [experts, rows, cols] = dims(shape)?;
        Ok(Self { form, experts, rows, cols, address: memory.address(), largest, _memory: memory })
    }

    /// What reading `rows` rows costs.
    pub(super) fn cost(&self, rows: usize) -> Cost {
        let row = self.cols / self.form.dtype.block_len() * self.form.dtype.block_bytes();
        Cost { bytes: (rows * row) as u64, weight: Some((self.form.dtype, self.rows, self.cols)) }
    }

    /// A vector's values.
    pub(super) fn vector(&self) -> u64 {
        assert!(self.form.dtype == Dtype::F32 && self.rows == 1, "a vector of F32");
        self.address
    }
}

/// The largest magnitude of a vector.
fn largest(view: &TensorView) -> f32 {
    let Some(decode) = quant::decoder(view.dtype()).filter(|_| view.shape().dims().len() == 1) else {
        return 0.0;
    };
    let mut values = vec![0.0; view.shape().elements() as usize];
    decode(view.bytes(), &mut values);
    values.iter().fold(0.0, |largest, value| value.abs().max(largest))
}

/// All values, each matrix times its scale, as F32 or BF16, the latter rounded to nearest, ties to even.
fn convert(view: &TensorView, to: Dtype, scales: &[f32]) -> Result<Vec<u8>, Error> {
    let dtype = view.dtype();
    let decode = quant::decoder(dtype).ok_or(Error::UnsupportedType { dtype })?;
    // A piece at a time: a whole stack of experts as F32 would be several times its own size.
    const PIECE: usize = 1 << 16;
    let (len, bytes) = (dtype.block_len(), dtype.block_bytes());
    let blocks = PIECE / len;
    let mut values = vec![0.0; blocks * len];
    let mut out = Vec::with_capacity(view.shape().elements() as usize * to.block_bytes());
    let matrix_bytes = (view.bytes().len() / scales.len().max(1)).max(1);
    for (matrix, &scale) in view.bytes().chunks(matrix_bytes).zip(scales) {
        for piece in matrix.chunks(blocks * bytes) {
            let values = &mut values[..piece.len() / bytes * len];
            decode(piece, values);
            let scaled = values.iter().map(|value| value * scale);
            match to {
                Dtype::F32 => out.extend(scaled.flat_map(f32::to_le_bytes)),
                _ => out.extend(scaled.flat_map(|value| bf16(value).to_le_bytes())),
            }
        }
    }
    Ok(out)
}

/// The nearest BF16, ties to even; a NaN stays one.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}
