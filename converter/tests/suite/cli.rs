//! The program: exit codes, one line for each error, JSON, and nothing left behind.

use crate::files::{bundled, convert, refused, shardmill};
use crate::made::{Gguf, Value as Text};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn converting(out: &Path) -> Command {
    shardmill(&["convert".as_ref(), bundled().gguf.as_os_str(), out.as_os_str()])
}

fn entries(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn every_command_prints_json() {
    let temp = TempDir::new().unwrap();
    let [out, x] = ["out", "x.safetensors"].map(|name| temp.path().join(name));
    let gguf = bundled().gguf;
    let json = |arguments: &[&OsStr]| -> Value {
        let output = shardmill(arguments).arg("--json").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let plan = json(&["plan".as_ref(), gguf.as_os_str(), "--ranks".as_ref(), "3".as_ref()]);
    assert_eq!((plan["ranks"].as_u64(), plan["tensors"].as_array().unwrap().len()), (Some(3), 90));
    assert!(plan["imbalance"].as_f64().unwrap() > 0.0);
    let summary = json(&["convert".as_ref(), gguf.as_os_str(), out.as_os_str()]);
    assert_eq!(summary["ranks"], 8);
    let report = json(&["verify".as_ref(), out.as_os_str()]);
    assert_eq!((&report["ok"], &report["failures"]), (&Value::Bool(true), &serde_json::json!([])));
    assert_eq!(json(&["inspect".as_ref(), out.as_os_str()])["ranks"], 8);
    let name = "model.norm.weight".as_ref();
    let arguments =
        ["extract".as_ref(), out.as_os_str(), "--tensor".as_ref(), name, "--out".as_ref(), x.as_os_str()];
    assert_eq!(json(&arguments)["shape"], serde_json::json!([256]));
}

/// A path need not be text; in JSON it is the text that is nearest to it.
#[test]
fn every_command_prints_json_of_paths_that_are_no_text() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path().join(OsStr::from_bytes(b"d\xff"));
    std::fs::create_dir(&dir).unwrap();
    let [out, apart, x] = ["out", "apart", "x.safetensors"].map(|name| dir.join(name));
    let gguf = dir.join("model.gguf");
    std::os::unix::fs::symlink(bundled().gguf, &gguf).unwrap();
    let [gguf, out_, apart_, x_] = [&gguf, &out, &apart, &x].map(|path| path.as_os_str());
    let [one, both] = [["--ranks", "2", "--rank", "0"], ["--ranks", "2", "--rank", "1"]]
        .map(|arguments| arguments.map(OsStr::new));
    let json = |command: &str, arguments: &[&OsStr]| -> Value {
        let output = shardmill(&[command.as_ref(), "--json".as_ref()]).args(arguments).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let ends = |value: &Value, end: &str| {
        let path = value.as_str().unwrap().to_owned();
        assert!(path.ends_with(end), "{path} should end with {end}");
    };
    json("plan", &[gguf]);
    json("inspect", &[gguf]);
    ends(&json("convert", &[gguf, out_])["out"], "d\u{fffd}/out");
    ends(&json("convert", &[&[gguf, apart_], &one[..]].concat())["out"], "d\u{fffd}/apart");
    json("convert", &[&[gguf, apart_], &both[..]].concat());
    ends(&json("finish", &[gguf, apart_, "--ranks".as_ref(), "2".as_ref()])["out"], "d\u{fffd}/apart");
    ends(&json("verify", &[out_, "--source".as_ref(), gguf])["dir"], "d\u{fffd}/out");
    json("inspect", &[out_]);
    let [tensor, name, to] = ["--tensor", "model.norm.weight", "--out"].map(OsStr::new);
    ends(&json("extract", &[out_, tensor, name, to, x_])["out"], "d\u{fffd}/x.safetensors");
}

/// What a terminal would obey is escaped as JSON has it, and comes back as it was.
#[test]
fn json_stays_json_whatever_a_name_holds() {
    const NAME: &str = "a\u{7f}b\u{85}c\u{2028}d\u{202e}e\u{1b}f\ng\u{1f600}";
    let temp = TempDir::new().unwrap();
    let mut gguf = Gguf::glm_dsa();
    gguf.set("general.name", Text::Str(NAME.to_owned()));
    let path = gguf.write(temp.path());
    let output = shardmill(&["plan".as_ref(), path.as_os_str(), "--json".as_ref()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.chars().all(|c| c == '\n' || formats::is_plain(c)), "{text}");
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found["name"], NAME);
}

#[test]
fn the_plan_is_a_table_by_role() {
    let output = shardmill(&["plan".as_ref(), bundled().gguf.as_os_str()]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |start: &str| {
        text.lines().find(|l| l.starts_with(start)).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        line("...self_attn.kv_b_proj"),
        "...self_attn.kv_b_proj.weight 4 Q5_0 + Q4_K BF16 join kv_b heads: 1 of 8 1.8 MB"
    );
    assert_eq!(
        line("...self_attn.indexer.weights_proj"),
        "...self_attn.indexer.weights_proj.weight 4 Q4_K F32 dequantize replicated 131.1 kB"
    );
    assert!(
        text.contains("an even cut")
            && text.contains("disk needed")
            && text.contains("memory needed: at most ")
            && text.contains("skipped: nothing"),
        "{text}"
    );
}

/// Every tensor is in the sum, those that stay with the reason, and only for who asked.
#[test]
fn the_plan_says_why_a_tensor_has_no_tiles() {
    let gguf = bundled().gguf;
    let text = |layout: &str, ranks: &str| {
        let arguments = ["plan".as_ref(), gguf.as_os_str()];
        let output = shardmill(&arguments).args(["--layout", layout, "--ranks", ranks]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(!text("ggml", "2").contains("layout mma16"));
    let text = text("mma16", "2");
    let line = text.lines().find(|line| line.starts_with("layout mma16: ")).unwrap();
    for words in [
        "tensors in tiles",
        "Q2_K",
        "it takes Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0",
        "1 stay ggml, whose rows are looked up",
    ] {
        assert!(line.contains(words), "{line} should say {words}");
    }
    let counts = line["layout mma16: ".len()..]
        .split("; ")
        .filter_map(|part| part.split(' ').next()?.parse::<usize>().ok());
    assert_eq!(counts.sum::<usize>(), 90, "{line}");
}

#[test]
fn bad_usage_is_one_line() {
    for (arguments, help) in [
        (&["convert"][..], "shardmill convert --help"),
        (&["convert", "in", "out", "--ranks", "0"], "shardmill convert --help"),
        (&["convert", "in", "out", "--ranks", "1025"], "shardmill convert --help"),
        (&["convert", "in", "out", "--experts", "sideways"], "shardmill convert --help"),
        (&["no-such-command"], "see `shardmill --help`"),
        (&["plan", "in", "--no-such-flag"], "shardmill plan --help"),
    ] {
        let arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
        let said = refused(&mut shardmill(&arguments), 2);
        assert!(said.contains(help), "{said} should point to {help}");
    }
    let help = shardmill(&["convert".as_ref(), "--help".as_ref()]).output().unwrap();
    assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains("Examples:"));
}

#[test]
fn what_is_there_is_not_touched() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let said = refused(&mut converting(&out), 2);
    assert!(said.contains("already a directory") && said.contains("nothing was touched"), "{said}");
    assert_eq!((entries(&out), entries(temp.path())), (0, 1));
    std::fs::remove_dir(&out).unwrap();
    std::fs::write(&out, "mine").unwrap();
    assert!(refused(&mut converting(&out), 2).contains("already a file"));
    assert_eq!(std::fs::read(&out).unwrap(), b"mine");
    std::fs::remove_file(&out).unwrap();
    let partial = temp.path().join("out.partial");
    std::fs::create_dir(&partial).unwrap();
    assert!(refused(&mut converting(&out), 2).contains("out.partial: an earlier run was interrupted"));
    assert!(partial.exists());
}

#[test]
fn missing_inputs_and_folders_are_named() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("no-such-folder/out");
    let said = refused(&mut converting(&out), 2);
    assert!(said.contains("no-such-folder") && said.contains("create it first"), "{said}");
    let missing = temp.path().join("missing.gguf");
    let said = refused(&mut shardmill(&["plan".as_ref(), missing.as_os_str()]), 2);
    assert!(said.contains("missing.gguf"), "{said}");
    let said = refused(&mut shardmill(&["verify".as_ref(), temp.path().as_os_str()]), 2);
    assert!(said.contains("no checkpoint.json"), "{said}");
    assert_eq!(entries(temp.path()), 0);
}

/// The shell's limit stands in for a full disk: writes fail in the same way.
#[test]
fn a_full_disk_names_the_file_and_leaves_nothing() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    let script = format!("ulimit -f 2000; exec '{}' convert \"$0\" \"$1\"", env!("CARGO_BIN_EXE_shardmill"));
    let mut command = Command::new("sh");
    command.args(["-c".as_ref(), OsStr::new(&script), bundled().gguf.as_os_str(), out.as_os_str()]);
    let said = refused(&mut command, 2);
    assert!(said.contains("rank-0-of-8.safetensors") && said.contains("bytes"), "{said}");
    assert_eq!(entries(temp.path()), 0);
}

#[test]
fn an_interruption_says_130_and_what_is_kept() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    // Hundreds of ranks, so that there is something to interrupt.
    let child = converting(&out)
        .args(["--ranks", "400"])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while entries(temp.path()) == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "the conversion never started");
        std::thread::sleep(Duration::from_millis(2));
    }
    let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("interrupted") && said.lines().count() == 1, "{said}");
    assert_eq!(said.contains("--resume"), entries(temp.path()) == 1, "{said}");
    assert!(!out.exists());
}

#[test]
fn a_reader_that_closes_the_pipe_is_no_error() {
    let mut child = shardmill(&["inspect".as_ref(), bundled().gguf.as_os_str(), "--json".as_ref()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert!(output.status.success());
}

#[test]
fn file_modes_follow_the_umask() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    convert(&bundled().gguf, &out, 1);
    let plain = temp.path().join("plain");
    std::fs::write(&plain, "").unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
    for entry in std::fs::read_dir(&out).unwrap() {
        assert_eq!(mode(&entry.unwrap().path()), mode(&plain));
    }
}
