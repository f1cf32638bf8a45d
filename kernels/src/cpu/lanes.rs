//! Lanes: arithmetic of one, and how the last ones are filled.

use super::isa::Vector;

/// The values that are left after whole vectors, and zeros.
#[inline(always)]
pub(super) fn padded<const L: usize>(rest: &[f32]) -> [f32; L] {
    let mut lanes = [0.0; L];
    lanes[..rest.len()].copy_from_slice(rest);
    lanes
}

/// The larger one; a NaN in `b` does not count.
#[inline(always)]
pub(super) fn max(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// e^x to 2 units in the last place, without a call or a branch, so that loops over it become vectors.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; the Taylor series of e^r is cut after r^7, where the rest is below 1e-8.
#[inline(always)]
pub(super) fn exp<V: Vector<L>, const L: usize>(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it leaves the rounded integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first with so few bits that n times it is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;

    // Beyond these all results are 0 or infinity. Comparisons that are false for NaN keep it.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = V::lane_mul_add(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = V::lane_mul_add(n, -LN_2_HIGH, x);
    let r = V::lane_mul_add(n, -LN_2_LOW, r);
    let mut series = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = V::lane_mul_add(series, r, coefficient);
    }
    // 2^n in two factors: n reaches from -150 to 128, further than one exponent does.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    series * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// 2^n for n from -126 to 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, Kernel, Proven};

    struct Exp(f32);

    impl Kernel for Exp {
        #[inline(always)]
        fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
            out[0] = exp::<V, L>(self.0);
        }
    }

    fn exp_on(isa: Proven, x: f32) -> f32 {
        let mut out = [f32::NAN];
        isa.run(Exp(x), &mut out);
        out[0]
    }

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        for isa in Isa::ALL.into_iter().filter_map(Proven::new) {
            let mut x = -110.0f32;
            while x < 95.0 {
                let exact = f64::from(x).exp();
                let found = exp_on(isa, x);
                if exact as f32 == f32::INFINITY {
                    // Close to the largest finite value either is right.
                    assert!(found > 3.4e38, "exp({x}) = {found}");
                } else {
                    let unit = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
                    let error = (f64::from(found) - exact).abs() / unit;
                    assert!(error <= 2.0, "exp({x}) = {found}, {error} units off {exact}, {isa:?}");
                }
                x += 0.000_97;
            }
        }
    }

    #[test]
    fn exp_at_the_ends() {
        for isa in Isa::ALL.into_iter().filter_map(Proven::new) {
            assert_eq!(exp_on(isa, 0.0), 1.0);
            assert_eq!(exp_on(isa, f32::NEG_INFINITY), 0.0);
            assert_eq!(exp_on(isa, f32::INFINITY), f32::INFINITY);
            assert!(exp_on(isa, f32::NAN).is_nan());
        }
    }
}
