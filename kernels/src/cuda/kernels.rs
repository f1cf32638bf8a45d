//! One function for each kernel: sizes are held against what it touches, then it is put into the stream.
#![expect(
    unsafe_code,
    reason = "launching a kernel is unsafe: nobody can check what it does with its pointers"
)]

use super::compile::{Form, Unit};
use super::driver::{Cost, Kernel, Launch, Module, Start, Stream};
use super::{Buffer, Cache, CudaError, Slice, StepMemory, Weight};
use crate::shape::{MlaShape, MoeShape};
use formats::config::{GroupScore, RopePairing, ScoringFunc};
use std::ptr::from_mut;

/// Threads of most kernels.
const THREADS: usize = 256;
/// Warps of a product's block: rows of the weights that it has.
const WARPS: usize = 8;
/// Tokens of a block in the products with `kv_b`.
const TOKENS: usize = 4;
/// Blocks of element-wise kernels, whose threads take several elements beyond that.
const MOST_BLOCKS: usize = 2048;

pub(super) fn grid(n: usize) -> u32 {
    u32::try_from(n).expect("a grid's side is bounded by the size of a step")
}

pub(super) fn int(n: usize) -> i32 {
    i32::try_from(n).expect("a model's sizes are below 2^31")
}

/// Puts a kernel into a stream: grid, threads, bytes of shared memory, bytes of weights and cache that it has to read; arguments of
/// exactly its parameter types.
///
/// Expands to an unsafe call; the caller says why it may.
macro_rules! launch {
    ($stream:expr, $kernel:expr, [$x:expr, $y:expr, $z:expr], $threads:expr, $shared:expr; $($argument:expr),+ $(,)?) => {
        launch!($stream, $kernel, [$x, $y, $z], $threads, $shared, Cost::default(); $($argument),+)
    };
    ($stream:expr, $kernel:expr, [$x:expr, $y:expr, $z:expr], $threads:expr, $shared:expr, $cost:expr; $($argument:expr),+ $(,)?) => {
        launch!($stream, $kernel, [$x, $y, $z], $threads, $shared, $cost, Start::InTurn; $($argument),+)
    };
    ($stream:expr, $kernel:expr, [$x:expr, $y:expr, $z:expr], $threads:expr, $shared:expr, $cost:expr, $start:expr; $($argument:expr),+ $(,)?) => {
        $stream.launch(
            &$kernel,
            Launch {
                grid: [grid($x), grid($y), grid($z)],
                threads: grid($threads),
                shared_bytes: grid($shared),
                cost: $cost,
                start: $start,
            },
            &mut [$(from_mut(&mut { $argument }).cast()),+],
        )
    };
}

pub(super) use launch;

/// Products with one type of weights.
#[derive(Debug)]
pub(super) struct Linear {
    /// For 1, 2, 4 and 8 tokens at a time.
    matvec: [Kernel; 4],
    expert_in: Kernel,
    expert_out: Kernel,
    embed: Kernel,
    absorb: Kernel,
    project: Kernel,
}

impl Linear {
    pub(super) fn new(stream: &Stream, form: Form) -> Result<Self, CudaError> {
        let device = stream.device();
        let module = Module::of(device, &Unit::linear(form))?;
        let kernel = |name| module.kernel(name, Unit::dynamic_shared_bytes(name));
        Ok(Self {
            matvec: [kernel("matvec1")?, kernel("matvec2")?, kernel("matvec4")?, kernel("matvec8")?],
            expert_in: kernel("expert_in")?,
            expert_out: kernel("expert_out")?,
            embed: kernel("embed")?,
            absorb: kernel("absorb")?,
            project: kernel("project")?,
        })
    }

    /// `out` `[tokens, w.rows]` = `w` `x` `[tokens, w.cols]`
    pub(super) fn matmul(&self, stream: &Stream, w: &Weight, x: &Buffer, tokens: usize, out: &Buffer) {
        x.holds(tokens * w.cols);
        out.holds(tokens * w.rows);
        let (kernel, each) = match tokens {
            0 | 1 => (&self.matvec[0], 1),
            2 => (&self.matvec[1], 2),
            3 | 4 => (&self.matvec[2], 4),
            _ => (&self.matvec[3], 8),
        };
        // SAFETY: a warp for each of `rows` rows of the weight, columns below `cols`, tokens below `tokens`: checked above.
        unsafe {
            launch!(stream, *kernel, [w.rows.div_ceil(WARPS), tokens.div_ceil(each), 1], THREADS, 0, w.cost(w.rows);
                w.address, x.address(), out.address(), int(w.rows), int(w.cols), int(tokens));
        }
    }

