//! Matrices of arbitrary blocks, for benches.

use bytes::Bytes;
use formats::{Dtype, Shape, TensorView};

/// A matrix whose bytes are below 0x40 and have the bits of `always`. Below 0x40 no f16 or f32 is a NaN, and subnormals are rare.
pub fn matrix(dtype: Dtype, dims: [usize; 2], always: u8) -> TensorView {
    let shape = Shape::new(&dims.map(|d| d as u64)).unwrap();
    let bytes = formats::bytes_of(dtype, &shape).unwrap();
    let mut state = 1u32;
    let data: Vec<u8> = (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 26) as u8 | always
        })
        .collect();
    TensorView::new(dtype.name(), dtype, shape, Bytes::from(data)).unwrap()
}
