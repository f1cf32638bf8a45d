//! Registers of x86-64, and the functions that are compiled for them.

mod ahead;
mod avx2;
mod bits;
mod vnni;

use super::{Integer, Isa, Kernel, Lane, Vector};
use crate::cpu::integers::Meeting;
use formats::Dtype;
use std::arch::x86_64::*;

/// What the ways of [`in_registers`] work with.
#[derive(Debug, Default)]
pub(in crate::cpu) struct Left {
    avx2: avx2::Left,
    vnni: vnni::Left,
}

/// An instruction set's own way to the products of a few activation rows with weights of a type, where it has one. To call it needs
/// the instruction set.
pub(super) fn in_registers(isa: Isa, dtype: Dtype) -> Option<unsafe fn(Meeting<'_>, &mut [f32])> {
    match isa {
        Isa::Portable => None,
        Isa::Avx2 | Isa::Avx512 => avx2::of(dtype),
        Isa::Avx512Vnni => vnni::of(dtype),
    }
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn avx2<K: Kernel>(kernel: K, out: &mut [f32]) {
    kernel.run::<Avx2, 8>(out);
}

#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn avx512<K: Kernel>(kernel: K, out: &mut [f32]) {
    kernel.run::<Avx512, 16>(out);
}

#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn avx512_vnni<K: Kernel>(kernel: K, out: &mut [f32]) {
    kernel.run::<Avx512Vnni, 16>(out);
}

/// Only [`avx2`] names it.
#[derive(Clone, Copy)]
struct Avx2(__m256);

/// Only [`avx512`] names it.
#[derive(Clone, Copy)]
struct Avx512(__m512);

/// Only [`avx512_vnni`] names it.
#[derive(Clone, Copy)]
struct Avx512Vnni(__m512);

#[derive(Clone, Copy)]
struct Avx2Integer(__m256i);

#[derive(Clone, Copy)]
struct Avx512Integer(__m512i);

#[derive(Clone, Copy)]
struct Avx512VnniInteger(__m512i);

#[target_feature(enable = "avx2")]
#[inline]
fn upper_of_8(lanes: &[[u8; 2]; 8]) -> __m256 {
    // SAFETY: the reference covers every lane, at any alignment.
    let lanes = unsafe { _mm_loadu_si128(lanes.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(lanes)))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn upper_of_16(lanes: &[[u8; 2]; 16]) -> __m512 {
    // SAFETY: the reference covers every lane, at any alignment.
    let lanes = unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(lanes)))
}

#[target_feature(enable = "avx2")]
#[inline]
fn sum_of_8(lanes: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn sum_of_16(lanes: __m512) -> f32 {
    let high =
        _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b11_10>(_mm512_castps_pd(lanes), _mm512_castps_pd(lanes)));
    sum_of_8(_mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_castps512_ps256(high)))
}

#[target_feature(enable = "avx2")]
#[inline]
fn integer_sum_of_8(lanes: __m256i) -> i32 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b11_10>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn integer_sum_of_16(lanes: __m512i) -> i32 {
    let high = _mm512_extracti64x4_epi64::<1>(lanes);
    integer_sum_of_8(_mm256_add_epi32(_mm512_castsi512_si256(lanes), high))
}

/// In halves where `w` may exceed 127; otherwise the sum of two products fits 16 bits.
#[target_feature(enable = "avx2")]
#[inline]
fn dot4_of_8<const WIDE: bool>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    if WIDE {
        let w = [_mm256_and_si256(w, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(w)];
        let x = [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x)];
        let dots = [_mm256_madd_epi16(w[0], x[0]), _mm256_madd_epi16(w[1], x[1])];
        return _mm256_add_epi32(sum, _mm256_add_epi32(dots[0], dots[1]));
    }
    let pairs = _mm256_maddubs_epi16(w, x);
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn dot4_of_16<const WIDE: bool>(sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
    if WIDE {
        let w = [_mm512_and_si512(w, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(w)];
        let x = [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(x)), _mm512_srai_epi16::<8>(x)];
        let dots = [_mm512_madd_epi16(w[0], x[0]), _mm512_madd_epi16(w[1], x[1])];
        return _mm512_add_epi32(sum, _mm512_add_epi32(dots[0], dots[1]));
    }
    let pairs = _mm512_maddubs_epi16(w, x);
    _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
}

#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn vnni_dot4<const WIDE: bool>(sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
    _mm512_dpbusd_epi32(sum, w, x)
}

#[target_feature(enable = "avx2")]
#[inline]
fn dot2_of_8(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn dot2_of_16(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))
}

#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn vnni_dot2(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    _mm512_dpwssd_epi32(sum, a, b)
}

#[target_feature(enable = "avx2")]
#[inline]
fn look_up_8(bytes: __m256i, values: &[u8; 16]) -> __m256i {
    // SAFETY: the reference covers the 16 bytes, at any alignment.
    let values = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), bytes)
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn look_up_16(bytes: __m512i, values: &[u8; 16]) -> __m512i {
    // SAFETY: the reference covers the 16 bytes, at any alignment.
    let values = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), bytes)
}

