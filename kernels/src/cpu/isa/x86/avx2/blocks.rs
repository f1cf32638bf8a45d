//! Blocks in registers: quants as 32 columns each, scales beside them as bytes.

use super::LANES;
use crate::cpu::isa::x86::bits::{
    half, long, scales_of_iq4_xs, scales_of_q3_k, six_bits, sixteen, thirty_two, word,
};
use formats::quant::{IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
use formats::quant::{SmallBlock, SuperBlock};
use std::arch::x86_64::*;

/// A super-block in registers; the numbers are those of [`SuperBlock::integers`], except that quants which may exceed 127 have
/// `OFFSET` taken off. Bytes are always those of one block.
pub(super) trait Super: SuperBlock {
    /// Columns 32 `part` to 32 `part` + 31.
    ///
    /// # Safety
    /// The processor has AVX2.
    unsafe fn quants(bytes: &[u8], part: usize) -> __m256i;

    /// As signed bytes, 8 or 16.
    fn scales(bytes: &[u8]) -> [u64; 2];

    /// As bytes, 8 or 16; of types without them anything.
    #[inline(always)]
    fn minima(_: &[u8]) -> [u64; 2] {
        [0; 2]
    }

    /// The f16 of the scales and that of the minima.
    fn factors(bytes: &[u8]) -> [u16; 2];
}

/// A small block in a register; the numbers are those of [`SmallBlock::integers`], with the same exception.
pub(super) trait Small: SmallBlock {
    /// # Safety
    /// The processor has AVX2.
    unsafe fn quants(bytes: &[u8]) -> __m256i;

    /// The factor as the block has it: its first two bytes unless the type says otherwise.
    #[inline(always)]
    fn factor(bytes: &[u8]) -> u16 {
        half(bytes, 0)
    }

    /// The numbers that the factors of eight rows are: f16 unless the type says otherwise.
    ///
    /// # Safety
    /// The processor has AVX2 and F16C.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn factors(rows: &[u16; LANES]) -> __m256 {
        super::halves(rows)
    }
}

impl Super for Q4_K {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8], part: usize) -> __m256i {
        field(thirty_two(bytes, 16 + 32 * (part / 2)), -4 * (part % 2) as i32, 0x0f)
    }

    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [six_bits(bytes)[0], 0]
    }

    #[inline(always)]
    fn minima(bytes: &[u8]) -> [u64; 2] {
        [six_bits(bytes)[1], 0]
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> [u16; 2] {
        [half(bytes, 0), half(bytes, 2)]
    }
}

impl Super for Q5_K {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8], part: usize) -> __m256i {
        let low = field(thirty_two(bytes, 48 + 32 * (part / 2)), -4 * (part % 2) as i32, 0x0f);
        _mm256_or_si256(low, field(thirty_two(bytes, 16), 4 - part as i32, 0x10))
    }

    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [six_bits(bytes)[0], 0]
    }

    #[inline(always)]
    fn minima(bytes: &[u8]) -> [u64; 2] {
        [six_bits(bytes)[1], 0]
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> [u16; 2] {
        [half(bytes, 0), half(bytes, 2)]
    }
}

impl Super for Q6_K {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8], part: usize) -> __m256i {
        let (of_128, part) = (part / 4, part % 4);
        let low = thirty_two(bytes, 64 * of_128 + 32 * (part % 2));
        let high = thirty_two(bytes, 128 + 32 * of_128);
        let low = field(low, -4 * (part / 2) as i32, 0x0f);
        _mm256_or_si256(low, field(high, 4 - 2 * part as i32, 0x30))
    }

    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [long(bytes, 192), long(bytes, 200)]
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> [u16; 2] {
        [half(bytes, 208), 0]
    }
}

