//! What the end-to-end tests share: the models and their oracles, and the two programs as their users run them.
//!
//! Oracles come from `../shared` where it lies beside the project, and from the copies under `tests/data` otherwise. The copies
//! cover the bundled model; what only `../shared` has is said on stderr when it is not there.

#![allow(clippy::unwrap_used, reason = "what the tests share fails as a test does")]

pub mod blocks;
pub mod server;
pub mod weights;

use runtime::device::{Device, DeviceOptions};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The project's root: where this was compiled, or `SHARDMILL_WORKSPACE` on a machine that only runs what another compiled.
pub fn workspace() -> PathBuf {
    std::env::var_os("SHARDMILL_WORKSPACE").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests lies in the workspace").to_owned(),
        PathBuf::from,
    )
}

/// All ranks on the first GPU, where `SHARDRUN_TEST_DEVICE=cuda` asks for it, or a line on stderr that says what does not run
/// without one.
pub fn gpu(what: &str) -> Option<DeviceOptions> {
    if std::env::var("SHARDRUN_TEST_DEVICE").is_ok_and(|device| device == "cuda") {
        let device = Device::Cuda(Vec::new());
        return Some(DeviceOptions { device, shared: vec![0], ..DeviceOptions::default() });
    }
    let line = format!("NOT RUN on a GPU without SHARDRUN_TEST_DEVICE=cuda: {what}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
    None
}

/// The folder of models and oracles beside the project, or a line on stderr that says what does not run without it.
pub fn shared(what: &str) -> Option<PathBuf> {
    let path = workspace().join("../shared");
    if path.join("oracles").is_dir() {
        return Some(path);
    }
    say_once(&format!("NOT RUN without ../shared: {what}\n"));
    None
}

/// Says on stderr that something was not tested, and why.
pub fn not_run(what: &str) {
    say_once(&format!("NOT RUN: {what}\n"));
}

fn say_once(line: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(line.to_owned()) {
        // Straight to the stream: the test harness hides what the print macros write.
        std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
    }
}

/// A model with its oracles.
#[derive(Clone, Debug)]
pub struct Fixture {
    /// The GGUF's name without its ending.
    pub name: &'static str,
    /// The GGUF.
    pub gguf: PathBuf,
    /// The folder of its oracles.
    pub oracles: PathBuf,
}

/// The bundled model, which every machine has.
pub fn bundled() -> Fixture {
    let oracles =
        match shared("oracles of the bundled model at every position (the committed copies are thinned)") {
            Some(shared) => shared.join("oracles/tiny-glm5-UD-Q2_K"),
            None => workspace().join("tests/data/oracles/tiny-glm5-UD-Q2_K"),
        };
    Fixture {
        name: "tiny-glm5-UD-Q2_K",
        gguf: workspace().join("tests/data/tiny-glm5-UD-Q2_K.gguf"),
        oracles,
    }
}

/// The bundled model, and the larger one of `../shared`.
pub fn fixtures() -> Vec<Fixture> {
    let large = shared("tiny-glm5-Q4_K_M").map(|shared| Fixture {
        name: "tiny-glm5-Q4_K_M",
        gguf: shared.join("models/tiny-glm5-Q4_K_M.gguf"),
        oracles: shared.join("oracles/tiny-glm5"),
    });
    std::iter::once(bundled()).chain(large).collect()
}

/// One prompt of `chat.json`, with the model's answer to it.
#[derive(Clone, Debug, Deserialize)]
pub struct Chat {
    /// Messages as the API takes them.
    pub messages: serde_json::Value,
    /// Tools, or null.
    pub tools: serde_json::Value,
    /// Whether the answer starts inside the reasoning.
    pub enable_thinking: bool,
    /// The rendered prompt.
    pub prompt: String,
    /// Its ids.
    pub tokens: Vec<u32>,
    /// The greedy continuation.
    pub greedy: Vec<u32>,
    /// Its text.
    pub text: String,
    /// The token that ends it.
    pub stop: u32,
}

impl Fixture {
    /// All prompts.
    pub fn chats(&self) -> Vec<Chat> {
        read_json(&self.oracles.join("chat.json"))
    }

    /// The logits of prompt `index`.
    pub fn chat_logits(&self, index: usize) -> OracleLogits {
        OracleLogits::read(&self.oracles.join(format!("chat{index}.safetensors")))
    }

    /// Converts the model into `ranks` rank files under `dir`.
    pub fn convert(&self, dir: &Path, ranks: usize) -> PathBuf {
        self.convert_as("ggml", dir, ranks)
    }

    /// The same in a layout of choice.
    pub fn convert_as(&self, layout: &str, dir: &Path, ranks: usize) -> PathBuf {
        let suffix = if layout == "ggml" { String::new() } else { format!("-{layout}") };
        let out = dir.join(format!("{}-{ranks}{suffix}", self.name));
        let arguments = ["convert".as_ref(), self.gguf.as_os_str(), out.as_os_str()];
        let options = ["--ranks", &ranks.to_string(), "--layout", layout];
        success(Command::new(program("shardmill")).args(arguments).args(options));
        out
    }
}

/// Logits of some positions of a sequence.
#[derive(Clone, Debug)]
pub struct OracleLogits {
    /// The sequence.
    pub tokens: Vec<u32>,
    /// Positions of the rows.
    pub positions: Vec<usize>,
    /// One row for each position.
    pub rows: Vec<Vec<f32>>,
}

impl OracleLogits {
    /// Reads `tokens`, `positions` and `logits` of an oracle file.
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).expect("oracle files are safetensors");
        let ints = |name| -> Vec<u32> {
            let view = file.tensor(name).expect("oracles have it");
            assert_eq!(view.dtype(), Dtype::I32);
            view.data().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
        };
        let logits = file.tensor("logits").expect("oracles have logits");
        let values: Vec<f32> = logits.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let rows = values.chunks(logits.shape()[1]).map(<[f32]>::to_vec).collect();
        Self {
            tokens: ints("tokens"),
            positions: ints("positions").into_iter().map(|p| p as usize).collect(),
            rows,
        }
    }
}

