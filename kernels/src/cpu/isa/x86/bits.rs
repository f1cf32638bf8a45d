//! Fields of blocks that registers are filled from, whatever their size.

use std::arch::x86_64::*;

/// Eight scales, then eight minima of Q4_K and Q5_K, a byte each.
#[inline(always)]
pub(super) fn six_bits(bytes: &[u8]) -> [u64; 2] {
    const SIX: u32 = 0x3f3f_3f3f;
    const FOUR: u32 = 0x0f0f_0f0f;
    const UPPER: u32 = 0x3030_3030;
    let [s, m, n] = [word(bytes, 4), word(bytes, 8), word(bytes, 12)];
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    [join(s & SIX, n & FOUR | s >> 2 & UPPER), join(m & SIX, n >> 4 & FOUR | m >> 2 & UPPER)]
}

/// The 16 scales of Q3_K, a signed byte each.
#[inline(always)]
pub(super) fn scales_of_q3_k(bytes: &[u8]) -> [u64; 2] {
    let (low, high) = (long(bytes, 96), u64::from(word(bytes, 104)));
    // Pairs of bits: the first of each byte of `high` are scales 0 to 3, the next 4 to 7 and so on.
    let pairs = |from: u32| (high >> from & 0x0303_0303 | (high >> (from + 2) & 0x0303_0303) << 32) << 4;
    let first = low & 0x0f0f_0f0f_0f0f_0f0f | pairs(0);
    let second = low >> 4 & 0x0f0f_0f0f_0f0f_0f0f | pairs(4);
    [less_32(first), less_32(second)]
}

/// The eight scales of IQ4_XS, a signed byte each.
#[inline(always)]
pub(super) fn scales_of_iq4_xs(bytes: &[u8]) -> u64 {
    let (high, low) = (u64::from(half(bytes, 2)), u64::from(word(bytes, 4)));
    // A field of each byte, one by one: halves of what is left move apart.
    let low = (low | low << 16) & 0x0000_ffff_0000_ffff;
    let low = (low | low << 8) & 0x00ff_00ff_00ff_00ff;
    let low = (low | low << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    let high = (high | high << 24) & 0x0000_00ff_0000_00ff;
    let high = (high | high << 12) & 0x000f_000f_000f_000f;
    let high = (high | high << 6) & 0x0303_0303_0303_0303;
    less_32(low | high << 4)
}

/// Each of eight bytes below 64 less 32.
#[inline(always)]
fn less_32(bytes: u64) -> u64 {
    // With the highest bit set no byte borrows from the next one; then that bit is put right.
    ((bytes | 0x8080_8080_8080_8080) - 0x2020_2020_2020_2020) ^ 0x8080_8080_8080_8080
}

/// Eight bytes, then eight.
#[target_feature(enable = "sse2")]
#[inline]
pub(super) fn both([low, high]: [u64; 2]) -> __m128i {
    _mm_set_epi64x(high.cast_signed(), low.cast_signed())
}

/// 32 bytes from `at` on.
#[target_feature(enable = "avx")]
#[inline]
pub(super) fn thirty_two(bytes: &[u8], at: usize) -> __m256i {
    let bytes: &[u8; 32] = bytes[at..].first_chunk().expect("32 bytes of a block");
    // SAFETY: the reference covers them, at any alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// 16 bytes from `at` on.
#[target_feature(enable = "sse2")]
#[inline]
pub(super) fn sixteen(bytes: &[u8], at: usize) -> __m128i {
    let bytes: &[u8; 16] = bytes[at..].first_chunk().expect("16 bytes of a block");
    // SAFETY: the reference covers them, at any alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// Eight bytes from `at` on.
#[inline(always)]
pub(super) fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("8 bytes of a block"))
}

/// Four bytes from `at` on.
#[inline(always)]
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().expect("4 bytes of a block"))
}

/// Two bytes from `at` on.
#[inline(always)]
pub(super) fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*bytes[at..].first_chunk().expect("2 bytes of a block"))
}
