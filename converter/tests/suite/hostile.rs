//! Files that end early: refused in one line, with nothing left behind. Files that lie are in the end-to-end tests.

use crate::files::{bundled, refused, shardmill, shared};
use crate::made::{Gguf, Value};
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

/// What is wrong with a header, its tokenizer and its chat template included, `plan` says in the very line in which `convert` would.
#[test]
fn plan_refuses_what_convert_refuses() {
    let temp = TempDir::new().unwrap();
    let mut inputs = Vec::new();
    let changes: [(&str, &str, Value); 6] = [
        ("type", "tokenizer.ggml.token_type", Value::I32s(vec![9; 263])),
        ("merge", "tokenizer.ggml.merges", Value::Strs(vec!["qq zz".to_owned()])),
        ("id", "tokenizer.ggml.mask_token_id", Value::U32(9999)),
        ("template", "tokenizer.chat_template", Value::Str("{% if %}".to_owned())),
        ("deep", "tokenizer.chat_template", Value::Str(format!("{{{{ {}x }}}}", "-".repeat(60_000)))),
        ("sampling", "general.sampling.temp", Value::F32(f32::NAN)),
    ];
    for (name, key, value) in changes {
        let mut gguf = Gguf::glm_dsa();
        gguf.set(key, value);
        let path = temp.path().join(format!("{name}.gguf"));
        std::fs::rename(gguf.write(temp.path()), &path).unwrap();
        inputs.push((path, Some(key)));
    }
    if let Some(folder) = shared("hostile") {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let fits = |path: &Path| {
            let name = path.file_name().unwrap().to_string_lossy();
            // A scale is looked at when its block is read.
            name.ends_with(".gguf") && !name.starts_with("ok") && name != "nan_scale.gguf"
        };
        inputs.extend(files.filter(|path| fits(path)).map(|path| (path, None)));
    }
    for (path, key) in inputs {
        let planned = refused(&mut shardmill(&["plan".as_ref(), path.as_os_str()]), 2);
        assert_eq!(planned, refused(&mut convert(&path, &temp.path().join("out")), 2));
        assert!(planned.contains(key.unwrap_or_default()), "{planned}");
    }
}
