//! Disks that lie, files that change while they are served, ranks that die, memory and room that end: what a user sees of each.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::checkpoint::Checkpoint;
use kernels::reference::Reference;
use kernels::{Backend, HostBuffer};
use runtime::comm::{Communicator, Local, PeerStopped};
use runtime::dialect::Dialect;
use runtime::engine::{Engine, EngineOptions};
use runtime::load::load;
use runtime::model::Model;
use runtime::rank::RankGroup;
use runtime::server::ServerOptions;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::server::{At, Server};
use tests::weights::{Other, convert_other};
use tests::{bundled, failure, program, success};

fn rank_file(dir: &Path, rank: usize) -> PathBuf {
    dir.join(format!("rank-{rank}-of-2.safetensors"))
}

fn body(max_tokens: usize) -> Value {
    json!({"prompt": "In the beginning", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": true})
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn wait(child: &mut Child) -> (Option<i32>, String) {
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "it hangs");
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (status.code(), said)
}

#[test]
fn a_served_file_that_is_written_to_ends_the_server_with_its_name_and_one_that_is_replaced_does_not() {
    type Fault = fn(&Path);
    let overwrite: Fault = |path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[7; 64], file.metadata().unwrap().len() - 64).unwrap();
    };
    let shorten: Fault = |path| OpenOptions::new().write(true).open(path).unwrap().set_len(4096).unwrap();
    for (fault, codes) in [(overwrite, &[1][..]), (shorten, &[1, 2])] {
        let temp = TempDir::new().unwrap();
        let dir = bundled().convert(temp.path(), 2);
        let mut server = Server::of(&dir, &[], |command| command.stderr(Stdio::piped()));
        let (_, expected) = server.post("/v1/completions", &body(8));
        // Another file of the same name, and then none: what is mapped is still there.
        std::fs::copy(rank_file(&dir, 1), temp.path().join("copy")).unwrap();
        std::fs::rename(temp.path().join("copy"), rank_file(&dir, 1)).unwrap();
        std::fs::remove_file(rank_file(&dir, 1)).unwrap();
        let (status, reply) = server.post("/v1/completions", &body(8));
        assert_eq!((status, &reply["choices"]), (200, &expected["choices"]));
        fault(&rank_file(&dir, 0));
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let reply = agent.post(format!("{}/v1/completions", server.url)).send(body(8).to_string().as_bytes());
        if let Ok(mut reply) = reply {
            let text = reply.body_mut().read_to_string().unwrap();
            assert_eq!(reply.status(), 500, "an answer of damaged weights: {text}");
            assert!(text.contains("rank-0-of-2.safetensors"), "{text}");
        }
        let (code, said) = wait(&mut server.child);
        assert!(codes.contains(&code.unwrap_or(-1)), "{code:?} {said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("shardrun: error: ") && last.contains("rank-0-of-2.safetensors"), "{said}");
        assert!(last.contains("became shorter") && !said.contains("panicked"), "{said}");
    }
}

#[test]
fn what_a_folder_lacks_when_it_is_loaded_is_one_line() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 2);
    let serve = || {
        let mut command = Command::new(program("shardrun"));
        command.arg("serve").arg(&dir).args(["--port", "0"]);
        command
    };
    let good = std::fs::read(rank_file(&dir, 1)).unwrap();
    type Fault = fn(&Path, &[u8]);
    let faults: [(Fault, &str); 4] = [
        (|path, good| std::fs::write(path, &good[..good.len() / 2]).unwrap(), "expected"),
        (|path, _| std::fs::remove_file(path).unwrap(), "No such file"),
        (|path, _| std::os::unix::fs::symlink("/dev/zero", path).unwrap(), "not a regular file"),
        (
            |path, good| {
                std::fs::remove_file(path).unwrap();
                let other: Vec<u8> = good.iter().rev().copied().collect();
                std::fs::write(path, other).unwrap();
            },
            "header",
        ),
    ];
    for (fault, word) in faults {
        fault(&rank_file(&dir, 1), &good);
        let message = failure(&mut serve(), 2);
        assert!(message.contains("rank-1-of-2.safetensors") && message.contains(word), "{message}");
    }
}

