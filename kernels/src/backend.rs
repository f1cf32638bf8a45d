//! The operations of one forward pass, at the level of the model, generic over where the numbers live.

use crate::Error;
use crate::candidates::{Candidates, Selection};
use crate::shape::{MlaShape, MoeShape};
use crate::step::Step;
use formats::{Dtype, TensorView};
use memmap2::MmapMut;
use std::ops::Range;
use zerocopy::{FromBytes, FromZeros};

/// A device and its arithmetic. One value serves one rank, on one thread.
///
/// Activations are f32, row-major, one row per token of the step; every operation works on the first `rows` rows.
/// A product's result for one row does not depend on which other rows are in the step, so an answer is the same
/// alone and under load; on a GPU it may depend on whether they are few or many. Buffers of wrong length are mistakes of the caller and panic.
///
/// A step begins with [`Backend::begin_step`], which is the only place where anything about it is handed over; operations may
/// return before they are done, and a fault of the device shows at [`Backend::finish`].
pub trait Backend: Sized {
    /// A weight on the device, in the checkpoint's own type.
    type Weight;
    /// Activations on the device.
    type Buffer;
    /// Latents and rope keys of one layer, in the device's type for them.
    type Cache;

    /// Takes a weight: 1-D vectors, 2-D `[out, in]` matrices or 3-D `[experts, out, in]` stacks. Sizes may be 0.
    ///
    /// # Errors
    /// [`Error::UnsupportedType`], or the device's refusal.
    fn weight(&self, view: TensorView) -> Result<Self::Weight, Error>;

    /// As [`Backend::weight`], of values that are multiplied by `scales`: one number, or one for each matrix of a stack.
    ///
    /// # Errors
    /// Those of [`Backend::weight`]; [`Error::Scales`] when they are of another number.
    fn scaled_weight(&self, view: TensorView, scales: &[f32]) -> Result<Self::Weight, Error>;

    /// Whether weights of this type stay in their own blocks; others become BF16, which takes more memory and rounds.
    fn keeps(&self, _dtype: Dtype) -> bool {
        true
    }

    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// The device's refusal.
    fn zeros(&self, len: usize) -> Result<Self::Buffer, Error>;

    /// A cache of `slots` slots of `width` values, all zero.
    ///
    /// # Errors
    /// The device's refusal.
    fn cache(&mut self, slots: usize, width: usize) -> Result<Self::Cache, Error>;

    /// Copies `values` to the start of `buffer`.
    fn write(&mut self, buffer: &mut Self::Buffer, values: &[f32]);

    /// Copies the values of `range` from `buffer`.
    fn read(&mut self, buffer: &Self::Buffer, range: Range<usize>, values: &mut [f32]);

    /// Copies `values` to the first slots of `cache`.
    fn write_cache(&mut self, cache: &mut Self::Cache, values: &[f32]);

    /// Copies the first slots of `cache`.
    fn read_cache(&mut self, cache: &Self::Cache, values: &mut [f32]);

    /// Makes what steps of at most this size need, so that they make nothing themselves.
    ///
    /// # Errors
    /// The device's refusal.
    fn reserve(&mut self, limits: StepLimits) -> Result<(), Error>;

    /// Makes what attention of this shape needs.
    ///
    /// # Errors
    /// The device's refusal.
    fn prepare_attention(&mut self, _shape: &MlaShape) -> Result<(), Error> {
        Ok(())
    }

    /// Makes what [`Backend::candidates`] of the tokens `ids` needs.
    ///
    /// # Errors
    /// The device's refusal.
    fn prepare_candidates(&mut self, _ids: &Range<usize>) -> Result<(), Error> {
        Ok(())
    }

    /// Takes over what the operations that follow work on, and says how many rows they are to be given: a backend may add
    /// some, whose results have no meaning.
    fn begin_step(&mut self, step: &Step) -> StepRows;

    /// Begins the operations of the step. [`Pass::Done`]: the device repeats those of an earlier step of this size, so there is
    /// nothing to do; only `repeatable` operations may be recorded for that.
    fn begin_pass(&mut self, _repeatable: bool) -> Pass {
        Pass::Run
    }

    /// Ends the operations that [`Pass::Run`] asked for.
    fn end_pass(&mut self) {}

