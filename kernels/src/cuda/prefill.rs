//! Products of many tokens, on tensor cores, and what they need around them.
#![expect(
    unsafe_code,
    reason = "launching a kernel is unsafe: nobody can check what it does with its pointers"
)]

use super::compile::{Form, Unit};
use super::driver::{Cost, Device, Kernel, Launch, Module, Start, Stream};
use super::kernels::{early, grid, int, launch};
use super::{Buffer, CudaError, Slice, Weight};
use crate::shape::MoeShape;
use formats::Dtype;
use std::ptr::from_mut;

/// From this many tokens on products are made on tensor cores.
pub(super) const MANY: usize = 17;

/// As in gemm.cu: tokens and rows of a block, and columns of a tile.
const TILE: usize = 128;
const COLUMNS: usize = 64;
const THREADS: usize = 256;
/// As in gemm.cu: blocks that a multiprocessor works on at the same time.
fn resident(device: &Device) -> usize {
    if device.capability() >= (12, 0) { 1 } else { 2 }
}

/// Activations as f16, `stride` apart, with a factor for each row.
#[derive(Debug)]
pub(super) struct Halves {
    /// `[rows, stride]`, two in each value
    pub values: Buffer,
    /// `[rows]`
    pub scales: Buffer,
}

/// What of a MoE layer's visits the device writes down.
#[derive(Debug)]
pub(super) struct Groups {
    /// `[visits]`, as integers
    pub order: Buffer,
    /// Expert, first visit and visits of each tile; the last value is their number. As integers.
    pub tiles: Buffer,
    /// `[visits, hidden]`
    pub sums: Buffer,
}

impl Groups {
    /// The most tiles of a number of visits.
    pub(super) fn most_tiles(visits: usize, experts: usize) -> usize {
        (visits / TILE + experts).min(visits)
    }

    /// Values of `tiles` for so many visits.
    pub(super) fn tiles_len(visits: usize, experts: usize) -> usize {
        3 * Self::most_tiles(visits, experts) + 1
    }
}

/// From one row of f16 to the next: whole tiles.
pub(super) fn stride(columns: usize) -> usize {
    columns.next_multiple_of(COLUMNS)
}

/// Where a product stands among those of one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// What comes before it makes its input.
    First,
    /// A product of the same input comes before it: both may run at the same time.
    Next,
}

impl Place {
    fn start(self, stream: &Stream) -> Start {
        match self {
            Self::First => Start::InTurn,
            Self::Next => early(stream),
        }
    }
}

/// Products with one type of weights.
#[derive(Debug)]
pub(super) struct Gemm {
    gemm: Kernel,
    gemm_experts: Kernel,
}

impl Gemm {
    pub(super) fn new(stream: &Stream, form: Form) -> Result<Self, CudaError> {
        let device = stream.device();
        let module = Module::of(device, &Unit::gemm(form))?;
        let kernel = |name| module.kernel(name, Unit::dynamic_shared_bytes(name));
        Ok(Self { gemm: kernel("gemm")?, gemm_experts: kernel("gemm_experts")? })
    }

    /// In how many parts a product's columns are best taken, so that every multiprocessor has some of them.
    pub(super) fn parts(stream: &Stream, w: &Weight, tokens: usize) -> usize {
        /// Fewer tiles than this are not worth a part.
        const LEAST: usize = 8;
        let blocks = (w.rows.div_ceil(TILE) * tokens.div_ceil(TILE)).max(1);
        let room = (resident(stream.device()) * stream.device().multiprocessors() / blocks)
            .min(w.cols.div_ceil(COLUMNS) / LEAST);
        let tiles = w.cols.div_ceil(COLUMNS);
        tiles.div_ceil(tiles.div_ceil(room.max(1)).max(1)).max(1)
    }

