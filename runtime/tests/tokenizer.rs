//! The tokenizer against HF's ids, and what it refuses.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use runtime::text::{Reading, TextStream};
use runtime::tokenizer::{Specials, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
    ids_no_special: Vec<u32>,
    decoded: String,
}

#[test]
fn ids_and_texts_are_those_of_hf() {
    let tokenizer = Tokenizer::open(&common::text_files()).unwrap();
    let cases: Vec<Case> = common::oracle("tokenizer_cases.json");
    assert_eq!(cases.len(), 67);
    for case in cases {
        assert_eq!(tokenizer.encode(&case.text, Specials::Recognised).unwrap(), case.ids, "{:?}", case.text);
        assert_eq!(
            tokenizer.encode(&case.text, Specials::AsText).unwrap(),
            case.ids_no_special,
            "{:?}",
            case.text
        );
        assert_eq!(tokenizer.decode(&case.ids), case.decoded);
        assert_eq!(tokenizer.decode(&case.ids_no_special), case.text);
        let mut stream = TextStream::default();
        let mut text: String = case.ids.iter().map(|&id| stream.push(tokenizer.token_bytes(id))).collect();
        text.push_str(&stream.finish());
        assert_eq!(text, case.decoded);
    }
}

#[test]
fn an_emoji_of_four_tokens_comes_whole_and_only_once_it_is() {
    let dialect = common::dialect();
    let ids = dialect.tokenizer().encode("a😊b", Specials::AsText).unwrap();
    assert!(ids.len() >= 6, "the small vocabulary has no emoji: {ids:?}");
    let mut answer = dialect.answer(&Reading::plain());
    let texts: Vec<String> = ids.iter().map(|&id| answer.push(id).content).collect();
    assert_eq!(texts.iter().filter(|text| !text.is_empty()).collect::<Vec<_>>(), ["a", "😊", "b"]);

    let mut cut = dialect.answer(&Reading::plain());
    let texts: String = ids[..ids.len() - 2].iter().map(|&id| cut.push(id).content).collect();
    assert_eq!((texts.as_str(), cut.finish().content.as_str()), ("a", "\u{FFFD}"));
}

#[test]
fn ids_outside_the_vocabulary_are_no_text() {
    let tokenizer = Tokenizer::open(&common::text_files()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 4096);
    assert_eq!(tokenizer.decode(&[4096, u32::MAX]), "");
}

/// A vocabulary of the 256 bytes, one merge and a few added tokens.
fn bytes_only() -> Value {
    let mut vocab = serde_json::Map::new();
    let mut other = 0x100;
    for byte in 0u8..=255 {
        let code = if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            u32::from(byte)
        } else {
            other += 1;
            other - 1
        };
        vocab.insert(char::from_u32(code).unwrap().to_string(), json!(byte));
    }
    vocab.insert("ab".into(), json!(256));
    let added = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": special})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [added(257, "<s>", true), added(258, "<s><s>", true), added(259, "<t>", false), added(260, "<｜é｜>", true)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
                  "vocab": vocab, "merges": ["a b"]},
    })
}

fn open(json: &str) -> Result<Tokenizer, String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    Tokenizer::open(dir.path()).map_err(|error| error.to_string())
}

#[test]
fn control_tokens_are_found_leftmost_and_longest() {
    let tokenizer = open(&bytes_only().to_string()).unwrap();
    let recognised = |text| tokenizer.encode(text, Specials::Recognised).unwrap();
    assert_eq!(recognised("ab<s>x"), [256, 257, 120]);
    assert_eq!(recognised("<s><s><s>"), [258, 257]);
    assert_eq!(recognised("<t><｜é｜>"), [259, 260]);
    assert_eq!(tokenizer.encode("<s><t>", Specials::AsText).unwrap(), [60, 115, 62, 259]);
    assert_eq!(tokenizer.decode(&[260, 256]), "<｜é｜>ab");
    assert!(tokenizer.is_control(257) && !tokenizer.is_control(259) && !tokenizer.is_control(97));
}

#[test]
fn a_raw_prompt_gets_the_files_own_beginning_once() {
    let tokenizer = open(&bytes_only().to_string()).unwrap();
    assert_eq!(tokenizer.encode_prompt("ab", usize::MAX).unwrap(), [257, 256]);
    assert_eq!(tokenizer.encode_prompt("<s>ab", usize::MAX).unwrap(), [257, 256]);
    assert_eq!(tokenizer.encode_prompt("", usize::MAX).unwrap(), [257]);
    assert_eq!(tokenizer.encode("ab", Specials::Recognised).unwrap(), [256]);
}

#[test]
fn faulty_files_are_refused_in_one_line_that_names_the_file() {
    let whole = bytes_only();
    let changed = |pointer: &str, value: Value| {
        let mut json = whole.clone();
        *json.pointer_mut(pointer).unwrap() = value;
        json.to_string()
    };
    let mut without_a = whole.clone();
    let vocab = without_a.pointer_mut("/model/vocab").unwrap().as_object_mut().unwrap();
    vocab.remove("z");
    vocab.remove("ab");
    without_a["model"]["merges"] = json!([]);
    for (json, expected) in [
        ("{".to_owned(), "not a tokenizer"),
        ("[]".to_owned(), "not a tokenizer"),
        (String::new(), "not a tokenizer"),
        (changed("/model/merges", json!(["a zz"])), "not a tokenizer"),
        (changed("/decoder", json!(null)), "decoder is not ByteLevel"),
        (changed("/added_tokens/0/lstrip", json!(true)), "added token 257 (\"<s>\"): lstrip"),
        (without_a.to_string(), "no token stands for byte 0x7a"),
    ] {
        let error = open(&json).err().unwrap_or_else(|| panic!("accepted: {expected}"));
        assert!(error.contains("tokenizer.json: ") && error.contains(expected), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let missing = Tokenizer::open(std::path::Path::new("/nowhere")).unwrap_err().to_string();
    assert!(missing.contains("/nowhere/tokenizer.json: ") && missing.contains("convert"), "{missing}");
}
