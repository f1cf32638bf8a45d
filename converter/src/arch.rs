//! GGUF metadata to [`ModelConfig`]: the only place where an architecture has a name.
//!
//! `TABLE` has one row for each architecture; what differs between them is a member of the row, and what does not is read
//! the same way for all. Keys and defaults: llama.cpp b11434, `src/llama-model.cpp` and `src/models/{glm-dsa,deepseek2,
//! deepseek32}.cpp`. A default is used only where llama.cpp has the same one; any other absent key is an error that names it.

mod fields;
mod keys;
mod rope;

use crate::Error;
use crate::native::{self, Need};
use formats::config::{
    AttentionConfig, FfnConfig, GroupScore, IndexerConfig, IndexerRole, LayerConfig, MoeConfig, RopePairing,
    RouterConfig, ScoringFunc,
};
use formats::gguf::GgufSet;
use formats::name::LayerRole;
use formats::{LayerIdx, ModelConfig, TensorName};
use keys::Keys;
use std::ops::Range;

/// What one architecture does in its own way.
struct Architecture {
    /// `general.architecture`
    name: &'static str,
    /// Models that have it, for messages.
    models: &'static str,
    heads: Heads,
    queries: Queries,
    gating: Gating,
    indexer: Option<Indexer>,
}

/// Where the widths of a head are.
enum Heads {
    /// In `attention.{key,value}_length_mla`.
    Mla,
    /// There, or, in files with a joined `attn_kv_b`, in `attention.{key,value}_length`.
    MlaOrJoined,
}

/// How queries are projected.
enum Queries {
    /// Through `q_a` and `q_b`.
    Bottleneck,
    /// The same, or directly where there is no `attention.q_lora_rank`.
    Either,
}

/// The scoring function of files without `expert_gating_func`.
enum Gating {
    Required,
    Default(ScoringFunc),
    /// Sigmoid for GLM-4.7-Flash, which is known by its layers and vocabulary; otherwise softmax.
    SigmoidForGlmFlash,
}

struct Indexer {
    pairing: RopePairing,
    roles: IndexerRoles,
}

/// Which trunk layers have an indexer of their own.
enum IndexerRoles {
    All,
    /// Those that `attention.indexer.types` names; without the key all, or GLM-5.2's pattern in models of its context length.
    Listed,
}

const TABLE: &[Architecture] = &[
    Architecture {
        name: "glm-dsa",
        models: "GLM-5, 5.1, 5.2",
        heads: Heads::Mla,
        queries: Queries::Bottleneck,
        gating: Gating::Default(ScoringFunc::Sigmoid),
        indexer: Some(Indexer { pairing: RopePairing::Interleaved, roles: IndexerRoles::Listed }),
    },
    Architecture {
        name: "deepseek2",
        models: "DeepSeek-V2, V2-Lite, V3, R1, Kimi K2, GLM-4.7-Flash",
        heads: Heads::MlaOrJoined,
        queries: Queries::Either,
        gating: Gating::SigmoidForGlmFlash,
        indexer: None,
    },
    Architecture {
        name: "deepseek32",
        models: "DeepSeek-V3.2",
        heads: Heads::Mla,
        queries: Queries::Bottleneck,
        gating: Gating::Required,
        indexer: Some(Indexer { pairing: RopePairing::Half, roles: IndexerRoles::All }),
    },
];

/// llama.cpp's `LLAMA_MAX_LAYERS`.
const MAX_BLOCKS: usize = 512;
/// Far beyond the 64 of every published model; a table of frequencies is made of this size.
const MAX_ROPE: usize = 1 << 16;
/// HF's epsilon of the indexer's LayerNorm; GGUF has no key for it.
const INDEXER_K_NORM_EPS: f32 = 1e-6;
/// What HF adds to the sum of the chosen experts' weights.
const NORM_TOPK_FLOOR: f32 = 1e-20;
/// GLM-5.2 is the first model of this context length, and the first whose layers share selections.
const GLM_52_CONTEXT: usize = 1 << 20;

/// A model as its GGUF files describe it.
#[derive(Clone, Debug)]
pub struct Model {
    /// `general.name`, or the file's name.
    pub name: String,
    /// `general.architecture`
    pub architecture: &'static str,
    /// Everything a runtime needs to know.
    pub config: ModelConfig,
    /// Blocks that the metadata counts: trunk and MTP layers.
    pub block_count: usize,
    /// MTP layers that are declared but not usable, and why.
    pub unused_mtp: Option<(Range<usize>, String)>,
}

