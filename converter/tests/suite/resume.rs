//! Interrupted conversions that go on, and ranks that are made apart.

use crate::faults::library;
use crate::files::{bundled, contents, control, convert, options, refused, shardmill};
use converter::plan::Plan;
use converter::side_files::side_files;
use converter::{Unfinished, execute};
use formats::checkpoint::Checkpoint;
use formats::gguf::GgufSet;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn converting(gguf: &Path, out: &Path, options: &[&str]) -> Command {
    let mut command = shardmill(&["convert".as_ref(), gguf.as_os_str(), out.as_os_str()]);
    command.args(options);
    command
}

fn done(command: &mut Command) -> Value {
    let output = command.arg("--json").output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A conversion of the bundled model to 20 ranks that a full disk ended at the 18th, after the first 16 chunks were noted;
/// its source and output.
fn stopped(temp: &TempDir) -> (PathBuf, PathBuf) {
    let (gguf, out) = (temp.path().join("model.gguf"), temp.path().join("out"));
    std::fs::copy(bundled().gguf, &gguf).unwrap();
    let partial = temp.path().join("out.partial");
    let mut command = converting(&gguf, &out, &["--ranks", "20", "--threads", "1"]);
    command
        .env("LD_PRELOAD", library())
        .env("FAULT_IN", partial.join("rank-17-of-20.safetensors"))
        .env("FAULT_DO", "ENOSPC")
        // The first call makes the file.
        .env("FAULT_AT", "2");
    let said = refused(&mut command, 2);
    for word in ["rank-17-of-20.safetensors: cannot write", "os error 28", "out.partial", "--resume"] {
        assert!(said.contains(word), "{said}");
    }
    assert_eq!(std::fs::read_to_string(partial.join("convert.journal")).unwrap().lines().count(), 1 + 17);
    (gguf, out)
}

#[test]
fn a_stopped_conversion_goes_on_with_what_is_proven() {
    let temp = TempDir::new().unwrap();
    let (gguf, out) = stopped(&temp);
    let partial = temp.path().join("out.partial");
    assert!(Checkpoint::open(&partial).is_err());
    let said = refused(&mut converting(&gguf, &out, &["--ranks", "20"]), 2);
    assert!(said.contains("out.partial") && said.contains("--resume"), "{said}");
    // A byte that changed, and a line that was torn.
    let damaged = partial.join("rank-3-of-20.safetensors");
    OpenOptions::new().write(true).open(&damaged).unwrap().write_all_at(b"x", 100_000).unwrap();
    let mut journal = OpenOptions::new().append(true).open(partial.join("convert.journal")).unwrap();
    journal.write_all(b"19 0 0123").unwrap();
    let summary = done(&mut converting(&gguf, &out, &["--ranks", "20", "--resume"]));
    let [kept, all] = ["kept_bytes", "rank_bytes"].map(|key| summary[key].as_u64().unwrap());
    assert!(kept > all / 20 * 15 && kept < all / 20 * 17, "{kept} of {all}");
    let whole = temp.path().join("whole");
    convert(&gguf, &whole, 20);
    assert!(contents(&out) == contents(&whole), "the two directories differ");
    assert!(!partial.exists());
}

#[test]
fn what_is_not_the_same_conversion_is_not_resumed() {
    let temp = TempDir::new().unwrap();
    let (gguf, out) = stopped(&temp);
    let before = contents(&temp.path().join("out.partial"));
    for (options, said) in [
        (&["--ranks", "8"][..], "--ranks 20"),
        (&["--ranks", "20", "--experts", "expert"], "--experts tensor"),
        (&["--ranks", "20", "--allow-unknown"], "other options"),
    ] {
        let error = refused(converting(&gguf, &out, options).arg("--resume"), 2);
        assert!(error.contains("another conversion") && error.contains(said), "{error}");
    }
    let lock = OpenOptions::new().append(true).open(temp.path().join("out.partial/convert.journal")).unwrap();
    lock.try_lock().unwrap();
    for options in [&["--ranks", "20"][..], &["--ranks", "20", "--resume"]] {
        let error = refused(&mut converting(&gguf, &out, options), 2);
        assert!(error.contains("another run is at work"), "{error}");
    }
    drop(lock);
    OpenOptions::new().write(true).open(&gguf).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    let error = refused(&mut converting(&gguf, &out, &["--ranks", "20", "--resume"]), 2);
    assert!(error.contains("written to since"), "{error}");
    assert!(contents(&temp.path().join("out.partial")) == before, "a refusal changes nothing");
    // What is written through a link goes elsewhere, and a pipe waits for its other end.
    for name in ["rank-5-of-20.safetensors", "convert.journal"] {
        let (path, away) = (temp.path().join("out.partial").join(name), temp.path().join("away"));
        std::fs::rename(&path, &away).unwrap();
        for make in [&["ln", "-s", "../away"][..], &["mkfifo"]] {
            assert!(Command::new(make[0]).args(&make[1..]).arg(&path).status().unwrap().success());
            let error = refused(&mut converting(&gguf, &out, &["--ranks", "20", "--resume"]), 2);
            assert!(error.contains(name) && error.contains("expected a regular file"), "{error}");
            std::fs::remove_file(&path).unwrap();
        }
        std::fs::rename(&away, &path).unwrap();
    }
    assert!(contents(&temp.path().join("out.partial")) == before, "a refusal changes nothing");
    let journal = temp.path().join("out.partial/convert.journal");
    OpenOptions::new().write(true).open(&journal).unwrap().set_len(1 << 40).unwrap();
    let error = refused(&mut converting(&gguf, &out, &["--ranks", "20", "--resume"]), 2);
    assert!(error.contains("out.partial") && error.contains("1099511627776"), "{error}");
    // A directory of someone else's.
    let theirs = temp.path().join("their.partial");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::write(theirs.join("letter"), "mine").unwrap();
    let error = refused(&mut converting(&gguf, &temp.path().join("their"), &["--resume"]), 2);
    assert!(error.contains("no journal"), "{error}");
    assert_eq!(std::fs::read(theirs.join("letter")).unwrap(), b"mine");
}

/// SIGKILL at 24 moments of a conversion, each run going on from the one before when it got far enough.
#[test]
fn killed_at_any_moment_it_goes_on_to_the_same_bytes() {
    let temp = TempDir::new().unwrap();
    let gguf = bundled().gguf;
    let whole = temp.path().join("whole");
    let start = Instant::now();
    done(&mut converting(&gguf, &whole, &["--ranks", "24"]));
    let whole_run = start.elapsed();
    let expected = contents(&whole);
    let out = temp.path().join("out");
    let mut killed = 0;
    let mut random = 1u64;
    for round in 0..24u32 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = whole_run.mul_f64((random >> 33) as f64 / (1u64 << 31) as f64);
        let mut child = converting(&gguf, &out, &["--ranks", "24", "--resume", "-q"]).spawn().unwrap();
        std::thread::sleep(moment);
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        let partial = temp.path().join("out.partial");
        // Killed after it had its name, it may still have its journal, which the next run takes away.
        let mut found = if out.exists() { contents(&out) } else { expected.clone() };
        let unsettled = found.remove("convert.journal").is_some();
        let differ = |(name, bytes): &(&String, &Vec<u8>)| found.get(*name) != Some(*bytes);
        let wrong: Vec<&String> = expected.iter().filter(differ).map(|(name, _)| name).collect();
        assert!(
            wrong.is_empty() && found.len() == expected.len(),
            "round {round}: {wrong:?} of {:?}",
            found.keys()
        );
        assert!(
            Checkpoint::open(&partial).is_err()
                || expected.iter().all(|(name, bytes)| {
                    std::fs::read(partial.join(name)).is_ok_and(|found| found == *bytes)
                })
        );
        // Every other time it goes on from wherever the one before was killed.
        if unsettled || round % 2 == 1 && !out.exists() {
            done(&mut converting(&gguf, &out, &["--ranks", "24", "--resume"]));
        }
        if out.exists() {
            assert!(contents(&out) == expected, "round {round}: the resumed one differs");
            std::fs::remove_dir_all(&out).unwrap();
        }
    }
    assert!(killed >= 8, "only {killed} runs were killed before they were done");
}

