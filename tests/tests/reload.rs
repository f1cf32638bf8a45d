//! Other weights under a running server, as who runs it and who asks it meet them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::server::Server;
use tests::weights::{Other, convert_other};
use tests::{bundled, failure, program, success};

const RANKS: usize = 4;

/// Two checkpoints of one model, and a server of the first.
struct Two {
    temp: TempDir,
    first: PathBuf,
    second: PathBuf,
    server: Server,
    /// What each answers.
    answers: [String; 2],
}

const PROMPT: &str = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was upon the face of the deep.";

fn body(max_tokens: usize) -> Value {
    json!({"prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": true})
}

fn answer(server: &Server) -> String {
    let (status, reply) = server.post("/v1/completions", &body(24));
    assert_eq!(status, 200, "{reply}");
    reply["choices"][0]["text"].as_str().unwrap().to_owned()
}

impl Two {
    fn new(other: Other) -> Self {
        let temp = TempDir::new().unwrap();
        let first = bundled().convert(temp.path(), RANKS);
        let second = convert_other(other, temp.path(), "second", RANKS);
        let of = |dir: &Path| answer(&Server::on_device(dir, &[]));
        let server = Server::on_device(&first, &[]);
        let answers = [answer(&server), of(&second)];
        assert_ne!(answers[0], answers[1], "other weights say something else");
        Self { temp, first, second, server, answers }
    }

    fn reload(&self, body: &Value) -> (u16, Value) {
        self.server.post("/admin/reload", body)
    }

