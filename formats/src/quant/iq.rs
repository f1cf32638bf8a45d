//! Types whose quants are indices into grids: a lattice's most frequent points, 4 or 8 elements each.
//!
//! All have super-blocks of 256 elements. In IQ2 and IQ3 the grids hold magnitudes and the signs are stored apart: as one
//! bit an element (`_S`), or as 7 bits for 8 elements (`_XXS`, `_XS`), whose eighth makes the number of minus signs even.

use super::iq_grids::{IQ1_S_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID};
use super::{block, f16_to_f32, finite};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// `d * (1/2 + sc) / 4 * grid`, sc of 4 bits for each 32 elements, grid indices of 8 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ2_XXS {
    d: U16,
    /// Four indices, then signs and scale as [`SignsAndScale`] has them.
    groups: [[U32; 2]; 8],
}
block!(IQ2_XXS: 256 elements in 66 bytes, |b| finite(b.d));

/// `d * (1/2 + sc) / 4 * grid`, sc of 4 bits for each 16 elements, grid indices of 9 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ2_XS {
    d: U16,
    /// Index, and above it the seven sign bits.
    qs: [[U16; 4]; 8],
    scales: [u8; 8],
}
block!(IQ2_XS: 256 elements in 74 bytes, |b| finite(b.d));

/// `d * (1/2 + sc) / 4 * grid`, sc of 4 bits for each 16 elements, grid indices of 10 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ2_S {
    d: U16,
    qs: [[u8; 4]; 8],
    signs: [[u8; 4]; 8],
    /// The high two bits of the indices.
    qh: [u8; 8],
    scales: [u8; 8],
}
block!(IQ2_S: 256 elements in 82 bytes, |b| finite(b.d));

/// `d * (1/2 + sc) / 2 * grid`, sc of 4 bits for each 32 elements, grid indices of 8 bits for 4 elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ3_XXS {
    d: U16,
    qs: [[[u8; 2]; 4]; 8],
    /// As [`SignsAndScale`] has them.
    signs_and_scales: [U32; 8],
}
block!(IQ3_XXS: 256 elements in 98 bytes, |b| finite(b.d));

/// `d * (1 + 2 sc) * grid`, sc of 4 bits for each 32 elements, grid indices of 9 bits for 4 elements.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ3_S {
    d: U16,
    qs: [[[u8; 2]; 4]; 8],
    /// The ninth bits of the indices.
    qh: [u8; 8],
    signs: [[u8; 4]; 8],
    scales: [u8; 4],
}
block!(IQ3_S: 256 elements in 110 bytes, |b| finite(b.d));

/// `d * (1 + 2 sc) * (grid ± 1/8)`, sc of 3 bits and the sign for each 32 elements, grid indices of 11 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ1_S {
    d: U16,
    qs: [[u8; 4]; 8],
    /// Four times the high three bits of an index, then sc, then the sign.
    qh: [U16; 8],
}
block!(IQ1_S: 256 elements in 50 bytes, |b| finite(b.d));

/// `d * (1 + 2 sc) * (grid ± 1/8)`, sc of 3 bits for each 16 elements, the sign for each 8, grid indices of 11 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IQ1_M {
    qs: [[u8; 4]; 8],
    /// For each 8 elements the high three bits of the index, then the sign.
    qh: [[u8; 2]; 8],
    /// Four times sc, then four bits of d, lowest first.
    scales: [U16; 4],
}
block!(IQ1_M: 256 elements in 56 bytes, |b| b.exponent() != 0x1f);

impl IQ1_M {
    /// Of d, whose five bits lie in the upper two of its four parts.
    #[inline(always)]
    fn exponent(&self) -> u16 {
        let [_, _, lower, upper] = self.scales.map(|scale| scale.get() >> 12);
        (upper & 7) << 2 | lower >> 2
    }
}

/// What IQ2_XXS and IQ3_XXS keep for 32 elements in one u32: four times 7 sign bits, then a scale of 4 bits.
struct SignsAndScale {
    signs: [u8; 4],
    scale: f32,
}

impl SignsAndScale {
    #[inline(always)]
    fn of(bits: U32) -> Self {
        let bits = bits.get();
        let signs = [0, 7, 14, 21].map(|shift| EVEN_SIGNS[(bits >> shift & 0x7f) as usize]);
        Self { signs, scale: (bits >> 28) as f32 }
    }
}

/// Seven sign bits and the eighth, set where their number is odd.
static EVEN_SIGNS: [u8; 128] = {
    let mut table = [0; 128];
    let mut bits = 0;
    while bits < 128 {
        table[bits] = (bits | (bits.count_ones() as usize & 1) << 7) as u8;
        bits += 1;
    }
    table
};

impl IQ2_XXS {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        for (out, &[qs, signs_and_scale]) in out.as_chunks_mut::<32>().0.iter_mut().zip(&self.groups) {
            let SignsAndScale { signs, scale } = SignsAndScale::of(signs_and_scale);
            let dl = d * (0.5 + scale) * 0.25;
            let points = qs.to_bytes().into_iter().zip(signs);
            for (out, (q, signs)) in out.as_chunks_mut().0.iter_mut().zip(points) {
                signed(&IQ2_XXS_GRID[usize::from(q)], signs, dl, out);
            }
        }
    }
}

