//! The backend for NVIDIA's GPUs.
//!
//! Kernels are CUDA C++ under `kernels/cu`, compiled by NVRTC for the GPU that is there and kept in a cache on the disk. All
//! work of a rank goes through one stream. A step's tokens, positions and tables lie at fixed addresses, so that the work of
//! a decoding step can be recorded once for each size and repeated as a graph.
//!
//! Up to 16 tokens are multiplied with f32 activations as they are; more go through tensor cores, where weights and activations
//! are rounded to f16 (the router's stay f32).

mod attention;
mod backend;
mod candidates;
pub mod compile;
mod decode;
pub mod driver;
mod error;
mod kernels;
pub mod nccl;
pub mod nvrtc;
mod one;
pub mod peer;
mod prefill;
mod step;
pub mod synthetic;
mod weight;

pub use compile::Tiling;
pub use error::CudaError;
pub use weight::Weight;

use crate::shape::{MlaShape, MoeShape};
use crate::step::Step;
use crate::{Error, ExpertWeights};
use attention::{Attention, Pieces};
use candidates::Chooser;
use compile::Form;
use decode::{Decode, Prepared};
use driver::{Device, Event, Graph, Memory, Stream};
use formats::{Dtype, TensorView};
use kernels::{Linear, Ops, Queries, Store};
use one::{Vector, Waiting};
use prefill::{Gemm, Groups, Halves, MANY, Place, RowKernels, stride};
use std::sync::{Arc, OnceLock};
use step::{BUCKETS, StepMemory};
use weight::{Storage, storage};
use zerocopy::IntoBytes;

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
    /// Made by the first row that is to be chosen from.
    chooser: Option<Chooser>,
    /// For up to sixteen tokens and matrices in tiles; where there are such matrices.
    decode: OnceLock<Option<Decode>>,
    prepared: Prepared,
    /// A norm of one token that the next operation may compute on the way.
    waiting: Option<Waiting>,
    /// What attention is to store first, and the queries that it is to rotate.
    storing: Option<(Store, Queries)>,
    /// By their widths.
    attention: Vec<Attention>,
    /// The step that is being computed.
    own_step: Step,
    scratch: Scratch,
    /// Rotary tables by their values.
    rotary: Vec<(Vec<f32>, Buffer)>,
    recordings: [Recording; BUCKETS.len()],
    /// Which is being recorded.
    recording: Option<usize>,
    /// Before and after the work of a step, where somebody wants to know.
    timer: Option<[Event; 2]>,
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
    /// `[parts, T, rows]`: products whose columns were taken in parts.
    parts: Buffer,
    groups: Groups,
    /// `[T, hidden]`: changes places with the residual stream at every sum.
    residual: Buffer,
    pieces: Pieces,
    /// What was outgrown: work that is under way or recorded may still lead there.
    outgrown: Vec<Buffer>,
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

/// Latents and rope keys of one layer as F16, and a block more than was asked for: rows that round a step up write there.
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

    fn slice(&self, start: usize, len: usize) -> Slice {
        self.holds(start + len);
        Slice { address: self.address() + start as u64 * 4, len }
    }
}

/// Values of a buffer.
#[derive(Clone, Copy, Debug)]
struct Slice {
    /// Of the first.
    address: u64,
    /// How many there are.
    len: usize,
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
            decode: OnceLock::new(),
            prepared: Prepared { tokens: buffer()?, sums: buffer()?, inverse: buffer()?, of: None },
            waiting: None,
            storing: None,
            attention: Vec::new(),
            own_step: Step::default(),
            step: StepMemory::new(device)?,
            chooser: None,
            scratch: Scratch {
                queries: buffer()?,
                latents: buffer()?,
                visits: [buffer()?, buffer()?],
                halves: Halves { values: buffer()?, scales: buffer()? },
                parts: buffer()?,
                groups: Groups { order: buffer()?, tiles: buffer()?, sums: buffer()? },
                residual: buffer()?,
                pieces: Pieces {
                    absorbed: buffer()?,
                    part: buffer()?,
                    softmax: buffer()?,
                    keys: buffer()?,
                    values: buffer()?,
                    state: buffer()?,
                },
                outgrown: Vec::new(),
            },
            rotary: Vec::new(),
            recordings: Default::default(),
            recording: None,
            timer: None,
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

