//! Damaged and hostile files: whatever the bytes, a value or one line, in bounded time and memory, and nothing left behind.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use bytes::Bytes;
use converter::Unfinished;
use converter::execute::convert;
use converter::plan::{Options, Plan, UnknownTensors, WeightLayout};
use converter::side_files::side_files;
use converter::work::{Control, Progress};
use formats::checkpoint::Checkpoint;
use formats::gguf::{GgufFile, GgufSet};
use formats::manifest::{ExpertCut, Manifest, RankManifest};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::{failure, listing, program, read_json, shared, success, workspace};

/// A complete model of 90 976 bytes, of which the header takes [`HEADER`].
fn small() -> PathBuf {
    workspace().join("tests/data/hostile/ok.gguf")
}

/// Bytes up to the small model's data section.
const HEADER: usize = 8576;

/// Numbers that careless arithmetic stumbles over.
const EXTREMES: [u64; 14] = [
    0,
    1,
    3,
    0xff,
    1 << 16,
    i32::MAX as u64,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    (1 << 42) + 1,
    1 << 61,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// SplitMix64: the same mutations on every machine.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to `end` - 1.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Damages a file in one of five ways and says how.
fn mutate(bytes: &mut Vec<u8>, numbers: &mut Numbers) -> String {
    let header = HEADER.min(bytes.len());
    if header < 16 {
        return "as it is".to_owned();
    }
    match numbers.below(8) {
        0 | 1 => {
            let flips: Vec<(usize, u8)> =
                (0..=numbers.below(3)).map(|_| (numbers.below(header), 1 << numbers.below(8))).collect();
            flips.iter().for_each(|&(at, bit)| bytes[at] ^= bit);
            format!("bits flipped at {flips:?}")
        }
        2..=4 => {
            let (at, value) = (numbers.below(header - 8), EXTREMES[numbers.below(EXTREMES.len())]);
            let width = if numbers.below(2) == 0 { 4 } else { 8 };
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            format!("{width} bytes of {value:#x} at {at}")
        }
        5 => {
            let end = if numbers.below(4) == 0 { bytes.len() } else { header };
            bytes.truncate(numbers.below(end));
            format!("cut off at {}", bytes.len())
        }
        6 => {
            let len = 1 + numbers.below(64.min(header / 2));
            let (a, b) = (numbers.below(header - len), numbers.below(header - len));
            let (first, second) = (bytes[a..a + len].to_vec(), bytes[b..b + len].to_vec());
            bytes[a..a + len].copy_from_slice(&second);
            bytes[b..b + len].copy_from_slice(&first);
            format!("{len} bytes at {a} and {b} swapped")
        }
        _ => {
            let at = numbers.below(bytes.len());
            bytes[at] = 0xff;
            format!("0xff at {at}")
        }
    }
}

/// What became of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Planned,
    Converted,
}

/// From a file to its plan and, where `out` is given, to a checkpoint that opens.
fn road(path: &Path, options: Options, out: Option<&Path>) -> Result<End, converter::Error> {
    let set = GgufSet::open(path)?;
    let plan = Plan::new(&set, options)?;
    assert!(!plan.text().is_empty());
    let files = side_files(&set)?;
    let Some(out) = out else { return Ok(End::Planned) };
    convert(
        &set,
        &plan,
        &files,
        out,
        Unfinished::Refuse,
        &Control::new(Some(1), Arc::default(), Progress::Quiet),
    )?;
    Checkpoint::open(out).unwrap_or_else(|e| panic!("what was converted opens: {e}"));
    std::fs::remove_dir_all(out).unwrap();
    Ok(End::Converted)
}

