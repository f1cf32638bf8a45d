//! The workspace's own rules: which folders there are, which crate may see which, and that documents keep their word.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use tests::{success, workspace};

fn tracked() -> Vec<String> {
    let output = success(Command::new("git").args(["ls-files"]).current_dir(workspace()));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    fn walk(dir: &Path, found: &mut Vec<(PathBuf, String)>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    let mut found = Vec::new();
    walk(&workspace().join(folder), &mut found);
    assert!(!found.is_empty());
    found
}

#[test]
fn the_top_level_is_five_rooms_and_documents() {
    let folders: BTreeSet<String> =
        tracked().iter().filter_map(|path| path.split_once('/')).map(|(top, _)| top.to_owned()).collect();
    let expected = [".ci", "converter", "docs", "formats", "kernels", "runtime", "tests"].map(str::to_owned);
    assert_eq!(folders, BTreeSet::from(expected));
    for path in tracked().iter().filter(|path| path.starts_with("docs/")) {
        let is_document =
            [".md", ".service", "Dockerfile", ".dockerignore"].iter().any(|end| path.ends_with(end));
        assert!(is_document, "{path} is no document: code has its room");
    }
}

#[test]
fn crates_see_only_what_the_architecture_allows() {
    let allowed: [(&str, &[&str]); 4] = [
        ("formats", &[]),
        ("converter", &["formats"]),
        ("kernels", &["formats"]),
        ("runtime", &["formats", "kernels"]),
    ];
    for (name, may_see) in allowed {
        let manifest = std::fs::read_to_string(workspace().join(name).join("Cargo.toml")).unwrap();
        for other in ["formats", "converter", "kernels", "runtime"] {
            let sees = manifest.lines().any(|line| line.starts_with(&format!("{other}.workspace")));
            assert_eq!(sees, may_see.contains(&other), "{name} -> {other}");
        }
    }
    for folder in ["runtime/src", "kernels/src"] {
        for (path, text) in sources(folder) {
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            for line in code {
                let lower = line.to_lowercase();
                for word in ["gguf", "glm-dsa", "deepseek2", "deepseek32"] {
                    assert!(!lower.contains(word), "{}: {line}", path.display());
                }
            }
        }
    }
}

#[test]
fn every_dependency_has_a_reason() {
    let manifest = std::fs::read_to_string(workspace().join("Cargo.toml")).unwrap();
    let (_, section) = manifest.split_once("[workspace.dependencies]").unwrap();
    let section = section.split("\n[").next().unwrap();
    let mut reason = false;
    for line in section.lines().skip(1) {
        match line {
            "" => reason = false,
            _ if line.starts_with('#') => reason = true,
            _ if line.contains("path = ") => {}
            _ => assert!(reason, "{line} has no reason above it"),
        }
    }
}

#[test]
fn no_source_file_is_a_cave() {
    for folder in ["formats", "converter", "kernels", "runtime", "tests"] {
        for (path, text) in sources(folder) {
            let lines = text.lines().count();
            let table = path.ends_with("iq_grids.rs");
            assert!(
                lines <= 700 || table,
                "{} has {lines} lines: would a stranger find their way?",
                path.display()
            );
        }
    }
}

#[test]
fn documents_name_files_that_exist() {
    let tracked = tracked();
    for document in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SERVER.md",
        "docs/operations.md",
        "tests/data/README.md",
    ] {
        let text = std::fs::read_to_string(workspace().join(document)).unwrap();
        for word in text.split(['`', '(', ')', ' ', '\n', ',']) {
            let names_source =
                word.contains('/') && [".rs", ".toml", ".md", ".gguf"].iter().any(|end| word.ends_with(end));
            let elsewhere = ["http", "../shared", "target/"].iter().any(|start| word.starts_with(start));
            if names_source && !elsewhere {
                // A path may begin below its crate.
                let known = tracked.iter().any(|path| path == word || path.ends_with(&format!("/{word}")));
                assert!(known, "{document} names {word}");
            }
        }
    }
}
