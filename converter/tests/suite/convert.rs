//! What a conversion writes.

use crate::files::{bundled, contents, control, convert, convert_with, models, options};
use crate::made::Gguf;
use converter::plan::Plan;
use converter::verify::verify;
use converter::work::{Control, Progress};
use formats::checkpoint::Checkpoint;
use formats::gguf::GgufSet;
use formats::manifest::{ExpertCut, Shard, TransformKind};
use formats::{Digest, Dtype, bytes_of};
use safetensors::SafeTensors;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;
use tempfile::TempDir;

#[derive(Deserialize)]
struct KvB {
    shape: Vec<u64>,
    sha256: String,
    shards: Vec<KvBShard>,
}

#[derive(Deserialize)]
struct KvBShard {
    sha256: String,
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// kv_b_proj of every layer, whole and on each of 8 ranks, is what the original checkpoint's converter splits.
/// Cases: K55.
#[test]
fn kv_b_is_rejoined_bit_for_bit() {
    for model in models() {
        let temp = TempDir::new().unwrap();
        let out = temp.path().join("out");
        convert(&model.gguf, &out, 8);
        let checkpoint = Checkpoint::open(&out).unwrap();
        let ranks: Vec<_> = (0..8).map(|rank| checkpoint.rank(rank).unwrap()).collect();
        let expected: BTreeMap<String, KvB> =
            serde_json::from_slice(&std::fs::read(&model.kv_b).unwrap()).unwrap();
        assert_eq!(expected.len(), 4, "{}", model.name);
        for (layer, kv_b) in expected {
            let name = format!("model.layers.{layer}.self_attn.kv_b_proj.weight");
            let mut whole = Vec::new();
            for (rank, shard) in ranks.iter().enumerate() {
                let entry = shard.entry(&name).unwrap();
                assert_eq!(entry.full_shape.dims(), kv_b.shape);
                assert_eq!(entry.shape.dims(), [448, 512]);
                assert_eq!((entry.dtype, entry.transform), (Dtype::BF16, TransformKind::JoinKvB));
                let bytes = shard.view(entry).unwrap().bytes().clone();
                assert_eq!(sha256(&bytes), kv_b.shards[rank].sha256, "{} {name}, rank {rank}", model.name);
                whole.extend_from_slice(&bytes);
            }
            assert_eq!(sha256(&whole), kv_b.sha256, "{} {name}", model.name);
        }
    }
}

/// Cases: K53, K54.
#[test]
fn any_number_of_ranks_holds_the_whole_source() {
    let model = bundled();
    for ranks in [1, 2, 3, 4, 5, 6, 7, 8, 16] {
        for experts in [ExpertCut::Tensor, ExpertCut::Expert] {
            let temp = TempDir::new().unwrap();
            let out = temp.path().join("out");
            let mut options = options(ranks);
            options.experts = experts;
            convert_with(&model.gguf, &out, options, &control());
            let report = verify(&out, Some(&model.gguf), &control()).unwrap();
            assert!(report.ok, "{ranks} ranks, {experts:?}: {:?}", report.failures);
            let source = report.source.unwrap();
            assert_eq!((source.copied, source.dequantized, source.joined), (48, 38, 4));
        }
    }
}

/// A directory that is replaced while someone has the old one open.
///
/// Cases: K58.
#[test]
fn what_is_opened_again_is_what_lies_there_now() {
    let temp = TempDir::new().unwrap();
    let [out, old] = ["out", "old"].map(|name| temp.path().join(name));
    let name = "model.embed_tokens.weight";
    let bytes = || {
        let shard = Checkpoint::open(&out).unwrap().rank(0).unwrap();
        let view = shard.view(shard.entry(name).unwrap()).unwrap();
        view.bytes().clone()
    };
    let mut gguf = Gguf::glm_dsa();
    convert(&gguf.write(temp.path()), &out, 1);
    let before = bytes();
    gguf.tensor("token_embd.weight").data[2] ^= 1;
    std::fs::rename(&out, &old).unwrap();
    convert(&gguf.write(temp.path()), &out, 1);
    let after = bytes();
    assert_eq!(before.len(), after.len());
    let differ: Vec<usize> = (0..before.len()).filter(|&i| before[i] != after[i]).collect();
    assert_eq!(differ, [2], "the old bytes are the old ones, the new the new");
}

#[test]
fn two_conversions_are_the_same_bytes_whatever_the_threads() {
    let model = bundled();
    let temp = TempDir::new().unwrap();
    let [one, other] = ["one", "other"].map(|name| temp.path().join(name));
    for (out, threads) in [(&one, 1), (&other, 5)] {
        let control = Control::new(Some(threads), Arc::default(), Progress::Quiet);
        convert_with(&model.gguf, out, options(3), &control);
    }
    assert!(contents(&one) == contents(&other), "the two directories differ");
}

#[test]
fn the_safetensors_crate_opens_every_rank_file_and_finds_every_tensor_aligned() {
    let model = bundled();
    for ranks in [1, 5, 16] {
        let temp = TempDir::new().unwrap();
        let out = temp.path().join("out");
        convert(&model.gguf, &out, ranks);
        let checkpoint = Checkpoint::open(&out).unwrap();
        for rank in 0..ranks {
            let shard = checkpoint.rank(rank).unwrap();
            let (_, metadata) = SafeTensors::read_metadata(shard.bytes()).unwrap();
            let said = metadata.metadata().as_ref().unwrap();
            assert_eq!((&*said["format"], &*said["rank"]), ("shardmill", &*rank.to_string()));
            let true_types: BTreeMap<String, serde_json::Value> =
                serde_json::from_str(&said["dtypes"]).unwrap();
            let file = SafeTensors::deserialize(shard.bytes()).unwrap();
            assert_eq!(file.len(), shard.manifest().tensors.len());
            for entry in &shard.manifest().tensors {
                let view = file.tensor(&entry.name).unwrap();
                assert_eq!(view.data(), &shard.view(entry).unwrap().bytes()[..], "{}", entry.name);
                let size = entry.bytes.1 - entry.bytes.0;
                let alignment = 1 << size.trailing_zeros().min(8);
                assert!(
                    entry.bytes.0.is_multiple_of(alignment),
                    "{}: {size} at {}",
                    entry.name,
                    entry.bytes.0
                );
                if entry.dtype == Dtype::Q4_K {
                    assert_eq!(view.dtype(), safetensors::Dtype::U8);
                    assert_eq!(true_types[&entry.name]["dtype"], "Q4_K");
                }
            }
        }
    }
}

/// Ranks that are alike share what was worked out for one of them; every header has to say its own.
#[test]
fn headers_fit_their_files_on_a_thousand_ranks() {
    let set = GgufSet::open(&bundled().gguf).unwrap();
    let plan = Plan::new(&set, options(1024)).unwrap();
    for (rank, layout) in plan.layouts.iter().enumerate() {
        assert_eq!((layout.rank, plan.header(rank).len() as u64), (rank, layout.data_start));
        for placed in layout.placed.iter() {
            let tensor = &plan.tensors[placed.tensor];
            assert_eq!(placed.bytes.end - placed.bytes.start, tensor.shard_bytes(rank), "{}", tensor.name);
            assert_eq!(bytes_of(tensor.dtype(), &tensor.shard_shape(rank)), Some(tensor.shard_bytes(rank)));
        }
        assert_eq!(layout.placed.last().unwrap().bytes.end, layout.bytes);
    }
}

#[test]
fn trunk_comes_first_then_indexers_then_mtp_layers() {
    let set = GgufSet::open(&bundled().gguf).unwrap();
    let plan = Plan::new(&set, options(8)).unwrap();
    let part = |name: &str| match name {
        n if n.starts_with("model.layers.3.") => 2,
        n if n.contains(".indexer.") => 1,
        _ => 0,
    };
    let parts: Vec<u32> = plan.tensors.iter().map(|t| part(&t.name)).collect();
    assert!(parts.is_sorted());
    assert_eq!(plan.tensors[0].name, "model.embed_tokens.weight");
    // The few tensors of odd sizes follow; the others keep their order in the file.
    for layout in &plan.layouts {
        let aligned = layout.placed.iter().filter(|p| (p.bytes.end - p.bytes.start).is_multiple_of(256));
        assert!(aligned.map(|p| p.tensor).is_sorted());
    }
}

#[test]
fn b3sums_lists_every_other_file_with_its_digest() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    convert(&bundled().gguf, &out, 2);
    let mut files = contents(&out);
    let sums = String::from_utf8(files.remove("B3SUMS").unwrap()).unwrap();
    let expected: String =
        files.iter().map(|(name, bytes)| format!("{}  {name}\n", Digest::of(bytes))).collect();
    assert_eq!(sums, expected);
    let manifest = Checkpoint::open(&out).unwrap().manifest().clone();
    assert_eq!(manifest.sources[0].blake3, Digest::of(&std::fs::read(bundled().gguf).unwrap()));
}

