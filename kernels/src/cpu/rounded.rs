//! Activations as integers, rounded as [`crate::rounding`] says.

use super::isa::{Kernel, Proven, Vector};
use super::rows::Order;
use super::weight::Rounding;
use super::workers::Workers;
use crate::rounding;
use formats::quant::{SMALL_BLOCK, SUPER_BLOCK};

/// 256 columns of one row, or the last ones and zeros. Column c is `factors[c / length of a block] * quants[c]`.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub quants: [[i8; 4]; SUPER_BLOCK / 4],
    /// Sums of 16 quants each, two by two.
    pub sums_16: [[i16; 2]; SUPER_BLOCK / 32],
    /// Sums of 32 quants each, two by two.
    pub sums_32: [[i16; 2]; SUPER_BLOCK / 64],
    /// One, or one for each 32 columns.
    pub factors: [f32; SUPER_BLOCK / SMALL_BLOCK],
}

impl Default for Block {
    fn default() -> Self {
        Self {
            quants: [[0; 4]; SUPER_BLOCK / 4],
            sums_16: Default::default(),
            sums_32: Default::default(),
            factors: Default::default(),
        }
    }
}

/// Rows in integers: `[blocks of 256 columns, rows]`, so that what meets a block of weights lies together.
#[derive(Debug, Default)]
pub(super) struct Activations {
    blocks: Vec<Block>,
    rows: usize,
}

impl Activations {
    /// Takes `rows` rows, each run of columns in blocks of its own.
    pub(super) fn round(
        &mut self,
        isa: Proven,
        workers: &Workers,
        x: &[f32],
        rows: usize,
        rounding: Rounding<'_>,
    ) {
        /// Blocks of a task.
        const RUN: usize = 16;
        let Rounding { block_len, columns } = rounding;
        let cols = *columns.last().expect("where columns end");
        let blocks_of = |run: &[usize]| (run[1] - run[0]).div_ceil(SUPER_BLOCK);
        self.rows = rows;
        self.blocks.resize(columns.windows(2).map(blocks_of).sum::<usize>() * rows, Block::default());
        // Some ten operations a value.
        workers.chunks(&mut self.blocks, RUN, rows * cols * 10, |run, blocks, _| {
            for (i, block) in blocks.iter_mut().enumerate() {
                let (mut number, row) = ((run * RUN + i) / rows, (run * RUN + i) % rows);
                let mut runs = columns.windows(2);
                let run = loop {
                    let run = runs.next().expect("as many blocks as in all runs");
                    match number.checked_sub(blocks_of(run)) {
                        Some(rest) => number = rest,
                        None => break run,
                    }
                };
                let column = run[0] + number * SUPER_BLOCK;
                let x = &x[row * cols..][column..run[1].min(column + SUPER_BLOCK)];
                isa.run(Round { x, block_len, block }, &mut []);
            }
        });
    }

    /// All of them.
    pub(super) fn all(&self) -> RoundedRows<'_> {
        RoundedRows { blocks: &self.blocks, rows: self.rows, order: Order::Same, first: 0 }
    }
}

/// Rows of [`Activations`], in any order.
#[derive(Clone, Copy)]
pub(super) struct RoundedRows<'a> {
    blocks: &'a [Block],
    rows: usize,
    order: Order<'a>,
    first: usize,
}

impl<'a> RoundedRows<'a> {
    /// The i-th is row `numbers[i]` of these.
    pub(super) fn listed(self, numbers: &'a [usize]) -> Self {
        Self { order: Order::Listed(numbers), ..self }
    }

    /// Without the first `blocks` blocks of each row.
    pub(super) fn after_blocks(self, blocks: usize) -> Self {
        Self { blocks: &self.blocks[blocks * self.rows..], ..self }
    }

    /// Without the first `rows`.
    pub(super) fn from(self, rows: usize) -> Self {
        Self { first: self.first + rows, ..self }
    }

    /// Block `block` of the i-th row.
    #[inline(always)]
    pub(super) fn block(&self, block: usize, i: usize) -> &'a Block {
        &self.blocks[block * self.rows + self.order.at(self.first + i)]
    }
}