#[test]
fn whatever_the_bytes_a_value_or_one_line() {
    const MUTATIONS: usize = 3000;
    const MUTATIONS_OF_HOSTILE: usize = 60;
    /// Every n-th is converted when it can be.
    const CONVERTED: usize = 12;
    let mut corpus = vec![(small(), MUTATIONS)];
    if let Some(shared) = shared("mutations of the hostile files") {
        let files = listing(&shared.join("hostile"));
        let ggufs = files.into_keys().filter(|name| name.ends_with(".gguf"));
        corpus.extend(ggufs.map(|name| (shared.join("hostile").join(name), MUTATIONS_OF_HOSTILE)));
    }
    let temp = TempDir::new().unwrap();
    let (path, out) = (temp.path().join("mutated.gguf"), temp.path().join("out"));
    let mut numbers = Numbers(1);
    let (mut planned, mut converted, mut refused) = (0, 0, 0);
    let (start, mut slowest) = (Instant::now(), Duration::ZERO);
    for (source, mutations) in corpus {
        let good = std::fs::read(&source).unwrap();
        for case in 0..mutations {
            let mut bytes = good.clone();
            let how = format!("{}: {}", source.display(), mutate(&mut bytes, &mut numbers));
            std::fs::write(&path, &bytes).unwrap();
            let options = Options {
                ranks: [1, 2, 3, 8][case % 4],
                experts: [ExpertCut::Tensor, ExpertCut::Expert][case / 4 % 2],
                unknown: [UnknownTensors::Refuse, UnknownTensors::Skip][case / 8 % 2],
                layout: [WeightLayout::Ggml, WeightLayout::Mma16][case / 16 % 2],
            };
            let out = case.is_multiple_of(CONVERTED).then_some(out.as_path());
            let began = Instant::now();
            let end = catch_unwind(AssertUnwindSafe(|| road(&path, options, out)));
            slowest = slowest.max(began.elapsed());
            assert!(began.elapsed() < Duration::from_secs(5), "{how}: took {:?}", began.elapsed());
            match end.unwrap_or_else(|_| panic!("{how}: a panic, {options:?}")) {
                Ok(End::Planned) => planned += 1,
                Ok(End::Converted) => converted += 1,
                Err(error) => {
                    let message = error.to_string();
                    assert!(message.contains("mutated.gguf"), "{how}: {message}");
                    assert_eq!(message.lines().count(), 1, "{how}: {message}");
                    refused += 1;
                }
            }
            assert_eq!(listing(temp.path()).len(), 1, "{how}: something was left");
        }
    }
    println!(
        "{} mutated files: {planned} planned, {converted} converted, {refused} refused, in {:.1} s, the slowest in {slowest:?}",
        planned + converted + refused,
        start.elapsed().as_secs_f64()
    );
    assert!(planned > MUTATIONS / 20 && converted > 20 && refused > MUTATIONS / 2, "they test something");
}

/// A fuzzer that starts from what is refused at once finds little: seeds must follow the formats.
#[test]
fn seeds_of_the_fuzzers_are_accepted() {
    let seed = |name: &str| std::fs::read(workspace().join("tests/fuzz/seeds").join(name)).unwrap();
    Manifest::parse(&seed("manifest/checkpoint.json")).unwrap();
    RankManifest::parse(&seed("manifest/rank.json")).unwrap();
    GgufFile::parse(seed("gguf/tiny.gguf").into()).unwrap();
    let header = GgufFile::parse(std::fs::read(small()).unwrap().into()).unwrap();
    assert_eq!(header.data_start, HEADER as u64);
}

#[derive(Deserialize)]
struct Hostile {
    file: String,
    what: String,
    accept: bool,
    must_name: Vec<AnyOf>,
    /// Files that it is a part of a model with.
    #[serde(default)]
    also: Vec<String>,
}

/// A word, or several of which one will do.
#[derive(Deserialize)]
#[serde(untagged)]
enum AnyOf {
    This(String),
    These(Vec<String>),
}

impl AnyOf {
    fn is_in(&self, message: &str) -> bool {
        let named = |word: &String| message.contains(&word.to_lowercase());
        match self {
            Self::This(word) => named(word),
            Self::These(words) => words.iter().any(named),
        }
    }
}

