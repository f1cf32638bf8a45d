//! Products of quantised weights with rounded activations, in integers.
//!
//! The sum of a row of weights and a row of activations is one chain of f32 additions, a link for each block of weights in
//! their order; what a link adds is an exact integer times the factors. It is the same however integers are summed, so a few
//! activation rows and many take different ways to the same bits:
//! - few: blocks of a weight row are taken apart and meet the activations with columns in the lanes, where an instruction set has
//!   no way of its own (`isa/x86/avx2.rs`, `isa/x86/vnni.rs`);
//! - many: blocks of [`TILE`] weight rows are taken apart and transposed, and each activation, in all lanes, meets as many rows.

use super::isa::{Integer, Kernel, Left, MAX_LANES, Proven, Vector};
use super::product::TILE;
use super::rounded::{Block, RoundedRows};
use formats::Dtype;
use formats::quant::{
    ForIntegers, SMALL_BLOCK, SUPER_BLOCK, SmallBlock, SuperBlock, SuperIntegers, dispatch_integers,
};
use std::marker::PhantomData;

/// Up to this many activation rows transposing the weights does not pay.
const FEW: usize = 2;
/// Activation rows in one register tile: their sums and the sums of a group fit 32 registers.
const TOGETHER: usize = 8;
/// Small blocks in as many columns as a super-block has.
const SMALL_BLOCKS: usize = SUPER_BLOCK / SMALL_BLOCK;

/// Some rows of a weight and the activation rows that they meet.
pub(super) struct Meeting<'a> {
    /// Rows of whole blocks, at most [`TILE`].
    pub w: &'a [u8],
    /// Rows that are likely to be read after these.
    pub next: &'a [u8],
    /// Of one row.
    pub row_bytes: usize,
    pub cols: usize,
    pub x: RoundedRows<'a>,
    pub x_rows: usize,
    pub scratch: &'a mut Scratch,
}

/// `out` `[x_rows, TILE]`: the products of a [`Meeting`], as many of each row's as there are weight rows; the others have no meaning.
#[derive(Clone, Copy)]
pub(super) struct Meet {
    dtype: Dtype,
    run: fn(Proven, Meeting<'_>, &mut [f32]),
}

impl Meet {
    /// `None` for types that meet activations as they are.
    pub(super) fn of(dtype: Dtype) -> Option<Self> {
        dispatch_integers(dtype, Compile)
    }

    pub(super) fn run(self, isa: Proven, meeting: Meeting<'_>, out: &mut [f32]) {
        let meeting = match meeting.x_rows <= FEW {
            true => isa.in_registers(self.dtype, meeting, out),
            false => Some(meeting),
        };
        if let Some(meeting) = meeting {
            (self.run)(isa, meeting, out);
        }
    }
}

struct Compile;

impl ForIntegers for Compile {
    type Output = Meet;

    fn call_super<B: SuperBlock>(self) -> Meet {
        let run = |isa: Proven, meeting: Meeting<'_>, out: &mut [f32]| {
            isa.run(Super { meeting, block: PhantomData::<B> }, out);
        };
        Meet { dtype: B::DTYPE, run }
    }

    fn call_small<B: SmallBlock>(self) -> Meet {
        let run = |isa: Proven, meeting: Meeting<'_>, out: &mut [f32]| {
            isa.run(Small { meeting, block: PhantomData::<B> }, out);
        };
        Meet { dtype: B::DTYPE, run }
    }
}

/// Up to [`TILE`] blocks of 256 columns, taken apart: of as many rows, or of one row one after the other.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Scratch {
    quants: [[u8; SUPER_BLOCK]; TILE],
    scales: [[i32; 16]; TILE],
    minima: [[i16; 16]; TILE],
    /// Of a super-block the two factors, otherwise those of the small blocks.
    factors: [[f32; SMALL_BLOCKS]; TILE],
    /// For each part of as many rows as there are lanes `[columns / 4, lanes]`.
    columns: [[u8; 4]; SUPER_BLOCK / 4 * TILE],
    /// `[groups, TILE]`
    scale_columns: [[i32; TILE]; 16],
    /// `[pairs of groups, TILE]`
    minimum_columns: [[[i16; 2]; TILE]; 8],
    /// `[factors, TILE]`
    factor_columns: [[f32; TILE]; SMALL_BLOCKS],
    /// What an instruction set's own way to a few activation rows works with.
    pub left: Left,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            quants: [[0; SUPER_BLOCK]; TILE],
            scales: [[0; 16]; TILE],
            minima: [[0; 16]; TILE],
            factors: [[0.0; SMALL_BLOCKS]; TILE],
            columns: [[0; 4]; SUPER_BLOCK / 4 * TILE],
            scale_columns: [[0; TILE]; 16],
            minimum_columns: [[[0; 2]; TILE]; 8],
            factor_columns: [[0.0; TILE]; SMALL_BLOCKS],
            left: Left::default(),
        }
    }
}

