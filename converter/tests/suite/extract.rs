//! Tensors taken out of GGUF files and checkpoints, and what `inspect` says of them.

use crate::files::{bundled, control, convert, convert_with, options, shardmill};
use crate::made::{F32, Gguf, HIDDEN, Value};
use converter::Existing;
use converter::extract::extract;
use converter::inspect::inspect;
use converter::work::{Control, Progress};
use formats::gguf::GgufSet;
use formats::manifest::ExpertCut;
use formats::quant;
use half::bf16;
use safetensors::SafeTensors;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tempfile::TempDir;

/// Id of the type with 84 bytes for 256 values.
const Q2_K: u32 = 10;

/// Extracts and reads back: shape and values.
fn values(input: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("x.safetensors");
    extract(input, name, &out, Existing::Refuse, &control()).unwrap();
    let bytes = std::fs::read(out).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.names(), [name]);
    let view = file.tensor(name).unwrap();
    assert_eq!(view.dtype(), safetensors::Dtype::F32);
    (view.shape().to_vec(), view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn decoded(gguf: &Path, name: &str) -> Vec<f32> {
    let view = GgufSet::open(gguf).unwrap().view(name).unwrap().unwrap();
    let mut values = vec![0.0; view.shape().elements() as usize];
    quant::decode(view.dtype(), view.bytes(), &mut values).unwrap();
    values
}

fn rounded(values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect()
}

#[test]
fn a_checkpoint_gives_back_what_the_gguf_has() {
    let gguf = bundled().gguf;
    let temp = TempDir::new().unwrap();
    for (experts, ranks) in [(ExpertCut::Tensor, 3), (ExpertCut::Expert, 5)] {
        let dir = temp.path().join(format!("{ranks}"));
        let mut options = options(ranks);
        options.experts = experts;
        convert_with(&gguf, &dir, options, &control());
        for name in [
            "token_embd.weight",
            "blk.1.attn_output.weight",
            "blk.1.ffn_down_exps.weight",
            "blk.2.ffn_up_exps.weight",
            "blk.0.ffn_down.weight",
            "blk.2.ffn_gate_inp.weight",
            "blk.1.exp_probs_b.bias",
            "blk.3.nextn.eh_proj.weight",
        ] {
            assert_eq!(values(&gguf, name).1, decoded(&gguf, name), "{name}");
            assert_eq!(values(&dir, name), values(&gguf, name), "{name} from {ranks} ranks");
        }
        for name in ["blk.2.attn_k_b.weight", "blk.2.attn_v_b.weight"] {
            let (shape, from_checkpoint) = values(&dir, name);
            assert_eq!(shape, values(&gguf, name).0);
            assert_eq!(from_checkpoint, rounded(decoded(&gguf, name)), "{name}");
        }
        for name in [
            "model.layers.2.self_attn.kv_b_proj.weight",
            "model.layers.1.mlp.experts.gate_proj.weight",
            "model.layers.0.self_attn.indexer.weights_proj.weight",
        ] {
            assert_eq!(values(&dir, name), values(&gguf, name), "{name}");
        }
    }
}

#[test]
fn gguf_files_of_any_architecture_open() {
    let temp = TempDir::new().unwrap();
    let mut other = Gguf { keys: Vec::new(), tensors: Vec::new() };
    other.set("general.architecture", Value::Str("llama".to_owned()));
    other.put("blk.0.attn_q.weight", &[HIDDEN, 4], F32);
    let path = other.write(temp.path());
    assert_eq!(values(&path, "blk.0.attn_q.weight").1, decoded(&path, "blk.0.attn_q.weight"));
    assert!(inspect(&path, None).unwrap().text.contains("llama"));
    let out = temp.path().join("x");
    let error =
        extract(&path, "model.layers.0.self_attn.kv_b_proj.weight", &out, Existing::Refuse, &control())
            .unwrap_err();
    assert!(error.to_string().contains("llama"), "{error}");
}

#[test]
fn empty_tensors_are_empty_whatever_their_other_dimensions() {
    let temp = TempDir::new().unwrap();
    let mut gguf = Gguf { keys: Vec::new(), tensors: Vec::new() };
    gguf.put("empty.weight", &[0, 1 << 62], F32);
    gguf.put("some.weight", &[4], F32);
    let path = gguf.write(temp.path());
    let out = temp.path().join("x.safetensors");
    let written = extract(&path, "empty.weight", &out, Existing::Refuse, &control()).unwrap();
    assert_eq!(written.shape.dims(), [1 << 62, 0]);
    assert!(inspect(&path, Some("empty.weight")).unwrap().text.contains("[]"));
}

/// Names of a file are shown, never obeyed.
#[test]
fn control_characters_of_names_reach_no_terminal() {
    let temp = TempDir::new().unwrap();
    let mut gguf = Gguf::glm_dsa();
    gguf.set("general.name", Value::Str("a\u{1b}[2Jb".to_owned()));
    gguf.put("blk.0.\u{1b}]0;x\u{7}.weight", &[4], F32);
    let path = gguf.write(temp.path());
    for command in ["inspect", "plan"] {
        let output = shardmill(&[command.as_ref(), path.as_os_str()]).output().unwrap();
        let printed = [output.stdout, output.stderr].concat();
        assert!(!printed.contains(&0x1b), "{}", String::from_utf8_lossy(&printed));
    }
}

#[test]
fn an_unknown_name_gets_the_closest_ones() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path().join("out");
    convert(&bundled().gguf, &dir, 2);
    let out = temp.path().join("x.safetensors");
    let refused = |input: &Path, name: &str| {
        extract(input, name, &out, Existing::Refuse, &control()).unwrap_err().to_string()
    };
    let said = refused(&bundled().gguf, "blk.1.attn_outptu.weight");
    assert!(said.contains("blk.1.attn_output.weight"), "{said}");
    let said = refused(&dir, "model.layers.1.self_attn.oproj.weight");
    assert!(said.contains("model.layers.1.self_attn.o_proj.weight"), "{said}");
    let said = inspect(&dir, Some("blk.1.attn_ouput.weight")).unwrap_err().to_string();
    assert!(said.contains("blk.1.attn_output.weight"), "{said}");
    assert!(!out.exists());
}

