//! Many clients at once: every answer is right, nothing leaks, and nobody waits for ever.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tests::bundled;
use tests::server::Server;

/// Streams at the same time.
const CLIENTS: usize = 200;
/// How long the load lasts; `SHARDMILL_LOAD_SECONDS` makes it longer.
const SECONDS: u64 = 20;

/// What became of a request.
enum Outcome {
    /// The whole text, and the times between its chunks.
    Answer(String, Vec<Duration>),
    Refused,
    Cancelled,
}

/// Sends a streamed completion. `cancel_after` chunks the client goes away.
fn ask(address: &str, body: &Value, cancel_after: Option<usize>) -> Outcome {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    let text = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{text}",
        text.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    let (mut times, mut last, mut done) = (Vec::new(), None, false);
    let mut lines = BufReader::new(stream).lines();
    let status = lines.next().unwrap().unwrap();
    if status.contains(" 429 ") {
        return Outcome::Refused;
    }
    assert!(status.contains(" 200 "), "{status}");
    for line in lines {
        let line = line.unwrap();
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            done = true;
            break;
        }
        let chunk: Value = serde_json::from_str(data).unwrap();
        answer.push_str(chunk["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{chunk}")));
        let now = Instant::now();
        if let Some(last) = last.replace(now) {
            times.push(now - last);
        }
        if cancel_after.is_some_and(|most| times.len() >= most) {
            return Outcome::Cancelled;
        }
    }
    assert!(done, "the stream broke off: {answer}");
    Outcome::Answer(answer, times)
}

/// Memory of a process in bytes, without the weights: those are mapped, and become resident as experts are first used.
fn resident(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    1024 * line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap()
}

/// Threads of a process.
fn threads(id: u32) -> usize {
    std::fs::read_dir(format!("/proc/{id}/task")).unwrap().count()
}

fn wait_until_idle(server: &Server) {
    let begin = Instant::now();
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") > 0.0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "a request never ends");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn two_hundred_streams_of_which_a_fifth_is_cancelled() {
    let server = Server::start(&[
        "--max-num-seqs",
        "24",
        "--max-queued-requests",
        "120",
        "--kv-cache-memory",
        "160MiB",
        "--max-model-len",
        "1024",
    ]);
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    // Short and long prompts, short and long answers, some with a beginning in common.
    let bodies: Vec<Value> = (0..12)
        .map(|at| {
            let chats = bundled().chats();
            let prompt = match at % 3 {
                0 => chats[at % chats.len()].prompt.clone(),
                1 => "And God said, ".repeat(1 + 4 * at),
                _ => format!("{}{at}", "In the beginning God created the heaven and the earth. ".repeat(at)),
            };
            // Half of them greedy, half drawn: a seed gives the same whatever else runs.
            let temperature = if at % 2 == 0 { 0.0 } else { 1.2 };
            json!({"prompt": prompt, "temperature": temperature, "seed": at, "max_tokens": 3 + 5 * at, "ignore_eos": true, "stream": true})
        })
        .collect();
    let expected: Vec<String> = bodies
        .iter()
        .map(|body| match ask(&address, body, None) {
            Outcome::Answer(text, _) => text,
            _ => panic!("a request alone was refused"),
        })
        .collect();
    let seconds =
        std::env::var("SHARDMILL_LOAD_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS);
    let until = Instant::now() + Duration::from_secs(seconds);
    let counts: [AtomicUsize; 3] = Default::default();
    let gaps = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (address, bodies, expected, counts, gaps) = (&address, &bodies, &expected, &counts, &gaps);
            scope.spawn(move || {
                let mut round = client;
                while Instant::now() < until {
                    let at = round * 7 % bodies.len();
                    let cancel = round.is_multiple_of(5).then_some(round % 4);
                    match ask(address, &bodies[at], cancel) {
                        Outcome::Answer(text, times) => {
                            assert_eq!(text, expected[at], "under load as alone");
                            gaps.lock().unwrap().extend(times);
                            counts[0].fetch_add(1, Ordering::Relaxed);
                        }
                        Outcome::Refused => {
                            counts[1].fetch_add(1, Ordering::Relaxed);
                            std::thread::sleep(Duration::from_millis(200));
                        }
                        Outcome::Cancelled => {
                            counts[2].fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    round += 1;
                }
            });
        }
    });
    wait_until_idle(&server);
    let [answered, refused, cancelled] = counts.map(AtomicUsize::into_inner);
    let mut gaps = gaps.into_inner().unwrap();
    gaps.sort_unstable();
    let (middle, late) = (gaps[gaps.len() / 2], gaps[gaps.len() * 99 / 100]);
    eprintln!(
        "{answered} answered, {refused} refused, {cancelled} cancelled; between chunks: median {middle:?}, p99 {late:?}"
    );
    assert!(answered > 20 && refused > 0 && cancelled > 5, "{answered} {refused} {cancelled}");
    assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0, "every block came back");
    assert!(threads(server.id()) < 600, "{} threads", threads(server.id()));
    assert_eq!(server.get("/health")["status"], "ok");
}

