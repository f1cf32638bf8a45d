//! Blocks as integers: what products with integer activations need of a type.

use super::{Block, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
use crate::Dtype;

/// Elements of a [`SuperBlock`].
pub const SUPER_BLOCK: usize = 256;
/// Elements of a [`SmallBlock`].
pub const SMALL_BLOCK: usize = 32;

/// 256 elements, in groups with integer scales: element i is
/// `factors[0] * scales[i / GROUP] * (quants[i] - OFFSET) - factors[1] * minima[i / GROUP]`.
pub trait SuperBlock: Block {
    /// Elements of a group: 16 or 32.
    const GROUP: usize;
    /// What all quants are too large by. Where it is not 0, there is no second factor and the minima repeat the scales.
    const OFFSET: i32;
    /// The largest quant.
    const LARGEST: u8;
    /// What [`SuperBlock::integers`] leaves to be looked up: where there are values, its quants are their indices.
    const VALUES: Option<[u8; 16]> = None;

    /// Takes a block of [`Block::BYTES`] bytes apart.
    ///
    /// # Panics
    /// When the length of `bytes` is wrong.
    fn integers(bytes: &[u8]) -> SuperIntegers;
}

/// A [`SuperBlock`] taken apart. It is returned and not filled in: only then does the compiler know that nothing of it is in the
/// block, without which most loops stay scalar.
#[derive(Clone, Copy, Debug)]
pub struct SuperIntegers {
    /// Of each element.
    pub quants: [u8; SUPER_BLOCK],
    /// Of each group; the rest is 0.
    pub scales: [i32; 16],
    /// Of each group; the rest is 0.
    pub minima: [i16; 16],
    /// Of the scales and of the minima.
    pub factors: [f32; 2],
}

/// `N` bytes in words, of which fields of bits are taken all at once. Loops over bytes as short as a group's are unrolled before
/// the compiler looks for vectors in them, and then it finds none; in words it does.
#[derive(Clone, Copy)]
pub(super) struct Words<const N: usize>([u64; N]);

impl<const N: usize> Words<N> {
    /// Of 8 N bytes.
    #[inline(always)]
    pub(super) fn of(bytes: &[u8]) -> Self {
        let words: &[[u8; 8]; N] = bytes.as_chunks().0.try_into().expect("8 bytes for each word");
        Self(words.map(u64::from_le_bytes))
    }

    /// `byte >> shift & mask` of each byte.
    #[inline(always)]
    pub(super) fn field(self, shift: usize, mask: u8) -> Self {
        Self(self.0.map(|word| word >> shift & u64::from_ne_bytes([mask; 8])))
    }

    /// `self | other << shift`, where no byte of `other` becomes larger than a byte.
    #[inline(always)]
    pub(super) fn with(mut self, other: Self, shift: usize) -> Self {
        for (word, other) in self.0.iter_mut().zip(other.0) {
            *word |= other << shift;
        }
        self
    }

    /// Each bit but the highest of a byte stays, that one changes.
    #[inline(always)]
    pub(super) fn flip_signs(self) -> Self {
        Self(self.0.map(|word| word ^ u64::from_ne_bytes([0x80; 8])))
    }

    /// Back to bytes.
    #[inline(always)]
    pub(super) fn put(self, bytes: &mut [u8]) {
        for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(self.0) {
            *bytes = word.to_le_bytes();
        }
    }
}

/// 32 elements with one scale: element i is `factor * (quants[i] - OFFSET)`.
pub trait SmallBlock: Block {
    /// What all quants are too large by.
    const OFFSET: i32;
    /// The largest quant.
    const LARGEST: u8;
    /// As [`SuperBlock::VALUES`].
    const VALUES: Option<[u8; 16]> = None;

    /// Takes a block of [`Block::BYTES`] bytes apart into quants and the factor.
    ///
    /// # Panics
    /// When the length of `bytes` is wrong.
    fn integers(bytes: &[u8]) -> ([u8; SMALL_BLOCK], f32);
}

/// Something to do with a type that can be taken apart into integers.
pub trait ForIntegers {
    /// What it yields.
    type Output;

    /// Does it for a super-block.
    fn call_super<B: SuperBlock>(self) -> Self::Output;

    /// Does it for a small block.
    fn call_small<B: SmallBlock>(self) -> Self::Output;
}

/// Calls `action` with the block of `dtype`; `None` for types that are not taken apart into integers.
pub fn dispatch_integers<A: ForIntegers>(dtype: Dtype, action: A) -> Option<A::Output> {
    Some(match dtype {
        Dtype::Q2_K => action.call_super::<Q2_K>(),
        Dtype::Q3_K => action.call_super::<Q3_K>(),
        Dtype::Q4_K => action.call_super::<Q4_K>(),
        Dtype::Q5_K => action.call_super::<Q5_K>(),
        Dtype::Q6_K => action.call_super::<Q6_K>(),
        Dtype::IQ4_XS => action.call_super::<IQ4_XS>(),
        Dtype::Q4_0 => action.call_small::<Q4_0>(),
        Dtype::Q5_0 => action.call_small::<Q5_0>(),
        Dtype::Q8_0 => action.call_small::<Q8_0>(),
        Dtype::IQ4_NL => action.call_small::<IQ4_NL>(),
        Dtype::MXFP4 => action.call_small::<MXFP4>(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::decode;

    /// SplitMix64.
    struct Random(u64);

    impl Random {
        fn byte(&mut self) -> u8 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z >> 56) as u8
        }
    }

    /// Values of random blocks put together again, and what the decoder makes of them.
    struct Check<'a>(&'a [u8]);

    impl ForIntegers for Check<'_> {
        type Output = [Vec<f64>; 2];

        fn call_super<B: SuperBlock>(self) -> Self::Output {
            let SuperIntegers { quants, scales, minima, factors: [d, dmin] } = B::integers(self.0);
            let quants = quants.map(|q| looked_up(B::VALUES, q));
            let value = |(i, &q): (usize, &u8)| {
                assert!(q <= B::LARGEST);
                let (scale, minimum) = (scales[i / B::GROUP], minima[i / B::GROUP]);
                if B::OFFSET != 0 {
                    assert_eq!((scale, dmin), (i32::from(minimum), 0.0));
                }
                f64::from(d) * f64::from(scale * (i32::from(q) - B::OFFSET))
                    - f64::from(dmin) * f64::from(minimum)
            };
            [quants.iter().enumerate().map(value).collect(), decoded(B::DTYPE, self.0, SUPER_BLOCK)]
        }

        fn call_small<B: SmallBlock>(self) -> Self::Output {
            let (quants, d) = B::integers(self.0);
            let quants = quants.map(|q| looked_up(B::VALUES, q));
            assert!(quants.iter().all(|&q| q <= B::LARGEST));
            let value = |&q: &u8| f64::from(d) * f64::from(i32::from(q) - B::OFFSET);
            [quants.iter().map(value).collect(), decoded(B::DTYPE, self.0, SMALL_BLOCK)]
        }
    }

    fn looked_up(values: Option<[u8; 16]>, q: u8) -> u8 {
        values.map_or(q, |values| values[usize::from(q)])
    }

    fn decoded(dtype: Dtype, bytes: &[u8], len: usize) -> Vec<f64> {
        let mut values = vec![0.0; len];
        decode(dtype, bytes, &mut values).unwrap();
        values.into_iter().map(f64::from).collect()
    }

    #[test]
    fn integers_are_what_the_decoder_decodes() {
        let mut random = Random(1);
        let mut types = 0;
        for dtype in Dtype::all() {
            for _ in 0..200 {
                let bytes: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.byte()).collect();
                let Some([found, expected]) = dispatch_integers(dtype, Check(&bytes)) else { continue };
                types += 1;
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    // The decoder rounds a minimum's subtraction to f32.
                    let close = (found - expected).abs() <= expected.abs().max(found.abs()) * 1e-3;
                    let alike = close || found.is_nan() && expected.is_nan() || found == expected;
                    assert!(alike || !found.is_finite(), "{dtype}: element {i} is {found}, not {expected}");
                }
            }
        }
        assert_eq!(types, 11 * 200);
    }
}
