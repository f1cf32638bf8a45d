//! Every supported family against its oracle: small random models of each, on 1, 3 and 8 ranks, with the experts cut by width
//! and by id. The models are chaotic, so on processors only the reference path is compared.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::checkpoint::Checkpoint;
use runtime::device::DeviceOptions;
use runtime::engine::Arithmetic;
use runtime::logits::{LogitsOptions, LogitsRunner};
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use tests::{OracleLogits, gpu, kl_divergence, max_abs_difference, program, read_json, shared, success};

/// Folders that hold a model and its oracles.
fn families() -> Vec<PathBuf> {
    let Some(shared) = shared("logits of the other model families") else { return Vec::new() };
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(shared.join("oracles/archs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders
}

/// The model's file, or the first of its parts.
fn model(folder: &Path) -> PathBuf {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|ext| ext == "gguf"));
    files.sort();
    files.remove(0)
}

fn convert(folder: &Path, out: &Path, ranks: usize, experts: &str) {
    let mut command = Command::new(program("shardmill"));
    command.arg("convert").arg(model(folder)).arg(out);
    success(command.args(["--ranks", &ranks.to_string(), "--experts", experts]));
}

#[test]
fn logits_equal_the_oracles_on_any_cut() {
    let folders = families();
    assert!(folders.is_empty() || folders.len() >= 12, "{folders:?}");
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        for ranks in [1, 3, 8] {
            for experts in ["tensor", "expert"] {
                let temp = TempDir::new().unwrap();
                let out = temp.path().join("checkpoint");
                convert(&folder, &out, ranks, experts);
                success(
                    Command::new(program("shardmill"))
                        .arg("verify")
                        .arg(&out)
                        .arg("--source")
                        .arg(model(&folder)),
                );
                let options = LogitsOptions {
                    arithmetic: Arithmetic::Reference,
                    threads: None,
                    chunk: 512,
                    device: DeviceOptions::default(),
                };
                let mut runner = LogitsRunner::open(&out, &options).unwrap();
                for sequence in ["seq0", "seq1"] {
                    let oracle = OracleLogits::read(&folder.join(format!("{sequence}.dense.safetensors")));
                    let found = runner.run(&oracle.tokens, None).unwrap();
                    let rows = oracle
                        .positions
                        .iter()
                        .map(|p| &found.values[p * found.vocab_size..][..found.vocab_size]);
                    let difference = oracle
                        .rows
                        .iter()
                        .zip(rows)
                        .map(|(a, b)| max_abs_difference(a, b))
                        .fold(0.0, f32::max);
                    eprintln!(
                        "{name} {sequence}, {ranks} ranks, experts by {experts}: max difference {difference:.2e}"
                    );
                    assert!(
                        difference <= 1e-3,
                        "{name} {sequence}, {ranks} ranks, experts by {experts}: {difference}"
                    );
                }
            }
        }
    }
}

/// How many of a sequence's first positions choose experts by more than what a cache in BF16 may move: where two experts score
/// nearly the same, a GPU may rightly choose the other one, and all that follows sees it.
fn decided(path: &Path, positions: usize) -> usize {
    const NEAR: f32 = 2.5e-3;
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let gaps = file.tensors().into_iter().filter(|(name, _)| name.starts_with("router_gap."));
    gaps.map(|(_, gaps)| {
        let values: Vec<f32> = gaps.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        values.iter().position(|&gap| gap < NEAR).unwrap_or(positions)
    })
    .min()
    .unwrap_or(positions)
}

/// On a GPU, all ranks on the first one. Activations of 11 bits in tiles and a cache in BF16 are allowed for, as with any model.
#[test]
fn a_gpu_keeps_to_the_oracles_distributions() {
    let Some(device) = gpu("logits of the other model families") else { return };
    let mut too_far = Vec::new();
    for folder in families() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        for (ranks, experts) in [(1, "tensor"), (8, "tensor"), (8, "expert")] {
            let temp = TempDir::new().unwrap();
            let out = temp.path().join("checkpoint");
            convert(&folder, &out, ranks, experts);
            let options = LogitsOptions {
                arithmetic: Arithmetic::Fast,
                threads: None,
                chunk: 512,
                device: device.clone(),
            };
            let mut runner = LogitsRunner::open(&out, &options).unwrap();
            let mut divergences = Vec::new();
            for sequence in ["seq0", "seq1"] {
                let path = folder.join(format!("{sequence}.dense.safetensors"));
                let oracle = OracleLogits::read(&path);
                let found = runner.run(&oracle.tokens, None).unwrap();
                let rows = oracle
                    .positions
                    .iter()
                    .map(|p| &found.values[p * found.vocab_size..][..found.vocab_size]);
                let all = oracle.rows.iter().zip(rows).map(|(p, q)| kl_divergence(p, q));
                divergences.extend(all.take(decided(&path, oracle.positions.len())));
            }
            let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
            let count = divergences.len();
            let line = format!(
                "{name}, {ranks} ranks, experts by {experts}, cuda: mean KL {mean:.2e} of {count} positions"
            );
            eprintln!("{line}");
            if mean > 2e-3 {
                too_far.push(line);
            }
        }
    }
    assert!(too_far.is_empty(), "{too_far:#?}");
}

#[test]
fn kv_b_has_the_oracles_digests() {
    for folder in families() {
        let temp = TempDir::new().unwrap();
        let out = temp.path().join("checkpoint");
        convert(&folder, &out, 3, "tensor");
        let checkpoint = Checkpoint::open(&out).unwrap();
        let oracle: serde_json::Value = read_json(&folder.join("model.json"));
        let layers = oracle["kv_b"].as_object().unwrap();
        assert!(!layers.is_empty());
        for (layer, expected) in layers {
            let name = format!("model.layers.{layer}.self_attn.kv_b_proj.weight");
            let mut hash = Sha256::new();
            for rank in 0..3 {
                let shard = checkpoint.rank(rank).unwrap();
                hash.update(shard.view(shard.entry(&name).unwrap()).unwrap().bytes());
            }
            let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, expected["sha256"].as_str().unwrap(), "{} {name}", folder.display());
        }
    }
}
