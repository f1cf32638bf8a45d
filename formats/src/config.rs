//! `ModelConfig`: everything a runtime needs to know of a model, with no architecture names in it.
//!
//! Every field is present or an `Option`; nothing is guessed by a reader. YaRN, partial rotary, "lite" variants and
//! default gating functions are resolved by whoever writes it.

use crate::Error;
use serde::{Deserialize, Serialize};

/// A model of multi-head latent attention and, optionally, mixture-of-experts layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Rows of `embed_tokens` and `lm_head`.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Positions the model was trained for.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// True when `lm_head` is `embed_tokens` and has no tensor of its own.
    pub tie_word_embeddings: bool,
    /// Attention, the same in every layer.
    pub attention: AttentionConfig,
    /// Rotary embedding of the `qk_rope_head_dim` part of queries and keys.
    pub rope: RopeConfig,
    /// Experts and their router; `None` for a dense model.
    pub moe: Option<MoeConfig>,
    /// Sparse-attention indexer; `None` when the model has none.
    pub indexer: Option<IndexerConfig>,
    /// The trunk, in order.
    pub layers: Vec<LayerConfig>,
    /// Multi-token-prediction layers after the trunk, in order; empty when the checkpoint has none.
    pub mtp_layers: Vec<LayerConfig>,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionConfig {
    /// Heads over all ranks.
    pub num_attention_heads: usize,
    /// Width of the query bottleneck; `None` when queries are one projection (`q_proj`).
    pub q_lora_rank: Option<usize>,
    /// Width of the latent.
    pub kv_lora_rank: usize,
    /// Per head: query and key values without position.
    pub qk_nope_head_dim: usize,
    /// Per head: query values with position; the key's are shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Per head: value width.
    pub v_head_dim: usize,
    /// What scores are multiplied by before the softmax, YaRN's part included.
    pub softmax_scale: f32,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeConfig {
    /// Angle per position for each of the `qk_rope_head_dim / 2` pairs.
    pub inv_freq: Vec<f32>,
    /// Which values form a pair.
    pub pairing: RopePairing,
    /// Multiplies cos and sin (HF's name); 1 unless YaRN asks for more.
    pub attention_scaling: f32,
}

/// Which two values are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopePairing {
    /// (0,1), (2,3), ...
    Interleaved,
    /// (0,n/2), (1,n/2+1), ...
    Half,
}

/// Routed experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Routed experts per layer, over all ranks.
    pub n_routed_experts: usize,
    /// Routed experts that each token visits.
    pub num_experts_per_tok: usize,
    /// How they are chosen and weighted.
    pub router: RouterConfig,
}

/// How a token chooses its experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterConfig {
    /// What turns the gate's logits into scores.
    pub scoring_func: ScoringFunc,
    /// Expert groups; 1 means no group routing.
    pub n_group: usize,
    /// Groups that stay eligible for a token.
    pub topk_group: usize,
    /// How a group is scored; without meaning when `n_group` is 1.
    pub group_score: GroupScore,
    /// The weights of the chosen are divided by their sum plus this floor; `None`: they stay as they are.
    pub norm_topk_floor: Option<f32>,
    /// Multiplies every weight.
    pub routed_scaling_factor: f32,
}

/// Scores from logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoringFunc {
    /// Each expert alone.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

/// Score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Sum of its two best (DeepSeek-V3).
    TopTwoSum,
    /// Its best (DeepSeek-V2).
    Max,
}

/// DSA "lightning" indexer (DeepSeek-V3.2).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexerConfig {
    /// Indexer heads.
    pub index_n_heads: usize,
    /// Width of each.
    pub index_head_dim: usize,
    /// Positions a query may attend to.
    pub index_topk: usize,
    /// Pairing of the indexer's own rotary part, its first `qk_rope_head_dim` values.
    pub pairing: RopePairing,
    /// Epsilon of the LayerNorm on its keys.
    pub k_norm_eps: f32,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerConfig {
    /// The feed-forward part.
    pub ffn: FfnConfig,
    /// What the indexer does here; `None` in a model without one.
    pub indexer: Option<IndexerRole>,
}

/// The feed-forward part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FfnConfig {
    /// One SwiGLU.
    Dense {
        /// Its width over all ranks.
        intermediate_size: usize,
    },
    /// Routed experts plus a shared one.
    Moe {
        /// Width of each routed expert over all ranks.
        moe_intermediate_size: usize,
        /// Width of all shared experts together; 0 for none.
        shared_intermediate_size: usize,
    },
}

/// What the indexer does in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexerRole {
    /// Selects positions with its own weights.
    Full,
    /// Reuses the selection of the last full layer before it.
    Shared,
}

/// Sizes beyond this are no model of today; it keeps every product of two of them inside 64 bits.
const MAX_SIZE: usize = 1 << 31;
/// llama.cpp's `LLAMA_MAX_LAYERS`.
const MAX_LAYERS: usize = 512;

