//! Blocks in registers: quants as 64 columns each, scales beside them.

use crate::cpu::isa::x86::bits::{
    both, half, long, scales_of_iq4_xs, scales_of_q3_k, six_bits, sixteen, thirty_two, word,
};
use formats::quant::{IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
use formats::quant::{SmallBlock, SuperBlock};
use std::arch::x86_64::*;

/// A super-block in registers; the numbers are those of [`SuperBlock::integers`]. Bytes are always those of one block.
pub(super) trait Super: SuperBlock {
    /// # Safety
    /// The processor has AVX-512 F, BW, VL and DQ.
    unsafe fn quants(bytes: &[u8]) -> [__m512i; 4];

    /// For each four quants their scale: 32 bits, or 16 of them and zeros where the products of four quants fit as many.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, VL and DQ.
    unsafe fn scales(bytes: &[u8]) -> [__m512i; 4];

    /// As bytes, 8 or 16; of types without them anything.
    #[inline(always)]
    fn minima(_: &[u8]) -> [u64; 2] {
        [0; 2]
    }

    /// The f16 of the scales in the lower half, that of the minima in the upper one.
    fn factors(bytes: &[u8]) -> u32;
}

/// Two small blocks in a register; the numbers are those of [`SmallBlock::integers`].
pub(super) trait Pair: SmallBlock {
    /// # Safety
    /// The processor has AVX-512 F, BW, VL and DQ.
    unsafe fn quants(blocks: [&[u8]; 2]) -> __m512i;

    /// The factor as the block has it: its first two bytes unless the type says otherwise.
    #[inline(always)]
    fn factor(bytes: &[u8]) -> u32 {
        u32::from(half(bytes, 0))
    }

    /// The numbers that such factors are: f16 unless the type says otherwise.
    ///
    /// # Safety
    /// The processor has AVX-512 F.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn factors(factors: __m512i) -> __m512 {
        super::halves(factors)
    }
}

impl Super for Q4_K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> [__m512i; 4] {
        let mut quants = [_mm512_setzero_si512(); 4];
        for (part, quants) in quants.iter_mut().enumerate() {
            *quants = nibbles(twice(bytes, 16 + 32 * part));
        }
        quants
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn scales(bytes: &[u8]) -> [__m512i; 4] {
        spread_8_bytes(six_bits(bytes)[0])
    }

    #[inline(always)]
    fn minima(bytes: &[u8]) -> [u64; 2] {
        [six_bits(bytes)[1], 0]
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> u32 {
        word(bytes, 0)
    }
}

impl Super for Q5_K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> [__m512i; 4] {
        let high = twice(bytes, 16);
        let mut quants = [_mm512_setzero_si512(); 4];
        for (part, quants) in quants.iter_mut().enumerate() {
            // Bit 2 part of the lower half and the next one of the upper half become bit 4.
            let (low, turn) = (nibbles(twice(bytes, 48 + 32 * part)), 4 - 2 * part as i32);
            *quants = with(low, _mm512_rolv_epi32(high, by_half([turn, turn - 1])), 0x10);
        }
        quants
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn scales(bytes: &[u8]) -> [__m512i; 4] {
        spread_8_bytes(six_bits(bytes)[0])
    }

