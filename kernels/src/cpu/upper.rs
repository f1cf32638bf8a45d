//! One row of activations by BF16 weights, which are read once and never decoded to memory.
//!
//! Sums are those of [`Blend`](super::blend::Blend) and [`Dots`](super::dots::Dots) of the decoded weights, bit for bit.

use super::isa::{Kernel, Vector, fetch};
use super::lanes::padded;

/// Rows that meet the activations together.
const ROWS: usize = 4;

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
        let row_bytes = self.width * 2;
        let mut i = 0;
        while i + ROWS <= self.weights.len() {
            fetch(self.rows, (i + ROWS) * row_bytes..(i + 2 * ROWS) * row_bytes);
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
        let (out, out_rest) = out[..self.width].as_chunks_mut::<L>();
        for (c, out) in out.iter_mut().enumerate() {
            let mut sum = V::load(out);
            for n in 0..N {
                let values = V::load_upper(&rows[n].as_chunks::<L>().0[c]);
                sum = V::splat(self.weights[first + n]).mul_add(values, sum);
            }
            sum.store(out);
        }
        let column = self.width / L * L;
        for (c, out) in out_rest.iter_mut().enumerate() {
            for n in 0..N {
                *out = V::lane_mul_add(self.weights[first + n], upper(rows[n][column + c]), *out);
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
        let row_bytes = self.x.len() * 2;
        let mut i = 0;
        while i + ROWS <= out.len() {
            fetch(self.rows, (i + ROWS) * row_bytes..(i + 2 * ROWS) * row_bytes);
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
        let mut sums = [V::splat(0.0); N];
        for (c, x) in x.iter().enumerate() {
            let x = V::load(x);
            for n in 0..N {
                sums[n] = V::load_upper(&rows[n].as_chunks::<L>().0[c]).mul_add(x, sums[n]);
            }
        }
        if !x_rest.is_empty() {
            let x_rest = V::load(&padded(x_rest));
            for n in 0..N {
                let mut values = [0.0; L];
                for (value, half) in values.iter_mut().zip(rows[n].as_chunks::<L>().1) {
                    *value = upper(*half);
                }
                sums[n] = V::load(&values).mul_add(x_rest, sums[n]);
            }
        }
        for n in 0..N {
            out[first + n] = sums[n].sum();
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
