//! What the tests share: where the small model's text files and their oracles lie.

#![allow(dead_code, reason = "every test program takes what it needs")]

use runtime::dialect::Dialect;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// A file or folder of `../shared`, or its committed copy.
fn data(shared: &str, copy: &str) -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let shared = workspace.join("../shared").join(shared);
    if shared.exists() { shared } else { workspace.join("tests/data").join(copy) }
}

/// The folder with the small model's `tokenizer.json`, `chat_template.jinja` and `generation_config.json`.
pub(crate) fn text_files() -> PathBuf {
    data("models/tiny-glm5-hf", "tiny-glm5-hf")
}

/// They, opened.
pub(crate) fn dialect() -> Dialect {
    Dialect::open(&text_files()).unwrap()
}

/// One of the small model's oracles.
pub(crate) fn oracle<T: DeserializeOwned>(name: &str) -> T {
    let path = data(&format!("oracles/tiny-glm5/{name}"), &format!("oracles/tiny-glm5/{name}"));
    let json = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&json).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
