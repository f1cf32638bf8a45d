//! A preloaded library ends or fails the program at every single call on its files: nothing left over opens and is wrong, and
//! the same command goes on to the same bytes.

use crate::files::contents;
use crate::made::Gguf;
use formats::checkpoint::Checkpoint;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

const RANKS: &str = "3";
const JOURNAL: &str = "convert.journal";

/// Compiled once for all tests.
pub(crate) fn library() -> &'static Path {
    static BUILT: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUILT.get_or_init(|| {
        let temp = TempDir::new().unwrap();
        let path = temp.path().join("faults.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&path).arg(source).arg("-ldl");
        let output = cc.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (temp, path)
    });
    path
}

/// In memory where there is such a file system: every run flushes dozens of files.
fn folder() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap()
}

/// A source and what a whole conversion of it writes.
struct Bench {
    temp: TempDir,
    gguf: PathBuf,
    expected: BTreeMap<String, Vec<u8>>,
}

impl Bench {
    fn new() -> Self {
        let temp = folder();
        let gguf = Gguf::glm_dsa().write(temp.path());
        let bench = Self { expected: BTreeMap::new(), gguf, temp };
        let out = bench.temp.path().join("expected");
        let output = bench.command(&["convert"], &out).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let expected = contents(&out);
        std::fs::remove_dir_all(&out).unwrap();
        Self { expected, ..bench }
    }

    /// `shardmill ARGUMENTS.. SOURCE OUT` on one thread, so that its calls come in one order.
    fn command(&self, arguments: &[&str], out: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardmill"));
        let (name, options) = arguments.split_first().unwrap();
        command
            .arg(name)
            .arg(&self.gguf)
            .arg(out)
            .args(["--ranks", RANKS, "--threads", "1", "-q"])
            .args(options);
        command
    }

    fn faulty(&self, arguments: &[&str], out: &Path, fault: &str, at: usize) -> Output {
        let mut command = self.command(arguments, out);
        command
            .env("LD_PRELOAD", library())
            .env("FAULT_IN", self.temp.path())
            .env("FAULT_DO", fault)
            .env("FAULT_AT", at.to_string())
            .env("FAULT_COUNT", self.temp.path().join("count"));
        command.output().unwrap()
    }

    /// Calls of a run without faults.
    fn calls(&self, arguments: &[&str], out: &Path) -> usize {
        let output = self.faulty(arguments, out, "count", 0);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read_to_string(self.temp.path().join("count")).unwrap().parse().unwrap()
    }

    /// What opens is whole; a journal may still be in it.
    fn nothing_opens_and_is_wrong(&self, what: &str) {
        for entry in std::fs::read_dir(self.temp.path()).unwrap() {
            let dir = entry.unwrap().path();
            if Checkpoint::open(&dir).is_err() {
                continue;
            }
            let found = contents(&dir);
            for (name, bytes) in &self.expected {
                assert!(found.get(name) == Some(bytes), "{what}: {} opens, {name} is wrong", dir.display());
            }
        }
    }

    fn is_whole(&self, out: &Path, what: &str) {
        let found = contents(out);
        let names: Vec<_> = found.keys().collect();
        assert!(found == self.expected, "{what}: {names:?} is not what one run writes");
    }
}

