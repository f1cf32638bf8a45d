//! `shardmill` as its users run it: what it says of faults, what it proves, and that nothing half-done opens.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::checkpoint::Checkpoint;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use tests::{bundled, failure, fixtures, listing, program, success};

fn shardmill(arguments: &[&str], paths: &[&Path]) -> Command {
    let mut command = Command::new(program("shardmill"));
    command.args(arguments).args(paths);
    command
}

/// Converting must fail with one line that names each of `names`, and leave nothing behind.
fn refused(input: &Path, out: &Path, names: &[&str]) {
    let parent = out.parent().unwrap();
    let before = listing(parent);
    let message = failure(&mut shardmill(&["convert"], &[input, out]), 2);
    for name in names {
        assert!(message.contains(name), "{message} should name {name}");
    }
    assert_eq!(listing(parent), before, "{message}: something was left");
}

#[test]
fn verify_proves_every_tensor_against_the_source() {
    for fixture in fixtures() {
        let temp = TempDir::new().unwrap();
        for ranks in [1, 3, 8, 11] {
            let dir = fixture.convert(temp.path(), ranks);
            success(shardmill(&["verify"], &[&dir]).arg("--source").arg(&fixture.gguf));
            std::fs::remove_dir_all(dir).unwrap();
        }
    }
}

/// Everything that a failed check says.
fn failed_check(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    said
}

/// Flips one bit in the middle of every tensor in turn, in files of less than one chunk and of several.
#[test]
fn a_flipped_byte_is_found_and_named() {
    let temp = TempDir::new().unwrap();
    for ranks in [1, 8] {
        let dir = bundled().convert(temp.path(), ranks);
        let rank = ranks - 1;
        let path = dir.join(format!("rank-{rank}-of-{ranks}.safetensors"));
        let good = std::fs::read(&path).unwrap();
        let manifest = Checkpoint::open(&dir).unwrap().rank_manifest(rank).unwrap();
        for (i, entry) in manifest.tensors.iter().enumerate() {
            let at = (entry.bytes.0 + entry.bytes.1) / 2;
            let mut bytes = good.clone();
            bytes[at as usize] ^= 1 << (i % 8);
            std::fs::write(&path, &bytes).unwrap();
            let said = failed_check(&mut shardmill(&["verify"], &[&dir]));
            let expected =
                [format!("rank {rank}"), format!("chunk {}", at / manifest.chunk_bytes), entry.name.clone()];
            for expected in expected {
                assert!(said.contains(&expected), "{}: {said} should say {expected}", entry.name);
            }
        }
        let entry = manifest.tensor("model.layers.1.mlp.experts.down_proj.weight").unwrap();
        let mut bytes = good.clone();
        bytes[entry.bytes.0 as usize + 77] ^= 0x10;
        std::fs::write(&path, &bytes).unwrap();
        let said = failed_check(shardmill(&["verify"], &[&dir]).arg("--source").arg(bundled().gguf));
        assert!(said.matches(&entry.name).count() >= 2, "the chunk and the comparison both name it: {said}");

        let mut bytes = good.clone();
        bytes[20] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert!(failed_check(&mut shardmill(&["verify"], &[&dir])).contains("the header"));
    }
}

#[test]
fn damage_to_any_file_of_a_checkpoint_is_found() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 2);
    for name in listing(&dir).into_keys() {
        let path = dir.join(&name);
        let good = std::fs::read(&path).unwrap();
        for damaged in [flipped(&good), good[..good.len() - 2].to_vec()] {
            std::fs::write(&path, damaged).unwrap();
            let output = shardmill(&["verify"], &[&dir]).output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            // A top manifest that cannot be read is no checkpoint any more.
            let code = output.status.code();
            assert!(
                code == Some(1) || (code == Some(2) && name == "checkpoint.json"),
                "{name}: {code:?} {said}"
            );
        }
        std::fs::remove_file(&path).unwrap();
        let output = shardmill(&["verify"], &[&dir]).output().unwrap();
        assert!(matches!(output.status.code(), Some(1 | 2)), "{name} missing: {:?}", output.status);
        std::fs::write(&path, good).unwrap();
    }
    success(&mut shardmill(&["verify"], &[&dir]));
}

fn flipped(good: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    bytes
}

#[test]
fn inputs_that_are_no_model_are_refused_in_one_line() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    let write = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = temp.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let good = std::fs::read(bundled().gguf).unwrap();
    refused(&temp.path().join("none.gguf"), &out, &["none.gguf"]);
    refused(&write("empty.gguf", b""), &out, &["empty.gguf", "empty"]);
    refused(&write("page.gguf", b"<html></html>"), &out, &["page.gguf", "HTML"]);
    refused(&write("half.gguf", &good[..good.len() / 2]), &out, &["half.gguf", "blk.", "truncated"]);
    refused(&write("head.gguf", &good[..1000]), &out, &["head.gguf"]);
    let mut bytes = good.clone();
    let at = good.windows(7).position(|w| w == b"glm-dsa").unwrap();
    bytes[at..at + 7].copy_from_slice(b"gemma99");
    refused(&write("other.gguf", &bytes), &out, &["other.gguf", "gemma99", "glm-dsa"]);
}

