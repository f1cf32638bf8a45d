//! NVFP4 weights with scales beside them, as llama.cpp writes them, against the same model with the scales multiplied into F32
//! weights.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../converter/tests/suite/made.rs"]
#[allow(dead_code, reason = "the converter's own tests use the rest")]
mod made;

use formats::{Dtype, quant};
use made::{EXPERTS, F32, FE, Gguf, HIDDEN, NVFP4};
use runtime::device::DeviceOptions;
use runtime::engine::Arithmetic;
use runtime::logits::{LogitsOptions, LogitsRunner};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;
use tests::{gpu, max_abs_difference, program, success};

const TOKENS: [u32; 9] = [5, 70, 71, 200, 3, 99, 150, 256, 12];

/// Every weight that may have one: of a dense layer, of attention, of routed and shared experts, of the head.
fn scaled(fused: bool) -> Gguf {
    let mut gguf = Gguf::glm_dsa();
    if fused {
        gguf.remove("blk.1.ffn_gate_exps.weight");
        gguf.remove("blk.1.ffn_up_exps.weight");
        gguf.put("blk.1.ffn_gate_up_exps.weight", &[HIDDEN, 2 * FE, EXPERTS], NVFP4);
    }
    let stacks: &[&str] = if fused { &["gate_up", "down"] } else { &["gate", "up", "down"] };
    for (i, stack) in stacks.iter().enumerate() {
        let scales: Vec<f32> = (0..EXPERTS).map(|e| 0.5 + 0.3 * e as f32 + 0.07 * i as f32).collect();
        gguf.scale(&format!("blk.1.ffn_{stack}_exps"), &scales);
    }
    for (i, base) in [
        "output",
        "blk.0.attn_q_a",
        "blk.0.attn_q_b",
        "blk.1.attn_kv_a_mqa",
        "blk.1.attn_output",
        "blk.0.ffn_gate",
        "blk.0.ffn_up",
        "blk.0.ffn_down",
        "blk.1.ffn_gate_shexp",
        "blk.1.ffn_up_shexp",
        "blk.1.ffn_down_shexp",
    ]
    .iter()
    .enumerate()
    {
        gguf.scale(base, &[0.4 + 0.17 * i as f32]);
    }
    gguf.put("blk.1.ffn_up_shexp.input_scale", &[1], F32);
    gguf.put("blk.1.ffn_down_exps.input_scale", &[EXPERTS], F32);
    gguf
}

/// The same model with the scales multiplied into F32 weights.
fn multiplied(scaled: &Gguf) -> Gguf {
    let mut gguf = scaled.clone();
    gguf.tensors.retain(|t| !t.name.ends_with("scale"));
    for tensor in scaled.tensors.iter().filter(|t| t.name.ends_with(".scale")) {
        let scales: Vec<f32> = tensor.data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let weight = gguf.tensor(&tensor.name.replace(".scale", ".weight"));
        let mut values = vec![0.0; weight.ne.iter().product::<u64>() as usize];
        quant::decode(Dtype::NVFP4, &weight.data, &mut values).unwrap();
        let matrix = values.len() / scales.len();
        let scaled = values.iter().enumerate().map(|(i, value)| value * scales[i / matrix]);
        (weight.id, weight.data) = (F32, scaled.flat_map(f32::to_le_bytes).collect());
    }
    gguf
}

fn convert(gguf: &Gguf, dir: &Path, ranks: usize, options: &[&str]) {
    std::fs::create_dir(dir).unwrap();
    let (path, out) = (gguf.write(dir), dir.join("out"));
    let ranks = ranks.to_string();
    let mut command = Command::new(program("shardmill"));
    success(command.arg("convert").arg(&path).arg(&out).args(["--ranks", &ranks]).args(options));
    success(Command::new(program("shardmill")).arg("verify").arg(&out).arg("--source").arg(&path));
}

fn logits(dir: &Path, arithmetic: Arithmetic, device: DeviceOptions) -> Vec<f32> {
    let options = LogitsOptions { arithmetic, threads: None, chunk: 4, device };
    LogitsRunner::open(&dir.join("out"), &options).unwrap().run(&TOKENS, None).unwrap().values
}

#[test]
fn logits_are_those_of_the_multiplied_weights() {
    let temp = TempDir::new().unwrap();
    let cpu = DeviceOptions::default;
    for fused in [false, true] {
        let gguf = scaled(fused);
        let plain = temp.path().join(format!("plain-{fused}"));
        convert(&multiplied(&gguf), &plain, 1, &[]);
        let expected = logits(&plain, Arithmetic::Reference, cpu());
        let largest = expected.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let mut ignored = gguf.clone();
        for tensor in ignored.tensors.iter_mut().filter(|t| t.name.ends_with(".scale")) {
            tensor.data = tensor.data.chunks(4).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
        }
        let dir = temp.path().join(format!("ones-{fused}"));
        convert(&ignored, &dir, 1, &[]);
        let without = max_abs_difference(&logits(&dir, Arithmetic::Reference, cpu()), &expected);
        assert!(without > 0.1 * largest, "scales matter here: {without} of {largest}");
        for (ranks, experts) in [(1, "tensor"), (1, "expert"), (3, "tensor"), (3, "expert"), (8, "expert")] {
            let dir = temp.path().join(format!("scaled-{fused}-{ranks}-{experts}"));
            convert(&gguf, &dir, ranks, &["--experts", experts, "--layout", "mma16"]);
            // The fast path rounds activations to 8 bits where weights are in blocks, as here and not in the multiplied model.
            for (arithmetic, bound) in [(Arithmetic::Reference, 1e-4), (Arithmetic::Fast, 0.05)] {
                let difference = max_abs_difference(&logits(&dir, arithmetic, cpu()), &expected);
                let what = format!("{arithmetic:?}, {ranks} ranks, experts by {experts}, fused {fused}");
                eprintln!("{what}: max difference {difference:.1e} of {largest:.1}");
                assert!(difference <= bound * largest, "{what}: {difference} of {largest}");
            }
            if let Some(device) = gpu("NVFP4 with scales") {
                let difference = max_abs_difference(&logits(&dir, Arithmetic::Fast, device), &expected);
                assert!(difference <= 0.05 * largest, "GPU, {ranks} ranks: {difference} of {largest}");
            }
        }
    }
}
