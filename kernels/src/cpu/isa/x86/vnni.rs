//! A few activation rows by quantised weights, block after block in registers, from their bytes to their sums.
//!
//! The compiler's way (`integers.rs`) takes blocks apart in memory; this one keeps up with memory. Rows are read from their
//! beginning to their end. Each block leaves one register of integer sums, and those of [`TILE`] rows become one with a row in
//! each lane, which goes on with the rows' chains of f32 additions: the same links in the same order as in `integers.rs`.

mod blocks;

use crate::cpu::integers::Meeting;
use crate::cpu::product::TILE;
use crate::cpu::rounded::Block;
use blocks::{Pair, Super};
use formats::Dtype;
use formats::quant::{IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
use formats::quant::{SMALL_BLOCK, SUPER_BLOCK};
use std::arch::x86_64::*;

/// Super-blocks, or pairs of small ones, of a row before the next row.
const RUN: usize = 8;
/// Pairs of small blocks in as many columns as a super-block has.
const PAIRS: usize = SUPER_BLOCK / SMALL_BLOCK / 2;
/// What an integer dot of four columns may be to fit 16 bits with a scale beside it.
const FITS_16_BITS: i32 = i16::MAX as i32;

/// What a run of blocks leaves, of [`TILE`] rows and one activation row.
#[derive(Debug)]
#[repr(align(64))]
pub(in crate::cpu) struct Left {
    /// In lanes.
    sums: [[[i32; 16]; TILE]; RUN],
    /// Products of minima, in lanes.
    minima: [[[i32; 16]; TILE]; RUN],
    /// Eight minima of a row as bytes.
    bytes: [[u64; TILE]; RUN],
    /// Factors as the blocks have them: of super-blocks two halves, of pairs one for each block.
    factors: [[[u32; TILE]; 2]; RUN],
}

impl Default for Left {
    fn default() -> Self {
        Self {
            sums: [[[0; 16]; TILE]; RUN],
            minima: [[[0; 16]; TILE]; RUN],
            bytes: [[0; TILE]; RUN],
            factors: [[[0; TILE]; 2]; RUN],
        }
    }
}

/// The products with weights of a type, where there are such. To call it needs what [`super::avx512_vnni`] needs.
pub(in crate::cpu) fn of(dtype: Dtype) -> Option<unsafe fn(Meeting<'_>, &mut [f32])> {
    Some(match dtype {
        Dtype::Q2_K => supers::<Q2_K>,
        Dtype::Q3_K => supers::<Q3_K>,
        Dtype::Q4_K => supers::<Q4_K>,
        Dtype::Q5_K => supers::<Q5_K>,
        Dtype::Q6_K => supers::<Q6_K>,
        Dtype::IQ4_XS => supers::<IQ4_XS>,
        Dtype::Q4_0 => pairs::<Q4_0>,
        Dtype::Q5_0 => pairs::<Q5_0>,
        Dtype::Q8_0 => pairs::<Q8_0>,
        Dtype::IQ4_NL => pairs::<IQ4_NL>,
        Dtype::MXFP4 => pairs::<MXFP4>,
        _ => return None,
    })
}

#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn supers<B: Super>(meeting: Meeting<'_>, out: &mut [f32]) {
    let Meeting { w, row_bytes, cols, x, x_rows, scratch, .. } = meeting;
    let left = &mut scratch.left.vnni;
    for t in 0..x_rows {
        let mut chain = _mm512_setzero_ps();
        for first in (0..cols / SUPER_BLOCK).step_by(RUN) {
            let blocks = RUN.min(cols / SUPER_BLOCK - first);
            let mut xs = [x.block(first, t); RUN];
            for (b, block) in xs[..blocks].iter_mut().enumerate() {
                *block = x.block(first + b, t);
            }
            let mut starts = [[_mm512_setzero_si512(); 4]; RUN];
            for (starts, x) in starts[..blocks].iter_mut().zip(xs) {
                *starts = starts_of(B::OFFSET, x);
            }
            for (row, bytes) in w.chunks_exact(row_bytes).enumerate() {
                let bytes = &bytes[first * B::BYTES..][..blocks * B::BYTES];
                for (b, bytes) in bytes.chunks_exact(B::BYTES).enumerate() {
                    let x = xs[b];
                    // SAFETY: the features of this function.
                    let (quants, scales) = unsafe { (B::quants(bytes), B::scales(bytes)) };
                    let mut sums = _mm512_setzero_si512();
                    // By number: an iterator over three arrays of registers stays a loop in memory.
                    for part in 0..4 {
                        let dots = _mm512_dpbusd_epi32(starts[b][part], quants[part], quants_of(x, part));
                        let largest = (B::LARGEST as i32 - B::OFFSET).max(B::OFFSET);
                        sums = if 4 * 127 * largest <= FITS_16_BITS {
                            _mm512_dpwssd_epi32(sums, dots, scales[part])
                        } else {
                            _mm512_add_epi32(sums, _mm512_mullo_epi32(dots, scales[part]))
                        };
                    }
                    store(&mut left.sums[b][row], sums);
                    left.factors[b][0][row] = B::factors(bytes);
                    if B::OFFSET == 0 && B::GROUP == 32 {
                        left.bytes[b][row] = B::minima(bytes)[0];
                    } else if B::OFFSET == 0 {
                        let [low, high] = B::minima(bytes).map(u64::cast_signed);
                        let minima = _mm256_cvtepu8_epi16(_mm_set_epi64x(high, low));
                        let minima = _mm256_madd_epi16(minima, sums_16(x));
                        store(&mut left.minima[b][row], _mm512_zextsi256_si512(minima));
                    }
                }
            }
            for (b, x) in xs.into_iter().enumerate().take(blocks) {
                let factors = load(&left.factors[b][0]);
                let d = halves(factors);
                chain = _mm512_fmadd_ps(
                    _mm512_mul_ps(d, _mm512_set1_ps(x.factors[0])),
                    _mm512_cvtepi32_ps(add_up(&left.sums[b])),
                    chain,
                );
                if B::OFFSET == 0 {
                    let minima = if B::GROUP == 32 {
                        add_up_bytes(&left.bytes[b], x)
                    } else {
                        add_up(&left.minima[b])
                    };
                    let dmin = halves(_mm512_srli_epi32::<16>(factors));
                    let dmin = _mm512_mul_ps(dmin, _mm512_set1_ps(-x.factors[0]));
                    chain = _mm512_fmadd_ps(dmin, _mm512_cvtepi32_ps(minima), chain);
                }
            }
        }
        store_f32(&mut out[t * TILE..], chain);
    }
}

