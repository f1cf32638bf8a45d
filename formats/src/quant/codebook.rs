//! Four bits an element that choose one of 16 values.

use super::integers::{SMALL_BLOCK, SUPER_BLOCK, SmallBlock, SuperBlock, SuperIntegers, Words};
use super::{block, block_of, f16_to_f32, finite};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Values that lie denser near zero, as weights do. Source: ggml `kvalues_iq4nl`.
const NONLINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the values of E2M1, which makes them integers; the block scales are halved for it.
/// Source: OCP Microscaling Formats (MX) specification 1.0, section 5.3.3.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Same source, section 5.4.1. ggml computes 2^128 with it.
const E8M0_NAN: u8 = 0xff;
/// Without its sign; ggml computes 0 with it.
const E4M3_NAN: u8 = 0x7f;

/// `d * NONLINEAR[q]`; the low nibbles are elements 0 to 15.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ4_NL {
    d: U16,
    qs: [u8; 16],
}
block!(IQ4_NL: 32 elements in 18 bytes, |b| finite(b.d));

/// `d * (sc - 32) * NONLINEAR[q]`, sc of 6 bits for each 32 elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ4_XS {
    d: U16,
    /// The high two bits of sc.
    scales_h: U16,
    /// The low four bits of sc.
    scales_l: [u8; 4],
    qs: [u8; 128],
}
block!(IQ4_XS: 256 elements in 136 bytes, |b| finite(b.d));

/// `2^(e - 127) * E2M1[q]`; the low nibbles are elements 0 to 15.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MXFP4 {
    /// E8M0; ggml reads 255 as a number too, not as NaN.
    e: u8,
    qs: [u8; 16],
}
block!(MXFP4: 32 elements in 17 bytes, |b| b.e != E8M0_NAN);

/// `d * E2M1[q]` with an E4M3 d for each 16 elements; in their 8 bytes the low nibbles are the first 8.
///
/// The scale of a whole tensor that some models add is a tensor of its own (`.scale`) and not part of the block.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NVFP4 {
    d: [u8; 4],
    qs: [[u8; 8]; 4],
}
block!(NVFP4: 64 elements in 36 bytes, |b| b.d.iter().all(|d| d & 0x7f != E4M3_NAN));

impl IQ4_NL {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 32]) {
        choose(&NONLINEAR, &self.qs, f16_to_f32(self.d), out);
    }
}

impl IQ4_XS {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        let scales_h = self.scales_h.get();
        let qs = self.qs.as_chunks::<16>().0;
        for (group, (out, qs)) in out.as_chunks_mut::<32>().0.iter_mut().zip(qs).enumerate() {
            let low = self.scales_l[group / 2] >> (group % 2 * 4) & 0x0f;
            let high = (scales_h >> (group * 2) & 3) as u8;
            let dl = d * f32::from((low | high << 4) as i8 - 32);
            choose(&NONLINEAR, qs, dl, out);
        }
    }
}

impl MXFP4 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 32]) {
        choose(&E2M1_DOUBLED, &self.qs, half_e8m0(self.e), out);
    }
}

impl NVFP4 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 64]) {
        let rows = out.as_chunks_mut::<16>().0.iter_mut().zip(&self.qs).zip(self.d);
        for ((out, qs), d) in rows {
            choose(&E2M1_DOUBLED, qs, HALF_E4M3[usize::from(d)], out);
        }
    }
}

impl SmallBlock for IQ4_NL {
    const OFFSET: i32 = 127;
    const LARGEST: u8 = 240;
    const VALUES: Option<[u8; 16]> = Some(raised(&NONLINEAR, 127));

    #[inline(always)]
    fn integers(bytes: &[u8]) -> ([u8; SMALL_BLOCK], f32) {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SMALL_BLOCK];
        nibbles(&block.qs, &mut quants);
        (quants, f16_to_f32(block.d))
    }
}

impl SuperBlock for IQ4_XS {
    const GROUP: usize = 32;
    const OFFSET: i32 = 127;
    const LARGEST: u8 = 240;
    const VALUES: Option<[u8; 16]> = Some(raised(&NONLINEAR, 127));

    #[inline(always)]
    fn integers(bytes: &[u8]) -> SuperIntegers {
        let block: &Self = block_of(bytes);
        let (mut quants, mut scales, mut minima) = ([0; SUPER_BLOCK], [0; 16], [0; 16]);
        let scales_h = block.scales_h.get();
        let groups = quants.as_chunks_mut().0.iter_mut().zip(block.qs.as_chunks().0).enumerate();
        for (group, (quants, qs)) in groups {
            let low = block.scales_l[group / 2] >> (group % 2 * 4) & 0x0f;
            let high = (scales_h >> (group * 2) & 3) as u8;
            minima[group] = i16::from(low | high << 4) - 32;
            scales[group] = i32::from(minima[group]);
            nibbles(qs, quants);
        }
        SuperIntegers { quants, scales, minima, factors: [f16_to_f32(block.d), 0.0] }
    }
}

impl SmallBlock for MXFP4 {
    const OFFSET: i32 = 12;
    const LARGEST: u8 = 24;
    const VALUES: Option<[u8; 16]> = Some(raised(&E2M1_DOUBLED, 12));

    #[inline(always)]
    fn integers(bytes: &[u8]) -> ([u8; SMALL_BLOCK], f32) {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SMALL_BLOCK];
        nibbles(&block.qs, &mut quants);
        (quants, half_e8m0(block.e))
    }
}

/// Values with `offset` added, none of which is below its negative.
const fn raised(values: &[i8; 16], offset: i16) -> [u8; 16] {
    let mut raised = [0; 16];
    let mut i = 0;
    while i < 16 {
        raised[i] = (values[i] as i16 + offset) as u8;
        i += 1;
    }
    raised
}

/// The low, then the high nibbles of `qs`.
#[inline(always)]
fn nibbles(qs: &[u8; 16], quants: &mut [u8; SMALL_BLOCK]) {
    let qs = Words::<2>::of(qs);
    qs.field(0, 0x0f).put(&mut quants[..16]);
    qs.field(4, 0x0f).put(&mut quants[16..]);
}

/// `d * values[q]` for the low, then for the high nibbles of `qs`. `out` is twice as long as `qs`.
#[inline(always)]
fn choose(values: &[i8; 16], qs: &[u8], d: f32, out: &mut [f32]) {
    let (low, high) = out.split_at_mut(qs.len());
    for ((low, high), &q) in low.iter_mut().zip(high).zip(qs) {
        *low = d * f32::from(values[usize::from(q & 0x0f)]);
        *high = d * f32::from(values[usize::from(q >> 4)]);
    }
}

/// `2^(e - 128)`, of which the two smallest are subnormal.
#[inline(always)]
fn half_e8m0(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

/// Half of each E4M3 number (bias 7), the sign bit ignored; as in ggml the NaN 0x7f is 0, but 0xff is 480 / 2.
static HALF_E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let magnitude = byte as u32 & 0x7f;
        let (exponent, mantissa) = (magnitude >> 3, magnitude & 7);
        table[byte] = match exponent {
            _ if byte == 0x7f => 0.0,
            0 => mantissa as f32 / 1024.0,
            _ => f32::from_bits((exponent + 127 - 7 - 1) << 23 | mantissa << 20),
        };
        byte += 1;
    }
    table
};
