//! Super-blocks of 256 elements: f16 scales of the block times small integer scales of its groups.
//!
//! A group is 16 (Q2_K, Q3_K, Q6_K) or 32 (Q4_K, Q5_K) consecutive elements. Its quants are one field of bits in as many
//! consecutive bytes; groups that share bytes differ in the shift.

use super::integers::{SUPER_BLOCK, SuperBlock, SuperIntegers, Words};
use super::{block, block_of, f16_to_f32, finite};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// `d * sc * q - dmin * m`, q of 2 bits, sc and m of 4 bits for each 16 elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q2_K {
    /// sc in the low nibble, m in the high one.
    scales: [u8; 16],
    qs: [u8; 64],
    d: U16,
    dmin: U16,
}
block!(Q2_K: 256 elements in 84 bytes, |b| finite(b.d) & finite(b.dmin));

/// `d * (sc - 32) * (q - 4)`, q of 3 bits, sc of 6 bits for each 16 elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q3_K {
    /// The third bits.
    hmask: [u8; 32],
    qs: [u8; 64],
    scales: [u8; 12],
    d: U16,
}
block!(Q3_K: 256 elements in 110 bytes, |b| finite(b.d));

/// `d * sc * q - dmin * m`, q of 4 bits, sc and m of 6 bits for each 32 elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q4_K {
    d: U16,
    dmin: U16,
    scales: ScalesAndMins,
    qs: [u8; 128],
}
block!(Q4_K: 256 elements in 144 bytes, |b| finite(b.d) & finite(b.dmin));

/// `d * sc * q - dmin * m`, q of 5 bits, sc and m of 6 bits for each 32 elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q5_K {
    d: U16,
    dmin: U16,
    scales: ScalesAndMins,
    /// The fifth bits.
    qh: [u8; 32],
    qs: [u8; 128],
}
block!(Q5_K: 256 elements in 176 bytes, |b| finite(b.d) & finite(b.dmin));

/// `d * sc * (q - 32)`, q of 6 bits, sc of 8 bits with sign for each 16 elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q6_K {
    /// The low four bits.
    ql: [u8; 128],
    /// The high two bits.
    qh: [u8; 64],
    scales: [i8; 16],
    d: U16,
}
block!(Q6_K: 256 elements in 210 bytes, |b| finite(b.d));

impl Q2_K {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (f16_to_f32(self.d), f16_to_f32(self.dmin));
        let (qs, scales) = (self.qs.as_chunks::<32>().0, self.scales.as_chunks::<2>().0);
        for (row, (out, scales)) in out.as_chunks_mut::<32>().0.iter_mut().zip(scales).enumerate() {
            let quants = qs[row / 4].map(|q| (q >> (row % 4 * 2) & 3) as i8);
            scale_groups(&quants, scales.map(|scale| d * f32::from(scale & 0x0f)), out);
            for (out, scale) in out.as_chunks_mut::<16>().0.iter_mut().zip(scales) {
                let ml = dmin * f32::from(scale >> 4);
                for out in out {
                    *out -= ml;
                }
            }
        }
    }
}

impl Q3_K {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        let high = self.hmask.as_chunks::<16>().0;
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let dl = d * f32::from(self.scale(group) as i8 - 32);
            let (qs, shift) = two_bits(&self.qs, group);
            for (out, (&q, &h)) in out.iter_mut().zip(qs.iter().zip(&high[group % 2])) {
                let high = if h & 1 << (group / 2) == 0 { 4 } else { 0 };
                *out = dl * f32::from((q >> shift & 3) as i8 - high);
            }
        }
    }

    /// Six bits: the low four as nibbles of the first 8 bytes, the high two as quarters of the last 4.
    #[inline(always)]
    fn scale(&self, group: usize) -> u8 {
        let low = self.scales[group % 8] >> (group / 8 * 4) & 0x0f;
        let high = self.scales[8 + group % 4] >> (group / 4 * 2) & 3;
        low | high << 4
    }
}

impl Q4_K {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (f16_to_f32(self.d), f16_to_f32(self.dmin));
        let qs = self.qs.as_chunks::<32>().0;
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = self.scales.of(group);
            let (dl, ml) = (d * f32::from(scale), dmin * f32::from(min));
            for (out, &q) in out.iter_mut().zip(&qs[group / 2]) {
                *out = dl * f32::from(q >> (group % 2 * 4) & 0x0f) - ml;
            }
        }
    }
}

