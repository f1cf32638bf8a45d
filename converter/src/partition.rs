//! How one axis is cut over ranks: whole units, contiguous, as even as they go.

use std::ops::Range;

/// An axis of `units` units of `unit` indices each, cut into one contiguous range for each rank.
///
/// Ranges differ by at most one unit, the longer ones first; with fewer units than ranks the last ones are empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    units: u64,
    unit: u64,
    ranks: usize,
}

impl Partition {
    /// Cuts an axis of `len` indices into units of `unit`; `None` when they do not tile it.
    ///
    /// # Panics
    /// Without ranks, or with a unit of 0: both are checked where they come from.
    pub fn new(len: u64, unit: u64, ranks: usize) -> Option<Self> {
        assert!(ranks > 0 && unit > 0, "a partition of something into at least one part");
        len.is_multiple_of(unit).then_some(Self { units: len / unit, unit, ranks })
    }

    /// The same cut of an axis with `per` indices where this one has one: rows of heads, for instance.
    #[must_use]
    pub fn scaled(self, per: u64) -> Self {
        Self { unit: self.unit * per, ..self }
    }

    /// Length of the axis.
    pub fn len(&self) -> u64 {
        self.units * self.unit
    }

    /// True for an axis of length 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Indices of one unit.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The indices that rank `rank` has.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn range(&self, rank: usize) -> Range<u64> {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        self.start(rank as u64)..self.start(rank as u64 + 1)
    }

    fn start(&self, rank: u64) -> u64 {
        let (share, extra) = (self.units / self.ranks as u64, self.units % self.ranks as u64);
        (rank * share + rank.min(extra)) * self.unit
    }
}

/// The smallest run of heads whose `per_head` columns each make whole blocks of `block_len`.
pub(crate) fn head_unit(per_head: u64, block_len: u64) -> u64 {
    block_len / gcd(per_head, block_len)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lens(len: u64, unit: u64, ranks: usize) -> Vec<u64> {
        let cut = Partition::new(len, unit, ranks).unwrap();
        (0..ranks).map(|r| cut.range(r).end - cut.range(r).start).collect()
    }

    #[test]
    fn remainders_go_to_the_first_ranks() {
        assert_eq!(lens(20, 1, 8), [3, 3, 3, 3, 2, 2, 2, 2]);
        assert_eq!(lens(2048, 256, 3), [768, 768, 512]);
        assert_eq!(lens(2, 1, 4), [1, 1, 0, 0]);
        assert_eq!(lens(0, 1, 2), [0, 0]);
    }

    #[test]
    fn ranges_tile_the_axis_in_whole_units_that_differ_by_at_most_one() {
        for ranks in (1..=40).chain([64, 127, 128, 255, 256, 1000, 1023, 1024]) {
            for unit in [1, 2, 3, 32, 256] {
                for units in [0, 1, 2, 5, 7, 8, 20, 64, 127, 256, 1025, 154_880] {
                    let cut = Partition::new(units * unit, unit, ranks).unwrap();
                    let mut end = 0;
                    let (mut least, mut most) = (u64::MAX, 0);
                    for rank in 0..ranks {
                        let range = cut.range(rank);
                        assert_eq!(range.start, end);
                        assert!((range.end - range.start).is_multiple_of(unit));
                        least = least.min((range.end - range.start) / unit);
                        most = most.max((range.end - range.start) / unit);
                        end = range.end;
                    }
                    assert_eq!(end, units * unit);
                    assert!(most - least <= 1, "{units} units over {ranks}");
                }
            }
        }
    }

    #[test]
    fn a_length_that_is_no_whole_number_of_units_is_refused() {
        assert_eq!(Partition::new(100, 32, 2), None);
    }

    #[test]
    fn scaling_keeps_the_cut() {
        let heads = Partition::new(20, 2, 8).unwrap();
        let rows = heads.scaled(256);
        for rank in 0..8 {
            assert_eq!(rows.range(rank), heads.range(rank).start * 256..heads.range(rank).end * 256);
        }
    }

    #[test]
    fn a_unit_of_heads_is_whole_blocks_of_columns() {
        assert_eq!(head_unit(256, 256), 1);
        assert_eq!(head_unit(128, 256), 2);
        assert_eq!(head_unit(96, 256), 8);
        assert_eq!(head_unit(128, 32), 1);
        assert_eq!(head_unit(80, 32), 2);
        assert_eq!(head_unit(77, 1), 1);
    }
}