impl Scratch {
    /// Columns of the quants of all rows, for `L` lanes.
    #[inline(always)]
    fn transpose<V: Vector<L>, const L: usize>(&mut self) {
        for (part, columns) in
            self.columns.as_chunks_mut::<L>().0.chunks_exact_mut(SUPER_BLOCK / 4).enumerate()
        {
            for (step, columns) in columns.as_chunks_mut::<L>().0.iter_mut().enumerate() {
                let mut rows = [&[[0; 4]; L]; L];
                for (row, quants) in rows.iter_mut().zip(&self.quants[part * L..]) {
                    *row = &quants.as_chunks::<4>().0.as_chunks::<L>().0[step];
                }
                V::Integer::transpose(rows, columns);
            }
        }
        for (row, factors) in self.factors.iter().enumerate() {
            for (column, factor) in self.factor_columns.iter_mut().zip(factors) {
                column[row] = *factor;
            }
        }
    }
}

struct Super<'a, B> {
    meeting: Meeting<'a>,
    block: PhantomData<B>,
}

impl<B: SuperBlock> Kernel for Super<'_, B> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        if self.meeting.x_rows <= FEW {
            self.few::<V, L>(out);
        } else {
            self.many::<V, L>(out);
        }
    }
}

impl<B: SuperBlock> Super<'_, B> {
    /// Takes one block apart to place `at`.
    #[inline(always)]
    fn take_apart<V: Vector<L>, const L: usize>(scratch: &mut Scratch, bytes: &[u8], at: usize) {
        let SuperIntegers { quants, scales, minima, factors } = B::integers(bytes);
        scratch.quants[at] = quants;
        if let Some(values) = B::VALUES {
            look_up::<V, L>(&values, &mut scratch.quants[at]);
        }
        scratch.scales[at] = scales;
        scratch.minima[at] = minima;
        scratch.factors[at][..2].copy_from_slice(&factors);
    }

    #[inline(always)]
    fn few<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let Meeting { w, row_bytes, x, x_rows, scratch, .. } = self.meeting;
        for (row, bytes) in w.chunks_exact(row_bytes).enumerate() {
            for (run, bytes) in bytes.chunks(TILE * B::BYTES).enumerate() {
                for (at, bytes) in bytes.chunks_exact(B::BYTES).enumerate() {
                    Self::take_apart::<V, L>(scratch, bytes, at);
                }
                for t in 0..x_rows {
                    let out = &mut out[t * TILE + row];
                    let mut sum = if run == 0 { 0.0 } else { *out };
                    for at in 0..bytes.len() / B::BYTES {
                        sum = Self::link::<V, L>(scratch, at, x.block(run * TILE + at, t), sum);
                    }
                    *out = sum;
                }
            }
        }
    }

    /// `sum` and the product of the block `at` with `x`.
    #[inline(always)]
    fn link<V: Vector<L>, const L: usize>(scratch: &Scratch, at: usize, x: &Block, sum: f32) -> f32 {
        let quants = scratch.quants[at].as_chunks::<4>().0.as_chunks::<L>().0;
        let mut lanes = V::Integer::splat(0);
        for (part, (quants, x)) in quants.iter().zip(x.quants.as_chunks::<L>().0).enumerate() {
            let (quants, x) = (V::Integer::load(quants), V::Integer::load(x));
            let dots = if B::LARGEST > 127 {
                V::Integer::splat(0).dot4::<true>(quants, x)
            } else {
                V::Integer::splat(0).dot4::<false>(quants, x)
            };
            let scales = if B::GROUP == 16 {
                V::Integer::spread::<4>(&scratch.scales[at], part)
            } else {
                V::Integer::spread::<8>(&scratch.scales[at], part)
            };
            lanes = lanes.add(dots.mul(scales));
        }
        let dots = lanes.sum();
        let minima = if B::GROUP == 16 {
            dot(&scratch.minima[at], x.sums_16.as_flattened())
        } else {
            let minima: &[i16; 8] = scratch.minima[at].first_chunk().expect("16 are more than 8");
            dot(minima, x.sums_32.as_flattened())
        };
        let ([d, dmin], factor) = ([scratch.factors[at][0], scratch.factors[at][1]], x.factors[0]);
        if B::OFFSET != 0 {
            let dots = dots.wrapping_sub(minima.wrapping_mul(B::OFFSET));
            return V::lane_mul_add(d * factor, dots as f32, sum);
        }
        let sum = V::lane_mul_add(d * factor, dots as f32, sum);
        V::lane_mul_add(-(dmin * factor), minima as f32, sum)
    }

    #[inline(always)]
    fn many<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let Meeting { w, row_bytes, cols, x, x_rows, scratch, .. } = self.meeting;
        for block in 0..cols / SUPER_BLOCK {
            for (row, bytes) in w.chunks_exact(row_bytes).enumerate() {
                Self::take_apart::<V, L>(scratch, &bytes[block * B::BYTES..][..B::BYTES], row);
            }
            scratch.transpose::<V, L>();
            for row in 0..TILE {
                for (column, scale) in scratch.scale_columns.iter_mut().zip(scratch.scales[row]) {
                    column[row] = scale;
                }
                let pairs = scratch.minima[row].as_chunks::<2>().0;
                for (column, pair) in scratch.minimum_columns.iter_mut().zip(pairs) {
                    column[row] = *pair;
                }
            }
            let mut t = 0;
            while t + TOGETHER <= x_rows {
                Self::meet::<V, L, TOGETHER>(scratch, block, &x, t, out);
                t += TOGETHER;
            }
            while t + 4 <= x_rows {
                Self::meet::<V, L, 4>(scratch, block, &x, t, out);
                t += 4;
            }
            while t < x_rows {
                Self::meet::<V, L, 1>(scratch, block, &x, t, out);
                t += 1;
            }
        }
    }

    /// What [`Self::link`] does, for all rows and `T` activation rows from `t` on.
    #[inline(always)]
    fn meet<V: Vector<L>, const L: usize, const T: usize>(
        scratch: &Scratch,
        block: usize,
        x: &RoundedRows<'_>,
        t: usize,
        out: &mut [f32],
    ) {
        let x: [&Block; T] = std::array::from_fn(|i| x.block(block, t + i));
        for (part, columns) in scratch.columns.as_chunks::<L>().0.chunks_exact(SUPER_BLOCK / 4).enumerate() {
            let mut sums = [V::Integer::splat(0); T];
            for (group, columns) in columns.chunks_exact(B::GROUP / 4).enumerate() {
                let dots = dots::<V, L, T>([0; T], columns, &x, group * (B::GROUP / 4), B::LARGEST);
                let scales = V::Integer::load(&scratch.scale_columns[group].as_chunks::<L>().0[part]);
                for (sum, dots) in sums.iter_mut().zip(dots) {
                    *sum = sum.add(dots.mul(scales));
                }
            }
            let mut minima = [V::Integer::splat(0); T];
            for pair in 0..SUPER_BLOCK / B::GROUP / 2 {
                let weights = V::Integer::load(&scratch.minimum_columns[pair].as_chunks::<L>().0[part]);
                for (minima, x) in minima.iter_mut().zip(&x) {
                    let sums = if B::GROUP == 16 { x.sums_16[pair] } else { x.sums_32[pair] };
                    *minima = minima.dot2(weights, V::Integer::splat(super::isa::Lane::bits(sums)));
                }
            }
            let d = V::load(&scratch.factor_columns[0].as_chunks::<L>().0[part]);
            let dmin = V::load(&scratch.factor_columns[1].as_chunks::<L>().0[part]);
            for i in 0..T {
                let out = &mut out[(t + i) * TILE..][..TILE].as_chunks_mut::<L>().0[part];
                let sum = if block == 0 { V::splat(0.0) } else { V::load(out) };
                let d = d.mul(V::splat(x[i].factors[0]));
                if B::OFFSET != 0 {
                    let dots = sums[i].add(minima[i].mul(V::Integer::splat(-B::OFFSET)));
                    d.mul_add(V::from_integers(dots), sum).store(out);
                } else {
                    let sum = d.mul_add(V::from_integers(sums[i]), sum);
                    let dmin = dmin.mul(V::splat(-x[i].factors[0]));
                    dmin.mul_add(V::from_integers(minima[i]), sum).store(out);
                }
            }
        }
    }
}

