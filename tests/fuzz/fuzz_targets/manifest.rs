//! Any bytes as `checkpoint.json` and as a rank's manifest, and manifests that differ from good ones in a few values: refused
//! with a message, or believed and then the same after another round through JSON, with ranges that lie in the file.
#![no_main]

use formats::bytes_of;
use formats::manifest::{Manifest, RankManifest};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

const SEEDS: [&[u8]; 2] =
    [include_bytes!("../seeds/manifest/rank.json"), include_bytes!("../seeds/manifest/checkpoint.json")];

fuzz_target!(|data: &[u8]| {
    read(data);
    // Few damaged bytes of JSON are still JSON, so the same data also says which values to replace by which.
    for seed in SEEDS {
        let mut manifest: Value = serde_json::from_slice(seed).expect("seeds are JSON");
        for edit in data.chunks_exact(2).take(4) {
            let mut leaves = Vec::new();
            collect(&mut manifest, &mut leaves);
            let leaf = usize::from(edit[0]) % leaves.len();
            replace(leaves[leaf], edit[1]);
        }
        read(&serde_json::to_vec(&manifest).expect("values become JSON"));
    }
});

fn read(data: &[u8]) {
    match Manifest::parse(data) {
        Ok(manifest) => {
            let again = serde_json::to_vec(&manifest).expect("manifests become JSON");
            assert_eq!(Manifest::parse(&again).expect("it was believed"), manifest);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match RankManifest::parse(data) {
        Ok(manifest) => {
            for entry in &manifest.tensors {
                let (start, end) = entry.bytes;
                let inside = manifest.data_start <= start && start <= end && end <= manifest.bytes;
                assert!(inside, "{}: {start}..{end}", entry.name);
                assert_eq!(bytes_of(entry.dtype, &entry.shape), Some(end - start), "{}", entry.name);
            }
            let last = manifest.chunks.len().checked_sub(1).map(|last| manifest.chunk(last).end);
            assert_eq!(last.unwrap_or(0), manifest.bytes);
            let again = serde_json::to_vec(&manifest).expect("manifests become JSON");
            assert_eq!(RankManifest::parse(&again).expect("it was believed"), manifest);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Everything in `value` that is neither an object nor an array.
fn collect<'a>(value: &'a mut Value, leaves: &mut Vec<&'a mut Value>) {
    match value {
        Value::Object(object) => object.values_mut().for_each(|value| collect(value, leaves)),
        Value::Array(array) => array.iter_mut().for_each(|value| collect(value, leaves)),
        leaf => leaves.push(leaf),
    }
}

fn replace(leaf: &mut Value, choice: u8) {
    *leaf = match choice {
        0..=31 => json!(choice),
        32..=95 => json!(1u64 << (choice - 32)),
        96..=159 => json!(u64::MAX >> (choice - 96)),
        160 => json!(-1),
        161 => json!(0.5),
        162 => json!(1e39),
        163 => json!(-1e-40),
        164 => Value::Null,
        165 => json!(true),
        166 => json!(""),
        167 => json!("../x"),
        168 => json!("a\nb"),
        169 => json!("replicated"),
        170 => json!("Q4_K"),
        171 => json!("Q8_K"),
        172 => json!([]),
        173 => json!({}),
        174 => json!([u64::MAX, u64::MAX]),
        // A little more or less, as one tensor's end is the next one's start.
        _ => json!(leaf.as_u64().unwrap_or(0).wrapping_add(u64::from(choice)).wrapping_sub(215)),
    };
}
