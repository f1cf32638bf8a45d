//! Rank files in the hands of Python's own safetensors.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use tests::{bundled, success, workspace};

/// What is installed, version by version. `ml_dtypes` is numpy's bfloat16.
const PACKAGES: [&str; 3] = ["safetensors==0.8.0", "numpy==2.4.6", "ml_dtypes==0.5.4"];

/// A Python with [`PACKAGES`], made once below the target folder; `None`, said on stderr, where there is no Python that can
/// make one or nowhere to take packages from.
fn python() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(PACKAGES.join("-").replace('=', ""));
    let python = folder.join("bin/python");
    if python.exists() {
        return Some(python);
    }
    let not_run = |why: String| {
        // Straight to the stream: the test harness hides what the print macros write.
        let line =
            format!("NOT RUN: Python's safetensors on rank files: {}\n", why.trim().replace('\n', " "));
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        None
    };
    let parent = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let made = parent.path().join("venv");
    let mut install = Command::new(made.join("bin/pip"));
    install
        .args(["install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"])
        .args(PACKAGES);
    for command in [Command::new("python3").args(["-m", "venv"]).arg(&made), &mut install] {
        match command.output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => return not_run(String::from_utf8_lossy(&output.stderr).into_owned()),
            Err(e) => return not_run(format!("{command:?}: {e}")),
        }
    }
    // Whole or not at all; its programs name the old path, but the interpreter finds its packages from where it lies.
    match std::fs::rename(&made, &folder) {
        Ok(()) => Some(python),
        Err(e) => not_run(e.to_string()),
    }
}

#[test]
fn pythons_safetensors_opens_every_rank_file_and_finds_every_byte() {
    let Some(python) = python() else { return };
    let temp = TempDir::new().unwrap();
    for ranks in [1, 3, 8] {
        let dir = bundled().convert(temp.path(), ranks);
        let script = workspace().join("tests/python/open_ranks.py");
        let output = success(Command::new(&python).arg("-B").arg(script).arg(&dir));
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said.trim(), format!("{ranks} rank files, {} tensors", 90 * ranks));
    }
    // The script can fail: a manifest that gives one tensor another type.
    let dir = temp.path().join("tiny-glm5-UD-Q2_K-1");
    let manifest = dir.join("rank-0-of-1.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let (before, after) = text.split_once("\"F32\"").unwrap();
    std::fs::write(&manifest, format!("{before}\"F16\"{after}")).unwrap();
    let script = workspace().join("tests/python/open_ranks.py");
    let output = Command::new(&python).arg("-B").arg(script).arg(&dir).output().unwrap();
    assert!(!output.status.success());
}
