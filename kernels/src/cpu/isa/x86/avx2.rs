//! A few activation rows by quantised weights with AVX2, block after block in registers, from their bytes to their sums.
//!
//! What `vnni.rs` does, in registers of half the size: each block leaves one register of integer sums, and those of eight rows
//! become one with a row in each lane, which goes on with the rows' chains of f32 additions as in `integers.rs`.

mod blocks;

use super::ahead::Ahead;
use super::bits::{both, thirty_two};
use crate::cpu::integers::Meeting;
use crate::cpu::isa::fetch;
use crate::cpu::product::TILE;
use crate::cpu::rounded::Block;
use blocks::{Small, Super};
use formats::Dtype;
use formats::quant::{IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
use formats::quant::{SMALL_BLOCK, SUPER_BLOCK};
use std::arch::x86_64::*;
use std::hint::black_box;

/// Super-blocks of a row before the next row.
const SUPERS: usize = 16;
/// Small blocks of a row before the next row: whole blocks of activations.
const SMALLS: usize = 64;
/// Small blocks in as many columns as a super-block has.
const SMALL_BLOCKS: usize = SUPER_BLOCK / SMALL_BLOCK;
/// Rows in a register of sums.
const LANES: usize = 8;

/// What a run of blocks leaves, of [`LANES`] rows and one activation row.
#[derive(Debug)]
#[repr(align(64))]
pub(in crate::cpu) struct Left {
    /// In lanes.
    sums: [[[i32; LANES]; LANES]; SMALLS],
    /// Products of minima, in lanes.
    minima: [[[i32; LANES]; LANES]; SUPERS],
    /// Eight minima of a row as bytes.
    bytes: [[u64; LANES]; SUPERS],
    /// Factors as the blocks have them.
    factors: [[u16; LANES]; SMALLS],
    /// Those of the minima.
    minimum_factors: [[u16; LANES]; SUPERS],
}

impl Default for Left {
    fn default() -> Self {
        Self {
            sums: [[[0; LANES]; LANES]; SMALLS],
            minima: [[[0; LANES]; LANES]; SUPERS],
            bytes: [[0; LANES]; SUPERS],
            factors: [[0; LANES]; SMALLS],
            minimum_factors: [[0; LANES]; SUPERS],
        }
    }
}

/// The products with weights of a type, where there are such. To call it needs what [`super::avx2`] needs.
pub(in crate::cpu) fn of(dtype: Dtype) -> Option<unsafe fn(Meeting<'_>, &mut [f32])> {
    Some(match dtype {
        Dtype::Q2_K => supers::<Q2_K>,
        Dtype::Q3_K => supers::<Q3_K>,
        Dtype::Q4_K => supers::<Q4_K>,
        Dtype::Q5_K => supers::<Q5_K>,
        Dtype::Q6_K => supers::<Q6_K>,
        Dtype::IQ4_XS => supers::<IQ4_XS>,
        Dtype::Q4_0 => smalls::<Q4_0>,
        Dtype::Q5_0 => smalls::<Q5_0>,
        Dtype::Q8_0 => smalls::<Q8_0>,
        Dtype::IQ4_NL => smalls::<IQ4_NL>,
        Dtype::MXFP4 => smalls::<MXFP4>,
        _ => return None,
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn supers<B: Super>(meeting: Meeting<'_>, out: &mut [f32]) {
    let Meeting { w, next, row_bytes, cols, x, x_rows, scratch } = meeting;
    let left = &mut scratch.left.avx2;
    // The compiler makes two instructions of each shuffle whose places it knows.
    let spread = black_box(std::array::from_fn(|part| [[2 * part as u8, 2 * part as u8 + 1]; 16]));
    for (half, rows) in w.chunks(LANES * row_bytes).enumerate() {
        for t in 0..x_rows {
            let mut chain = _mm256_setzero_ps();
            for first in (0..cols / SUPER_BLOCK).step_by(SUPERS) {
                let blocks = SUPERS.min(cols / SUPER_BLOCK - first);
                let run = first * B::BYTES..(first + blocks) * B::BYTES;
                let ahead = Ahead::new([w, next], row_bytes, run.clone());
                let mut xs = [x.block(first, t); SUPERS];
                for (b, block) in xs[..blocks].iter_mut().enumerate() {
                    *block = x.block(first + b, t);
                }
                for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
                    let later = if t == 0 { ahead.of(half * LANES + row) } else { &[] };
                    for (b, bytes) in bytes[run.clone()].chunks_exact(B::BYTES).enumerate() {
                        fetch(later, b * B::BYTES..(b + 1) * B::BYTES);
                        let x = xs[b];
                        let (scales, minima, [d, dmin]) =
                            (B::scales(bytes), B::minima(bytes), B::factors(bytes));
                        // SAFETY: the features of this function.
                        let sums = unsafe { super_sums::<B>(bytes, scales, x, &spread) };
                        store(&mut left.sums[b][row], sums);
                        left.factors[b][row] = d;
                        if B::OFFSET == 0 {
                            left.minimum_factors[b][row] = dmin;
                        }
                        if B::OFFSET == 0 && B::GROUP == 32 {
                            left.bytes[b][row] = minima[0];
                        } else if B::OFFSET == 0 {
                            let minima = _mm256_cvtepu8_epi16(both(minima));
                            store(&mut left.minima[b][row], _mm256_madd_epi16(minima, sums_16(x)));
                        }
                    }
                }
                for (b, x) in xs.into_iter().enumerate().take(blocks) {
                    let factor = _mm256_set1_ps(x.factors[0]);
                    let d = _mm256_mul_ps(halves(&left.factors[b]), factor);
                    chain = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(add_up(&left.sums[b])), chain);
                    if B::OFFSET == 0 {
                        let minima = match B::GROUP {
                            32 => add_up_bytes(&left.bytes[b], x),
                            _ => add_up(&left.minima[b]),
                        };
                        let dmin = _mm256_mul_ps(halves(&left.minimum_factors[b]), factor);
                        chain = _mm256_fnmadd_ps(dmin, _mm256_cvtepi32_ps(minima), chain);
                    }
                }
            }
            store_f32(&mut out[t * TILE + half * LANES..], chain);
        }
    }
}

/// In lanes, the products of a block's scales, quants and activations.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn super_sums<B: Super>(
    bytes: &[u8],
    packed: [u64; 2],
    x: &Block,
    spread: &[[[u8; 2]; 16]; SUPER_BLOCK / 32],
) -> __m256i {
    let scales = match B::GROUP {
        32 => _mm256_cvtepi8_epi16(both([packed[0]; 2])),
        // Those of the first half of each 32 columns in the lower half, those of the second in the upper one.
        _ => _mm256_cvtepi8_epi16(_mm_shuffle_epi8(
            both(packed),
            _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15),
        )),
    };
    let mut sums = _mm256_setzero_si256();
    if B::OFFSET != 0 && B::LARGEST <= 127 {
        const { assert!(B::LARGEST > 127 || B::OFFSET == 0 || B::GROUP == 16) };
        let raised = _mm256_madd_epi16(_mm256_cvtepi8_epi16(both(packed)), sums_16(x));
        sums = _mm256_sub_epi32(sums, _mm256_mullo_epi32(raised, _mm256_set1_epi32(B::OFFSET)));
    }
    for (part, spread) in spread.iter().enumerate() {
        // SAFETY: the features of this function.
        let quants = unsafe { B::quants(bytes, part) };
        let pairs = pairs(quants, quants_of(x, part), B::LARGEST);
        let scale = _mm256_shuffle_epi8(scales, thirty_two(spread.as_flattened(), 0));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, scale));
    }
    sums
}