/// A file of the corpus.
struct Case {
    path: PathBuf,
    what: String,
    /// What the one line must name; `None` for a file that must be accepted.
    names: Option<Vec<AnyOf>>,
}

/// Files made here of the small model, and those of `../shared`.
fn hostile(temp: &Path) -> Vec<Case> {
    let good = std::fs::read(small()).unwrap();
    let first_key = 24;
    let counts = [("tensor count", 8), ("metadata key count", 16), ("metadata key", first_key)];
    let mut cases: Vec<Case> = counts
        .iter()
        .flat_map(|(name, at)| [1 << 61, 1 << 63, u64::MAX].map(|value| (name, at, value)))
        .map(|(name, &at, value)| {
            let path = temp.join(format!("{at}-{value:x}.gguf"));
            let mut bytes = good.clone();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            std::fs::write(&path, bytes).unwrap();
            let what = format!("{value:#x} at {at}");
            Case { path, what, names: Some(vec![AnyOf::This((*name).to_owned())]) }
        })
        .collect();
    cases.push(Case { path: small(), what: "the small model".to_owned(), names: None });
    if let Some(shared) = shared("the hostile files") {
        let folder = shared.join("hostile");
        let listed: Vec<Hostile> = read_json(&folder.join("hostile.json"));
        let known: BTreeSet<&str> = listed
            .iter()
            .flat_map(|case| std::iter::once(&case.file).chain(&case.also))
            .map(|f| &**f)
            .collect();
        for file in listing(&folder).into_keys().filter(|name| name.ends_with(".gguf")) {
            assert!(known.contains(&*file), "{file} is not in hostile.json");
        }
        cases.extend(listed.into_iter().map(|case| Case {
            path: folder.join(case.file),
            what: case.what,
            names: (!case.accept).then_some(case.must_name),
        }));
        assert!(cases.len() > 35);
    }
    cases
}

/// `shardmill` below one of the shell's limits.
fn limited(limit: &str, arguments: &[&OsStr]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]).arg(program("shardmill"));
    command.args(arguments);
    command
}

/// The limit is on the address space, which no less than the resident set fits into; an allocation beyond it would end the
/// program with another exit code and more lines. One thread: each one's stack alone is 2 MiB of addresses.
/// Cases: G1, G2, G4, G6, G22.
#[test]
fn hostile_files_take_no_time_no_memory_and_leave_nothing() {
    const KIB: u32 = 64 << 10;
    let temp = TempDir::new().unwrap();
    let out = TempDir::new().unwrap();
    for Case { path, what, names } in hostile(temp.path()) {
        let checkpoint = out.path().join("checkpoint");
        let arguments = ["convert".as_ref(), path.as_os_str(), checkpoint.as_os_str()];
        let mut command = limited(&format!("-v {KIB}"), &arguments);
        command.args(["--threads", "1"]);
        let start = Instant::now();
        let Some(names) = names else {
            success(&mut command);
            assert!(checkpoint.is_dir(), "{} ({what})", path.display());
            std::fs::remove_dir_all(&checkpoint).unwrap();
            continue;
        };
        let message = failure(&mut command, 2).to_lowercase();
        assert!(start.elapsed() < Duration::from_secs(1), "{}: {:?}", path.display(), start.elapsed());
        for name in names {
            assert!(name.is_in(&message), "{} ({what}): {message}", path.display());
        }
        assert!(listing(out.path()).is_empty(), "{} ({what}): something was left", path.display());
    }
}

/// The limit is one that a program can hit.
#[test]
fn the_memory_limit_can_fail() {
    let output = limited("-v 4096", &["plan".as_ref(), small().as_os_str()]).output().unwrap();
    assert!(!output.status.success());
}

