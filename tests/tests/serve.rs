//! `shardrun serve` as a client meets it: the real program, a real socket, the bundled model on 8 ranks.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::checkpoint::Checkpoint;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::{Chat, bundled, failure, program};

/// A running server, killed when the test ends.
struct Server {
    child: Child,
    url: String,
    _checkpoint: TempDir,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let temp = TempDir::new().unwrap();
        let dir = bundled().convert(temp.path(), 8);
        let mut child = Command::new(program("shardrun"))
            .args(["serve".as_ref(), dir.as_os_str()])
            .args(["--port", "0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.split_whitespace().find(|word| word.starts_with("http://"));
        let url = url.unwrap_or_else(|| panic!("no URL in {line:?}")).to_owned();
        Self { child, url, _checkpoint: temp }
    }

    /// Status and JSON body of a POST.
    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.post_text(path, body);
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    fn post_text(&self, path: &str, body: &Value) -> (u16, String) {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let url = format!("{}{path}", self.url);
        let mut reply = agent
            .post(&url)
            .header("content-type", "application/json")
            .send(body.to_string().as_bytes())
            .unwrap();
        (reply.status().as_u16(), reply.body_mut().read_to_string().unwrap())
    }

    fn get(&self, path: &str) -> Value {
        let text =
            ureq::get(&format!("{}{path}", self.url)).call().unwrap().body_mut().read_to_string().unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// The JSON chunks of a streamed answer; the stream must end with `[DONE]`.
    fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, text) = self.post_text(path, body);
        assert_eq!(status, 200, "{text}");
        let events: Vec<&str> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
        let (last, chunks) = events.split_last().unwrap();
        assert_eq!(*last, "data: [DONE]");
        let json = |event: &&str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        chunks.iter().filter(|event| !event.starts_with(':')).map(json).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn request(chat: &Chat) -> Value {
    let mut body = json!({
        "messages": chat.messages,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": chat.enable_thinking},
    });
    if !chat.tools.is_null() {
        body["tools"] = chat.tools.clone();
    }
    body
}

/// Reasoning and answer of the oracle's text.
fn split(chat: &Chat) -> (Option<&str>, &str) {
    match chat.text.split_once("</think>") {
        Some((reasoning, answer)) if chat.enable_thinking => (Some(reasoning), answer),
        _ => (None, &chat.text),
    }
}

fn chats() -> Vec<Chat> {
    // Tool calls are text here: their parsing is not built yet.
    bundled().chats().into_iter().filter(|chat| !chat.text.contains("<tool_call>")).collect()
}

#[test]
fn every_oracle_chat_is_answered_word_for_word() {
    let server = Server::start(&[]);
    for chat in chats() {
        let (reasoning, answer) = split(&chat);
        let (status, reply) = server.post("/v1/chat/completions", &request(&chat));
        assert_eq!(status, 200, "{reply}");
        let message = &reply["choices"][0]["message"];
        assert_eq!(message["content"], answer, "{reply}");
        assert_eq!(message["reasoning_content"].as_str(), reasoning, "{reply}");
        assert_eq!(message["role"], "assistant");
        assert_eq!(reply["choices"][0]["finish_reason"], "stop");
        assert_eq!(reply["usage"]["prompt_tokens"], chat.tokens.len());

        let mut body = request(&chat);
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let chunks = server.stream("/v1/chat/completions", &body);
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        let joined = |field: &str| -> String {
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str()).collect()
        };
        assert_eq!(joined("content"), answer);
        assert_eq!(joined("reasoning_content"), reasoning.unwrap_or_default());
        let usage = chunks.last().unwrap();
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"], reply["usage"]);
        let finish: Vec<&Value> =
            chunks.iter().filter(|c| c["choices"][0]["finish_reason"] == "stop").collect();
        assert_eq!(finish.len(), 1);
        assert!(chunks.iter().all(|c| c["id"] == chunks[0]["id"] && c["model"] == chunks[0]["model"]));
    }
}

#[test]
fn answers_under_load_equal_the_answers_alone() {
    let server = Server::start(&["--max-num-seqs", "5"]);
    let chats = chats();
    std::thread::scope(|scope| {
        for i in 0..24 {
            let (server, chat) = (&server, &chats[i % chats.len()]);
            scope.spawn(move || {
                let (_, reply) = server.post("/v1/chat/completions", &request(chat));
                assert_eq!(reply["choices"][0]["message"]["content"], split(chat).1, "{reply}");
            });
        }
    });
}

#[test]
fn completions_seeds_and_the_small_routes_work() {
    let server = Server::start(&[]);
    assert_eq!(server.get("/health")["status"], "ok");
    let model = server.get("/v1/models")["data"][0]["id"].clone();
    let chat = &bundled().chats()[1];
    let (status, reply) = server.post(
        "/v1/completions",
        &json!({"model": model, "prompt": chat.prompt, "temperature": 0, "max_tokens": 50}),
    );
    assert_eq!((status, &reply["choices"][0]["text"]), (200, &json!(chat.text)), "{reply}");
    let by_ids = json!({"prompt": chat.tokens, "temperature": 0, "max_tokens": 3, "stream": true});
    let text: String = server
        .stream("/v1/completions", &by_ids)
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str().map(str::to_owned))
        .collect();
    assert!(!text.is_empty() && chat.text.starts_with(&text), "{text}");

