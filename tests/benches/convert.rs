//! What a conversion costs next to copying the same bytes, and a verification next to hashing them, all in one run:
//!
//! ```text
//! cargo bench -p tests --bench convert [-- [FILE.gguf] [--ranks N] [--dir DIR] [--bin-dir DIR] [--json]]
//! ```
//!
//! Files are written under DIR, a temporary folder unless given; it needs room for the source once and the checkpoint twice.
//! Every figure is the median of [`ROUNDS`] rounds, and each round does everything once, so that other work on the machine
//! falls on all alike. The programs are release builds, made here unless `--bin-dir` says where they lie.
#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]

use bytes::Bytes;
use formats::gguf::{GgufFile, GgufSet};
use formats::map::MappedFile;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::File;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::{bundled, program};

const ROUNDS: usize = 3;
/// Of hashing and verifying alike.
const THREADS: &str = "2";
/// GLM-5's.
const VOCABULARY: u64 = 154_880;
/// How often a running program's memory is looked at.
const SAMPLE: Duration = Duration::from_millis(2);

struct Arguments {
    gguf: PathBuf,
    ranks: String,
    dir: PathBuf,
    shardmill: PathBuf,
    json: bool,
}

/// One thing that was done.
#[derive(Clone, Copy, Default)]
struct Cost {
    seconds: f64,
    /// Of all threads; `None` where it was not looked at.
    cpu_seconds: Option<f64>,
    /// Peak of resident memory that is not mapped files, as seen every [`SAMPLE`].
    anonymous_mb: Option<f64>,
}

