//! The backend for NVIDIA's GPUs.
//!
//! Kernels are CUDA C++ under `kernels/cu`, compiled by NVRTC for the GPU that is there and kept in a cache on the disk. All
//! work of a rank goes through one stream. A step's tokens, positions and tables lie at fixed addresses, so that the work of
//! a decoding step can be recorded once for each size and repeated as a graph.
//!
//! Up to 16 tokens are multiplied with f32 activations as they are; more go through tensor cores, where weights and activations
//! are rounded to f16 (the router's stay f32).

pub mod compile;
pub mod driver;
mod error;
mod kernels;
pub mod nvrtc;
pub mod peer;
mod prefill;
mod step;
pub mod synthetic;
mod weight;

pub use compile::Tiling;
pub use error::CudaError;
pub use weight::Weight;

use crate::shape::{MlaShape, MoeShape};
use crate::step::{BLOCK_TOKENS, Step};
use crate::{Backend, Error, ExpertWeights, MlpWeights, Pass, StepLimits, StepRows};
use compile::Form;
use driver::{Device, Graph, Memory, Stream};
use formats::{Dtype, TensorView};
use kernels::{Linear, Ops};
use prefill::{Gemm, Groups, Halves, MANY, RowKernels, stride};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use step::{BUCKETS, StepMemory};
use weight::{Storage, bf16, storage};

/// Types in both tilings.
const FORMS: usize = 2 * compile::WEIGHT_TYPES.len();
/// Most rows of a step: a side of a kernel's grid.
const MOST_ROWS: usize = 65_535;

/// One GPU, or one rank's part of it.
#[derive(Debug)]
pub struct Cuda {
    stream: Arc<Stream>,
    ops: Ops,
    /// By the form's index; compiled when the first weight of the type comes.
    linear: [OnceLock<Linear>; FORMS],
    /// The same for many tokens.
    gemm: [OnceLock<Gemm>; FORMS],
    rows: RowKernels,
    step: StepMemory,
    scratch: Scratch,
    /// Rotary tables by their values.
    rotary: Vec<(Vec<f32>, Buffer)>,
    recordings: [Recording; BUCKETS.len()],
    /// Which is being recorded.
    recording: Option<usize>,
}

/// Working memory, as large as the largest step so far.
#[derive(Debug)]
struct Scratch {
    /// `[T, heads, kv_lora + rope]`
    queries: Buffer,
    /// `[T, heads, kv_lora]`
    latents: Buffer,
    /// `[T, K, intermediate]`, twice
    visits: [Buffer; 2],
    /// A product's input, for many tokens.
    halves: Halves,
    groups: Groups,
}

/// What is known of the steps of one size.
#[derive(Debug, Default)]
enum Recording {
    /// None has run: memory and kernels may be missing.
    #[default]
    Cold,
    /// One has run.
    Warm,
    /// Ready to be repeated.
    Made(Graph),
}

/// Activations: f32 on the device.
#[derive(Debug)]
pub struct Buffer {
    memory: Memory,
    len: usize,
}

/// Latents and rope keys of one layer as BF16, and a block more than was asked for: rows that round a step up write there.
#[derive(Debug)]
pub struct Cache {
    memory: Memory,
    slots: usize,
    width: usize,
}

impl Buffer {
    /// `len` values without meaning; `what` they are for is said when there is no room.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]
    pub fn new(device: &Arc<Device>, len: usize, what: &str) -> Result<Self, CudaError> {
        Ok(Self { memory: Memory::new(device, len * 4, what)?, len })
    }

    /// Where its first value lies.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Its memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    fn holds(&self, len: usize) {
        assert!(len <= self.len, "{len} values of {}", self.len);
    }
}

impl Cache {
    fn address(&self) -> u64 {
        self.memory.address()
    }
}

