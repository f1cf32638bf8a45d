//! Models that the caller names: `SHARDMILL_TEST_GGUFS` is a folder of GGUF files. Each is converted for one rank and for eight, in both
//! layouts, and a GPU (`SHARDRUN_TEST_DEVICE=cuda`) is held against the reference on the processor.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use runtime::device::DeviceOptions;
use runtime::engine::Arithmetic;
use runtime::logits::{Logits, LogitsOptions, LogitsRunner};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use tests::{gpu, kl_divergence, not_run, program, success};

/// Long enough for a step of many tokens.
const TOKENS: u32 = 200;

fn logits(dir: &Path, arithmetic: Arithmetic, device: &DeviceOptions) -> Logits {
    let options = LogitsOptions { arithmetic, threads: None, chunk: 128, device: device.clone() };
    let mut runner = LogitsRunner::open(dir, &options).unwrap();
    // Ids that every vocabulary has, in no order that means anything.
    let tokens: Vec<u32> = (0..TOKENS).map(|i| i * 7919 % 997).collect();
    runner.run(&tokens, None).unwrap()
}

#[test]
fn a_gpu_keeps_to_the_reference() {
    let Some(folder) = std::env::var_os("SHARDMILL_TEST_GGUFS").map(PathBuf::from) else {
        return not_run("models of the caller's without SHARDMILL_TEST_GGUFS, a folder of GGUF files");
    };
    let Some(device) = gpu("models of the caller's") else { return };
    let mut models: Vec<PathBuf> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    models.retain(|path| path.extension().is_some_and(|end| end == "gguf"));
    models.sort();
    assert!(!models.is_empty(), "no GGUF in {}", folder.display());
    let mut too_far = Vec::new();
    for model in models {
        let temp = TempDir::new().unwrap();
        let convert = |ranks: &str, layout: &str| {
            let out = temp.path().join(format!("{ranks}-{layout}"));
            let mut command = Command::new(program("shardmill"));
            success(
                command
                    .args(["convert", "--quiet", "--ranks", ranks, "--layout", layout])
                    .arg(&model)
                    .arg(&out),
            );
            out
        };
        let expected = logits(&convert("1", "ggml"), Arithmetic::Reference, &DeviceOptions::default());
        for layout in ["ggml", "mma16"] {
            for ranks in ["1", "8"] {
                let out = temp.path().join(format!("{ranks}-{layout}"));
                let out = if out.exists() { out } else { convert(ranks, layout) };
                let found = logits(&out, Arithmetic::Fast, &device);
                let rows = |logits: &Logits| {
                    logits.values.chunks(logits.vocab_size).map(<[f32]>::to_vec).collect::<Vec<_>>()
                };
                let mut divergences: Vec<f64> =
                    rows(&expected).iter().zip(rows(&found)).map(|(p, q)| kl_divergence(p, &q)).collect();
                let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
                // A model of random weights chooses some experts by less than any rounding: a few positions are then far away, and the mean with
                // them. Most positions must not be.
                divergences.sort_by(f64::total_cmp);
                let median = divergences[divergences.len() / 2];
                let far = divergences.iter().filter(|kl| **kl > 1e-2).count();
                let line = format!(
                    "{}, {ranks} ranks, {layout}: KL median {median:.2e}, mean {mean:.2e}, above 1e-2 at {far} of {} positions",
                    model.display(),
                    divergences.len()
                );
                eprintln!("{line}");
                // What is no number is too far as well.
                if median.is_nan() || median > 2e-3 {
                    too_far.push(line);
                }
            }
        }
    }
    assert!(too_far.is_empty(), "{too_far:#?}");
}
