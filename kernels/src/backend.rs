//! The operations of one forward pass, at the level of the model, generic over where the numbers live.

use crate::Error;
use crate::shape::{MlaShape, MoeShape, Span};
use formats::TensorView;
use std::ops::Range;

/// A device and its arithmetic. One value serves one rank, on one thread.
///
/// Activations are f32, row-major, one row per token of the batch; every operation works on the first `rows` rows.
/// A product's result for one row does not depend on which other rows are in the batch, so an answer is the same
/// alone and under load. Buffers of wrong length are mistakes of the caller and panic.
pub trait Backend: Sized {
    /// A weight on the device, in the checkpoint's own type.
    type Weight;
    /// Activations or a cache on the device.
    type Buffer;

    /// Takes a weight: 1-D vectors, 2-D `[out, in]` matrices or 3-D `[experts, out, in]` stacks. Sizes may be 0.
    ///
    /// # Errors
    /// [`Error::UnsupportedType`], or the device's refusal.
    fn weight(&self, view: TensorView) -> Result<Self::Weight, Error>;

    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// The device's refusal.
    fn zeros(&self, len: usize) -> Result<Self::Buffer, Error>;

    /// Copies `values` to the start of `buffer`.
    fn write(&mut self, buffer: &mut Self::Buffer, values: &[f32]);

    /// Copies the values of `range` from `buffer`.
    fn read(&mut self, buffer: &Self::Buffer, range: Range<usize>, values: &mut [f32]);

    /// `out[t] = table[tokens[t] - first_row]`, zeros where that row is not in `table` `[rows, hidden]` (another rank's).
    fn embed(&mut self, table: &Self::Weight, first_row: usize, tokens: &[u32], out: &mut Self::Buffer);

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

    /// `out[t] = w x[t]`, `w` `[out, in]`; zeros where `in` is 0.
    fn matmul(&mut self, w: &Self::Weight, x: &Self::Buffer, rows: usize, out: &mut Self::Buffer);

    /// `gate = silu(gate) * up` over `rows` rows of `width`.
    fn swiglu(&mut self, gate: &mut Self::Buffer, up: &Self::Buffer, rows: usize, width: usize);

    /// Rotates the rope part of every head of `q` in place and stores, for every row, `[rms_norm(latent) | rotated key]`
    /// in the cache slot of its position.
    ///
    /// `q` `[T, heads * (nope + rope)]`, `kv` `[T, kv_lora + rope]` (the output of `kv_a_proj_with_mqa`), `kv_norm`
    /// `[kv_lora]`, `cache` `[blocks * BLOCK_TOKENS, kv_lora + rope]`.
    #[allow(
        clippy::too_many_arguments,
        reason = "one shape, three inputs, one batch, two outputs: nothing to fold"
    )]
    fn mla_store(
        &mut self,
        shape: &MlaShape,
        kv: &Self::Buffer,
        kv_norm: &Self::Weight,
        spans: &[Span<'_>],
        q: &mut Self::Buffer,
        cache: &mut Self::Buffer,
    );

    /// Causal attention of every row over the cached positions up to its own.
    ///
    /// `q` and `cache` as [`Backend::mla_store`] left them, `kv_b` `[heads * (nope + v), kv_lora]`, `out` `[T, heads * v]`.
    fn mla_attention(
        &mut self,
        shape: &MlaShape,
        q: &Self::Buffer,
        kv_b: &Self::Weight,
        cache: &Self::Buffer,
        spans: &[Span<'_>],
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

    /// `out[i] = x[rows[i]]`, rows of `width`.
    fn gather_rows(&mut self, x: &Self::Buffer, rows: &[usize], width: usize, out: &mut Self::Buffer);
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

/// Activations in ordinary memory: what the processor backends use, and what ranks of one process can add up.
#[derive(Debug)]
pub struct HostBuffer(Vec<f32>);

impl HostBuffer {
    /// `len` zeros. Pages are not touched until they are used.
    pub fn zeros(len: usize) -> Self {
        Self(vec![0.0; len])
    }

    /// The values.
    pub fn values(&self) -> &[f32] {
        &self.0
    }

    /// The values, to be changed.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}