#[test]
fn files_are_read_whole_once_and_their_record_is_of_that_very_file() {
    let temp = TempDir::new().unwrap();
    let (dir, cache) = (bundled().convert(temp.path(), 2), temp.path().join("cache"));
    let start =
        |arguments: &[&str]| Server::of(&dir, arguments, |command| command.env("XDG_CACHE_HOME", &cache));
    let verified = |server: &Server| -> Vec<String> {
        let ranks = server.get("/admin/ranks");
        let of = |rank: &Value| rank["verified"].as_str().unwrap().to_owned();
        ranks["ranks"].as_array().unwrap().iter().map(of).collect()
    };
    assert_eq!(verified(&start(&[])), ["when loaded"; 2]);
    assert_eq!(verified(&start(&[])), ["before"; 2]);
    assert_eq!(verified(&start(&["--verify"])), ["when loaded"; 2]);
    assert_eq!(verified(&start(&["--verify=never"])), ["no"; 2]);
    // A record that is none, and a file that was moved out and back: both are as new.
    let records = cache.join("shardrun/verified");
    let record = std::fs::read_dir(&records).unwrap().next().unwrap().unwrap().path();
    let of_second = std::fs::read_to_string(&record).unwrap().contains("rank-1-of-2");
    std::fs::write(&record, "{\"path\": \"").unwrap();
    let expected = if of_second { ["before", "when loaded"] } else { ["when loaded", "before"] };
    assert_eq!(verified(&start(&[])), expected);
    // The same length and the same time of writing: the time of change tells.
    let path = rank_file(&dir, 0);
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let mut byte = [0];
    let at = file.metadata().unwrap().len() - 1;
    std::fs::File::open(&path).unwrap().read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.set_modified(modified).unwrap();
    let mut command = Command::new(program("shardrun"));
    command.env("XDG_CACHE_HOME", &cache).arg("serve").arg(&dir).args(["--port", "0"]);
    let message = failure(&mut command, 2);
    assert!(
        message.contains("rank 0, chunk 1") && message.contains("is damaged, in model.layers"),
        "{message}"
    );
}

#[test]
fn scrubbing_finds_damage_that_nobody_announced() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 2);
    let server = Server::of(&dir, &["--scrub-interval", "1"], |command| command);
    let scrubbed = |rank: usize| server.get("/admin/ranks")["ranks"][rank]["scrubbed"].clone();
    wait_until("scrubbed", || scrubbed(1).is_object());
    assert_eq!(scrubbed(1)["fault"], Value::Null);
    assert_eq!(server.status("/health/ready").0, 200);
    // As a disk would do it, but for the time of writing, which nobody looks at while nothing runs.
    let file = OpenOptions::new().read(true).write(true).open(rank_file(&dir, 1)).unwrap();
    let at = Checkpoint::open(&dir)
        .unwrap()
        .rank_manifest(1)
        .unwrap()
        .tensor("model.norm.weight")
        .unwrap()
        .bytes
        .0;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    wait_until("damage is found", || scrubbed(1)["fault"].is_string());
    let fault = scrubbed(1)["fault"].as_str().unwrap().to_owned();
    assert!(fault.contains("rank 1, chunk 0") && fault.contains("model.norm.weight"), "{fault}");
    let (status, health) = server.status("/health/ready");
    assert!(status == 503 && health["cause"].as_str().unwrap().contains("model.norm.weight"), "{health}");
    let metrics = server.get_text("/metrics");
    assert!(metrics.contains("shardrun_rank_damaged{model_name=\"Hf\",rank=\"1\"} 1"), "{metrics}");
    assert!(metrics.contains("shardrun_rank_damaged{model_name=\"Hf\",rank=\"0\"} 0"), "{metrics}");
    // Good weights from elsewhere end it.
    let other = convert_other(Other::Norm, temp.path(), "other", 2);
    assert_eq!(server.post("/admin/reload", &json!({"dir": other})).0, 200);
    assert_eq!(server.status("/health/ready").0, 200);
    assert_eq!(server.post("/v1/completions", &body(4)).0, 200);
}