    /// `out` `[rows, K, w.rows]`: every visit's product with its expert, where that is local.
    pub(super) fn expert_in(
        &self,
        stream: &Stream,
        shape: &MoeShape,
        w: &Weight,
        [x, choice, out]: [&Buffer; 3],
        rows: usize,
    ) {
        let k = shape.num_experts_per_tok;
        assert_eq!(w.experts, shape.local_experts.len(), "experts of the stack");
        x.holds(rows * w.cols);
        choice.holds(rows * 2 * k);
        out.holds(rows * k * w.rows);
        // SAFETY: rows of local experts only, which the kernel checks; sizes as checked above.
        unsafe {
            launch!(stream, self.expert_in, [w.rows.div_ceil(WARPS), k, rows], THREADS, 0, w.cost(w.rows * visited(w, k * rows));
                w.address, x.address(), choice.address(), out.address(), int(w.rows), int(w.cols), int(k),
                int(shape.local_experts.start), int(w.experts));
        }
    }

    /// `out` `[rows, w.rows]`: the weighted sum of the local visits' products with `h` `[rows, K, w.cols]`.
    pub(super) fn expert_out(
        &self,
        stream: &Stream,
        shape: &MoeShape,
        w: &Weight,
        [h, choice, out]: [&Buffer; 3],
        rows: usize,
    ) {
        let k = shape.num_experts_per_tok;
        assert_eq!(w.experts, shape.local_experts.len(), "experts of the stack");
        h.holds(rows * k * w.cols);
        choice.holds(rows * 2 * k);
        out.holds(rows * w.rows);
        // SAFETY: as in `expert_in`.
        unsafe {
            launch!(stream, self.expert_out, [w.rows.div_ceil(WARPS), rows, 1], THREADS, 0, w.cost(w.rows * visited(w, k * rows));
                w.address, h.address(), choice.address(), out.address(), int(w.rows), int(w.cols), int(k),
                int(shape.local_experts.start), int(w.experts));
        }
    }

    pub(super) fn embed(
        &self,
        stream: &Stream,
        table: &Weight,
        step: &StepMemory,
        first_row: usize,
        out: &Buffer,
    ) {
        let rows = step.rows().rows;
        out.holds(rows * table.cols);
        let first_row = u32::try_from(first_row).expect("a vocabulary is below 2^32");
        // SAFETY: the kernel reads rows inside the table only, and a token for each of the step's rows.
        unsafe {
            launch!(stream, self.embed, [table.cols.div_ceil(8 * THREADS), rows, 1], THREADS, 0, table.cost(rows);
                table.address, step.tokens(), out.address(), int(table.rows), int(table.cols), first_row);
        }
    }

    /// `out` `[rows, heads, kv_lora + rope]`: queries in the latent space, with their rope part.
    pub(super) fn absorb(
        &self,
        stream: &Stream,
        shape: &MlaShape,
        kv_b: &Weight,
        q: &Buffer,
        rows: usize,
        out: &Buffer,
    ) {
        q.holds(rows * shape.q_width());
        out.holds(rows * shape.heads * shape.cache_width());
        // SAFETY: `kv_b` has the shape's rows and columns, which the caller checked; buffers as checked above.
        unsafe {
            launch!(stream, self.absorb, [shape.heads, rows.div_ceil(TOKENS), 1], THREADS, 0, kv_b.cost(shape.heads * shape.nope);
                kv_b.address, q.address(), out.address(), int(shape.heads), int(shape.nope), int(shape.rope),
                int(shape.v), int(shape.kv_lora), int(rows));
        }
    }

    /// `out` `[rows, heads, v]` from attended latents `[rows, heads, kv_lora]`.
    pub(super) fn project(
        &self,
        stream: &Stream,
        shape: &MlaShape,
        kv_b: &Weight,
        latents: &Buffer,
        rows: usize,
        out: &Buffer,
    ) {
        latents.holds(rows * shape.heads * shape.kv_lora);
        out.holds(rows * shape.out_width());
        // SAFETY: as in `absorb`.
        unsafe {
            launch!(stream, self.project, [shape.v.div_ceil(WARPS), shape.heads, rows.div_ceil(TOKENS)], THREADS, 0, kv_b.cost(shape.heads * shape.v);
                kv_b.address, latents.address(), out.address(), int(shape.heads), int(shape.nope), int(shape.v),
                int(shape.kv_lora), int(rows));
        }
    }
}

/// A step's queries, and the widths that go with them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queries {
    pub address: u64,
    heads: usize,
    nope: usize,
    rope: usize,
    kv_lora: usize,
}

impl Queries {
    pub(super) fn new(shape: &MlaShape, step: &StepMemory, q: &Buffer) -> Self {
        q.holds(step.rows().rows * shape.q_width());
        let MlaShape { heads, nope, rope, kv_lora, .. } = *shape;
        Self { address: q.address(), heads, nope, rope, kv_lora }
    }
}