#[test]
fn an_existing_output_is_left_alone() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("precious"), b"mine").unwrap();
    refused(&bundled().gguf, &out, &["out", "already"]);
    assert_eq!(std::fs::read(out.join("precious")).unwrap(), b"mine");
    let orphan = temp.path().join("no/such/parent");
    let message = failure(&mut shardmill(&["convert"], &[&bundled().gguf, &orphan]), 2);
    assert!(message.contains("no/such") && !temp.path().join("no").exists(), "{message}");
}

#[test]
fn ranks_and_options_out_of_range_are_refused() {
    let temp = TempDir::new().unwrap();
    for ranks in ["0", "-1", "1025", "many"] {
        let out = temp.path().join("out");
        let output =
            shardmill(&["convert"], &[&bundled().gguf, &out]).args(["--ranks", ranks]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "--ranks {ranks}");
        assert!(listing(temp.path()).is_empty());
    }
}

#[test]
fn two_conversions_are_byte_identical() {
    let temp = TempDir::new().unwrap();
    let fixture = bundled();
    let first = fixture.convert(&temp.path().join("."), 5);
    let moved = temp.path().join("first");
    std::fs::rename(&first, &moved).unwrap();
    let second = fixture.convert(temp.path(), 5);
    assert_eq!(listing(&moved), listing(&second));
    for name in listing(&second).into_keys() {
        assert_eq!(
            std::fs::read(moved.join(&name)).unwrap(),
            std::fs::read(second.join(&name)).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn the_safetensors_crate_opens_every_rank_file_and_starts_are_aligned() {
    let temp = TempDir::new().unwrap();
    for ranks in [3, 8] {
        let dir = bundled().convert(temp.path(), ranks);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        for rank in 0..ranks {
            let shard = checkpoint.rank(rank).unwrap();
            let file = safetensors::SafeTensors::deserialize(shard.bytes()).unwrap();
            assert_eq!(file.len(), shard.manifest().tensors.len());
            assert!(shard.manifest().data_start.is_multiple_of(4096));
            for entry in &shard.manifest().tensors {
                let (start, end) = entry.bytes;
                let view = file.tensor(&entry.name).unwrap();
                assert_eq!(view.data(), &shard.bytes()[start as usize..end as usize], "{}", entry.name);
                let own = if end == start { 256 } else { 1 << (end - start).trailing_zeros().min(8) };
                assert!(
                    start.is_multiple_of(own),
                    "{} starts at {start}, expected a multiple of {own}",
                    entry.name
                );
            }
        }
    }
}

#[test]
fn extract_gives_the_same_numbers_from_both_sides() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 7);
    let gguf = bundled().gguf;
    for (gguf_name, native) in [
        ("blk.1.ffn_down_exps.weight", "model.layers.1.mlp.experts.down_proj.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.2.indexer.proj.weight", "model.layers.2.self_attn.indexer.weights_proj.weight"),
        ("blk.2.attn_kv_b.weight", "model.layers.2.self_attn.kv_b_proj.weight"),
    ] {
        let mut found: Option<(Vec<usize>, Vec<u8>)> = None;
        for (i, (from, name)) in
            [(&gguf, gguf_name), (&gguf, native), (&dir, gguf_name), (&dir, native)].into_iter().enumerate()
        {
            if gguf_name.contains("kv_b") && i == 0 {
                // The source has the halves alone.
                continue;
            }
            let out = temp.path().join(format!("{i}.safetensors"));
            let mut command = shardmill(&["extract"], &[from]);
            success(command.args(["--tensor", name, "--out"]).arg(&out));
            let bytes = std::fs::read(&out).unwrap();
            std::fs::remove_file(&out).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let view = file.tensor(name).unwrap();
            assert_eq!(view.dtype(), safetensors::Dtype::F32);
            let this = (view.shape().to_vec(), view.data().to_vec());
            assert_eq!(*found.get_or_insert_with(|| this.clone()), this, "{name} from {}", from.display());
        }
    }
}

/// A disk too small for the conversion, as a tmpfs of 8 MB; made in a user namespace, or as root.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_line_and_leaves_nothing() {
    let temp = TempDir::new().unwrap();
    let disk = temp.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let script = "set -e; mount -t tmpfs -o size=8m none \"$1\"; set +e; \"$2\" convert \"$3\" \"$1/out\"; code=$?; ls -A \"$1\"; exit $code";
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"])
        .args([&disk, &program("shardmill"), &bundled().gguf])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    assert!(stderr.contains("space"), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "", "something was left on the disk");
}
