//! What it takes to get a rank file into a GPU's memory, next to the limit of the bus, to `dd`, and to Python's safetensors and
//! fastsafetensors, on the same file in one run:
//!
//! ```text
//! cargo bench -p tests --bench loading -- CHECKPOINT [--gpu N] [--cold] [--python PYTHON] [--json]
//! ```
//!
//! Every figure is the median of [`ROUNDS`] rounds, and each round does everything once. Without `--cold` the file is read once
//! before, so that it lies in the page cache. With it, the file is put out of the cache before each reading, which works on disks and not
//! on tmpfs. PYTHON has torch and safetensors; fastsafetensors is left out where it cannot be imported.
#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]

use formats::checkpoint::Checkpoint;
use kernels::cuda::driver::{Device, Memory, Staging, Stream};
use runtime::device::LoadMode;
use runtime::rank::RankPart;
use runtime::upload::{Digests, LoadPlan, MOST_THREADS, upload};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;
use tests::success;

const ROUNDS: usize = 3;
/// Prints the seconds that a loader takes, once the GPU is awake.
const PEER: &str = include_str!("loading.py");

struct Arguments {
    checkpoint: PathBuf,
    gpu: usize,
    cold: bool,
    python: String,
    json: bool,
}

fn main() {
    let Arguments { checkpoint, gpu, cold, python, json } = arguments();
    let mut part = RankPart::open(&Checkpoint::open(&checkpoint).unwrap(), 0).unwrap();
    let shard = part.shard.clone();
    let device = Device::open(gpu).unwrap();
    let bytes = shard.manifest().bytes;
    let mut seconds: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    if !cold {
        let _ = std::io::copy(&mut std::fs::File::open(shard.path()).unwrap(), &mut std::io::sink()).unwrap();
    }
    for round in 1..=ROUNDS {
        let mut note = |what: &str, time: f64| {
            eprintln!("round {round} of {ROUNDS}: {what}: {time:.3} s");
            seconds.entry(what.to_owned()).or_default().push(time);
        };
        measure(&mut part, &device, cold, &python, &mut note);
    }
    let bus = bus(&device);
    let lines: Vec<(String, f64)> = seconds
        .into_iter()
        .map(|(what, mut times)| {
            times.sort_by(f64::total_cmp);
            (what, times[times.len() / 2])
        })
        .collect();
    if json {
        let lines: Vec<_> = lines
            .iter()
            .map(|(what, seconds)| json!({ "what": what, "seconds": seconds, "gb_per_s": bytes as f64 / 1e9 / seconds }))
            .collect();
        println!(
            "{:#}",
            json!({ "file": shard.path(), "bytes": bytes, "gpu": device.name(), "cold": cold, "rounds": ROUNDS, "bus_gb_per_s": bus, "lines": lines })
        );
        return;
    }
    println!(
        "{}: {:.2} GB to {}; {}; medians of {ROUNDS}; one copy of page-locked memory: {bus:.1} GB/s",
        shard.path().display(),
        bytes as f64 / 1e9,
        device.name(),
        if cold { "not in the page cache" } else { "in the page cache" }
    );
    for (what, seconds) in lines {
        let rate = bytes as f64 / 1e9 / seconds;
        println!("{what:<34} {seconds:>8.3} s {rate:>7.2} GB/s {:>5.1} % of the bus", 100.0 * rate / bus);
    }
}

fn measure(
    part: &mut RankPart,
    device: &Arc<Device>,
    cold: bool,
    python: &str,
    note: &mut impl FnMut(&str, f64),
) {
    let path = part.shard.path().to_owned();
    let ready = || {
        if cold {
            let file = format!("of={}", path.display());
            success(Command::new("dd").arg(file).args([
                "oflag=nocache",
                "conv=notrunc,fdatasync",
                "count=0",
            ]));
        }
    };
    for (what, mode, digests) in [
        ("shardrun", LoadMode::Auto, Digests::Skip),
        ("shardrun, digests checked", LoadMode::Auto, Digests::Check),
        ("shardrun, buffered", LoadMode::Buffered, Digests::Skip),
    ] {
        ready();
        let threads = std::thread::available_parallelism().unwrap().get().clamp(2, MOST_THREADS);
        let plan = LoadPlan { mode, threads, stop: Arc::default() };
        part.digests = digests;
        let done = upload(part, device, &plan).unwrap();
        note(what, done.elapsed.as_secs_f64());
    }
    if cold {
        ready();
        let started = Instant::now();
        let file = format!("if={}", path.display());
        success(Command::new("dd").arg(file).args(["of=/dev/null", "bs=16M", "iflag=direct"]));
        note("dd iflag=direct, to nowhere", started.elapsed().as_secs_f64());
    }
    for loader in ["safetensors", "fastsafetensors"] {
        ready();
        match peer(python, loader, &path, device.ordinal()) {
            Ok(seconds) => note(loader, seconds),
            Err(why) => eprintln!("NOT RUN: {loader}: {why}"),
        }
    }
}

fn peer(python: &str, loader: &str, file: &Path, gpu: usize) -> Result<f64, String> {
    let command = Command::new(python).args(["-c", PEER, loader]).arg(file).arg(gpu.to_string()).output();
    let output = command.map_err(|error| format!("{python}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).lines().last().unwrap_or_default().to_owned();
    text(&output.stdout).parse().map_err(|_| text(&output.stderr))
}

/// GB/s of one long copy from page-locked memory.
fn bus(device: &Arc<Device>) -> f64 {
    const BYTES: usize = 1 << 30;
    let memory = Memory::new(device, BYTES, "a copy to measure").unwrap();
    let staging = Staging::new(device, BYTES).unwrap();
    let stream = Stream::new(device).unwrap();
    let once = || {
        let started = Instant::now();
        staging.send(0, BYTES, &stream, &memory, 0);
        stream.finish().unwrap();
        BYTES as f64 / 1e9 / started.elapsed().as_secs_f64()
    };
    (0..ROUNDS).map(|_| once()).fold(0.0, f64::max)
}

fn arguments() -> Arguments {
    let mut found = Arguments {
        checkpoint: PathBuf::new(),
        gpu: 0,
        cold: false,
        python: "python3".to_owned(),
        json: false,
    };
    // Cargo adds --bench.
    let mut given = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = given.next() {
        let mut value = || given.next().expect("a value after the option");
        match argument.as_str() {
            "--json" => found.json = true,
            "--cold" => found.cold = true,
            "--gpu" => found.gpu = value().parse().expect("--gpu: a number"),
            "--python" => found.python = value(),
            path => found.checkpoint = PathBuf::from(path),
        }
    }
    assert!(
        found.checkpoint.is_dir(),
        "usage: loading CHECKPOINT [--gpu N] [--cold] [--python PYTHON] [--json]"
    );
    found
}