/// What comes before attention, checked: as in attention_decode.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Store {
    /// `[rows, kv_lora + rope]`; 0 where there is nothing to do.
    pub kv: u64,
    kv_norm: u64,
    inv_freq: u64,
    cache: u64,
    positions: u64,
    slots: u64,
    eps: f32,
    scaling: f32,
    interleaved: i32,
}

impl Store {
    /// Everything is done already.
    pub(super) const DONE: Self = Self {
        kv: 0,
        kv_norm: 0,
        inv_freq: 0,
        cache: 0,
        positions: 0,
        slots: 0,
        eps: 0.0,
        scaling: 0.0,
        interleaved: 0,
    };

    /// Whether it goes there.
    pub(super) fn is_in(&self, cache: &Cache) -> bool {
        self.cache == cache.address()
    }

    /// Of a step's rows.
    pub(super) fn new(
        shape: &MlaShape,
        step: &StepMemory,
        inv_freq: &Buffer,
        kv: &Buffer,
        kv_norm: &Weight,
        cache: &Cache,
    ) -> Self {
        kv.holds(step.rows().rows * shape.cache_width());
        inv_freq.holds(shape.rope / 2);
        assert_eq!(
            (cache.width, kv_norm.cols),
            (shape.cache_width(), shape.kv_lora),
            "widths of the cache and norm"
        );
        step.fits(cache);
        Self {
            kv: kv.address(),
            kv_norm: kv_norm.vector(),
            inv_freq: inv_freq.address(),
            cache: cache.address(),
            positions: step.positions(),
            slots: step.slots(),
            eps: shape.eps,
            scaling: shape.rotary.attention_scaling,
            interleaved: i32::from(shape.rotary.pairing == RopePairing::Interleaved),
        }
    }
}

/// Operations without a weight matrix.
#[derive(Debug)]
pub(super) struct Ops {
    rms_norm: Kernel,
    add_rms_norm: Kernel,
    add: Kernel,
    swiglu: Kernel,
    gather: Kernel,
    sum_parts: Kernel,
    mla_store: Kernel,
    attend: Kernel,
    route: Kernel,
}

impl Ops {
    pub(super) fn new(stream: &Stream) -> Result<Self, CudaError> {
        let device = stream.device();
        let module = Module::of(device, &Unit::ops())?;
        let kernel = |name| module.kernel(name, Unit::dynamic_shared_bytes(name));
        Ok(Self {
            rms_norm: kernel("rms_norm")?,
            add_rms_norm: kernel("add_rms_norm")?,
            add: kernel("add")?,
            swiglu: kernel("swiglu")?,
            gather: kernel("gather")?,
            sum_parts: kernel("sum_parts")?,
            mla_store: kernel("mla_store")?,
            attend: kernel("attend")?,
            route: kernel("route")?,
        })
    }