impl IQ2_XS {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        let groups = self.qs.iter().zip(self.scales);
        for (out, (qs, scales)) in out.as_chunks_mut::<32>().0.iter_mut().zip(groups) {
            let dl = two_scales(d, scales);
            for (i, (out, q)) in out.as_chunks_mut().0.iter_mut().zip(qs).enumerate() {
                let q = usize::from(q.get());
                signed(&IQ2_XS_GRID[q & 0x1ff], EVEN_SIGNS[q >> 9], dl[i / 2], out);
            }
        }
    }
}

impl IQ2_S {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let dl = two_scales(d, self.scales[group]);
            let high = usize::from(self.qh[group]);
            for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                let q = usize::from(self.qs[group][i]) | (high >> (i * 2) & 3) << 8;
                signed(&IQ2_S_GRID[q], self.signs[group][i], dl[i / 2], out);
            }
        }
    }
}

impl IQ3_XXS {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        let groups = self.qs.iter().zip(self.signs_and_scales);
        for (out, (qs, signs_and_scale)) in out.as_chunks_mut::<32>().0.iter_mut().zip(groups) {
            let SignsAndScale { signs, scale } = SignsAndScale::of(signs_and_scale);
            let dl = d * (0.5 + scale) * 0.5;
            for (out, (q, signs)) in out.as_chunks_mut().0.iter_mut().zip(qs.iter().zip(signs)) {
                signed(&join(q.map(|q| IQ3_XXS_GRID[usize::from(q)])), signs, dl, out);
            }
        }
    }
}

impl IQ3_S {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let scale = self.scales[group / 2] >> (group % 2 * 4) & 0x0f;
            let dl = d * f32::from(1 + 2 * scale);
            let high = usize::from(self.qh[group]);
            for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                let [a, b] = self.qs[group][i].map(usize::from);
                let a = IQ3_S_GRID[a | (high >> (i * 2) & 1) << 8];
                let b = IQ3_S_GRID[b | (high >> (i * 2 + 1) & 1) << 8];
                signed(&join([a, b]), self.signs[group][i], dl, out);
            }
        }
    }
}

impl IQ1_S {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let d = f16_to_f32(self.d);
        let groups = self.qs.iter().zip(&self.qh);
        for (out, (qs, high)) in out.as_chunks_mut::<32>().0.iter_mut().zip(groups) {
            let high = high.get();
            let dl = d * f32::from(1 + 2 * (high >> 12 & 7));
            for (i, (out, &q)) in out.as_chunks_mut().0.iter_mut().zip(qs).enumerate() {
                let q = usize::from(q) | usize::from(high >> (i * 3) & 7) << 8;
                shifted(&IQ1_S_GRID[q], high >> 15 == 1, dl, out);
            }
        }
    }
}

impl IQ1_M {
    #[inline(always)]
    fn values(&self, out: &mut [f32; 256]) {
        let scales = self.scales.map(U16::get);
        let d = scales.iter().rev().fold(0, |d, scale| d << 4 | scale >> 12);
        let d = f16_to_f32(U16::new(d));
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                let scale = scales[group / 2] >> (group % 2 * 6 + i / 2 * 3) & 7;
                let high = self.qh[group][i / 2] >> (i % 2 * 4);
                let q = usize::from(self.qs[group][i]) | usize::from(high & 7) << 8;
                shifted(&IQ1_S_GRID[q], high & 8 != 0, d * f32::from(1 + 2 * scale), out);
            }
        }
    }
}

/// The scales of the first and the last 16 of 32 elements.
#[inline(always)]
fn two_scales(d: f32, scales: u8) -> [f32; 2] {
    [scales & 0x0f, scales >> 4].map(|scale| d * (0.5 + f32::from(scale)) * 0.25)
}

#[inline(always)]
fn join([a, b]: [[u8; 4]; 2]) -> [u8; 8] {
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

/// `d * grid`, minus where the sign bit is set.
#[inline(always)]
fn signed(grid: &[u8; 8], signs: u8, d: f32, out: &mut [f32; 8]) {
    // Two's complement of eight bytes at once; none is 0, so nothing carries. A branch on random signs would be
    // mispredicted half the time.
    let minus = MINUS[usize::from(signs)];
    let points = (u64::from_le_bytes(*grid) ^ minus) + (minus & 0x0101_0101_0101_0101);
    for (out, point) in out.iter_mut().zip(points.to_le_bytes()) {
        *out = d * f32::from(point as i8);
    }
}

/// For each byte of sign bits, 0xff in the byte of each bit that is set.
static MINUS: [u64; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 * 8 {
        table[i / 8] |= (0xff * ((i as u64 / 8) >> (i % 8) & 1)) << (i % 8 * 8);
        i += 1;
    }
    table
};

/// `d * (grid ± 1/8)`.
#[inline(always)]
fn shifted(grid: &[i8; 8], minus: bool, d: f32, out: &mut [f32; 8]) {
    let delta = if minus { -0.125 } else { 0.125 };
    for (out, &point) in out.iter_mut().zip(grid) {
        *out = d * (f32::from(point) + delta);
    }
}