/// Reads the model's configuration from its metadata, and from which tensors are there where the metadata does not say.
///
/// # Errors
/// [`Error::Architecture`], or an error naming the file and the key or tensor.
pub fn describe(set: &GgufSet) -> Result<Model, Error> {
    let architecture = find(set)?;
    let keys = Keys::new(set, architecture.name);
    let vocab_size = keys.vocab_size()?;
    let block_count = keys.required("block_count")?;
    if block_count > MAX_BLOCKS {
        return Err(keys.refuse("block_count", format!("at most {MAX_BLOCKS}"), block_count.to_string()));
    }
    let declared_mtp = keys.optional("nextn_predict_layers")?.unwrap_or(0);
    if declared_mtp >= block_count {
        let expected = format!("fewer than block_count ({block_count})");
        return Err(keys.refuse("nextn_predict_layers", expected, declared_mtp.to_string()));
    }
    let trunk = block_count - declared_mtp;
    let hidden_size = keys.required("embedding_length")?;
    let context = keys.required("context_length")?;
    let attention = attention(architecture, &keys, set)?;
    let rope = rope::rope(&keys, attention.config.qk_rope_head_dim, context)?;
    if keys.optional("expert_count")?.unwrap_or(0) == 0
        && (0..block_count).any(|layer| has(set, layer, LayerRole::Gate))
    {
        let found = "no such key or 0, while the file has routers; convert the original model again";
        return Err(keys.refuse("expert_count", "the number of experts", found));
    }
    let ffns = ffns(&keys, block_count)?;
    let moe = moe(architecture, &keys, set, block_count, vocab_size)?;
    let indexer = architecture.indexer.as_ref().map(|rule| indexer(rule, &keys)).transpose()?;
    let roles = match &architecture.indexer {
        Some(rule) => indexer_roles(rule, &keys, trunk, context)?,
        None => vec![None; trunk],
    };
    let layers =
        ffns[..trunk].iter().zip(roles).map(|(&ffn, indexer)| LayerConfig { ffn, indexer }).collect();
    let mut config = ModelConfig {
        vocab_size,
        hidden_size,
        max_position_embeddings: context,
        rms_norm_eps: rms_norm_eps(&keys)?,
        tie_word_embeddings: set.info(&TensorName::Model(formats::name::ModelRole::LmHead).gguf()).is_none(),
        attention: AttentionConfig {
            softmax_scale: (attention.base_scale * rope.softmax_factor) as f32,
            ..attention.config
        },
        rope: rope.config,
        moe,
        indexer,
        layers,
        mtp_layers: Vec::new(),
    };
    let by_key = |fault| fields::by_key(fault, &keys, set.path());
    config.validate().map_err(by_key)?;
    let unused_mtp = add_mtp_layers(&mut config, set, &ffns[trunk..])?;
    config.validate().map_err(by_key)?;
    Ok(Model { name: name(set), architecture: architecture.name, config, block_count, unused_mtp })
}

/// Added to a mean of squares: 0 or less can divide by nothing, and 1 or more is no small number.
fn rms_norm_eps(keys: &Keys<'_>) -> Result<f32, Error> {
    const KEY: &str = "attention.layer_norm_rms_epsilon";
    match keys.required_f32(KEY)? {
        eps if eps > 0.0 && eps < 1.0 => Ok(eps),
        eps => Err(keys.refuse(KEY, "a number between 0 and 1", eps.to_string())),
    }
}

fn find(set: &GgufSet) -> Result<&'static Architecture, Error> {
    const KEY: &str = "general.architecture";
    let found = set.metadata().str(KEY).map_err(|e| e.in_file(set.path()))?;
    let Some(found) = found else {
        return Err(Error::key(
            set.path(),
            KEY,
            "the model's architecture",
            "no such key; convert the original model again",
        ));
    };
    TABLE.iter().find(|row| row.name == found).ok_or_else(|| Error::Architecture {
        path: set.path().to_owned(),
        found: found.to_owned(),
        supported: TABLE
            .iter()
            .map(|row| format!("{} ({})", row.name, row.models))
            .collect::<Vec<_>>()
            .join(", "),
    })
}

fn name(set: &GgufSet) -> String {
    if let Some(name) = set.metadata().value("general.name").and_then(|v| v.as_str())
        && !name.trim().is_empty()
    {
        return name.to_owned();
    }
    let stem = set.path().file_stem().unwrap_or_default().to_string_lossy().into_owned();
    match stem.split_once("-00001-of-") {
        Some((name, _)) => name.to_owned(),
        None => stem,
    }
}

struct Attention {
    config: AttentionConfig,
    /// 1 / sqrt(nope + rope), before YaRN's part.
    base_scale: f64,
}

