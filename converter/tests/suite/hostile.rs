//! Files that end early: refused in one line, with nothing left behind. Files that lie are in the end-to-end tests.

use crate::files::{bundled, refused, shardmill};
use std::path::Path;
use tempfile::TempDir;

fn convert(input: &Path, out: &Path) -> std::process::Command {
    shardmill(&["convert".as_ref(), input.as_os_str(), out.as_os_str()])
}

/// Wherever the file ends, the error says so and nothing is left.
/// Cases: G20, G21.
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
