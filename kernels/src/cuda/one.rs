//! The operations of a single token over matrices in tiles: a norm goes into the product or the router that follows it, and every kernel
//! has asked for its weights before the one ahead of it ends.
#![expect(
    unsafe_code,
    reason = "launching a kernel is unsafe: nobody can check what it does with its pointers"
)]

use super::compile::Tiling;
use super::decode::{Moe, Router, Segment, Segments, dtype, has, int, launch, tile};
use super::driver::{Cost, Device, Kernel, Memory, Module, Stream};
use super::{Buffer, CudaError, Weight};
use formats::Dtype;
use formats::layout::mma16::{COLUMNS, ROWS};
use std::ptr::from_mut;
use std::sync::Arc;

/// The most warps that share a strip: one for each tile.
const MOST_TILES: usize = 32;
/// Warps of a block of products with short rows: several teams share those of up to 8 tiles, as decode_one.cuh has it.
const WARPS: usize = 16;
/// As in decode_one.cuh: tiles of a copy.
const PIECE: usize = 4;
/// As in decode_one.cuh: bytes of a Strip.
const STRIP_BYTES: usize = 48;
/// As in decode_one.cuh: bytes of a Choosing.
const CHOOSING_BYTES: usize = 7184;
/// As in decode_one.cuh: rows of a router's block, and its threads.
const ROUTER: (usize, usize) = (2, 384);
/// As in decode_experts.cuh: experts of a token.
const MAX_CHOSEN: usize = 16;

/// Kernels, and the memory that they share.
#[derive(Debug)]
pub(super) struct One {
    product: Kernel,
    router: Kernel,
    up: Kernel,
    down: Kernel,
    /// What a router decided: `[MAX_CHOSEN]` of id and weight. Then a count: blocks on the way up that have finished.
    choice: Memory,
}

/// A norm of one token that has not been computed: the operation that takes its result may do that on the way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    /// What is normalised: this, plus `y` where it is not 0. `[width]`
    pub x: u64,
    pub y: u64,
    /// Where the sum goes.
    pub sum: u64,
    /// Where the norm goes.
    pub out: u64,
    /// The norm's weight.
    pub weight: u64,
    pub width: usize,
    pub eps: f32,
    /// What f16 tokens are multiplied by.
    pub scale: f32,
    /// Whether the sum has been stored, by an operation that did not need `out` itself.
    pub used: bool,
}

/// As in decode_one.cuh: what a product multiplies.
#[repr(C)]
#[derive(Clone, Copy)]
struct Input {
    x: u64,
    y: u64,
    norm: u64,
    sum: u64,
    eps: f32,
}

/// As in decode_one.cuh: matrix i of a product has the blocks `first[i]` to `first[i + 1]`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Spread {
    first: [i32; 4],
}

/// Blocks for each of up to three matrices of so many strips and bytes of a strip's tile, at most one for each strip: such that the largest
/// share of the bytes is small. `None` for more matrices than blocks.
fn spread(matrices: &[[usize; 2]], most: usize) -> Option<[usize; 3]> {
    if matrices.len() > most {
        return None;
    }
    let mut blocks = [0; 3];
    blocks[..matrices.len()].fill(1);
    for _ in matrices.len()..most {
        // Shares are fractions: compared without dividing.
        let share = |i: usize, other: usize| matrices[i][0] * matrices[i][1] * blocks[other];
        let open = (0..matrices.len()).filter(|&i| blocks[i] < matrices[i][0]);
        let Some(i) = open.max_by(|&a, &b| share(a, b).cmp(&share(b, a))) else { break };
        blocks[i] += 1;
    }
    Some(blocks)
}

/// A product's vector.
#[derive(Clone, Copy)]
pub(super) enum Vector<'a> {
    /// As it is, or with a norm of its own.
    Plain(&'a Buffer, Option<(&'a Weight, f32)>),
    /// With a norm that waits.
    Waiting(&'a Waiting),
}

impl Waiting {
    fn input(&self) -> Input {
        Input { x: self.x, y: self.y, norm: self.weight, sum: self.sum, eps: self.eps }
    }
}

/// Shared memory of a block with so many strips and tiles.
fn block_bytes(strips: usize, n_tiles: usize, tiles: usize, slot: usize) -> usize {
    let barriers = (strips * n_tiles.div_ceil(PIECE) * 8).next_multiple_of(16);
    barriers + strips * (STRIP_BYTES + n_tiles * ROWS * 4) + tiles * slot
}