impl Cuda {
    /// A backend on GPU `ordinal`.
    ///
    /// # Errors
    /// [`Error::Cuda`]: no driver, no compiler, no such GPU, one that is too old, or no memory.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        Self::new(&Device::open(ordinal)?)
    }

    /// A backend on an open GPU, with a stream of its own. The calling thread is the one that uses it.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn new(device: &Arc<Device>) -> Result<Self, Error> {
        device.bind()?;
        let stream = Stream::new(device)?;
        let buffer = || Buffer::new(device, 0, "working memory");
        Ok(Self {
            ops: Ops::new(&stream)?,
            linear: [const { OnceLock::new() }; FORMS],
            gemm: [const { OnceLock::new() }; FORMS],
            rows: RowKernels::new(&stream)?,
            step: StepMemory::new(device)?,
            scratch: Scratch {
                queries: buffer()?,
                latents: buffer()?,
                visits: [buffer()?, buffer()?],
                halves: Halves { values: buffer()?, scales: buffer()? },
                groups: Groups { order: buffer()?, tiles: buffer()?, sums: buffer()? },
            },
            rotary: Vec::new(),
            recordings: Default::default(),
            recording: None,
            stream,
        })
    }

    /// Its GPU.
    pub fn device(&self) -> &Arc<Device> {
        self.stream.device()
    }

    /// Where its work goes.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Compiles what matrices of these types need, all at the same time. What does not compile is said when a weight is made.
    pub fn compile_for(device: &Device, matrices: &[(Dtype, Tiling)]) {
        let form = |&(dtype, tiling)| Form { dtype: stored_as(dtype), tiling };
        let mut forms: Vec<Form> = matrices.iter().map(form).collect();
        forms.sort_unstable();
        forms.dedup();
        let units: Vec<_> = forms.into_iter().flat_map(compile::Unit::of_weights).collect();
        compile::Unit::prepare(&units, &compile::architecture(device.capability()));
    }

    /// Takes a weight that lies at `offset` of `arena`. Where its type has no kernel, `view` is converted and copied.
    ///
    /// # Errors
    /// [`Error::UnsupportedType`], or the device's refusal.
    ///
    /// # Panics
    /// When the arena ends before the weight does.
    pub fn weight_in(
        &self,
        arena: &Arc<Memory>,
        offset: u64,
        view: &TensorView,
        tiling: Tiling,
    ) -> Result<Weight, Error> {
        let weight = Weight::in_arena(&self.stream, arena, offset, view, tiling)?;
        self.prepare(weight.form)?;
        Ok(weight)
    }

    /// Takes a weight whose blocks are in the order of `tiling`.
    ///
    /// # Errors
    /// As [`Backend::weight`].
    pub fn tiled_weight(&self, view: &TensorView, tiling: Tiling) -> Result<Weight, Error> {
        let weight = Weight::alone(&self.stream, view, tiling)?;
        self.prepare(weight.form)?;
        Ok(weight)
    }

    /// Sums `count` parts, `stride` values apart, of `len` values each, in their order.
    pub fn sum_parts(&mut self, parts: &Buffer, count: usize, stride: usize, len: usize, out: &mut Buffer) {
        self.ops.sum_parts(&self.stream, parts, count, stride, len, out);
    }

    /// Compiles what the products of a type need.
    pub(crate) fn prepare(&self, form: Form) -> Result<(), CudaError> {
        let (linear, gemm) = (&self.linear[form.index()], &self.gemm[form.index()]);
        if linear.get().is_none() {
            // Another thread of the same rank would have made the same.
            let _ = linear.set(Linear::new(&self.stream, form)?);
            if form.dtype != Dtype::F32 {
                let _ = gemm.set(Gemm::new(&self.stream, form)?);
            }
        }
        Ok(())
    }

    fn linear(&self, weight: &Weight) -> &Linear {
        self.linear[weight.form.index()].get().expect("kernels are compiled when their first weight is made")
    }

    /// The kernels for so many tokens, if there are other ones.
    fn gemm(&self, weight: &Weight, rows: usize) -> Option<&Gemm> {
        let addressable = weight.cost(weight.rows).bytes <= u64::from(u32::MAX);
        self.gemm[weight.form.index()].get().filter(|_| rows >= MANY && addressable)
    }

    /// Makes room for the input of products of many tokens.
    fn grow_halves(&mut self, rows: usize, width: usize) -> bool {
        self.grow(|scratch| &mut scratch.halves.values, rows * stride(width) / 2)
            && self.grow(|scratch| &mut scratch.halves.scales, rows)
    }

    /// Products of many tokens with weights that all have kernels for that.
    fn products(&mut self, w: &[&Weight], x: &Buffer, rows: usize, out: &mut [&mut Buffer]) {
        let width = w[0].cols;
        if !self.grow_halves(rows, width) {
            return;
        }
        self.rows.to_half(&self.stream, x, rows, width, &self.scratch.halves);
        for (w, out) in w.iter().zip(out) {
            assert_eq!(w.cols, width, "products of one input");
            if let Some(gemm) = self.gemm(w, rows) {
                gemm.product(&self.stream, w, &self.scratch.halves, rows, out);
            }
        }
    }

    /// Experts of many tokens: visits are grouped, so that an expert's weights are read once for all of them.
    fn experts_of_many(
        &mut self,
        shape: &MoeShape,
        experts: &ExpertWeights<Weight>,
        [x, choice, out]: [&Buffer; 3],
        rows: usize,
    ) {
        let (k, local) = (shape.num_experts_per_tok, shape.local_experts.len());
        let visits = rows * k;
        let grown = self.grow(|scratch| &mut scratch.groups.order, visits)
            && self.grow(|scratch| &mut scratch.groups.tiles, Groups::tiles_len(visits, local))
            && self.grow(|scratch| &mut scratch.groups.sums, visits * shape.hidden)
            && self.grow_halves(rows, shape.hidden)
            && self.grow_halves(visits, shape.intermediate);
        if !grown {
            return;
        }
        let Scratch { visits: [inner, other], halves, groups, .. } = &self.scratch;
        let (stream, kernels) = (&self.stream, &self.rows);
        let gemm = |w| self.gemm(w, rows).expect("the caller has looked");
        kernels.group(stream, shape, choice, rows, groups);
        kernels.to_half(stream, x, rows, shape.hidden, halves);
        gemm(&experts.gate).experts(stream, &experts.gate, halves, groups, visits, k, inner);
        gemm(&experts.up).experts(stream, &experts.up, halves, groups, visits, k, other);
        // Visits of other ranks' experts have no meaning here and are not summed.
        kernels.swiglu_to_half(stream, [inner, other], visits, shape.intermediate, halves);
        gemm(&experts.down).experts(stream, &experts.down, halves, groups, visits, 1, &groups.sums);
        kernels.sum_visits(stream, shape, groups, choice, rows, out);
    }

    /// Recorded work leads to memory that is no more.
    fn forget_recordings(&mut self) {
        self.recordings = Default::default();
    }

    /// Makes a piece of working memory larger where it has to be. A refusal is recorded, and `false`.
    fn grow(&mut self, which: impl Fn(&mut Scratch) -> &mut Buffer, len: usize) -> bool {
        if which(&mut self.scratch).len >= len {
            return true;
        }
        let made = Buffer::new(self.stream.device(), len.next_power_of_two(), "working memory");
        let Some(buffer) = self.stream.record(made) else { return false };
        *which(&mut self.scratch) = buffer;
        self.forget_recordings();
        true
    }

    /// The rotary table on the device.
    fn inv_freq(&mut self, values: &[f32]) -> Option<usize> {
        if let Some(found) = self.rotary.iter().position(|(known, _)| known == values) {
            return Some(found);
        }
        let made = Buffer::new(self.stream.device(), values.len(), "a rotary table");
        let buffer = self.stream.record(made)?;
        self.stream.write(&buffer.memory, 0, &bytes_of(values));
        self.rotary.push((values.to_vec(), buffer));
        Some(self.rotary.len() - 1)
    }
}