struct Small<'a, B> {
    meeting: Meeting<'a>,
    block: PhantomData<B>,
}

impl<B: SmallBlock> Kernel for Small<'_, B> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        if self.meeting.x_rows <= FEW {
            self.few::<V, L>(out);
        } else {
            self.many::<V, L>(out);
        }
    }
}

impl<B: SmallBlock> Small<'_, B> {
    /// Takes up to 8 blocks apart to place `at`.
    #[inline(always)]
    fn take_apart<V: Vector<L>, const L: usize>(scratch: &mut Scratch, bytes: &[u8], at: usize) {
        let places = scratch.quants[at].as_chunks_mut().0.iter_mut().zip(&mut scratch.factors[at]);
        for (bytes, (quants, factor)) in bytes.chunks_exact(B::BYTES).zip(places) {
            (*quants, *factor) = B::integers(bytes);
        }
        if let Some(values) = B::VALUES {
            look_up::<V, L>(&values, &mut scratch.quants[at]);
        }
    }

    #[inline(always)]
    fn few<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let Meeting { w, row_bytes, x, x_rows, scratch, .. } = self.meeting;
        let run_bytes = SMALL_BLOCKS * B::BYTES;
        for (row, bytes) in w.chunks_exact(row_bytes).enumerate() {
            for (run, bytes) in bytes.chunks(TILE * run_bytes).enumerate() {
                for (at, bytes) in bytes.chunks(run_bytes).enumerate() {
                    Self::take_apart::<V, L>(scratch, bytes, at);
                }
                for t in 0..x_rows {
                    let out = &mut out[t * TILE + row];
                    let mut sum = if run == 0 { 0.0 } else { *out };
                    for (at, bytes) in bytes.chunks(run_bytes).enumerate() {
                        let x = x.block(run * TILE + at, t);
                        sum = Self::links::<V, L>(scratch, at, bytes.len() / B::BYTES, x, sum);
                    }
                    *out = sum;
                }
            }
        }
    }

    /// `sum` and the products of the `blocks` blocks at `at` with `x`.
    #[inline(always)]
    fn links<V: Vector<L>, const L: usize>(
        scratch: &Scratch,
        at: usize,
        blocks: usize,
        x: &Block,
        sum: f32,
    ) -> f32 {
        let quants = scratch.quants[at].as_chunks::<4>().0.as_chunks::<L>().0;
        let mut lanes = [0; SUPER_BLOCK / 4];
        let parts = lanes.as_chunks_mut::<L>().0.iter_mut().zip(quants).zip(x.quants.as_chunks::<L>().0);
        for ((lanes, quants), x) in parts {
            let (quants, x) = (V::Integer::load(quants), V::Integer::load(x));
            let dots = if B::LARGEST > 127 {
                V::Integer::splat(0).dot4::<true>(quants, x)
            } else {
                V::Integer::splat(0).dot4::<false>(quants, x)
            };
            dots.store(lanes);
        }
        let mut sum = sum;
        let x_sums = x.sums_32.as_flattened();
        for (block, lanes) in lanes.as_chunks::<8>().0[..blocks].iter().enumerate() {
            let dots = lanes.iter().sum::<i32>() - B::OFFSET * i32::from(x_sums[block]);
            sum = V::lane_mul_add(scratch.factors[at][block] * x.factors[block], dots as f32, sum);
        }
        sum
    }

    #[inline(always)]
    fn many<V: Vector<L>, const L: usize>(self, out: &mut [f32]) {
        let Meeting { w, row_bytes, cols, x, x_rows, scratch, .. } = self.meeting;
        let run_bytes = SMALL_BLOCKS * B::BYTES;
        for run in 0..cols.div_ceil(SUPER_BLOCK) {
            let bytes = run * run_bytes..row_bytes.min((run + 1) * run_bytes);
            let blocks = bytes.len() / B::BYTES;
            for (row, row_bytes) in w.chunks_exact(row_bytes).enumerate() {
                Self::take_apart::<V, L>(scratch, &row_bytes[bytes.clone()], row);
            }
            scratch.transpose::<V, L>();
            let mut t = 0;
            while t + TOGETHER <= x_rows {
                Self::meet::<V, L, TOGETHER>(scratch, [run, blocks], &x, t, out);
                t += TOGETHER;
            }
            while t + 4 <= x_rows {
                Self::meet::<V, L, 4>(scratch, [run, blocks], &x, t, out);
                t += 4;
            }
            while t < x_rows {
                Self::meet::<V, L, 1>(scratch, [run, blocks], &x, t, out);
                t += 1;
            }
        }
    }

    /// What [`Self::links`] does, for all rows and `T` activation rows from `t` on.
    #[inline(always)]
    fn meet<V: Vector<L>, const L: usize, const T: usize>(
        scratch: &Scratch,
        [run, blocks]: [usize; 2],
        x: &RoundedRows<'_>,
        t: usize,
        out: &mut [f32],
    ) {
        let x: [&Block; T] = std::array::from_fn(|i| x.block(run, t + i));
        for (part, columns) in scratch.columns.as_chunks::<L>().0.chunks_exact(SUPER_BLOCK / 4).enumerate() {
            let mut sums = [V::splat(0.0); T];
            if run > 0 {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(&out[(t + i) * TILE..][..TILE].as_chunks::<L>().0[part]);
                }
            }
            for (block, columns) in columns.chunks_exact(SMALL_BLOCK / 4).take(blocks).enumerate() {
                let start: [i32; T] =
                    std::array::from_fn(|i| -B::OFFSET * i32::from(x[i].sums_32[block / 2][block % 2]));
                let dots = dots::<V, L, T>(start, columns, &x, block * (SMALL_BLOCK / 4), B::LARGEST);
                let factors = V::load(&scratch.factor_columns[block].as_chunks::<L>().0[part]);
                for i in 0..T {
                    let factors = factors.mul(V::splat(x[i].factors[block]));
                    sums[i] = factors.mul_add(V::from_integers(dots[i]), sums[i]);
                }
            }
            for (i, sum) in sums.iter().enumerate() {
                sum.store(&mut out[(t + i) * TILE..][..TILE].as_chunks_mut::<L>().0[part]);
            }
        }
    }
}