impl ModelConfig {
    /// Checks every field against its range and the others.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field, what was expected and what was found.
    pub fn validate(&self) -> Result<(), Error> {
        let a = &self.attention;
        for (field, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("attention.num_attention_heads", a.num_attention_heads),
            ("attention.q_lora_rank", a.q_lora_rank.unwrap_or(1)),
            ("attention.kv_lora_rank", a.kv_lora_rank),
            ("attention.qk_nope_head_dim", a.qk_nope_head_dim),
            ("attention.qk_rope_head_dim", a.qk_rope_head_dim),
            ("attention.v_head_dim", a.v_head_dim),
        ] {
            positive(field, value)?;
        }
        check(
            "rms_norm_eps",
            self.rms_norm_eps >= 0.0 && self.rms_norm_eps < 1.0,
            "0 to 1",
            self.rms_norm_eps,
        )?;
        check(
            "attention.softmax_scale",
            positive_finite(a.softmax_scale),
            "a finite number > 0",
            a.softmax_scale,
        )?;
        let pairs = a.qk_rope_head_dim / 2;
        check(
            "attention.qk_rope_head_dim",
            a.qk_rope_head_dim.is_multiple_of(2),
            "an even number",
            a.qk_rope_head_dim,
        )?;
        check(
            "rope.inv_freq",
            self.rope.inv_freq.len() == pairs,
            &format!("{pairs} values, one for each pair"),
            self.rope.inv_freq.len(),
        )?;
        check(
            "rope.inv_freq",
            self.rope.inv_freq.iter().all(|f| f.is_finite()),
            "finite values",
            "NaN or infinity",
        )?;
        check(
            "rope.attention_scaling",
            positive_finite(self.rope.attention_scaling),
            "a finite number > 0",
            self.rope.attention_scaling,
        )?;
        let layers = self.layers.len() + self.mtp_layers.len();
        check("layers", !self.layers.is_empty() && layers <= MAX_LAYERS, "1 to 512 layers", layers)?;
        if let Some(moe) = &self.moe {
            moe.validate()?;
        }
        if let Some(indexer) = &self.indexer {
            positive("indexer.index_n_heads", indexer.index_n_heads)?;
            positive("indexer.index_head_dim", indexer.index_head_dim)?;
            positive("indexer.index_topk", indexer.index_topk)?;
            check(
                "indexer.index_head_dim",
                indexer.index_head_dim >= a.qk_rope_head_dim,
                &format!("at least {}, the width that is rotated", a.qk_rope_head_dim),
                indexer.index_head_dim,
            )?;
            check(
                "indexer.k_norm_eps",
                indexer.k_norm_eps >= 0.0 && indexer.k_norm_eps < 1.0,
                "0 to 1",
                indexer.k_norm_eps,
            )?;
        }
        for (layer, config) in self.layers.iter().chain(&self.mtp_layers).enumerate() {
            config.validate(layer, self)?;
        }
        check(
            "layers[0].indexer",
            self.layers[0].indexer != Some(IndexerRole::Shared),
            "full: there is no earlier selection to share",
            "shared",
        )
    }

    /// Trunk and MTP layers in the order of their indices.
    pub fn all_layers(&self) -> impl Iterator<Item = &LayerConfig> {
        self.layers.iter().chain(&self.mtp_layers)
    }
}

impl MoeConfig {
    fn validate(&self) -> Result<(), Error> {
        let r = &self.router;
        positive("moe.n_routed_experts", self.n_routed_experts)?;
        positive("moe.num_experts_per_tok", self.num_experts_per_tok)?;
        positive("moe.router.n_group", r.n_group)?;
        positive("moe.router.topk_group", r.topk_group)?;
        check(
            "moe.router.n_group",
            self.n_routed_experts.is_multiple_of(r.n_group),
            &format!("a divisor of {} experts", self.n_routed_experts),
            r.n_group,
        )?;
        let has_two = self.n_routed_experts / r.n_group >= 2;
        check(
            "moe.router.n_group",
            r.n_group == 1 || r.group_score != GroupScore::TopTwoSum || has_two,
            &format!(
                "groups of at least two of the {} experts, whose scores are added",
                self.n_routed_experts
            ),
            r.n_group,
        )?;
        let groups = format!("at most the {} groups", r.n_group);
        check("moe.router.topk_group", r.topk_group <= r.n_group, &groups, r.topk_group)?;
        let eligible = self.n_routed_experts / r.n_group * r.topk_group;
        check(
            "moe.num_experts_per_tok",
            self.num_experts_per_tok <= eligible,
            &format!("at most the {eligible} eligible experts"),
            self.num_experts_per_tok,
        )?;
        let floor = r.norm_topk_floor.unwrap_or(0.0);
        check("moe.router.norm_topk_floor", (0.0..1.0).contains(&floor), "0 to 1", floor)?;
        check(
            "moe.router.routed_scaling_factor",
            r.routed_scaling_factor.is_finite(),
            "a finite number",
            r.routed_scaling_factor,
        )
    }
}

impl LayerConfig {
    fn validate(&self, layer: usize, model: &ModelConfig) -> Result<(), Error> {
        let field = |name: &str| format!("layers[{layer}].{name}");
        match self.ffn {
            FfnConfig::Dense { intermediate_size } => {
                positive(&field("ffn.intermediate_size"), intermediate_size)?
            }
            FfnConfig::Moe { moe_intermediate_size, shared_intermediate_size } => {
                positive(&field("ffn.moe_intermediate_size"), moe_intermediate_size)?;
                check(
                    &field("ffn.shared_intermediate_size"),
                    shared_intermediate_size <= MAX_SIZE,
                    "at most 2^31",
                    shared_intermediate_size,
                )?;
                check(&field("ffn"), model.moe.is_some(), "a `moe` section in the model", "none")?;
            }
        }
        check(
            &field("indexer"),
            self.indexer.is_none() || model.indexer.is_some(),
            "an `indexer` section in the model",
            "none",
        )
    }
}

fn positive_finite(value: f32) -> bool {
    value > 0.0 && value.is_finite()
}

fn positive(field: &str, value: usize) -> Result<(), Error> {
    check(field, (1..=MAX_SIZE).contains(&value), "1 to 2^31", value)
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "numbers and texts alike, and nothing is formatted while all is well"
)]
fn check(field: &str, holds: bool, expected: &str, found: impl ToString) -> Result<(), Error> {
    if holds {
        return Ok(());
    }
    Err(Error::Config { field: field.to_owned(), expected: expected.to_owned(), found: found.to_string() })
}