impl Backend for Cuda {
    type Weight = Weight;
    type Buffer = Buffer;
    type Cache = Cache;

    fn weight(&self, view: TensorView) -> Result<Weight, Error> {
        self.tiled_weight(&view, Tiling::Rows)
    }

    fn keeps(&self, dtype: Dtype) -> bool {
        storage(dtype, false) == Storage::Own
    }

    fn zeros(&self, len: usize) -> Result<Buffer, Error> {
        let buffer = Buffer::new(self.stream.device(), len, "activations")?;
        self.stream.zero(&buffer.memory);
        Ok(buffer)
    }

    fn cache(&mut self, slots: usize, width: usize) -> Result<Cache, Error> {
        let all = slots + BLOCK_TOKENS;
        let memory = Memory::new(self.stream.device(), all * width * 2, "the latent cache")?;
        self.stream.zero(&memory);
        if slots.is_multiple_of(BLOCK_TOKENS) {
            self.step.spare(slots / BLOCK_TOKENS);
        }
        Ok(Cache { memory, slots: all, width })
    }

    fn write(&mut self, buffer: &mut Buffer, values: &[f32]) {
        buffer.holds(values.len());
        self.stream.write(&buffer.memory, 0, &bytes_of(values));
    }

    fn read(&mut self, buffer: &Buffer, range: Range<usize>, values: &mut [f32]) {
        buffer.holds(range.end);
        assert_eq!(range.len(), values.len(), "room for the values");
        let mut bytes = vec![0; values.len() * 4];
        self.stream.read(&buffer.memory, range.start * 4, &mut bytes);
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_ne_bytes(*bytes);
        }
    }

    fn write_cache(&mut self, cache: &mut Cache, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|&value| bf16(value).to_ne_bytes()).collect();
        self.stream.write(&cache.memory, 0, &bytes);
    }

    fn read_cache(&mut self, cache: &Cache, values: &mut [f32]) {
        let mut bytes = vec![0; values.len() * 2];
        self.stream.read(&cache.memory, 0, &mut bytes);
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_bits(u32::from(u16::from_ne_bytes(*bytes)) << 16);
        }
    }

    fn reserve(&mut self, limits: StepLimits) -> Result<(), Error> {
        if limits.max_rows > MOST_ROWS {
            return Err(Error::StepRows { most: MOST_ROWS, found: limits.max_rows });
        }
        if self.step.limit(limits)? {
            self.forget_recordings();
        }
        Ok(())
    }

    fn begin_step(&mut self, step: &Step) -> StepRows {
        let begun = self.step.begin(step, &self.stream);
        if self.stream.record(begun) == Some(true) {
            self.forget_recordings();
        }
        self.step.rows()
    }

    fn begin_pass(&mut self, repeatable: bool) -> Pass {
        let repeatable = repeatable && !self.stream.is_tracing();
        let Some(bucket) = self.step.bucket().filter(|_| repeatable) else { return Pass::Run };
        match &mut self.recordings[bucket] {
            Recording::Made(graph) => {
                self.stream.run(graph);
                return Pass::Done;
            }
            Recording::Warm => {
                let begun = self.stream.begin_capture();
                self.recording = self.stream.record(begun).map(|()| bucket);
            }
            cold @ Recording::Cold => *cold = Recording::Warm,
        }
        Pass::Run
    }

    fn end_pass(&mut self) {
        let Some(bucket) = self.recording.take() else { return };
        let ended = self.stream.end_capture();
        if let Some(graph) = self.stream.record(ended) {
            self.stream.run(&graph);
            self.recordings[bucket] = Recording::Made(graph);
        }
    }

    fn finish(&mut self) -> Result<(), Error> {
        Ok(self.stream.finish()?)
    }

    fn embed(&mut self, table: &Weight, first_row: usize, out: &mut Buffer) {
        self.linear(table).embed(&self.stream, table, &self.step, first_row, out);
    }

    fn rms_norm(&mut self, x: &Buffer, rows: usize, weight: &Weight, eps: f32, out: &mut Buffer) {
        self.ops.rms_norm(&self.stream, x, rows, weight, eps, out);
    }

    fn add_rms_norm(
        &mut self,
        x: &mut Buffer,
        y: &Buffer,
        rows: usize,
        width: usize,
        weight: &Weight,
        eps: f32,
        out: &mut Buffer,
    ) {
        assert_eq!(width, weight.cols, "width of the norm");
        self.ops.add_rms_norm(&self.stream, x, y, rows, weight, eps, out);
    }

    fn add(&mut self, x: &mut Buffer, y: &Buffer, rows: usize, width: usize) {
        self.ops.add(&self.stream, x, y, rows * width);
    }

    fn matmul(&mut self, w: &Weight, x: &Buffer, rows: usize, out: &mut Buffer) {
        if self.gemm(w, rows).is_some() {
            return self.products(&[w], x, rows, &mut [out]);
        }
        self.linear(w).matmul(&self.stream, w, x, rows, out);
    }

    fn matmul_pair(&mut self, w: [&Weight; 2], x: &Buffer, rows: usize, out: [&mut Buffer; 2]) {
        if w.iter().all(|w| self.gemm(w, rows).is_some()) {
            let [first, second] = out;
            return self.products(&w, x, rows, &mut [first, second]);
        }
        for (w, out) in w.into_iter().zip(out) {
            self.matmul(w, x, rows, out);
        }
    }

    fn mlp(
        &mut self,
        mlp: &MlpWeights<Weight>,
        x: &Buffer,
        rows: usize,
        scratch: [&mut Buffer; 2],
        out: &mut Buffer,
    ) {
        let [gate, up] = scratch;
        self.matmul_pair([&mlp.gate_proj, &mlp.up_proj], x, rows, [gate, up]);
        if self.gemm(&mlp.down_proj, rows).is_none() {
            self.swiglu(gate, up, rows, mlp.width);
            return self.matmul(&mlp.down_proj, gate, rows, out);
        }
        if self.grow_halves(rows, mlp.width) {
            let halves = &self.scratch.halves;
            self.rows.swiglu_to_half(&self.stream, [gate, up], rows, mlp.width, halves);
            if let Some(gemm) = self.gemm(&mlp.down_proj, rows) {
                gemm.product(&self.stream, &mlp.down_proj, halves, rows, out);
            }
        }
    }

    fn swiglu(&mut self, gate: &mut Buffer, up: &Buffer, rows: usize, width: usize) {
        self.ops.swiglu(&self.stream, gate, up, rows * width);
    }

    fn mla_store(
        &mut self,
        shape: &MlaShape,
        kv: &Buffer,
        kv_norm: &Weight,
        q: &mut Buffer,
        cache: &mut Cache,
    ) {
        let Some(table) = self.inv_freq(&shape.rotary.inv_freq) else { return };
        let inv_freq = &self.rotary[table].1;
        self.ops.mla_store(&self.stream, shape, &self.step, inv_freq, kv, kv_norm, q, cache);
    }

    fn mla_attention(
        &mut self,
        shape: &MlaShape,
        q: &Buffer,
        kv_b: &Weight,
        cache: &Cache,
        out: &mut Buffer,
    ) {
        assert_eq!([kv_b.rows, kv_b.cols], [shape.kv_b_rows(), shape.kv_lora], "kv_b_proj's shape");
        let rows = self.step.rows().rows;
        let heads = rows * shape.heads;
        if !self.grow(|scratch| &mut scratch.queries, heads * shape.cache_width())
            || !self.grow(|scratch| &mut scratch.latents, heads * shape.kv_lora)
        {
            return;
        }
        let Scratch { queries, latents, .. } = &self.scratch;
        let linear = self.linear(kv_b);
        linear.absorb(&self.stream, shape, kv_b, q, rows, queries);
        self.ops.attend(&self.stream, shape, &self.step, queries, cache, latents);
        linear.project(&self.stream, shape, kv_b, latents, rows, out);
    }

    fn route(
        &mut self,
        shape: &MoeShape,
        logits: &Buffer,
        bias: Option<&Weight>,
        rows: usize,
        choice: &mut Buffer,
    ) {
        self.ops.route(&self.stream, shape, logits, bias, rows, choice);
    }

    fn experts(
        &mut self,
        shape: &MoeShape,
        experts: &ExpertWeights<Weight>,
        x: &Buffer,
        choice: &Buffer,
        rows: usize,
        out: &mut Buffer,
    ) {
        let visits = rows * shape.num_experts_per_tok * shape.intermediate;
        if !self.grow(|scratch| &mut scratch.visits[0], visits)
            || !self.grow(|scratch| &mut scratch.visits[1], visits)
        {
            return;
        }
        let ExpertWeights { gate, up, down } = experts;
        if [gate, up, down].iter().all(|w| self.gemm(w, rows).is_some()) {
            return self.experts_of_many(shape, experts, [x, choice, out], rows);
        }
        let (stream, [inner, other]) = (&self.stream, &self.scratch.visits);
        self.linear(gate).expert_in(stream, shape, gate, [x, choice, inner], rows);
        self.linear(up).expert_in(stream, shape, up, [x, choice, other], rows);
        self.ops.swiglu(stream, inner, other, visits);
        self.linear(down).expert_out(stream, shape, down, [inner, choice, out], rows);
    }

    fn gather_logit_rows(&mut self, x: &Buffer, width: usize, out: &mut Buffer) {
        self.ops.gather(&self.stream, x, &self.step, width, out);
    }
}

/// What matrices of a type become.
fn stored_as(dtype: Dtype) -> Dtype {
    match storage(dtype, false) {
        Storage::Own => dtype,
        Storage::As(other) => other,
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}
