//! Every kind of damage is found and named.

use crate::files::{bundled, control, convert, convert_with, options, shardmill};
use converter::verify::{Report, verify};
use formats::checkpoint::Checkpoint;
use formats::manifest::{Layout, Manifest, RankManifest, Shard, Skipped, TensorEntry, TransformKind};
use formats::{Digest, digest};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

fn checkpoint(temp: &TempDir, ranks: usize) -> PathBuf {
    let out = temp.path().join("out");
    convert(&bundled().gguf, &out, ranks);
    out
}

fn failures(dir: &Path) -> Vec<String> {
    let report = verify(dir, None, &control()).unwrap();
    assert_eq!(report.ok, report.failures.is_empty());
    report.failures
}

/// Exactly one failure, which names each of `names`.
fn one_failure(dir: &Path, names: &[&str]) {
    let found = failures(dir);
    assert_eq!(found.len(), 1, "{found:?}");
    for name in names {
        assert!(found[0].contains(name), "{} should name {name}", found[0]);
    }
}

fn flip(path: &Path, at: u64) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at as usize] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// Cases: K59.
#[test]
fn a_flipped_byte_names_rank_file_chunk_and_tensor() {
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 1);
    let shard = Checkpoint::open(&dir).unwrap().rank(0).unwrap();
    let name = "model.layers.2.mlp.experts.down_proj.weight";
    let at = shard.entry(name).unwrap().bytes.1 - 1;
    let chunk = at / digest::CHUNK_BYTES;
    assert!(chunk > 0, "the model has more than one chunk on one rank");
    flip(shard.path(), at);
    let chunk = format!("chunk {chunk} ");
    one_failure(&dir, &["rank 0", "rank-0-of-1.safetensors", &chunk, name]);
    let output = shardmill(&["verify".as_ref(), dir.as_os_str()]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("FAILED, 1 faults"));
}

#[test]
fn a_flipped_header_names_the_header() {
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 2);
    flip(&dir.join("rank-1-of-2.safetensors"), 4000);
    let found = failures(&dir);
    assert!(
        found.iter().any(|f| f.contains("rank 1") && f.contains("chunk 0") && f.contains("header")),
        "{found:?}"
    );
}

#[test]
fn other_files_are_held_against_their_digests() {
    for (file, names) in [
        ("tokenizer.json", &["tokenizer.json", "digest"][..]),
        ("rank-1-of-2.json", &["rank-1-of-2.json"]),
        ("B3SUMS", &["B3SUMS"]),
    ] {
        let temp = TempDir::new().unwrap();
        let dir = checkpoint(&temp, 2);
        flip(&dir.join(file), 30);
        let found = failures(&dir);
        assert!(!found.is_empty(), "{file}");
        assert!(names.iter().all(|name| found[0].contains(name)), "{found:?}");
    }
}

#[test]
fn missing_and_short_files_are_failures_and_no_checkpoint_is_bad_input() {
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 2);
    let rank = dir.join("rank-1-of-2.safetensors");
    let file = std::fs::OpenOptions::new().write(true).open(&rank).unwrap();
    file.set_len(100_000).unwrap();
    one_failure(&dir, &["rank-1-of-2.safetensors", "100000"]);
    std::fs::remove_file(&rank).unwrap();
    one_failure(&dir, &["rank-1-of-2.safetensors"]);
    std::fs::remove_file(dir.join("chat_template.jinja")).unwrap();
    assert_eq!(failures(&dir).len(), 2);
    std::fs::remove_file(dir.join("checkpoint.json")).unwrap();
    assert_eq!(verify(&dir, None, &control()).unwrap_err().exit_code(), 2);
    // Of a checkpoint without any rank file no tensor is missed besides.
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 1);
    std::fs::remove_file(dir.join("rank-0-of-1.safetensors")).unwrap();
    let report = verify(&dir, Some(&bundled().gguf), &control()).unwrap();
    assert_eq!(report.failures.len(), 1, "{:?}", report.failures);
}

/// Neither waits for a pipe's other end nor reads gigabytes of nothing.
#[test]
fn what_is_no_file_of_the_right_size_is_not_read() {
    for file in ["tokenizer.json", "chat_template.jinja", "B3SUMS", "rank-1-of-2.json", "checkpoint.json"] {
        let temp = TempDir::new().unwrap();
        let dir = checkpoint(&temp, 2);
        let path = dir.join(file);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        let large = failures(&dir);
        assert!(!large.is_empty() && large.iter().all(|f| f.contains(file)), "{large:?}");
        std::fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let pipe = failures(&dir);
        let says = |f: &String| f.contains(file) && f.contains("not a regular file");
        assert!(!pipe.is_empty() && pipe.iter().all(says), "{pipe:?}");
    }
}