    /// Compiles what matrices of these types and attention of this shape need, all at the same time. What does not compile is said when a weight is made.
    pub fn compile_for(device: &Device, matrices: &[(Dtype, Tiling)], shape: &MlaShape) {
        let form = |&(dtype, tiling)| Form { dtype: stored_as(dtype), tiling };
        let mut forms: Vec<Form> = matrices.iter().map(form).collect();
        forms.sort_unstable();
        forms.dedup();
        let mut units: Vec<_> = forms.into_iter().flat_map(compile::Unit::of_weights).collect();
        let architecture = compile::architecture(device.capability());
        if matrices.iter().any(|(_, tiling)| *tiling == Tiling::Tiles) && device.capability() >= (9, 0) {
            units.push(compile::Unit::decode(&architecture));
        }
        units.extend(attention::widths(device, shape).map(compile::Unit::attention));
        compile::Unit::prepare(&units, &architecture);
    }

    /// From now on [`Cuda::step_milliseconds`] knows how long a step took.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn time_steps(&mut self) -> Result<(), Error> {
        let event = || Event::new(self.device());
        self.timer = Some([event()?, event()?]);
        Ok(())
    }

    /// How long the device worked on the last step, once that is finished: from its first operation to its logits.
    pub fn step_milliseconds(&self) -> Option<f32> {
        let [start, end] = self.timer.as_ref()?;
        end.milliseconds_since(start).ok()
    }

    /// Marks the beginning (0) or end (1) of a step.
    fn mark(&self, which: usize) {
        if let Some(timer) = &self.timer {
            timer[which].record(&self.stream);
        }
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
    /// As [`Cuda::weight_in`].
    pub fn tiled_weight(&self, view: &TensorView, tiling: Tiling) -> Result<Weight, Error> {
        let weight = Weight::alone(&self.stream, view, tiling)?;
        self.prepare(weight.form)?;
        Ok(weight)
    }

    /// Sums `count` parts, `stride` values apart, of `len` values each, in their order.
    pub fn sum_parts(&mut self, parts: &Buffer, count: usize, stride: usize, len: usize, out: &mut Buffer) {
        self.settle(&[parts, out]);
        self.ops.sum_parts(&self.stream, parts.slice(0, count * stride), count, stride, len, out);
    }

    /// Compiles what the products of a type need.
    pub(crate) fn prepare(&self, form: Form) -> Result<(), CudaError> {
        let (linear, gemm) = (&self.linear[form.index()], &self.gemm[form.index()]);
        if form.tiling == Tiling::Tiles && self.decode.get().is_none() {
            let _ = self.decode.set(Decode::new(self.stream.device(), &self.stream)?);
        }
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
        if self.grow_halves(rows, width) {
            self.rows.to_half(&self.stream, x, rows, width, &self.scratch.halves);
            self.products_of_halves(w, rows, out);
        }
    }

    /// The same of what is in `halves` already. Where a product alone would leave multiprocessors idle, its columns are taken in parts
    /// that are added up.
    fn products_of_halves(&mut self, w: &[&Weight], rows: usize, out: &mut [&mut Buffer]) {
        let stream = Arc::clone(&self.stream);
        let parts: Vec<usize> = w.iter().map(|w| Gemm::parts(&stream, w, rows)).collect();
        let len = |i: usize| if parts[i] > 1 { parts[i] * rows * w[i].rows } else { 0 };
        if !self.grow(|scratch| &mut scratch.parts, (0..w.len()).map(len).sum()) {
            return;
        }
        let (mut place, mut start) = (Place::First, 0);
        for (i, w) in w.iter().enumerate() {
            let to = if parts[i] > 1 {
                self.scratch.parts.slice(start, len(i))
            } else {
                out[i].slice(0, rows * w.rows)
            };
            if let Some(gemm) = self.gemm(w, rows) {
                gemm.product(&stream, w, &self.scratch.halves, rows, parts[i], to, place);
                place = Place::Next;
            }
            start += len(i);
        }
        start = 0;
        for (i, w) in w.iter().enumerate().filter(|(i, _)| parts[*i] > 1) {
            let (from, values) = (self.scratch.parts.slice(start, len(i)), rows * w.rows);
            self.ops.sum_parts(&stream, from, parts[i], values, values, out[i]);
            start += len(i);
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
        gemm(&experts.gate).experts(stream, &experts.gate, halves, groups, visits, k, inner, Place::First);
        gemm(&experts.up).experts(stream, &experts.up, halves, groups, visits, k, other, Place::Next);
        // Visits of other ranks' experts have no meaning here and are not summed.
        kernels.swiglu_to_half(stream, [inner, other], visits, shape.intermediate, halves);
        gemm(&experts.down).experts(
            stream,
            &experts.down,
            halves,
            groups,
            visits,
            1,
            &groups.sums,
            Place::First,
        );
        kernels.sum_visits(stream, shape, groups, choice, rows, out);
    }

    /// Recorded work leads to memory that is no more.
    fn forget_recordings(&mut self) {
        self.recordings = Default::default();
    }

    /// Makes a piece of working memory larger where it has to be. A refusal is recorded, and `false`.
    ///
    /// Nothing is given back: that would wait for the device, which may wait for another rank.
    fn grow(&mut self, which: impl Fn(&mut Scratch) -> &mut Buffer, len: usize) -> bool {
        if which(&mut self.scratch).len >= len {
            return true;
        }
        let made = Buffer::new(self.stream.device(), len, "working memory");
        let Some(buffer) = self.stream.record(made) else { return false };
        let old = std::mem::replace(which(&mut self.scratch), buffer);
        self.scratch.outgrown.push(old);
        true
    }

    /// The same for what norms leave for products.
    fn grow_prepared(&mut self, width: usize) -> bool {
        let sizes = [decode::MOST * width / 2, decode::MOST * width / 16, decode::MOST];
        let Prepared { tokens, sums, inverse, of } = &mut self.prepared;
        for (buffer, len) in [tokens, sums, inverse].into_iter().zip(sizes) {
            if buffer.len >= len {
                continue;
            }
            let made = Buffer::new(self.stream.device(), len, "working memory");
            let Some(new) = self.stream.record(made) else { return false };
            self.scratch.outgrown.push(std::mem::replace(buffer, new));
            *of = None;
        }
        true
    }

    /// The kernels for few tokens, where some matrix is in tiles.
    fn few(&self, rows: usize) -> Option<&Decode> {
        self.decode.get().and_then(Option::as_ref).filter(|_| (1..=decode::MOST).contains(&rows))
    }

    /// The norm of `x`, plus `y` where there is a `y`, in `out` and as products of few tokens want it; the sum goes to the residual
    /// buffer. Of a single token it waits for the operation that takes it. `false`, and nothing done, where there are no such
    /// products.
    fn norm_for_products(
        &mut self,
        x: &Buffer,
        y: Option<&Buffer>,
        rows: usize,
        weight: &Weight,
        eps: f32,
        out: &Buffer,
    ) -> bool {
        self.prepared.of = None;
        let width = weight.cols;
        let scale = self.few(rows).and_then(|_| Decode::norm_scale(weight));
        // With a sum it is to take the place of `x`, which may be longer.
        let len = if y.is_some() { x.len } else { rows * width };
        let Some(scale) = scale.filter(|_| self.grow_prepared(width)) else { return false };
        if !self.grow(|scratch| &mut scratch.residual, len) {
            return false;
        }
        for buffer in [x, out].into_iter().chain(y) {
            buffer.holds(rows * width);
        }
        let norm = Waiting {
            x: x.address(),
            y: y.map_or(0, Buffer::address),
            sum: self.scratch.residual.address(),
            out: out.address(),
            weight: weight.vector(),
            width,
            eps,
            scale,
            used: false,
        };
        if rows == 1 {
            self.waiting = Some(norm);
            return true;
        }
        let Some(decode) = self.few(rows) else { return false };
        decode.add_norm(&self.stream, &norm, rows, &self.prepared);
        self.prepared.of = Some((norm.out, rows, width));
        true
    }

    /// Does what waits: stores what attention was to store, and computes a norm that has not been used or that one of these buffers is
    /// to have.
    fn settle(&mut self, buffers: &[&Buffer]) {
        if let Some((store, queries)) = self.storing.take() {
            self.ops.mla_store(&self.stream, &self.step, &store, queries);
        }
        self.settle_norm(buffers);
    }

    fn settle_norm(&mut self, buffers: &[&Buffer]) {
        let Some(norm) = self.waiting else { return };
        if norm.used && buffers.iter().all(|buffer| buffer.address() != norm.out) {
            return;
        }
        self.waiting = None;
        // Once used, the sum is there.
        let norm = if norm.used && norm.y != 0 { Waiting { x: norm.sum, y: 0, ..norm } } else { norm };
        if let Some(decode) = self.few(1) {
            decode.add_norm(&self.stream, &norm, 1, &self.prepared);
            self.prepared.of = Some((norm.out, 1, norm.width));
        }
    }

    /// The attention kernels for a shape.
    fn attention_for(&self, shape: &MlaShape) -> Option<usize> {
        let widths = attention::widths(self.stream.device(), shape)?;
        self.attention.iter().position(|known| known.widths() == widths)
    }

    /// The norm that waits, if `x` is to have it.
    fn waits_for(&self, x: &Buffer) -> Option<&Waiting> {
        self.waiting.as_ref().filter(|norm| !norm.used && norm.out == x.address())
    }

    /// Products of few tokens with matrices in tiles; `false`, and nothing done, where they are none.
    fn few_products(
        &mut self,
        w: &[&Weight],
        x: &Buffer,
        rows: usize,
        out: &[&Buffer],
        norm: Option<(&Weight, f32)>,
    ) -> bool {
        if rows != 1 || norm.is_some() || self.waits_for(x).is_none() {
            self.settle(&[x]);
        }
        if let (1, Some(decode)) = (rows, self.few(rows)) {
            let vector = self.waits_for(x).map_or(Vector::Plain(x, norm), Vector::Waiting);
            if decode.one.products(&self.stream, w, vector, out) {
                if let Some(waiting) = self.waiting.as_mut().filter(|norm| norm.out == x.address()) {
                    waiting.used = true;
                }
                return true;
            }
        }
        self.settle(&[x]);
        self.few(rows).is_some_and(|d| d.products(&self.stream, w, x, rows, out, norm, &self.prepared))
    }

    /// A layer of experts of one token whose norm waits; `false`, and nothing done, where there is none.
    fn one_moe(
        &mut self,
        moe: &decode::Moe<'_>,
        x: &Buffer,
        rows: usize,
        logits: &Buffer,
        out: &Buffer,
    ) -> bool {
        let (Some(norm), Some(decode)) = (self.waits_for(x), self.few(rows).filter(|_| rows == 1)) else {
            return false;
        };
        let working = [logits, &self.scratch.visits[0]];
        let done = decode.one.moe(&self.stream, moe, norm, working, &self.prepared.tokens, out);
        if let Some(waiting) = self.waiting.as_mut().filter(|_| done) {
            waiting.used = true;
        }
        done
    }

    /// The rotary table on the device.
    fn inv_freq(&mut self, values: &[f32]) -> Option<usize> {
        if let Some(found) = self.rotary.iter().position(|(known, _)| known == values) {
            return Some(found);
        }
        let made = Buffer::new(self.stream.device(), values.len(), "a rotary table");
        let buffer = self.stream.record(made)?;
        self.stream.write(&buffer.memory, 0, values.as_bytes());
        self.rotary.push((values.to_vec(), buffer));
        Some(self.rotary.len() - 1)
    }
}

/// What matrices of a type become.
fn stored_as(dtype: Dtype) -> Dtype {
    match storage(dtype, false) {
        Storage::Own => dtype,
        Storage::As(other) => other,
    }
}
