//! Models and oracles, and how a test converts one.

use converter::Unfinished;
use converter::execute::{self, Summary};
use converter::plan::{Options, Plan, UnknownTensors, WeightLayout};
use converter::side_files::side_files;
use converter::work::{Control, Progress};
use formats::gguf::GgufSet;
use formats::manifest::ExpertCut;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

/// A model with the digests of its kv_b_proj.
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) gguf: PathBuf,
    pub(crate) kv_b: PathBuf,
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A folder of `../shared`, or a line on stderr that says what does not run without it.
pub(crate) fn shared(folder: &str) -> Option<PathBuf> {
    let path = workspace().join("../shared").join(folder);
    if path.exists() {
        return Some(path);
    }
    // Straight to the stream: the test harness hides what the print macros write.
    let line = format!("NOT RUN without ../shared/{folder}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    None
}

pub(crate) fn bundled() -> Model {
    Model {
        name: "tiny-glm5-UD-Q2_K",
        gguf: workspace().join("tests/data/tiny-glm5-UD-Q2_K.gguf"),
        kv_b: workspace().join("tests/data/oracles/tiny-glm5-UD-Q2_K/kv_b.json"),
    }
}

/// The bundled model, and the other one of `../shared`.
pub(crate) fn models() -> Vec<Model> {
    let other = shared("models/tiny-glm5-Q4_K_M.gguf").map(|gguf| Model {
        name: "tiny-glm5-Q4_K_M",
        gguf,
        kv_b: workspace().join("tests/data/oracles/tiny-glm5/kv_b.json"),
    });
    std::iter::once(bundled()).chain(other).collect()
}

/// The first or only GGUF of each folder of `../shared/oracles/archs`.
pub(crate) fn architectures() -> Vec<(String, PathBuf, PathBuf)> {
    let Some(folder) = shared("oracles/archs") else { return Vec::new() };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let dir = entry.unwrap().path();
        let mut parts: Vec<PathBuf> = std::fs::read_dir(&dir)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| p.extension().is_some_and(|e| e == "gguf"))
            .collect();
        parts.sort();
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        found.push((name, parts.swap_remove(0), dir.join("model.json")));
    }
    found.sort();
    found
}

pub(crate) fn options(ranks: usize) -> Options {
    Options { ranks, experts: ExpertCut::Tensor, unknown: UnknownTensors::Refuse, layout: WeightLayout::Ggml }
}

pub(crate) fn control() -> Control {
    Control::new(Some(2), Arc::default(), Progress::Quiet)
}

/// Converts with the library.
pub(crate) fn convert_with(gguf: &Path, out: &Path, options: Options, control: &Control) -> Summary {
    let set = GgufSet::open(gguf).unwrap();
    let plan = Plan::new(&set, options).unwrap();
    execute::convert(&set, &plan, &side_files(&set).unwrap(), out, Unfinished::Refuse, control).unwrap()
}

pub(crate) fn convert(gguf: &Path, out: &Path, ranks: usize) -> Summary {
    convert_with(gguf, out, options(ranks), &control())
}

/// The program itself.
pub(crate) fn shardmill(arguments: &[&std::ffi::OsStr]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardmill"));
    command.args(arguments);
    command
}

/// Runs the program, which must fail with `code` and one line on stderr, which is returned.
pub(crate) fn refused(command: &mut Command, code: i32) -> String {
    let output: Output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{command:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{command:?} should say one line, said:\n{stderr}");
    assert!(stderr.starts_with("shardmill: error: "), "{stderr}");
    stderr
}

/// Everything in a folder, with its bytes.
pub(crate) fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries
        .map(|e| (e.file_name().to_string_lossy().into_owned(), std::fs::read(e.path()).unwrap_or_default()))
        .collect()
}
