//! Faulty files: each is refused at once, in one line that names the fault, with nothing left behind.

use crate::files::{bundled, refused, shardmill, shared};
use serde::Deserialize;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

#[derive(Deserialize)]
struct Case {
    file: String,
    what: String,
    accept: bool,
    must_name: Vec<Name>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Name {
    This(String),
    AnyOf(Vec<String>),
}

fn convert(input: &Path, out: &Path) -> std::process::Command {
    shardmill(&["convert".as_ref(), input.as_os_str(), out.as_os_str()])
}

#[test]
fn the_corpus_is_refused_by_name() {
    let Some(folder) = shared("hostile") else { return };
    let json = std::fs::read(folder.join("hostile.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&json).unwrap();
    assert!(cases.len() > 20);
    for case in cases {
        let temp = TempDir::new().unwrap();
        let out = temp.path().join("out");
        let mut command = convert(&folder.join(&case.file), &out);
        let start = Instant::now();
        if case.accept {
            assert!(command.output().unwrap().status.success(), "{}", case.file);
            continue;
        }
        let said = refused(&mut command, 2).to_lowercase();
        assert!(start.elapsed() < Duration::from_secs(1), "{}: {:?}", case.file, start.elapsed());
        for name in &case.must_name {
            let named = match name {
                Name::This(name) => said.contains(&name.to_lowercase()),
                Name::AnyOf(names) => names.iter().any(|name| said.contains(&name.to_lowercase())),
            };
            assert!(named, "{} ({}): {said}", case.file, case.what);
        }
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0, "{}: something was left", case.file);
    }
}

/// Wherever the file ends, the error says so and nothing is left.
#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let whole = std::fs::read(bundled().gguf).unwrap();
    let temp = TempDir::new().unwrap();
    let input = temp.path().join("cut.gguf");
    let last = whole.len() - 1;
    for len in [0, 3, 4, 20, 100, 5_000, 60_000, 1_000_000, 20_000_000, last] {
        std::fs::write(&input, &whole[..len]).unwrap();
        let said = refused(&mut convert(&input, &temp.path().join("out")), 2);
        assert!(said.contains("cut.gguf"), "{said}");
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1, "{len} bytes: something was left");
    }
}
