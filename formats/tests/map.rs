//! Mapped files that become shorter.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::map::{MappedFile, end_on_fault};
use std::fs::OpenOptions;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;

const LINE: &str = "the file became shorter\n";
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
        assert_eq!(String::from_utf8_lossy(&output.stderr), LINE);
        assert_eq!(output.status.code(), Some(2), "{:?}", output.status);
    }
}

/// On many threads at once.
fn read_beyond_the_end(path: &Path) -> ! {
    const THREADS: usize = 8;
    end_on_fault(LINE).unwrap();
    let bytes = MappedFile::bytes(path).unwrap();
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