impl One {
    pub(super) fn new(
        device: &Arc<Device>,
        stream: &Stream,
        module: &Arc<Module>,
    ) -> Result<Self, CudaError> {
        let choice = Memory::new(device, MAX_CHOSEN * 8 + 8, "a router's choice")?;
        stream.zero(&choice);
        Ok(Self {
            product: module.kernel_with_all_shared("product_one")?,
            router: module.kernel("router_one", 0)?,
            up: module.kernel_with_all_shared("up_one")?,
            down: module.kernel_with_all_shared("down_one")?,
            choice,
        })
    }

    /// `out[i]` = `w[i]` `x` for up to three matrices of the same width. `false`, and nothing done, where a block has no room for its
    /// tiles.
    pub(super) fn products(&self, stream: &Stream, w: &[&Weight], x: Vector<'_>, out: &[&Buffer]) -> bool {
        let width = w[0].cols;
        let fits = |w: &&Weight| has(w) && w.cols == width && w.experts == 1 && w.rows > 0;
        let n_tiles = width / COLUMNS;
        if w.len() > 3 || !(1..=MOST_TILES).contains(&n_tiles) || !w.iter().all(fits) {
            return false;
        }
        let mut matrices = [[0; 2]; 3];
        for (matrix, w) in matrices.iter_mut().zip(w) {
            *matrix = [w.rows / ROWS, tile(w)];
        }
        let matrices = &matrices[..w.len()];
        let Some(blocks) = spread(matrices, stream.device().multiprocessors()) else { return false };
        let shares = || matrices.iter().zip(blocks).map(|(&[strips, tile], n)| [strips.div_ceil(n), tile]);
        let most = shares().map(|[strips, _]| strips).max().unwrap_or(0);
        let tiles = shares().map(|[strips, tile]| strips * n_tiles * tile).max().unwrap_or(0);
        let shared = block_bytes(most, n_tiles, 1, tiles);
        if shared > self.product.room() || most > 32 {
            return false;
        }
        // Of a large product no two blocks go to one multiprocessor, where another would then have none.
        let shared = if most > 1 { shared.max(self.product.room() / 2 + 1) } else { shared };
        let input = match x {
            Vector::Waiting(norm) => {
                assert_eq!(norm.width, width, "a norm of another width");
                norm.input()
            }
            Vector::Plain(x, norm) => {
                x.holds(width);
                let (weight, eps) = norm.map_or((0, 0.0), |(weight, eps)| (weight.vector(), eps));
                Input { x: x.address(), y: 0, norm: weight, sum: 0, eps }
            }
        };
        let rows: usize = w.iter().map(|w| w.rows).sum();
        let mut segments = Segments { count: int(w.len()), total: int(rows / ROWS), ..Segments::default() };
        let mut spread = Spread::default();
        for (i, (w, out)) in w.iter().zip(out).enumerate() {
            out.holds(w.rows);
            segments.of[i] =
                Segment { w: w.address, out: out.address(), dtype: dtype(w), strips: int(w.rows / ROWS) };
            spread.first[i + 1] = spread.first[i] + int(blocks[i]);
        }
        let teams = (WARPS / n_tiles).clamp(1, most);
        let bytes = w.iter().map(|w| w.cost(w.rows).bytes).sum();
        let cost = Cost { bytes, weight: Some((w[0].form.dtype, rows, width)) };
        // SAFETY: matrices of whole tiles, a vector of the same width, results of their rows: checked above.
        unsafe {
            launch(
                stream,
                &self.product,
                [blocks.iter().sum(), 1],
                teams * n_tiles * 32,
                shared,
                cost,
                &mut [
                    from_mut(&mut segments).cast(),
                    from_mut(&mut spread).cast(),
                    from_mut(&mut { int(width) }).cast(),
                    from_mut(&mut { int(most) }).cast(),
                    from_mut(&mut { input }).cast(),
                ],
            )
        };
        true
    }

