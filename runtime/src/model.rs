//! One forward pass of one rank, read top to bottom.
//!
//! Every rank runs the same lines on its share; partial sums meet in [`Communicator::all_reduce`].

use crate::Error;
use crate::batch::Batch;
use crate::comm::{Communicator, PeerStopped};
use crate::load::{FfnWeights, LayerWeights, Weights};
use crate::mla::attention;
use formats::ModelConfig;
use kernels::candidates::{Candidates, Selection};
use kernels::step::BLOCK_TOKENS;
use kernels::{Backend, MoeBuffers, Pass, StepLimits, StepRows};
use std::ops::Range;

/// One rank of a model: weights, cache and the buffers of a step, all made before the first one.
#[derive(Debug)]
pub struct Model<B: Backend, C> {
    backend: B,
    communicator: C,
    weights: Weights<B::Weight>,
    /// One per layer: `[blocks * BLOCK_TOKENS, R + rope]`
    caches: Vec<B::Cache>,
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
    /// `[T, Q]`, twice: the query bottleneck and its norm.
    pub q_a: [T; 2],
    /// `[T, heads * (nope + rope)]`
    pub q: T,
    /// `[T, R + rope]`
    pub kv: T,
    /// `[T, heads * v]`
    pub attended: T,
    /// What an MoE or dense feed-forward works with.
    pub moe: MoeBuffers<T>,
    /// `[logit rows, local vocab]`
    pub logits: T,
}

/// Why a step could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum StepFault {
    /// Another rank.
    #[error(transparent)]
    Peer(#[from] PeerStopped),
    /// This rank's device.
    #[error(transparent)]
    Device(#[from] kernels::Error),
}

impl<B: Backend, C: Communicator<B>> Model<B, C> {
    /// Makes the cache and every buffer.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn new(
        mut backend: B,
        communicator: C,
        weights: Weights<B::Weight>,
        config: &ModelConfig,
        limits: StepLimits,
    ) -> Result<Self, Error> {
        let slots = limits.cache_blocks * BLOCK_TOKENS;
        let width = config.attention.kv_lora_rank + config.attention.qk_rope_head_dim;
        let caches = weights.layers.iter().map(|_| backend.cache(slots, width)).collect::<Result<_, _>>()?;
        let buffers = Buffers::new(&backend, &weights, config, limits)?;
        backend.reserve(limits)?;
        backend.prepare_candidates(&weights.logit_rows)?;
        weights.layers.iter().try_for_each(|layer| backend.prepare_attention(&layer.attention.shape))?;
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        Ok(Self { backend, communicator, weights, caches, buffers, hidden, eps })
    }

    /// Its device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Its device, to be told something.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Vocabulary rows whose logits this rank computes.
    pub fn logit_rows(&self) -> Range<usize> {
        self.weights.logit_rows.clone()
    }

    /// Begins a step, whose logits are read afterwards. [`Model::finish`] says whether the device did it.
    ///
    /// # Errors
    /// [`StepFault::Peer`] when another rank has given up.
    pub fn forward(&mut self, batch: &Batch) -> Result<(), StepFault> {
        let step = self.backend.begin_step(batch);
        if self.backend.begin_pass(self.communicator.is_repeatable()) == Pass::Run {
            let passed = self.pass(step);
            self.backend.end_pass();
            passed?;
        }
        Ok(())
    }

    /// Copies `rows` of the last step's logits, `[rows, local vocab]`.
    pub fn read(&mut self, rows: Range<usize>, values: &mut [f32]) {
        let width = self.weights.logit_rows.len();
        self.backend.read(&self.buffers.logits, rows.start * width..rows.end * width, values);
    }

    /// Appends to `out` what rows of the last step's logits come to.
    ///
    /// # Errors
    /// [`StepFault::Device`]
    pub fn candidates(
        &mut self,
        asked: &[(usize, &Selection)],
        out: &mut Vec<Candidates>,
    ) -> Result<(), StepFault> {
        if asked.is_empty() {
            return Ok(());
        }
        let Self { backend, weights, buffers, .. } = self;
        Ok(backend.candidates(&buffers.logits, weights.logit_rows.clone(), asked, out)?)
    }

    /// Waits until the step and what was read of it are done.
    ///
    /// # Errors
    /// The device's fault.
    pub fn finish(&mut self) -> Result<(), kernels::Error> {
        self.backend.finish()
    }

    /// The operations of a step, up to the logits.
    fn pass(&mut self, step: StepRows) -> Result<(), PeerStopped> {
        let Self { backend: b, communicator, weights, caches, buffers: f, hidden, eps } = self;
        let (hidden, eps, rows) = (*hidden, *eps, step.rows);

        b.embed(&weights.embed_tokens, weights.embed_rows.start, &mut f.x);
        communicator.all_reduce(b, &mut f.x, rows * hidden)?;
        for (i, (layer, cache)) in weights.layers.iter().zip(caches).enumerate() {
            let LayerWeights { input_layernorm, attention: a, post_attention_layernorm, ffn } = layer;
            match i {
                0 => b.rms_norm(&f.x, rows, input_layernorm, eps, &mut f.h),
                // The sum that the layer before ends with.
                _ => b.add_rms_norm(&mut f.x, &f.y, rows, hidden, input_layernorm, eps, &mut f.h),
            }
            attention(b, a, rows, cache, f);
            communicator.all_reduce(b, &mut f.y, rows * hidden)?;

            b.add_rms_norm(&mut f.x, &f.y, rows, hidden, post_attention_layernorm, eps, &mut f.h);
            match ffn {
                FfnWeights::Dense(mlp) => {
                    b.mlp(mlp, &f.h, rows, [&mut f.moe.gate, &mut f.moe.up], &mut f.y);
                }
                FfnWeights::Moe(moe) => b.moe(moe, &f.h, rows, &mut f.moe, &mut f.y),
            }
            communicator.all_reduce(b, &mut f.y, rows * hidden)?;
        }
        if step.logit_rows == 0 {
            return Ok(());
        }
        b.add(&mut f.x, &f.y, rows, hidden);
        b.gather_logit_rows(&f.x, hidden, &mut f.y);
        b.rms_norm(&f.y, step.logit_rows, &weights.norm, eps, &mut f.h);
        let lm_head = weights.lm_head.as_ref().unwrap_or(&weights.embed_tokens);
        b.matmul(lm_head, &f.h, step.logit_rows, &mut f.logits);
        Ok(())
    }
}

impl<T> Buffers<T> {
    fn new<B: Backend<Buffer = T>>(
        backend: &B,
        weights: &Weights<B::Weight>,
        config: &ModelConfig,
        limits: StepLimits,
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
            q_a: [rows(q_lora)?, rows(q_lora)?],
            q: rows(widest(shapes().map(|s| s.q_width())))?,
            kv: rows(config.attention.kv_lora_rank + config.attention.qk_rope_head_dim)?,
            attended: rows(widest(shapes().map(|s| s.out_width())))?,
            moe: MoeBuffers {
                router_logits: rows(experts)?,
                choice: rows(2 * chosen)?,
                gate: rows(width)?,
                up: rows(width)?,
                shared: rows(hidden)?,
            },
            logits: backend.zeros(limits.max_logit_rows * weights.logit_rows.len())?,
        })
    }
}

fn widest(widths: impl Iterator<Item = usize>) -> usize {
    widths.max().unwrap_or(0)
}
