//! One row of activations by BF16 weights, which are read once and never decoded to memory.
//!
//! Sums are those of [`Blend`](super::blend::Blend) and [`Dots`](super::dots::Dots) of the decoded weights, bit for bit.

use super::isa::{Kernel, Vector, fetch};
use super::lanes::padded;

/// Rows that meet the activations together.
const ROWS: usize = 4;
/// Values that come from memory together.
const LINE: usize = 32;

/// `out[..width] += sum over i of weights[i] * rows[i]`
pub(super) struct BlendUpper<'a> {
    pub weights: &'a [f32],
    /// As many rows of `width` BF16.
    pub rows: &'a [u8],
    pub width: usize,
}

impl Kernel for BlendUpper<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let mut i = 0;
        while i + ROWS <= self.weights.len() {
            self.add::<V, L, ROWS>(i, out);
            i += ROWS;
        }
        while i < self.weights.len() {
            self.add::<V, L, 1>(i, out);
            i += 1;
        }
    }
}

impl BlendUpper<'_> {
    /// Adds `N` rows from `first` on.
    #[inline(always)]
    fn add<V: Vector<L>, const L: usize, const N: usize>(&self, first: usize, out: &mut [f32]) {
        let rows: [&[[u8; 2]]; N] = std::array::from_fn(|n| row(self.rows, first + n, self.width));
        let whole = self.width / L;
        let row_lanes = rows.map(|row| &row.as_chunks::<L>().0[..whole]);
        let (out, out_rest) = out[..self.width].as_chunks_mut::<L>();
        let out = &mut out[..whole];
        let mut weights = [V::splat(0.0); N];
        for (weight, value) in weights.iter_mut().zip(&self.weights[first..]) {
            *weight = V::splat(*value);
        }
        for c in 0..whole {
            fetch_after::<N>(self.rows, [first, self.width], c * L);
            let mut sum = V::load(&out[c]);
            for (weight, row) in weights.iter().zip(row_lanes) {
                sum = weight.mul_add(V::load_upper(&row[c]), sum);
            }
            sum.store(&mut out[c]);
        }
        for (c, out) in (whole * L..).zip(out_rest) {
            for (weight, row) in self.weights[first..].iter().zip(rows) {
                *out = V::lane_mul_add(*weight, upper(row[c]), *out);
            }
        }
    }
}

/// `out[i] = sum over c of rows[i][c] * x[c]`
pub(super) struct DotsUpper<'a> {
    /// Rows of as many BF16 as `x` has values.
    pub rows: &'a [u8],
    pub x: &'a [f32],
}

impl Kernel for DotsUpper<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let mut i = 0;
        while i + ROWS <= out.len() {
            self.dots::<V, L, ROWS>(i, out);
            i += ROWS;
        }
        while i < out.len() {
            self.dots::<V, L, 1>(i, out);
            i += 1;
        }
    }
}

impl DotsUpper<'_> {
    #[inline(always)]
    fn dots<V: Vector<L>, const L: usize, const N: usize>(&self, first: usize, out: &mut [f32]) {
        let rows: [&[[u8; 2]]; N] = std::array::from_fn(|n| row(self.rows, first + n, self.x.len()));
        let (x, x_rest) = self.x.as_chunks::<L>();
        let row_lanes = rows.map(|row| &row.as_chunks::<L>().0[..x.len()]);
        let mut sums = [V::splat(0.0); N];
        for c in 0..x.len() {
            fetch_after::<N>(self.rows, [first, self.x.len()], c * L);
            let x = V::load(&x[c]);
            for (sum, row) in sums.iter_mut().zip(row_lanes) {
                *sum = V::load_upper(&row[c]).mul_add(x, *sum);
            }
        }
        if !x_rest.is_empty() {
            let x_rest = V::load(&padded(x_rest));
            for (sum, row) in sums.iter_mut().zip(rows) {
                let mut values = [0.0; L];
                for (value, half) in values.iter_mut().zip(row.as_chunks::<L>().1) {
                    *value = upper(*half);
                }
                *sum = V::load(&values).mul_add(x_rest, *sum);
            }
        }
        for (out, sum) in out[first..].iter_mut().zip(sums) {
            *out = sum.sum();
        }
    }
}

/// Asks for column `column` of the `N` rows of `width` values after those from `first` on, once for all that come together.
#[inline(always)]
fn fetch_after<const N: usize>(rows: &[u8], [first, width]: [usize; 2], column: usize) {
    if column.is_multiple_of(LINE) {
        for n in 0..N {
            let byte = ((first + N + n) * width + column) * 2;
            fetch(rows, byte..byte + 1);
        }
    }
}

#[inline(always)]
fn row(rows: &[u8], number: usize, width: usize) -> &[[u8; 2]] {
    rows[number * width * 2..][..width * 2].as_chunks().0
}

#[inline(always)]
fn upper(half: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16)
}
