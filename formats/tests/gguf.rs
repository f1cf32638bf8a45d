//! The GGUF reader against files that are right, files that lie, and files that are damaged anywhere.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use formats::gguf::{GgufFile, GgufSet};
use formats::{Dtype, Error};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Writes GGUF bytes field by field, without any care for what is legal.
#[derive(Clone)]
struct Builder {
    version: u32,
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl Builder {
    fn new() -> Self {
        Self { version: 3, keys: Vec::new(), tensors: Vec::new(), data: Vec::new() }
    }

    fn key(mut self, key: &str, ty: u32, value: &[u8]) -> Self {
        self.keys.push([&string(key)[..], &ty.to_le_bytes(), value].concat());
        self
    }

    fn tensor(mut self, name: &str, ne: &[u64], ty: u32, offset: u64) -> Self {
        let dims: Vec<u8> = ne.iter().flat_map(|d| d.to_le_bytes()).collect();
        let entry = [
            &string(name)[..],
            &(ne.len() as u32).to_le_bytes(),
            &dims,
            &ty.to_le_bytes(),
            &offset.to_le_bytes(),
        ];
        self.tensors.push(entry.concat());
        self
    }

    fn data(mut self, bytes: usize) -> Self {
        self.data = (0..bytes).map(|i| i as u8).collect();
        self
    }

    fn build(&self) -> Vec<u8> {
        let counts =
            [(self.tensors.len() as u64).to_le_bytes(), (self.keys.len() as u64).to_le_bytes()].concat();
        let mut bytes =
            [&b"GGUF"[..], &self.version.to_le_bytes(), &counts, &self.keys.concat(), &self.tensors.concat()]
                .concat();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend_from_slice(&self.data);
        bytes
    }

    fn parse(&self) -> Result<GgufFile, Error> {
        GgufFile::parse(self.build().into())
    }

    fn error(&self) -> String {
        self.parse().expect_err("it must be refused").to_string()
    }
}

/// A file with every kind of value and two tensors.
fn good() -> Builder {
    let words: Vec<u8> = ["ab", "", "c d"].iter().flat_map(|w| string(w)).collect();
    let array = [&8u32.to_le_bytes()[..], &3u64.to_le_bytes(), &words].concat();
    let nested =
        [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &0u32.to_le_bytes(), &2u64.to_le_bytes(), &[1, 2]]
            .concat();
    let empty = [&5u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
    Builder::new()
        .key("general.architecture", 8, &string("glm-dsa"))
        .key("n", 4, &7u32.to_le_bytes())
        .key("i", 5, &(-7i32).to_le_bytes())
        .key("x", 6, &1.5f32.to_le_bytes())
        .key("b", 7, &[1])
        .key("words", 9, &array)
        .key("nested", 9, &nested)
        .key("empty", 9, &empty)
        .tensor("a", &[64, 2], 8, 0)
        .tensor("b", &[3], 0, 160)
        .data(160 + 12)
}

/// Cases: G27.
#[test]
fn a_good_file_reads_in_both_versions() {
    for version in [2, 3] {
        let file = Builder { version, ..good() }.parse().unwrap();
        let m = &file.metadata;
        assert_eq!((file.version, m.len(), file.tensors.len()), (version, 8, 2));
        assert_eq!(m.str("general.architecture").unwrap(), Some("glm-dsa"));
        assert_eq!(
            (m.u64("n").unwrap(), m.f32("x").unwrap(), m.bool("b").unwrap()),
            (Some(7), Some(1.5), Some(true))
        );
        assert!(m.u64("i").unwrap_err().to_string().contains("-7"), "a negative number counts nothing");
        assert!(m.u64("x").is_err() && m.u64("absent").unwrap().is_none());
        let words = m.array("words").unwrap().unwrap();
        assert_eq!(words.strings().unwrap().collect::<Vec<_>>(), [&b"ab"[..], b"", b"c d"]);
        assert!(m.array("empty").unwrap().unwrap().is_empty());
        let a = file.view(&file.tensors[0]).unwrap();
        assert_eq!((a.dtype(), a.shape().dims(), a.bytes().len()), (Dtype::Q8_0, &[2, 64][..], 136));
        let b = file.view(&file.tensors[1]).unwrap();
        assert_eq!(b.bytes()[..4], [160, 161, 162, 163]);
    }
}

#[test]
fn trailing_bytes_and_unknown_keys_are_fine() {
    let mut bytes = good().key("somebody.else", 10, &9u64.to_le_bytes()).build();
    bytes.extend_from_slice(&[0xff; 1000]);
    assert!(GgufFile::parse(bytes.into()).is_ok());
}

/// Cases: G1, G5, G6, G8, G9, G11, G16, G26, G27, T39, T40.
#[test]
fn lies_are_refused_by_name() {
    let big = |n: u64| n.to_le_bytes();
    let cases: [(&str, Builder, &[&str]); 28] = [
        ("version 1", Builder { version: 1, ..good() }, &["version 1"]),
        ("big-endian", Builder { version: 3u32.swap_bytes(), ..good() }, &["big-endian"]),
        ("big-endian 2", Builder { version: 2u32.swap_bytes(), ..good() }, &["big-endian"]),
        ("version 0", Builder { version: 0, ..good() }, &["version 0 is not known here"]),
        ("version 9", Builder { version: 9, ..good() }, &["version 9"]),
        ("duplicate key", good().key("n", 4, &8u32.to_le_bytes()), &["n:", "twice"]),
        ("line break in a key", good().key("a\nb", 4, &[0; 4]), &["metadata key", "'\\n'"]),
        ("endless key", good().key(&"k".repeat(65_536), 4, &[0; 4]), &["metadata key", "65536 bytes"]),
        ("line break in a name", good().tensor("t\r\n", &[1], 0, 192), &["name of tensor", "'\\r'"]),
        ("value type", good().key("odd", 13, &[0; 16]), &["odd", "13"]),
        ("string past the end", good().key("s", 8, &big(1 << 63)), &["s, from byte", "truncated"]),
        (
            "array past the end",
            good().key("a", 9, &[&6u32.to_le_bytes()[..], &big(1 << 63)].concat()),
            &["a, from byte", "truncated or damaged"],
        ),
        (
            "array element type",
            good().key("a", 9, &[&77u32.to_le_bytes()[..], &big(1)].concat()),
            &["a:", "77"],
        ),
        (
            "nested length",
            good().key(
                "a",
                9,
                &[&9u32.to_le_bytes()[..], &big(1), &4u32.to_le_bytes(), &big(1 << 62)].concat(),
            ),
            &["a, from byte", "truncated or damaged"],
        ),
        ("alignment 0", good().key("general.alignment", 4, &0u32.to_le_bytes()), &["general.alignment"]),
        ("alignment 12", good().key("general.alignment", 4, &12u32.to_le_bytes()), &["general.alignment"]),
        (
            "alignment -32",
            good().key("general.alignment", 5, &(-32i32).to_le_bytes()),
            &["general.alignment"],
        ),
        ("alignment u64", good().key("general.alignment", 10, &big(32)), &["general.alignment"]),
        ("duplicate tensor", good().tensor("a", &[1], 0, 192), &["tensor a"]),
        ("five dimensions", good().tensor("t", &[1, 1, 1, 1, 1], 0, 192), &["tensor t", "5"]),
        ("product", good().tensor("t", &[1 << 33, 1 << 33], 0, 192), &["tensor t"]),
        (
            "removed type",
            good().tensor("t", &[32], 36, 192).tensor("u", &[32], 4, 192).tensor("v", &[32], 36, 192),
            &["tensor t", "36", "removed", "2 such tensors in the file, and 1 of other"],
        ),
        ("foreign type", good().tensor("t", &[32], 139, 192), &["tensor t", "139", "ik_llama"]),
        ("foreign type", good().tensor("t", &[32], 105, 192), &["tensor t", "105"]),
        ("foreign type", good().tensor("t", &[32], 106, 192), &["tensor t", "106"]),
        ("partial block", good().tensor("t", &[33], 8, 192), &["tensor t", "33"]),
        ("misaligned", good().tensor("t", &[1], 0, 100), &["tensor t", "multiple"]),
        ("overlap", good().tensor("t", &[1], 0, 128), &["tensor", "overlap"]),
    ];
    for (what, builder, names) in cases {
        let message = builder.error();
        assert!(!message.contains('\n'), "{what}: {message}");
        for name in names {
            assert!(message.contains(name), "{what}: {message} should name {name}");
        }
    }
}

/// Cases: G19, G21.
#[test]
fn a_tensor_past_the_end_says_how_many_bytes_are_missing() {
    let message = good().tensor("t", &[100], 0, 192).error();
    assert!(message.contains("tensor t") && message.contains("420 more bytes"), "{message}");
    let overflow = good().tensor("t", &[1], 0, u64::MAX - 31).error();
    assert!(overflow.contains("tensor t"), "{overflow}");
}

/// A download that ended early: wherever it did, the line says so, and what was being read.
#[test]
fn a_truncated_header_says_that_it_is_truncated() {
    let whole = good().build();
    let header = good().parse().unwrap().data_start as usize;
    for len in 1..header {
        let Err(error) = GgufFile::parse(whole[..len].to_vec().into()) else {
            panic!("{len} bytes of {header} are no header")
        };
        let message = error.to_string();
        for said in ["truncated", &format!("the file ends at byte {len}"), "download it again"] {
            assert!(message.contains(said), "{len}: {message} should say {said}");
        }
    }
    let read = |len: usize| {
        let message = GgufFile::parse(whole[..len].to_vec().into()).unwrap_err().to_string();
        message.split(", from byte ").next().unwrap().to_owned()
    };
    let read: BTreeSet<String> = (1..header).map(read).collect();
    for what in
        ["magic", "version", "tensor count", "metadata key count", "words", "header's entry of tensor b"]
    {
        assert!(read.contains(what), "{read:?} should name {what}");
    }
}

/// Each fits 64 bits, and their sum does not.
///
/// Cases: G3.
#[test]
fn sizes_whose_sum_overflows_are_refused() {
    let half = 1u64 << 61;
    let file = Builder::new().tensor("a", &[half], 0, 0).tensor("b", &[half], 0, 1 << 63).data(64);
    let message = file.error();
    assert!(message.contains("tensor a") && message.contains("more bytes"), "{message}");
}

/// A count of 2^60 in every place that has one, and no more bytes than that place needs.
///
/// Cases: G18.
#[test]
fn tiny_files_ask_for_nothing() {
    let huge = (1u64 << 60).to_le_bytes();
    let head = |counts: [u64; 2]| {
        [&b"GGUF\x03\0\0\0"[..], &counts[0].to_le_bytes(), &counts[1].to_le_bytes()].concat()
    };
    let key = [&1u64.to_le_bytes()[..], b"k"].concat();
    let files = [
        head([1 << 60, 0]),
        head([0, 1 << 60]),
        [&head([0, 1])[..], &huge].concat(),
        [&head([0, 1])[..], &key, &8u32.to_le_bytes(), &huge].concat(),
        [&head([0, 1])[..], &key, &9u32.to_le_bytes(), &8u32.to_le_bytes(), &huge].concat(),
        [&head([0, 1])[..], &key, &9u32.to_le_bytes(), &9u32.to_le_bytes(), &huge].concat(),
        [&head([1, 0])[..], &huge].concat(),
        [&head([1, 0])[..], &key, &u32::MAX.to_le_bytes()].concat(),
    ];
    for file in files {
        assert!(file.len() < 64);
        let start = Instant::now();
        assert!(GgufFile::parse(file.clone().into()).is_err(), "{file:?}");
        assert!(start.elapsed() < Duration::from_millis(100), "{file:?}");
    }
}

/// GLM-5's 154 880 tokens, with as many merges.
///
/// Cases: G28.
#[test]
fn a_large_vocabulary_is_read_at_once() {
    const TOKENS: u64 = 154_880;
    let strings: Vec<u8> = (0..TOKENS).flat_map(|i| string(&format!("token {i}"))).collect();
    let array = [&8u32.to_le_bytes()[..], &TOKENS.to_le_bytes(), &strings].concat();
    let bytes = good().key("tokens", 9, &array).key("merges", 9, &array).build();
    let start = Instant::now();
    let file = GgufFile::parse(bytes.into()).unwrap();
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
    let tokens = file.metadata.array("tokens").unwrap().unwrap();
    assert_eq!(tokens.strings().unwrap().last(), Some(&b"token 154879"[..]));
}

/// Cases: G12.
#[test]
fn empty_tensors_and_scalars_are_legal() {
    let file = good().tensor("none", &[0, 5], 0, 0).tensor("scalar", &[], 0, 192).data(196).parse().unwrap();
    assert!(file.view(&file.tensors[2]).unwrap().bytes().is_empty());
    assert_eq!(file.tensors[3].shape.dims(), [1]);
}

/// Cases: G22.
#[test]
fn files_of_other_kinds_are_recognised() {
    let cases: [(&[u8], &str); 7] = [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"PK\x03\x04aaaaaaaa", "ZIP"),
        (b"\x10\0\0\0\0\0\0\0{\"a\":1}", "safetensors"),
        (b"tjgg\x03\0\0\0", "before GGUF"),
        (b"GGUX\x03\0\0\0", "GGUX"),
    ];
    for (bytes, name) in cases {
        let message = GgufFile::parse(bytes.to_vec().into()).unwrap_err().to_string();
        assert!(message.contains(name), "{message} should say {name}");
    }
}

/// Whatever single place of a file is damaged or cut off, the answer is a value or an error, never a panic or a hang.
#[test]
fn damage_anywhere_is_survived() {
    let bytes = good().build();
    for end in 0..bytes.len() {
        let _ = GgufFile::parse(bytes[..end].to_vec().into());
    }
    for at in 0..bytes.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] = value;
            if let Ok(file) = GgufFile::parse(damaged.into()) {
                for info in &file.tensors {
                    assert!(file.view(info).is_ok(), "a parsed tensor can be read");
                }
                for (_, value) in file.metadata.iter() {
                    let _ = value.to_string();
                    let _ = value.as_array().and_then(|a| a.values()).map(Iterator::count);
                }
            }
        }
        if at + 8 <= bytes.len() {
            for value in [u64::MAX, 1 << 63, 1 << 62, 1 << 32] {
                let mut damaged = bytes.clone();
                damaged[at..at + 8].copy_from_slice(&value.to_le_bytes());
                let _ = GgufFile::parse(damaged.into());
            }
        }
    }
}