/// A line of the table.
struct Line {
    what: &'static str,
    bytes: u64,
    cost: Cost,
    /// What it is compared with, and how many times as long it takes.
    ratio: Option<(&'static str, f64)>,
}

const COPY_SOURCE: &str = "cp SOURCE";
const COPY_SOURCE_SYNC: &str = "cp SOURCE, fsync";
const COPY_CHECKPOINT: &str = "cp CHECKPOINT";
const COPY_CHECKPOINT_SYNC: &str = "cp CHECKPOINT, fsync";
const PLAN: &str = "shardmill plan";
const CONVERT: &str = "shardmill convert";
const CONVERT_1: &str = "convert --threads 1";
const CONVERT_2: &str = "convert --threads 2";
const TILES: &str = "convert --layout mma16";
const RANK: &str = "convert --rank 0";
const MEMORY_1: &str = "convert --threads 1, to /dev/shm";
const MEMORY_2: &str = "convert --threads 2, to /dev/shm";
const HASH: &str = "blake3 of CHECKPOINT, 2 threads";
const B3SUM: &str = "b3sum --num-threads 2";
const VERIFY: &str = "shardmill verify --threads 2";
const HEADER: &str = "header of 154880 tokens";

fn main() {
    let arguments = arguments();
    let set = GgufSet::open(&arguments.gguf).unwrap();
    let source: Vec<PathBuf> = set.parts().iter().map(|part| part.path.clone()).collect();
    let load = load();
    let mut costs: BTreeMap<&'static str, Vec<Cost>> = BTreeMap::new();
    let mut written = 0;
    for _ in 0..ROUNDS {
        written = round(&arguments, &source, &mut |what, cost| costs.entry(what).or_default().push(cost));
    }
    let lines = lines(&costs, set.total_len(), written, arguments.ranks.parse().unwrap());
    let speed_up = speed_up(&costs);

    if arguments.json {
        let lines: Vec<_> = lines
            .iter()
            .map(|line| {
                json!({
                    "what": line.what, "bytes": line.bytes, "seconds": line.cost.seconds,
                    "cpu_seconds": line.cost.cpu_seconds, "anonymous_mb": line.cost.anonymous_mb,
                    "ratio": line.ratio.map(|(to, ratio)| json!({ "to": to, "times": ratio })),
                })
            })
            .collect();
        let cpus = std::thread::available_parallelism().unwrap().get();
        let source = json!({ "path": arguments.gguf, "bytes": set.total_len(), "ranks": arguments.ranks });
        println!(
            "{:#}",
            json!({
                "source": source, "cpus": cpus, "load": load, "rounds": ROUNDS, "lines": lines,
                "two_threads_over_one": speed_up,
            })
        );
        return;
    }
    println!(
        "{}: {:.1} MB into {} rank files, {:.1} MB; medians of {ROUNDS}; load before {load}, after {}",
        arguments.gguf.display(),
        set.total_len() as f64 / 1e6,
        arguments.ranks,
        written as f64 / 1e6,
        self::load()
    );
    if set.total_len() < 1 << 30 {
        println!(
            "Below a gigabyte, starting programs and making files is what is measured: these figures say little."
        );
    }
    println!("{:<34} {:>10} {:>8} {:>8} {:>8}", "", "seconds", "GB/s", "CPU s", "anon MB");
    for line in lines {
        let or_dash = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let speed = (line.bytes > 0).then(|| line.bytes as f64 / 1e9 / line.cost.seconds);
        let ratio = line.ratio.map_or(String::new(), |(to, ratio)| format!("  {ratio:.2} x {to}"));
        println!(
            "{:<34} {:>10.3} {:>8} {:>8} {:>8}{ratio}",
            line.what,
            line.cost.seconds,
            or_dash(speed),
            or_dash(line.cost.cpu_seconds),
            or_dash(line.cost.anonymous_mb)
        );
    }
    if let Some(speed_up) = speed_up {
        println!("without a disk, two threads are {speed_up:.2} times as fast as one");
    }
}

/// Of transforming and hashing without a disk: the best of all rounds on one thread over the best on two, which other work on
/// the machine disturbs least.
fn speed_up(costs: &BTreeMap<&'static str, Vec<Cost>>) -> Option<f64> {
    let best = |what| costs.get(what)?.iter().map(|cost| cost.seconds).min_by(f64::total_cmp);
    Some(best(MEMORY_1)? / best(MEMORY_2)?)
}

fn arguments() -> Arguments {
    let (mut gguf, mut ranks, mut dir, mut bin_dir, mut json) = (None, None, None, None, false);
    // Cargo adds --bench.
    let mut given = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = given.next() {
        let slot = match argument.as_str() {
            "--json" => {
                json = true;
                continue;
            }
            "--ranks" => &mut ranks,
            "--dir" => &mut dir,
            "--bin-dir" => &mut bin_dir,
            _ => {
                gguf = Some(argument);
                continue;
            }
        };
        *slot = Some(given.next().unwrap_or_else(|| panic!("{argument} needs a value")));
    }
    Arguments {
        gguf: gguf.map_or_else(|| bundled().gguf, PathBuf::from),
        ranks: ranks.unwrap_or("8".to_owned()),
        dir: dir.map_or_else(std::env::temp_dir, PathBuf::from),
        shardmill: bin_dir.map_or_else(|| program("shardmill"), |dir| PathBuf::from(dir).join("shardmill")),
        json,
    }
}

/// Does everything once and returns the bytes of the rank files.
fn round(arguments: &Arguments, source: &[PathBuf], record: &mut impl FnMut(&'static str, Cost)) -> u64 {
    let temp = TempDir::new_in(&arguments.dir).unwrap();
    let shardmill = |words: &[&str], paths: &[&Path]| {
        let mut command = Command::new(&arguments.shardmill);
        command.args(words).args(paths);
        command
    };
    let convert = |out: &Path, threads: &[&str]| {
        let words = [&["convert", "--quiet", "--ranks", &arguments.ranks][..], threads].concat();
        watched(&mut shardmill(&words, &[&arguments.gguf, out]))
    };
    // Reads the source once, so that all that follows finds it in the page cache where it fits.
    for path in source {
        black_box(hash(path));
    }

    let copies = temp.path().join("copies");
    record(PLAN, watched(&mut shardmill(&["plan", "--ranks", &arguments.ranks], &[&arguments.gguf])));
    copy(source, &copies, COPY_SOURCE, COPY_SOURCE_SYNC, record);
    let checkpoint = temp.path().join("checkpoint");
    record(CONVERT, convert(&checkpoint, &[]));
    let rank_files: Vec<PathBuf> = std::fs::read_dir(&checkpoint)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "safetensors"))
        .collect();
    let written = rank_files.iter().map(|path| path.metadata().unwrap().len()).sum();
    copy(&rank_files, &copies, COPY_CHECKPOINT, COPY_CHECKPOINT_SYNC, record);

    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS.parse().unwrap()).build().unwrap();
    let start = Instant::now();
    pool.install(|| rank_files.iter().for_each(|path| _ = black_box(hash(path))));
    record(HASH, Cost { seconds: start.elapsed().as_secs_f64(), ..Cost::default() });
    if Command::new("b3sum").arg("--version").output().is_ok() {
        record(B3SUM, watched(Command::new("b3sum").args(["--num-threads", THREADS]).args(&rank_files)));
    }
    record(VERIFY, watched(&mut shardmill(&["verify", "--quiet", "--threads", THREADS], &[&checkpoint])));

    std::fs::remove_dir_all(&checkpoint).unwrap();
    record(TILES, convert(&checkpoint, &["--layout", "mma16"]));
    std::fs::remove_dir_all(&checkpoint).unwrap();
    record(RANK, convert(&checkpoint, &["--rank", "0"]));
    std::fs::remove_dir_all(&checkpoint).unwrap();
    for (what, threads) in [(CONVERT_1, "1"), (CONVERT_2, "2")] {
        record(what, convert(&checkpoint, &["--threads", threads]));
        std::fs::remove_dir_all(&checkpoint).unwrap();
    }
    // Without a disk, what is left is transforming and hashing.
    if memory_free().is_some_and(|free| free > written * 5 / 4) {
        let memory = TempDir::new_in("/dev/shm").unwrap();
        let checkpoint = memory.path().join("checkpoint");
        for (what, threads) in [(MEMORY_1, "1"), (MEMORY_2, "2")] {
            record(what, convert(&checkpoint, &["--threads", threads]));
            std::fs::remove_dir_all(&checkpoint).unwrap();
        }
    }

    let bytes = vocabulary();
    let start = Instant::now();
    black_box(GgufFile::parse(bytes).unwrap());
    record(HEADER, Cost { seconds: start.elapsed().as_secs_f64(), ..Cost::default() });
    written
}