    /// Waits until all operations are done.
    ///
    /// # Errors
    /// The first fault of the device since it was made; it is of no use any more.
    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Appends to `out` what rows of `logits` `[rows, ids.len()]` come to, those of tokens `ids`: for each row that is asked for. Waits for it.
    ///
    /// # Errors
    /// As [`Backend::finish`].
    fn candidates(
        &mut self,
        logits: &Self::Buffer,
        ids: Range<usize>,
        asked: &[(usize, &Selection)],
        out: &mut Vec<Candidates>,
    ) -> Result<(), Error> {
        candidates_by_host(self, logits, ids, asked, out)
    }

    /// `out[t] = table[tokens[t] - first_row]` for the step's tokens, zeros where that row is not in `table` `[rows, hidden]`
    /// (another rank's).
    fn embed(&mut self, table: &Self::Weight, first_row: usize, out: &mut Self::Buffer);

    /// `out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight`, `weight` `[width]`.
    fn rms_norm(
        &mut self,
        x: &Self::Buffer,
        rows: usize,
        weight: &Self::Weight,
        eps: f32,
        out: &mut Self::Buffer,
    );

    /// `x += y` over `rows` rows of `width`.
    fn add(&mut self, x: &mut Self::Buffer, y: &Self::Buffer, rows: usize, width: usize);

    /// `x += y; out = rms_norm(x)`
    #[allow(
        clippy::too_many_arguments,
        reason = "two operations in one, so that a backend can fuse them: their arguments"
    )]
    fn add_rms_norm(
        &mut self,
        x: &mut Self::Buffer,
        y: &Self::Buffer,
        rows: usize,
        width: usize,
        weight: &Self::Weight,
        eps: f32,
        out: &mut Self::Buffer,
    ) {
        self.add(x, y, rows, width);
        self.rms_norm(x, rows, weight, eps, out);
    }

    /// `out[t] = w x[t]`, `w` `[out, in]`; zeros where `in` is 0.
    fn matmul(&mut self, w: &Self::Weight, x: &Self::Buffer, rows: usize, out: &mut Self::Buffer);

    /// Two products of one input.
    fn matmul_pair(
        &mut self,
        w: [&Self::Weight; 2],
        x: &Self::Buffer,
        rows: usize,
        out: [&mut Self::Buffer; 2],
    ) {
        for (w, out) in w.into_iter().zip(out) {
            self.matmul(w, x, rows, out);
        }
    }

    /// `out = w rms_norm(x)`; `scratch` is a buffer of the width of `x`.
    fn rms_norm_matmul(
        &mut self,
        x: &Self::Buffer,
        rows: usize,
        (norm, eps): (&Self::Weight, f32),
        w: &Self::Weight,
        scratch: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) {
        self.rms_norm(x, rows, norm, eps, scratch);
        self.matmul(w, scratch, rows, out);
    }

    /// `gate = silu(gate) * up` over `rows` rows of `width`.
    fn swiglu(&mut self, gate: &mut Self::Buffer, up: &Self::Buffer, rows: usize, width: usize);

    /// Rotates the rope part of every head of `q` in place and stores, for every row of the step, `[rms_norm(latent) | rotated
    /// key]` in the cache slot of its position.
    ///
    /// `q` `[T, heads * (nope + rope)]`, `kv` `[T, kv_lora + rope]` (the output of `kv_a_proj_with_mqa`), `kv_norm`
    /// `[kv_lora]`, `cache` `[blocks * BLOCK_TOKENS, kv_lora + rope]`.
    fn mla_store(
        &mut self,
        shape: &MlaShape,
        kv: &Self::Buffer,
        kv_norm: &Self::Weight,
        q: &mut Self::Buffer,
        cache: &mut Self::Cache,
    );

    /// Causal attention of every row of the step over the cached positions up to its own.
    ///
    /// `q` and `cache` as [`Backend::mla_store`] left them, `kv_b` `[heads * (nope + v), kv_lora]`, `out` `[T, heads * v]`.
    fn mla_attention(
        &mut self,
        shape: &MlaShape,
        q: &Self::Buffer,
        kv_b: &Self::Weight,
        cache: &Self::Cache,
        out: &mut Self::Buffer,
    );

    /// Chooses experts: `logits` `[T, E]` to `choice` `[T, 2 * K]`, first K expert ids (exact in f32) in descending order
    /// of their selection score, then their K weights. Ties go to the smaller id.
    ///
    /// `bias` `[E]` is added to scores for the choice alone.
    fn route(
        &mut self,
        shape: &MoeShape,
        logits: &Self::Buffer,
        bias: Option<&Self::Weight>,
        rows: usize,
        choice: &mut Self::Buffer,
    );

    /// `out[t] = sum over the chosen k of weight_k * down_k(silu(gate_k x[t]) * up_k x[t])`, over the local experts only.
    ///
    /// `experts` are stacks over the local experts: gate and up `[e, intermediate, hidden]`, down `[e, hidden, intermediate]`.
    #[allow(
        clippy::too_many_arguments,
        reason = "one shape, the experts, two inputs, one output: nothing to fold"
    )]
    fn experts(
        &mut self,
        shape: &MoeShape,
        experts: &ExpertWeights<Self::Weight>,
        x: &Self::Buffer,
        choice: &Self::Buffer,
        rows: usize,
        out: &mut Self::Buffer,
    );

    /// Routed and shared experts: `out[t] = experts(x[t]) + down(silu(gate x[t]) * up x[t])`, this rank's part.
    ///
    /// The default is the router's product, the choice, the experts and the shared expert one after the other.
    fn moe(
        &mut self,
        weights: &MoeWeights<Self::Weight>,
        x: &Self::Buffer,
        rows: usize,
        buffers: &mut MoeBuffers<Self::Buffer>,
        out: &mut Self::Buffer,
    ) {
        moe_in_parts(self, weights, x, rows, buffers, out);
    }

    /// `out = down(silu(gate x) * up x)`, this rank's part; `scratch` are two buffers of the width.
    fn mlp(
        &mut self,
        mlp: &MlpWeights<Self::Weight>,
        x: &Self::Buffer,
        rows: usize,
        scratch: [&mut Self::Buffer; 2],
        out: &mut Self::Buffer,
    ) {
        let [gate, up] = scratch;
        self.matmul_pair([&mlp.gate_proj, &mlp.up_proj], x, rows, [gate, up]);
        self.swiglu(gate, up, rows, mlp.width);
        self.matmul(&mlp.down_proj, gate, rows, out);
    }

    /// `out[i] = x[r]` for the i-th of the step's rows that need logits, rows of `width`.
    fn gather_logit_rows(&mut self, x: &Self::Buffer, width: usize, out: &mut Self::Buffer);
}