#[target_feature(enable = "avx2")]
#[inline]
fn spread_to_8<const PER: usize>(scales: &[i32; 16], part: usize) -> __m256i {
    let scale = |half: usize| _mm_set1_epi32(scales[(part * 8 + half * 4) / PER]);
    _mm256_set_m128i(scale(1), scale(0))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn spread_to_16<const PER: usize>(scales: &[i32; 16], part: usize) -> __m512i {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let start = _mm512_set1_epi32((part * 16) as i32);
    let lanes = _mm512_add_epi32(lanes, start);
    let index = if PER == 4 { _mm512_srli_epi32::<2>(lanes) } else { _mm512_srli_epi32::<3>(lanes) };
    // SAFETY: the reference covers every lane, at any alignment.
    let scales = unsafe { _mm512_loadu_si512(scales.as_ptr().cast()) };
    _mm512_permutexvar_epi32(index, scales)
}

/// Pairs of rows, then fours, eights and all of them trade halves.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose_16(mut rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut twos = rows;
    for i in 0..8 {
        twos[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        twos[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // Of the four quarters of a register, each has one column of four rows.
    for i in 0..4 {
        rows[4 * i] = _mm512_unpacklo_epi64(twos[4 * i], twos[4 * i + 2]);
        rows[4 * i + 1] = _mm512_unpackhi_epi64(twos[4 * i], twos[4 * i + 2]);
        rows[4 * i + 2] = _mm512_unpacklo_epi64(twos[4 * i + 1], twos[4 * i + 3]);
        rows[4 * i + 3] = _mm512_unpackhi_epi64(twos[4 * i + 1], twos[4 * i + 3]);
    }
    let mut columns = rows;
    for c in 0..4 {
        let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(rows[c], rows[4 + c]);
        let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(rows[c], rows[4 + c]);
        let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(rows[8 + c], rows[12 + c]);
        let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(rows[8 + c], rows[12 + c]);
        columns[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even, even_high);
        columns[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd, odd_high);
        columns[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even, even_high);
        columns[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd, odd_high);
    }
    columns
}

#[target_feature(enable = "avx2")]
#[inline]
fn transpose_8(mut rows: [__m256i; 8]) -> [__m256i; 8] {
    let mut twos = rows;
    for i in 0..4 {
        twos[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        twos[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..2 {
        rows[4 * i] = _mm256_unpacklo_epi64(twos[4 * i], twos[4 * i + 2]);
        rows[4 * i + 1] = _mm256_unpackhi_epi64(twos[4 * i], twos[4 * i + 2]);
        rows[4 * i + 2] = _mm256_unpacklo_epi64(twos[4 * i + 1], twos[4 * i + 3]);
        rows[4 * i + 3] = _mm256_unpackhi_epi64(twos[4 * i + 1], twos[4 * i + 3]);
    }
    let mut columns = rows;
    for c in 0..4 {
        columns[c] = _mm256_permute2x128_si256::<0x20>(rows[c], rows[4 + c]);
        columns[4 + c] = _mm256_permute2x128_si256::<0x31>(rows[c], rows[4 + c]);
    }
    columns
}

/// A vector and its integers by their instructions.
macro_rules! vector {
    (
        $name:ident, $integer:ident, $lanes:literal, $splat:ident, $load:ident, $store:ident, $mul:ident, $mul_add:ident,
        $sum:ident, $convert:ident, $upper:ident; $i_zero:ident, $i_splat:ident, $i_load:ident, $i_store:ident, $i_add:ident, $i_mul:ident,
        $dot4:ident, $dot2:ident, $look_up:ident, $i_sum:ident, $spread:ident, $transpose:ident
    ) => {
        impl Vector<$lanes> for $name {
            type Integer = $integer;

            #[inline(always)]
            fn from_integers(integers: $integer) -> Self {
                // SAFETY: this type is used only in the function of its name, which runs only where its features were
                // detected.
                Self(unsafe { $convert(integers.0) })
            }

            #[inline(always)]
            fn splat(value: f32) -> Self {
                // SAFETY: features as in `from_integers`.
                Self(unsafe { $splat(value) })
            }

            #[inline(always)]
            fn load(lanes: &[f32; $lanes]) -> Self {
                // SAFETY: features as in `from_integers`; the reference covers every lane, at any alignment.
                Self(unsafe { $load(lanes.as_ptr()) })
            }

            #[inline(always)]
            fn load_upper(lanes: &[[u8; 2]; $lanes]) -> Self {
                // SAFETY: features as in `from_integers`.
                Self(unsafe { $upper(lanes) })
            }

            #[inline(always)]
            fn store(self, lanes: &mut [f32; $lanes]) {
                // SAFETY: features as in `from_integers`; the reference covers every lane, at any alignment.
                unsafe { $store(lanes.as_mut_ptr(), self.0) }
            }

            #[inline(always)]
            fn mul(self, b: Self) -> Self {
                // SAFETY: features as in `from_integers`.
                Self(unsafe { $mul(self.0, b.0) })
            }

            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                // SAFETY: features as in `from_integers`.
                Self(unsafe { $mul_add(self.0, b.0, c.0) })
            }

            #[inline(always)]
            fn sum(self) -> f32 {
                // SAFETY: features as in `from_integers`.
                unsafe { $sum(self.0) }
            }

            #[inline(always)]
            fn lane_mul_add(a: f32, b: f32, c: f32) -> f32 {
                a.mul_add(b, c)
            }
        }

        impl Integer<$lanes> for $integer {
            #[inline(always)]
            fn splat(value: i32) -> Self {
                // SAFETY: as the vector of this type, it is used only where its features were detected.
                Self(unsafe { $i_splat(value) })
            }

            #[inline(always)]
            fn load<T: Lane>(lanes: &[T; $lanes]) -> Self {
                const { assert!(size_of::<T>() == 4) };
                // SAFETY: features as in `splat`; the reference covers every lane, at any alignment.
                Self(unsafe { $i_load(lanes.as_ptr().cast()) })
            }

            #[inline(always)]
            fn store(self, lanes: &mut [i32; $lanes]) {
                // SAFETY: features as in `splat`; the reference covers every lane, at any alignment.
                unsafe { $i_store(lanes.as_mut_ptr().cast(), self.0) }
            }

            #[inline(always)]
            fn add(self, b: Self) -> Self {
                // SAFETY: features as in `splat`.
                Self(unsafe { $i_add(self.0, b.0) })
            }

            #[inline(always)]
            fn mul(self, b: Self) -> Self {
                // SAFETY: features as in `splat`.
                Self(unsafe { $i_mul(self.0, b.0) })
            }

            #[inline(always)]
            fn dot4<const WIDE: bool>(self, w: Self, x: Self) -> Self {
                // SAFETY: features as in `splat`.
                Self(unsafe { $dot4::<WIDE>(self.0, w.0, x.0) })
            }

            #[inline(always)]
            fn dot2(self, a: Self, b: Self) -> Self {
                // SAFETY: features as in `splat`.
                Self(unsafe { $dot2(self.0, a.0, b.0) })
            }

            #[inline(always)]
            fn look_up(self, values: &[u8; 16]) -> Self {
                // SAFETY: features as in `splat`.
                Self(unsafe { $look_up(self.0, values) })
            }

            #[inline(always)]
            fn sum(self) -> i32 {
                // SAFETY: features as in `splat`.
                unsafe { $i_sum(self.0) }
            }

            #[inline(always)]
            fn spread<const PER: usize>(scales: &[i32; 16], part: usize) -> Self {
                const { assert!(PER == 4 || PER == 8) };
                // SAFETY: features as in `splat`.
                Self(unsafe { $spread::<PER>(scales, part) })
            }

            #[inline(always)]
            fn transpose(rows: [&[[u8; 4]; $lanes]; $lanes], columns: &mut [[[u8; 4]; $lanes]; $lanes]) {
                // SAFETY: features as in `splat`; each reference covers every lane, at any alignment.
                unsafe {
                    let mut loaded = [$i_zero(); $lanes];
                    for (loaded, row) in loaded.iter_mut().zip(rows) {
                        *loaded = $i_load(row.as_ptr().cast());
                    }
                    for (column, lanes) in columns.iter_mut().zip($transpose(loaded)) {
                        $i_store(column.as_mut_ptr().cast(), lanes);
                    }
                }
            }
        }
    };
}
vector!(
    Avx2, Avx2Integer, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_mul_ps, _mm256_fmadd_ps, sum_of_8,
    _mm256_cvtepi32_ps, upper_of_8; _mm256_setzero_si256, _mm256_set1_epi32, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_add_epi32,
    _mm256_mullo_epi32, dot4_of_8, dot2_of_8, look_up_8, integer_sum_of_8, spread_to_8, transpose_8
);
vector!(
    Avx512, Avx512Integer, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_mul_ps, _mm512_fmadd_ps, sum_of_16,
    _mm512_cvtepi32_ps, upper_of_16; _mm512_setzero_si512, _mm512_set1_epi32, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_add_epi32,
    _mm512_mullo_epi32, dot4_of_16, dot2_of_16, look_up_16, integer_sum_of_16, spread_to_16, transpose_16
);
vector!(
    Avx512Vnni, Avx512VnniInteger, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_mul_ps, _mm512_fmadd_ps,
    sum_of_16, _mm512_cvtepi32_ps, upper_of_16; _mm512_setzero_si512, _mm512_set1_epi32, _mm512_loadu_si512, _mm512_storeu_si512,
    _mm512_add_epi32, _mm512_mullo_epi32, vnni_dot4, vnni_dot2, look_up_16, integer_sum_of_16, spread_to_16, transpose_16
);