#[test]
fn ranks_made_apart_are_those_of_one_run() {
    let temp = TempDir::new().unwrap();
    let gguf = bundled().gguf;
    let [whole, one, other] = ["whole", "one", "other"].map(|name| temp.path().join(name));
    convert(&gguf, &whole, 5);
    done(&mut converting(&gguf, &one, &["--ranks", "5", "--rank", "3", "--rank", "0"]));
    done(&mut converting(&gguf, &other, &["--ranks", "5", "--rank", "1", "--rank", "2", "--rank", "4"]));
    let finishing = |out: &Path, ranks: &str| {
        let mut command = shardmill(&["finish".as_ref(), gguf.as_os_str(), out.as_os_str()]);
        // Without the line of a stage that was done before the fault.
        command.args(["--ranks", ranks, "--quiet"]);
        command
    };
    assert!(Checkpoint::open(&one).is_err());
    let said = refused(&mut finishing(&one, "5"), 2);
    assert!(said.contains("ranks 1-2,4 of 5"), "{said}");
    let said = refused(&mut converting(&gguf, &one, &["--ranks", "5", "--rank", "3"]), 2);
    assert!(said.contains("rank 3 is there already"), "{said}");
    let said = refused(&mut converting(&gguf, &one, &["--ranks", "4", "--rank", "1"]), 2);
    assert!(said.contains("another conversion") && said.contains("--ranks 5"), "{said}");
    let said = refused(&mut converting(&gguf, &one, &["--ranks", "5", "--rank", "5"]), 2);
    assert!(said.contains("0 to 4"), "{said}");
    for (name, bytes) in contents(&other) {
        std::fs::write(one.join(name), bytes).unwrap();
    }
    // Copied, and damaged on the way.
    let weights = one.join("rank-2-of-5.safetensors");
    let right = std::fs::read(&weights).unwrap();
    let mut wrong = right.clone();
    wrong[200_000] ^= 1;
    for bytes in [&wrong[..], &right[..right.len() - 1], &[&right[..], b"x"].concat()] {
        std::fs::write(&weights, bytes).unwrap();
        let said = refused(&mut finishing(&one, "5"), 2);
        assert!(said.contains("rank 2") && said.contains("--rank 2"), "{said}");
        assert!(Checkpoint::open(&one).is_err());
    }
    std::fs::write(&weights, right).unwrap();
    for name in ["rank-2-of-5.json", "rank-2-of-5.origin"] {
        let (path, away) = (one.join(name), temp.path().join("away"));
        std::fs::rename(&path, &away).unwrap();
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let said = refused(&mut finishing(&one, "5"), 2);
        assert!(said.contains(name) && said.contains("found 1099511627776"), "{said}");
        std::fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let said = refused(&mut finishing(&one, "5"), 2);
        assert!(said.contains(name) && said.contains("not a regular file"), "{said}");
        std::fs::rename(&away, &path).unwrap();
    }
    done(&mut finishing(&one, "5"));
    assert!(contents(&one) == contents(&whole), "the two directories differ");
    let said = refused(&mut converting(&gguf, &one, &["--ranks", "5", "--rank", "0", "--resume"]), 2);
    assert!(said.contains("already a directory"), "{said}");
}

