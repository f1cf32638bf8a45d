//! Blocks of 32 elements with an f16 scale, and a minimum in the `_1` types.
//!
//! Four-bit parts lie as 16 bytes: the low nibbles are elements 0 to 15, the high ones 16 to 31. The fifth bits lie as 32
//! consecutive bits.

use super::integers::{SMALL_BLOCK, SmallBlock, Words};
use super::{block, block_of, f16_to_f32, finite};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `d * (q - 8)`, q of 4 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q4_0 {
    d: U16,
    qs: [u8; 16],
}
block!(Q4_0: 32 elements in 18 bytes, |b| finite(b.d));

/// `d * q + m`, q of 4 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q4_1 {
    d: U16,
    m: U16,
    qs: [u8; 16],
}
block!(Q4_1: 32 elements in 20 bytes, |b| finite(b.d) & finite(b.m));

/// `d * (q - 16)`, q of 5 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q5_0 {
    d: U16,
    qh: [u8; 4],
    qs: [u8; 16],
}
block!(Q5_0: 32 elements in 22 bytes, |b| finite(b.d));

/// `d * q + m`, q of 5 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q5_1 {
    d: U16,
    m: U16,
    qh: [u8; 4],
    qs: [u8; 16],
}
block!(Q5_1: 32 elements in 24 bytes, |b| finite(b.d) & finite(b.m));

/// `d * q`, q of 8 bits with sign.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q8_0 {
    d: U16,
    qs: [i8; 32],
}
block!(Q8_0: 32 elements in 34 bytes, |b| finite(b.d));

impl Q4_0 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 32]) {
        let d = f16_to_f32(self.d);
        four_bits(&self.qs, out, |q| d * f32::from(q as i8 - 8));
    }
}

impl Q4_1 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 32]) {
        let (d, m) = (f16_to_f32(self.d), f16_to_f32(self.m));
        four_bits(&self.qs, out, |q| d * f32::from(q) + m);
    }
}

impl Q5_0 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 32]) {
        let d = f16_to_f32(self.d);
        five_bits(&self.qs, self.qh, out, |q| d * f32::from(q as i8 - 16));
    }
}

impl Q5_1 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 32]) {
        let (d, m) = (f16_to_f32(self.d), f16_to_f32(self.m));
        five_bits(&self.qs, self.qh, out, |q| d * f32::from(q) + m);
    }
}

impl Q8_0 {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 32]) {
        let d = f16_to_f32(self.d);
        for (out, &q) in out.iter_mut().zip(&self.qs) {
            *out = d * f32::from(q);
        }
    }
}

impl SmallBlock for Q4_0 {
    const OFFSET: i32 = 8;
    const LARGEST: u8 = 15;

    #[inline(always)]
    fn integers(bytes: &[u8]) -> ([u8; SMALL_BLOCK], f32) {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SMALL_BLOCK];
        let qs = Words::<2>::of(&block.qs);
        qs.field(0, 0x0f).put(&mut quants[..16]);
        qs.field(4, 0x0f).put(&mut quants[16..]);
        (quants, f16_to_f32(block.d))
    }
}

impl SmallBlock for Q5_0 {
    const OFFSET: i32 = 16;
    const LARGEST: u8 = 31;

    #[inline(always)]
    fn integers(bytes: &[u8]) -> ([u8; SMALL_BLOCK], f32) {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SMALL_BLOCK];
        let qs = block.qs.as_chunks().0;
        for (i, (quants, h)) in quants.as_chunks_mut::<8>().0.iter_mut().zip(block.qh).enumerate() {
            let low = u64::from_le_bytes(qs[i % 2]) >> (i / 2 * 4) & 0x0f0f_0f0f_0f0f_0f0f;
            *quants = (low | FIFTH_BITS[usize::from(h)]).to_le_bytes();
        }
        (quants, f16_to_f32(block.d))
    }
}

impl SmallBlock for Q8_0 {
    const OFFSET: i32 = 128;
    const LARGEST: u8 = 255;

    #[inline(always)]
    fn integers(bytes: &[u8]) -> ([u8; SMALL_BLOCK], f32) {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SMALL_BLOCK];
        Words::<4>::of(block.qs.as_bytes()).flip_signs().put(&mut quants);
        (quants, f16_to_f32(block.d))
    }
}

#[inline(always)]
fn four_bits(qs: &[u8; 16], out: &mut [f32; 32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (out, &q) in low.iter_mut().zip(qs) {
        *out = value(q & 0x0f);
    }
    for (out, &q) in high.iter_mut().zip(qs) {
        *out = value(q >> 4);
    }
}

#[inline(always)]
fn five_bits(qs: &[u8; 16], qh: [u8; 4], out: &mut [f32; 32], value: impl Fn(u8) -> f32) {
    let qs = qs.as_chunks().0;
    for (i, (out, h)) in out.as_chunks_mut::<8>().0.iter_mut().zip(qh).enumerate() {
        let low = u64::from_le_bytes(qs[i % 2]) >> (i / 2 * 4) & 0x0f0f_0f0f_0f0f_0f0f;
        let q = low | FIFTH_BITS[usize::from(h)];
        for (out, q) in out.iter_mut().zip(q.to_le_bytes()) {
            *out = value(q);
        }
    }
}

/// For each byte of fifth bits, 16 in the byte of each bit that is set.
static FIFTH_BITS: [u64; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 * 8 {
        table[i / 8] |= ((i as u64 / 8) >> (i % 8) & 1) << (i % 8 * 8 + 4);
        i += 1;
    }
    table
};
