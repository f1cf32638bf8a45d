//! Dot products of weight rows with activation rows, in register tiles.
//!
//! The sum of one pair of rows is one vector of lanes: lane l takes columns l, L + l, 2L + l ... in that order, whatever tile
//! the pair is in and however the columns are divided among calls, and the lanes are added in one fixed order. So a result
//! does not depend on which other rows there are.

use super::isa::{Kernel, MAX_LANES, Vector};
use super::lanes::padded;
use super::rows::Rows;

/// The products of every pair of a weight row and an activation row, over a run of columns.
pub(super) struct Dots<'a> {
    /// Rows of weights: `len` columns of `w_rows` rows.
    pub w: Rows<'a>,
    pub w_rows: usize,
    /// Rows of activations: `len` columns of `x_rows` rows.
    pub x: Rows<'a>,
    pub x_rows: usize,
    /// Columns.
    pub len: usize,
    /// What becomes of the sums.
    pub sums: Sums,
}

/// What becomes of the sums of a run of columns.
#[derive(Clone, Copy)]
pub(super) enum Sums {
    /// They are whole: `out` `[x_rows, w_rows]`.
    Whole,
    /// They are added to the lanes in `out` `[x_rows, w_rows, L]`. Columns are a multiple of [`MAX_LANES`] in all runs but
    /// a row's last.
    Lanes,
}

/// Sums of the lanes of every pair that [`Sums::Lanes`] left, `[pairs, L]` to `[pairs]`.
pub(super) struct Finish<'a> {
    pub lanes: &'a [f32],
}

impl Kernel for Dots<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let mut x = 0;
        while x + 4 <= self.x_rows && L == MAX_LANES {
            self.column_of_tiles::<V, L, 4>(x, out);
            x += 4;
        }
        while x + 2 <= self.x_rows {
            self.column_of_tiles::<V, L, 2>(x, out);
            x += 2;
        }
        if x < self.x_rows {
            self.column_of_tiles::<V, L, 1>(x, out);
        }
    }
}

impl Dots<'_> {
    #[inline(always)]
    fn column_of_tiles<V: Vector<L>, const L: usize, const N: usize>(&self, x: usize, out: &mut [f32]) {
        let mut w = 0;
        while w + 4 <= self.w_rows {
            self.tile::<V, L, 4, N>(w, x, out);
            w += 4;
        }
        while w < self.w_rows {
            self.tile::<V, L, 1, N>(w, x, out);
            w += 1;
        }
    }

    /// `M` weight rows from `w` on by `N` activation rows from `x` on. Sums and operands of four by four fit the 32
    /// registers that come with the widest vectors, those of four by two fit 16.
    #[inline(always)]
    fn tile<V: Vector<L>, const L: usize, const M: usize, const N: usize>(
        &self,
        w: usize,
        x: usize,
        out: &mut [f32],
    ) {
        let mut sums = [[V::splat(0.0); N]; M];
        if let Sums::Lanes = self.sums {
            let lanes = out.as_chunks().0;
            for m in 0..M {
                for n in 0..N {
                    sums[m][n] = V::load(&lanes[(x + n) * self.w_rows + w + m]);
                }
            }
        }

        let w_rows = self.w.consecutive::<M>(w, self.len);
        let x_rows = self.x.consecutive::<N>(x, self.len);
        let whole = self.len / L;
        let w_whole = w_rows.map(|row| &row.as_chunks::<L>().0[..whole]);
        let x_whole = x_rows.map(|row| &row.as_chunks::<L>().0[..whole]);
        for step in 0..whole {
            add_products::<V, L, M, N>(
                &w_whole.map(|row| row[step]),
                &x_whole.map(|row| row[step]),
                &mut sums,
            );
        }
        if whole * L < self.len {
            let w_rest = w_rows.map(|row| padded(&row[whole * L..]));
            let x_rest = x_rows.map(|row| padded(&row[whole * L..]));
            add_products::<V, L, M, N>(&w_rest, &x_rest, &mut sums);
        }

        for (m, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                let pair = (x + n) * self.w_rows + w + m;
                match self.sums {
                    Sums::Whole => out[pair] = sum.sum(),
                    Sums::Lanes => sum.store(&mut out.as_chunks_mut().0[pair]),
                }
            }
        }
    }
}

#[inline(always)]
fn add_products<V: Vector<L>, const L: usize, const M: usize, const N: usize>(
    w: &[[f32; L]; M],
    x: &[[f32; L]; N],
    sums: &mut [[V; N]; M],
) {
    // Vectors never pass through closures: those are compiled before they are inlined, without the instruction set.
    let mut x_lanes = [V::splat(0.0); N];
    for (lanes, x) in x_lanes.iter_mut().zip(x) {
        *lanes = V::load(x);
    }
    for (w, sums) in w.iter().zip(sums) {
        let w = V::load(w);
        for (x, sum) in x_lanes.iter().zip(sums) {
            *sum = w.mul_add(*x, *sum);
        }
    }
}

impl Kernel for Finish<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        for (lanes, out) in self.lanes.as_chunks::<L>().0.iter().zip(out) {
            *out = V::load(lanes).sum();
        }
    }
}
