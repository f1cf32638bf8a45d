//! Products of quantised matrices with a batch of rows.
//!
//! A task owns [`TILE`] rows of the weights. Most types meet activations in integers (`integers.rs`). Of the others it decodes
//! [`STEP`] columns at a time and meets every activation row with them, so each weight is decoded once for up to [`BATCH`] rows.

use super::dots::{Dots, Finish, Sums};
use super::integers::Meeting;
use super::isa::{MAX_LANES, Proven};
use super::rounded::{Activations, RoundedRows};
use super::rows::{Order, Rows};
use super::weight::{Segment, Weight};
use super::workers::{Scratch, Workers, grown};
use std::ops::Range;

/// Weight rows of a task.
pub(super) const TILE: usize = 16;
/// Columns decoded at a time: a multiple of every block and vector, and 32 KB of f32 for a tile.
const STEP: usize = 512;
/// Activation rows whose sums are kept while the columns pass: 256 KB of lanes for a tile.
pub(super) const BATCH: usize = 256;

/// Weights of a task where tiles are smaller.
const TASK_BYTES: usize = 1 << 16;
/// A product has at least as many tasks, if it has as many tiles.
const TASKS: usize = 32;

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

/// What sums are added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Onto {
    /// Zeros.
    Zeros,
    /// What the result has already.
    Sums,
}

/// `out[output(i)] += factor(i) * (w[expert(i)] x[input(i)])` for every item i.
pub(super) struct Product<'a> {
    /// `[experts, rows, cols]`
    pub w: &'a Weight,
    /// Activation rows of `cols` values, one for each item.
    pub x: Input<'a>,
    /// Which items meet which expert.
    pub jobs: &'a [Job],
    /// Rows of the result.
    pub out_rows: usize,
    /// An item's row of the result.
    pub outputs: Order<'a>,
    /// An item's factor; 1 without them.
    pub factors: Option<&'a [f32]>,
    /// What the result starts from.
    pub onto: Onto,
}

