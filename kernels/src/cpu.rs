//! The backend for processors.
//!
//! Weights stay in the checkpoint's blocks, which are decoded in pieces that fit the cache and multiplied with every row of
//! the batch while they are there. Activations and sums are f32. Hot loops are written once over arrays of lanes and
//! compiled for several instruction sets; the fastest that the processor has is chosen when the backend is made.

mod attention;
mod blend;
mod dots;
mod elementwise;
mod experts;
mod integers;
mod isa;
mod lanes;
mod pool;
mod product;
mod rotary;
mod rounded;
mod router;
mod rows;
mod upper;
mod weight;
mod workers;

pub use isa::Isa;
pub use weight::Weight;

use crate::backend::{StepLimits, StepRows};
use crate::shape::{MlaShape, MoeShape};
use crate::step::Step;
use crate::{Backend, Error, ExpertWeights, HostBuffer, MlpWeights};
use attention::Attention;
use elementwise::{RmsNorm, SwiGlu};
use formats::TensorView;
use isa::Proven;
use product::{BATCH, Input, Job, Onto, Product};
use rounded::Activations;
use rows::Order;
use std::ops::Range;
use workers::{Workers, grown};

/// A number of threads of this machine.
///
/// All working memory belongs to the backend and only grows: with one thread, a step no larger than one before allocates
/// nothing.
#[derive(Debug)]
pub struct Cpu {
    isa: Proven,
    workers: Workers,
    step: Step,
    /// A product before its rows are put together.
    tiles: Vec<f32>,
    /// What goes into a product.
    activations: Activations,
    /// A decoded 1-D weight.
    vector: Vec<f32>,
    angles: rotary::Angles,
    attention: attention::Buffers,
    experts: experts::Buffers,
}

impl Cpu {
    /// A backend with `threads` threads of its own; with one, all work is done by the caller.
    ///
    /// # Errors
    /// [`Error::Threads`] when `threads` is 0 or the system starts no more.
    pub fn new(threads: usize) -> Result<Self, Error> {
        Self::with(Proven::best(), threads)
    }

    /// The same with an instruction set of choice.
    ///
    /// # Errors
    /// [`Error::Isa`] when the processor lacks it; those of [`Cpu::new`].
    pub fn with_isa(isa: Isa, threads: usize) -> Result<Self, Error> {
        Self::with(Proven::new(isa).ok_or(Error::Isa { isa })?, threads)
    }

    /// A weight of the parts that several ranks have of it, each cut along dimension `axis`, in the order of ranks; `scales` as in
    /// [`Backend::scaled_weight`], none of them being 1.
    ///
    /// # Errors
    /// Those of [`Backend::scaled_weight`], and [`Error::WeightShape`] when the parts are no parts of one weight.
    ///
    /// # Panics
    /// When there is no part, or it has fewer dimensions.
    pub fn joined_weight(
        &self,
        parts: Vec<TensorView>,
        axis: usize,
        scales: &[f32],
    ) -> Result<Weight, Error> {
        Weight::joined(parts, axis, scales)
    }

    fn with(isa: Proven, threads: usize) -> Result<Self, Error> {
        Ok(Self {
            isa,
            workers: Workers::new(threads)?,
            step: Step::default(),
            tiles: Vec::new(),
            activations: Activations::default(),
            vector: Vec::new(),
            angles: rotary::Angles::default(),
            attention: attention::Buffers::default(),
            experts: experts::Buffers::default(),
        })
    }
}

impl Cpu {
    /// `out` `[rows, w.rows]`
    fn product(&mut self, w: &Weight, x: &[f32], rows: usize, out: &mut [f32]) {
        let Self { isa, workers, tiles, activations, .. } = self;
        let x = Input::new(*isa, workers, w, x, rows, activations);
        product(w, x, rows, &[all(rows)]).rows(*isa, workers, tiles, out);
    }

