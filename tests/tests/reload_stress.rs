//! Reloads under load: every answer is one model's whole answer, nobody waits, and nothing is left behind.
//!
//! `SHARDMILL_RELOADS=500` makes it the long form.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::server::{Server, is_on_gpu};
use tests::weights::{Other, convert_other};
use tests::{bundled, success};

/// Streams at the same time.
const CLIENTS: usize = 32;
const RELOADS: usize = 20;
/// Reloads before anything is measured.
const FIRST: usize = 6;
/// Time without reloads, to compare with.
const UNDISTURBED: Duration = Duration::from_secs(10);

/// A streamed answer, and the longest time between two of its chunks.
fn stream(address: &str, body: &Value) -> (String, Duration) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    let text = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{text}",
        text.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut lines = BufReader::new(stream).lines();
    let status = lines.next().unwrap().unwrap();
    assert!(status.contains(" 200 "), "{status}");
    let (mut answer, mut longest, mut last) = (String::new(), Duration::ZERO, None);
    for line in lines {
        let line = line.unwrap();
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            return (answer, longest);
        }
        let chunk: Value = serde_json::from_str(data).unwrap();
        answer.push_str(chunk["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{chunk}")));
        let now = Instant::now();
        if let Some(last) = last.replace(now) {
            longest = longest.max(now - last);
        }
    }
    panic!("the stream broke off: {answer}");
}

/// Memory that is the process's own, threads, open files and mappings; of a GPU, MiB in use.
fn held(id: u32) -> [usize; 5] {
    let count = |what: &str| std::fs::read_dir(format!("/proc/{id}/{what}")).unwrap().count();
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let memory = line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{id}/maps")).unwrap();
    let rank_files = maps.lines().filter(|line| line.contains(".safetensors")).count();
    let gpu = is_on_gpu().then(|| {
        let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"];
        let output = success(Command::new("nvidia-smi").args(query));
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    });
    [memory, count("task"), count("fd"), rank_files, gpu.unwrap_or(0)]
}

/// What the server holds when it has nothing to do.
fn settled(server: &Server) -> [usize; 5] {
    let begin = Instant::now();
    loop {
        let busy = [
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "shardrun_requests_on_older_weights",
        ];
        let busy = busy.iter().any(|name| server.metric(name) > 0.0);
        // Threads that wait for blocking work go after ten seconds, and so do connections that are kept alive.
        if !busy && begin.elapsed() > Duration::from_secs(12) {
            return held(server.id());
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "it never comes to rest");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn reloads_under_streams_mix_nothing_and_leave_nothing() {
    let reloads: usize =
        std::env::var("SHARDMILL_RELOADS").ok().and_then(|text| text.parse().ok()).unwrap_or(RELOADS);
    let temp = TempDir::new().unwrap();
    let dirs = [bundled().convert(temp.path(), 8), convert_other(Other::Norm, temp.path(), "second", 8)];
    // A prompt's chunk holds every stream up.
    let options = [
        "--max-num-seqs",
        "32",
        "--max-queued-requests",
        "256",
        "--kv-cache-memory",
        "160MiB",
        "--max-model-len",
        "1024",
        "--max-num-batched-tokens",
        "64",
    ];
    // On a GPU the last bits of sums depend on what else is in a step, so there one at a time.
    let alone = ["--max-num-seqs", "1", "--no-enable-prefix-caching"];
    let options = if is_on_gpu() { [&options[2..], &alone].concat() } else { options.to_vec() };
    let serve = |dir: &Path| Server::on_device(dir, &options);
    // Prompts that share a beginning, so that the prefix cache has something to mix up.
    let bodies: Vec<Value> = (0..8)
        .map(|at| {
            let prompt = format!("{}{at}", "In the beginning God created the heaven and the earth. ".repeat(1 + at % 4 * 3));
            let temperature = if at % 2 == 0 { 0.0 } else { 1.1 };
            json!({"prompt": prompt, "temperature": temperature, "seed": at, "max_tokens": 8 + 6 * at, "ignore_eos": true, "stream": true})
        })
        .collect();
    let address = |server: &Server| server.url.strip_prefix("http://").unwrap().to_owned();
    let expected: Vec<Vec<String>> = dirs
        .iter()
        .map(|dir| {
            let alone = serve(dir);
            bodies.iter().map(|body| stream(&address(&alone), body).0).collect()
        })
        .collect();
    assert!(expected[0].iter().zip(&expected[1]).all(|(first, second)| first != second));
    let server = serve(&dirs[0]);
    let address = address(&server);
    let reload = |number: usize| {
        let (status, report) = server.post("/admin/reload", &json!({"dir": dirs[(number + 1) % 2]}));
        assert_eq!((status, &report["how"]), (200, &json!("beside")), "{report}");
    };
    // Clients that ask until `during` has ended; what became of their answers.
    let load = |during: &mut dyn FnMut()| {
        let (done, mixed, longest) =
            (AtomicBool::new(false), Mutex::new(Vec::new()), Mutex::new(Duration::ZERO));
        let own: [AtomicUsize; 2] = Default::default();
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let (address, bodies, expected) = (&address, &bodies, &expected);
                let (done, mixed, longest, own) = (&done, &mixed, &longest, &own);
                scope.spawn(move || {
                    let mut round = client;
                    while !done.load(Ordering::Relaxed) {
                        let at = round * 5 % bodies.len();
                        let (text, pause) = stream(address, &bodies[at]);
                        match expected.iter().position(|answers| answers[at] == text) {
                            Some(model) => drop(own[model].fetch_add(1, Ordering::Relaxed)),
                            None => mixed.lock().unwrap().push(text),
                        }
                        let mut longest = longest.lock().unwrap();
                        *longest = pause.max(*longest);
                        round += 1;
                    }
                });
            }
            during();
            done.store(true, Ordering::Relaxed);
        });
        let mixed = mixed.into_inner().unwrap();
        assert!(mixed.is_empty(), "{} answers are of neither model, the first: {:?}", mixed.len(), mixed[0]);
        (longest.into_inner().unwrap(), own.map(AtomicUsize::into_inner))
    };
    // Until every block was used, on several sets of weights.
    load(&mut || (0..FIRST).for_each(reload));
    let (undisturbed, _) = load(&mut || std::thread::sleep(UNDISTURBED));
    let before = settled(&server);
    let begin = Instant::now();
    let (longest, own) = load(&mut || (FIRST..FIRST + reloads).for_each(reload));
    let seconds = begin.elapsed().as_secs_f64();
    let after = settled(&server);
    eprintln!(
        "{reloads} reloads in {seconds:.1} s; answers of the two models: {own:?}; longest pause between chunks {longest:?}, {undisturbed:?} in {UNDISTURBED:?} without reloads; memory (kB), threads, files, mappings, GPU (MiB): {before:?} -> {after:?}"
    );
    assert!(own.iter().all(|&answers| answers > 0), "{own:?}");
    assert!(after[0] as f64 <= before[0] as f64 * 1.1, "memory grew: {before:?} -> {after:?}");
    assert!(
        after[1] <= before[1] + 2 && after[2] <= before[2] + 2,
        "threads or files: {before:?} -> {after:?}"
    );
    assert_eq!(before[3], after[3], "mapped rank files");
    assert!(after[4] <= before[4] + 64, "memory of the GPU: {before:?} -> {after:?}");
    let total = (FIRST + reloads + 1) as f64;
    assert_eq!(server.metric("shardrun_generation"), total);
}