    /// `out` `[parts, tokens, w.rows]`: what is to be added up to `w` `x`; beside the product before it, where that has the same `x`.
    #[expect(clippy::too_many_arguments, reason = "a product and where it stands")]
    pub(super) fn product(
        &self,
        stream: &Stream,
        w: &Weight,
        x: &Halves,
        tokens: usize,
        parts: usize,
        out: Slice,
        place: Place,
    ) {
        let stride = stride(w.cols);
        x.values.holds(tokens * stride / 2);
        x.scales.holds(tokens);
        assert!(out.len >= parts * tokens * w.rows, "room for {parts} parts of a product");
        let tiles = w.cols.div_ceil(COLUMNS).div_ceil(parts);
        let shared = Unit::dynamic_shared_bytes("gemm");
        // SAFETY: rows below `w.rows`, columns below the stride, tokens below `tokens`: checked above.
        unsafe {
            launch!(stream, self.gemm, [w.rows.div_ceil(TILE), tokens.div_ceil(TILE), parts], THREADS, shared, w.cost(w.rows), place.start(stream);
                w.address, x.values.address(), x.scales.address(), out.address, int(w.rows), int(w.cols),
                int(stride), int(tokens), int(tiles));
        }
    }

    /// `out` `[visits, w.rows]`: every local visit's product with its expert; visit v has row `v / divisor` of `x`.
    #[expect(clippy::too_many_arguments, reason = "a product and how its rows are grouped")]
    pub(super) fn experts(
        &self,
        stream: &Stream,
        w: &Weight,
        x: &Halves,
        groups: &Groups,
        visits: usize,
        divisor: usize,
        out: &Buffer,
        place: Place,
    ) {
        let stride = stride(w.cols);
        x.values.holds(visits.div_ceil(divisor) * stride / 2);
        x.scales.holds(visits.div_ceil(divisor));
        out.holds(visits * w.rows);
        let (tiles, len) = (Groups::most_tiles(visits, w.experts), Groups::tiles_len(visits, w.experts));
        groups.order.holds(visits);
        groups.tiles.holds(len);
        let shared = Unit::dynamic_shared_bytes("gemm_experts");
        // SAFETY: the tiles that `group_visits` made name local experts and visits only; sizes as checked above.
        unsafe {
            launch!(stream, self.gemm_experts, [w.rows.div_ceil(TILE), tiles, 1], THREADS, shared, w.cost(w.rows * w.experts.min(visits)), place.start(stream);
                w.address, x.values.address(), x.scales.address(), out.address(), int(w.rows), int(w.cols),
                int(stride), groups.order.address(), groups.tiles.address(),
                groups.tiles.address() + (len as u64 - 1) * 4, int(divisor));
        }
    }
}

/// Conversions, grouping and sums.
#[derive(Debug)]
pub(super) struct RowKernels {
    to_half: Kernel,
    swiglu_to_half: Kernel,
    group_visits: Kernel,
    sum_visits: Kernel,
    f32_product: Kernel,
}

impl RowKernels {
    pub(super) fn new(stream: &Stream) -> Result<Self, CudaError> {
        let device = stream.device();
        let module = Module::of(device, &Unit::rows())?;
        let kernel = |name| module.kernel(name, Unit::dynamic_shared_bytes(name));
        Ok(Self {
            to_half: kernel("to_half")?,
            swiglu_to_half: kernel("swiglu_to_half")?,
            group_visits: kernel("group_visits")?,
            sum_visits: kernel("sum_visits")?,
            f32_product: kernel("f32_product")?,
        })
    }