    /// The same of two weights.
    fn product_pair(&mut self, w: [&Weight; 2], x: &[f32], rows: usize, [first, second]: [&mut [f32]; 2]) {
        self.product(w[0], x, rows, first);
        if w[1].rounding() != w[0].rounding() {
            return self.product(w[1], x, rows, second);
        }
        let Self { isa, workers, tiles, activations, .. } = self;
        let x = Input::again(w[1], x, activations);
        product(w[1], x, rows, &[all(rows)]).rows(*isa, workers, tiles, second);
    }

    /// `gate = silu(gate) * up`, rows of `width`.
    fn gated(&mut self, gate: &mut [f32], up: &[f32], width: usize) {
        // An exponential is worth about eight multiply-adds.
        let (isa, work) = (self.isa, gate.len() * 8);
        self.workers.chunks(gate, width.max(1), work, |t, gate, _| {
            isa.run(SwiGlu { up: &up[t * width..][..width] }, gate);
        });
    }
}

impl Backend for Cpu {
    type Weight = Weight;
    type Buffer = HostBuffer;
    type Cache = HostBuffer;

    fn weight(&self, view: TensorView) -> Result<Weight, Error> {
        Weight::new(view)
    }

    fn scaled_weight(&self, view: TensorView, scales: &[f32]) -> Result<Weight, Error> {
        Weight::scaled(view, scales)
    }

    crate::backend::in_host_memory!();

    fn embed(&mut self, table: &Weight, first_row: usize, out: &mut HostBuffer) {
        let tokens = self.step.tokens();
        let (isa, len) = (self.isa, tokens.len() * table.cols);
        self.workers.chunks(&mut out.values_mut()[..len], table.cols, len, |t, out, _| {
            match (tokens[t] as usize).checked_sub(first_row) {
                Some(row) if row < table.rows => table.decode(isa, row, 0..table.cols, out),
                _ => out.fill(0.0),
            }
        });
    }

    fn rms_norm(&mut self, x: &HostBuffer, rows: usize, weight: &Weight, eps: f32, out: &mut HostBuffer) {
        let (isa, width) = (self.isa, weight.cols);
        let weight = decoded(&mut self.vector, isa, weight);
        let x = &x.values()[..rows * width];
        self.workers.chunks(&mut out.values_mut()[..rows * width], width, rows * width, |t, out, _| {
            isa.run(RmsNorm { x: &x[t * width..][..width], weight, eps }, out);
        });
    }

    fn add(&mut self, x: &mut HostBuffer, y: &HostBuffer, rows: usize, width: usize) {
        let y = &y.values()[..rows * width];
        self.workers.chunks(&mut x.values_mut()[..rows * width], width, rows * width, |t, x, _| {
            for (x, y) in x.iter_mut().zip(&y[t * width..]) {
                *x += y;
            }
        });
    }

    fn matmul(&mut self, w: &Weight, x: &HostBuffer, rows: usize, out: &mut HostBuffer) {
        for rows in pieces(rows) {
            let x = &x.values()[rows.start * w.cols..rows.end * w.cols];
            self.product(w, x, rows.len(), &mut out.values_mut()[rows.start * w.rows..rows.end * w.rows]);
        }
    }

    fn matmul_pair(&mut self, w: [&Weight; 2], x: &HostBuffer, rows: usize, out: [&mut HostBuffer; 2]) {
        let [first, second] = out.map(HostBuffer::values_mut);
        for rows in pieces(rows) {
            let x = &x.values()[rows.start * w[0].cols..rows.end * w[0].cols];
            let first = &mut first[rows.start * w[0].rows..rows.end * w[0].rows];
            let second = &mut second[rows.start * w[1].rows..rows.end * w[1].rows];
            self.product_pair(w, x, rows.len(), [first, second]);
        }
    }

    fn mlp(
        &mut self,
        mlp: &MlpWeights<Weight>,
        x: &HostBuffer,
        rows: usize,
        scratch: [&mut HostBuffer; 2],
        out: &mut HostBuffer,
    ) {
        let [gate, up] = scratch.map(HostBuffer::values_mut);
        let (hidden, width) = (mlp.down_proj.rows, mlp.width);
        for rows in pieces(rows) {
            let x = &x.values()[rows.start * hidden..rows.end * hidden];
            let (gate, up) = (&mut gate[..rows.len() * width], &mut up[..rows.len() * width]);
            self.product_pair([&mlp.gate_proj, &mlp.up_proj], x, rows.len(), [gate, up]);
            self.gated(gate, up, width);
            let out = &mut out.values_mut()[rows.start * hidden..rows.end * hidden];
            self.product(&mlp.down_proj, gate, rows.len(), out);
        }
    }