#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn pairs<B: Pair>(meeting: Meeting<'_>, out: &mut [f32]) {
    let Meeting { w, row_bytes, cols, x, x_rows, scratch, .. } = meeting;
    let left = &mut scratch.left.vnni;
    let pairs = (cols / SMALL_BLOCK).div_ceil(2);
    for t in 0..x_rows {
        let mut chain = _mm512_setzero_ps();
        for first in (0..pairs).step_by(RUN) {
            let run = RUN.min(pairs - first);
            let last = (first + run - 1) / PAIRS;
            let mut xs = [x.block(last, t); RUN / PAIRS];
            for (block, number) in xs.iter_mut().zip(first / PAIRS..last) {
                *block = x.block(number, t);
            }
            let mut starts = [[_mm512_setzero_si512(); PAIRS]; RUN / PAIRS];
            for (starts, x) in starts.iter_mut().zip(xs) {
                *starts = starts_of(B::OFFSET, x);
            }
            for (row, bytes) in w.chunks_exact(row_bytes).enumerate() {
                let bytes = &bytes[first * 2 * B::BYTES..];
                for p in 0..run {
                    let x = xs[p / PAIRS];
                    let a = &bytes[p * 2 * B::BYTES..];
                    let (a, b) = (&a[..B::BYTES], &a[B::BYTES..]);
                    // A pair without a second block: the first one in its place meets zeros.
                    let b = if b.is_empty() { a } else { &b[..B::BYTES] };
                    // SAFETY: the features of this function.
                    let quants = unsafe { B::quants([a, b]) };
                    let start = starts[p / PAIRS][p % PAIRS];
                    let dots = _mm512_dpbusd_epi32(start, quants, quants_of(x, p % PAIRS));
                    store(&mut left.sums[p][row], dots);
                    left.factors[p][0][row] = B::factor(a);
                    left.factors[p][1][row] = B::factor(b);
                }
            }
            for p in 0..run {
                let x = xs[p / PAIRS];
                let dots = add_up_halves(&left.sums[p]);
                let blocks = if (first + p) * 2 + 1 < cols / SMALL_BLOCK { 2 } else { 1 };
                for (i, dots) in dots.iter().enumerate().take(blocks) {
                    // SAFETY: the features of this function.
                    let d = unsafe { B::factors(load(&left.factors[p][i])) };
                    let d = _mm512_mul_ps(d, _mm512_set1_ps(x.factors[p % PAIRS * 2 + i]));
                    chain = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(*dots), chain);
                }
            }
        }
        store_f32(&mut out[t * TILE..], chain);
    }
}