/// A source that is written to while it is read would become a mixture of before and after, of right digests.
#[test]
fn a_source_that_changes_meanwhile_becomes_nothing() {
    let temp = TempDir::new().unwrap();
    let gguf = temp.path().join("model.gguf");
    let [out, apart] = ["out", "apart"].map(|name| temp.path().join(name));
    std::fs::copy(bundled().gguf, &gguf).unwrap();
    let right = std::fs::read(&gguf).unwrap();
    let renew = |bytes: &[u8]| {
        let other = temp.path().join("other");
        std::fs::write(&other, bytes).unwrap();
        std::fs::rename(&other, &gguf).unwrap();
    };
    let write_a_byte = || {
        let file = OpenOptions::new().write(true).open(&gguf).unwrap();
        file.write_all_at(&right[right.len() - 1..], right.len() as u64 - 1).unwrap();
    };
    let write_a_byte_and_hide_it = || {
        let before = std::fs::metadata(&gguf).unwrap().modified().unwrap();
        write_a_byte();
        OpenOptions::new().write(true).open(&gguf).unwrap().set_modified(before).unwrap();
    };
    done(&mut converting(&gguf, &apart, &["--ranks", "2", "--rank", "0"]));
    let there = contents(&apart);
    let changes: [&dyn Fn(); 3] = [&write_a_byte, &write_a_byte_and_hide_it, &|| renew(&right)];
    for change in changes {
        let set = GgufSet::open(&gguf).unwrap();
        let plan = Plan::new(&set, options(2)).unwrap();
        let files = side_files(&set).unwrap();
        change();
        let whole = execute::convert(&set, &plan, &files, &out, Unfinished::Refuse, &control());
        let rank = execute::convert_ranks(&set, &plan, &[1], &apart, Unfinished::Refuse, &control());
        for error in [whole.unwrap_err(), rank.unwrap_err()] {
            let said = error.to_string();
            assert!(said.contains("model.gguf: it was written to") && !said.contains('\n'), "{said}");
            assert_eq!(error.exit_code(), 2);
        }
        assert!(contents(&apart) == there, "{:?}", contents(&apart).keys());
        let left: Vec<_> = contents(temp.path()).into_keys().collect();
        assert_eq!(left, ["apart", "model.gguf"]);
    }
    done(&mut converting(&gguf, &apart, &["--ranks", "2", "--rank", "1"]));
    for change in changes {
        let set = GgufSet::open(&gguf).unwrap();
        let plan = Plan::new(&set, options(2)).unwrap();
        let files = side_files(&set).unwrap();
        change();
        let said = execute::finish(&set, &plan, &files, &apart, &control()).unwrap_err().to_string();
        assert!(said.contains("model.gguf: it was written to"), "{said}");
        assert!(Checkpoint::open(&apart).is_err());
    }
    done(shardmill(&["finish".as_ref(), gguf.as_os_str(), apart.as_os_str()]).args(["--ranks", "2"]));
    Checkpoint::open(&apart).unwrap();
}

