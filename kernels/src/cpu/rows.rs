//! Rows in a slice, wherever they lie.

/// Rows at a fixed distance, or some of them by number.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    values: &'a [f32],
    stride: usize,
    order: Order<'a>,
}

/// Which row is the i-th.
#[derive(Clone, Copy)]
pub(super) enum Order<'a> {
    /// Row i.
    Same,
    /// Row `numbers[i]`.
    Listed(&'a [usize]),
}

impl<'a> Rows<'a> {
    /// Row i begins at `values[i * stride]`.
    pub(super) fn new(values: &'a [f32], stride: usize) -> Self {
        Self { values, stride, order: Order::Same }
    }

    /// The i-th is row `numbers[i]` of these.
    pub(super) fn listed(self, numbers: &'a [usize]) -> Self {
        Self { order: Order::Listed(numbers), ..self }
    }

    /// Without the first `rows` rows and the first `columns` values of each.
    pub(super) fn from(self, rows: usize, columns: usize) -> Self {
        match self.order {
            Order::Same => Self { values: &self.values[rows * self.stride + columns..], ..self },
            Order::Listed(numbers) => {
                Self { values: &self.values[columns..], order: Order::Listed(&numbers[rows..]), ..self }
            }
        }
    }

    /// The first `len` values of the i-th row.
    #[inline(always)]
    pub(super) fn row(&self, i: usize, len: usize) -> &'a [f32] {
        &self.values[self.order.at(i) * self.stride..][..len]
    }

    /// The first `len` values of `N` rows from the i-th on.
    #[inline(always)]
    pub(super) fn consecutive<const N: usize>(&self, i: usize, len: usize) -> [&'a [f32]; N] {
        std::array::from_fn(|n| self.row(i + n, len))
    }
}

impl Order<'_> {
    #[inline(always)]
    pub(super) fn at(self, i: usize) -> usize {
        match self {
            Self::Same => i,
            Self::Listed(numbers) => numbers[i],
        }
    }
}