/// Sums over ranks until one has had enough.
struct Panics {
    local: Local,
    /// Sums until then.
    left: Option<usize>,
}

impl Communicator<Reference> for Panics {
    fn all_reduce(
        &mut self,
        backend: &mut Reference,
        buffer: &mut HostBuffer,
        len: usize,
    ) -> Result<(), PeerStopped> {
        if let Some(left) = &mut self.left {
            assert!(*left > 0, "a sum too many");
            *left -= 1;
        }
        self.local.all_reduce(backend, buffer, len)
    }

    fn is_repeatable(&self) -> bool {
        false
    }
}

#[test]
fn a_rank_that_panics_is_named_to_everybody_and_nobody_waits_for_it() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 2);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let config = checkpoint.manifest().model.clone();
    let options = EngineOptions { max_model_len: Some(256), ..EngineOptions::default() };
    let limits = Engine::limits(&config, 2, &options).unwrap();
    let ends = Local::group(2, limits.max_rows * config.hidden_size);
    // In the middle of the third step, while the other rank waits for its sum.
    let left = [None, Some(5 * (1 + 2 * config.layers.len()) / 2)];
    let makes = ends.into_iter().zip(left).enumerate().map(|(rank, (local, left))| {
        let (shard, config) = (checkpoint.rank(rank).unwrap(), config.clone());
        move || {
            let backend = Reference::new();
            let weights = load(std::slice::from_ref(&shard), &config, |placing| {
                Ok(backend.weight(shard.view(placing.parts[0].1)?)?)
            })?;
            Model::new(backend, Panics { local, left }, weights, &config, limits)
        }
    });
    let group = RankGroup::of(makes.collect(), config.vocab_size).unwrap();
    let engine = Engine::with(group, 2, &config, &options).unwrap();
    let io = tokio::runtime::Runtime::new().unwrap();
    let listening = runtime::server::Server::bind("127.0.0.1", 0, ServerOptions::default());
    let listening = io.block_on(listening).unwrap();
    let url = format!("http://{}", listening.local_addr().unwrap());
    listening.readiness().ready("tiny", engine.handle(), Dialect::open(&dir).unwrap());
    io.spawn(listening.run(std::future::pending()));
    let at = &At { url };
    let cause = |error: &Value| {
        let text = error["error"]["message"].as_str().unwrap_or_else(|| panic!("{error}"));
        assert!(text.contains("rank 1 stopped") && text.contains("a sum too many"), "{text}");
    };
    let mut streamed = body(100);
    streamed["stream"] = json!(true);
    std::thread::scope(|scope| {
        let whole = scope.spawn(|| at.post("/v1/completions", &body(100)));
        let streams = [0; 2].map(|_| scope.spawn(|| at.post_text("/v1/completions", &streamed)));
        let (status, error) = whole.join().unwrap();
        assert_eq!(status, 500, "{error}");
        cause(&error);
        for stream in streams {
            let (_, text) = stream.join().unwrap();
            let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
            let last = events.filter(|event| *event != "[DONE]").last().unwrap();
            cause(&serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {text}")));
        }
    });
    wait_until("it is known", || engine.handle().trouble().is_some());
    for (path, expected) in [("/health/ready", 503), ("/health/live", 200)] {
        assert_eq!(at.status(path).0, expected, "{path}");
    }
    let (status, error) = at.post("/v1/completions", &body(1));
    assert_eq!((status, &error["error"]["code"]), (503, &json!("stopped")), "{error}");
    cause(&error);
}