/// What is mapped of it is gone then, which the system says by a signal that ends programs.
#[test]
fn a_source_that_becomes_shorter_is_one_line() {
    let temp = TempDir::new().unwrap();
    let (gguf, out) = (temp.path().join("model.gguf"), temp.path().join("out"));
    std::fs::copy(bundled().gguf, &gguf).unwrap();
    let partial = temp.path().join("out.ranks-3-of-20.partial");
    let mut command = converting(&gguf, &out, &["--ranks", "20", "--threads", "1", "--rank", "3"]);
    command
        .env("LD_PRELOAD", library())
        .env("FAULT_IN", partial.join("rank-3-of-20.safetensors"))
        .env("FAULT_DO", "shrink")
        .env("FAULT_FILE", &gguf)
        // The first call makes the file.
        .env("FAULT_AT", "2");
    let said = refused(&mut command, 2);
    assert!(said.contains("became shorter"), "{said}");
    assert!(Checkpoint::open(&partial).is_err() && !out.exists());
}

/// What was read of a source before and after somebody wrote to it is of two sources: nothing that was found of it holds.
#[test]
fn verify_and_extract_look_again_at_what_they_read() {
    let temp = TempDir::new().unwrap();
    let (gguf, dir, one) = (temp.path().join("model.gguf"), temp.path().join("dir"), temp.path().join("one"));
    std::fs::copy(bundled().gguf, &gguf).unwrap();
    done(&mut converting(&gguf, &dir, &["--ranks", "2"]));
    let rank_file = dir.join("rank-0-of-2.safetensors");
    let touching = |arguments: &[&OsStr], file: &Path, during: &Path| {
        let mut command = shardmill(arguments);
        command
            .env("LD_PRELOAD", library())
            .env("FAULT_IN", during)
            .env("FAULT_DO", "touch")
            .env("FAULT_FILE", file)
            .env("FAULT_AT", "2");
        command
    };
    let verify =
        [OsStr::new("verify"), dir.as_os_str(), "--source".as_ref(), gguf.as_os_str(), "-q".as_ref()];
    let said = refused(&mut touching(&verify, &gguf, &rank_file), 2);
    assert!(said.contains("model.gguf: it was written to"), "{said}");
    assert!(shardmill(&verify).output().unwrap().status.success());
    let failed = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!((output.status.code(), &*output.stderr), (Some(1), &b""[..]));
        String::from_utf8(output.stdout).unwrap()
    };
    let alone = [OsStr::new("verify"), dir.as_os_str(), "-q".as_ref()];
    let said = failed(&mut touching(&alone, &rank_file, &rank_file));
    assert!(said.contains("rank-0-of-2.safetensors: it was written to"), "{said}");
    let away = temp.path().join("away");
    std::fs::copy(&rank_file, &away).unwrap();
    // Once, though the file has several chunks.
    let said = failed(touching(&alone, &rank_file, &rank_file).env("FAULT_DO", "remove"));
    assert_eq!(said.matches("rank-0-of-2.safetensors: cannot open").count(), 1, "{said}");
    std::fs::rename(&away, &rank_file).unwrap();
    let partial = temp.path().join("one.partial");
    for (input, file) in [(&gguf, &gguf), (&dir, &rank_file)] {
        let name = OsStr::new("blk.1.ffn_down_exps.weight");
        let extract: [&OsStr; 6] = [
            "extract".as_ref(),
            input.as_os_str(),
            "--tensor".as_ref(),
            name,
            "--out".as_ref(),
            one.as_os_str(),
        ];
        let said = refused(&mut touching(&extract, file, &partial), 2);
        assert!(said.contains("it was written to") && said.contains(&*file.to_string_lossy()), "{said}");
        assert!(!one.exists() && !partial.exists());
    }
}

