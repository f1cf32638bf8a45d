//! Weighted sums of rows, in register tiles.
//!
//! Each value of a result is one sum, taken in the order of the rows and continued by the next call: it does not depend on
//! the tile, nor on which other sums there are.

use super::isa::{Kernel, MAX_LANES, Vector};
use super::rows::Rows;

/// `out[n][..width] += sum over i < len of weights[n][i] * rows[i][..width]`
pub(super) struct Blend<'a> {
    /// `sums` rows of `len` weights.
    pub weights: Rows<'a>,
    /// `len` rows of `width` values.
    pub rows: Rows<'a>,
    pub len: usize,
    pub width: usize,
    /// Row n of the result begins at `out[n * stride]`.
    pub stride: usize,
    /// Rows of `weights` and `out`.
    pub sums: usize,
}

impl Kernel for Blend<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let mut n = 0;
        while n + 4 <= self.sums {
            self.row_of_tiles::<V, L, 4>(n, out);
            n += 4;
        }
        while n < self.sums {
            self.row_of_tiles::<V, L, 1>(n, out);
            n += 1;
        }
    }
}

impl Blend<'_> {
    #[inline(always)]
    fn row_of_tiles<V: Vector<L>, const L: usize, const N: usize>(&self, n: usize, out: &mut [f32]) {
        let mut column = 0;
        while column + 4 * L <= self.width && L == MAX_LANES {
            self.tile::<V, L, N, 4>(n, column, out);
            column += 4 * L;
        }
        while column + 2 * L <= self.width {
            self.tile::<V, L, N, 2>(n, column, out);
            column += 2 * L;
        }
        while column + L <= self.width {
            self.tile::<V, L, N, 1>(n, column, out);
            column += L;
        }
        for column in column..self.width {
            for n in n..n + N {
                self.value::<V, L>(n, column, out);
            }
        }
    }

    /// `N` sums from `n` on, `C` vectors of columns from `column` on. Sums and operands of four by four fit the 32
    /// registers that come with the widest vectors, those of four by two fit 16.
    #[inline(always)]
    fn tile<V: Vector<L>, const L: usize, const N: usize, const C: usize>(
        &self,
        n: usize,
        column: usize,
        out: &mut [f32],
    ) {
        let weights = self.weights.consecutive::<N>(n, self.len);
        let mut sums = [[V::splat(0.0); C]; N];
        for (i, sums) in sums.iter_mut().enumerate() {
            let out = out[(n + i) * self.stride + column..].as_chunks().0;
            for (sum, out) in sums.iter_mut().zip(&out[..C]) {
                *sum = V::load(out);
            }
        }
        for s in 0..self.len {
            let row = self.rows.row(s, self.width)[column..].as_chunks().0;
            let mut values = [V::splat(0.0); C];
            for (value, lanes) in values.iter_mut().zip(&row[..C]) {
                *value = V::load(lanes);
            }
            for (weights, sums) in weights.iter().zip(&mut sums) {
                let weight = V::splat(weights[s]);
                for (value, sum) in values.iter().zip(sums) {
                    *sum = weight.mul_add(*value, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let out = out[(n + i) * self.stride + column..].as_chunks_mut().0;
            for (sum, out) in sums.iter().zip(&mut out[..C]) {
                sum.store(out);
            }
        }
    }

    /// One value of the columns that fill no vector.
    #[inline(always)]
    fn value<V: Vector<L>, const L: usize>(&self, n: usize, column: usize, out: &mut [f32]) {
        let out = &mut out[n * self.stride + column];
        for (s, weight) in self.weights.row(n, self.len).iter().enumerate() {
            *out = V::lane_mul_add(*weight, self.rows.row(s, self.width)[column], *out);
        }
    }
}