/// [`Backend::moe`] as the operations that it consists of, one after the other.
pub(crate) fn moe_in_parts<B: Backend>(
    b: &mut B,
    weights: &MoeWeights<B::Weight>,
    x: &B::Buffer,
    rows: usize,
    buffers: &mut MoeBuffers<B::Buffer>,
    out: &mut B::Buffer,
) {
    let MoeWeights { shape, gate, e_score_correction_bias, experts, shared } = weights;
    let MoeBuffers { router_logits, choice, gate: shared_gate, up, shared: shared_out } = buffers;
    b.matmul(gate, x, rows, router_logits);
    b.route(shape, router_logits, e_score_correction_bias.as_ref(), rows, choice);
    b.experts(shape, experts, x, choice, rows, out);
    if let Some(shared) = shared {
        b.mlp(shared, x, rows, [shared_gate, up], shared_out);
        b.add(out, shared_out, rows, shape.hidden);
    }
}

/// [`Backend::candidates`] of rows that are brought here.
pub(crate) fn candidates_by_host<B: Backend>(
    b: &mut B,
    logits: &B::Buffer,
    ids: Range<usize>,
    asked: &[(usize, &Selection)],
    out: &mut Vec<Candidates>,
) -> Result<(), Error> {
    let first = u32::try_from(ids.start).expect("token ids are 32 bits wide");
    let mut values = vec![0.0; ids.len()];
    for &(row, selection) in asked {
        b.read(logits, row * ids.len()..(row + 1) * ids.len(), &mut values);
        b.finish()?;
        out.push(Candidates::choose(&values, first, selection));
    }
    Ok(())
}

/// Sizes that steps keep to.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Most tokens.
    pub max_rows: usize,
    /// Most rows of logits.
    pub max_logit_rows: usize,
    /// Blocks of the cache.
    pub cache_blocks: usize,
}

/// How many rows the operations of a step are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRows {
    /// Tokens.
    pub rows: usize,
    /// Rows of logits.
    pub logit_rows: usize,
}

impl StepRows {
    /// The step's own.
    pub fn of(step: &Step) -> Self {
        Self { rows: step.rows(), logit_rows: step.logit_rows().len() }
    }
}

/// Whether the operations of a step are still to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// They are.
    Run,
    /// The device has been told to repeat them.
    Done,
}

/// The three stacks of a layer's routed experts.
#[derive(Debug)]
pub struct ExpertWeights<W> {
    /// `[e, intermediate, hidden]`
    pub gate: W,
    /// `[e, intermediate, hidden]`
    pub up: W,
    /// `[e, hidden, intermediate]`
    pub down: W,
}

