//! `shardrun serve` as a client meets it: the real program, a real socket, the bundled model on 8 ranks.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::checkpoint::Checkpoint;
use serde_json::{Value, json};
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::server::Server;
use tests::{Chat, bundled, failure, program};

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
    // What a tool call is read as is held by a test of its own.
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
        assert_eq!(usage["usage"]["completion_tokens"], reply["usage"]["completion_tokens"]);
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
    assert!(Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success());
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

#[test]
fn the_oracles_tool_call_is_a_call() {
    let server = Server::start(&[]);
    let chat = bundled().chats().into_iter().find(|chat| chat.text.contains("<tool_call>")).unwrap();
    let (status, reply) = server.post("/v1/chat/completions", &request(&chat));
    let choice = &reply["choices"][0];
    assert_eq!(
        (status, &choice["finish_reason"], &choice["message"]["content"]),
        (200, &json!("tool_calls"), &Value::Null)
    );
    let call = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(
        (&call["name"], &call["arguments"]),
        (&json!("get_weather"), &json!("{\"city\": \"Oslo\"}")),
        "{reply}"
    );
    // It must call something where the question asks for nothing.
    let mut body = request(&chat);
    body["messages"] = json!([{"role": "user", "content": "What is 2+2? Answer briefly."}]);
    body["tool_choice"] = json!({"type": "function", "function": {"name": "calculator"}});
    let (status, reply) = server.post("/v1/chat/completions", &body);
    let call = &reply["choices"][0]["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap_or_default()).unwrap();
    assert_eq!((status, &call["name"]), (200, &json!("calculator")), "{reply}");
    assert!(arguments["expression"].is_string(), "{reply}");
}

#[test]
fn answers_follow_their_schema_also_behind_reasoning() {
    let server = Server::start(&[]);
    let schema = json!({"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["sum", "ok"], "additionalProperties": false});
    for thinking in [false, true] {
        for temperature in [0.0, 1.5] {
            let body = json!({"messages": [{"role": "user", "content": "What is 37+48?"}], "temperature": temperature, "seed": 1,
                "chat_template_kwargs": {"enable_thinking": thinking}, "max_tokens": 400,
                "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}});
            let (status, reply) = server.post("/v1/chat/completions", &body);
            assert_eq!(status, 200, "{reply}");
            let choice = &reply["choices"][0];
            if choice["finish_reason"] == "length" {
                continue;
            }
            let content: Value =
                serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
            assert!(
                content["sum"].as_u64().is_some_and(|sum| sum <= 99) && content["ok"].is_boolean(),
                "{reply}"
            );
            assert_eq!(choice["message"]["reasoning_content"].is_string(), thinking, "{reply}");
        }
    }
}

#[test]
fn cached_prefixes_and_preemption_change_no_answer() {
    let long = |tail: &str| {
        format!("{}{tail}", "In the beginning God created the heaven and the earth. ".repeat(12))
    };
    let tails = ["And", "The sea", "What is", "A man went", "Once upon", "Moses said"];
    // Long prompts that share their beginning, and short ones with long answers.
    let body = |tail: &str| {
        let (prompt, most) = match tails.iter().position(|known| *known == tail) {
            Some(at) if at % 2 == 0 => (long(tail), 70),
            _ => (tail.to_owned(), 250),
        };
        json!({"prompt": prompt, "temperature": 0, "max_tokens": most, "ignore_eos": true, "logprobs": 2})
    };
    let alone = Server::start(&["--no-enable-prefix-caching"]);
    let expected: Vec<Value> =
        tails.iter().map(|tail| alone.post("/v1/completions", &body(tail)).1).collect();
    assert!(expected.iter().all(|reply| reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0));
    // Room for one of them and a little more: they push each other out.
    let small = Server::start(&["--max-model-len", "320", "--kv-cache-memory", "3840KiB"]);
    // Who pushes out whom depends on who comes first.
    const MOST_ROUNDS: usize = 20;
    for round in 0..MOST_ROUNDS {
        std::thread::scope(|scope| {
            for (tail, expected) in tails.iter().zip(&expected) {
                let (small, body) = (&small, body(tail));
                scope.spawn(move || {
                    let (status, reply) = small.post("/v1/completions", &body);
                    assert_eq!(status, 200, "{reply}");
                    assert_eq!(reply["choices"], expected["choices"], "{tail}");
                });
            }
        });
        if round > 0 && small.metric("vllm:num_preemptions_total") > 0.0 {
            break;
        }
    }
    assert!(small.metric("vllm:num_preemptions_total") > 0.0, "{}", small.get_text("/metrics"));
    assert!(small.metric("vllm:prefix_cache_hits_total") > 100.0);
    assert_eq!(small.metric("vllm:kv_cache_usage_perc"), 0.0, "every block came back");
}

#[test]
fn full_queues_and_caches_that_are_too_small_are_refused() {
    let server = Server::start(&["--max-num-seqs", "1", "--max-queued-requests", "2"]);
    let body = json!({"prompt": "In the beginning", "max_tokens": 300, "ignore_eos": true, "temperature": 0});
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..12).map(|_| scope.spawn(|| server.post("/v1/completions", &body).0)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    assert_eq!(server.post("/v1/completions", &body).0, 200, "and then there is room again");
    let temp = TempDir::new().unwrap();
    let dir = bundled().convert(temp.path(), 2);
    for (memory, expected) in [
        ("1kB", "a block of 64 tokens"),
        ("2MiB", "one sequence of 512 tokens"),
        ("9000T", "what this machine has"),
    ] {
        let mut command = Command::new(program("shardrun"));
        command.arg("serve").arg(&dir).args([
            "--port",
            "0",
            "--max-model-len",
            "512",
            "--kv-cache-memory",
            memory,
        ]);
        let message = failure(&mut command, 2);
        assert!(message.contains("--kv-cache-memory: expected") && message.contains(expected), "{message}");
    }
}
