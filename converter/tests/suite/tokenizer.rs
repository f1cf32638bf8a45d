//! tokenizer.json as it is written, and what is said of metadata that cannot become one.

use crate::files::bundled;
use crate::made::{Gguf, Value};
use converter::side_files::side_files;
use formats::gguf::GgufSet;
use serde_json::{Value as Json, json};
use std::path::Path;
use tempfile::TempDir;

fn file(gguf: &Path, name: &str) -> Json {
    let files = side_files(&GgufSet::open(gguf).unwrap()).unwrap();
    serde_json::from_slice(&files.iter().find(|f| f.name == name).unwrap().bytes).unwrap()
}

fn changed(change: impl FnOnce(&mut Gguf)) -> Gguf {
    let mut gguf = Gguf::glm_dsa();
    change(&mut gguf);
    gguf
}

fn refused(gguf: &Gguf, names: &[&str]) {
    let temp = TempDir::new().unwrap();
    let set = GgufSet::open(&gguf.write(temp.path())).unwrap();
    let error = side_files(&set).unwrap_err().to_string();
    for name in names.iter().chain(&["made.gguf"]) {
        assert!(error.contains(name), "{error} should name {name}");
    }
}

fn strings(gguf: &Gguf, key: &str) -> Vec<String> {
    match gguf.value(key) {
        Some(Value::Strs(strings)) => strings.clone(),
        _ => panic!("{key} holds strings"),
    }
}

#[test]
fn the_bundled_vocabulary_keeps_its_ids_and_types() {
    let tokenizer = file(&bundled().gguf, "tokenizer.json");
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    assert_eq!((vocab.len(), added.len()), (4076, 20));
    assert_eq!(vocab["!"], 0);
    assert_eq!(tokenizer["model"]["merges"].as_array().unwrap().len(), 3820);
    assert_eq!(tokenizer["model"]["merges"][1], json!(["Ġ", "th"]));
    assert_eq!(tokenizer["model"]["ignore_merges"], true);
    let token = |content: &str| added.iter().find(|t| t["content"] == content).unwrap();
    assert_eq!((&token("<|user|>")["id"], &token("<|user|>")["special"]), (&4083.into(), &true.into()));
    assert_eq!((&token("<think>")["id"], &token("<think>")["special"]), (&4086.into(), &false.into()));
    let config = file(&bundled().gguf, "tokenizer_config.json");
    assert_eq!((&config["eos_token"], &config["model_max_length"]), (&"<|endoftext|>".into(), &4096.into()));
}

#[test]
fn bos_is_added_where_the_metadata_ask_for_it() {
    let temp = TempDir::new().unwrap();
    let plain = Gguf::glm_dsa().write(temp.path());
    assert_eq!(file(&plain, "tokenizer.json")["post_processor"], Json::Null);
    let adds = changed(|g| {
        g.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
        g.set("tokenizer.ggml.bos_token_id", Value::U32(261));
    });
    let post = file(&adds.write(temp.path()), "tokenizer.json")["post_processor"].clone();
    assert_eq!(post["single"][0], json!({"SpecialToken": {"id": "<|user|>", "type_id": 0}}));
    assert_eq!(post["single"][1], json!({"Sequence": {"id": "A", "type_id": 0}}));
    assert_eq!(post["special_tokens"]["<|user|>"]["ids"], json!([261]));
    refused(
        &changed(|g| g.set("tokenizer.ggml.add_bos_token", Value::Bool(true))),
        &["tokenizer.ggml.bos_token_id"],
    );
}

#[test]
fn ends_of_generation_are_named_or_known_by_their_text() {
    let temp = TempDir::new().unwrap();
    let eos = |gguf: &Gguf| file(&gguf.write(temp.path()), "generation_config.json")["eos_token_id"].clone();
    assert_eq!(eos(&Gguf::glm_dsa()), json!([260, 261]));
    let other = changed(|g| {
        g.set("tokenizer.ggml.eos_token_id", Value::U32(262));
        g.set("tokenizer.ggml.eot_token_id", Value::U32(259));
    });
    assert_eq!(eos(&other), json!([262, 259, 260, 261]));
}