    pub(super) fn rms_norm(
        &self,
        stream: &Stream,
        x: &Buffer,
        rows: usize,
        weight: &Weight,
        eps: f32,
        out: &Buffer,
    ) {
        let width = weight.cols;
        x.holds(rows * width);
        out.holds(rows * width);
        // SAFETY: `rows` rows of `width`, checked above.
        unsafe {
            launch!(stream, self.rms_norm, [rows, 1, 1], norm_threads(width), 0;
                x.address(), weight.vector(), out.address(), int(width), eps);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the operation's own")]
    pub(super) fn add_rms_norm(
        &self,
        stream: &Stream,
        x: &Buffer,
        y: &Buffer,
        rows: usize,
        weight: &Weight,
        eps: f32,
        out: &Buffer,
    ) {
        let width = weight.cols;
        for buffer in [x, y, out] {
            buffer.holds(rows * width);
        }
        // SAFETY: `rows` rows of `width`, checked above.
        unsafe {
            launch!(stream, self.add_rms_norm, [rows, 1, 1], norm_threads(width), 0;
                x.address(), y.address(), weight.vector(), out.address(), int(width), eps);
        }
    }

    pub(super) fn add(&self, stream: &Stream, x: &Buffer, y: &Buffer, len: usize) {
        x.holds(len);
        y.holds(len);
        // SAFETY: the first `len` values of both, checked above.
        unsafe {
            launch!(stream, self.add, [elementwise(len), 1, 1], THREADS, 0; x.address(), y.address(), len as u64);
        }
    }

    pub(super) fn swiglu(&self, stream: &Stream, gate: &Buffer, up: &Buffer, len: usize) {
        gate.holds(len);
        up.holds(len);
        // SAFETY: the first `len` values of both, checked above.
        unsafe {
            launch!(stream, self.swiglu, [elementwise(len), 1, 1], THREADS, 0;
                gate.address(), up.address(), len as u64);
        }
    }

    pub(super) fn gather(&self, stream: &Stream, x: &Buffer, step: &StepMemory, width: usize, out: &Buffer) {
        let rows = step.rows();
        x.holds(rows.rows * width);
        out.holds(rows.logit_rows * width);
        // SAFETY: the step's logit rows are below its rows; sizes as checked above.
        unsafe {
            launch!(stream, self.gather, [width.div_ceil(THREADS), rows.logit_rows, 1], THREADS, 0;
                x.address(), step.logit_rows(), out.address(), int(width));
        }
    }

    /// `out[i] = parts[i] + parts[stride + i] + ...`, in this order.
    pub(super) fn sum_parts(
        &self,
        stream: &Stream,
        parts: Slice,
        count: usize,
        stride: usize,
        len: usize,
        out: &Buffer,
    ) {
        assert!(parts.len >= count * stride && len <= stride, "{count} parts of {len}");
        out.holds(len);
        // SAFETY: `count` parts of `len` values, checked above.
        unsafe {
            launch!(stream, self.sum_parts, [elementwise(len), 1, 1], THREADS, 0;
                parts.address, out.address(), int(count), stride as u64, len as u64);
        }
    }

    /// Rotates queries and stores latents and keys.
    pub(super) fn mla_store(&self, stream: &Stream, step: &StepMemory, store: &Store, queries: Queries) {
        let (rows, Queries { address: q, heads, nope, rope, kv_lora }) = (step.rows().rows, queries);
        let Store { kv, kv_norm, inv_freq, cache, positions, slots, eps, scaling, interleaved } = *store;
        // SAFETY: [`Store::new`] checked every size and that the step's slots are inside the cache, [`Queries::new`] the queries.
        unsafe {
            launch!(stream, self.mla_store, [rows, 1, 1], THREADS, rope * 4, Cost::default(), early(stream);
                kv, kv_norm, inv_freq, q, cache, positions, slots, int(heads), int(nope), int(rope), int(kv_lora), eps,
                scaling, interleaved);
        }
    }

    /// `out` `[rows, heads, kv_lora]`: attended latents of queries `[rows, heads, kv_lora + rope]`.
    pub(super) fn attend(
        &self,
        stream: &Stream,
        shape: &MlaShape,
        step: &StepMemory,
        queries: &Buffer,
        cache: &Cache,
        out: &Buffer,
    ) {
        let rows = step.rows().rows;
        queries.holds(rows * shape.heads * shape.cache_width());
        out.holds(rows * shape.heads * shape.kv_lora);
        assert_eq!(cache.width, shape.cache_width(), "width of the cache");
        step.fits(cache);
        let read = Cost { bytes: (step.cached() * shape.cache_width() * 2) as u64, weight: None };
        // SAFETY: the step's blocks are inside the cache and reach to its rows' positions, which `fits` checked.
        unsafe {
            launch!(stream, self.attend, [shape.heads, rows, 1], THREADS, (shape.cache_width() + shape.kv_lora) * 4, read;
                queries.address(), cache.address(), out.address(), step.positions(), step.tables(), step.blocks(),
                int(shape.heads), int(shape.kv_lora), int(shape.rope), shape.softmax_scale);
        }
    }

    pub(super) fn route(
        &self,
        stream: &Stream,
        shape: &MoeShape,
        logits: &Buffer,
        bias: Option<&Weight>,
        rows: usize,
        choice: &Buffer,
    ) {
        let (e, k, router) = (shape.n_routed_experts, shape.num_experts_per_tok, &shape.router);
        logits.holds(rows * e);
        choice.holds(rows * 2 * k);
        assert!(bias.is_none_or(|bias| bias.cols == e), "a bias for every expert");
        // SAFETY: `e` logits and `2 k` choices for each of `rows` rows, checked above.
        unsafe {
            launch!(stream, self.route, [rows, 1, 1], 32, (2 * e + router.n_group) * 4;
                logits.address(), bias.map_or(0, Weight::vector), choice.address(), int(e), int(k),
                int(router.n_group), int(router.topk_group),
                i32::from(router.scoring_func == ScoringFunc::Softmax),
                i32::from(router.group_score == GroupScore::TopTwoSum), router.norm_topk_floor.unwrap_or(-1.0),
                router.routed_scaling_factor);
        }
    }
}

/// Experts that so many visits read at most.
fn visited(w: &Weight, visits: usize) -> usize {
    visits.min(w.experts)
}

/// Kernels that wait themselves may start early where the GPU has that.
pub(super) fn early(stream: &Stream) -> Start {
    if stream.device().capability() >= (9, 0) { Start::Early } else { Start::InTurn }
}

/// Threads for a row of `width`, the same for any number of rows.
fn norm_threads(width: usize) -> usize {
    width.div_ceil(4).next_multiple_of(32).clamp(32, 1024)
}

fn elementwise(len: usize) -> usize {
    len.div_ceil(THREADS).min(MOST_BLOCKS)
}