    #[inline(always)]
    fn minima(bytes: &[u8]) -> [u64; 2] {
        [six_bits(bytes)[1], 0]
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> u32 {
        word(bytes, 0)
    }
}

impl Super for Q6_K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> [__m512i; 4] {
        let four = _mm512_set1_epi8(0x0f);
        let mut quants = [_mm512_setzero_si512(); 4];
        for half in 0..2 {
            let (low, high) = (whole(bytes, 64 * half), twice(bytes, 128 + 32 * half));
            // Fields of two bits, from the lowest on, are those of 32 columns each: they become bits 4 and 5.
            let first = _mm512_rolv_epi32(high, by_half([4, 2]));
            let second = _mm512_rolv_epi32(high, by_half([0, -2]));
            quants[2 * half] = with(_mm512_and_si512(low, four), first, 0x30);
            let low = _mm512_srli_epi16::<4>(low);
            quants[2 * half + 1] = with(_mm512_and_si512(low, four), second, 0x30);
        }
        quants
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn scales(bytes: &[u8]) -> [__m512i; 4] {
        spread_16(_mm512_cvtepi8_epi32(sixteen(bytes, 192)))
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> u32 {
        u32::from(half(bytes, 208))
    }
}

impl Super for Q3_K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> [__m512i; 4] {
        let high = twice(bytes, 0);
        let mut quants = [_mm512_setzero_si512(); 4];
        for (part, quants) in quants.iter_mut().enumerate() {
            // Bit 2 part of the lower half and the next one of the upper half become bit 2.
            let (low, turn) = (two_bits(bytes, 32, part), 2 - 2 * part as i32);
            *quants = with(low, _mm512_rolv_epi32(high, by_half([turn, turn - 1])), 4);
        }
        quants
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn scales(bytes: &[u8]) -> [__m512i; 4] {
        spread_16(_mm512_cvtepi8_epi32(both(scales_of_q3_k(bytes))))
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> u32 {
        u32::from(half(bytes, 108))
    }
}

impl Super for Q2_K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> [__m512i; 4] {
        let mut quants = [_mm512_setzero_si512(); 4];
        for (part, quants) in quants.iter_mut().enumerate() {
            *quants = two_bits(bytes, 16, part);
        }
        quants
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn scales(bytes: &[u8]) -> [__m512i; 4] {
        spread_16(_mm512_cvtepu8_epi32(_mm_and_si128(sixteen(bytes, 0), _mm_set1_epi8(0x0f))))
    }

    #[inline(always)]
    fn minima(bytes: &[u8]) -> [u64; 2] {
        [long(bytes, 0) >> 4 & 0x0f0f_0f0f_0f0f_0f0f, long(bytes, 8) >> 4 & 0x0f0f_0f0f_0f0f_0f0f]
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> u32 {
        word(bytes, 80)
    }
}

impl Super for IQ4_XS {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants(bytes: &[u8]) -> [__m512i; 4] {
        let mut quants = [_mm512_setzero_si512(); 4];
        for (part, quants) in quants.iter_mut().enumerate() {
            let nibbles = nibbles_of_two([sixteen(bytes, 8 + 32 * part), sixteen(bytes, 24 + 32 * part)]);
            *quants = _mm512_shuffle_epi8(table(Self::VALUES), nibbles);
        }
        quants
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn scales(bytes: &[u8]) -> [__m512i; 4] {
        let scales = _mm512_cvtepi8_epi32(both([scales_of_iq4_xs(bytes), 0]));
        let mut spread = [_mm512_setzero_si512(); 4];
        for (part, spread) in spread.iter_mut().enumerate() {
            let part = 2 * part as i32;
            *spread = _mm512_permutexvar_epi32(by_half([part, part + 1]), scales);
        }
        spread
    }

    #[inline(always)]
    fn factors(bytes: &[u8]) -> u32 {
        u32::from(half(bytes, 0))
    }
}

impl Pair for Q4_0 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants([a, b]: [&[u8]; 2]) -> __m512i {
        nibbles_of_two([sixteen(a, 2), sixteen(b, 2)])
    }
}

impl Pair for Q5_0 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants([a, b]: [&[u8]; 2]) -> __m512i {
        let fifth = u64::from(word(a, 2)) | u64::from(word(b, 2)) << 32;
        let low = nibbles_of_two([sixteen(a, 6), sixteen(b, 6)]);
        _mm512_mask_add_epi8(low, fifth, low, _mm512_set1_epi8(16))
    }
}

impl Pair for Q8_0 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants([a, b]: [&[u8]; 2]) -> __m512i {
        let quants = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(thirty_two(a, 2)), thirty_two(b, 2));
        _mm512_xor_si512(quants, _mm512_set1_epi8(-128))
    }
}

impl Pair for IQ4_NL {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants([a, b]: [&[u8]; 2]) -> __m512i {
        _mm512_shuffle_epi8(table(Self::VALUES), nibbles_of_two([sixteen(a, 2), sixteen(b, 2)]))
    }
}

impl Pair for MXFP4 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    unsafe fn quants([a, b]: [&[u8]; 2]) -> __m512i {
        _mm512_shuffle_epi8(table(Self::VALUES), nibbles_of_two([sixteen(a, 1), sixteen(b, 1)]))
    }