/// A SwiGLU.
#[derive(Debug)]
pub struct MlpWeights<W> {
    /// Its width on this rank; may be 0.
    pub width: usize,
    /// `[width, hidden]`
    pub gate_proj: W,
    /// `[width, hidden]`
    pub up_proj: W,
    /// `[hidden, width]`
    pub down_proj: W,
}

/// Routed and shared experts.
#[derive(Debug)]
pub struct MoeWeights<W> {
    /// Sizes and routing.
    pub shape: MoeShape,
    /// `[E, hidden]`
    pub gate: W,
    /// `[E]`
    pub e_score_correction_bias: Option<W>,
    /// The stacks.
    pub experts: ExpertWeights<W>,
    /// All shared experts as one.
    pub shared: Option<MlpWeights<W>>,
}

/// What [`Backend::moe`] works with. T is the most rows of a step.
#[derive(Debug)]
pub struct MoeBuffers<T> {
    /// `[T, E]`
    pub router_logits: T,
    /// `[T, 2 * K]`
    pub choice: T,
    /// `[T, width of the shared expert]`
    pub gate: T,
    /// `[T, width of the shared expert]`
    pub up: T,
    /// `[T, hidden]`
    pub shared: T,
}

/// Activations or a cache in ordinary memory: what the processor backends use, and what ranks of one process can add up.
#[derive(Debug)]
pub struct HostBuffer(Host);

#[derive(Debug)]
enum Host {
    /// What an allocator keeps when it is freed.
    Heap(Vec<f32>),
    /// What the system has again when it is dropped: caches come and go with the weights that they belong to.
    Pages(MmapMut, usize),
}

impl HostBuffer {
    /// From here on a buffer is pages of its own.
    const PAGES_FROM: usize = 256 << 10;

    /// `len` zeros. Pages are not touched until they are used.
    ///
    /// # Errors
    /// [`Error::Memory`] when the system gives none.
    pub fn new(len: usize) -> Result<Self, Error> {
        let bytes = len.saturating_mul(size_of::<f32>());
        let refused = || Error::Memory { bytes };
        if bytes < Self::PAGES_FROM {
            return f32::new_vec_zeroed(len).map(|values| Self(Host::Heap(values))).map_err(|_| refused());
        }
        MmapMut::map_anon(bytes).map(|pages| Self(Host::Pages(pages, len))).map_err(|_| refused())
    }

    /// `len` zeros, of which there are few enough.
    pub fn zeros(len: usize) -> Self {
        Self(Host::Heap(vec![0.0; len]))
    }

    /// The values.
    pub fn values(&self) -> &[f32] {
        match &self.0 {
            Host::Heap(values) => values,
            Host::Pages(pages, len) => <[f32]>::ref_from_bytes(&pages[..len * size_of::<f32>()])
                .expect("pages begin where values may"),
        }
    }

    /// The values, to be changed.
    pub fn values_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Host::Heap(values) => values,
            Host::Pages(pages, len) => <[f32]>::mut_from_bytes(&mut pages[..*len * size_of::<f32>()])
                .expect("pages begin where values may"),
        }
    }
}

/// The operations that two backends share whose buffers are [`HostBuffer`]s and that keep the step as `self.step`.
macro_rules! in_host_memory {
    () => {
        fn zeros(&self, len: usize) -> Result<HostBuffer, Error> {
            HostBuffer::new(len)
        }

        fn write(&mut self, buffer: &mut HostBuffer, values: &[f32]) {
            buffer.values_mut()[..values.len()].copy_from_slice(values);
        }

        fn read(&mut self, buffer: &HostBuffer, range: Range<usize>, values: &mut [f32]) {
            values.copy_from_slice(&buffer.values()[range]);
        }

        fn cache(&mut self, slots: usize, width: usize) -> Result<HostBuffer, Error> {
            HostBuffer::new(slots * width)
        }

        fn write_cache(&mut self, cache: &mut HostBuffer, values: &[f32]) {
            self.write(cache, values);
        }

        fn read_cache(&mut self, cache: &HostBuffer, values: &mut [f32]) {
            self.read(cache, 0..values.len(), values);
        }

        fn reserve(&mut self, _limits: StepLimits) -> Result<(), Error> {
            Ok(())
        }

        fn begin_step(&mut self, step: &Step) -> StepRows {
            self.step.copy_from(step);
            StepRows::of(step)
        }
    };
}
pub(crate) use in_host_memory;
