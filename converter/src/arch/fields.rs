//! Which key each field of a [`formats::ModelConfig`] comes from, so that a fault that its check finds is told of the key, which is
//! what a user can look at and mend.

use super::keys::Keys;
use crate::Error;
use std::path::Path;

/// A field, as the check names it with layers counted out, and the keys that may give it: the first that the file has is meant.
/// None: nothing in a file decides it.
const TABLE: &[(&str, &[&str])] = &[
    ("vocab_size", &["vocab_size"]),
    ("hidden_size", &["embedding_length"]),
    ("max_position_embeddings", &["context_length"]),
    ("rms_norm_eps", &["attention.layer_norm_rms_epsilon"]),
    ("tie_word_embeddings", &[]),
    ("attention.num_attention_heads", &["attention.head_count"]),
    ("attention.q_lora_rank", &["attention.q_lora_rank"]),
    ("attention.kv_lora_rank", &["attention.kv_lora_rank"]),
    ("attention.qk_nope_head_dim", &["attention.key_length_mla", "attention.key_length"]),
    ("attention.qk_rope_head_dim", &["rope.dimension_count"]),
    ("attention.v_head_dim", &["attention.value_length_mla", "attention.value_length"]),
    ("attention.softmax_scale", &["rope.scaling.yarn_log_multiplier", "attention.key_length_mla"]),
    ("rope.inv_freq", &["rope.scaling.factor", "rope.scale_linear", "rope.freq_base"]),
    ("rope.pairing", &[]),
    ("rope.attention_scaling", &["rope.scaling.factor", "rope.scale_linear"]),
    ("moe.n_routed_experts", &["expert_count"]),
    ("moe.num_experts_per_tok", &["expert_used_count"]),
    ("moe.router.scoring_func", &["expert_gating_func"]),
    ("moe.router.n_group", &["expert_group_count"]),
    ("moe.router.topk_group", &["expert_group_used_count"]),
    ("moe.router.group_score", &[]),
    ("moe.router.norm_topk_floor", &["expert_weights_norm"]),
    ("moe.router.routed_scaling_factor", &["expert_weights_scale"]),
    ("indexer.index_n_heads", &["attention.indexer.head_count"]),
    ("indexer.index_head_dim", &["attention.indexer.key_length"]),
    ("indexer.index_topk", &["attention.indexer.top_k"]),
    ("indexer.pairing", &[]),
    ("indexer.k_norm_eps", &[]),
    ("layers", &["block_count"]),
    ("layers[].ffn", &["expert_count"]),
    ("layers[].ffn.intermediate_size", &["feed_forward_length"]),
    ("layers[].ffn.moe_intermediate_size", &["expert_feed_forward_length"]),
    ("layers[].ffn.shared_intermediate_size", &["expert_shared_count"]),
    ("layers[].indexer", &["attention.indexer.types"]),
];

/// A fault of the configuration, said of the key that the value came from; other errors as they are.
pub(super) fn by_key(fault: formats::Error, keys: &Keys<'_>, path: &Path) -> Error {
    let formats::Error::Config { field, expected, found } = &fault else {
        return Error::Formats(fault.in_file(path));
    };
    let among = keys_of(field).unwrap_or_default();
    let Some(key) = among.iter().find(|key| keys.value(key).is_some()).or(among.first()) else {
        return Error::Formats(fault.in_file(path));
    };
    keys.refuse(key, expected, found)
}

fn keys_of(field: &str) -> Option<&'static [&'static str]> {
    // `layers[12].ffn` -> `layers[].ffn`
    let counted_out = match (field.split_once('['), field.split_once(']')) {
        (Some((before, _)), Some((_, after))) => format!("{before}[]{after}"),
        _ => field.to_owned(),
    };
    TABLE.iter().find(|(name, _)| *name == counted_out).map(|(_, keys)| *keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use formats::ModelConfig;
    use formats::config::*;
    use serde_json::Value;

    /// With everything that a model can have.
    fn config() -> ModelConfig {
        let router = RouterConfig {
            scoring_func: ScoringFunc::Sigmoid,
            n_group: 2,
            topk_group: 1,
            group_score: GroupScore::TopTwoSum,
            norm_topk_floor: Some(1e-20),
            routed_scaling_factor: 1.0,
        };
        let dense = FfnConfig::Dense { intermediate_size: 8 };
        let moe = FfnConfig::Moe { moe_intermediate_size: 8, shared_intermediate_size: 8 };
        let layer = |ffn| LayerConfig { ffn, indexer: Some(IndexerRole::Full) };
        ModelConfig {
            vocab_size: 8,
            hidden_size: 8,
            max_position_embeddings: 8,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            attention: AttentionConfig {
                num_attention_heads: 2,
                q_lora_rank: Some(8),
                kv_lora_rank: 8,
                qk_nope_head_dim: 8,
                qk_rope_head_dim: 2,
                v_head_dim: 8,
                softmax_scale: 1.0,
            },
            rope: RopeConfig { inv_freq: vec![1.0], pairing: RopePairing::Half, attention_scaling: 1.0 },
            moe: Some(MoeConfig { n_routed_experts: 4, num_experts_per_tok: 1, router }),
            indexer: Some(IndexerConfig {
                index_n_heads: 2,
                index_head_dim: 8,
                index_topk: 8,
                pairing: RopePairing::Half,
                k_norm_eps: 1e-6,
            }),
            layers: vec![layer(dense), layer(moe)],
            mtp_layers: Vec::new(),
        }
    }

    /// JSON pointers of all values, lists of numbers as one.
    fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                fields.iter().for_each(|(name, value)| pointers(value, &format!("{at}/{name}"), found));
            }
            Value::Array(items) if items.iter().any(Value::is_object) => {
                (0..).zip(items).for_each(|(i, item)| pointers(item, &format!("{at}/{i}"), found));
            }
            _ => found.push(at.to_owned()),
        }
    }

    #[test]
    fn every_field_has_its_row_and_every_fault_a_key() {
        config().validate().unwrap();
        let whole = serde_json::to_value(config()).unwrap();
        let mut all = Vec::new();
        pointers(&whole, "", &mut all);
        all.retain(|pointer| pointer != "/mtp_layers");
        assert!(all.len() > 30, "{all:?}");
        let mut faults = 0;
        for pointer in &all {
            let field =
                pointer.trim_start_matches('/').replace("ffn/dense/", "ffn/").replace("ffn/moe/", "ffn/");
            let field =
                field.replace("layers/0/", "layers[0].").replace("layers/1/", "layers[1].").replace('/', ".");
            assert!(keys_of(&field).is_some(), "{field} has no row");
            let mut changed = whole.clone();
            let value = changed.pointer_mut(pointer).unwrap();
            if !value.is_u64() {
                continue;
            }
            *value = (1_u64 << 40).into();
            let config: ModelConfig = serde_json::from_value(changed).unwrap();
            // Faults of no key are those of numbers that no file has.
            let Err(formats::Error::Config { field, .. }) = config.validate() else { continue };
            assert!(keys_of(&field).is_some_and(|keys| !keys.is_empty()), "{field} has no key");
            faults += 1;
        }
        assert!(faults >= 15, "{faults} faults");
    }
}
