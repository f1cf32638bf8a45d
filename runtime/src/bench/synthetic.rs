//! Models that exist as sizes only: one rank's share, with random weights that are made on the GPU.

use crate::Error;
use crate::load::{AttentionWeights, FfnWeights, LayerWeights, QueryWeights, Weights, mla_shape};
use formats::config::{
    AttentionConfig, FfnConfig, GroupScore, LayerConfig, MoeConfig, RopeConfig, RopePairing, RouterConfig,
    ScoringFunc,
};
use formats::{Dtype, ModelConfig};
use kernels::cuda::synthetic::{Synthesis, Values};
use kernels::cuda::{Cuda, Tiling, Weight};
use kernels::shape::MoeShape;
use kernels::{ExpertWeights, MlpWeights, MoeWeights};
use std::str::FromStr;

/// A model that is known by its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyntheticModel {
    /// GLM-5: 744 B parameters, 40.8 B active for each token.
    Glm5,
}

impl FromStr for SyntheticModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "glm5" => Ok(Self::Glm5),
            _ => Err("expected glm5".to_owned()),
        }
    }
}

/// Dense layers at the start.
const DENSE_LAYERS: usize = 3;

/// The configuration of a model with some of its layers.
pub(super) fn config(model: SyntheticModel, layers: usize) -> ModelConfig {
    let SyntheticModel::Glm5 = model;
    let rope = 64;
    let ffn = |layer| match layer {
        0..DENSE_LAYERS => FfnConfig::Dense { intermediate_size: 12_288 },
        _ => FfnConfig::Moe { moe_intermediate_size: 2048, shared_intermediate_size: 2048 },
    };
    ModelConfig {
        vocab_size: 154_880,
        hidden_size: 6144,
        max_position_embeddings: 202_752,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
        attention: AttentionConfig {
            num_attention_heads: 64,
            q_lora_rank: Some(2048),
            kv_lora_rank: 512,
            qk_nope_head_dim: 192,
            qk_rope_head_dim: rope,
            v_head_dim: 256,
            softmax_scale: 1.0 / 16.0,
        },
        rope: RopeConfig {
            inv_freq: (0..rope / 2).map(|i| 1e6f32.powf(-2.0 * i as f32 / rope as f32)).collect(),
            pairing: RopePairing::Interleaved,
            attention_scaling: 1.0,
        },
        moe: Some(MoeConfig {
            n_routed_experts: 256,
            num_experts_per_tok: 8,
            router: RouterConfig {
                scoring_func: ScoringFunc::Sigmoid,
                n_group: 1,
                topk_group: 1,
                group_score: GroupScore::TopTwoSum,
                norm_topk_floor: Some(1e-20),
                routed_scaling_factor: 2.5,
            },
        }),
        indexer: None,
        layers: (0..layers).map(|layer| LayerConfig { ffn: ffn(layer), indexer: None }).collect(),
        mtp_layers: Vec::new(),
    }
}

/// Layers of a whole model.
pub(super) fn layer_count(model: SyntheticModel) -> usize {
    match model {
        SyntheticModel::Glm5 => 78,
    }
}

/// The share of one of `ranks`, in the types that Q4_K_M gives this model: half of the down projections Q6_K, `kv_a` Q8_0, the
/// output Q6_K, all other matrices Q4_K, and what the converter stores as BF16 and F32.
///
/// # Errors
/// [`Error::Option`] when the model does not divide into so many ranks; the device's refusal.
pub(super) fn weights(
    cuda: &Cuda,
    model: &ModelConfig,
    ranks: usize,
    tiling: Tiling,
) -> Result<Weights<Weight>, Error> {
    let share = |what: &str, n: usize, unit: usize| match n % (ranks * unit) {
        0 => Ok(n / ranks),
        _ => Err(Error::Option {
            option: "--rank-of",
            expected: format!("a number of ranks that divides {n} {what}, in units of {unit}"),
            found: ranks.to_string(),
        }),
    };
    let a = &model.attention;
    let heads = share("heads", a.num_attention_heads, 1)?;
    let vocab = share("vocabulary rows", model.vocab_size, 1)?;
    let mut make = Make { cuda, synthesis: Synthesis::new(cuda)?, tiling };
    let mut layers = Vec::with_capacity(model.layers.len());
    for (i, layer) in model.layers.iter().enumerate() {
        // The first and last eighths and every third between, as llama.cpp's Q4_K_M has it.
        let (n, eighth) = (model.layers.len(), model.layers.len() / 8);
        let more_bits = i < eighth || i >= n - eighth || (i - eighth) % 3 == 2;
        let down = if more_bits { Dtype::Q6_K } else { Dtype::Q4_K };
        let ffn = match layer.ffn {
            FfnConfig::Dense { intermediate_size } => FfnWeights::Dense(make.mlp(
                model.hidden_size,
                share("units of a dense layer", intermediate_size, 256)?,
                down,
            )?),
            FfnConfig::Moe { moe_intermediate_size, shared_intermediate_size } => {
                let width = share("units of an expert", moe_intermediate_size, 256)?;
                let shared = share("units of the shared expert", shared_intermediate_size, 256)?;
                FfnWeights::Moe(Box::new(make.moe(model, [width, shared], down)?))
            }
        };
        layers.push(LayerWeights {
            input_layernorm: make.norm(model.hidden_size)?,
            attention: make.attention(model, heads)?,
            post_attention_layernorm: make.norm(model.hidden_size)?,
            ffn,
        });
    }
    Ok(Weights {
        embed_tokens: make.matrix(Dtype::Q4_K, &[vocab, model.hidden_size])?,
        embed_rows: 0..vocab,
        layers,
        norm: make.norm(model.hidden_size)?,
        lm_head: Some(make.matrix(Dtype::Q6_K, &[vocab, model.hidden_size])?),
        logit_rows: 0..vocab,
    })
}