#[test]
fn an_existing_file_is_kept_unless_it_is_to_be_replaced() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("x.safetensors");
    std::fs::write(&out, "mine").unwrap();
    let name = "output_norm.weight";
    let error = extract(&bundled().gguf, name, &out, Existing::Refuse, &control()).unwrap_err();
    assert!(error.to_string().contains("already a file"), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), b"mine");
    let written = extract(&bundled().gguf, name, &out, Existing::Replace, &control()).unwrap();
    assert_eq!(std::fs::metadata(&out).unwrap().len(), written.bytes);
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
}

#[test]
fn inspect_says_the_same_of_a_tensor_wherever_it_lies() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path().join("out");
    convert(&bundled().gguf, &dir, 4);
    let native = "model.layers.1.mlp.experts.down_proj.weight";
    let whole = inspect(&dir, Some("blk.1.ffn_down_exps.weight")).unwrap().json;
    assert_eq!(whole["full_shape"], serde_json::json!([8, 256, 2048]));
    assert_eq!(whole["dtype"], "Q3_K");
    assert_eq!(whole["shards"].as_array().unwrap().len(), 4);
    let rank = inspect(&dir.join("rank-2-of-4.safetensors"), Some(native)).unwrap().json;
    assert_eq!((&rank["dtype"], &rank["shape"]), (&"Q3_K".into(), &serde_json::json!([8, 256, 512])));
    let gguf = inspect(&bundled().gguf, Some(native)).unwrap().json;
    assert_eq!((&gguf["dtype"], &gguf["shape"]), (&"Q3_K".into(), &serde_json::json!([8, 256, 2048])));
    assert_eq!(gguf["first_values"].as_array().unwrap().len(), 8);
    for half in ["blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight", "blk.1.attn_kv_b.weight"] {
        for path in [dir.clone(), dir.join("rank-2-of-4.safetensors")] {
            let found = inspect(&path, Some(half)).unwrap().json;
            assert_eq!(found["name"], "model.layers.1.self_attn.kv_b_proj.weight", "{half}");
            let fused = inspect(&path, Some("blk.1.ffn_gate_up_exps.weight")).unwrap();
            for (i, name) in ["gate", "up"].iter().enumerate() {
                let native = format!("model.layers.1.mlp.experts.{name}_proj.weight");
                let alone = inspect(&path, Some(&native)).unwrap();
                assert_eq!(fused.json["tensors"][i], alone.json);
                assert!(fused.text.contains(&alone.text), "{}", fused.text);
            }
            let said = inspect(&path, Some("blk.0.ffn_gate_up_exps.weight")).unwrap_err().to_string();
            assert!(said.contains("no tensor is called blk.0.ffn_gate_up_exps.weight"), "{said}");
        }
    }
    let rank_file = inspect(&dir.join("rank-2-of-4.safetensors"), None).unwrap();
    assert!(rank_file.text.contains("rank 2 of 4"), "{}", rank_file.text);
    assert_eq!(rank_file.json["tensors"].as_array().unwrap().len(), 90);
    let path = dir.join("rank-2-of-4.safetensors");
    let len = std::fs::metadata(&path).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
    let said = inspect(&path, None).unwrap_err().to_string();
    assert!(said.contains("1 more bytes were expected; it is truncated"), "{said}");
}

#[test]
fn an_interruption_leaves_what_was_there() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("x.safetensors");
    std::fs::write(&out, "mine").unwrap();
    let interrupted = Control::new(Some(1), Arc::new(AtomicBool::new(true)), Progress::Quiet);
    let name = "blk.1.ffn_down_exps.weight";
    let error = extract(&bundled().gguf, name, &out, Existing::Replace, &interrupted).unwrap_err();
    assert_eq!(error.exit_code(), 130, "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), b"mine");
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
}

/// Ctrl-C on the program itself, in the middle of a tensor that takes gigabytes.
#[test]
fn the_program_stops_when_it_is_told() {
    let temp = TempDir::new().unwrap();
    let (path, out) = (temp.path().join("large.gguf"), temp.path().join("x.safetensors"));
    // A hole of a file: a tensor of Q2_K zeroes, 2 GB as f32.
    let mut gguf = Gguf { keys: Vec::new(), tensors: Vec::new() };
    gguf.set("general.architecture", Value::Str("llama".to_owned()));
    gguf.put("large.weight", &[0, 1], F32);
    let tensor = gguf.tensor("large.weight");
    (tensor.ne, tensor.id) = (vec![1 << 20, 512], Q2_K);
    std::fs::copy(gguf.write(temp.path()), &path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() + (1 << 29) / 256 * 84).unwrap();
    let mut child = shardmill(&["extract".as_ref(), path.as_os_str(), "--out".as_ref(), out.as_os_str()])
        .args(["--tensor", "large.weight"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let partial = temp.path().join("x.safetensors.partial");
    let size = || std::fs::metadata(&partial).map_or(0, |metadata| metadata.len());
    while size() == 0 && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert_eq!(said, "shardmill: error: interrupted; nothing unfinished is left\n");
    assert!(!out.exists() && !partial.exists());
}
