//! The program as a shell sees it, where no model is needed: usage, files that are not there, exit codes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use runtime::dialect::Dialect;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn shardrun(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardrun"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs a command that must fail with code 2, nothing on stdout and one line on stderr.
fn refused(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let line = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{command:?}: {line}");
    assert!(output.stdout.is_empty(), "{command:?}");
    assert_eq!(line.lines().count(), 1, "{line}");
    line.strip_prefix("shardrun: error: ").unwrap_or_else(|| panic!("{line}")).trim_end().to_owned()
}

#[test]
fn wrong_command_lines_are_refused_in_one_line() {
    for (arguments, expected) in [
        (&[][..], "a command is missing"),
        (&["frobnicate"], "'frobnicate'"),
        (&["serve"], "<DIR>"),
        (&["serve", "dir", "--port", "99999"], "--port"),
        (&["serve", "dir", "--port", "x"], "--port"),
        (&["serve", "dir", "--max-num-seqs", "0"], "at least 1"),
        (&["serve", "dir", "--frobnicate"], "--frobnicate"),
        (&["serve", "dir", "--served-model-name", ""], "--served-model-name"),
        (&["serve", "dir", "--served-model-name", " "], "expected a name"),
        (&["serve", "dir", "--kv-cache-memory", "8X"], "such as 8GiB"),
        (&["serve", "dir", "--allowed-origins", "example.com"], "scheme and host"),
        (&["serve", "dir", "--ssl-certfile", "x"], "--ssl-keyfile"),
        (&["serve", "dir", "--read-timeout", "0"], "--read-timeout"),
        (&["completions", "abacus"], "abacus"),
        (&["man"], "<DIR>"),
        (&["generate", "dir"], "--prompt"),
        (&["generate", "dir", "--prompt", "x", "--temperature", "3"], "from 0 to 2"),
        (&["generate", "dir", "--prompt", "x", "--temperature", "nan"], "from 0 to 2"),
        (&["generate", "dir", "--prompt", "x", "--top-p", "0"], "above 0"),
        (&["generate", "dir", "--prompt", "x", "--stop", ""], "empty text"),
        (&["generate", "dir", "--prompt", "x", "--raw", "--thinking"], "--raw"),
        (&["logits", "dir", "--tokens", "x"], "--out"),
        (&["generate", "dir", "--prompt", "x", "--device", "gpu"], "cpu, cuda"),
        (&["generate", "dir", "--prompt", "x", "--device", "cuda:x"], "numbers of GPUs"),
        (&["generate", "dir", "--prompt", "x", "--load-mode", "x"], "buffered"),
        (&["bench"], "<DIR>"),
        (&["bench", "--synthetic", "x"], "glm5"),
    ] {
        let line = refused(&mut shardrun(arguments));
        // The command's own help says more than the program's.
        let help = match arguments.first() {
            Some(&command) if command != "frobnicate" => format!("see `shardrun {command} --help`"),
            _ => "see `shardrun --help`".to_owned(),
        };
        assert!(line.contains(expected) && line.ends_with(&help), "{line}");
    }
}

/// Where there is no driver; a machine that has one would go on.
#[test]
fn a_missing_driver_is_one_line() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let line = refused(&mut shardrun(&["bench", "--synthetic", "glm5", "--device", "cuda"]));
    assert!(line.contains("no NVIDIA driver") && line.contains("--device cpu"), "{line}");
    let line = refused(&mut shardrun(&["bench", "--synthetic", "glm5"]));
    assert!(line.contains("--device cuda"), "{line}");
}

#[test]
fn options_come_from_the_environment_too() {
    let line = refused(shardrun(&["serve", "dir"]).env("SHARDRUN_PORT", "x"));
    assert!(line.contains("--port"), "{line}");
    let line = refused(shardrun(&["generate", "dir", "--prompt", "x"]).env("SHARDRUN_THREADS", "0"));
    assert!(line.contains("--threads"), "{line}");
    // Anything that does not say no is a yes; either way the folder is what is missing.
    for value in ["1", "0", "false", "yes"] {
        let line = refused(shardrun(&["generate", "nowhere", "--prompt", "x"]).env("SHARDRUN_VERIFY", value));
        assert!(line.starts_with("nowhere: not a checkpoint: there is no such directory"), "{line}");
    }
}

#[test]
fn help_has_examples_and_goes_to_stdout() {
    for command in [
        &["--help"][..],
        &["serve", "--help"],
        &["generate", "--help"],
        &["logits", "--help"],
        &["completions", "--help"],
        &["man", "--help"],
    ] {
        let output = shardrun(command).output().unwrap();
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        assert!(output.status.success() && text.contains("Examples:\n  shardrun "), "{text}");
        assert_eq!(stderr(&output), "");
    }
    let version = shardrun(&["--version"]).output().unwrap();
    assert_eq!(
        String::from_utf8(version.stdout).unwrap(),
        format!("shardrun {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn a_folder_that_is_no_checkpoint_serves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    for command in ["serve", "generate"] {
        let mut arguments = vec![command, path];
        arguments.extend(if command == "serve" { ["--port", "0"] } else { ["--raw", "--prompt=x"] });
        let line = refused(&mut shardrun(&arguments));
        assert!(line.contains(path) && line.contains("checkpoint.json"), "{line}");
    }
}

/// What [`Dialect::open`] says of a folder.
fn dialect_error(dir: &Path) -> String {
    Dialect::open(dir).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn a_folder_that_cannot_speak_says_which_file_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let line = dialect_error(dir.path());
    assert!(line.starts_with(&format!("{path}/tokenizer.json: ")), "{line}");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-glm5-hf");
    for file in ["tokenizer.json", "generation_config.json"] {
        std::fs::copy(data.join(file), dir.path().join(file)).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), "{% for %}").unwrap();
    let line = dialect_error(dir.path());
    assert!(line.starts_with(&format!("{path}/chat_template.jinja: ")), "{line}");
}

