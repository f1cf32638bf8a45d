//! What vLLM's users may ask for beside an answer: the prompt's log-probabilities in a stream, token ids, a salt of the prefix
//! cache, an end to thinking.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "common/http.rs"]
mod http;

use http::{Script, TestServer};
use runtime::engine::{Event, FinishReason};
use runtime::logprobs::TokenLogprobs;
use serde_json::{Value, json};

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

fn scored(id: u32, logprob: f32) -> TokenLogprobs {
    TokenLogprobs { token: id, logprob, rank: 2, top: Vec::new() }
}

fn hello() -> Script {
    Script::Send(vec![Event::token(1399), Event::Finished(FinishReason::Length)])
}

#[test]
fn echoed_prompts_are_scored_in_streams_too() {
    let script = |scores: Vec<Event>| {
        let rest = [
            Event::Prompt { reused: 0 },
            Event::Token { id: 1399, logprobs: Some(scored(1399, -0.5)) },
            Event::Finished(FinishReason::Length),
        ];
        Script::Send(scores.into_iter().chain(rest).collect())
    };
    // The prompt's scores come in two parts, as those of a long prompt do, and none for a prompt of one token.
    let parts = vec![
        Event::PromptLogprobs(vec![scored(1513, -1.5)]),
        Event::PromptLogprobs(vec![scored(1399, -2.5)]),
    ];
    let server = TestServer::start([script(parts), script(Vec::new())]);
    let body =
        json!({"prompt": [1399, 1513, 1399], "echo": true, "logprobs": 0, "max_tokens": 1, "stream": true});
    let chunks = server.complete(&body).chunks();
    let choice = |at: usize| chunks[at]["choices"][0].clone();
    assert_eq!(choice(0)["text"], "Hello worldHello");
    assert_eq!(
        choice(0)["logprobs"],
        json!({"tokens": ["Hello", " world", "Hello"], "token_logprobs": [null, -1.5, -2.5],
            "top_logprobs": [null, {" world": -1.5}, {"Hello": -2.5}], "text_offset": [0, 5, 11]})
    );
    assert_eq!((&choice(1)["text"], &choice(1)["logprobs"]["text_offset"]), (&json!("Hello"), &json!([16])));
    assert_eq!((&choice(2)["finish_reason"], &choice(2)["logprobs"]), (&json!("length"), &Value::Null));
    let one = json!({"prompt": [1399], "echo": true, "logprobs": 0, "max_tokens": 1, "stream": true});
    let chunks = server.complete(&one).chunks();
    assert_eq!(chunks[0]["choices"][0]["logprobs"]["token_logprobs"], json!([null]));
    assert_eq!(chunks[1]["choices"][0]["logprobs"]["token_logprobs"], json!([-0.5]));
}

#[test]
fn ids_are_sent_beside_the_text_where_they_are_asked_for() {
    let script = || {
        let tokens = [1399, 1513].map(Event::token);
        Script::Send(tokens.into_iter().chain([Event::Finished(FinishReason::Stop(4083))]).collect())
    };
    let server = TestServer::start((0..5).map(|_| script()));
    let json = server.complete(&json!({"prompt": [5, 6], "return_token_ids": true})).json();
    let choice = &json["choices"][0];
    assert_eq!(
        (&choice["token_ids"], &choice["prompt_token_ids"]),
        (&json!([1399, 1513, 4083]), &json!([5, 6]))
    );
    let json = server.chat(&json!({"messages": user("x"), "return_token_ids": true})).json();
    let prompt = server.engine.last().prompt;
    assert_eq!(
        (&json["choices"][0]["token_ids"], &json["prompt_token_ids"]),
        (&json!([1399, 1513, 4083]), &json!(prompt))
    );
    for (path, body) in [
        ("/v1/completions", json!({"prompt": [5, 6]})),
        ("/v1/chat/completions", json!({"messages": user("x")})),
    ] {
        let mut body = body;
        body["return_token_ids"] = true.into();
        body["stream"] = true.into();
        let chunks = server.post(path, &body).chunks();
        let ids: Vec<&Value> =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array()).flatten().collect();
        assert_eq!(ids, [1399, 1513, 4083], "{path}");
        let prompts = chunks.iter().filter(|chunk| {
            !chunk["prompt_token_ids"].is_null() || !chunk["choices"][0]["prompt_token_ids"].is_null()
        });
        assert_eq!(prompts.count(), 1, "{path}: once");
    }
    let json = server.complete(&json!({"prompt": [5, 6]})).json();
    assert!(
        json["choices"][0].get("token_ids").is_none() && json["choices"][0].get("prompt_token_ids").is_none()
    );
}