/// `start` and the products of some columns, four by four, of as many rows as there are lanes with each of `x`, whose columns
/// begin at `first`.
#[inline(always)]
fn dots<V: Vector<L>, const L: usize, const T: usize>(
    start: [i32; T],
    columns: &[[[u8; 4]; L]],
    x: &[&Block; T],
    first: usize,
    largest: u8,
) -> [V::Integer; T] {
    let mut dots = [V::Integer::splat(0); T];
    for (dots, start) in dots.iter_mut().zip(start) {
        *dots = V::Integer::splat(start);
    }
    for (i, column) in columns.iter().enumerate() {
        let quants = V::Integer::load(column);
        for (dots, x) in dots.iter_mut().zip(x) {
            let x = V::Integer::splat(super::isa::Lane::bits(x.quants[first + i]));
            *dots = if largest > 127 { dots.dot4::<true>(quants, x) } else { dots.dot4::<false>(quants, x) };
        }
    }
    dots
}

/// `values[q]` for each quant; those that no block has filled are some block's of before.
#[inline(always)]
fn look_up<V: Vector<L>, const L: usize>(values: &[u8; 16], quants: &mut [u8; SUPER_BLOCK]) {
    for quants in quants.as_chunks_mut::<4>().0.as_chunks_mut::<L>().0 {
        let mut lanes = [0; L];
        V::Integer::load(quants).look_up(values).store(&mut lanes);
        *quants = lanes.map(i32::to_ne_bytes);
    }
}

#[inline(always)]
fn dot<const N: usize>(a: &[i16; N], b: &[i16]) -> i32 {
    let b: &[i16; N] = b.try_into().expect("as many of both");
    a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum()
}

const _: () = assert!(TILE.is_multiple_of(MAX_LANES));
