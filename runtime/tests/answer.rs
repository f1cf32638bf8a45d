//! From tokens to the text of an answer: whole characters, stop strings and reasoning together.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use runtime::dialect::Dialect;
use runtime::text::{Opening, Piece, Reading};
use runtime::tokenizer::Specials;
use serde_json::{Value, json};

/// The answer's pieces put together, and whether a stop string ended it.
fn read(dialect: &Dialect, ids: &[u32], stop: &[&str], opening: Opening) -> (Piece, bool) {
    let stop: Vec<String> = stop.iter().map(ToString::to_string).collect();
    let mut answer = dialect.answer(&Reading { stop, opening, tools: None });
    let mut whole = Piece::default();
    for &id in ids {
        let piece = answer.push(id);
        let text = format!("{}{}", piece.reasoning, piece.content);
        assert!(!text.contains('\u{FFFD}'), "half a character: {text:?}");
        whole.append(piece);
        if answer.stopped() {
            break;
        }
    }
    whole.append(answer.finish());
    (whole, answer.stopped())
}

/// The same text in the model's own tokens, and in the smallest: one for each character, or for each byte of it.
fn tokenizations(dialect: &Dialect, text: &str) -> [Vec<u32>; 2] {
    let encode = |text: &str| dialect.tokenizer().encode(text, Specials::Recognised).unwrap();
    let smallest: Vec<u32> = text.chars().flat_map(|character| encode(&character.to_string())).collect();
    assert_eq!(dialect.tokenizer().decode(&smallest), text);
    [encode(text), smallest]
}

#[test]
fn reasoning_content_and_stops_do_not_depend_on_the_tokens() {
    let dialect = common::dialect();
    for (text, stop, reasoning, content, stopped) in [
        ("7 😀 é</think>It is 日本 4.", &[][..], "7 😀 é", "It is 日本 4.", false),
        ("a</think>b STOP c", &["STOP"], "a", "b ", true),
        ("a STOP</think>b", &["STOP"], "a ", "", true),
        ("a</think>b</thin", &["</think>x"], "a", "b</thin", false),
        ("a</think>bc", &["</think>b"], "a", "", true),
        ("a 😀😀", &["😀😀"], "a ", "", true),
        ("a 😀😁", &["😀😀"], "a 😀😁", "", false),
        ("x </think", &[], "x </think", "", false),
    ] {
        for ids in tokenizations(&dialect, text) {
            let piece = Piece { reasoning: reasoning.into(), content: content.into(), calls: Vec::new() };
            assert_eq!(
                read(&dialect, &ids, stop, Opening::InReasoning),
                (piece, stopped),
                "{text:?} {ids:?}"
            );
        }
    }
}

#[test]
fn every_tokenizer_case_streams_to_its_text() {
    let dialect = common::dialect();
    let cases: Vec<Value> = common::oracle("tokenizer_cases.json");
    for case in cases {
        let ids: Vec<u32> = serde_json::from_value(case["ids_no_special"].clone()).unwrap();
        let (piece, _) = read(&dialect, &ids, &["no such text"], Opening::Plain);
        assert_eq!(piece.content, case["text"].as_str().unwrap());
    }
}

#[test]
fn half_a_character_at_the_end_is_replaced_and_one_cut_by_a_marker_too() {
    let dialect = common::dialect();
    let emoji = dialect.tokenizer().encode("😀", Specials::AsText).unwrap();
    let end = dialect.tokenizer().token_id("</think>").unwrap();
    let reading = Reading { opening: Opening::InReasoning, ..Reading::plain() };
    let mut answer = dialect.answer(&reading);
    assert!(emoji[..3].iter().all(|&id| answer.push(id).is_empty()));
    assert_eq!(
        answer.push(end),
        Piece { reasoning: "\u{FFFD}".into(), content: String::new(), calls: Vec::new() }
    );
    assert!(answer.push(emoji[0]).is_empty());
    assert_eq!(
        answer.finish(),
        Piece { reasoning: String::new(), content: "\u{FFFD}".into(), calls: Vec::new() }
    );
}

/// Some vocabularies have the markers as control tokens, which are otherwise not shown.
#[test]
fn markers_that_are_control_tokens_part_the_answer_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["chat_template.jinja", "generation_config.json"] {
        std::fs::copy(common::text_files().join(file), dir.path().join(file)).unwrap();
    }
    let json = std::fs::read(common::text_files().join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&json).unwrap();
    for token in json["added_tokens"].as_array_mut().unwrap() {
        token["special"] = json!(true);
    }
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let dialect = Dialect::open(dir.path()).unwrap();
    let ids =
        dialect.tokenizer().encode("<think>why</think>so<|user|><tool_call>", Specials::Recognised).unwrap();
    assert!(ids.iter().filter(|&&id| dialect.tokenizer().is_control(id)).count() == 4);
    let expected = Piece { reasoning: "why".into(), content: "so".into(), calls: Vec::new() };
    assert_eq!(read(&dialect, &ids, &[], Opening::MayReason).0, expected);
    assert_eq!(read(&dialect, &ids[1..], &[], Opening::InReasoning).0, expected);
    assert_eq!(read(&dialect, &ids, &[], Opening::Plain).0.content, "whyso");
}
