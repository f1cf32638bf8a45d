//! One forward pass of one rank, read top to bottom.
//!
//! Every rank runs the same lines on its share; partial sums meet in [`Communicator::all_reduce`].

use crate::Error;
use crate::batch::Batch;
use crate::comm::{Communicator, PeerStopped};
use crate::load::{FfnWeights, LayerWeights, Mlp, Weights};
use crate::mla::attention;
use crate::moe::moe;
use formats::ModelConfig;
use kernels::Backend;
use kernels::shape::BLOCK_TOKENS;
use std::ops::Range;

/// Sizes that buffers are made for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most tokens of one step.
    pub max_rows: usize,
    /// Most rows of logits of one step.
    pub max_logit_rows: usize,
    /// Blocks of the latent cache.
    pub cache_blocks: usize,
}

/// One rank of a model: weights, cache and the buffers of a step, all made before the first one.
#[derive(Debug)]
pub struct Model<B: Backend, C> {
    backend: B,
    communicator: C,
    weights: Weights<B::Weight>,
    /// One per layer: `[blocks * BLOCK_TOKENS, R + rope]`
    caches: Vec<B::Buffer>,
    buffers: Buffers<B::Buffer>,
    hidden: usize,
    eps: f32,
}

/// Activations of a step. T is the most rows of one.
#[derive(Debug)]
pub struct Buffers<T> {
    /// `[T, hidden]`: the residual stream.
    pub x: T,
    /// `[T, hidden]`: the normalised input of a part.
    pub h: T,
    /// `[T, hidden]`: a part's output, to be summed over ranks.
    pub y: T,
    /// `[T, hidden]`: the shared experts' output.
    pub shared: T,
    /// `[T, Q]`, twice: the query bottleneck and its norm.
    pub q_a: [T; 2],
    /// `[T, heads * (nope + rope)]`
    pub q: T,
    /// `[T, R + rope]`
    pub kv: T,
    /// `[T, heads * v]`
    pub attended: T,
    /// `[T, width]`
    pub gate: T,
    /// `[T, width]`
    pub up: T,
    /// `[T, E]`
    pub router_logits: T,
    /// `[T, 2 * K]`
    pub choice: T,
    /// `[logit rows, local vocab]`
    pub logits: T,
}

impl<B: Backend, C: Communicator<B>> Model<B, C> {
    /// Makes the cache and every buffer.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn new(
        backend: B,
        communicator: C,
        weights: Weights<B::Weight>,
        config: &ModelConfig,
        limits: Limits,
    ) -> Result<Self, Error> {
        let slots = limits.cache_blocks * BLOCK_TOKENS;
        let width = config.attention.kv_lora_rank + config.attention.qk_rope_head_dim;
        let caches = weights.layers.iter().map(|_| backend.zeros(slots * width)).collect::<Result<_, _>>()?;
        let buffers = Buffers::new(&backend, &weights, config, limits)?;
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        Ok(Self { backend, communicator, weights, caches, buffers, hidden, eps })
    }

    /// Vocabulary rows whose logits this rank computes.
    pub fn logit_rows(&self) -> Range<usize> {
        self.weights.logit_rows.clone()
    }

    /// Runs a step. `logits` receives `[batch.logit_rows(), local vocab]`.
    ///
    /// # Errors
    /// [`PeerStopped`] when another rank has given up.
    pub fn forward(&mut self, batch: &Batch, logits: &mut [f32]) -> Result<(), PeerStopped> {
        let Self { backend: b, communicator, weights, caches, buffers: f, hidden, eps } = self;
        let (hidden, eps, rows) = (*hidden, *eps, batch.rows());
        let spans = batch.spans();

        b.embed(&weights.embed_tokens, weights.embed_rows.start, batch.tokens(), &mut f.x);
        communicator.all_reduce(&mut f.x, rows * hidden)?;
        for (layer, cache) in weights.layers.iter().zip(caches) {
            let LayerWeights { input_layernorm, attention: a, post_attention_layernorm, ffn } = layer;
            b.rms_norm(&f.x, rows, input_layernorm, eps, &mut f.h);
            attention(b, a, &spans, rows, cache, f);
            communicator.all_reduce(&mut f.y, rows * hidden)?;
            b.add(&mut f.x, &f.y, rows, hidden);

            b.rms_norm(&f.x, rows, post_attention_layernorm, eps, &mut f.h);
            match ffn {
                FfnWeights::Dense(mlp) => swiglu(b, mlp, &f.h, rows, [&mut f.gate, &mut f.up], &mut f.y),
                FfnWeights::Moe(weights) => moe(b, weights, rows, f),
            }
            communicator.all_reduce(&mut f.y, rows * hidden)?;
            b.add(&mut f.x, &f.y, rows, hidden);
        }
        let wanted = batch.logit_rows();
        if wanted.is_empty() {
            return Ok(());
        }
        b.gather_rows(&f.x, wanted, hidden, &mut f.y);
        b.rms_norm(&f.y, wanted.len(), &weights.norm, eps, &mut f.h);
        let lm_head = weights.lm_head.as_ref().unwrap_or(&weights.embed_tokens);
        b.matmul(lm_head, &f.h, wanted.len(), &mut f.logits);
        b.read(&f.logits, 0..wanted.len() * weights.logit_rows.len(), logits);
        Ok(())
    }
}

/// `out = down(silu(gate x) * up x)`, this rank's partial sum.
pub fn swiglu<B: Backend>(
    b: &mut B,
    mlp: &Mlp<B::Weight>,
    x: &B::Buffer,
    rows: usize,
    [gate, up]: [&mut B::Buffer; 2],
    out: &mut B::Buffer,
) {
    b.matmul(&mlp.gate_proj, x, rows, gate);
    b.matmul(&mlp.up_proj, x, rows, up);
    b.swiglu(gate, up, rows, mlp.width);
    b.matmul(&mlp.down_proj, gate, rows, out);
}

impl<T> Buffers<T> {
    fn new<B: Backend<Buffer = T>>(
        backend: &B,
        weights: &Weights<B::Weight>,
        config: &ModelConfig,
        limits: Limits,
    ) -> Result<Self, Error> {
        let rows = |width: usize| backend.zeros(limits.max_rows * width);
        let hidden = config.hidden_size;
        let shapes = || weights.layers.iter().map(|layer| &layer.attention.shape);
        let width = widest(weights.layers.iter().map(|layer| match &layer.ffn {
            FfnWeights::Dense(mlp) => mlp.width,
            FfnWeights::Moe(moe) => moe.shared.as_ref().map_or(0, |mlp| mlp.width),
        }));
        let q_lora = config.attention.q_lora_rank.unwrap_or(0);
        let (experts, chosen) =
            config.moe.as_ref().map_or((0, 0), |moe| (moe.n_routed_experts, moe.num_experts_per_tok));
        Ok(Self {
            x: rows(hidden)?,
            h: rows(hidden)?,
            y: rows(hidden)?,
            shared: rows(hidden)?,
            q_a: [rows(q_lora)?, rows(q_lora)?],
            q: rows(widest(shapes().map(|s| s.q_width())))?,
            kv: rows(config.attention.kv_lora_rank + config.attention.qk_rope_head_dim)?,
            attended: rows(widest(shapes().map(|s| s.out_width())))?,
            gate: rows(width)?,
            up: rows(width)?,
            router_logits: rows(experts)?,
            choice: rows(2 * chosen)?,
            logits: backend.zeros(limits.max_logit_rows * weights.logit_rows.len())?,
        })
    }
}

fn widest(widths: impl Iterator<Item = usize>) -> usize {
    widths.max().unwrap_or(0)
}
