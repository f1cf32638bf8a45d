//! Products and experts of up to sixteen tokens over matrices in tiles.
#![expect(
    unsafe_code,
    reason = "launching a kernel is unsafe: nobody can check what it does with its pointers"
)]

use super::compile::{Tiling, Unit, architecture};
use super::driver::{Cost, Device, Kernel, Launch, Memory, Module, Start, Stream};
use super::one::{One, Waiting};
use super::{Buffer, CudaError, Weight};
use crate::shape::MoeShape;
use crate::{ExpertWeights, MlpWeights};
use formats::Dtype;
use formats::config::{GroupScore, ScoringFunc};
use formats::layout::mma16::{COLUMNS, ROWS, tile_bytes};
use std::ffi::c_void;
use std::ptr::from_mut;
use std::sync::Arc;

/// The most tokens.
pub(super) const MOST: usize = 16;
/// Tiles of a warp that are under way at a time.
const DEPTH: usize = 2;
/// Warps that share a strip of a product.
const TEAM: usize = 8;
/// Warps that share a strip of the experts' way down.
const DOWN_TEAM: usize = 9;
/// Parts that a token's norm is stored in.
const NORM_PARTS: usize = 8;
/// As in decode_experts.cuh: experts of a layer.
const MAX_EXPERTS: usize = 512;
/// As in decode_experts.cuh: experts of a token.
const MAX_CHOSEN: usize = 16;
/// As in decode_experts.cuh: tiles of a strip on the way down.
const MAX_ITEMS: usize = 256;
/// As in decode_experts.cuh: groups of experts.
const MAX_GROUPS: usize = 32;
/// As in decode_experts.cuh: what the router decides for a step.
const CHOICE_BYTES: usize = 2 * 4 * MOST * MAX_CHOSEN + 16 + 2 * MAX_EXPERTS;

/// The kernels for one token, up to 8 and up to 16.
#[derive(Debug)]
struct Sizes([Kernel; 3]);

impl Sizes {
    fn of(&self, tokens: usize) -> &Kernel {
        match tokens {
            1 => &self.0[0],
            2..=8 => &self.0[1],
            _ => &self.0[2],
        }
    }
}

/// Kernels, and the memory that they share.
#[derive(Debug)]
pub(super) struct Decode {
    add_norm_tokens: Kernel,
    prepared: Sizes,
    plain: Sizes,
    router: Kernel,
    up: Sizes,
    down: Sizes,
    teams: usize,
    up_warps: usize,
    down_teams: usize,
    /// Those for one token.
    pub one: One,
    /// Counts a router's blocks; zero between steps.
    ticket: Memory,
    choice: Memory,
}

/// Activations as the kernels want them, beside the f32 ones.
#[derive(Debug)]
pub(super) struct Prepared {
    /// `[T, width]` as f16
    pub tokens: Buffer,
    /// `[T, width / 8]` as f16
    pub sums: Buffer,
    /// `[T]`
    pub inverse: Buffer,
    /// The buffer that they are of, with rows and width.
    pub of: Option<(u64, usize, usize)>,
}

