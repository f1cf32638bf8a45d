//! Faults that users of such files reported in public trackers, and the tests that hold this project against them.
//!
//! A test carries the numbers of its cases in its documentation, as `Cases: G1, G5.`; `cargo test -p tests --test cases --
//! --nocapture` prints which test has which.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use tests::workspace;

/// G: bytes of GGUF files; S: split files; T: types; M: models and their metadata; K: checkpoints, cuts and loading.
const CASES: &[(&str, &str)] = &[
    ("G1", "a dimension of 2^42 + 1 wraps a stride to 0"),
    ("G2", "a tensor count times an overhead overflows"),
    ("G3", "the sum of the tensors' sizes overflows"),
    ("G4", "token types declared as bytes and read as four bytes each"),
    ("G5", "more than four dimensions; a type id out of range"),
    ("G6", "an array, string, count or nested array of 2^60 and more hangs or fills the memory"),
    ("G8", "an alignment of 0, or below"),
    ("G9", "an alignment that is no u32"),
    ("G11", "a tensor or a key twice, also across parts"),
    ("G12", "a dimension of 0 divides by zero; legal, unless the model needs the tensor"),
    ("G14", "a token twice; add_bos without a bos"),
    (
        "G15",
        "token types of other widths, ids out of range, merges without separator, no context length, split.count a string",
    ),
    ("G16", "unknown element types, strings and offsets past the end"),
    ("G18", "allocations for counts in a file of less than 64 bytes"),
    ("G19", "dimensions larger than the file"),
    ("G20", "a truncated file is converted with exit code 0"),
    ("G21", "a tensor that ends behind the file"),
    ("G22", "a Git LFS pointer or an HTML page under the file's name"),
    ("G26", "a big-endian file"),
    ("G27", "version 1 is refused, 2 and 3 are read"),
    ("G28", "checks that make the reading of large vocabularies slow"),
    ("S29", "parts joined with cat, or cut with split"),
    ("S30", "one part of several converted as if it were all"),
    ("S31", "a first part without tensors"),
    ("S33b", "an output projection in another part taken for tied embeddings"),
    ("S34", "a missing part; all are to be named at once"),
    ("S35", "1760 parts"),
    ("T37", "MXFP4, type 39"),
    ("T38", "Q2_0, type 42"),
    ("T39", "type 36, which was removed and has blocks of 0 elements"),
    ("T40", "types of other programs"),
    ("T41", "NVFP4 with scales in tensors of their own"),
    ("M43", "no indexer tensors on layers that share a selection"),
    ("M44", "indexer tensors on all layers, used on some"),
    ("M45", "indexer metadata misread"),
    ("M47", "no expert_gating_func; an unknown one"),
    ("M49", "a bias of weights_proj that no model has"),
    ("M50", "a quantised router"),
    ("M51", "multi-token-prediction layers that are declared and partly or wholly absent"),
    ("K53", "a rank's share smaller than a block"),
    ("K54", "a width that the ranks do not divide"),
    ("K55", "rows of attn_k_b that are no multiple of 256"),
    ("K57", "every type comes back as it was saved"),
    ("K58", "a reload returns old bytes"),
    ("K59", "a flipped byte behind an intact header"),
];

/// Test functions by the cases in their documentation.
fn tagged() -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for folder in ["formats/src", "formats/tests", "converter/src", "converter/tests", "tests/tests"] {
        collect(&workspace().join(folder), &mut found);
    }
    found
}

fn collect(path: &Path, found: &mut BTreeMap<String, Vec<String>>) {
    if path.is_dir() {
        let entries = std::fs::read_dir(path).unwrap();
        return entries.for_each(|entry| collect(&entry.unwrap().path(), found));
    }
    if path.extension().is_none_or(|ext| ext != "rs") {
        return;
    }
    let text = std::fs::read_to_string(path).unwrap();
    let mut pending: Vec<String> = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if let Some(cases) = line.strip_prefix("/// Cases: ") {
            let numbers = cases.trim_end_matches('.').split(", ");
            pending.extend(numbers.map(str::to_owned));
        } else if line == "#[test]" {
            is_test = true;
        } else if let Some(rest) = line.strip_prefix("fn ") {
            assert!(pending.is_empty() || is_test, "{}: {rest} has cases and is no test", path.display());
            let name = rest.split('(').next().unwrap();
            let file = path.strip_prefix(workspace()).unwrap().display();
            for case in pending.drain(..) {
                found.entry(case).or_default().push(format!("{file}: {name}"));
            }
            is_test = false;
        }
    }
    assert!(pending.is_empty(), "{}: cases of no function", path.display());
}

#[test]
fn every_case_has_a_test() {
    let mut found = tagged();
    for (case, what) in CASES {
        let tests = found.remove(*case).unwrap_or_else(|| panic!("{case} ({what}) has no test"));
        println!("{case:<4} {what}\n       {}", tests.join("\n       "));
    }
    assert!(found.is_empty(), "cases that are not in the table: {found:?}");
}