/// Rewrites a rank's manifest, and all digests that follow from it, so that only its contents are wrong.
fn rewrite(dir: &Path, rank: usize, change: impl FnOnce(&mut RankManifest)) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let mut manifest = checkpoint.rank_manifest(rank).unwrap();
    change(&mut manifest);
    let bytes = serde_json::to_vec(&manifest).unwrap();
    let mut top = checkpoint.manifest().clone();
    let entry = &mut top.rank_files[rank];
    entry.manifest_blake3 = Digest::of(&bytes);
    entry.blake3 = manifest.blake3;
    std::fs::write(dir.join(&entry.manifest), bytes).unwrap();
    std::fs::write(dir.join("checkpoint.json"), serde_json::to_vec(&top).unwrap()).unwrap();
}

#[test]
fn parts_that_do_not_make_up_the_whole_are_found() {
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 2);
    rewrite(&dir, 1, |manifest| {
        let name = "model.layers.1.self_attn.kv_b_proj.weight";
        let entry = manifest.tensors.iter_mut().find(|t| t.name == name).unwrap();
        let Shard::Cut { start, .. } = &mut entry.shard else { panic!("kv_b_proj is cut") };
        *start -= 448;
    });
    let found = failures(&dir);
    let named =
        |what: &str| found.iter().any(|f| f.contains("layers.1.self_attn.kv_b_proj") && f.contains(what));
    assert!(named("one from 1344"), "{found:?}");
    assert!(named("heads"), "{found:?}");
}

#[test]
fn a_replica_that_differs_is_found_even_with_right_digests() {
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 2);
    let name = "model.layers.1.mlp.gate.weight";
    let shard = Checkpoint::open(&dir).unwrap().rank(1).unwrap();
    flip(shard.path(), shard.entry(name).unwrap().bytes.0);
    let bytes = std::fs::read(shard.path()).unwrap();
    rewrite(&dir, 1, |manifest| {
        manifest.blake3 = Digest::of(&bytes);
        manifest.chunks = (0..manifest.chunks.len())
            .map(|i| {
                let range = manifest.chunk(i);
                let chunk = &bytes[range.start as usize..range.end as usize];
                digest::chunk_digest(chunk, range.start, manifest.bytes)
            })
            .collect();
    });
    let found: Vec<String> = failures(&dir).into_iter().filter(|f| !f.starts_with("B3SUMS")).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("rank 1") && found[0].contains(name), "{found:?}");
}

#[test]
fn the_source_finds_values_that_digests_cannot() {
    let temp = TempDir::new().unwrap();
    let gguf = temp.path().join("model.gguf");
    let mut bytes = std::fs::read(bundled().gguf).unwrap();
    std::fs::write(&gguf, &bytes).unwrap();
    let dir = temp.path().join("out");
    convert_with(&gguf, &dir, options(3), &control());
    let set = formats::gguf::GgufSet::open(&gguf).unwrap();
    let names = ["blk.1.ffn_down_exps.weight", "blk.2.attn_v_b.weight", "blk.1.indexer.proj.weight"];
    for name in names {
        let (_, info) = set.info(name).unwrap();
        bytes[info.bytes.end as usize - 20] ^= 0x40;
    }
    drop(set);
    std::fs::write(&gguf, &bytes).unwrap();
    let Report { failures, .. } = verify(&dir, Some(&gguf), &control()).unwrap();
    for name in names.iter().chain(&["model.gguf: digest"]) {
        assert!(failures.iter().any(|f| f.contains(name)), "{failures:?} should name {name}");
    }
    // A routed expert's columns lie on one rank; a replicated tensor on all three.
    let of = |name: &str| failures.iter().filter(|f| f.contains(name)).count();
    assert_eq!((of(names[0]), of(names[1]), of(names[2])), (1, 1, 3), "{failures:?}");
}

#[test]
fn another_model_is_not_the_source() {
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 2);
    let other = crate::made::Gguf::glm_dsa().write(temp.path());
    let report = verify(&dir, Some(&other), &control()).unwrap();
    assert!(report.failures[0].contains("not the source of this checkpoint"), "{:?}", report.failures);
}

/// Rewrites checkpoint.json and the lines of B3SUMS that follow from it, so that only its contents are wrong.
fn rewrite_top(dir: &Path, change: impl FnOnce(&mut Manifest)) {
    let mut top = Checkpoint::open(dir).unwrap().manifest().clone();
    let before = std::fs::read(dir.join("checkpoint.json")).unwrap();
    change(&mut top);
    let bytes = serde_json::to_vec(&top).unwrap();
    let sums = std::fs::read_to_string(dir.join("B3SUMS")).unwrap();
    let sums = sums.replace(&Digest::of(&before).to_string(), &Digest::of(&bytes).to_string());
    let listed = |line: &&str| {
        let name = line.split("  ").nth(1).unwrap();
        name.starts_with("rank-") || name == "checkpoint.json" || top.files.iter().any(|f| f.file == name)
    };
    let sums: String = sums.lines().filter(listed).flat_map(|line| [line, "\n"]).collect();
    std::fs::write(dir.join("B3SUMS"), sums).unwrap();
    std::fs::write(dir.join("checkpoint.json"), bytes).unwrap();
}