    let seeded = json!({"prompt": "In the beginning", "temperature": 1.5, "seed": 7, "max_tokens": 12});
    let (_, first) = server.post("/v1/completions", &seeded);
    let (_, second) = server.post("/v1/completions", &seeded);
    assert_eq!(first["choices"], second["choices"]);
    assert_eq!(first["choices"][0]["finish_reason"], "length");
    let (_, other) = server.post(
        "/v1/completions",
        &json!({"prompt": "In the beginning", "temperature": 1.5, "seed": 8, "max_tokens": 12}),
    );
    assert_ne!(first["choices"], other["choices"]);
}

#[test]
fn bad_requests_name_the_field_and_leave_the_server_alone() {
    let server = Server::start(&["--max-model-len", "64"]);
    let long = "word ".repeat(200);
    let cases = [
        (json!({"prompt": long}), "context_length_exceeded"),
        (json!({"prompt": "a", "temperature": "hot"}), "temperature"),
        (json!({"prompt": "a", "max_tokens": -1}), "max_tokens"),
        (json!({"prompt": [5000]}), "4096"),
        (json!({}), "prompt"),
    ];
    for (body, name) in cases {
        let (status, reply) = server.post("/v1/completions", &body);
        assert_eq!(status, 400, "{reply}");
        assert!(reply["error"].to_string().contains(name), "{reply} should name {name}");
    }
    let (status, _) =
        server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 2, "temperature": 0}));
    assert_eq!(status, 200);
}

#[cfg(unix)]
#[test]
fn sigterm_ends_with_exit_code_0() {
    let mut server = Server::start(&[]);
    assert!(Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().unwrap().success());
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = server.child.try_wait().unwrap() {
            break status;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "it goes on after SIGTERM");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status.code(), Some(0));
}

#[test]
fn a_flipped_byte_keeps_serve_verify_from_starting() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 8);
    let path = dir.join("rank-5-of-8.safetensors");
    let manifest = Checkpoint::open(&dir).unwrap().rank_manifest(5).unwrap();
    let entry = manifest.tensor("model.layers.2.self_attn.kv_b_proj.weight").unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[entry.bytes.0 as usize + 1000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let message = failure(
        Command::new(program("shardrun")).arg("serve").arg(&dir).args(["--verify", "--port", "0"]),
        2,
    );
    for expected in ["rank 5", "chunk 0", &entry.name] {
        assert!(message.contains(expected), "{message} should say {expected}");
    }
}

#[test]
fn verify_covers_every_file_of_the_checkpoint() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 2);
    let generate = || {
        let mut command = Command::new(program("shardrun"));
        command.arg("generate").arg(&dir).args(["--verify", "--prompt", "x", "--max-tokens", "1"]);
        command
    };
    tests::success(&mut generate());
    // Still valid JSON with every field in range, and another model.
    let path = dir.join("checkpoint.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let changed = good.replace("\"softmax_scale\": 0.0625", "\"softmax_scale\": 0.0725");
    assert_ne!(good, changed);
    std::fs::write(&path, changed).unwrap();
    assert!(failure(&mut generate(), 2).contains("checkpoint.json: digest"));
    std::fs::write(&path, good).unwrap();
    for name in tests::listing(&dir).into_keys() {
        let path = dir.join(&name);
        let good = std::fs::read(&path).unwrap();
        let mut bytes = good.clone();
        bytes[good.len() / 2] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        // Of B3SUMS one line counts; a checkpoint without a readable top manifest does not open at all.
        if name != "B3SUMS" {
            failure(&mut generate(), 2);
        }
        std::fs::write(&path, good).unwrap();
    }
}

#[test]
fn generate_prints_the_answer() {
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 3);
    let output = tests::success(Command::new(program("shardrun")).arg("generate").arg(&dir).args([
        "--prompt",
        "What is 2+2? Answer briefly.",
        "--temperature",
        "0",
    ]));
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim_end(), "4");
    let mut child = Command::new(program("shardrun"))
        .arg("generate")
        .arg(&dir)
        .args(["--prompt", "Recite Genesis 1:1.", "--temperature", "0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    child.wait().unwrap();
    assert!(!stderr.contains("panicked"), "a closed pipe is no fault: {stderr}");
}
