//! The clients that people have, unchanged, against a served tiny-glm5: the openai, anthropic and litellm packages, lm-eval,
//! schemathesis, curl. They are installed once, in pinned versions, into a virtual environment below the target folder.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use tests::server::Server;
use tests::{not_run, workspace};

/// One environment is made at a time.
static MAKING: Mutex<()> = Mutex::new(());

/// The `bin` folder of an environment with exactly these packages; `None` where they cannot be fetched, which is said.
fn environment(requirements: &str) -> Option<PathBuf> {
    let _alone = MAKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let list = workspace().join("tests/clients").join(requirements);
    let digest = blake3::hash(&std::fs::read(&list).unwrap()).to_hex();
    let test = std::env::current_exe().unwrap();
    let target = test.ancestors().nth(3).unwrap();
    let dir = target.join(format!("clients-{}", &digest[..16]));
    let bin = dir.join("bin");
    if dir.join("complete").exists() {
        return Some(bin);
    }
    // What an interrupted attempt left.
    let _ = std::fs::remove_dir_all(&dir);
    let made = Command::new("python3").args(["-m", "venv"]).arg(&dir).output();
    if !made.as_ref().is_ok_and(|output| output.status.success()) {
        not_run(&format!("clients of {requirements}: `python3 -m venv` does not work here"));
        return None;
    }
    let pip = Command::new(bin.join("pip"))
        .args(["install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r"])
        .arg(&list)
        .output()
        .unwrap();
    if !pip.status.success() {
        let said = String::from_utf8_lossy(&pip.stderr);
        let fetches = [
            "Temporary failure",
            "Could not find a version",
            "ConnectionError",
            "NewConnectionError",
            "Max retries",
            "No matching distribution",
        ];
        assert!(fetches.iter().any(|text| said.contains(text)), "pip: {said}");
        not_run(&format!("clients of {requirements}: PyPI cannot be reached"));
        return None;
    }
    std::fs::write(dir.join("complete"), "").unwrap();
    Some(bin)
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_sdks_talk_to_it() {
    let Some(bin) = environment("requirements.txt") else { return };
    let server = Server::start(&["--api-key", "test-key"]);
    let script = workspace().join("tests/clients/sdks.py");
    let output = Command::new(bin.join("python"))
        .arg(script)
        .args([&server.url, "test-key"])
        // It would ask the network for prices otherwise.
        .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        .output()
        .unwrap();
    assert!(output.status.success() && said(&output).contains("ok"), "{}", said(&output));
}

#[test]
fn schemathesis_finds_no_answer_that_the_document_does_not_have() {
    let Some(bin) = environment("requirements.txt") else { return };
    // Answers that are short whatever is asked for.
    let server = Server::start(&["--api-key", "test-key", "--max-model-len", "64"]);
    let output = Command::new(bin.join("schemathesis"))
        .args(["run", &format!("{}/openapi.json", server.url)])
        .args(["--header", "Authorization: Bearer test-key", "--max-examples", "20", "--seed", "1"])
        .args([
            "--suppress-health-check",
            "all",
            "--continue-on-failure",
            "--request-timeout",
            "60",
            "--no-color",
        ])
        // A schema cannot say which fields go together, so some of what it allows is refused.
        .args(["--exclude-checks", "positive_data_acceptance"])
        .current_dir(bin.parent().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(server.get("/health")["status"], "ok");
}

#[test]
fn lm_eval_scores_far_above_chance() {
    let Some(bin) = environment("requirements-lm-eval.txt") else { return };
    let server = Server::start(&[]);
    let folder = workspace().join("tests/clients/lm-eval");
    let temp = tempfile::TempDir::new().unwrap();
    let data = folder.join("capitals.jsonl");
    let task = std::fs::read_to_string(folder.join("capitals.yaml")).unwrap();
    std::fs::write(temp.path().join("capitals.yaml"), task.replace("DATA", data.to_str().unwrap())).unwrap();
    let model = server.get("/v1/models")["data"][0]["id"].as_str().unwrap().to_owned();
    let output = Command::new(bin.join("lm_eval"))
        .args(["run", "--model", "local-completions", "--tasks", "capitals", "--model_args"])
        .arg(format!("model={model},base_url={}/v1/completions,tokenizer_backend=remote", server.url))
        .args(["--include_path".as_ref(), temp.path().as_os_str()])
        .envs([("HF_HUB_OFFLINE", "1"), ("HF_DATASETS_OFFLINE", "1"), ("OPENAI_API_KEY", "none")])
        .env("HF_HOME", temp.path())
        .output()
        .unwrap();
    let text = said(&output);
    let row = text.lines().find(|line| line.starts_with("|capitals")).unwrap_or_else(|| panic!("{text}"));
    let accuracy: f64 = row.split('|').nth(7).unwrap().trim().parse().unwrap();
    // Three choices each: chance is a third.
    assert!(accuracy > 0.8, "{row}");
}

#[test]
fn curl_talks_to_it() {
    if !Command::new("curl").arg("--version").output().is_ok_and(|output| output.status.success()) {
        not_run("curl: it is not installed");
        return;
    }
    let server = Server::start(&[]);
    let curl = |arguments: &[&str]| {
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "60"])
            .args(arguments)
            .output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let url = |path: &str| format!("{}{path}", server.url);
    // Without a content type of its own curl says that it sends a form.
    let body =
        r#"{"messages": [{"role": "user", "content": "What is 2+2? Answer briefly."}], "temperature": 0}"#;
    let answer = curl(&[&url("/v1/chat/completions"), "-d", body]);
    assert!(answer.contains(r#""content":"4""#), "{answer}");
    let head = curl(&[
        "--include",
        "--no-buffer",
        &url("/v1/chat/completions"),
        "-d",
        &body.replace("\"temperature\"", "\"stream\": true, \"temperature\""),
    ]);
    assert!(head.contains("text/event-stream") && head.trim_end().ends_with("data: [DONE]"), "{head}");
    // A body that is sent only when the server says so.
    let large = format!("{{\"prompt\": \"{}\"}}", "x".repeat(2000));
    assert!(curl(&["-H", "Expect: 100-continue", &url("/tokenize"), "-d", &large]).contains("\"count\":"));
    assert!(curl(&["--head", &url("/health")]).starts_with("HTTP/1.1 200"));
}

#[test]
fn every_version_is_pinned() {
    for name in ["requirements.txt", "requirements-lm-eval.txt"] {
        let text = std::fs::read_to_string(Path::new(&workspace().join("tests/clients").join(name))).unwrap();
        assert!(text.lines().count() > 20);
        for line in text.lines() {
            let (package, version) = line.split_once("==").unwrap_or_else(|| panic!("{name}: {line}"));
            assert!(
                !package.is_empty() && version.starts_with(|c: char| c.is_ascii_digit()),
                "{name}: {line}"
            );
        }
    }
}