    #[inline(always)]
    fn factor(bytes: &[u8]) -> u32 {
        u32::from(bytes[0])
    }

    /// 2^(e - 128), of which the two smallest are subnormal.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn factors(e: __m512i) -> __m512 {
        let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
        let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
        let small = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
        _mm512_castsi512_ps(_mm512_mask_blend_epi32(small, normal, subnormal))
    }
}

/// The lower nibbles in the lower half, the upper ones in the upper half.
#[target_feature(enable = "avx512f")]
#[inline]
fn nibbles(bytes: __m512i) -> __m512i {
    _mm512_and_si512(_mm512_srlv_epi32(bytes, by_half([0, 4])), _mm512_set1_epi8(0x0f))
}

/// Of each 16 bytes the lower nibbles, then the upper ones.
#[target_feature(enable = "avx512f")]
#[inline]
fn nibbles_of_two([a, b]: [__m128i; 2]) -> __m512i {
    let bytes = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(a), 0xff00, b);
    let shifts = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
    _mm512_and_si512(_mm512_srlv_epi32(bytes, shifts), _mm512_set1_epi8(0x0f))
}

/// The quants of two bits of 64 columns: 128 columns have 32 bytes, 32 columns one field of them.
#[target_feature(enable = "avx512f")]
#[inline]
fn two_bits(bytes: &[u8], at: usize, part: usize) -> __m512i {
    let (bytes, shift) = (twice(bytes, at + 32 * (part / 2)), 4 * (part % 2) as i32);
    _mm512_and_si512(_mm512_srlv_epi32(bytes, by_half([shift, shift + 2])), _mm512_set1_epi8(3))
}

/// `low | high & mask`
#[target_feature(enable = "avx512f")]
#[inline]
fn with(low: __m512i, high: __m512i, mask: i8) -> __m512i {
    _mm512_ternarylogic_epi32::<0xf8>(low, high, _mm512_set1_epi8(mask))
}

/// One number in the lower eight lanes, the other in the upper ones.
#[target_feature(enable = "avx512f")]
#[inline]
fn by_half([a, b]: [i32; 2]) -> __m512i {
    _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b)
}

/// Each of eight bytes for eight lanes.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn spread_8_bytes(bytes: u64) -> [__m512i; 4] {
    let bytes = _mm512_set1_epi64(bytes.cast_signed());
    let mut spread = [_mm512_setzero_si512(); 4];
    for (part, spread) in spread.iter_mut().enumerate() {
        // The byte of that number, and three zeros.
        let from = |byte: usize| (0x8080_8000_u32 | byte as u32).cast_signed();
        *spread = _mm512_shuffle_epi8(bytes, by_half([from(2 * part), from(2 * part + 1)]));
    }
    spread
}

/// Each of 16 lanes for four lanes, of which the upper half becomes 0.
#[target_feature(enable = "avx512f")]
#[inline]
fn spread_16(lanes: __m512i) -> [__m512i; 4] {
    let lanes = _mm512_and_si512(lanes, _mm512_set1_epi32(0xffff));
    let mut spread = [_mm512_setzero_si512(); 4];
    for (part, spread) in spread.iter_mut().enumerate() {
        let [a, b, c, d] = std::array::from_fn(|i| (4 * part + i) as i32);
        let from = _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
        *spread = _mm512_permutexvar_epi32(from, lanes);
    }
    spread
}

#[target_feature(enable = "avx512f")]
#[inline]
fn table(values: Option<[u8; 16]>) -> __m512i {
    _mm512_broadcast_i32x4(sixteen(&values.expect("a type whose nibbles are looked up"), 0))
}

/// 32 bytes from `at` on, in both halves.
#[target_feature(enable = "avx512f")]
#[inline]
fn twice(bytes: &[u8], at: usize) -> __m512i {
    _mm512_broadcast_i64x4(thirty_two(bytes, at))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn whole(bytes: &[u8], at: usize) -> __m512i {
    let bytes: &[u8; 64] = bytes[at..].first_chunk().expect("64 bytes of a block");
    // SAFETY: the reference covers them, at any alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}
