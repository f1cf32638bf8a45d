//! Every type from a GGUF to a checkpoint and back.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::checkpoint::Checkpoint;
use formats::layout::{Layout, mma16};
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

/// Experts of each type, cut in rows and columns and in each layout that has a place for it: proven against the source, and the
/// same numbers from both sides.
///
/// Cases: K57, T37, T38.
#[test]
fn every_type_comes_back_as_it_was() {
    const GGUF_NAME: &str = "blk.1.ffn_down_exps.weight";
    const NATIVE_NAME: &str = "model.layers.1.mlp.experts.down_proj.weight";
    let temp = TempDir::new().unwrap();
    let [gguf, out, tensor] = ["model.gguf", "out", "x.safetensors"].map(|name| temp.path().join(name));
    let (mut types, mut tiled) = (0, 0);
    for dtype in Dtype::all().filter(|&dtype| quant::decoder(dtype).is_some()) {
        rewrite_gguf(&bundled().gguf, &gguf, |name, shape| {
            (name.starts_with("blk.1.") && name.ends_with("_exps.weight"))
                .then(|| (dtype, blocks(dtype, shape)))
        });
        let source = extracted(&gguf, GGUF_NAME, &tensor);
        assert!(source.iter().any(|&byte| byte != 0), "{dtype}: nothing but zeros");
        let has_tiles = mma16::MULTIPLIED.contains(&dtype);
        let layouts = [("ggml", Layout::Ggml), ("mma16", Layout::Mma16)];
        for (word, layout) in layouts.into_iter().filter(|(_, layout)| *layout == Layout::Ggml || has_tiles) {
            let mut convert = Command::new(program("shardmill"));
            convert.arg("convert").arg(&gguf).arg(&out).args(["--ranks", "2", "-q", "--layout", word]);
            success(&mut convert);
            let mut verify = Command::new(program("shardmill"));
            success(verify.arg("verify").arg(&out).arg("--source").arg(&gguf));
            let shard = Checkpoint::open(&out).unwrap().rank(1).unwrap();
            assert_eq!(shard.entry(NATIVE_NAME).unwrap().layout, layout, "{dtype}");
            assert!(source == extracted(&out, GGUF_NAME, &tensor), "{dtype} in {word}");
            std::fs::remove_dir_all(&out).unwrap();
            tiled += usize::from(layout == Layout::Mma16);
        }
        types += 1;
    }
    assert_eq!((types, tiled), (33, mma16::MULTIPLIED.len()));
}