/// Copies files with `cp`, once into the page cache and then on to the disk, and removes the copies.
fn copy(
    files: &[PathBuf],
    to: &Path,
    what: &'static str,
    with_sync: &'static str,
    record: &mut impl FnMut(&'static str, Cost),
) {
    std::fs::create_dir(to).unwrap();
    let cost = watched(Command::new("cp").args(files).arg(to));
    let start = Instant::now();
    for file in files {
        File::open(to.join(file.file_name().unwrap())).unwrap().sync_all().unwrap();
    }
    record(what, cost);
    record(with_sync, Cost { seconds: cost.seconds + start.elapsed().as_secs_f64(), ..Cost::default() });
    std::fs::remove_dir_all(to).unwrap();
}

/// What `b3sum` does: maps the file and hashes it with all threads of the pool.
fn hash(path: &Path) -> blake3::Hash {
    let file = MappedFile::open(path).unwrap();
    blake3::Hasher::new().update_rayon(file.as_ref()).finalize()
}

/// Runs a program that must succeed and watches its memory and processor time.
fn watched(command: &mut Command) -> Cost {
    let start = Instant::now();
    let mut child = command.stdout(Stdio::null()).spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let mut cost = Cost::default();
    let status = loop {
        if let Some(kib) = anonymous_kib(child.id()) {
            let mb = kib * 1024.0 / 1e6;
            cost.anonymous_mb = Some(cost.anonymous_mb.map_or(mb, |most| most.max(mb)));
        }
        // What a process that has ended used can still be read until it is waited for.
        cost.cpu_seconds = cpu_seconds(child.id()).or(cost.cpu_seconds);
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        std::thread::sleep(SAMPLE);
    };
    assert!(status.success(), "{command:?}: {status}");
    Cost { seconds: start.elapsed().as_secs_f64(), ..cost }
}

fn anonymous_kib(process: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

/// User and system time, counted in hundredths of a second (proc_pid_stat(5), fields 14 and 15).
fn cpu_seconds(process: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The program's name, field 2, may hold anything.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
    Some((ticks(14)? + ticks(15)?) / 100.0)
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// Bytes that /dev/shm and the memory below it have room for.
fn memory_free() -> Option<u64> {
    Path::new("/dev/shm").is_dir().then_some(())?;
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    // By default the file system takes half of the memory; pages of the source stay where they are.
    Some(available * 1024 / 2)
}

/// A GGUF file whose vocabulary is as large as GLM-5's, with as many merges and token types.
fn vocabulary() -> Bytes {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let array = |key: &str, element: u32| {
        let ids = [9u32.to_le_bytes(), element.to_le_bytes()].concat();
        [string(key), ids, VOCABULARY.to_le_bytes().to_vec()].concat()
    };
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(3u64.to_le_bytes());
    for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"] {
        bytes.extend(array(key, 8));
        bytes.extend((0..VOCABULARY).flat_map(|i| string(&format!("token {i}"))));
    }
    bytes.extend(array("tokenizer.ggml.token_type", 5));
    bytes.extend((0..VOCABULARY).flat_map(|_| 1i32.to_le_bytes()));
    bytes.into()
}

/// The medians, in the order of a reader's questions.
fn lines(costs: &BTreeMap<&'static str, Vec<Cost>>, source: u64, written: u64, ranks: u64) -> Vec<Line> {
    let cost = |what: &'static str| costs.get(what).map(|costs| median(costs));
    let table = [
        (COPY_SOURCE, source, None),
        (COPY_SOURCE_SYNC, source, None),
        (COPY_CHECKPOINT, written, None),
        (COPY_CHECKPOINT_SYNC, written, None),
        (PLAN, 0, None),
        (CONVERT, written, Some(COPY_CHECKPOINT_SYNC)),
        (CONVERT_1, written, Some(COPY_CHECKPOINT_SYNC)),
        (CONVERT_2, written, Some(COPY_CHECKPOINT_SYNC)),
        (TILES, written, Some(COPY_CHECKPOINT_SYNC)),
        (RANK, written / ranks, Some(CONVERT)),
        (MEMORY_1, written, None),
        (MEMORY_2, written, Some(MEMORY_1)),
        (HASH, written, None),
        (B3SUM, written, Some(HASH)),
        (VERIFY, written, Some(HASH)),
        (HEADER, 0, None),
    ];
    table
        .into_iter()
        .filter_map(|(what, bytes, to)| {
            let own = cost(what)?;
            let ratio = to.and_then(|to| Some((to, own.seconds / cost(to)?.seconds)));
            Some(Line { what, bytes, cost: own, ratio })
        })
        .collect()
}

/// The median duration and processor time, and the largest memory.
fn median(costs: &[Cost]) -> Cost {
    let middle = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let seconds = middle(&mut costs.iter().map(|cost| cost.seconds).collect());
    Cost {
        seconds: seconds.expect("every round was recorded"),
        cpu_seconds: middle(&mut costs.iter().filter_map(|cost| cost.cpu_seconds).collect()),
        anonymous_mb: costs.iter().filter_map(|cost| cost.anonymous_mb).reduce(f64::max),
    }
}