impl Q5_K {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (f16_to_f32(self.d), f16_to_f32(self.dmin));
        let qs = self.qs.as_chunks::<32>().0;
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = self.scales.of(group);
            let (dl, ml) = (d * f32::from(scale), dmin * f32::from(min));
            for (out, (&q, &h)) in out.iter_mut().zip(qs[group / 2].iter().zip(&self.qh)) {
                let high = if h & 1 << group == 0 { 0 } else { 16 };
                let q = q >> (group % 2 * 4) & 0x0f | high;
                *out = dl * f32::from(q) - ml;
            }
        }
    }
}

impl Q6_K {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        let (ql, qh) = (self.ql.as_chunks::<32>().0, self.qh.as_chunks::<32>().0);
        let scales = self.scales.as_chunks::<2>().0;
        // Each half of 128 elements has 64 bytes of ql and 32 of qh: rows of 32 elements are nibbles and quarters.
        for (row, (out, scales)) in out.as_chunks_mut::<32>().0.iter_mut().zip(scales).enumerate() {
            let (half, row) = (row / 4, row % 4);
            let mut quants = [0; 32];
            for (q, (&l, &h)) in quants.iter_mut().zip(ql[half * 2 + row % 2].iter().zip(&qh[half])) {
                *q = (l >> (row / 2 * 4) & 0x0f | (h >> (row * 2) & 3) << 4) as i8 - 32;
            }
            scale_groups(&quants, scales.map(|scale| d * f32::from(scale)), out);
        }
    }
}

impl SuperBlock for Q2_K {
    const GROUP: usize = 16;
    const OFFSET: i32 = 0;
    const LARGEST: u8 = 3;

    #[inline(always)]
    fn integers(bytes: &[u8]) -> SuperIntegers {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SUPER_BLOCK];
        let qs = block.qs.as_chunks::<32>().0;
        for (row, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            Words::<4>::of(&qs[row / 4]).field(row % 4 * 2, 3).put(quants);
        }
        let scales = block.scales.map(|scale| i32::from(scale & 0x0f));
        let minima = block.scales.map(|scale| i16::from(scale >> 4));
        let factors = [f16_to_f32(block.d), f16_to_f32(block.dmin)];
        SuperIntegers { quants, scales, minima, factors }
    }
}

impl SuperBlock for Q3_K {
    const GROUP: usize = 16;
    const OFFSET: i32 = 4;
    const LARGEST: u8 = 7;

    #[inline(always)]
    fn integers(bytes: &[u8]) -> SuperIntegers {
        let block: &Self = block_of(bytes);
        let (mut quants, mut scales, mut minima) = ([0; SUPER_BLOCK], [0; 16], [0; 16]);
        let qs = block.qs.as_chunks::<32>().0;
        for (row, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let high = Words::of(&block.hmask).field(row, 1);
            Words::<4>::of(&qs[row / 4]).field(row % 4 * 2, 3).with(high, 2).put(quants);
        }
        for (group, (scale, minimum)) in scales.iter_mut().zip(&mut minima).enumerate() {
            *minimum = i16::from(block.scale(group)) - 32;
            *scale = i32::from(*minimum);
        }
        SuperIntegers { quants, scales, minima, factors: [f16_to_f32(block.d), 0.0] }
    }
}

impl SuperBlock for Q4_K {
    const GROUP: usize = 32;
    const OFFSET: i32 = 0;
    const LARGEST: u8 = 15;

    #[inline(always)]
    fn integers(bytes: &[u8]) -> SuperIntegers {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SUPER_BLOCK];
        let qs = block.qs.as_chunks::<32>().0;
        for (quants, qs) in quants.as_chunks_mut::<64>().0.iter_mut().zip(qs) {
            let qs = Words::<4>::of(qs);
            qs.field(0, 0x0f).put(&mut quants[..32]);
            qs.field(4, 0x0f).put(&mut quants[32..]);
        }
        let (scales, minima) = block.scales.all();
        let factors = [f16_to_f32(block.d), f16_to_f32(block.dmin)];
        SuperIntegers { quants, scales, minima, factors }
    }
}

impl SuperBlock for Q5_K {
    const GROUP: usize = 32;
    const OFFSET: i32 = 0;
    const LARGEST: u8 = 31;

