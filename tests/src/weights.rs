//! Other weights of the bundled model: checkpoints that a running server may be given in its place.

use crate::{bundled, program, rewrite_gguf, success};
use formats::gguf::GgufSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which tensors differ from the bundled model's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Other {
    /// The last norm, which every rank has whole: other answers.
    Norm,
    /// The rows of `lm_head` that rank 0 has, each in the place of the one before: other words where those were said.
    FirstWords,
}

/// Converts the bundled model with other weights into `ranks` rank files, as `dir/name`.
pub fn convert_other(other: Other, dir: &Path, name: &str, ranks: usize) -> PathBuf {
    let set = GgufSet::open(&bundled().gguf).unwrap();
    let bytes = std::fs::read(bundled().gguf).unwrap();
    let content = |tensor: &str| {
        let range = &set.info(tensor).unwrap().1.bytes;
        bytes[range.start as usize..range.end as usize].to_vec()
    };
    let gguf = dir.join("tiny-glm5-UD-Q2_K.gguf");
    rewrite_gguf(&bundled().gguf, &gguf, |tensor, shape| {
        let mut own = content(tensor);
        match (other, tensor) {
            (Other::Norm, "output_norm.weight") => {
                for (at, value) in own.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let scale = if at % 2 == 0 { 0.1 } else { 2.0 };
                    *value = (f32::from_le_bytes(*value) * scale).to_le_bytes();
                }
            }
            (Other::FirstWords, "output.weight") => {
                let rows = usize::try_from(shape.dims()[0]).unwrap();
                let row = own.len() / rows;
                own[..rows / ranks * row].rotate_left(row);
            }
            _ => return None,
        }
        Some((set.info(tensor).unwrap().1.dtype, own))
    });
    let out = dir.join(name);
    let (ranks, command) = (ranks.to_string(), program("shardmill"));
    success(Command::new(command).arg("convert").arg(&gguf).arg(&out).args(["-q", "--ranks", &ranks]));
    std::fs::remove_file(gguf).unwrap();
    out
}