#[test]
fn salts_and_budgets_reach_the_engine() {
    let server = TestServer::start((0..12).map(|_| hello()));
    server.engine.extend_context(1024);
    let salted = |path: &str, mut body: Value, salt: &str| {
        body["cache_salt"] = salt.into();
        assert_eq!(server.post(path, &body).status, 200);
        server.engine.last().cache_salt
    };
    let a = salted("/v1/completions", json!({"prompt": "x"}), "a");
    assert_eq!(salted("/v1/chat/completions", json!({"messages": user("x")}), "a"), a);
    assert_eq!(salted("/v1/responses", json!({"input": "x"}), "a"), a);
    assert_ne!(salted("/v1/completions", json!({"prompt": "x"}), "b"), a);
    server.complete(&json!({"prompt": "x"}));
    assert!(a.is_some() && server.engine.last().cache_salt.is_none());

    let end = common::dialect().think_tokens().1.unwrap();
    let kwargs = |on: bool| json!({"messages": user("x"), "chat_template_kwargs": {"enable_thinking": on}, "thinking_token_budget": 0});
    server.chat(&kwargs(true));
    assert_eq!(server.engine.last().thinking.unwrap().forced(), Some(end));
    server.chat(&kwargs(false));
    assert_eq!(server.engine.last().thinking, None, "there is no reasoning to bound");
    let unlimited = json!({"messages": user("x"), "thinking_token_budget": -1});
    server.chat(&unlimited);
    assert_eq!(server.engine.last().thinking, None);
    let anthropic =
        json!({"max_tokens": 9, "messages": user("x"), "thinking": {"type": "enabled", "budget_tokens": 3}});
    assert_eq!(server.post("/v1/messages", &anthropic).status, 200);
    let mut thinking = server.engine.last().thinking.unwrap();
    (0..3).for_each(|_| thinking.observe(5));
    assert_eq!(thinking.forced(), Some(end));
}

#[test]
fn whole_numbers_may_be_written_with_a_fraction_of_nothing() {
    let server = TestServer::start([hello()]);
    let body = json!({"prompt": [1399.0, 1513], "seed": 1.0, "top_k": 5.0, "max_tokens": 3.0, "stop_token_ids": [7.0], "n": 1.0});
    assert_eq!(server.complete(&body).status, 200);
    let request = server.engine.last();
    assert_eq!((request.prompt.as_slice(), request.max_tokens), (&[1399, 1513][..], 3));
    assert_eq!((request.sampling.seed, request.sampling.top_k), (Some(1), Some(5)));
    assert!(request.stop_token_ids.contains(&7));
    // Of 64 bits, none is lost.
    for (seed, bits) in [(json!(u64::MAX), u64::MAX), (json!(i64::MIN), i64::MIN.cast_unsigned())] {
        server.engine.add(hello());
        assert_eq!(server.complete(&json!({"prompt": "x", "seed": seed})).status, 200);
        assert_eq!(server.engine.last().sampling.seed, Some(bits));
    }
}

#[test]
fn what_could_never_wait_is_refused_and_not_put_off() {
    let most = 64;
    let server = TestServer::start((0..most).map(|_| hello()));
    server.engine.shorten_queue(most);
    for (body, param) in [
        (json!({"prompt": "x", "n": most + 1}), "n"),
        (json!({"prompt": vec!["x"; most + 1]}), "prompt"),
        (json!({"prompt": vec!["x"; most / 2 + 1], "n": 2}), "n"),
    ] {
        let error = server.complete(&body).error(400);
        assert_eq!((error["param"].as_str(), &error["code"]), (Some(param), &Value::Null), "{error}");
        assert!(error["message"].as_str().unwrap().contains("--max-queued-requests"), "{error}");
    }
    assert_eq!(server.engine.requests(), 0, "nothing was begun");
    // Nothing to generate takes no place.
    let nothing = server.complete(&json!({"prompt": vec!["x"; most + 1], "max_tokens": 0, "echo": true}));
    assert_eq!(nothing.status, 200);
    assert_eq!(
        server.complete(&json!({"prompt": "x", "n": most})).json()["choices"].as_array().unwrap().len(),
        most
    );
}
