//! Weights of the rows after the one that is read are asked for.

use std::ops::Range;

/// So many bytes are on their way: what memory delivers to one core while it answers.
const BYTES: usize = 1 << 10;

/// The same run of columns of all rows that are read one after the other.
pub(super) struct Ahead<'a> {
    /// Rows of whole blocks, and those that are read after them.
    rows: [&'a [u8]; 2],
    row_bytes: usize,
    run: Range<usize>,
    /// Rows between the one that is read and the one that is asked for.
    distance: usize,
}

impl<'a> Ahead<'a> {
    pub(super) fn new(rows: [&'a [u8]; 2], row_bytes: usize, run: Range<usize>) -> Self {
        let distance = BYTES.div_ceil(run.len().max(1));
        Self { rows, row_bytes, run, distance }
    }

    /// What is read so many rows after row `row`; nothing where that is not known.
    #[inline(always)]
    pub(super) fn of(&self, row: usize) -> &'a [u8] {
        let [now, next] = self.rows;
        let start = (row + self.distance) * self.row_bytes;
        let bytes = now.get(start..).filter(|rest| !rest.is_empty());
        let bytes = bytes.or_else(|| next.get(start - now.len()..)).unwrap_or_default();
        bytes.get(self.run.clone()).unwrap_or_default()
    }
}