    fn copy(&self, name: &str) -> PathBuf {
        let to = self.temp.path().join(name);
        success(Command::new("cp").arg("-r").arg(&self.second).arg(&to));
        to
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn new_weights_answer_what_comes_and_say_how_they_came() {
    let two = Two::new(Other::Norm);
    let [first, second] = &two.answers;
    let ranks = two.server.get("/admin/ranks");
    assert_eq!(ranks["ranks"].as_array().unwrap().len(), RANKS, "{ranks}");
    let (status, report) = two.reload(&json!({"dir": two.second}));
    assert_eq!(
        (status, &report["how"], &report["generation"]),
        (200, &json!("beside"), &json!(2)),
        "{report}"
    );
    for (rank, report) in report["ranks"].as_array().unwrap().iter().enumerate() {
        let bytes =
            std::fs::metadata(two.second.join(format!("rank-{rank}-of-{RANKS}.safetensors"))).unwrap().len();
        assert_eq!((&report["loaded"], &report["bytes"]), (&json!(true), &json!(bytes)));
        assert!(
            report["seconds"].as_f64().unwrap() > 0.0 && report["gb_per_s"].as_f64().unwrap() > 0.0,
            "{report}"
        );
        assert_ne!(report["old_digest"], report["new_digest"]);
        assert_eq!(report["old_digest"], ranks["ranks"][rank]["digest"]);
        assert_eq!(report["verified"], true);
    }
    // The prompt is in the old weights' prefix cache.
    assert_eq!(&answer(&two.server), second);
    assert_eq!(two.server.metric("shardrun_generation"), 2.0);
    assert!(
        two.server
            .get_text("/metrics")
            .contains("shardrun_reloads_total{model_name=\"Hf\",result=\"done\"} 1")
    );
    // Nothing has changed there; and then one rank again, though it has not.
    let (status, report) = two.reload(&json!({}));
    assert_eq!(
        (status, &report["how"], &report["generation"]),
        (200, &json!("nothing"), &json!(2)),
        "{report}"
    );
    let (status, report) = two.reload(&json!({"ranks": [2], "verify": false}));
    let loaded: Vec<bool> =
        report["ranks"].as_array().unwrap().iter().map(|rank| rank["loaded"] == true).collect();
    assert_eq!((status, loaded), (200, vec![false, false, true, false]), "{report}");
    assert_eq!(&answer(&two.server), second);
    // By the command.
    let command = |arguments: &[&str]| {
        let mut command = Command::new(program("shardrun"));
        command.arg("reload").args(["--url", &two.server.url]).args(arguments);
        command
    };
    let output = success(&mut command(&["--dir", two.first.to_str().unwrap()]));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("rank 3: ") && text.contains("nothing waited"), "{text}");
    assert_eq!(&answer(&two.server), first);
    let message = failure(&mut command(&["--dir", "/nowhere"]), 1);
    assert!(message.contains("422") && message.contains("/nowhere: not a checkpoint"), "{message}");
    let message =
        failure(Command::new(program("shardrun")).args(["reload", "--url", "http://127.0.0.1:9"]), 2);
    assert!(message.contains("http://127.0.0.1:9/admin/reload"), "{message}");
}

#[test]
fn a_signal_loads_what_the_folder_has_by_then_and_ranks_that_are_as_before_stay() {
    let mut two = Two::new(Other::FirstWords);
    let current = two.temp.path().join("current");
    symlink(&two.first, &current).unwrap();
    two.server = Server::on_device(&current, &[]);
    assert_eq!(answer(&two.server), two.answers[0]);
    std::fs::remove_file(&current).unwrap();
    symlink(&two.second, &current).unwrap();
    let (status, error) = two.reload(&json!({"ranks": [1]}));
    assert_eq!((status, &error["error"]["rank"]), (409, &json!(0)), "rank 0 has changed too: {error}");
    success(Command::new("kill").args(["-HUP", &two.server.id().to_string()]));
    wait_until("other weights", || two.server.get("/admin/ranks")["generation"] == 2);
    assert_eq!(answer(&two.server), two.answers[1]);
    let ranks = two.server.get("/admin/ranks");
    let files: Vec<bool> = (0..RANKS)
        .map(|rank| ranks["ranks"][rank]["file"].as_str().unwrap().starts_with(current.to_str().unwrap()))
        .collect();
    assert_eq!(files, [true; RANKS], "{ranks}");
}

#[test]
fn what_began_ends_on_the_weights_that_it_began_with_and_in_place_the_rest_waits() {
    let two = Two::new(Other::Norm);
    let long = |server: &Server| {
        let (status, reply) = server.post("/v1/completions", &body(300));
        assert_eq!(status, 200, "{reply}");
        reply["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let expected = long(&two.server);
    for in_place in [false, true] {
        std::thread::scope(|scope| {
            let running = scope.spawn(|| long(&two.server));
            wait_until("a request runs", || two.server.metric("vllm:num_requests_running") == 1.0);
            let reloading = scope.spawn(|| two.reload(&json!({"dir": two.second, "in_place": in_place})));
            if in_place {
                wait_until("requests wait", || two.server.status("/health/ready").0 == 503);
                assert_eq!(two.server.status("/health/live").0, 200);
                let (status, error) = two.reload(&json!({}));
                assert_eq!((status, &error["error"]["code"]), (409, &json!("conflict")), "{error}");
                let waiting = scope.spawn(|| answer(&two.server));
                assert_eq!(waiting.join().unwrap(), two.answers[1], "what waited is answered by what came");
                assert_eq!(running.join().unwrap(), expected);
                let (status, report) = reloading.join().unwrap();
                assert_eq!((status, &report["how"]), (200, &json!("in_place")), "{report}");
                assert!(report["seconds_without_weights"].as_f64().unwrap() > 0.0, "{report}");
            } else {
                let (status, report) = reloading.join().unwrap();
                assert_eq!((status, &report["how"]), (200, &json!("beside")), "{report}");
                assert_eq!(answer(&two.server), two.answers[1]);
                assert_eq!(running.join().unwrap(), expected, "begun before, and not disturbed");
            }
        });
        assert_eq!(two.server.status("/health").0, 200);
        let (status, _) = two.reload(&json!({"dir": two.first}));
        assert_eq!((status, answer(&two.server)), (200, two.answers[0].clone()));
    }
}

#[test]
fn choices_of_one_answer_are_of_the_same_weights() {
    let two = Two::new(Other::Norm);
    // One at a time, so that most choices wait while the weights change.
    let server = Server::on_device(&two.first, &["--max-num-seqs", "1"]);
    let mut body = body(24);
    body["n"] = json!(12);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| server.post("/v1/completions", &body).1);
        wait_until("it runs", || server.metric("vllm:num_requests_running") == 1.0);
        assert_eq!(server.post("/admin/reload", &json!({"dir": two.second})).0, 200);
        assert_eq!(answer(&server), two.answers[1], "what comes later has the new ones");
        let reply = asking.join().unwrap();
        let texts: Vec<&str> = reply["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(texts, vec![two.answers[0].as_str(); 12]);
    });
}

#[test]
fn a_checkpoint_that_cannot_be_served_changes_nothing() {
    let two = Two::new(Other::Norm);
    let rank_file = |dir: &Path, rank: usize| dir.join(format!("rank-{rank}-of-{RANKS}.safetensors"));
    let edit = |dir: &Path, from: &str, to: &str| {
        let path = dir.join("checkpoint.json");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{from} is in the manifest");
        std::fs::write(path, text.replacen(from, to, 1)).unwrap();
    };
    let flipped = two.copy("flipped");
    let mut bytes = std::fs::read(rank_file(&flipped, 2)).unwrap();
    let checkpoint = formats::checkpoint::Checkpoint::open(&flipped).unwrap();
    const TENSOR: &str = "model.layers.2.self_attn.kv_b_proj.weight";
    let at = checkpoint.rank_manifest(2).unwrap().tensor(TENSOR).unwrap().bytes.0;
    bytes[at as usize + 7] ^= 1;
    std::fs::write(rank_file(&flipped, 2), &bytes).unwrap();
    let truncated = two.copy("truncated");
    std::fs::write(rank_file(&truncated, 1), &bytes[..bytes.len() / 2]).unwrap();
    let unreadable = two.copy("unreadable");
    std::fs::remove_file(rank_file(&unreadable, 3)).unwrap();
    std::fs::create_dir(rank_file(&unreadable, 3)).unwrap();
    let missing = two.copy("missing");
    std::fs::remove_file(missing.join(format!("rank-0-of-{RANKS}.json"))).unwrap();
    let model = two.copy("model");
    edit(&model, "\"softmax_scale\": 0.0625", "\"softmax_scale\": 0.0725");
    let words = two.copy("words");
    let digest = checkpoint.manifest().files[0].blake3.to_string();
    edit(&words, &digest, &digest.chars().rev().collect::<String>());
    let half = two.copy("half");
    std::fs::remove_file(half.join("checkpoint.json")).unwrap();
    let other_count = convert_other(Other::Norm, two.temp.path(), "two", 2);
    let cases: [(&Path, Option<usize>, &[&str]); 8] = [
        (&flipped, Some(2), &["chunk 0", TENSOR]),
        (&truncated, Some(1), &["size", "bytes"]),
        (&unreadable, Some(3), &["it is a directory"]),
        (&missing, Some(0), &["rank-0-of-4.json", "No such file"]),
        (&model, None, &["model.attention.softmax_scale", "0.0625", "0.0725"]),
        (&words, None, &["files, "]),
        (&half, None, &["not a checkpoint"]),
        (&other_count, None, &["ranks: expected 4", "found 2"]),
    ];
    for in_place in [false, true] {
        for (dir, rank, words) in &cases {
            let (status, reply) = two.reload(&json!({"dir": dir, "in_place": in_place}));
            let error = &reply["error"];
            assert_eq!((status, &error["rank"]), (422, &json!(rank)), "{reply}");
            let message = error["message"].as_str().unwrap();
            assert!(words.iter().all(|word| message.contains(word)), "{message} should say {words:?}");
            if words.contains(&TENSOR) {
                assert_eq!(error["tensor"], TENSOR, "{reply}");
            }
            assert_eq!(answer(&two.server), two.answers[0], "{}", dir.display());
        }
    }
    assert_eq!(two.reload(&json!({"ranks": [4]})).1["error"]["param"], "ranks");
    assert_eq!(two.server.get("/admin/ranks")["generation"], 1);
    assert_eq!(two.server.status("/health").0, 200);
    assert_eq!(two.reload(&json!({"dir": two.second})).0, 200, "and a good one is taken after all of them");
    assert_eq!(answer(&two.server), two.answers[1]);
}

/// Somebody copies into the folder while it is loaded, badly: at any moment a rank's file is whole, damaged, cut off or not there.
#[test]
fn files_that_change_during_a_reload_are_loaded_whole_or_refused() {
    let two = Two::new(Other::Norm);
    let dir = two.copy("changing");
    let file = dir.join(format!("rank-2-of-{RANKS}.safetensors"));
    let whole = std::fs::read(&file).unwrap();
    let mut damaged = whole.clone();
    let at = whole.len() - 99;
    damaged[at] ^= 1;
    let put = |bytes: &[u8]| {
        let beside = dir.join("beside");
        std::fs::write(&beside, bytes).unwrap();
        std::fs::rename(&beside, &file).unwrap();
    };
    let done = AtomicBool::new(false);
    let mut seen = [0; 2];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                put(&whole);
                put(&damaged);
                put(&whole[..whole.len() / 2]);
                std::fs::remove_file(&file).unwrap();
            }
            put(&whole);
        });
        let mut serving = 0;
        let begin = Instant::now();
        while seen.contains(&0) || begin.elapsed() < Duration::from_secs(3) {
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "always the same of whole and refused: {seen:?}"
            );
            let (status, reply) = two.reload(&json!({"dir": dir, "ranks": [0, 1, 2, 3]}));
            match status {
                200 => {
                    serving = 1;
                    seen[0] += 1;
                }
                _ => {
                    assert_eq!((status, &reply["error"]["rank"]), (422, &json!(2)), "{reply}");
                    seen[1] += 1;
                }
            }
            assert_eq!(answer(&two.server), two.answers[serving], "after {reply}");
        }
        done.store(true, Ordering::Relaxed);
    });
    let (status, reply) = two.reload(&json!({"dir": dir, "ranks": [0, 1, 2, 3]}));
    assert_eq!((status, answer(&two.server)), (200, two.answers[1].clone()), "{reply}");
}