#[test]
fn generation_configs_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-glm5-hf");
    std::fs::copy(data.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    for (config, expected) in [
        (None, "No such file"),
        (Some("{"), "EOF"),
        (Some("{}"), "eos_token_id"),
        (Some(r#"{"eos_token_id": []}"#), "eos_token_id is empty"),
        (Some(r#"{"eos_token_id": "x"}"#), "expected a token id or a list of them"),
        (Some(r#"{"eos_token_id": 1, "temperature": -1}"#), "temperature"),
        (Some(r#"{"eos_token_id": 1, "top_p": 0}"#), "top_p"),
        (Some(r#"{"eos_token_id": 1, "min_p": 2}"#), "min_p"),
        (Some(r#"{"eos_token_id": 1, "repetition_penalty": 0}"#), "repetition_penalty"),
        (Some(r#"{"eos_token_id": [1, 5000]}"#), "eos_token_id: expected ids below 4096"),
    ] {
        if let Some(config) = config {
            std::fs::write(dir.path().join("generation_config.json"), config).unwrap();
        }
        let line = dialect_error(dir.path());
        assert!(line.starts_with(&format!("{path}/generation_config.json: ")), "{line}");
        assert!(line.contains(expected), "{line}");
    }
}

#[test]
fn a_port_in_use_is_said_at_once() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let line = refused(&mut shardrun(&["serve", "nowhere", "--port", &port]));
    assert!(line.starts_with(&format!("cannot listen on 127.0.0.1:{port}: ")), "{line}");
    let line = refused(&mut shardrun(&["serve", "nowhere", "--host", "192.0.2.1", "--port", "0"]));
    assert!(line.starts_with("cannot listen on 192.0.2.1:0: "), "{line}");
}

#[test]
fn token_files_that_are_no_lists_of_ids_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ids.json");
    let arguments = ["logits", "nowhere", "--tokens", file.to_str().unwrap(), "--out", "x.safetensors"];
    let line = refused(&mut shardrun(&arguments));
    assert!(line.contains("ids.json: No such file"), "{line}");
    for (json, expected) in [
        ("[1, -2]", "entry 1 is -2"),
        ("[1.5]", "entry 0 is 1.5"),
        ("[\"a\"]", "entry 0 is \"a\""),
        ("[4294967296]", "entry 0 is 4294967296"),
        ("{}", "found"),
        ("[1,", "found"),
        ("", "found"),
    ] {
        std::fs::write(&file, json).unwrap();
        let line = refused(&mut shardrun(&arguments));
        assert!(
            line.contains("ids.json: expected a JSON list of token ids") && line.contains(expected),
            "{line}"
        );
    }
}

#[test]
fn closed_streams_are_no_panic() {
    let shell = |redirection: &str| {
        let script = format!("{} --help {redirection}", env!("CARGO_BIN_EXE_shardrun"));
        Command::new("sh").args(["-c", &script]).output().unwrap()
    };
    let output = shell("| head -c 0; exit 0");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
    let output = Command::new("sh")
        .args(["-c", &format!("{} frobnicate 2>&-", env!("CARGO_BIN_EXE_shardrun"))])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn keys_and_certificates_that_are_none_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (keys, empty, text) = (path("keys"), path("empty"), path("text"));
    std::fs::write(&keys, "good\nb\u{e4}d\n").unwrap();
    std::fs::write(&empty, "\n \n").unwrap();
    std::fs::write(&text, "no certificate").unwrap();
    for (arguments, expected) in [
        (vec!["--api-key-file", &path("nowhere")[..]], "nowhere: No such file"),
        (vec!["--api-key-file", &empty], "empty: expected keys, one on each line"),
        (vec!["--api-key-file", &keys], "key 2: expected printable ASCII"),
        (vec!["--api-key", ""], "--api-key: expected a key"),
        (vec!["--api-key", "a b"], "--api-key: expected a key"),
        (vec!["--ssl-certfile", &text, "--ssl-keyfile", &text], "text: expected PEM certificates"),
        (vec!["--ssl-certfile", "nowhere", "--ssl-keyfile", &text], "nowhere: expected PEM certificates"),
    ] {
        let mut all = vec!["serve", "dir", "--port", "0"];
        all.extend(arguments);
        let line = refused(&mut shardrun(&all));
        assert!(line.contains(expected), "{line}");
        assert!(!line.contains("a b"), "a key is not repeated");
    }
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    let commands = ["serve", "generate", "logits", "completions", "man"];
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = shardrun(&["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout.clone()).unwrap();
        assert!(output.status.success() && stderr(&output).is_empty());
        for word in commands.iter().chain(&["kv-cache-memory", "api-key-file"]) {
            assert!(script.contains(word), "{shell} does not know {word}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let man = dir.path().join("man1");
    let output = shardrun(&["man", man.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    for command in commands {
        let page = std::fs::read_to_string(man.join(format!("shardrun-{command}.1"))).unwrap();
        assert!(page.contains("Examples"), "{command}");
    }
    let serve = std::fs::read_to_string(man.join("shardrun-serve.1")).unwrap().replace('\\', "");
    assert!(serve.contains("--max-queued-requests") && serve.contains("SHARDRUN_API_KEY"));
    std::fs::write(dir.path().join("file"), "").unwrap();
    let line = refused(&mut shardrun(&["man", dir.path().join("file").to_str().unwrap()]));
    assert!(line.contains("cannot create the folder"), "{line}");
}