/// Activations as a weight takes them.
#[derive(Clone, Copy)]
pub(super) enum Input<'a> {
    /// As they are.
    Exact(Rows<'a>),
    /// As integers.
    Rounded(RoundedRows<'a>),
}

impl<'a> Input<'a> {
    /// `rows` rows of `x` for `w`; `activations` are where they are rounded to.
    pub(super) fn new(
        isa: Proven,
        workers: &Workers,
        w: &Weight,
        x: &'a [f32],
        rows: usize,
        activations: &'a mut Activations,
    ) -> Self {
        match w.rounding() {
            None => Self::Exact(Rows::new(x, w.cols)),
            Some(rounding) => {
                activations.round(isa, workers, x, rows, rounding);
                Self::Rounded(activations.all())
            }
        }
    }

    /// The same when `activations` hold these rows already, rounded as `w` takes them.
    pub(super) fn again(w: &Weight, x: &'a [f32], activations: &'a Activations) -> Self {
        match w.rounding() {
            None => Self::Exact(Rows::new(x, w.cols)),
            Some(_) => Self::Rounded(activations.all()),
        }
    }

    /// The i-th is row `numbers[i]` of these.
    pub(super) fn listed(self, numbers: &'a [usize]) -> Self {
        match self {
            Self::Exact(rows) => Self::Exact(rows.listed(numbers)),
            Self::Rounded(rows) => Self::Rounded(rows.listed(numbers)),
        }
    }
}

impl Product<'_> {
    /// Values of the result.
    pub(super) fn len(&self) -> usize {
        self.out_rows * self.w.rows
    }

    /// The result in tiles: `[w.rows / TILE, out_rows, TILE]`, the last tile narrower. With one row that is the row.
    pub(super) fn tiles(&self, isa: Proven, workers: &Workers, tiles: &mut [f32]) {
        let items: usize = self.jobs.iter().map(|job| job.len).sum();
        let work = items.max(self.jobs.len()) * self.w.rows * self.w.cols;
        let tile = self.out_rows * TILE;
        let together = self.tiles_of_a_task();
        workers.chunks(&mut tiles[..self.len()], tile * together, work, |task, out, scratch| {
            for (i, out) in out.chunks_mut(tile).enumerate() {
                self.tile(isa, (task * together + i) * TILE, out, scratch);
            }
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

    /// One after the other, so that memory is read in long runs; few enough that all threads end at about the same time.
    fn tiles_of_a_task(&self) -> usize {
        let tiles = self.w.rows.div_ceil(TILE);
        let bytes = TILE * self.w.row_bytes() * self.jobs.len();
        (TASK_BYTES / bytes.max(1)).min(tiles / TASKS).max(1)
    }

    fn tile(&self, isa: Proven, first_row: usize, out: &mut [f32], scratch: &mut Scratch) {
        let rows = out.len() / self.out_rows;
        if self.onto == Onto::Zeros {
            out.fill(0.0);
        }
        for (i, job) in self.jobs.iter().enumerate() {
            let row = job.expert * self.w.rows + first_row;
            let after = match self.jobs.get(i + 1) {
                Some(job) => job.expert * self.w.rows + first_row..(job.expert + 1) * self.w.rows,
                None => {
                    self.jobs[0].expert * self.w.rows + first_row + rows
                        ..(self.jobs[0].expert + 1) * self.w.rows
                }
            };
            let after = after.start..after.end.min(after.start + TILE);
            for start in (job.start..job.start + job.len).step_by(BATCH) {
                let items = start..(start + BATCH).min(job.start + job.len);
                let piece = Piece { rows: row..row + rows, items: items.clone(), after: after.clone() };
                let (sums, width) = match self.x {
                    Input::Exact(x) => (self.sums(isa, x, &piece, scratch), rows),
                    Input::Rounded(x) => (self.integer_sums(isa, x, &piece, scratch), TILE),
                };
                for (item, sums) in items.zip(sums.chunks_exact(width)) {
                    let factor = self.factors.map_or(1.0, |factors| factors[item]);
                    for (out, sum) in out[self.outputs.at(item) * rows..][..rows].iter_mut().zip(sums) {
                        *out += factor * sum;
                    }
                }
            }
        }
    }

    /// `[items, TILE]`: the dot products of the piece, in integers. Those of rows beyond the piece have no meaning.
    fn integer_sums<'s>(
        &self,
        isa: Proven,
        x: RoundedRows<'_>,
        piece: &Piece,
        scratch: &'s mut Scratch,
    ) -> &'s [f32] {
        let Scratch { sums, lanes, blocks, .. } = scratch;
        let len = piece.items.len() * TILE;
        let sums = grown(sums, len);
        let Some(meet) = self.w.meet.filter(|_| self.w.cols > 0) else {
            sums.fill(0.0);
            return sums;
        };
        let x = x.from(piece.items.start);
        let mut next = piece.rows.start;
        while next < piece.rows.end {
            let run = self.w.run(next..piece.rows.end);
            for (i, segment) in self.w.segments(run.clone()).enumerate() {
                let Segment { bytes: w, row_bytes, cols, first_block } = segment;
                let x = x.after_blocks(first_block);
                let x_rows = piece.items.len();
                let after = self.w.segments_after(&piece.after).nth(i);
                let after = after.map_or(&[][..], |segment| segment.bytes);
                let meeting = Meeting { w, next: after, row_bytes, cols, x, x_rows, scratch: blocks };
                if i == 0 && run == piece.rows {
                    meet.run(isa, meeting, sums);
                    continue;
                }
                let part = grown(lanes, len);
                meet.run(isa, meeting, part);
                for (sums, part) in sums.chunks_exact_mut(TILE).zip(part.chunks_exact(TILE)) {
                    let sums = &mut sums[next - piece.rows.start..][..run.len()];
                    match i {
                        0 => sums.copy_from_slice(&part[..run.len()]),
                        _ => sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part),
                    }
                }
            }
            next = run.end;
        }
        if let Some(scale) = self.w.scale(piece.rows.start) {
            sums.iter_mut().for_each(|sum| *sum *= scale);
        }
        sums
    }

    /// `[items, rows]`: the dot products of the piece.
    fn sums<'s>(&self, isa: Proven, x: Rows<'_>, piece: &Piece, scratch: &'s mut Scratch) -> &'s [f32] {
        let cols = self.w.cols;
        let decoded = grown(&mut scratch.weights, TILE * STEP);
        let sums = grown(&mut scratch.sums, piece.pairs());
        if cols <= STEP {
            self.step(isa, x, piece, 0..cols, Sums::Whole, decoded, sums);
            return sums;
        }
        let lanes = grown(&mut scratch.lanes, piece.pairs() * MAX_LANES);
        lanes.fill(0.0);
        for column in (0..cols).step_by(STEP) {
            let columns = column..cols.min(column + STEP);
            self.step(isa, x, piece, columns, Sums::Lanes, decoded, lanes);
        }
        isa.run(Finish { lanes }, sums);
        sums
    }

    /// Some columns of the piece: `decoded` is where they are decoded to, `out` as `sums` says.
    #[expect(clippy::too_many_arguments, reason = "the inner loop of `sums`: what it works with")]
    fn step(
        &self,
        isa: Proven,
        x: Rows<'_>,
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
            x: x.from(piece.items.start, columns.start),
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
    /// Rows that are likely to be next.
    after: Range<usize>,
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