#[test]
fn the_source_finds_files_and_skipped_tensors_that_are_not_its_own() {
    type Change = fn(&mut Manifest);
    let invented = |m: &mut Manifest| {
        let reason = "the model has no use for it".to_owned();
        m.skipped.push(Skipped { tensor: "blk.1.attn_output.weight".to_owned(), reason });
    };
    let changes: [(Change, &[&str]); 4] = [
        (|m| m.files.clear(), &["files: tokenizer.json", "files: chat_template.jinja"]),
        (|m| m.files[0].file = "notes.txt".to_owned(), &["files: notes.txt", "files: tokenizer.json"]),
        (invented, &["skipped: blk.1.attn_output.weight"]),
        (
            |m| {
                let reason = "a word\nof its own".to_owned();
                m.skipped.push(Skipped { tensor: "blk.99.x".to_owned(), reason });
            },
            &["skipped: blk.99.x", "a word\\nof its own"],
        ),
    ];
    for (change, names) in changes {
        let temp = TempDir::new().unwrap();
        let dir = checkpoint(&temp, 2);
        rewrite_top(&dir, change);
        let report = verify(&dir, Some(&bundled().gguf), &control()).unwrap();
        for name in names {
            assert!(
                report.failures.iter().any(|f| f.contains(name)),
                "{:?} should name {name}",
                report.failures
            );
        }
        assert!(report.failures.len() <= 5, "{:?}", report.failures);
    }
}

/// What a manifest says of where its tensors come from, edited by hand and signed again.
#[test]
fn the_source_finds_manifests_that_tell_another_story() {
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 2);
    let gguf = bundled().gguf;
    assert!(verify(&dir, Some(&gguf), &control()).unwrap().ok);
    let norm = "model.layers.1.input_layernorm.weight";
    let edit = |manifest: &mut RankManifest, change: fn(&mut TensorEntry)| {
        change(manifest.tensors.iter_mut().find(|t| t.name == norm).unwrap());
    };
    let found = |names: &[&str]| {
        let failures = verify(&dir, Some(&gguf), &control()).unwrap().failures;
        let named = |f: &&String| names.iter().all(|name| f.contains(name));
        assert_eq!(failures.iter().filter(named).count(), 1, "{failures:?} should name {names:?}");
    };
    rewrite(&dir, 1, |m| edit(m, |entry| entry.source = vec!["blk.1.attn\n_norm".to_owned()]));
    found(&["rank 1", norm, "source: expected blk.1.attn_norm.weight, found blk.1.attn\\n_norm"]);
    rewrite(&dir, 1, |m| edit(m, |entry| entry.source.clear()));
    found(&["rank 1", norm, "source"]);
    // The source has F32 there, so that its bytes are the same either way.
    rewrite(&dir, 0, |m| edit(m, |entry| entry.transform = TransformKind::Copy));
    found(&["rank 0", norm, "transform: expected dequantize, found copy"]);
    for tool in ["shardmill", "shardmill 1", "shardmill 0.1.x", "another 0.1.0"] {
        rewrite_top(&dir, |top| top.tool = tool.to_owned());
        found(&["checkpoint.json: tool", &format!("found {tool};")]);
    }
    rewrite_top(&dir, |top| top.tool = "shardmill 0.0.9".to_owned());
    let failures = verify(&dir, Some(&gguf), &control()).unwrap().failures;
    assert!(!failures.iter().any(|f| f.contains("tool")), "{failures:?}");
}

#[test]
fn a_layout_that_nobody_knows_is_found() {
    let temp = TempDir::new().unwrap();
    let dir = checkpoint(&temp, 2);
    for rank in 0..2 {
        rewrite(&dir, rank, |manifest| manifest.tensors[1].layout = Layout::from("spiral.v9".to_owned()));
    }
    let found: Vec<String> = failures(&dir).into_iter().filter(|f| !f.starts_with("B3SUMS")).collect();
    let of = |what: &str| found.iter().filter(|f| f.contains(what)).count();
    // Each rank's header names another layout than its manifest, and that one nobody knows.
    assert_eq!(
        (of("layout spiral.v9 is not known here"), of("safetensors header"), found.len()),
        (1, 2, 3),
        "{found:?}"
    );
}
