//! Every type from a GGUF to a checkpoint and back.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::{Dtype, Shape, bytes_of, quant};
use safetensors::SafeTensors;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;
use tests::{bundled, program, rewrite_gguf, success, workspace};

/// Blocks that other programs made, without those that hold no numbers, as often as they are needed.
fn blocks(dtype: Dtype, shape: &Shape) -> Vec<u8> {
    let path = workspace().join(format!("tests/data/dequant/{dtype}.safetensors"));
    let len = bytes_of(dtype, shape).unwrap() as usize;
    let Ok(file) = std::fs::read(path) else {
        // Types without an oracle are plain ones.
        return (0..len).map(|i| (i % 61) as u8).collect();
    };
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let blocks = tensors.tensor("blocks").unwrap().data().to_vec();
    let finite = blocks
        .chunks_exact(dtype.block_bytes())
        .filter(|block| quant::first_not_finite(dtype, block).is_none())
        .filter(|block| {
            let mut values = vec![0.0; dtype.block_len()];
            quant::decode(dtype, block, &mut values).unwrap();
            values.iter().all(|x| x.is_finite())
        });
    finite.flatten().copied().collect::<Vec<u8>>().into_iter().cycle().take(len).collect()
}

fn extracted(from: &Path, tensor: &str, to: &Path) -> Vec<u8> {
    let mut extract = Command::new(program("shardmill"));
    success(extract.arg("extract").arg(from).args(["--force", "--tensor", tensor, "--out"]).arg(to));
    let bytes = std::fs::read(to).unwrap();
    SafeTensors::deserialize(&bytes).unwrap().tensors()[0].1.data().to_vec()
}

/// Experts of each type, cut in rows and columns: proven against the source, and the same numbers from both sides.
///
/// Cases: K57, T37, T38.
#[test]
fn every_type_comes_back_as_it_was() {
    let temp = TempDir::new().unwrap();
    let [gguf, out, tensor] = ["model.gguf", "out", "x.safetensors"].map(|name| temp.path().join(name));
    let mut types = 0;
    for dtype in Dtype::all().filter(|&dtype| quant::decoder(dtype).is_some()) {
        rewrite_gguf(&bundled().gguf, &gguf, |name, shape| {
            (name.starts_with("blk.1.") && name.ends_with("_exps.weight"))
                .then(|| (dtype, blocks(dtype, shape)))
        });
        let mut convert = Command::new(program("shardmill"));
        success(convert.arg("convert").arg(&gguf).arg(&out).args(["--ranks", "3", "-q"]));
        let mut verify = Command::new(program("shardmill"));
        success(verify.arg("verify").arg(&out).arg("--source").arg(&gguf));
        let name = "blk.1.ffn_down_exps.weight";
        let [source, checkpoint] = [&gguf, &out].map(|from| extracted(from, name, &tensor));
        assert!(source == checkpoint, "{dtype}");
        assert!(source.iter().any(|&byte| byte != 0), "{dtype}: nothing but zeros");
        std::fs::remove_dir_all(&out).unwrap();
        types += 1;
    }
    assert_eq!(types, 33);
}