#[target_feature(enable = "avx2,fma,f16c")]
fn smalls<B: Small>(meeting: Meeting<'_>, out: &mut [f32]) {
    let Meeting { w, next, row_bytes, cols, x, x_rows, scratch } = meeting;
    let left = &mut scratch.left.avx2;
    let all = cols / SMALL_BLOCK;
    for (half, rows) in w.chunks(LANES * row_bytes).enumerate() {
        for t in 0..x_rows {
            let mut chain = _mm256_setzero_ps();
            for first in (0..all).step_by(SMALLS) {
                let blocks = SMALLS.min(all - first);
                let run = first * B::BYTES..(first + blocks) * B::BYTES;
                let ahead = Ahead::new([w, next], row_bytes, run.clone());
                for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
                    let later = if t == 0 { ahead.of(half * LANES + row) } else { &[] };
                    for (i, bytes) in bytes[run.clone()].chunks(SMALL_BLOCKS * B::BYTES).enumerate() {
                        fetch(later, i * SMALL_BLOCKS * B::BYTES..(i + 1) * SMALL_BLOCKS * B::BYTES);
                        let x = x.block(first / SMALL_BLOCKS + i, t);
                        for (at, bytes) in bytes.chunks_exact(B::BYTES).enumerate() {
                            // SAFETY: the features of this function.
                            let quants = unsafe { B::quants(bytes) };
                            let dots = pairs(quants, quants_of(x, at), B::LARGEST);
                            let dots = _mm256_madd_epi16(dots, _mm256_set1_epi16(1));
                            store(&mut left.sums[i * SMALL_BLOCKS + at][row], dots);
                            left.factors[i * SMALL_BLOCKS + at][row] = B::factor(bytes);
                        }
                    }
                }
                for b in 0..blocks {
                    let (x, at) = (x.block((first + b) / SMALL_BLOCKS, t), b % SMALL_BLOCKS);
                    let mut dots = add_up(&left.sums[b]);
                    if B::LARGEST <= 127 {
                        let raised = B::OFFSET * i32::from(x.sums_32.as_flattened()[at]);
                        dots = _mm256_sub_epi32(dots, _mm256_set1_epi32(raised));
                    }
                    // SAFETY: the features of this function.
                    let d = unsafe { B::factors(&left.factors[b]) };
                    let d = _mm256_mul_ps(d, _mm256_set1_ps(x.factors[at]));
                    chain = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(dots), chain);
                }
            }
            store_f32(&mut out[t * TILE + half * LANES..], chain);
        }
    }
}

