//! One f16 scale and one or two bits an element, or five elements of three values in a byte.

use super::{block, f16_to_f32, finite};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// `d * (q - 1)`, q a digit of base 3.
///
/// A byte is a fraction of 256, rounded up, whose first digits of base 3 are the elements. In turn the first digits of
/// `qs[..32]`, the second ones and so on (5 * 32 elements), then so of `qs[32..]` (5 * 16) and of `qh` (4 * 4).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TQ1_0 {
    qs: [u8; 48],
    qh: [u8; 4],
    d: U16,
}
block!(TQ1_0: 256 elements in 54 bytes, |b| finite(b.d));

/// `d * (q - 1)`, q of 2 bits; each half of 128 elements has 32 bytes.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TQ2_0 {
    qs: [u8; 64],
    d: U16,
}
block!(TQ2_0: 256 elements in 66 bytes, |b| finite(b.d));

/// `d` where the bit is set, else `-d`; consecutive bits are consecutive elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q1_0 {
    d: U16,
    qs: [u8; 16],
}
block!(Q1_0: 128 elements in 18 bytes, |b| finite(b.d));

/// `d * (q - 1)`, q of 2 bits; consecutive bits are consecutive elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q2_0 {
    d: U16,
    qs: [u8; 16],
}
block!(Q2_0: 64 elements in 18 bytes, |b| finite(b.d));

impl TQ1_0 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        let (out, last) = out.split_at_mut(240);
        let (first, second) = out.split_at_mut(160);
        let (qs, _) = self.qs.as_chunks::<16>();
        digits([qs[0], qs[1]].as_flattened(), d, first);
        digits(&qs[2], d, second);
        digits(&self.qh, d, last);
    }
}

/// The digits of `bytes`, most significant first: as many as `out` has rows of `bytes.len()` elements.
#[inline(always)]
fn digits(bytes: &[u8], d: f32, out: &mut [f32]) {
    for (out, power) in out.chunks_exact_mut(bytes.len()).zip([1u8, 3, 9, 27, 81]) {
        for (out, &byte) in out.iter_mut().zip(bytes) {
            let fraction = byte.wrapping_mul(power);
            let digit = ((u16::from(fraction) * 3) >> 8) as u8;
            *out = d * f32::from(digit as i8 - 1);
        }
    }
}

impl TQ2_0 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        let qs = self.qs.as_chunks::<32>().0;
        for (row, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (out, &q) in out.iter_mut().zip(&qs[row / 4]) {
                *out = d * f32::from((q >> (row % 4 * 2) & 3) as i8 - 1);
            }
        }
    }
}

impl Q1_0 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 128]) {
        let d = f16_to_f32(self.d);
        for (out, &q) in out.as_chunks_mut::<8>().0.iter_mut().zip(&self.qs) {
            for (i, out) in out.iter_mut().enumerate() {
                *out = if q & 1 << i == 0 { -d } else { d };
            }
        }
    }
}

impl Q2_0 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 64]) {
        let d = f16_to_f32(self.d);
        for (out, &q) in out.as_chunks_mut::<4>().0.iter_mut().zip(&self.qs) {
            for (i, out) in out.iter_mut().enumerate() {
                *out = d * f32::from((q >> (i * 2) & 3) as i8 - 1);
            }
        }
    }
}