/// A number in letters, always as many: longer words would make longer prompts, and those need more memory.
fn word(number: usize) -> String {
    let letter = |at: u32| char::from(b'a' + (number / 26_usize.pow(at) % 26) as u8);
    (0..5).map(letter).collect()
}

#[test]
fn memory_stays_where_it_is() {
    // A small cache, which is full soon: blocks of prompts are kept until later prompts need the room.
    const CACHE: u64 = 32 << 20;
    let server = Server::start(&["--kv-cache-memory", "32MiB", "--max-model-len", "512"]);
    let agent: ureq::Agent = ureq::Agent::config_builder().build().into();
    let url = format!("{}/v1/completions", server.url);
    let ask_for = |prompt: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "logprobs": 1});
        let mut reply = agent.post(&url).send(body.to_string().as_bytes()).unwrap();
        assert_eq!(reply.status(), 200);
        let answer: Value = serde_json::from_str(&reply.body_mut().read_to_string().unwrap()).unwrap();
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    // More than a block, or so little that attention takes its form for few tokens.
    const WORDS: usize = 16;
    const FEW_WORDS: usize = 5;
    let ask = |number: usize| {
        // Words that nobody has said before: what remembers words must forget some.
        let first = number * WORDS;
        let count = if number.is_multiple_of(2) { WORDS } else { FEW_WORDS };
        let words: Vec<String> = (first..first + count).map(word).collect();
        let tokens = ask_for(words.join(" ").into());
        assert!(tokens <= LONGEST[usize::from(count == FEW_WORDS)], "{tokens} tokens");
    };
    // Buffers of a step grow with its rows, for each form of attention: no prompt may be longer than these. A word has six
    // characters with its space, so at most as many tokens.
    const LONGEST: [u64; 2] = [96, 31];
    for tokens in LONGEST {
        assert_eq!(ask_for((0..tokens).collect()), tokens);
    }
    let requests: usize =
        std::env::var("SHARDMILL_LOAD_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(250);
    // Until every thread has its buffers and every block was used.
    const FIRST: usize = 250;
    (0..FIRST).for_each(ask);
    let before = resident(server.id());
    let begin = Instant::now();
    (FIRST..FIRST + requests).for_each(ask);
    let time = begin.elapsed() / u32::try_from(requests).unwrap();
    let after = resident(server.id());
    eprintln!("{requests} requests, {time:?} each: memory from {before} to {after} bytes");
    // The cache, which is resident by now, is none of what may grow.
    assert!(before > CACHE, "{before} bytes");
    assert!(after <= before + (before - CACHE) / 20, "{before} to {after} bytes");
    let queries = server.metric("vllm:prefix_cache_queries_total");
    assert!(queries > 32.0 * (FIRST + requests) as f64, "prompts that fill blocks: {queries} tokens");
}