#[test]
fn the_pre_tokenizer_is_known_by_name_or_refused_with_the_list() {
    let pre = |name: &str| changed(|g| g.set("tokenizer.ggml.pre", Value::Str(name.to_owned())));
    refused(
        &pre("deepseek-v3.1"),
        &["tokenizer.ggml.pre", "deepseek-v3.1", "deepseek-v3,", "glm4", "kimi-k2"],
    );
    refused(&changed(|g| g.unset("tokenizer.ggml.pre")), &["tokenizer.ggml.pre"]);
    let temp = TempDir::new().unwrap();
    for (name, steps, ignore_merges) in [
        ("glm4", 2, true),
        ("glm5", 2, true),
        ("chatglm-bpe", 2, false),
        ("deepseek-v3", 4, false),
        ("deepseek-llm", 7, false),
        ("kimi-k2", 2, false),
    ] {
        let tokenizer = file(&pre(name).write(temp.path()), "tokenizer.json");
        assert_eq!(tokenizer["pre_tokenizer"]["pretokenizers"].as_array().unwrap().len(), steps, "{name}");
        assert_eq!(tokenizer["model"]["ignore_merges"], ignore_merges, "{name}");
    }
    let gpt2 = file(&pre("gpt-2").write(temp.path()), "tokenizer.json");
    assert_eq!(gpt2["pre_tokenizer"]["use_regex"], true);
}

/// Cases: G4, G14, G15.
#[test]
fn faults_of_the_vocabulary_are_named() {
    let tokens = "tokenizer.ggml.tokens";
    let types = "tokenizer.ggml.token_type";
    let merges = "tokenizer.ggml.merges";
    let with = |key: &'static str, value: Value| changed(|g| g.set(key, value));
    refused(
        &with("tokenizer.ggml.model", Value::Str("llama".to_owned())),
        &["tokenizer.ggml.model", "llama", "gpt2"],
    );
    refused(&with(types, Value::U8s(vec![1; 263])), &[types, "U8"]);
    refused(&with(types, Value::I32s(vec![1; 262])), &[types, "263", "262"]);
    refused(&with(types, Value::I32s(vec![9; 263])), &[types, "9"]);
    refused(&with(merges, Value::Strs(vec!["he".to_owned()])), &[merges, "he"]);
    refused(&with(merges, Value::Strs(vec!["qq zz".to_owned()])), &[merges, "qq"]);
    refused(&with(merges, Value::I32s(vec![1])), &[merges, "strings"]);
    refused(
        &with("tokenizer.ggml.eos_token_id", Value::U32(263)),
        &["tokenizer.ggml.eos_token_id", "263", "262"],
    );
    refused(&with("tokenizer.ggml.mask_token_id", Value::U32(u32::MAX)), &["tokenizer.ggml.mask_token_id"]);
    let mut twice = strings(&Gguf::glm_dsa(), tokens);
    twice[259] = "he".to_owned();
    refused(&with(tokens, Value::Strs(twice)), &[tokens, "\"he\"", "256", "259"]);
    let mut no_byte = strings(&Gguf::glm_dsa(), tokens);
    no_byte[usize::from(b'A')] = "AAA".to_owned();
    refused(&with(tokens, Value::Strs(no_byte)), &[tokens, "0x41"]);
    let no_bos = with("tokenizer.ggml.add_bos_token", Value::Bool(true));
    refused(&no_bos, &["tokenizer.ggml.bos_token_id", "added to every text"]);
    // Types that other writers store in other widths.
    let values = strings(&Gguf::glm_dsa(), tokens).len();
    for value in [Value::U32s(vec![1; values]), Value::I64s(vec![1; values])] {
        let temp = TempDir::new().unwrap();
        file(&with(types, value).write(temp.path()), "tokenizer.json");
    }
    let scores = "tokenizer.ggml.scores";
    let temp = TempDir::new().unwrap();
    file(&with(scores, Value::I32s(vec![0; values])).write(temp.path()), "tokenizer.json");
    refused(&with(scores, Value::I32s(vec![0; values - 1])), &[scores, "one value for each of"]);
    refused(&with(scores, Value::Strs(vec!["0".to_owned(); values])), &[scores, "numbers"]);
    for key in [types, merges, "tokenizer.ggml.model"] {
        refused(&changed(|g| g.unset(key)), &[key, "no such key"]);
    }
}