    #[inline(always)]
    fn integers(bytes: &[u8]) -> SuperIntegers {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SUPER_BLOCK];
        let qs = block.qs.as_chunks::<32>().0;
        for (pair, (quants, qs)) in quants.as_chunks_mut::<64>().0.iter_mut().zip(qs).enumerate() {
            let (qs, qh) = (Words::<4>::of(qs), Words::of(&block.qh));
            qs.field(0, 0x0f).with(qh.field(2 * pair, 1), 4).put(&mut quants[..32]);
            qs.field(4, 0x0f).with(qh.field(2 * pair + 1, 1), 4).put(&mut quants[32..]);
        }
        let (scales, minima) = block.scales.all();
        let factors = [f16_to_f32(block.d), f16_to_f32(block.dmin)];
        SuperIntegers { quants, scales, minima, factors }
    }
}

impl SuperBlock for Q6_K {
    const GROUP: usize = 16;
    const OFFSET: i32 = 32;
    const LARGEST: u8 = 63;

    #[inline(always)]
    fn integers(bytes: &[u8]) -> SuperIntegers {
        let block: &Self = block_of(bytes);
        let mut quants = [0; SUPER_BLOCK];
        let (ql, qh) = (block.ql.as_chunks::<32>().0, block.qh.as_chunks::<32>().0);
        for (row, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (half, row) = (row / 4, row % 4);
            let high = Words::of(&qh[half]).field(row * 2, 3);
            Words::<4>::of(&ql[half * 2 + row % 2]).field(row / 2 * 4, 0x0f).with(high, 4).put(quants);
        }
        let scales = block.scales.map(i32::from);
        let minima = block.scales.map(i16::from);
        SuperIntegers { quants, scales, minima, factors: [f16_to_f32(block.d), 0.0] }
    }
}

/// `dl * q` for two groups of 16. Quants come 32 at a time, because the compiler makes vectors of loops that long.
#[inline(always)]
fn scale_groups(quants: &[i8; 32], dl: [f32; 2], out: &mut [f32; 32]) {
    for ((out, quants), dl) in out.as_chunks_mut::<16>().0.iter_mut().zip(quants.as_chunks::<16>().0).zip(dl)
    {
        for (out, &q) in out.iter_mut().zip(quants) {
            *out = dl * f32::from(q);
        }
    }
}

/// The 16 bytes and the shift of a group's two-bit quants in Q2_K and Q3_K: each half of 128 elements has 32 bytes.
#[inline(always)]
fn two_bits(qs: &[u8; 64], group: usize) -> (&[u8; 16], usize) {
    (&qs.as_chunks::<16>().0[group / 8 * 2 + group % 2], group / 2 % 4 * 2)
}

/// Eight scales and eight minima of 6 bits in 12 bytes.
///
/// Four scales, four minima, then four more of each as nibbles (scale low); the nibbles' upper two bits are the upper bits
/// of the first eight bytes.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ScalesAndMins {
    scales: [u8; 4],
    mins: [u8; 4],
    nibbles: [u8; 4],
}

impl ScalesAndMins {
    #[inline(always)]
    fn of(&self, group: usize) -> (u8, u8) {
        let i = group % 4;
        if group < 4 {
            return (self.scales[i] & 0x3f, self.mins[i] & 0x3f);
        }
        let scale = self.nibbles[i] & 0x0f | self.scales[i] >> 6 << 4;
        let min = self.nibbles[i] >> 4 | self.mins[i] >> 6 << 4;
        (scale, min)
    }

    /// All of them, and zeros.
    #[inline(always)]
    fn all(&self) -> ([i32; 16], [i16; 16]) {
        const SIX: u32 = 0x3f3f_3f3f;
        const FOUR: u32 = 0x0f0f_0f0f;
        const UPPER: u32 = 0x3030_3030;
        let [s, m, n] = [self.scales, self.mins, self.nibbles].map(u32::from_le_bytes);
        let join = |low: u32, high: u32| (u64::from(low) | u64::from(high) << 32).to_le_bytes();
        let s = join(s & SIX, n & FOUR | s >> 2 & UPPER);
        let m = join(m & SIX, n >> 4 & FOUR | m >> 2 & UPPER);
        let (mut scales, mut mins) = ([0; 16], [0; 16]);
        for ((scale, min), (s, m)) in scales.iter_mut().zip(&mut mins).zip(s.into_iter().zip(m)) {
            (*scale, *min) = (i32::from(s), i16::from(m));
        }
        (scales, mins)
    }
}
