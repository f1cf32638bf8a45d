//! Checkpoints and files that contradict themselves: each is refused by name, and none answers with garbage.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::Digest;
use formats::checkpoint::Checkpoint;
use formats::gguf::GgufSet;
use formats::manifest::{Manifest, RankManifest, Shard};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::{bundled, failure, program, success};

/// Something that a manifest should not say.
type Edit<M> = fn(&mut M);

fn generate(dir: &Path) -> Command {
    let mut command = Command::new(program("shardrun"));
    command.arg("generate").arg(dir).args([
        "--prompt",
        "Who are you?",
        "--temperature",
        "0",
        "--max-tokens",
        "3",
    ]);
    command
}

/// Changes a rank's manifest and gives it a digest that fits.
fn edit_rank(dir: &Path, rank: usize, edit: impl FnOnce(&mut RankManifest)) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let mut rank_manifest = checkpoint.rank_manifest(rank).unwrap();
    edit(&mut rank_manifest);
    let bytes = serde_json::to_vec_pretty(&rank_manifest).unwrap();
    std::fs::write(dir.join(&checkpoint.manifest().rank_files[rank].manifest), &bytes).unwrap();
    edit_top(dir, |manifest| manifest.rank_files[rank].manifest_blake3 = Digest::of(&bytes));
}

fn edit_top(dir: &Path, edit: impl FnOnce(&mut Manifest)) {
    let mut manifest = Checkpoint::open(dir).unwrap().manifest().clone();
    edit(&mut manifest);
    std::fs::write(dir.join("checkpoint.json"), serde_json::to_vec_pretty(&manifest).unwrap()).unwrap();
}

#[test]
fn parts_that_do_not_make_up_the_whole_are_refused() {
    let edits: [(&str, Edit<RankManifest>); 4] = [
        ("lm_head.weight", |m| shift(m, "lm_head.weight")),
        ("model.layers.1.self_attn.kv_b_proj.weight", |m| {
            shift(m, "model.layers.1.self_attn.kv_b_proj.weight")
        }),
        ("model.layers.2.mlp.experts.up_proj.weight", |m| {
            let last =
                m.tensors.iter().position(|t| t.name == "model.layers.2.mlp.experts.up_proj.weight").unwrap();
            m.tensors[last].name = "model.layers.2.mlp.experts.other.weight".to_owned();
        }),
        ("model.layers.1.mlp.gate.weight", |m| {
            let gate = m.tensors.iter_mut().find(|t| t.name == "model.layers.1.mlp.gate.weight").unwrap();
            gate.blake3 = Some(Digest::of(b"another router"));
        }),
    ];
    for (tensor, edit) in edits {
        let temp = TempDir::new().unwrap();
        let dir = bundled().convert(temp.path(), 2);
        success(&mut generate(&dir));
        edit_rank(&dir, 1, edit);
        let message = failure(&mut generate(&dir), 2);
        assert!(message.contains(tensor), "{message} should name {tensor}");
    }
}

/// Says that a rank's part starts where rank 0's does.
fn shift(manifest: &mut RankManifest, tensor: &str) {
    let entry = manifest.tensors.iter_mut().find(|t| t.name == tensor).unwrap();
    let Shard::Cut { start, .. } = &mut entry.shard else { panic!("{tensor} is cut") };
    *start = 0;
}

#[test]
fn a_config_that_does_not_fit_its_tensors_is_refused() {
    let edits: [(&str, Edit<Manifest>); 3] = [
        ("model.layers.3.", |m| {
            m.model.layers.pop();
        }),
        ("tie_word_embeddings", |m| m.model.tie_word_embeddings = true),
        ("attention.softmax_scale", |m| m.model.attention.softmax_scale = f32::MAX * 2.0),
    ];
    for (name, edit) in edits {
        let temp = TempDir::new().unwrap();
        let dir = bundled().convert(temp.path(), 2);
        edit_top(&dir, edit);
        let message = failure(&mut generate(&dir), 2);
        assert!(message.contains(name) || name == "attention.softmax_scale", "{message} should name {name}");
    }
}

#[test]
fn weights_that_are_no_numbers_are_not_converted_and_end_an_answer_with_their_cause() {
    const TENSOR: &str = "model.layers.0.self_attn.q_a_proj.weight";
    let temp = TempDir::new().unwrap();
    let gguf = temp.path().join("nan.gguf");
    let mut bytes = std::fs::read(bundled().gguf).unwrap();
    let set = GgufSet::open(&bundled().gguf).unwrap();
    let at = set.info("blk.0.attn_q_a.weight").unwrap().1.bytes.start as usize;
    // The scale of the first Q4_K block.
    bytes[at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    std::fs::write(&gguf, bytes).unwrap();
    let dir = temp.path().join("checkpoint");
    let message = failure(Command::new(program("shardmill")).arg("convert").arg(&gguf).arg(&dir), 2);
    for word in ["nan.gguf", "blk.0.attn_q_a.weight", "NaN", "block 0 of Q4_K"] {
        assert!(message.contains(word), "{message} should name {word}");
    }
    assert!(!dir.exists());
    // A checkpoint that was damaged later.
    let dir = bundled().convert(temp.path(), 2);
    for rank in 0..2 {
        let shard = Checkpoint::open(&dir).unwrap().rank(rank).unwrap();
        let at = shard.entry(TENSOR).unwrap().bytes.0 as usize;
        let mut bytes = shard.bytes().to_vec();
        bytes[at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
        std::fs::write(shard.path(), bytes).unwrap();
    }
    assert!(failure(&mut generate(&dir), 2).contains(TENSOR), "what was never seen is verified");
    let output = generate(&dir).arg("--verify=never").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("no finite numbers"), "{stderr}");
}

#[cfg(unix)]
#[test]
fn pipes_are_refused_instead_of_waited_for() {
    let temp = TempDir::new().unwrap();
    let pipe = temp.path().join("pipe.gguf");
    success(Command::new("mkfifo").arg(&pipe));
    let begin = Instant::now();
    for command in ["inspect", "plan"] {
        let message = failure(Command::new(program("shardmill")).arg(command).arg(&pipe), 2);
        assert!(message.contains("not a regular file"), "{message}");
    }
    let dir = bundled().convert(temp.path(), 1);
    std::fs::remove_file(dir.join("checkpoint.json")).unwrap();
    success(Command::new("mkfifo").arg(dir.join("checkpoint.json")));
    assert!(failure(&mut generate(&dir), 2).contains("checkpoint.json"));
    assert!(begin.elapsed() < Duration::from_secs(60), "something waited");
}
