//! Argument structs of the operations: what does not change from step to step, and what a batch is.

use crate::Error;
use formats::config::{RopeConfig, RouterConfig};
use formats::{Shape, TensorView};
use std::ops::Range;

/// One rank's share of multi-head latent attention.
#[derive(Clone, Debug)]
pub struct MlaShape {
    /// Heads of this rank; may be 0.
    pub heads: usize,
    /// `qk_nope_head_dim`
    pub nope: usize,
    /// `qk_rope_head_dim`
    pub rope: usize,
    /// `v_head_dim`
    pub v: usize,
    /// `kv_lora_rank`
    pub kv_lora: usize,
    /// Multiplies scores before the softmax.
    pub softmax_scale: f32,
    /// Epsilon of `kv_a_layernorm`.
    pub eps: f32,
    /// Rotary table; `inv_freq` has `rope / 2` values.
    pub rotary: RopeConfig,
}

impl MlaShape {
    /// Query values of one token: `heads * (nope + rope)`, per head nope first.
    pub fn q_width(&self) -> usize {
        self.heads * (self.nope + self.rope)
    }

    /// Values of one token in the cache: `kv_lora + rope`, latent first.
    pub fn cache_width(&self) -> usize {
        self.kv_lora + self.rope
    }

    /// Attention output of one token: `heads * v`.
    pub fn out_width(&self) -> usize {
        self.heads * self.v
    }

    /// Rows of this rank's `kv_b_proj`: `heads * (nope + v)`, per head nope rows first.
    pub fn kv_b_rows(&self) -> usize {
        self.heads * (self.nope + self.v)
    }
}

/// Two forms of the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlaForm {
    /// Queries move into the latent space; nothing is expanded per head. For few new tokens.
    Absorbed,
    /// Keys and values are expanded per head. For many new tokens.
    Materialised,
}

/// A router and its experts, this rank's share.
#[derive(Clone, Debug)]
pub struct MoeShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Routed experts over all ranks.
    pub n_routed_experts: usize,
    /// Experts that each token visits.
    pub num_experts_per_tok: usize,
    /// Experts whose weights this rank holds (all of them when experts are cut by width).
    pub local_experts: Range<usize>,
    /// Width of each on this rank; may be 0.
    pub intermediate: usize,
    /// How experts are chosen.
    pub router: RouterConfig,
}

/// One scale for each matrix, from one for all or one for each.
pub(crate) fn scale_each(shape: &Shape, scales: &[f32]) -> Result<Vec<f32>, Error> {
    let [experts, ..] = dims(shape)?;
    match scales {
        [scale] if shape.dims().len() < 3 => Ok(vec![*scale; experts]),
        scales if scales.len() == experts => Ok(scales.to_vec()),
        scales => Err(Error::Scales { expected: experts, found: scales.len() }),
    }
}

/// A weight's dimensions as `[experts, rows, cols]`; those that it lacks are 1.
pub(crate) fn dims_of(view: &TensorView) -> Result<[usize; 3], Error> {
    dims(view.shape())
}

/// The same of a shape alone.
pub(crate) fn dims(shape: &Shape) -> Result<[usize; 3], Error> {
    let refusal = || Error::WeightShape {
        expected: "1 to 3 dimensions that this machine can address",
        found: shape.to_string(),
    };
    let given = shape.dims();
    let mut dims = [1; 3];
    let first = dims.len().checked_sub(given.len()).ok_or_else(refusal)?;
    for (dim, &given) in dims[first..].iter_mut().zip(given) {
        *dim = usize::try_from(given).map_err(|_| refusal())?;
    }
    Ok(dims)
}