    /// `out` `[tokens, w.rows]` = `w` `x` `[tokens, w.cols]`, all f32 and as exact as that is. `false`, and nothing done, for other
    /// weights and for few tokens.
    pub(super) fn f32_product(
        &self,
        stream: &Stream,
        w: &Weight,
        x: &Buffer,
        tokens: usize,
        out: &Buffer,
    ) -> bool {
        /// As in rows.cu: rows and tokens of a block.
        const BLOCK: (usize, usize) = (128, 64);
        let aligned = w.cols.is_multiple_of(4) && w.address.is_multiple_of(16);
        if w.form.dtype != Dtype::F32 || tokens < MANY || !aligned || w.rows == 0 {
            return false;
        }
        x.holds(tokens * w.cols);
        out.holds(tokens * w.rows);
        let shared = Unit::dynamic_shared_bytes("f32_product");
        // SAFETY: rows below `w.rows`, columns below `w.cols`, tokens below `tokens`: checked above.
        unsafe {
            launch!(stream, self.f32_product, [w.rows.div_ceil(BLOCK.0), tokens.div_ceil(BLOCK.1), 1], THREADS, shared, w.cost(w.rows);
                w.address, x.address(), out.address(), int(w.rows), int(w.cols), int(tokens));
        }
        true
    }

    /// `out` = `x` `[rows, width]`
    pub(super) fn to_half(&self, stream: &Stream, x: &Buffer, rows: usize, width: usize, out: &Halves) {
        x.holds(rows * width);
        out.values.holds(rows * stride(width) / 2);
        out.scales.holds(rows);
        // SAFETY: a block for each of `rows` rows; sizes as checked above.
        unsafe {
            launch!(stream, self.to_half, [rows, 1, 1], THREADS, 0;
                x.address(), out.values.address(), out.scales.address(), int(width), int(stride(width)));
        }
    }

    /// `out` = silu(`gate`) * `up`, `[rows, width]`
    pub(super) fn swiglu_to_half(
        &self,
        stream: &Stream,
        [gate, up]: [&Buffer; 2],
        rows: usize,
        width: usize,
        out: &Halves,
    ) {
        gate.holds(rows * width);
        up.holds(rows * width);
        out.values.holds(rows * stride(width) / 2);
        out.scales.holds(rows);
        // SAFETY: a block for each of `rows` rows; sizes as checked above.
        unsafe {
            launch!(stream, self.swiglu_to_half, [rows, 1, 1], THREADS, 0;
                gate.address(), up.address(), out.values.address(), out.scales.address(), int(width),
                int(stride(width)));
        }
    }

    /// Puts the visits of local experts in the order of the experts.
    pub(super) fn group(
        &self,
        stream: &Stream,
        shape: &MoeShape,
        choice: &Buffer,
        rows: usize,
        groups: &Groups,
    ) {
        let (k, experts) = (shape.num_experts_per_tok, shape.local_experts.len());
        let visits = rows * k;
        choice.holds(rows * 2 * k);
        groups.order.holds(visits);
        let len = Groups::tiles_len(visits, experts);
        groups.tiles.holds(len);
        // SAFETY: no more tiles than `most_tiles`, because each is full or the last of an expert with visits; sizes as checked
        // above.
        unsafe {
            launch!(stream, self.group_visits, [1, 1, 1], 1024, experts * 8;
                choice.address(), groups.order.address(), groups.tiles.address(),
                groups.tiles.address() + (len as u64 - 1) * 4, int(rows), int(k), int(shape.local_experts.start),
                int(experts));
        }
    }

    /// `out` `[rows, hidden]`: the weighted sums of the local visits.
    pub(super) fn sum_visits(
        &self,
        stream: &Stream,
        shape: &MoeShape,
        groups: &Groups,
        choice: &Buffer,
        rows: usize,
        out: &Buffer,
    ) {
        let (k, width) = (shape.num_experts_per_tok, shape.hidden);
        groups.sums.holds(rows * k * width);
        choice.holds(rows * 2 * k);
        out.holds(rows * width);
        // SAFETY: `rows` rows of `width`; sizes as checked above.
        unsafe {
            launch!(stream, self.sum_visits, [width.div_ceil(4 * THREADS), rows, 1], THREADS, 0;
                groups.sums.address(), choice.address(), out.address(), int(width), int(k),
                int(shape.local_experts.start), int(shape.local_experts.len()));
        }
    }
}