fn attention(architecture: &Architecture, keys: &Keys<'_>, set: &GgufSet) -> Result<Attention, Error> {
    let heads = keys.uniform("attention.head_count")?;
    let mla = (
        keys.optional("attention.key_length_mla")?.unwrap_or(0),
        keys.optional("attention.value_length_mla")?.unwrap_or(0),
    );
    let (key_name, value_name) = match architecture.heads {
        Heads::MlaOrJoined if mla == (0, 0) => ("attention.key_length", "attention.value_length"),
        Heads::Mla | Heads::MlaOrJoined => ("attention.key_length_mla", "attention.value_length_mla"),
    };
    let (key_length, v_head_dim) = (keys.required(key_name)?, keys.required(value_name)?);
    let rope = keys.required("rope.dimension_count")?;
    if rope > MAX_ROPE {
        return Err(keys.refuse("rope.dimension_count", format!("at most {MAX_ROPE}"), rope.to_string()));
    }
    let Some(nope) = key_length.checked_sub(rope).filter(|&nope| nope > 0) else {
        return Err(keys.refuse(
            key_name,
            format!("more than rope.dimension_count ({rope})"),
            key_length.to_string(),
        ));
    };
    let q_lora_rank = match architecture.queries {
        Queries::Bottleneck => Some(keys.required("attention.q_lora_rank")?),
        Queries::Either => match keys.optional("attention.q_lora_rank")?.filter(|&rank| rank > 0) {
            None if has(set, 0, LayerRole::QAProj) => Some(keys.required("attention.q_lora_rank")?),
            rank => rank,
        },
    };
    let config = AttentionConfig {
        num_attention_heads: heads,
        q_lora_rank,
        kv_lora_rank: keys.required("attention.kv_lora_rank")?,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: rope,
        v_head_dim,
        softmax_scale: 0.0,
    };
    Ok(Attention { config, base_scale: (key_length as f64).powf(-0.5) })
}

/// The feed-forward part of all blocks, MTP layers included.
fn ffns(keys: &Keys<'_>, block_count: usize) -> Result<Vec<FfnConfig>, Error> {
    let dense_layers = match keys.optional("expert_count")?.unwrap_or(0) {
        0 => block_count,
        _ => keys.optional("leading_dense_block_count")?.unwrap_or(0).min(block_count),
    };
    let mut ffns = Vec::with_capacity(block_count);
    if dense_layers > 0 {
        let widths = keys.per_layer("feed_forward_length", block_count)?;
        ffns.extend(
            widths[..dense_layers].iter().map(|&intermediate_size| FfnConfig::Dense { intermediate_size }),
        );
    }
    if dense_layers < block_count {
        let widths = keys.per_layer("expert_feed_forward_length", block_count)?;
        let shared = keys.required_or_zero("expert_shared_count")?;
        for &width in &widths[dense_layers..] {
            ffns.push(FfnConfig::Moe {
                moe_intermediate_size: width,
                shared_intermediate_size: width.checked_mul(shared).ok_or_else(|| {
                    keys.refuse("expert_shared_count", "a product that fits 64 bits", shared.to_string())
                })?,
            });
        }
    }
    Ok(ffns)
}

fn moe(
    architecture: &Architecture,
    keys: &Keys<'_>,
    set: &GgufSet,
    block_count: usize,
    vocab_size: usize,
) -> Result<Option<MoeConfig>, Error> {
    let n_routed_experts = keys.optional("expert_count")?.unwrap_or(0);
    if n_routed_experts == 0 {
        return Ok(None);
    }
    let scoring_func = match (keys.optional("expert_gating_func")?.unwrap_or(0), &architecture.gating) {
        (1, _) => ScoringFunc::Softmax,
        (2, _) => ScoringFunc::Sigmoid,
        (0, Gating::Default(scoring)) => *scoring,
        (0, Gating::SigmoidForGlmFlash) if matches!(block_count, 47 | 48) && vocab_size == 154_880 => {
            ScoringFunc::Sigmoid
        }
        // A bias per expert is what sigmoid routers have: softmax would be a silent guess.
        (0, Gating::SigmoidForGlmFlash)
            if (0..block_count).any(|layer| has(set, layer, LayerRole::EScoreCorrectionBias)) =>
        {
            let expected =
                "1 (softmax) or 2 (sigmoid), because the routers have a bias for each expert (exp_probs_b)";
            return Err(keys.refuse("expert_gating_func", expected, "no such key"));
        }
        (0, Gating::SigmoidForGlmFlash) => ScoringFunc::Softmax,
        (found, _) => {
            let found = match found {
                0 => "none".to_owned(),
                3 => "3 (softmax over the chosen)".to_owned(),
                4 => "4 (square root of softplus)".to_owned(),
                n => n.to_string(),
            };
            return Err(keys.refuse("expert_gating_func", "1 (softmax) or 2 (sigmoid)", found));
        }
    };
    let n_group = keys.optional("expert_group_count")?.unwrap_or(0).max(1);
    let topk_group = match n_group {
        1 => 1,
        _ => keys.required("expert_group_used_count")?,
    };
    let norm_topk = keys.optional_bool("expert_weights_norm")?.unwrap_or(false);
    let scale = keys.optional_f32("expert_weights_scale")?.unwrap_or(0.0);
    if scale < 0.0 {
        return Err(keys.refuse("expert_weights_scale", "a number of at least 0", scale.to_string()));
    }
    Ok(Some(MoeConfig {
        n_routed_experts,
        num_experts_per_tok: keys.uniform("expert_used_count")?,
        router: RouterConfig {
            scoring_func,
            n_group,
            topk_group,
            group_score: match scoring_func {
                ScoringFunc::Sigmoid => GroupScore::TopTwoSum,
                ScoringFunc::Softmax => GroupScore::Max,
            },
            norm_topk_floor: norm_topk.then_some(NORM_TOPK_FLOOR),
            routed_scaling_factor: if scale == 0.0 { 1.0 } else { scale },
        },
    }))
}