/// What the sums of four columns each begin with when all quants are too large by `offset`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn starts_of(offset: i32, x: &Block) -> [__m512i; 4] {
    let mut starts = [_mm512_setzero_si512(); 4];
    if offset != 0 {
        for (part, start) in starts.iter_mut().enumerate() {
            let sums = _mm512_dpbusd_epi32(*start, _mm512_set1_epi8(offset as i8), quants_of(x, part));
            *start = _mm512_sub_epi32(*start, sums);
        }
    }
    starts
}

/// The f16 in the lower half of each lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves(lanes: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(lanes))
}

/// Lane r is the sum of all lanes of row r.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_up(rows: &[[i32; 16]; TILE]) -> __m512i {
    let [a, b] = add_up_quarters(rows);
    let low = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
    let high = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
    _mm512_add_epi32(low, high)
}

/// The same of the lower and of the upper eight lanes.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_up_halves(rows: &[[i32; 16]; TILE]) -> [__m512i; 2] {
    let [a, b] = add_up_quarters(rows);
    [_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b)]
}

/// Of rows 0 to 7 and 8 to 15 the sums of the halves: quarters of a register are the lower and upper halves of four rows, then
/// of the next four.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_up_quarters(rows: &[[i32; 16]; TILE]) -> [__m512i; 2] {
    let mut fours = [_mm512_setzero_si512(); 4];
    for (four, rows) in fours.iter_mut().zip(rows.as_chunks::<4>().0) {
        *four = add_up_four([load(&rows[0]), load(&rows[1]), load(&rows[2]), load(&rows[3])]);
    }
    let mut eights = [_mm512_setzero_si512(); 2];
    for (eight, fours) in eights.iter_mut().zip(fours.as_chunks::<2>().0) {
        let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[0], fours[1]);
        let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[0], fours[1]);
        *eight = _mm512_add_epi32(even, odd);
    }
    eights
}

/// Each quarter of the result has that quarter's sums of the four rows.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_up_four([a, b, c, d]: [__m512i; 4]) -> __m512i {
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
}

/// Lane r is the product of row r's eight bytes with the sums of the groups of 32.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn add_up_bytes(rows: &[u64; TILE], x: &Block) -> __m512i {
    // SAFETY: the reference covers the 16 bytes, at any alignment.
    let sums = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(x.sums_32.as_ptr().cast()) });
    let mut fours = [_mm512_setzero_si512(); 4];
    for (four, rows) in fours.iter_mut().zip(rows.as_chunks::<4>().0) {
        // SAFETY: the reference covers the 32 bytes, at any alignment.
        let bytes = unsafe { _mm256_loadu_si256(rows.as_ptr().cast()) };
        *four = _mm512_madd_epi16(_mm512_cvtepu8_epi16(bytes), sums);
    }
    // Quarter q now has rows q, 4 + q, 8 + q and 12 + q.
    let rows = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(rows, add_up_four(fours))
}

/// The 64 quants of a quarter of a block.
#[target_feature(enable = "avx512f")]
#[inline]
fn quants_of(x: &Block, part: usize) -> __m512i {
    // SAFETY: the reference covers the 64 bytes, at any alignment.
    unsafe { _mm512_loadu_si512(x.quants.as_chunks::<16>().0[part].as_ptr().cast()) }
}

#[target_feature(enable = "avx")]
#[inline]
fn sums_16(x: &Block) -> __m256i {
    // SAFETY: the reference covers the 32 bytes, at any alignment.
    unsafe { _mm256_loadu_si256(x.sums_16.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load<T>(lanes: &[T; 16]) -> __m512i {
    const { assert!(size_of::<T>() == 4) };
    // SAFETY: the reference covers every lane, at any alignment.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store(to: &mut [i32; 16], lanes: __m512i) {
    // SAFETY: the reference covers every lane, at any alignment.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), lanes) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store_f32(to: &mut [f32], lanes: __m512) {
    let to: &mut [f32; TILE] = to.first_chunk_mut().expect("a tile of results");
    // SAFETY: the reference covers every lane, at any alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), lanes) }
}
