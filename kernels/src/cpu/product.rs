//! Products of quantised matrices with a batch of rows.
//!
//! A task owns [`TILE`] rows of the weights. It decodes [`STEP`] columns of them at a time and meets every activation row
//! with them, so each weight is decoded once for up to [`BATCH`] rows.

use super::dots::{Accumulate, Finish, zeroed_lanes};
use super::isa::Proven;
use super::rows::{Order, Rows};
use super::weight::Weight;
use super::workers::{Scratch, Workers, grown};

/// Weight rows of a task.
const TILE: usize = 16;
/// Columns decoded at a time: a multiple of every block and vector, and 32 KB of f32 for a tile.
const STEP: usize = 512;
/// Activation rows whose sums are kept while the columns pass: 256 KB of lanes for a tile.
const BATCH: usize = 256;

/// Items that meet one expert's matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// Index in the stack.
    pub expert: usize,
    /// First item.
    pub start: usize,
    /// Items.
    pub len: usize,
}

/// `out[output(i)] += factor(i) * (w[expert(i)] x[input(i)])` for every item i, starting from zeros.
pub(super) struct Product<'a> {
    /// `[experts, rows, cols]`
    pub w: &'a Weight,
    /// Activation rows of `cols` values, one for each item.
    pub x: Rows<'a>,
    /// Which items meet which expert.
    pub jobs: &'a [Job],
    /// Rows of the result.
    pub out_rows: usize,
    /// An item's row of the result.
    pub outputs: Order<'a>,
    /// An item's factor; 1 without them.
    pub factors: Option<&'a [f32]>,
}

impl Product<'_> {
    /// Values of the result.
    pub(super) fn len(&self) -> usize {
        self.out_rows * self.w.rows
    }

    /// The result in tiles: `[w.rows / TILE, out_rows, TILE]`, the last tile narrower. With one row that is the row.
    pub(super) fn tiles(&self, isa: Proven, workers: &Workers, tiles: &mut [f32]) {
        assert_eq!(self.x.stride(), self.w.cols, "activations have other rows than {:?} takes", self.w);
        let items: usize = self.jobs.iter().map(|job| job.len).sum();
        let work = items.max(self.jobs.len()) * self.w.rows * self.w.cols;
        workers.chunks(&mut tiles[..self.len()], self.out_rows * TILE, work, |tile, out, scratch| {
            self.tile(isa, tile * TILE, out, scratch);
        });
    }

    /// The result row-major, by way of `tiles`.
    pub(super) fn rows(&self, isa: Proven, workers: &Workers, tiles: &mut Vec<f32>, out: &mut [f32]) {
        if self.out_rows == 1 {
            return self.tiles(isa, workers, out);
        }
        let tiles = grown(tiles, self.len());
        self.tiles(isa, workers, tiles);
        untile(workers, tiles, [self.out_rows, self.w.rows], out);
    }

    fn tile(&self, isa: Proven, first_row: usize, out: &mut [f32], scratch: &mut Scratch) {
        let rows = out.len() / self.out_rows;
        out.fill(0.0);
        for job in self.jobs {
            let row = job.expert * self.w.rows + first_row;
            for start in (job.start..job.start + job.len).step_by(BATCH) {
                let len = BATCH.min(job.start + job.len - start);
                let sums = self.sums(isa, row, rows, start, len, scratch);
                for (item, sums) in (start..).zip(sums.chunks_exact(rows)) {
                    let factor = self.factors.map_or(1.0, |factors| factors[item]);
                    for (out, sum) in out[self.outputs.at(item) * rows..][..rows].iter_mut().zip(sums) {
                        *out += factor * sum;
                    }
                }
            }
        }
    }

    /// `[len, rows]`: the dot products of the items from `start` on with the weight rows from `row` on.
    fn sums<'s>(
        &self,
        isa: Proven,
        row: usize,
        rows: usize,
        start: usize,
        len: usize,
        scratch: &'s mut Scratch,
    ) -> &'s [f32] {
        let cols = self.w.cols;
        let decoded = grown(&mut scratch.weights, TILE * STEP);
        let lanes = zeroed_lanes(&mut scratch.lanes, len * rows);
        for column in (0..cols).step_by(STEP) {
            let columns = column..cols.min(column + STEP);
            for (r, decoded) in decoded.chunks_exact_mut(STEP).take(rows).enumerate() {
                self.w.decode(isa, row + r, columns.clone(), &mut decoded[..columns.len()]);
            }
            let products = Accumulate {
                w: Rows::new(decoded, STEP),
                w_rows: rows,
                x: self.x.from(start, column),
                x_rows: len,
                len: columns.len(),
            };
            isa.run(products, lanes);
        }
        let sums = grown(&mut scratch.sums, len * rows);
        isa.run(Finish { lanes }, sums);
        sums
    }
}

/// `[rows, width]` from tiles of it.
pub(super) fn untile(workers: &Workers, tiles: &[f32], [rows, width]: [usize; 2], out: &mut [f32]) {
    workers.chunks(&mut out[..rows * width], width, rows * width, |row, out, _| {
        for (tile, out) in out.chunks_mut(TILE).enumerate() {
            // Tiles before this one are whole, so this one begins where they end.
            let start = tile * TILE * rows + row * out.len();
            out.copy_from_slice(&tiles[start..][..out.len()]);
        }
    });
}