/// Sums of two products each. Quants that would exceed 127 come as the signed numbers that they stand for, whose signs move to
/// the activations.
#[target_feature(enable = "avx2")]
#[inline]
fn pairs(quants: __m256i, x: __m256i, largest: u8) -> __m256i {
    if largest > 127 {
        return _mm256_maddubs_epi16(_mm256_abs_epi8(quants), _mm256_sign_epi8(x, quants));
    }
    _mm256_maddubs_epi16(quants, x)
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn halves(rows: &[u16; LANES]) -> __m256 {
    _mm256_cvtph_ps(eight(rows))
}

#[target_feature(enable = "sse2")]
#[inline]
fn eight(rows: &[u16; LANES]) -> __m128i {
    // SAFETY: the reference covers the 16 bytes, at any alignment.
    unsafe { _mm_loadu_si128(rows.as_ptr().cast()) }
}

/// Lane r is the sum of all lanes of row r.
#[target_feature(enable = "avx2")]
#[inline]
fn add_up(rows: &[[i32; LANES]; LANES]) -> __m256i {
    let low = add_up_four([load(&rows[0]), load(&rows[1]), load(&rows[2]), load(&rows[3])]);
    let high = add_up_four([load(&rows[4]), load(&rows[5]), load(&rows[6]), load(&rows[7])]);
    let first = _mm256_permute2x128_si256::<0x20>(low, high);
    _mm256_add_epi32(first, _mm256_permute2x128_si256::<0x31>(low, high))
}

/// Each half of the result has that half's sums of the four rows.
#[target_feature(enable = "avx2")]
#[inline]
fn add_up_four([a, b, c, d]: [__m256i; 4]) -> __m256i {
    let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
}

/// Lane r is the product of the eight bytes of row r with the sums of the groups of 32.
#[target_feature(enable = "avx2")]
#[inline]
fn add_up_bytes(rows: &[u64; LANES], x: &Block) -> __m256i {
    // SAFETY: the reference covers the 16 bytes, at any alignment.
    let sums = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(x.sums_32.as_ptr().cast()) });
    let mut twos = [_mm256_setzero_si256(); 4];
    for (two, rows) in twos.iter_mut().zip(rows.as_chunks::<2>().0) {
        *two = _mm256_madd_epi16(_mm256_cvtepu8_epi16(both(*rows)), sums);
    }
    // The lower half now has rows 0, 2, 4 and 6.
    let rows = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_permutevar8x32_epi32(add_up_four(twos), rows)
}

/// The 32 quants of an eighth of a block.
#[target_feature(enable = "avx")]
#[inline]
fn quants_of(x: &Block, part: usize) -> __m256i {
    // SAFETY: the reference covers the 32 bytes, at any alignment.
    unsafe { _mm256_loadu_si256(x.quants.as_chunks::<8>().0[part].as_ptr().cast()) }
}

#[target_feature(enable = "avx")]
#[inline]
fn sums_16(x: &Block) -> __m256i {
    // SAFETY: the reference covers the 32 bytes, at any alignment.
    unsafe { _mm256_loadu_si256(x.sums_16.as_ptr().cast()) }
}

#[target_feature(enable = "avx")]
#[inline]
fn load(lanes: &[i32; LANES]) -> __m256i {
    // SAFETY: the reference covers every lane, at any alignment.
    unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) }
}

#[target_feature(enable = "avx")]
#[inline]
fn store(to: &mut [i32; LANES], lanes: __m256i) {
    // SAFETY: the reference covers every lane, at any alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), lanes) }
}

#[target_feature(enable = "avx")]
#[inline]
fn store_f32(to: &mut [f32], chain: __m256) {
    let to: &mut [f32; LANES] = to.first_chunk_mut().expect("half a tile of results");
    // SAFETY: the reference covers every lane, at any alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), chain) }
}
