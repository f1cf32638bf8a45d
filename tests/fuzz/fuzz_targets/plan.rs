//! Any bytes as a model to convert: planned, or refused with a message that names the file. Headers are what is fuzzed, so the
//! file is made longer by a hole in which their tensors may lie.
#![no_main]

use converter::plan::{Options, Plan, UnknownTensors, WeightLayout};
use converter::side_files::side_files;
use formats::gguf::GgufSet;
use formats::manifest::ExpertCut;
use libfuzzer_sys::fuzz_target;
use std::fs::File;
use std::io::Write;

/// More than the seeds' tensors take.
const HOLE_BYTES: u64 = 64 << 20;

fuzz_target!(|data: &[u8]| {
    let mut file =
        tempfile::Builder::new().suffix(".gguf").tempfile().expect("there is room for a small file");
    write(file.as_file_mut(), data).expect("there is room for a small file");
    let path = file.path();
    let name = path.file_name().expect("it has one").to_string_lossy();
    let set = match GgufSet::open(path) {
        Ok(set) => set,
        Err(error) => {
            assert!(error.to_string().contains(&*name), "{error}");
            return;
        }
    };
    for (ranks, experts, layout) in
        [(1, ExpertCut::Tensor, WeightLayout::Ggml), (3, ExpertCut::Expert, WeightLayout::Mma16)]
    {
        let options = Options { ranks, experts, unknown: UnknownTensors::Skip, layout };
        match Plan::new(&set, options) {
            Ok(plan) => assert!(!plan.text().is_empty() && plan.disk_bytes() > 0),
            Err(error) => assert!(error.to_string().contains(&*name), "{error}"),
        }
    }
    if let Err(error) = side_files(&set) {
        assert!(error.to_string().contains(&*name), "{error}");
    }
});

fn write(file: &mut File, data: &[u8]) -> std::io::Result<()> {
    file.write_all(data)?;
    file.set_len(data.len() as u64 + HOLE_BYTES)
}