/// Fills a block from at most 256 values.
struct Round<'a> {
    x: &'a [f32],
    block_len: usize,
    block: &'a mut Block,
}

impl Kernel for Round<'_> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self, _: &mut [f32]) {
        let mut padded = [0.0; SUPER_BLOCK];
        padded[..self.x.len()].copy_from_slice(self.x);
        let quants = self.block.quants.as_flattened_mut();
        for (part, (x, quants)) in
            padded.chunks_exact(self.block_len).zip(quants.chunks_exact_mut(self.block_len)).enumerate()
        {
            let mut largest = [0; 16];
            for x in x.as_chunks::<16>().0 {
                for (largest, x) in largest.iter_mut().zip(x) {
                    *largest = (*largest).max(x.abs().to_bits());
                }
            }
            let factor = rounding::factor(largest.into_iter().fold(0, u32::max));
            self.block.factors[part] = factor;
            let scale = if factor > 0.0 { 1.0 / factor } else { 0.0 };
            for (quants, x) in quants.as_chunks_mut::<16>().0.iter_mut().zip(x.as_chunks::<16>().0) {
                for (quant, x) in quants.iter_mut().zip(x) {
                    *quant = rounded(x * scale) as i8;
                }
            }
        }
        let sums_16 = self.block.sums_16.as_flattened_mut();
        for (sum, quants) in sums_16.iter_mut().zip(quants.as_chunks::<16>().0) {
            *sum = quants.iter().map(|&q| i16::from(q)).sum();
        }
        for (sum, halves) in self.block.sums_32.as_flattened_mut().iter_mut().zip(self.block.sums_16) {
            *sum = halves[0] + halves[1];
        }
    }
}

/// The nearest integer, ties to even, of a value from -127 to 127; any number of anything else.
#[inline(always)]
fn rounded(x: f32) -> i32 {
    /// 1.5 * 2^23: adding it leaves the rounded integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    ((x + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;

    /// Values of every size, among them some that round at ties, and blocks that cannot be scaled.
    fn values(cols: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 2_654_435_761) % 4093) as f32 / 16.0 - 127.0;
        let mut values: Vec<f32> =
            (0..cols).map(|i| value(i) * [1.0, 1e-42, 0.0, 3e38 / 130.0][i / 32 % 4]).collect();
        values[0] = 127.0;
        values
    }

    #[test]
    fn blocks_are_what_rounding_says() {
        for isa in Isa::ALL.into_iter().filter_map(Proven::new) {
            for (block_len, cols) in [(256, 256), (256, 768), (32, 32), (32, 544)] {
                let (rows, x) = (3, values(3 * cols));
                let mut activations = Activations::default();
                activations.round(
                    isa,
                    &Workers::new(1).unwrap(),
                    &x,
                    rows,
                    Rounding { block_len, columns: &[0, cols] },
                );
                let mut expected = x.clone();
                expected.chunks_mut(block_len).for_each(rounding::round);
                for (i, expected) in expected.iter().enumerate() {
                    let (row, column) = (i / cols, i % cols);
                    let block = activations.all().block(column / 256, row);
                    let quant = block.quants.as_flattened()[column % 256];
                    let found = f32::from(quant) * block.factors[column % 256 / block_len];
                    assert_eq!(found, *expected, "{isa:?}, blocks of {block_len}, value {i}");
                }
                for block in &activations.blocks {
                    let quants = block.quants.as_flattened();
                    let sum = |quants: &[i8]| quants.iter().map(|&q| i16::from(q)).sum::<i16>();
                    assert!(block.sums_16.as_flattened().iter().copied().eq(quants.chunks(16).map(sum)));
                    assert!(block.sums_32.as_flattened().iter().copied().eq(quants.chunks(32).map(sum)));
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none() {
        for isa in Isa::ALL.into_iter().filter_map(Proven::new) {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = values(512);
                x[300] = bad;
                let mut activations = Activations::default();
                activations.round(
                    isa,
                    &Workers::new(1).unwrap(),
                    &x,
                    1,
                    Rounding { block_len: 256, columns: &[0, 512] },
                );
                assert!(!activations.all().block(0, 0).factors[0].is_nan());
                assert!(activations.all().block(1, 0).factors[0].is_nan());
            }
        }
    }
}