/// Meets every fault at every call of `first`, then runs `again` without any, and `after`.
fn every_fault(bench: &Bench, template: Option<&Path>, first: &[&str], again: &[&str], after: &[&[&str]]) {
    let base = bench.temp.path();
    let out = base.join("out");
    let prepare = || {
        for entry in std::fs::read_dir(base).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("out") {
                std::fs::remove_dir_all(path).unwrap();
            }
        }
        if let Some(template) = template {
            copy(template, base);
        }
    };
    prepare();
    let calls = bench.calls(first, &out);
    assert!(calls > 20, "{first:?} made {calls} calls: is the library at work?");
    let mut failed = 0;
    for fault in ["kill", "torn", "EIO", "ENOSPC"] {
        for at in 1..=calls {
            let what = format!("{first:?}, {fault} at call {at} of {calls}");
            prepare();
            let output = bench.faulty(first, &out, fault, at);
            let said = String::from_utf8(output.stderr).unwrap();
            match output.status.code() {
                // Killed, or a fault that did not matter.
                None | Some(0) => assert_eq!(said, "", "{what}"),
                Some(2) => {
                    failed += 1;
                    assert!(
                        said.starts_with("shardmill: error: ") && said.lines().count() == 1,
                        "{what}: {said}"
                    );
                }
                Some(code) => panic!("{what}: exit code {code}: {said}"),
            }
            bench.nothing_opens_and_is_wrong(&what);
            let output = bench.command(again, &out).output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            // The last flushes come when all is in place.
            assert!(output.status.success() || said.contains("already"), "{what}: {said}");
            for arguments in after {
                let output = bench.command(arguments, &out).output().unwrap();
                assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
            }
            bench.is_whole(&out, &what);
            let left = std::fs::read_dir(base)
                .unwrap()
                .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with("out."));
            assert_eq!(left.count(), 0, "{what}: something is left");
        }
    }
    assert!(failed > calls / 2, "{first:?}: only {failed} faults were told of");
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to);
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

/// A file system that does not write past the page cache, or says so only when it is asked to, gets the same bytes.
#[test]
fn a_file_system_without_o_direct_gets_the_same_bytes() {
    let bench = Bench::new();
    for fault in ["no O_DIRECT", "no O_DIRECT writes"] {
        let out = bench.temp.path().join("out");
        let output = bench.faulty(&["convert"], &out, fault, 0);
        assert!(output.status.success(), "{fault}: {}", String::from_utf8_lossy(&output.stderr));
        bench.is_whole(&out, fault);
        let refused = std::fs::read_to_string(bench.temp.path().join("count")).unwrap();
        // One refusal is enough to know; memory file systems of old kernels refuse by themselves.
        assert!(matches!(&*refused, "0" | "1"), "{fault}: {refused} refusals");
        assert!(fault != "no O_DIRECT" || refused == "1", "{fault}: nothing was tried");
        std::fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn a_conversion_survives_every_fault_at_every_call() {
    every_fault(&Bench::new(), None, &["convert"], &["convert", "--resume"], &[]);
}

#[test]
fn a_resumed_conversion_survives_every_fault_at_every_call() {
    let bench = Bench::new();
    let out = bench.temp.path().join("out");
    let calls = bench.calls(&["convert"], &out);
    std::fs::remove_dir_all(&out).unwrap();
    bench.faulty(&["convert"], &out, "kill", calls * 2 / 3);
    let journal = out.with_extension("partial").join(JOURNAL);
    assert!(std::fs::read_to_string(&journal).unwrap().lines().count() > 3, "chunks are noted");
    let template = folder();
    std::fs::rename(out.with_extension("partial"), bench.temp.path().join("moved")).unwrap();
    copy(&bench.temp.path().join("moved"), &template.path().join("out.partial"));
    std::fs::remove_dir_all(bench.temp.path().join("moved")).unwrap();
    let resume = ["convert", "--resume"];
    every_fault(&bench, Some(template.path()), &resume, &resume, &[]);
}

#[test]
fn ranks_alone_survive_every_fault_at_every_call() {
    let first = ["convert", "--rank", "0", "--rank", "2"];
    let again = ["convert", "--rank", "0", "--rank", "2", "--resume"];
    every_fault(&Bench::new(), None, &first, &again, &[&["convert", "--rank", "1"], &["finish"]]);
}

#[test]
fn finishing_survives_every_fault_at_every_call() {
    let bench = Bench::new();
    let template = folder();
    let ranks = ["convert", "--rank", "0", "--rank", "1", "--rank", "2"];
    assert!(bench.command(&ranks, &template.path().join("out")).status().unwrap().success());
    every_fault(&bench, Some(template.path()), &["finish"], &["finish"], &[]);
}