fn part(number: u16, count: u16, total: i32, tensors: Builder) -> Vec<u8> {
    tensors
        .key("split.no", 2, &number.to_le_bytes())
        .key("split.count", 2, &count.to_le_bytes())
        .key("split.tensors.count", 5, &total.to_le_bytes())
        .build()
}

fn write(dir: &tempfile::TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Cases: S31.
#[test]
fn parts_open_from_any_of_them() {
    let dir = tempfile::tempdir().unwrap();
    // As llama-gguf-split --no-tensor-first-split writes it: the first part has keys alone.
    let first =
        write(&dir, "m-00001-of-00003.gguf", &part(0, 3, 2, Builder::new().key("n", 4, &7u32.to_le_bytes())));
    write(&dir, "m-00002-of-00003.gguf", &part(1, 3, 2, Builder::new().tensor("a", &[8], 0, 0).data(32)));
    let last =
        write(&dir, "m-00003-of-00003.gguf", &part(2, 3, 2, Builder::new().tensor("b", &[8], 0, 0).data(32)));
    for path in [&first, &last] {
        let set = GgufSet::open(path).unwrap();
        assert_eq!(set.parts().len(), 3);
        assert_eq!(set.metadata().u64("n").unwrap(), Some(7));
        assert_eq!(
            set.tensors().map(|(part, info)| (part, info.name.as_str())).collect::<Vec<_>>(),
            [(1, "a"), (2, "b")]
        );
        assert_eq!(set.view("b").unwrap().unwrap().bytes().len(), 32);
        assert!(set.view("c").unwrap().is_none());
    }
}

/// Cases: G11, G15, S29, S30, S34.
#[test]
fn faults_of_split_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let one = write(&dir, "m-00001-of-00004.gguf", &part(0, 4, 2, Builder::new()));
    write(&dir, "m-00003-of-00004.gguf", &part(2, 4, 2, Builder::new()));
    let message = GgufSet::open(&one).unwrap_err().to_string();
    assert!(
        message.contains("m-00002-of-00004.gguf, m-00004-of-00004.gguf"),
        "all missing parts at once: {message}"
    );

    let merged = write(&dir, "merged.gguf", &part(0, 2, 2, Builder::new()));
    let message = GgufSet::open(&merged).unwrap_err().to_string();
    assert!(message.contains("llama-gguf-split --merge"), "{message}");

    let a =
        write(&dir, "d-00001-of-00002.gguf", &part(0, 2, 2, Builder::new().tensor("a", &[8], 0, 0).data(32)));
    write(&dir, "d-00002-of-00002.gguf", &part(1, 2, 2, Builder::new().tensor("a", &[8], 0, 0).data(32)));
    let message = GgufSet::open(&a).unwrap_err().to_string();
    assert!(message.contains("tensor a") && message.contains("d-00002-of-00002.gguf"), "{message}");

    let a =
        write(&dir, "c-00001-of-00002.gguf", &part(0, 2, 3, Builder::new().tensor("a", &[8], 0, 0).data(32)));
    write(&dir, "c-00002-of-00002.gguf", &part(1, 2, 3, Builder::new().tensor("b", &[8], 0, 0).data(32)));
    assert!(GgufSet::open(&a).unwrap_err().to_string().contains("split.tensors.count"));

    let named = |name: &str| {
        let text = [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
        Builder::new().key("general.architecture", 8, &text)
    };
    let e = write(&dir, "e-00001-of-00002.gguf", &part(0, 2, 0, named("glm-dsa")));
    write(&dir, "e-00002-of-00002.gguf", &part(1, 2, 0, named("deepseek2")));
    let message = GgufSet::open(&e).unwrap_err().to_string();
    for word in ["e-00002-of-00002.gguf", "general.architecture", "deepseek2", "glm-dsa, as in"] {
        assert!(message.contains(word), "{message}");
    }
    write(&dir, "d-00002-of-00002.gguf", &part(0, 2, 2, Builder::new()));
    let a = dir.path().join("d-00001-of-00002.gguf");
    assert!(GgufSet::open(&a).unwrap_err().to_string().contains("split.no"));

    let text = Builder::new().key("split.no", 2, &[0, 0]).key("split.count", 8, &string("two"));
    let a = write(&dir, "s-00001-of-00002.gguf", &text.build());
    write(&dir, "s-00002-of-00002.gguf", &part(1, 2, 0, Builder::new()));
    let message = GgufSet::open(&a).unwrap_err().to_string();
    assert!(message.contains("split.count") && message.contains("two"), "{message}");

    let piece = write(&dir, "x.gguf.part1of2", &good().build()[..100]);
    assert!(GgufSet::open(&piece).unwrap_err().to_string().contains("cat"));
    assert!(GgufSet::open(dir.path()).unwrap_err().to_string().contains("directory"));
    assert!(GgufSet::open(&dir.path().join("none.gguf")).unwrap_err().to_string().contains("none.gguf"));
}
