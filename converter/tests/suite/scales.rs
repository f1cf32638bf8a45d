//! Scales beside weights: carried with them, cut as they are, and refused where leaving them out would change the model.

use crate::files::{control, convert_with, options};
use crate::made::{EXPERTS, F32, FE, Gguf, HIDDEN, NVFP4, Q8_0};
use converter::Existing;
use converter::extract::extract;
use converter::inspect::inspect;
use converter::plan::{Plan, UnknownTensors, WeightLayout};
use converter::verify::verify;
use formats::checkpoint::Checkpoint;
use formats::gguf::GgufSet;
use formats::layout::Layout;
use formats::manifest::{ExpertCut, Shard};
use std::path::Path;
use tempfile::TempDir;

const SCALES: [f32; EXPERTS as usize] = [0.5, 0.25, 2.0, 3.0];

fn scaled() -> Gguf {
    let mut gguf = Gguf::glm_dsa();
    gguf.scale("blk.1.ffn_down_exps", &SCALES);
    gguf.scale("blk.1.attn_output", &[0.125]);
    gguf
}

fn bytes(dir: &Path, rank: usize, name: &str) -> (Shard, Vec<f32>) {
    let shard = Checkpoint::open(dir).unwrap().rank(rank).unwrap();
    let entry = shard.entry(name).unwrap();
    let view = shard.view(entry).unwrap();
    (entry.shard, view.bytes().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

/// Cases: T41.
#[test]
fn scales_go_with_their_weights() {
    let temp = TempDir::new().unwrap();
    let path = scaled().write(temp.path());
    let down = "model.layers.1.mlp.experts.down_proj.weight";
    let scale = "model.layers.1.mlp.experts.down_proj.weight_scale_2";
    for (experts, layout) in
        [(ExpertCut::Tensor, WeightLayout::Ggml), (ExpertCut::Expert, WeightLayout::Mma16)]
    {
        let out = temp.path().join(format!("{experts:?}"));
        convert_with(&path, &out, converter::plan::Options { experts, layout, ..options(3) }, &control());
        let report = verify(&out, Some(&path), &control()).unwrap();
        assert!(report.ok, "{:?}", report.failures);
        let mut all = Vec::new();
        for rank in 0..3 {
            let shard = Checkpoint::open(&out).unwrap().rank(rank).unwrap();
            let entry = shard.entry(down).unwrap();
            assert_eq!((entry.scale.as_deref(), &entry.layout), (Some(scale), &Layout::Ggml));
            let o_proj = shard.entry("model.layers.1.self_attn.o_proj.weight").unwrap();
            assert_eq!(o_proj.scale.as_deref(), Some("model.layers.1.self_attn.o_proj.weight_scale_2"));
            assert_eq!(bytes(&out, rank, "model.layers.1.self_attn.o_proj.weight_scale_2").1, [0.125]);
            assert_eq!(shard.entry("lm_head.weight").unwrap().scale, None);
            let (cut, values) = bytes(&out, rank, scale);
            match experts {
                ExpertCut::Tensor => assert_eq!((cut, &values[..]), (Shard::REPLICATED, &SCALES[..])),
                ExpertCut::Expert => assert_eq!(cut, entry.shard),
            }
            all.extend(values);
        }
        assert_eq!(all, if experts == ExpertCut::Tensor { SCALES.repeat(3) } else { SCALES.to_vec() });
    }
}

#[test]
fn a_fused_tensors_scale_is_that_of_both_halves() {
    let mut gguf = Gguf::glm_dsa();
    gguf.remove("blk.1.ffn_gate_exps.weight");
    gguf.remove("blk.1.ffn_up_exps.weight");
    gguf.put("blk.1.ffn_gate_up_exps.weight", &[HIDDEN, 2 * FE, EXPERTS], NVFP4);
    gguf.scale("blk.1.ffn_gate_up_exps", &SCALES);
    let temp = TempDir::new().unwrap();
    let (path, out) = (gguf.write(temp.path()), temp.path().join("out"));
    convert_with(&path, &out, options(2), &control());
    let report = verify(&out, Some(&path), &control()).unwrap();
    assert!(report.ok, "{:?}", report.failures);
    for half in ["gate", "up"] {
        let name = format!("model.layers.1.mlp.experts.{half}_proj.weight_scale_2");
        assert_eq!(bytes(&out, 1, &name).1, SCALES);
    }
    // Both programs that look at single tensors know it by the source's name.
    let name = "blk.1.ffn_gate_up_exps.scale";
    let file = temp.path().join("scale.safetensors");
    for input in [&path, &out] {
        let extracted = extract(input, name, &file, Existing::Replace, &control()).unwrap();
        assert_eq!(extracted.shape.dims(), [EXPERTS]);
        let written = std::fs::read(&file).unwrap();
        assert!(written.ends_with(&SCALES.map(f32::to_le_bytes).concat()), "{}", input.display());
    }
    let inspected = inspect(&out, Some(name)).unwrap();
    assert_eq!(inspected.json["tensors"].as_array().map(Vec::len), Some(2));
    let weight = inspect(&out, Some("model.layers.1.mlp.experts.up_proj.weight")).unwrap();
    let scale = "model.layers.1.mlp.experts.up_proj.weight_scale_2";
    assert_eq!(weight.json["scale"], scale);
    assert!(weight.text.lines().any(|line| line.starts_with("multiplied by") && line.ends_with(scale)));
}

/// Cases: T41.
#[test]
fn what_cannot_be_carried_is_refused_and_what_is_not_needed_is_listed() {
    let temp = TempDir::new().unwrap();
    let plan = |change: &dyn Fn(&mut Gguf)| {
        let mut gguf = scaled();
        change(&mut gguf);
        let set = GgufSet::open(&gguf.write(temp.path())).unwrap();
        let options = converter::plan::Options { unknown: UnknownTensors::Skip, ..options(2) };
        Plan::new(&set, options).map_err(|e| e.to_string())
    };
    let refused = |change: &dyn Fn(&mut Gguf), names: &[&str]| {
        let said = plan(change).unwrap_err();
        for name in names {
            assert!(said.contains(name) && !said.contains('\n'), "{said} should name {name}");
        }
    };
    // Tensors that are computed with at conversion, and tensors that are not there.
    for name in
        ["blk.1.ffn_gate_inp", "blk.0.attn_k_b", "blk.0.attn_norm", "output_norm", "blk.1.ffn_gate_up_exps"]
    {
        let scale = format!("{name}.scale");
        refused(&|g| g.put(&scale, &[1], F32), &[&scale, &format!("one of {name}.weight")]);
    }
    // The embeddings, which are used in its place, are not multiplied by it.
    let tied = |g: &mut Gguf| {
        g.remove("output.weight");
        g.put("output.scale", &[1], F32);
    };
    refused(&tied, &["output.scale", "one of output.weight"]);
    // Other spellings, which nothing here multiplies by.
    for ending in [".weight.scale", ".weight_scale", ".weight_scale_2"] {
        let scale = format!("blk.0.attn_output{ending}");
        refused(&|g| g.put(&scale, &[1], F32), &[&scale, "X.scale of X.weight"]);
    }
    // Of a half whose weight is the fused tensor's.
    let half = |g: &mut Gguf| {
        g.remove("blk.1.ffn_gate_exps.weight");
        g.remove("blk.1.ffn_up_exps.weight");
        g.put("blk.1.ffn_gate_up_exps.weight", &[HIDDEN, 2 * FE, EXPERTS], NVFP4);
        g.put("blk.1.ffn_gate_exps.scale", &[EXPERTS], F32);
    };
    refused(&half, &["blk.1.ffn_gate_exps.scale", "one of blk.1.ffn_gate_exps.weight"]);
    let scale = "blk.1.ffn_down_exps.scale";
    refused(&|g| g.tensor(scale).ne = vec![1], &[scale, "shape [4]", "[1]"]);
    refused(
        &|g| {
            g.remove(scale);
            g.put(scale, &[32, EXPERTS], Q8_0);
        },
        &[scale, "shape [4]"],
    );
    refused(
        &|g| {
            let tensor = g.tensor(scale);
            (tensor.id, tensor.data) = (1, vec![0; 2 * EXPERTS as usize]);
        },
        &[scale, "F32, as scales are", "F16"],
    );
    let plan = plan(&|g| {
        g.put("blk.1.ffn_down_exps.input_scale", &[EXPERTS], F32);
        g.put("blk.0.attn_output.input_scale", &[1], F32);
    })
    .unwrap();
    let skipped: Vec<_> =
        plan.skipped.iter().map(|s| (s.tensor.as_str(), s.reason.contains("activations"))).collect();
    assert_eq!(skipped, [("blk.1.ffn_down_exps.input_scale", true), ("blk.0.attn_output.input_scale", true)]);
}

#[test]
fn a_scale_that_is_no_number_is_refused() {
    let temp = TempDir::new().unwrap();
    let mut gguf = scaled();
    gguf.tensor("blk.1.attn_output.scale").data = f32::NAN.to_le_bytes().to_vec();
    let path = gguf.write(temp.path());
    let mut command = crate::files::shardmill(&["convert".as_ref(), path.as_os_str()]);
    let said = crate::files::refused(command.arg(temp.path().join("out")), 2);
    assert!(said.contains("blk.1.attn_output.scale") && said.contains("NaN"), "{said}");
}

/// A manifest whose scales do not fit would make a runtime multiply by the wrong numbers.
#[test]
fn scales_in_manifests_are_checked() {
    let temp = TempDir::new().unwrap();
    let (path, out) = (scaled().write(temp.path()), temp.path().join("out"));
    convert_with(&path, &out, options(2), &control());
    let manifest = Checkpoint::open(&out).unwrap().rank_manifest(0).unwrap();
    let parsed = |change: &dyn Fn(&mut formats::manifest::TensorEntry)| {
        let mut manifest = manifest.clone();
        let down = "model.layers.1.mlp.experts.down_proj.weight";
        change(manifest.tensors.iter_mut().find(|t| t.name == down).unwrap());
        let bytes = serde_json::to_vec(&manifest).unwrap();
        formats::manifest::RankManifest::parse(&bytes).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(parsed(&|_| {}), Ok(()));
    for (name, expected) in [
        ("nothing", "a tensor of this file"),
        ("model.layers.1.self_attn.o_proj.weight_scale_2", "F32 [4]"),
        ("model.layers.1.mlp.experts.down_proj.weight", "F32 [4]"),
        ("model.norm.weight", "F32 [4]"),
    ] {
        let said = parsed(&|entry| entry.scale = Some(name.to_owned())).unwrap_err();
        assert!(said.contains("down_proj.weight, scale") && said.contains(expected), "{said}");
    }
    // One of the right shape that is another weight's, none at all, and one whose weight has gone.
    let down = "model.layers.1.mlp.experts.down_proj";
    let refused = |change: &dyn Fn(&mut formats::manifest::TensorEntry), expected: &str| {
        let mut manifest = manifest.clone();
        manifest.tensors.iter_mut().for_each(change);
        let bytes = serde_json::to_vec(&manifest).unwrap();
        let said = formats::manifest::RankManifest::parse(&bytes).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    };
    let o_proj = "model.layers.1.self_attn.o_proj.weight";
    let q_a_proj = "model.layers.1.self_attn.q_a_proj.weight";
    refused(
        &|entry| {
            if entry.name == q_a_proj {
                entry.scale = Some(format!("{o_proj}_scale_2"));
            }
        },
        "q_a_proj.weight, scale: expected none",
    );
    refused(
        &|entry| entry.scale = None,
        &format!("o_proj.weight, scale: expected {o_proj}_scale_2, found none"),
    );
    refused(
        &|entry| {
            if entry.name == format!("{down}.weight") {
                (entry.name, entry.scale) = (format!("{down}.other"), None);
            }
        },
        &format!("tensor {down}.weight_scale_2: expected {down}.weight beside it"),
    );
}
