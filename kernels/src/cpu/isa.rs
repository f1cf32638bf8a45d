//! Instruction sets, and the proof that this processor has one: the backend's only unsafe code.
//!
//! A [`Kernel`] is written once over a [`Vector`]. [`Proven::run`] inlines it into a function that is compiled for the
//! instruction set, with that set's vector. Arrays in place of vector registers would need no unsafe code in the vectors,
//! but the compiler keeps register tiles of them in memory as often as not, at a twentieth of the speed.
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "instructions that were detected at run time, and functions compiled for them"
    )
)]

/// An instruction set that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// What every processor of the target has.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
}

impl Isa {
    /// All of them, the slowest first.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Portable => "portable",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        })
    }
}

/// A hot loop and its inputs.
pub(super) trait Kernel {
    /// Runs with vectors of `L` lanes, a divisor of [`MAX_LANES`].
    ///
    /// `out` is an argument of its own, from here to the function that is compiled: an argument is how the compiler knows
    /// that writing it changes no input, and without that most decoders stay scalar.
    ///
    /// Implementations and all they call must be `#[inline(always)]`: only what is inlined is compiled for the
    /// instruction set.
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]);
}

/// A register of `L` f32 lanes.
///
/// Those that need an instruction set are private to this module, so that only [`Proven::run`] can bring them into use.
pub(super) trait Vector<const L: usize>: Copy {
    /// `value` in all lanes.
    fn splat(value: f32) -> Self;

    /// The lanes from memory.
    fn load(lanes: &[f32; L]) -> Self;

    /// The lanes to memory.
    fn store(self, lanes: &mut [f32; L]);

    /// `self * b + c`, rounded once if the instruction set can.
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// Sum of the lanes, always in this order: halves onto each other until one is left.
    fn sum(self) -> f32;

    /// What [`Vector::mul_add`] does in each lane.
    fn lane_mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// The widest vector in f32 lanes.
pub(super) const MAX_LANES: usize = 16;

/// An instruction set that this processor has. Only detection makes one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Proven(Isa);

impl Proven {
    /// `isa`, if this processor has it.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self(isa))
    }

    /// The fastest one.
    pub(super) fn best() -> Self {
        Isa::ALL.into_iter().rev().find_map(Self::new).unwrap_or(Self(Isa::Portable))
    }

    /// Runs `kernel` compiled for this instruction set.
    pub(super) fn run<K: Kernel>(self, kernel: K, out: &mut [f32]) {
        match self.0 {
            // SAFETY: a `Proven(Avx2)` exists only after `is_available` detected every feature of `avx2`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::avx2(kernel, out) },
            // SAFETY: a `Proven(Avx512)` exists only after `is_available` detected every feature of `avx512`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { x86::avx512(kernel, out) },
            _ => portable(kernel, out),
        }
    }
}

/// Not inlined, so that `out` is an argument here too.
#[inline(never)]
fn portable<K: Kernel>(kernel: K, out: &mut [f32]) {
    kernel.run::<Portable, 4>(out);
}

/// Four lanes that every compiler knows how to keep in a register; multiply and add are two roundings, because `mul_add`
/// without the instruction is a call.
#[derive(Clone, Copy)]
struct Portable([f32; 4]);

impl Vector<4> for Portable {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 4])
    }

    #[inline(always)]
    fn load(lanes: &[f32; 4]) -> Self {
        Self(*lanes)
    }

    #[inline(always)]
    fn store(self, lanes: &mut [f32; 4]) {
        *lanes = self.0;
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] * b.0[l] + c.0[l]))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let [a, b, c, d] = self.0;
        (a + c) + (b + d)
    }

    #[inline(always)]
    fn lane_mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kernel, Vector};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2<K: Kernel>(kernel: K, out: &mut [f32]) {
        kernel.run::<Avx2, 8>(out);
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) fn avx512<K: Kernel>(kernel: K, out: &mut [f32]) {
        kernel.run::<Avx512, 16>(out);
    }

    /// Only [`avx2`] names it.
    #[derive(Clone, Copy)]
    struct Avx2(__m256);

    /// Only [`avx512`] names it.
    #[derive(Clone, Copy)]
    struct Avx512(__m512);

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
        let high = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b11_10>(
            _mm512_castps_pd(lanes),
            _mm512_castps_pd(lanes),
        ));
        sum_of_8(_mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_castps512_ps256(high)))
    }

    /// A vector by its instructions.
    macro_rules! vector {
        ($name:ident, $lanes:literal, $splat:ident, $load:ident, $store:ident, $mul_add:ident, $sum:ident) => {
            impl Vector<$lanes> for $name {
                #[inline(always)]
                fn splat(value: f32) -> Self {
                    // SAFETY: this type is used only in the function of its name, which runs only where its features
                    // were detected.
                    Self(unsafe { $splat(value) })
                }

                #[inline(always)]
                fn load(lanes: &[f32; $lanes]) -> Self {
                    // SAFETY: features as in `splat`; the reference covers every lane, at any alignment.
                    Self(unsafe { $load(lanes.as_ptr()) })
                }

                #[inline(always)]
                fn store(self, lanes: &mut [f32; $lanes]) {
                    // SAFETY: features as in `splat`; the reference covers every lane, at any alignment.
                    unsafe { $store(lanes.as_mut_ptr(), self.0) }
                }

                #[inline(always)]
                fn mul_add(self, b: Self, c: Self) -> Self {
                    // SAFETY: features as in `splat`.
                    Self(unsafe { $mul_add(self.0, b.0, c.0) })
                }

                #[inline(always)]
                fn sum(self) -> f32 {
                    // SAFETY: features as in `splat`.
                    unsafe { $sum(self.0) }
                }

                #[inline(always)]
                fn lane_mul_add(a: f32, b: f32, c: f32) -> f32 {
                    a.mul_add(b, c)
                }
            }
        };
    }
    vector!(Avx2, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, sum_of_8);
    vector!(Avx512, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, sum_of_16);
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sum;

    impl Kernel for Sum {
        #[inline(always)]
        fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
            let mut lanes = [0.0; L];
            lanes.copy_from_slice(&out[..L]);
            (out[0], out[1]) = (V::load(&lanes).sum(), L as f32);
        }
    }

    #[test]
    fn sums_take_every_lane_once_in_the_documented_order() {
        // Of many sums of fractions some are rounded otherwise in any other order.
        for start in 0..100 {
            let values: [f32; MAX_LANES] = std::array::from_fn(|i| 1.0 / (1.5 + (start * 7 + i) as f32));
            for isa in Isa::ALL.into_iter().filter_map(Proven::new) {
                let mut out = values;
                isa.run(Sum, &mut out);
                let mut halves = values;
                let mut half = out[1] as usize / 2;
                while half > 0 {
                    for i in 0..half {
                        halves[i] += halves[half + i];
                    }
                    half /= 2;
                }
                assert_eq!(out[0], halves[0], "{isa:?}");
            }
        }
    }
}