/// Of two runs that make the same rank the second to finish finds the first one's, and leaves it alone.
#[test]
fn a_rank_that_appears_meanwhile_is_kept() {
    let temp = TempDir::new().unwrap();
    let gguf = bundled().gguf;
    let [same, other] = ["same", "other"].map(|name| temp.path().join(name));
    done(&mut converting(&gguf, &same, &["--ranks", "2", "--rank", "0"]));
    done(&mut converting(&gguf, &other, &["--ranks", "2", "--rank", "0", "--experts", "expert"]));
    for (there, options, refusal) in [
        (&same, &[][..], Some("rank 0 is there already")),
        (&same, &["--resume"], None),
        (&other, &[], Some("is of another conversion")),
        (&other, &["--resume"], Some("is of another conversion")),
    ] {
        let folder = TempDir::new().unwrap();
        let out = folder.path().join("out");
        std::fs::create_dir(&out).unwrap();
        let adding = std::fs::File::open(&out).unwrap();
        adding.lock().unwrap();
        let mut command = converting(&gguf, &out, &["--ranks", "2", "--rank", "0", "--quiet"]);
        let mut child = command.args(options).stderr(Stdio::piped()).spawn().unwrap();
        // It has looked at what is there by then.
        while !folder.path().join("out.ranks-0-of-2.partial").exists() {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it began");
            std::thread::sleep(Duration::from_millis(1));
        }
        let expected = contents(there);
        for (name, bytes) in &expected {
            std::fs::write(out.join(name), bytes).unwrap();
        }
        drop(adding);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        match refusal {
            Some(refusal) => assert!(output.status.code() == Some(2) && said.contains(refusal), "{said}"),
            None => assert!(output.status.success(), "{said}"),
        }
        assert!(contents(&out) == expected, "{options:?} changed what was there");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
