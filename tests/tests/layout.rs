//! Checkpoints in the layout for tensor cores, as their users meet them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::checkpoint::Checkpoint;
use formats::layout::Layout;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use tests::{bundled, failure, listing, program, success};

fn shardmill(words: &[&str], paths: &[&Path]) -> Command {
    let mut command = Command::new(program("shardmill"));
    command.args(words).args(paths);
    command
}

fn convert(dir: &Path, name: &str, options: &[&str]) -> PathBuf {
    let out = dir.join(name);
    let words = [&["convert", "-q"][..], options].concat();
    success(&mut shardmill(&words, &[&bundled().gguf, &out]));
    out
}

/// Layouts of a checkpoint's tensors on its last rank.
fn layouts(dir: &Path) -> Vec<(String, Layout)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let manifests = checkpoint.rank_manifests().unwrap();
    let last = manifests.last().unwrap();
    last.tensors.iter().map(|t| (t.name.clone(), t.layout.clone())).collect()
}

#[test]
fn a_checkpoint_of_tiles_is_proven_and_gives_back_its_tensors() {
    let temp = TempDir::new().unwrap();
    for (ranks, experts) in [("1", "tensor"), ("2", "expert"), ("3", "tensor"), ("8", "tensor")] {
        let options = ["--ranks", ranks, "--experts", experts, "--layout", "mma16"];
        let dir = convert(temp.path(), ranks, &options);
        success(&mut shardmill(&["verify", "--source"], &[&bundled().gguf, &dir]));
        let found = layouts(&dir);
        let of = |name: &str| found.iter().find(|(own, _)| own == name).unwrap().1.clone();
        // Looked up row by row; BF16; F32; a type without kernels for tiles; cuts whose parts are whole tiles.
        assert_eq!(of("model.embed_tokens.weight"), Layout::Ggml);
        assert_eq!(of("model.layers.1.self_attn.kv_b_proj.weight"), Layout::Ggml);
        assert_eq!(of("model.norm.weight"), Layout::Ggml);
        assert_eq!(of("model.layers.1.mlp.experts.down_proj.weight"), Layout::Ggml);
        assert_eq!(of("model.layers.1.mlp.shared_experts.up_proj.weight"), Layout::Mma16);
        assert_eq!(of("model.layers.1.self_attn.o_proj.weight"), Layout::Mma16);
        let tensors = ["blk.1.ffn_up_shexp.weight", "blk.0.attn_output.weight", "blk.2.attn_v_b.weight"];
        for tensor in tensors {
            let [source, own] = [&bundled().gguf, &dir].map(|from| {
                let to = temp.path().join("x.safetensors");
                let words = ["extract", "--force", "--tensor", tensor, "--out"];
                success(&mut shardmill(&words, &[&to, from]));
                std::fs::read(to).unwrap()
            });
            // The value half of kv_b is rounded to BF16.
            assert!(source == own || tensor.contains("attn_v_b"), "{tensor} of {ranks} ranks");
            assert_eq!(source.len(), own.len());
        }
    }
}

/// One rank's file has several chunks, which begin anywhere in a tile; ranks apart and other threads make the same bytes.
#[test]
fn tiles_are_the_same_whoever_makes_them() {
    let temp = TempDir::new().unwrap();
    let layout = ["--layout", "mma16"];
    let one = convert(temp.path(), "one", &[&layout[..], &["--ranks", "1", "--threads", "1"]].concat());
    let other = convert(temp.path(), "other", &[&layout[..], &["--ranks", "1", "--threads", "5"]].concat());
    let apart = temp.path().join("apart");
    for words in [&["convert", "--rank", "0"][..], &["finish"]] {
        let words = [words, &layout, &["-q", "--ranks", "1"]].concat();
        success(&mut shardmill(&words, &[&bundled().gguf, &apart]));
    }
    let chunks = Checkpoint::open(&one).unwrap().rank_manifest(0).unwrap().chunks.len();
    assert!(chunks > 1);
    for dir in [&other, &apart] {
        assert_eq!(listing(dir), listing(&one));
        for name in listing(&one).keys() {
            let [a, b] = [&one, dir].map(|dir| std::fs::read(dir.join(name)).unwrap());
            assert!(a == b, "{name}");
        }
    }
    // Ranks of two layouts never come together.
    let two = temp.path().join("two");
    success(&mut shardmill(&["convert", "-q", "--ranks", "2", "--rank", "0"], &[&bundled().gguf, &two]));
    let words = ["convert", "-q", "--ranks", "2", "--rank", "1", "--layout", "mma16"];
    let said = failure(&mut shardmill(&words, &[&bundled().gguf, &two]), 2);
    assert!(said.contains("--layout mma16") && said.contains("--layout ggml"), "{said}");
}

#[test]
fn plan_and_inspect_show_the_layout() {
    let temp = TempDir::new().unwrap();
    let gguf = bundled().gguf;
    let text = |words: &[&str], path: &Path| {
        String::from_utf8(success(&mut shardmill(words, &[path])).stdout).unwrap()
    };
    assert!(text(&["plan", "--layout", "mma16"], &gguf).contains("Q5_K mma16.v1"));
    assert!(!text(&["plan"], &gguf).contains("mma16"));
    let json: Value = serde_json::from_str(&text(&["plan", "--layout", "mma16", "--json"], &gguf)).unwrap();
    let tensor = |name: &str| json["tensors"].as_array().unwrap().iter().find(|t| t["name"] == name).unwrap();
    assert_eq!(tensor("model.layers.1.self_attn.o_proj.weight")["layout"], "mma16.v1");
    // No kernel multiplies tiles of Q3_K.
    assert_eq!(tensor("model.layers.1.mlp.experts.down_proj.weight")["layout"], "ggml");
    assert_eq!(tensor("model.embed_tokens.weight")["layout"], "ggml");
    let dir = convert(temp.path(), "out", &["--ranks", "2", "--layout", "mma16"]);
    let name = "model.layers.1.self_attn.o_proj.weight";
    for path in [dir.clone(), dir.join("rank-1-of-2.safetensors")] {
        assert!(text(&["inspect"], &path).contains("Q5_K mma16.v1"));
        assert!(text(&["inspect", "--tensor", name], &path).contains("mma16.v1"));
    }
}

/// The CPU computes with rows of blocks.
#[test]
fn a_device_without_the_layout_says_what_to_run() {
    let temp = TempDir::new().unwrap();
    let dir = convert(temp.path(), "out", &["--ranks", "2", "--layout", "mma16"]);
    let mut generate = Command::new(program("shardrun"));
    let said = failure(generate.arg("generate").arg(&dir).args(["--prompt", "2+2", "--max-tokens", "1"]), 2);
    for word in ["rank-", "mma16.v1", "shardmill convert", "--layout ggml"] {
        assert!(said.contains(word), "{said} should say {word}");
    }
}