    /// A layer of experts on the norm that waits. `parts` has room for 4 times the token's activations. `false`, and nothing done, where the
    /// kernels have no room for that.
    pub(super) fn moe(
        &self,
        stream: &Stream,
        moe: &Moe<'_>,
        norm: &Waiting,
        [logits, parts]: [&Buffer; 2],
        tokens: &Buffer,
        out: &Buffer,
    ) -> bool {
        let Moe { shape, gate, shared, .. } = *moe;
        let (hidden, width, e, k) =
            (shape.hidden, shape.intermediate, shape.n_routed_experts, shape.num_experts_per_tok);
        let Some(layer) = moe.layer() else { return false };
        let shared_width = shared.map_or(0, |shared| shared.width);
        let (n_tiles, items) = (hidden / COLUMNS, (shared_width + k * width) / COLUMNS);
        let fits = (gate.form.dtype, gate.form.tiling) == (Dtype::F32, Tiling::Rows)
            && norm.width == hidden
            && (1..=MOST_TILES).contains(&n_tiles)
            && (1..=MOST_TILES).contains(&items);
        if !fits {
            return false;
        }
        let sms = stream.device().multiprocessors();
        let visited = shape.local_experts.len().min(k);
        let row_len = k * width + shared_width;
        let (up_slot, down_slot) = moe.slots();

        let units = 2 * (shared_width + visited * width) / ROWS;
        let tiles = (units * n_tiles).div_ceil(sms).max(n_tiles);
        let up_most = tiles / n_tiles + 2;
        let up_shared = block_bytes(up_most, n_tiles, tiles, up_slot)
            .max(block_bytes(up_most, n_tiles, 0, 0) + CHOOSING_BYTES);

        let strips = hidden / ROWS;
        let down_most = strips.div_ceil(sms.min(strips));
        let teams = (WARPS / items).clamp(1, down_most);
        let down_shared =
            (items * teams * 8).next_multiple_of(16) + down_most * items * (ROWS * 4 + down_slot);
        if up_shared > self.up.room() || down_shared > self.down.room() || up_most > 32 {
            return false;
        }
        logits.holds(e);
        parts.holds(4 * row_len);
        tokens.holds(hidden / 2);
        out.holds(hidden);
        let router: Router = moe.router(logits.address());
        let finished = self.choice.address() + (MAX_CHOSEN * 8) as u64;
        // SAFETY: two rows of the gate a block, logits for all; an f16 token and the sum have `hidden` values.
        unsafe {
            launch(
                stream,
                &self.router,
                [e.div_ceil(ROUTER.0), 1],
                ROUTER.1,
                0,
                gate.cost(e),
                &mut [
                    from_mut(&mut { gate.address }).cast(),
                    from_mut(&mut { norm.input() }).cast(),
                    from_mut(&mut { norm.scale }).cast(),
                    from_mut(&mut { int(e) }).cast(),
                    from_mut(&mut { int(hidden) }).cast(),
                    from_mut(&mut { logits.address() }).cast(),
                    from_mut(&mut { tokens.address() }).cast(),
                    from_mut(&mut { self.choice.address() }).cast(),
                    from_mut(&mut { finished }).cast(),
                ],
            )
        };
        let [up_cost, down_cost] = moe.costs(visited);
        // SAFETY: tiles of local experts and shared ones, `parts` with two places for every visit: checked above.
        unsafe {
            launch(
                stream,
                &self.up,
                [sms, 1],
                n_tiles * 32,
                up_shared,
                up_cost,
                &mut [
                    from_mut(&mut { router }).cast(),
                    from_mut(&mut { layer }).cast(),
                    from_mut(&mut { int(hidden) }).cast(),
                    from_mut(&mut { int(up_most) }).cast(),
                    from_mut(&mut { int(up_slot) }).cast(),
                    from_mut(&mut { tokens.address() }).cast(),
                    from_mut(&mut { 1.0 / norm.scale }).cast(),
                    from_mut(&mut { parts.address() }).cast(),
                    from_mut(&mut { self.choice.address() }).cast(),
                    from_mut(&mut { finished }).cast(),
                ],
            )
        };
        // SAFETY: as above; a result of `hidden`.
        unsafe {
            launch(
                stream,
                &self.down,
                [sms.min(strips), 1],
                items * teams * 32,
                down_shared,
                down_cost,
                &mut [
                    from_mut(&mut { self.choice.address() }).cast(),
                    from_mut(&mut { finished }).cast(),
                    from_mut(&mut { int(sms) }).cast(),
                    from_mut(&mut { layer }).cast(),
                    from_mut(&mut { int(items) }).cast(),
                    from_mut(&mut { int(down_slot) }).cast(),
                    from_mut(&mut { parts.address() }).cast(),
                    from_mut(&mut { out.address() }).cast(),
                    from_mut(&mut { int(hidden) }).cast(),
                ],
            )
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn the_largest_share_is_small() {
        // GLM-5's q_a in Q4_K and kv_a in Q8_0: of 36 strips each has a block, the others have two at most.
        assert_eq!(spread(&[[128, 2304], [36, 4352]], 132), Some([96, 36, 0]));
        assert_eq!(spread(&[[384, 2304]], 132), Some([132, 0, 0]));
    }

    #[test]
    fn no_block_is_without_a_strip() {
        assert_eq!(spread(&[[1, 2304], [3, 4352], [2, 3360]], 132), Some([1, 3, 2]));
    }

    #[test]
    fn every_matrix_needs_a_block() {
        assert_eq!(spread(&[[9, 2304], [9, 2304], [9, 2304]], 3), Some([1, 1, 1]));
        assert_eq!(spread(&[[9, 2304], [9, 2304], [9, 2304]], 2), None);
    }
}