struct Make<'a> {
    cuda: &'a Cuda,
    synthesis: Synthesis,
    tiling: Tiling,
}

impl Make<'_> {
    fn matrix(&mut self, dtype: Dtype, dims: &[usize]) -> Result<Weight, Error> {
        Ok(self.synthesis.weight(self.cuda, dtype, dims, Values::Matrix, self.tiling)?)
    }

    fn norm(&mut self, width: usize) -> Result<Weight, Error> {
        Ok(self.synthesis.weight(self.cuda, Dtype::F32, &[width], Values::Norm, Tiling::Rows)?)
    }

    fn mlp(&mut self, hidden: usize, width: usize, down: Dtype) -> Result<MlpWeights<Weight>, Error> {
        Ok(MlpWeights {
            width,
            gate_proj: self.matrix(Dtype::Q4_K, &[width, hidden])?,
            up_proj: self.matrix(Dtype::Q4_K, &[width, hidden])?,
            down_proj: self.matrix(down, &[hidden, width])?,
        })
    }

    fn attention(&mut self, model: &ModelConfig, heads: usize) -> Result<AttentionWeights<Weight>, Error> {
        let (a, hidden) = (&model.attention, model.hidden_size);
        let shape = mla_shape(model, heads);
        let query = match a.q_lora_rank {
            Some(rank) => QueryWeights::LowRank {
                q_a_proj: self.matrix(Dtype::Q4_K, &[rank, hidden])?,
                q_a_layernorm: self.norm(rank)?,
                q_b_proj: self.matrix(Dtype::Q4_K, &[shape.q_width(), rank])?,
            },
            None => QueryWeights::Direct { q_proj: self.matrix(Dtype::Q4_K, &[shape.q_width(), hidden])? },
        };
        Ok(AttentionWeights {
            query,
            kv_a_proj_with_mqa: self.matrix(Dtype::Q8_0, &[shape.cache_width(), hidden])?,
            kv_a_layernorm: self.norm(shape.kv_lora)?,
            kv_b_proj: self.matrix(Dtype::BF16, &[shape.kv_b_rows(), shape.kv_lora])?,
            o_proj: self.matrix(Dtype::Q4_K, &[hidden, shape.out_width()])?,
            shape,
        })
    }

    fn moe(
        &mut self,
        model: &ModelConfig,
        [width, shared]: [usize; 2],
        down: Dtype,
    ) -> Result<MoeWeights<Weight>, Error> {
        let moe = model.moe.as_ref().expect("a model with MoE layers has their sizes");
        let (hidden, experts) = (model.hidden_size, moe.n_routed_experts);
        Ok(MoeWeights {
            shape: MoeShape {
                hidden,
                n_routed_experts: experts,
                num_experts_per_tok: moe.num_experts_per_tok,
                local_experts: 0..experts,
                intermediate: width,
                router: moe.router.clone(),
            },
            gate: self.matrix(Dtype::F32, &[experts, hidden])?,
            e_score_correction_bias: Some(self.synthesis.weight(
                self.cuda,
                Dtype::F32,
                &[experts],
                Values::Bias,
                Tiling::Rows,
            )?),
            experts: ExpertWeights {
                gate: self.matrix(Dtype::Q4_K, &[experts, width, hidden])?,
                up: self.matrix(Dtype::Q4_K, &[experts, width, hidden])?,
                down: self.matrix(down, &[experts, hidden, width])?,
            },
            shared: Some(self.mlp(hidden, shared, down)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sizes_are_a_valid_model() {
        for layers in [1, 4, layer_count(SyntheticModel::Glm5)] {
            config(SyntheticModel::Glm5, layers).validate().unwrap();
        }
    }
}
