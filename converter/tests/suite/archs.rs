//! One small model of each family, made and digested by other programs.

use crate::files::{architectures, control, convert};
use converter::verify::verify;
use formats::checkpoint::Checkpoint;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::path::Path;
use tempfile::TempDir;

fn kv_b_digest(out: &Path, layer: &str) -> String {
    let checkpoint = Checkpoint::open(out).unwrap();
    let name = format!("model.layers.{layer}.self_attn.kv_b_proj.weight");
    let mut hash = Sha256::new();
    for rank in 0..checkpoint.manifest().ranks {
        let shard = checkpoint.rank(rank).unwrap();
        let entry = shard.entry(&name).unwrap();
        hash.update(shard.view(entry).unwrap().bytes());
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn every_family_converts_and_proves() {
    for (name, gguf, json) in architectures() {
        let oracle: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        for ranks in [1, 2, 3, 8] {
            let temp = TempDir::new().unwrap();
            let out = temp.path().join("out");
            convert(&gguf, &out, ranks);
            let report = verify(&out, Some(&gguf), &control()).unwrap();
            assert!(report.ok, "{name}, {ranks} ranks: {:?}", report.failures);
            for (layer, kv_b) in oracle["kv_b"].as_object().unwrap() {
                assert_eq!(kv_b_digest(&out, layer), kv_b["sha256"], "{name}, {ranks} ranks, layer {layer}");
            }
        }
    }
}

/// What of each family's configuration differs from the others'.
#[test]
fn configurations_are_resolved() {
    for (name, gguf, _) in architectures() {
        let set = formats::gguf::GgufSet::open(&gguf).unwrap();
        let config = converter::arch::describe(&set).unwrap().config;
        let router = &config.moe.as_ref().unwrap().router;
        let said = format!("{router:?} {:?}", config.indexer);
        match name.as_str() {
            "deepseek_v2_lite" | "deepseek_v2_lite_joined_kv_b" => {
                assert!(said.contains("Softmax") && said.contains("norm_topk_floor: None"), "{said}");
                assert_eq!(config.attention.q_lora_rank, None);
                let mscale = 1.0 + 0.0707 * 40f64.ln();
                let expected = 128f64.powf(-0.5) * mscale * mscale;
                assert!((f64::from(config.attention.softmax_scale) - expected).abs() < 1e-7);
                assert_eq!(config.rope.attention_scaling, 1.0);
                // YaRN: fast dimensions as they were, slow ones divided by the factor.
                assert_eq!(config.rope.inv_freq[0], 1.0);
                let slowest = 10_000f64.powf(-62.0 / 64.0) / 40.0;
                assert!((f64::from(config.rope.inv_freq[31]) / slowest - 1.0).abs() < 1e-6);
            }
            "deepseek_v3" => {
                assert_eq!((router.n_group, router.topk_group), (4, 2));
                assert!(said.contains("TopTwoSum") && said.contains("Sigmoid"), "{said}");
            }
            "deepseek32" => assert!(said.contains("pairing: Half"), "{said}"),
            "glm4_moe_lite" => assert!(said.contains("Sigmoid"), "{said}"),
            "glm_dsa_52_shared" => {
                let roles: Vec<String> =
                    config.layers.iter().map(|l| format!("{:?}", l.indexer.unwrap())).collect();
                assert_eq!(roles, ["Full", "Shared", "Shared", "Full"]);
                assert_eq!(config.mtp_layers.len(), 1);
            }
            "glm_dsa_shared_with_tensors" => {
                let plan = converter::plan::Plan::new(&set, crate::files::options(2)).unwrap();
                assert_eq!(plan.skipped.len(), 5);
                assert!(plan.skipped.iter().all(|s| s.tensor.starts_with("blk.1.indexer.")));
            }
            "kimi_k2" | "kimi_k2_fused_gate_up" => assert_eq!(router.routed_scaling_factor, 2.827),
            "glm_dsa_q8_0" | "glm_dsa_split3" | "glm_dsa_mixed_q4k_router" => {
                assert!(said.contains("pairing: Interleaved"), "{said}");
            }
            other => panic!("{other} has no expectations here"),
        }
    }
}