fn indexer(rule: &Indexer, keys: &Keys<'_>) -> Result<IndexerConfig, Error> {
    Ok(IndexerConfig {
        index_n_heads: keys.required("attention.indexer.head_count")?,
        index_head_dim: keys.required("attention.indexer.key_length")?,
        index_topk: keys.required("attention.indexer.top_k")?,
        pairing: rule.pairing,
        k_norm_eps: INDEXER_K_NORM_EPS,
    })
}

fn indexer_roles(
    rule: &Indexer,
    keys: &Keys<'_>,
    trunk: usize,
    context: usize,
) -> Result<Vec<Option<IndexerRole>>, Error> {
    const KEY: &str = "attention.indexer.types";
    let full: Vec<bool> = match rule.roles {
        IndexerRoles::All => vec![true; trunk],
        IndexerRoles::Listed => match keys.flags(KEY, trunk)? {
            Some(listed) => listed,
            None if context < GLM_52_CONTEXT => vec![true; trunk],
            None => (0..trunk).map(|layer| layer < 3 || layer % 4 == 2).collect(),
        },
    };
    if !full[0] {
        return Err(keys.refuse(
            KEY,
            "a first layer that is full (1), because there is no earlier selection to share",
            "shared (0)",
        ));
    }
    Ok(full.into_iter().map(|f| Some(if f { IndexerRole::Full } else { IndexerRole::Shared })).collect())
}

/// Adds the MTP layers that are whole, in order, and says of the others why they are not used.
fn add_mtp_layers(
    config: &mut ModelConfig,
    set: &GgufSet,
    ffns: &[FfnConfig],
) -> Result<Option<(Range<usize>, String)>, Error> {
    let trunk = config.layers.len();
    let end = trunk + ffns.len();
    for (layer, &ffn) in (trunk..).zip(ffns) {
        let with_indexer = config.indexer.is_some()
            && LayerRole::ALL.iter().filter(|role| role.is_indexer()).all(|&role| has(set, layer, role));
        config.mtp_layers.push(LayerConfig { ffn, indexer: with_indexer.then_some(IndexerRole::Full) });
        let Some(missing) = first_missing(config, set, layer)? else { continue };
        config.mtp_layers.pop();
        let reason = if LayerRole::ALL.iter().any(|&role| has(set, layer, role)) {
            format!(
                "multi-token-prediction layer {layer} is not complete ({missing} is not in the file), so it is not used"
            )
        } else {
            format!(
                "multi-token-prediction layer {layer} is declared, but none of its tensors is in the file"
            )
        };
        return Ok(Some((layer..end, reason)));
    }
    Ok(None)
}

/// GGUF name of the first tensor that layer `layer` needs and the files lack.
fn first_missing(config: &ModelConfig, set: &GgufSet, layer: usize) -> Result<Option<String>, Error> {
    let tensors = native::tensors(config, formats::manifest::ExpertCut::Tensor)
        .map_err(|e| Error::Formats(e.in_file(set.path())))?;
    Ok(tensors
        .iter()
        .filter(|t| t.need == Need::Required)
        .filter(|t| matches!(t.name, TensorName::Layer(LayerIdx(l), _) if l == layer))
        .find_map(|t| native::missing_source(t.name, |name| set.info(name).is_some())))
}

fn has(set: &GgufSet, layer: usize, role: LayerRole) -> bool {
    set.info(&TensorName::Layer(LayerIdx(layer), role).gguf()).is_some()
}