/// Largest absolute difference; NaN counts as infinite.
pub fn max_abs_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let larger = |max: f32, d: f32| if d.is_nan() { f32::INFINITY } else { max.max(d) };
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, larger)
}

/// Kullback-Leibler divergence of the distribution of logits `q` from that of `p`, in nats, computed in f64.
pub fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |x: &[f32]| -> Vec<f64> {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = x.iter().map(|v| f64::from(v - max).exp()).sum();
        x.iter().map(|v| f64::from(v - max) - sum.ln()).collect()
    };
    log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// A JSON file of a known shape.
pub fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> T {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// `shardmill` or `shardrun`, built in the profile that the tests run in, or those in the folder `SHARDMILL_PROGRAMS`.
pub fn program(name: &str) -> PathBuf {
    static BIN: OnceLock<PathBuf> = OnceLock::new();
    BIN.get_or_init(|| std::env::var_os("SHARDMILL_PROGRAMS").map_or_else(build_programs, PathBuf::from))
        .join(name)
}

fn build_programs() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile = test.ancestors().nth(2).expect("tests lie in TARGET/PROFILE/deps");
    let target = profile.parent().expect("a profile lies in the target folder");
    let mut build = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    build
        .args(["build", "--quiet", "--locked", "-p", "converter", "-p", "runtime", "--bins", "--target-dir"])
        .arg(target);
    if profile.ends_with("release") {
        build.arg("--release");
    }
    success(build.current_dir(workspace()));
    profile.to_owned()
}

/// Runs a command that must succeed.
pub fn success(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Runs a command that must fail with `code` and one line on stderr, which is returned.
pub fn failure(command: &mut Command, code: i32) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let stderr = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
    assert_eq!(output.status.code(), Some(code), "{command:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{command:?} should say one line, said:\n{stderr}");
    stderr
}

/// What lies in a folder: names and sizes.
pub fn listing(dir: &Path) -> BTreeMap<String, u64> {
    let entries = std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    entries
        .map(|entry| {
            let entry = entry.expect("a folder can be listed");
            let bytes = entry.metadata().expect("an entry has metadata").len();
            (entry.file_name().to_string_lossy().into_owned(), bytes)
        })
        .collect()
}

/// Writes a copy of the one-file model `model` to `to`, with some tensors replaced by others of the same shape: `replaced` gets
/// a tensor's GGUF name and shape.
pub fn rewrite_gguf(
    model: &Path,
    to: &Path,
    replaced: impl Fn(&str, &formats::Shape) -> Option<(formats::Dtype, Vec<u8>)>,
) {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let bytes =
        bytes::Bytes::from(std::fs::read(model).unwrap_or_else(|e| panic!("{}: {e}", model.display())));
    let file = formats::gguf::GgufFile::parse(bytes.clone()).expect("it is a model");
    let first = string(&file.tensors[0].name);
    let keys_end = bytes.windows(first.len()).position(|window| window == first).expect("it is listed");
    let mut header = bytes[..keys_end].to_vec();
    let mut data: Vec<u8> = Vec::new();
    for info in &file.tensors {
        let own = || (info.dtype, bytes[info.bytes.start as usize..info.bytes.end as usize].to_vec());
        let (dtype, content) = replaced(&info.name, &info.shape).unwrap_or_else(own);
        assert_eq!(formats::bytes_of(dtype, &info.shape), Some(content.len() as u64), "{}", info.name);
        header.extend(string(&info.name));
        header.extend((info.shape.dims().len() as u32).to_le_bytes());
        header.extend(info.shape.dims().iter().rev().flat_map(|n| n.to_le_bytes()));
        header.extend(dtype.id().to_le_bytes());
        header.extend((data.len() as u64).to_le_bytes());
        data.extend(content);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    header.resize(header.len().next_multiple_of(32), 0);
    std::fs::write(to, [header, data].concat()).unwrap_or_else(|e| panic!("{}: {e}", to.display()));
}