#[test]
fn memory_that_ends_while_loading_is_one_line() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 2);
    let shell = |kilobytes: usize| {
        let mut command = Command::new("sh");
        let line = format!(
            "ulimit -v {kilobytes}; exec \"$0\" generate \"$1\" --prompt x --max-tokens 1 --threads 2 --kv-cache-memory 600MiB --max-model-len 2048"
        );
        command.args(["-c", &line]).arg(program("shardrun")).arg(&dir);
        command
    };
    success(&mut shell(8 << 20));
    let mut said = String::new();
    // From too little for a thread to enough for almost everything.
    for kilobytes in [300_000, 500_000, 640_000, 740_000, 820_000, 900_000] {
        let output = shell(kilobytes).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            [Some(0), Some(2)].contains(&output.status.code()),
            "{kilobytes} kB: {:?} {stderr}",
            output.status
        );
        assert!(stderr.lines().filter(|line| line.starts_with("shardrun: error: ")).count() <= 1, "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        said.push_str(&stderr);
    }
    for words in
        ["--kv-cache-memory: expected what this machine has", "out of memory for activations and cache"]
    {
        assert!(said.contains(words), "{words} in {said}");
    }
}

#[test]
fn logs_that_find_no_room_end_nothing() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 2);
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    for format in ["text", "json"] {
        let server = Server::of(&dir, &["--log-format", format], |command| {
            command.stderr(full()).env("SHARDRUN_LOG", "trace")
        });
        for _ in 0..3 {
            assert_eq!(server.post("/v1/completions", &body(4)).0, 200);
        }
        assert_eq!(server.post("/admin/reload", &json!({"ranks": [0]})).0, 200);
        assert_eq!(server.status("/health").0, 200);
    }
    let mut command = Command::new(program("shardrun"));
    command.arg("serve").arg(&dir).args(["--port", "0"]).stdout(full()).stderr(Stdio::piped());
    let (code, said) = wait(&mut command.spawn().unwrap());
    assert_eq!((code, said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.contains("stdout: No space left"), "{said}");
}

#[test]
fn every_request_has_an_id_that_its_log_line_has_too() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 1);
    let mut server = Server::of(&dir, &["--log-format", "json"], |command| command.stderr(Stdio::piped()));
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let ask = |id: Option<&str>, path: &str| {
        let mut request =
            agent.post(format!("{}{path}", server.url)).header("content-type", "application/json");
        if let Some(id) = id {
            request = request.header("x-request-id", id);
        }
        let mut reply = request.send(body(3).to_string().as_bytes()).unwrap();
        reply.body_mut().read_to_string().unwrap();
        reply.headers()["x-request-id"].to_str().unwrap().to_owned()
    };
    assert_eq!(ask(Some("client-7"), "/v1/completions"), "client-7");
    let own = ask(None, "/v1/completions");
    assert_eq!(ask(Some("wrong-path"), "/nowhere"), "wrong-path");
    let long = ask(Some(&"x".repeat(200)), "/v1/completions");
    assert!(own.starts_with("req-") && long.starts_with("req-") && own != long, "{own} {long}");
    success(Command::new("kill").args(["-TERM", &server.id().to_string()]));
    let (code, said) = wait(&mut server.child);
    assert_eq!(code, Some(0), "{said}");
    let lines: Vec<Value> = said
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    for (id, status, path) in [
        ("client-7", 200, "/v1/completions"),
        (&own, 200, "/v1/completions"),
        ("wrong-path", 404, "/nowhere"),
    ] {
        let line =
            lines.iter().find(|line| line["span"]["id"] == id).unwrap_or_else(|| panic!("{id} in {said}"));
        assert_eq!(
            (&line["status"], &line["path"], &line["whole"]),
            (&json!(status), &json!(path), &json!(true)),
            "{line}"
        );
        assert!(line["ms"].as_f64().unwrap() > 0.0 && line["bytes"].as_u64().unwrap() > 0, "{line}");
    }
}