/// The small model in as many parts as splits have been seen to have, with fewer descriptors than parts.
/// Cases: S33b, S34, S35.
#[test]
fn a_split_of_1760_parts_opens_with_64_descriptors() {
    const PARTS: usize = 1760;
    let temp = TempDir::new().unwrap();
    let parts = split(&small(), temp.path(), PARTS);
    let [split, whole] = ["split", "whole"].map(|name| temp.path().join(name));
    let convert = |input: &Path, out: &Path| {
        let options = ["--allow-unknown", "--ranks", "2", "--quiet"].map(OsStr::new);
        let files = ["convert".as_ref(), input.as_os_str(), out.as_os_str()];
        success(&mut limited("-n 64", &[&files[..], &options].concat()));
    };
    // Built before the clock starts.
    program("shardmill");
    let start = Instant::now();
    convert(&parts[PARTS / 2], &split);
    println!("{PARTS} parts: {:.2} s", start.elapsed().as_secs_f64());
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    convert(&small(), &whole);
    for rank in ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors"] {
        let [split, whole] = [&split, &whole].map(|dir| std::fs::read(dir.join(rank)).unwrap());
        assert!(split == whole, "{rank} is the same, however the model was split");
    }
    std::fs::remove_file(&parts[3]).unwrap();
    std::fs::remove_file(&parts[PARTS - 1]).unwrap();
    let arguments = ["plan".as_ref(), parts[0].as_os_str()];
    let message = failure(&mut limited("-n 64", &arguments), 2);
    assert!(
        message.contains("-00004-of-01760.gguf") && message.contains("-01760-of-01760.gguf"),
        "{message}"
    );
}

/// Splits a model into files of at most one tensor each; parts beyond its tensors hold one that no model has, and the first
/// holds keys alone.
fn split(model: &Path, dir: &Path, parts: usize) -> Vec<PathBuf> {
    let bytes = Bytes::from(std::fs::read(model).unwrap());
    let file = GgufFile::parse(bytes.clone()).unwrap();
    assert!(file.tensors.len() < parts);
    let first = string(&file.tensors[0].name);
    let keys_end = bytes.windows(first.len()).position(|window| window == first).unwrap();
    let keys = &bytes[24..keys_end];
    (0..parts)
        .map(|part| {
            let path = dir.join(format!("model-{:05}-of-{parts:05}.gguf", part + 1));
            let mut out = b"GGUF\x03\0\0\0".to_vec();
            out.extend(u64::from(part > 0).to_le_bytes());
            let own = if part == 0 { file.metadata.len() as u64 } else { 0 };
            out.extend((own + 3).to_le_bytes());
            out.extend(if part == 0 { keys } else { &[] });
            let total = parts - 1;
            for (key, value) in [("split.no", part), ("split.count", parts), ("split.tensors.count", total)] {
                out.extend(string(key));
                // An i32.
                out.extend(5u32.to_le_bytes());
                out.extend((value as i32).to_le_bytes());
            }
            if part > 0 {
                // Spread over the parts, so that any order but the right one shows.
                let index = (part - 1) * 37 % (parts - 1);
                let data = tensor(&file, index, &mut out);
                out.resize(out.len().next_multiple_of(32), 0);
                out.extend(data);
            }
            std::fs::write(&path, out).unwrap();
            path
        })
        .collect()
}

/// Writes what a header says of tensor `index` and returns its bytes.
fn tensor(file: &GgufFile, index: usize, out: &mut Vec<u8>) -> Bytes {
    let (name, dims, id, data) = match file.tensors.get(index) {
        Some(info) => {
            let dims: Vec<u64> = info.shape.dims().iter().rev().copied().collect();
            let data = file.bytes().slice(info.bytes.start as usize..info.bytes.end as usize);
            (info.name.clone(), dims, info.dtype.id(), data)
        }
        None => (format!("filler.{index}"), vec![8], 0, Bytes::from_static(&[0; 32])),
    };
    out.extend(string(&name));
    out.extend((dims.len() as u32).to_le_bytes());
    out.extend(dims.iter().flat_map(|n| n.to_le_bytes()));
    out.extend(id.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    data
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
