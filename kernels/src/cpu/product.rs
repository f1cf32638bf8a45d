//! Products of quantised matrices with a batch of rows.
//!
//! A task owns [`TILE`] rows of the weights. It decodes [`STEP`] columns of them at a time and meets every activation row
//! with them, so each weight is decoded once for up to [`BATCH`] rows.

use super::dots::{Dots, Finish, Sums};
use super::isa::{MAX_LANES, Proven};
use super::rows::{Order, Rows};
use super::weight::Weight;
use super::workers::{Scratch, Workers, grown};
use std::ops::Range;

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
                let items = start..(start + BATCH).min(job.start + job.len);
                let sums = self.sums(isa, &Piece { rows: row..row + rows, items: items.clone() }, scratch);
                for (item, sums) in items.zip(sums.chunks_exact(rows)) {
                    let factor = self.factors.map_or(1.0, |factors| factors[item]);
                    for (out, sum) in out[self.outputs.at(item) * rows..][..rows].iter_mut().zip(sums) {
                        *out += factor * sum;
                    }
                }
            }
        }
    }

    /// `[items, rows]`: the dot products of the piece.
    fn sums<'s>(&self, isa: Proven, piece: &Piece, scratch: &'s mut Scratch) -> &'s [f32] {
        let cols = self.w.cols;
        let decoded = grown(&mut scratch.weights, TILE * STEP);
        let sums = grown(&mut scratch.sums, piece.pairs());
        if cols <= STEP {
            self.step(isa, piece, 0..cols, Sums::Whole, decoded, sums);
            return sums;
        }
        let lanes = grown(&mut scratch.lanes, piece.pairs() * MAX_LANES);
        lanes.fill(0.0);
        for column in (0..cols).step_by(STEP) {
            let columns = column..cols.min(column + STEP);
            self.step(isa, piece, columns, Sums::Lanes, decoded, lanes);
        }
        isa.run(Finish { lanes }, sums);
        sums
    }

    /// Some columns of the piece: `decoded` is where they are decoded to, `out` as `sums` says.
    fn step(
        &self,
        isa: Proven,
        piece: &Piece,
        columns: Range<usize>,
        sums: Sums,
        decoded: &mut [f32],
        out: &mut [f32],
    ) {
        for (row, decoded) in piece.rows.clone().zip(decoded.chunks_exact_mut(STEP)) {
            self.w.decode(isa, row, columns.clone(), &mut decoded[..columns.len()]);
        }
        let dots = Dots {
            w: Rows::new(decoded, STEP),
            w_rows: piece.rows.len(),
            x: self.x.from(piece.items.start, columns.start),
            x_rows: piece.items.len(),
            len: columns.len(),
            sums,
        };
        isa.run(dots, out);
    }
}

/// What is multiplied together before the weights leave the cache.
struct Piece {
    /// Of the weights, counted through the stack: at most [`TILE`].
    rows: Range<usize>,
    /// At most [`BATCH`].
    items: Range<usize>,
}

impl Piece {
    fn pairs(&self) -> usize {
        self.rows.len() * self.items.len()
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
