//! Mapped files that become shorter.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::Error;
use formats::map::{FileWatch, MappedFile, end_on_fault};
use std::fs::OpenOptions;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;

const FILE: &str = "SHARDMILL_TEST_MAPPED_FILE";

/// This test runs itself again as the program that reads.
#[test]
fn a_file_that_becomes_shorter_ends_the_program_with_one_line() {
    if let Some(path) = std::env::var_os(FILE) {
        read_beyond_the_end(Path::new(&path));
    }
    let temp = tempfile::TempDir::new().unwrap();
    let path = temp.path().join("file");
    for _ in 0..20 {
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_file_that_becomes_shorter_ends_the_program_with_one_line"])
            .env(FILE, &path)
            .output()
            .unwrap();
        let line = format!(
            "program: error: {}: it became shorter while it was read, or its disk failed; do this\n",
            path.display()
        );
        assert_eq!(String::from_utf8_lossy(&output.stderr), line);
        assert_eq!(output.status.code(), Some(2), "{:?}", output.status);
    }
}

/// On many threads at once.
fn read_beyond_the_end(path: &Path) -> ! {
    const THREADS: usize = 8;
    end_on_fault("program", "do this").unwrap();
    // One before and one behind it, and one that was there and is gone.
    let others = [path.with_extension("before"), path.with_extension("behind")];
    others.iter().for_each(|other| std::fs::write(other, vec![2; 1 << 20]).unwrap());
    let _before = MappedFile::bytes(&others[0]).unwrap();
    drop(MappedFile::bytes(&others[1]).unwrap());
    let bytes = MappedFile::bytes(path).unwrap();
    let _behind = MappedFile::bytes(&others[1]).unwrap();
    OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
    let together = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (bytes, together) = (&bytes, &together);
            scope.spawn(move || {
                together.wait();
                bytes[thread << 16]
            });
        }
    });
    panic!("bytes beyond the end were read");
}

#[test]
fn a_watch_tells_writing_from_another_file_of_the_same_name() {
    let temp = tempfile::TempDir::new().unwrap();
    let path = temp.path().join("file");
    std::fs::write(&path, b"first").unwrap();
    let (_bytes, state) = MappedFile::bytes_and_state(&path).unwrap();
    let watch = FileWatch::open(&path, &state).unwrap();
    std::fs::write(temp.path().join("other"), b"other").unwrap();
    std::fs::rename(temp.path().join("other"), &path).unwrap();
    assert!(watch.is_unchanged(), "what took its name is another file");
    assert!(matches!(FileWatch::open(&path, &state), Err(Error::Changed { .. })));

    let (_bytes, state) = MappedFile::bytes_and_state(&path).unwrap();
    let watch = FileWatch::open(&path, &state).unwrap();
    assert!(watch.is_unchanged());
    // The clock of file systems may be as coarse as the system's ticks.
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&path, b"again").unwrap();
    assert!(!watch.is_unchanged(), "of the same length, but written to");
    std::fs::remove_file(&path).unwrap();
    assert!(!watch.is_unchanged());
}