/// A matrix of a product and where the result goes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Segment {
    pub w: u64,
    pub out: u64,
    pub dtype: i32,
    pub strips: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Segments {
    pub of: [Segment; 3],
    pub count: i32,
    pub total: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Router {
    logits: u64,
    bias: u64,
    experts: i32,
    chosen: i32,
    groups: i32,
    topk_group: i32,
    sigmoid: i32,
    group_sum_two: i32,
    renormalise: i32,
    floor: f32,
    scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Experts {
    /// gate, up, down; then the shared ones
    w: [u64; 6],
    dtypes: [i32; 6],
    first: i32,
    local: i32,
    width: i32,
    shared_width: i32,
    chosen: i32,
}

/// What a layer of experts works on.
pub(super) struct Moe<'a> {
    pub shape: &'a MoeShape,
    pub gate: &'a Weight,
    pub bias: Option<&'a Weight>,
    pub experts: &'a ExpertWeights<Weight>,
    pub shared: Option<&'a MlpWeights<Weight>>,
}

impl Moe<'_> {
    fn matrices(&self) -> ([&Weight; 3], Option<[&Weight; 3]>) {
        let ExpertWeights { gate, up, down } = self.experts;
        ([gate, up, down], self.shared.map(|s| [&s.gate_proj, &s.up_proj, &s.down_proj]))
    }

    /// The layer as the kernels take it; `None` where they do not.
    pub(super) fn layer(&self) -> Option<Experts> {
        let shape = self.shape;
        let (hidden, width, e, k) =
            (shape.hidden, shape.intermediate, shape.n_routed_experts, shape.num_experts_per_tok);
        let shared_width = self.shared.map_or(0, |shared| shared.width);
        let (matrices, shared) = self.matrices();
        let all = || matrices.into_iter().chain(shared.into_iter().flatten());
        let fits = all().all(has)
            && width > 0
            && (hidden.is_multiple_of(COLUMNS) && width.is_multiple_of(COLUMNS))
            && (shared_width.is_multiple_of(COLUMNS) && (shared.is_none() || shared_width > 0))
            && (e <= MAX_EXPERTS && k <= MAX_CHOSEN && shape.router.n_group <= MAX_GROUPS)
            && k * width + shared_width < 1 << 16;
        if !fits {
            return None;
        }
        let mut layer = Experts {
            w: [0; 6],
            dtypes: [12; 6],
            first: int(shape.local_experts.start),
            local: int(shape.local_experts.len()),
            width: int(width),
            shared_width: int(shared_width),
            chosen: int(k),
        };
        for ((address, kind), w) in layer.w.iter_mut().zip(&mut layer.dtypes).zip(all()) {
            (*address, *kind) = (w.address, dtype(w));
        }
        Some(layer)
    }

    /// Bytes of the largest tile on the way up and on the way down.
    pub(super) fn slots(&self) -> (usize, usize) {
        let ([gate, up, down], shared) = self.matrices();
        let (mut ups, mut downs) = (tile(gate).max(tile(up)), tile(down));
        if let Some([gate, up, down]) = shared {
            ups = ups.max(tile(gate)).max(tile(up));
            downs = downs.max(tile(down));
        }
        (ups, downs)
    }

    /// How the router decides, of logits at an address.
    pub(super) fn router(&self, logits: u64) -> Router {
        let shape = self.shape;
        Router {
            logits,
            bias: self.bias.map_or(0, Weight::vector),
            experts: int(shape.n_routed_experts),
            chosen: int(shape.num_experts_per_tok),
            groups: int(shape.router.n_group),
            topk_group: int(shape.router.topk_group),
            sigmoid: i32::from(shape.router.scoring_func == ScoringFunc::Sigmoid),
            group_sum_two: i32::from(shape.router.group_score == GroupScore::TopTwoSum),
            renormalise: i32::from(shape.router.norm_topk_floor.is_some()),
            floor: shape.router.norm_topk_floor.unwrap_or(0.0),
            scale: shape.router.routed_scaling_factor,
        }
    }

    /// What the ways up and down read when so many experts are visited.
    pub(super) fn costs(&self, visited: usize) -> [Cost; 2] {
        let ([gate, up, down], shared) = self.matrices();
        let bytes = |w: &Weight, other: Option<&Weight>| {
            w.cost(w.rows * visited).bytes + other.map_or(0, |w| w.cost(w.rows).bytes)
        };
        let [shared_gate, shared_up, shared_down] = shared.map_or([None; 3], |w| w.map(Some));
        let cost = |bytes, w: &Weight| Cost { bytes, weight: Some((w.form.dtype, w.rows, w.cols)) };
        [cost(bytes(gate, shared_gate) + bytes(up, shared_up), gate), cost(bytes(down, shared_down), down)]
    }
}

pub(super) fn int(n: usize) -> i32 {
    i32::try_from(n).expect("a model's sizes are below 2^31")
}

fn wide(n: usize) -> u32 {
    u32::try_from(n).expect("a launch's sizes are small")
}