impl Super for Q3_K {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8], part: usize) -> __m256i {
        let low = field(thirty_two(bytes, 32 + 32 * (part / 4)), -2 * (part % 4) as i32, 3);
        _mm256_or_si256(low, field(thirty_two(bytes, 0), 2 - part as i32, 4))
    }

    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        scales_of_q3_k(bytes)
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> [u16; 2] {
        [half(bytes, 108), 0]
    }
}

impl Super for Q2_K {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8], part: usize) -> __m256i {
        field(thirty_two(bytes, 16 + 32 * (part / 4)), -2 * (part % 4) as i32, 3)
    }

    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [long(bytes, 0) & 0x0f0f_0f0f_0f0f_0f0f, long(bytes, 8) & 0x0f0f_0f0f_0f0f_0f0f]
    }

    #[inline(always)]
    fn minima(bytes: &[u8]) -> [u64; 2] {
        [long(bytes, 0) >> 4 & 0x0f0f_0f0f_0f0f_0f0f, long(bytes, 8) >> 4 & 0x0f0f_0f0f_0f0f_0f0f]
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> [u16; 2] {
        [half(bytes, 80), half(bytes, 82)]
    }
}

impl Super for IQ4_XS {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8], part: usize) -> __m256i {
        signed(Self::VALUES, Self::OFFSET, nibbles(sixteen(bytes, 8 + 16 * part)))
    }

    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [scales_of_iq4_xs(bytes), 0]
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> [u16; 2] {
        [half(bytes, 0), 0]
    }
}

impl Small for Q4_0 {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> __m256i {
        nibbles(sixteen(bytes, 2))
    }
}

impl Small for Q5_0 {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> __m256i {
        // A bit of each column: its byte eight times, and of it the bit of the column.
        let from = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let bits = _mm256_shuffle_epi8(_mm256_set1_epi32(word(bytes, 2).cast_signed()), from);
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
        let fifth = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
        let fifth = _mm256_and_si256(fifth, _mm256_set1_epi8(16));
        _mm256_or_si256(nibbles(sixteen(bytes, 6)), fifth)
    }
}

impl Small for Q8_0 {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> __m256i {
        thirty_two(bytes, 2)
    }
}

impl Small for IQ4_NL {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> __m256i {
        signed(Self::VALUES, Self::OFFSET, nibbles(sixteen(bytes, 2)))
    }
}

impl Small for MXFP4 {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> __m256i {
        signed(Self::VALUES, 0, nibbles(sixteen(bytes, 1)))
    }

    #[inline(always)]
    fn factor(bytes: &[u8]) -> u16 {
        u16::from(bytes[0])
    }

    /// 2^(e - 128), of which the two smallest are subnormal.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn factors(rows: &[u16; LANES]) -> __m256 {
        let e = _mm256_cvtepu16_epi32(super::eight(rows));
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
        let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
        let small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
        _mm256_castsi256_ps(_mm256_blendv_epi8(normal, subnormal, small))
    }
}

/// Bits moved up by `by`, or down where it is negative, and those of `mask` in each byte.
#[target_feature(enable = "avx2")]
#[inline]
fn field(bytes: __m256i, by: i32, mask: i8) -> __m256i {
    let moved = match by {
        0 => bytes,
        1.. => _mm256_sllv_epi32(bytes, _mm256_set1_epi32(by)),
        _ => _mm256_srlv_epi32(bytes, _mm256_set1_epi32(-by)),
    };
    _mm256_and_si256(moved, _mm256_set1_epi8(mask))
}

/// The lower nibbles, then the upper ones.
#[target_feature(enable = "avx2")]
#[inline]
fn nibbles(bytes: __m128i) -> __m256i {
    let bytes = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f))
}

/// The values that `quants` number, less `offset`.
#[target_feature(enable = "avx2")]
#[inline]
fn signed(values: Option<[u8; 16]>, offset: i32, quants: __m256i) -> __m256i {
    let values = values.expect("a type whose nibbles are looked up");
    let values = values.map(|value| value.wrapping_sub(offset as u8));
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen(&values, 0)), quants)
}