    fn swiglu(&mut self, gate: &mut HostBuffer, up: &HostBuffer, rows: usize, width: usize) {
        let len = rows * width;
        self.gated(&mut gate.values_mut()[..len], &up.values()[..len], width);
    }

    fn mla_store(
        &mut self,
        shape: &MlaShape,
        kv: &HostBuffer,
        kv_norm: &Weight,
        q: &mut HostBuffer,
        cache: &mut HostBuffer,
    ) {
        let kv_norm = decoded(&mut self.vector, self.isa, kv_norm);
        let (kv, q, cache) = (kv.values(), q.values_mut(), cache.values_mut());
        for span in self.step.spans() {
            rotary::store(self.isa, shape, kv, kv_norm, &span, &mut self.angles, q, cache);
        }
    }

    fn mla_attention(
        &mut self,
        shape: &MlaShape,
        q: &HostBuffer,
        kv_b: &Weight,
        cache: &HostBuffer,
        out: &mut HostBuffer,
    ) {
        let attention = Attention { shape, q: q.values(), kv_b, cache: cache.values(), step: &self.step };
        attention.run(self.isa, &self.workers, &mut self.attention, out.values_mut());
    }

    fn route(
        &mut self,
        shape: &MoeShape,
        logits: &HostBuffer,
        bias: Option<&Weight>,
        rows: usize,
        choice: &mut HostBuffer,
    ) {
        let (e, k) = (shape.n_routed_experts, shape.num_experts_per_tok);
        let bias = bias.map(|bias| decoded(&mut self.vector, self.isa, bias));
        let logits = &logits.values()[..rows * e];
        // Every choice scans the experts that are left.
        let work = rows * e * (k + 8);
        self.workers.chunks(&mut choice.values_mut()[..rows * 2 * k], 2 * k, work, |t, choice, scratch| {
            router::route(shape, &logits[t * e..][..e], bias, &mut scratch.router, choice);
        });
    }

    fn experts(
        &mut self,
        shape: &MoeShape,
        experts: &ExpertWeights<Weight>,
        x: &HostBuffer,
        choice: &HostBuffer,
        rows: usize,
        out: &mut HostBuffer,
    ) {
        let (x, choice) = (x.values(), choice.values());
        let out = &mut out.values_mut()[..rows * shape.hidden];
        experts::experts(self.isa, &self.workers, &mut self.experts, shape, experts, x, choice, rows, out);
    }

    fn gather_logit_rows(&mut self, x: &HostBuffer, width: usize, out: &mut HostBuffer) {
        let x = x.values();
        for (i, &row) in self.step.logit_rows().iter().enumerate() {
            out.values_mut()[i * width..][..width].copy_from_slice(&x[row * width..][..width]);
        }
    }
}

/// The product of one matrix with `rows` rows, which are `jobs`.
fn product<'a>(w: &'a Weight, x: Input<'a>, rows: usize, jobs: &'a [Job; 1]) -> Product<'a> {
    Product { w, x, jobs, out_rows: rows, outputs: Order::Same, factors: None, onto: Onto::Zeros }
}

/// Rows that are worked on one after the other: what lies between the products of a prompt stays small, and each weight is decoded
/// as often as without.
fn pieces(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(BATCH).map(move |start| start..rows.min(start + BATCH))
}

/// All rows meet the only matrix.
fn all(rows: usize) -> Job {
    Job { expert: 0, start: 0, len: rows }
}

/// The values of a 1-D weight.
fn decoded<'a>(vector: &'a mut Vec<f32>, isa: Proven, weight: &Weight) -> &'a [f32] {
    let vector = grown(vector, weight.cols);
    weight.decode(isa, 0, 0..weight.cols, vector);
    vector
}