/// Whether the kernels have this matrix' type and order.
pub(super) fn has(w: &Weight) -> bool {
    use Dtype::{Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
    w.form.tiling == Tiling::Tiles && matches!(w.form.dtype, Q4_0 | Q5_0 | Q8_0 | Q4_K | Q5_K | Q6_K)
}

pub(super) fn dtype(w: &Weight) -> i32 {
    int(w.form.dtype.id() as usize)
}

pub(super) fn tile(w: &Weight) -> usize {
    tile_bytes(w.form.dtype).expect("matrices in tiles have such a type")
}

/// Shared memory of so many tokens.
fn token_bytes(tokens: usize, width: usize) -> usize {
    tokens * (width + 32 + width / 8 + 32) * 2
}

impl Decode {
    /// `None` for GPUs without the instructions that these kernels are made of.
    pub(super) fn new(device: &Arc<Device>, stream: &Stream) -> Result<Option<Self>, CudaError> {
        if device.capability() < (9, 0) {
            return Ok(None);
        }
        let architecture = architecture(device.capability());
        let module = Module::of(device, &Unit::decode(&architecture))?;
        let all = |names: [&'static str; 3]| {
            let [one, eight, sixteen] = names;
            let kernel = |name| module.kernel_with_all_shared(name);
            Ok::<_, CudaError>(Sizes([kernel(one)?, kernel(eight)?, kernel(sixteen)?]))
        };
        let small = architecture.starts_with("sm_12");
        let ticket = Memory::new(device, 4, "a router's count")?;
        stream.zero(&ticket);
        Ok(Some(Self {
            add_norm_tokens: module.kernel("add_norm_tokens", 0)?,
            prepared: all(["product_prepared_1", "product_prepared_8", "product_prepared_16"])?,
            plain: all(["product_plain_1", "product_plain_8", "product_plain_16"])?,
            router: module.kernel("router", 0)?,
            up: all(["moe_up_1", "moe_up_8", "moe_up_16"])?,
            down: all(["moe_down_1", "moe_down_8", "moe_down_16"])?,
            teams: if small { 1 } else { 2 },
            up_warps: if small { 8 } else { 16 },
            down_teams: if small { 1 } else { 2 },
            one: One::new(device, stream, &module)?,
            ticket,
            choice: Memory::new(device, CHOICE_BYTES, "a router's choice")?,
        }))
    }

    /// The factor of a norm's f16 tokens: a power of two that lets none overflow. `None` where the norm is not one.
    pub(super) fn norm_scale(weight: &Weight) -> Option<f32> {
        let bound = (weight.cols as f32).sqrt() * weight.largest;
        let width = weight.cols;
        let fits =
            (1e-30..1e30).contains(&bound) && width.is_multiple_of(32) && width <= 512 * 8 * NORM_PARTS;
        fits.then(|| (32_768.0 / bound).log2().floor().exp2())
    }

    /// The norm of `rows` rows and their sums, as `norm` has it for the first of them, in plain form and in `prepared`.
    pub(super) fn add_norm(&self, stream: &Stream, norm: &Waiting, rows: usize, prepared: &Prepared) {
        let width = norm.width;
        prepared.tokens.holds(rows * width / 2);
        prepared.sums.holds(rows * width / 16);
        prepared.inverse.holds(rows);
        // SAFETY: whoever made `norm` checked that its buffers have `rows` rows of `width`, and that `sum` is not `x`, which blocks read
        // while others write.
        unsafe {
            launch(
                stream,
                &self.add_norm_tokens,
                [rows, NORM_PARTS],
                512,
                0,
                Cost::default(),
                &mut [
                    from_mut(&mut { norm.x }).cast(),
                    from_mut(&mut { norm.y }).cast(),
                    from_mut(&mut { norm.weight }).cast(),
                    from_mut(&mut { norm.scale }).cast(),
                    from_mut(&mut { norm.eps }).cast(),
                    from_mut(&mut { int(width) }).cast(),
                    from_mut(&mut { norm.sum }).cast(),
                    from_mut(&mut { norm.out }).cast(),
                    from_mut(&mut { prepared.tokens.address() }).cast(),
                    from_mut(&mut { prepared.sums.address() }).cast(),
                    from_mut(&mut { prepared.inverse.address() }).cast(),
                ],
            )
        };
    }

    /// `out[i]` = `w[i]` `x` for up to three matrices of the same width, `x` with a norm where there is one. `false`, and
    /// nothing done, where the kernels have no room for that.
    #[expect(clippy::too_many_arguments, reason = "the operation's own and what a norm has left for it")]
    pub(super) fn products(
        &self,
        stream: &Stream,
        w: &[&Weight],
        x: &Buffer,
        rows: usize,
        out: &[&Buffer],
        norm: Option<(&Weight, f32)>,
        prepared: &Prepared,
    ) -> bool {
        let width = w[0].cols;
        let fits = |w: &&Weight| has(w) && w.cols == width && w.experts == 1 && w.rows > 0;
        if rows == 0 || rows > MOST || w.len() > 3 || width == 0 || !w.iter().all(fits) {
            return false;
        }
        x.holds(rows * width);
        for (w, out) in w.iter().zip(out) {
            out.holds(rows * w.rows);
        }
        let slot = w.iter().map(|w| tile(w)).max().unwrap_or(0);
        let ring = self.teams * TEAM * DEPTH * slot;
        let strips: usize = w.iter().map(|w| w.rows / ROWS).sum();
        let grid = [strips.min(stream.device().multiprocessors()), 1];
        let threads = self.teams * TEAM * 32;
        let bytes = w.iter().map(|w| w.cost(w.rows).bytes).sum();
        let cost = Cost { bytes, weight: Some((w[0].form.dtype, strips * ROWS, width)) };
        let segments = |first: usize| {
            let mut all = Segments { count: int(w.len()), total: int(strips), ..Segments::default() };
            for (to, (w, out)) in all.of.iter_mut().zip(w.iter().zip(out)) {
                let out = out.address() + (first * w.rows * 4) as u64;
                *to = Segment { w: w.address, out, dtype: dtype(w), strips: int(w.rows / ROWS) };
            }
            all
        };
        if norm.is_none() && prepared.of == Some((x.address(), rows, width)) {
            let kernel = self.prepared.of(rows);
            // Of more tokens the rings need the room.
            let staged = rows <= 2 && ring + token_bytes(rows, width) <= kernel.room();
            let shared = ring + if staged { token_bytes(rows, width) } else { 0 };
            if shared > kernel.room() {
                return false;
            }
            // SAFETY: matrices of whole tiles, tokens of the same width, results of their rows: checked above.
            unsafe {
                launch(
                    stream,
                    kernel,
                    grid,
                    threads,
                    shared,
                    cost,
                    &mut [
                        from_mut(&mut segments(0)).cast(),
                        from_mut(&mut { int(width) }).cast(),
                        from_mut(&mut { int(rows) }).cast(),
                        from_mut(&mut { int(slot) }).cast(),
                        from_mut(&mut { i32::from(staged) }).cast(),
                        from_mut(&mut { prepared.tokens.address() }).cast(),
                        from_mut(&mut { prepared.sums.address() }).cast(),
                        from_mut(&mut { prepared.inverse.address() }).cast(),
                    ],
                )
            };
            return true;
        }
        let room = |tokens: usize| ring + token_bytes(tokens, width) <= self.plain.of(tokens).room();
        let Some(each) = [rows, 8, 4, 2, 1].into_iter().find(|&tokens| tokens <= rows && room(tokens)) else {
            return false;
        };
        for first in (0..rows).step_by(each) {
            let tokens = each.min(rows - first);
            let shared = ring + token_bytes(tokens, width);
            // SAFETY: as above, for a part of the tokens.
            unsafe {
                launch(
                    stream,
                    self.plain.of(tokens),
                    grid,
                    threads,
                    shared,
                    cost,
                    &mut [
                        from_mut(&mut segments(first)).cast(),
                        from_mut(&mut { int(width) }).cast(),
                        from_mut(&mut { int(tokens) }).cast(),
                        from_mut(&mut { int(slot) }).cast(),
                        from_mut(&mut { x.address() + (first * width * 4) as u64 }).cast(),
                        from_mut(&mut { norm.map_or(0, |(weight, _)| weight.vector()) }).cast(),
                        from_mut(&mut { norm.map_or(0.0, |(_, eps)| eps) }).cast(),
                    ],
                )
            };
        }
        true
    }

    /// A layer of experts on the prepared `x`. `false`, and nothing done, where the kernels have no room for that.
    #[expect(clippy::too_many_arguments, reason = "the layer, its input, working memory and output")]
    pub(super) fn moe(
        &self,
        stream: &Stream,
        moe: &Moe<'_>,
        x: &Buffer,
        rows: usize,
        [logits, activated]: [&Buffer; 2],
        prepared: &Prepared,
        out: &Buffer,
    ) -> bool {
        let Moe { shape, gate, shared, .. } = *moe;
        let (hidden, width, e, k) =
            (shape.hidden, shape.intermediate, shape.n_routed_experts, shape.num_experts_per_tok);
        let shared_width = shared.map_or(0, |shared| shared.width);
        let Some(layer) = moe.layer() else { return false };
        let fits = (gate.form.dtype, gate.form.tiling) == (Dtype::F32, Tiling::Rows)
            && prepared.of == Some((x.address(), rows, hidden))
            && (1..=MOST).contains(&rows);
        let row_len = k * width + shared_width;
        if !fits {
            return false;
        }
        let (ups, downs) = moe.slots();
        let up_ring = self.up_warps * DEPTH * ups;
        let down_ring = self.down_teams * DOWN_TEAM * DEPTH * downs;
        let local = shape.local_experts.len();
        let room = |tokens: usize| {
            let items = shared_width / COLUMNS + local.min(tokens * k) * (width / COLUMNS);
            items <= MAX_ITEMS
                && up_ring <= self.up.of(tokens).room()
                && down_ring + token_bytes(tokens, row_len) <= self.down.of(tokens).room()
        };
        let Some(each) = [rows, 8, 4, 2, 1].into_iter().find(|&tokens| tokens <= rows && room(tokens)) else {
            return false;
        };
        logits.holds(rows * e);
        activated.holds(rows * row_len);
        out.holds(rows * hidden);
        let sms = stream.device().multiprocessors();
        for first in (0..rows).step_by(each) {
            let tokens = each.min(rows - first);
            let visited = local.min(tokens * k);
            let router = moe.router(logits.address() + (first * e * 4) as u64);
            let [up_cost, down_cost] = moe.costs(visited);
            let h = prepared.tokens.address() + (first * hidden * 2) as u64;
            let sums = prepared.sums.address() + (first * hidden / 8 * 2) as u64;
            let inverse = prepared.inverse.address() + (first * 4) as u64;
            let activated = activated.address() + (first * row_len * 4) as u64;
            // SAFETY: a block for each of the gate's `e` rows of `hidden`, logits for every token: checked above.
            unsafe {
                launch(
                    stream,
                    &self.router,
                    [e, 1],
                    256,
                    0,
                    gate.cost(e),
                    &mut [
                        from_mut(&mut { router }).cast(),
                        from_mut(&mut { gate.address }).cast(),
                        from_mut(&mut { x.address() + (first * hidden * 4) as u64 }).cast(),
                        from_mut(&mut { int(hidden) }).cast(),
                        from_mut(&mut { int(tokens) }).cast(),
                        from_mut(&mut { int(shape.local_experts.start) }).cast(),
                        from_mut(&mut { int(local) }).cast(),
                        from_mut(&mut { self.ticket.address() }).cast(),
                        from_mut(&mut { self.choice.address() }).cast(),
                    ],
                )
            };

            let kernel = self.up.of(tokens);
            let staged = tokens <= 4 && up_ring + token_bytes(tokens, hidden) <= kernel.room();
            let units = shared_width / ROWS + visited * (width / ROWS);
            let shared_bytes = up_ring + if staged { token_bytes(tokens, hidden) } else { 0 };
            let grid = [units.clamp(1, sms), 1];
            // SAFETY: tiles of local experts and shared ones, `activated` with a place for every visit: checked above.
            unsafe {
                launch(
                    stream,
                    kernel,
                    grid,
                    self.up_warps * 32,
                    shared_bytes,
                    up_cost,
                    &mut [
                        from_mut(&mut { self.choice.address() }).cast(),
                        from_mut(&mut { layer }).cast(),
                        from_mut(&mut { int(hidden) }).cast(),
                        from_mut(&mut { int(tokens) }).cast(),
                        from_mut(&mut { int(ups) }).cast(),
                        from_mut(&mut { i32::from(staged) }).cast(),
                        from_mut(&mut { h }).cast(),
                        from_mut(&mut { sums }).cast(),
                        from_mut(&mut { inverse }).cast(),
                        from_mut(&mut { activated }).cast(),
                    ],
                )
            };

            let shared_bytes = down_ring + token_bytes(tokens, row_len);
            let grid = [(hidden / ROWS).min(sms), 1];
            let threads = self.down_teams * DOWN_TEAM * 32;
            // SAFETY: as above; a result of `hidden` for every token.
            unsafe {
                launch(
                    stream,
                    self.down.of(tokens),
                    grid,
                    threads,
                    shared_bytes,
                    down_cost,
                    &mut [
                        from_mut(&mut { self.choice.address() }).cast(),
                        from_mut(&mut { layer }).cast(),
                        from_mut(&mut { int(tokens) }).cast(),
                        from_mut(&mut { int(downs) }).cast(),
                        from_mut(&mut { activated }).cast(),
                        from_mut(&mut { out.address() + (first * hidden * 4) as u64 }).cast(),
                        from_mut(&mut { int(hidden) }).cast(),
                    ],
                )
            };
        }
        true
    }
}

/// Arguments are made inside the call: what they point to lives that long and no longer.
///
/// # Safety
/// As [`Stream::launch`].
pub(super) unsafe fn launch(
    stream: &Stream,
    kernel: &Kernel,
    [x, y]: [usize; 2],
    threads: usize,
    shared_bytes: usize,
    cost: Cost,
    arguments: &mut [*mut c_void],
) {
    let (grid, threads, shared_bytes) = ([wide(x), wide(y), 1], wide(threads), wide(shared_bytes));
    let shape = Launch { grid, threads, shared_bytes, cost, start: Start::Early };
    // SAFETY: the caller's promises; all of these kernels wait before they read what others wrote.
    unsafe { stream.launch(kernel, shape, arguments) };
}