#[test]
fn side_files_come_from_the_metadata() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    convert(&bundled().gguf, &out, 1);
    let set = GgufSet::open(&bundled().gguf).unwrap();
    let template = set.metadata().str("tokenizer.chat_template").unwrap().unwrap();
    assert_eq!(std::fs::read_to_string(out.join("chat_template.jinja")).unwrap(), template);
    let generation = std::fs::read_to_string(out.join("generation_config.json")).unwrap();
    assert!(
        generation.contains("\"top_p\": 0.95,") || generation.contains("\"top_p\": 0.95\n"),
        "{generation}"
    );
    let generation: serde_json::Value = serde_json::from_str(&generation).unwrap();
    assert_eq!(generation["eos_token_id"], serde_json::json!([4076, 4083, 4085]));
    assert_eq!((&generation["do_sample"], &generation["temperature"]), (&true.into(), &1.0.into()));
}

#[test]
fn every_rank_has_its_heads_of_all_three_projections() {
    let set = GgufSet::open(&bundled().gguf).unwrap();
    let plan = Plan::new(&set, options(3)).unwrap();
    let shard = |name: &str, rank| match plan.tensors.iter().find(|t| t.name == name).unwrap().shard(rank) {
        Shard::Cut { axis, start, len } => (axis, start, len),
        Shard::Whole(_) => panic!("{name} is cut"),
    };
    for (rank, (first, heads)) in [(0, 3), (3, 3), (6, 2)].into_iter().enumerate() {
        let name = |role: &str| format!("model.layers.2.self_attn.{role}.weight");
        assert_eq!(shard(&name("q_b_proj"), rank), (0, first * 256, heads * 256));
        assert_eq!(shard(&name("kv_b_proj"), rank), (0, first * 448, heads * 448));
        assert_eq!(shard(&name("o_proj"), rank), (1, first * 256, heads * 256));
    }
}
