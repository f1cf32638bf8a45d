//! How activations are rounded before they meet quantised weights.
//!
//! A block of consecutive values becomes integers of 8 bits times one f32, so that a product with a block of weights is a sum
//! of integers, which is exact in any order. ggml rounds the same way (`Q8_K` and `Q8_0` there).

use formats::Dtype;
use formats::quant::{ForIntegers, SMALL_BLOCK, SUPER_BLOCK, SmallBlock, SuperBlock, dispatch_integers};

/// Values that share a factor, for weights of a type whose products take rounded activations; `None`: they take them as they are.
pub fn block_len(dtype: Dtype) -> Option<usize> {
    struct Len;
    impl ForIntegers for Len {
        type Output = usize;
        fn call_super<B: SuperBlock>(self) -> usize {
            SUPER_BLOCK
        }
        fn call_small<B: SmallBlock>(self) -> usize {
            SMALL_BLOCK
        }
    }
    dispatch_integers(dtype, Len)
}

/// The factor of a block whose largest magnitude has these bits: a 127th, 0 for blocks that are too small to divide by it, and
/// NaN where a value is no finite number.
#[inline(always)]
pub(crate) fn factor(largest_bits: u32) -> f32 {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    let factor = f32::from_bits(largest_bits) / 127.0;
    match largest_bits {
        INFINITY.. => f32::NAN,
        _ if factor < f32::MIN_POSITIVE => 0.0,
        _ => factor,
    }
}

/// Rounds a block in place, to the nearest integer times the factor, ties to even.
pub(crate) fn round(block: &mut [f32]) {
    let factor = factor(block.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0));
    for x in block {
        *x = if factor == 0.0 { 0.0 } else { (*x * (1.0 / factor)).round_ties_even() * factor };
    }
}
