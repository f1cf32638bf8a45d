//! The HTTP interface on a real socket, before an engine that follows scripts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "common/http.rs"]
mod http;

use http::{Response, Script, TestServer};
use runtime::engine::{Event, FinishReason, Refusal};
use runtime::tokenizer::Specials;
use serde_json::{Value, json};
use std::io::Read;
use std::time::Duration;

/// The events of an answer with this text, ended by the model.
fn answer(text: &str) -> Vec<Event> {
    let ids = common::dialect().tokenizer().encode(text, Specials::Recognised).unwrap();
    let stop = Event::Finished(FinishReason::Stop(4083));
    ids.into_iter().map(Event::token).chain([stop]).collect()
}

fn says(text: &str) -> Script {
    Script::Send(answer(text))
}

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

fn texts(chunks: &[Value], field: &str) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str()).collect()
}

#[test]
fn it_says_that_it_is_loading_and_then_that_it_is_ready() {
    let server = TestServer::loading(|_| ());
    let health = server.get("/health");
    assert_eq!((health.status, health.json()), (503, json!({"status": "loading"})));
    for response in [
        server.get("/v1/models"),
        server.chat(&json!({"messages": user("x")})),
        server.complete(&json!({"prompt": "x"})),
    ] {
        assert_eq!(response.error(503)["code"], "loading");
        assert!(response.head.contains("retry-after: "), "{}", response.head);
    }
    assert_eq!(server.get("/version").status, 200);
    server.readiness.ready("tiny", server.engine.clone(), common::dialect());
    let health = server.get("/health");
    assert_eq!((health.status, health.json()), (200, json!({"status": "ok"})));
    let models = server.get("/v1/models").json();
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["max_model_len"], http::MAX_MODEL_LEN);
    assert_eq!(server.get("/version").json(), json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[test]
fn a_chat_answer_in_one_piece() {
    let server = TestServer::start([says("4 😊.")]);
    let response =
        server.chat(&json!({"model": "tiny", "messages": user("What is 2+2?"), "unknown_field": [1]}));
    let json = response.json();
    assert_eq!(response.status, 200, "{json}");
    assert_eq!(json["object"], "chat.completion");
    assert_eq!(json["model"], "tiny");
    assert!(
        json["id"].as_str().unwrap().starts_with("chatcmpl-")
            && json["created"].as_u64().unwrap() > 1_700_000_000
    );
    assert_eq!(
        json["choices"],
        json!([{"index": 0, "message": {"role": "assistant", "content": "4 😊."}, "logprobs": null, "finish_reason": "stop"}])
    );
    let request = server.engine.last();
    let (prompt, completion) = (request.prompt.len(), answer("4 😊.").len());
    assert_eq!(
        json["usage"],
        json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}})
    );
    // What the request did not say is what generation_config.json says.
    let text = common::dialect().tokenizer().decode(&request.prompt);
    assert_eq!(text, "[gMASK]<sop><|user|>\nWhat is 2+2?<|assistant|></think>");
    assert_eq!((request.sampling.temperature, request.sampling.top_p), (1.0, 0.95));
    assert_eq!((request.sampling.top_k, request.sampling.min_p, request.sampling.seed), (None, 0.0, None));
    assert_eq!(request.stop_token_ids, [4076, 4083, 4085]);
    assert_eq!(request.max_tokens, http::MAX_MODEL_LEN - prompt);
}

#[test]
fn a_streamed_chat_answer() {
    let server = TestServer::start([says("4 😊."), says("ab")]);
    let chunks = server
        .chat(&json!({"messages": user("x"), "stream": true, "stream_options": {"include_usage": true}}))
        .chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        for field in ["id", "model", "created"] {
            assert_eq!(chunk[field], chunks[0][field]);
        }
    }
    assert!(chunks[0]["id"].as_str().unwrap().len() > 20 && chunks[0]["model"] == "tiny");
    assert_eq!(texts(&chunks, "content"), "4 😊.");
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], answer("4 😊.").len());
    assert!(before.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
    let (end, before) = before.split_last().unwrap();
    assert_eq!(end["choices"], json!([{"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"}]));
    assert!(before.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));

    let chunks = server.chat(&json!({"messages": user("x"), "stream": true})).chunks();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none() && chunk["choices"][0]["index"] == 0));
}

#[test]
fn reasoning_has_its_own_field() {
    let thinking = json!({"enable_thinking": true});
    let script = "I know: é.</think>It is 4.";
    let server =
        TestServer::start([says(script), says(script), says("never closed"), says(script), says(script)]);
    let whole = json!({"messages": user("x"), "chat_template_kwargs": thinking});
    let message = server.chat(&whole).json()["choices"][0]["message"].clone();
    assert_eq!(
        message,
        json!({"role": "assistant", "reasoning_content": "I know: é.", "content": "It is 4."})
    );
    assert_eq!(server.engine.last().prompt.last(), Some(&4086), "the prompt opens the reasoning");

    let mut streamed = whole.clone();
    streamed["stream"] = json!(true);
    let chunks = server.chat(&streamed).chunks();
    assert_eq!(
        (texts(&chunks, "reasoning_content"), texts(&chunks, "content")),
        ("I know: é.".into(), "It is 4.".into())
    );
    let message = server.chat(&whole).json()["choices"][0]["message"].clone();
    assert_eq!(message, json!({"role": "assistant", "reasoning_content": "never closed", "content": ""}));

    // Without thinking the prompt has closed it, and text is text.
    let message = server.chat(&json!({"messages": user("x")})).json()["choices"][0]["message"].clone();
    assert_eq!(message, json!({"role": "assistant", "content": script}));
    let message = server.chat(&json!({"messages": user("x"), "reasoning_effort": "high"})).json();
    assert_eq!(message["choices"][0]["message"]["reasoning_content"], "I know: é.");
}

#[test]
fn completions_take_text_or_ids() {
    let server = TestServer::start((0..8).map(|_| says("<think>x</think> y")));
    let prompts = [
        (json!("<|user|>Hello world"), vec![4083, 1399, 1513]),
        (json!([4083, 1399]), vec![4083, 1399]),
        (json!(["Hello world"]), vec![1399, 1513]),
        (json!([[5, 6]]), vec![5, 6]),
    ];
    for (prompt, ids) in prompts {
        let json = server.complete(&json!({"prompt": prompt})).json();
        assert_eq!(server.engine.last().prompt, ids);
        assert_eq!(server.engine.last().max_tokens, 16);
        assert_eq!(json["object"], "text_completion");
        assert!(json["id"].as_str().unwrap().starts_with("cmpl-"));
        assert_eq!(
            json["choices"],
            json!([{"index": 0, "text": "<think>x</think> y", "logprobs": null, "finish_reason": "stop"}])
        );
        assert_eq!(json["usage"]["prompt_tokens"], ids.len());
    }
    let streamed =
        server.complete(&json!({"prompt": "a", "stream": true, "stream_options": {"include_usage": true}}));
    let chunks = streamed.chunks();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "<think>x</think> y");
    assert_eq!(chunks.last().unwrap()["choices"], json!([]));
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "stop");

    let before = server.engine.requests();
    let nothing = server.complete(&json!({"prompt": "Hello world", "max_tokens": 0})).json();
    assert_eq!(
        nothing["choices"][0],
        json!({"index": 0, "text": "", "logprobs": null, "finish_reason": "length"})
    );
    assert_eq!(
        (&nothing["usage"]["prompt_tokens"], &nothing["usage"]["completion_tokens"]),
        (&json!(2), &json!(0))
    );
    assert_eq!(server.engine.requests(), before, "nothing to generate");
}

#[test]
fn a_field_of_a_wrong_type_or_out_of_range_is_named() {
    let server = TestServer::start([]);
    for (field, values) in [
        ("temperature", vec![json!(-0.1), json!(2.5), json!("1"), json!([1]), json!(true)]),
        ("top_p", vec![json!(0), json!(1.1), json!(-1), json!("x")]),
        ("top_k", vec![json!(-2), json!(1.5), json!("5")]),
        ("min_p", vec![json!(-0.1), json!(1.5)]),
        ("seed", vec![json!(1.5), json!("a"), json!(1e30)]),
        (
            "stop",
            vec![
                json!(5),
                json!([5]),
                json!(""),
                json!(["a", ""]),
                json!({}),
                json!(vec!["a"; 65]),
                json!("x".repeat(5000)),
            ],
        ),
        (
            "stop_token_ids",
            vec![json!(5), json!(["a"]), json!([-1]), json!([4294967296u64]), json!(vec![1; 1025])],
        ),
        ("max_tokens", vec![json!(-1), json!(1.5), json!("9"), json!(9e99)]),
        ("stream", vec![json!("true"), json!(1)]),
        ("stream_options", vec![json!(1), json!({"include_usage": true})]),
        ("ignore_eos", vec![json!(1)]),
        ("model", vec![json!(1)]),
        ("user", vec![json!(1)]),
        ("n", vec![json!(129), json!(0), json!("1")]),
        ("best_of", vec![json!(2)]),
        ("logprobs", vec![json!("1"), json!([])]),
        ("top_logprobs", vec![json!(5), json!(true), json!(-1)]),
        ("prompt_logprobs", vec![json!(21), json!(-1), json!(true)]),
        ("echo", vec![json!("x")]),
        ("suffix", vec![json!("x")]),
        ("logit_bias", vec![json!({"x": 1}), json!(5), json!({"4096": 1}), json!({"-1": 1})]),
        ("presence_penalty", vec![json!(2.5), json!("0")]),
        ("frequency_penalty", vec![json!(-2.5)]),
        ("repetition_penalty", vec![json!(-1), json!(0)]),
        ("min_tokens", vec![json!(-1), json!("1")]),
        ("response_format", vec![json!("text"), json!([])]),
        ("guided_json", vec![json!(5), json!("{")]),
        ("guided_regex", vec![json!(5), json!("(")]),
        ("guided_choice", vec![json!([]), json!([""]), json!("a")]),
        ("skip_special_tokens", vec![json!(false)]),
    ] {
        for value in values {
            for (path, mut body) in [
                ("/v1/chat/completions", json!({"messages": user("x")})),
                ("/v1/completions", json!({"prompt": "x"})),
            ] {
                body[field] = value.clone();
                let response = server.post(path, &body);
                let error = response.error(400);
                assert_eq!(error["param"], field, "{value} {error}");
                assert!(error["message"].as_str().unwrap().starts_with(&format!("{field}: ")), "{error}");
                assert_eq!(error["type"], "invalid_request_error");
            }
        }
    }
    for (field, path, value) in [
        ("max_tokens", "max_tokens", json!(0)),
        ("max_completion_tokens", "max_completion_tokens", json!(0)),
        ("messages", "messages", json!(null)),
        ("messages", "messages", json!([])),
        ("messages", "messages", json!("x")),
        ("messages", "messages[0]", json!(["x"])),
        ("messages", "messages[0].role", json!([{"content": "x"}])),
        ("messages", "messages[0].role", json!([{"role": "function", "content": "x"}])),
        ("messages", "messages[0].content", json!([{"role": "user", "content": 5}])),
        (
            "messages",
            "messages[0].content[1].type",
            json!([{"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}]),
        ),
        ("messages", "messages[0].content[0].text", json!([{"role": "user", "content": [{"type": "text"}]}])),
        (
            "messages",
            "messages[0].tool_calls[0].function",
            json!([{"role": "assistant", "tool_calls": [{}]}]),
        ),
        (
            "messages",
            "messages[0].tool_calls[0].function.name",
            json!([{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        ),
        (
            "messages",
            "messages[0].tool_calls[0].function.arguments",
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
        ),
        (
            "messages",
            "messages[0].tool_calls[0].function.arguments",
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]),
        ),
        ("tools", "tools", json!({})),
        ("tools", "tools[0].type", json!([{"type": "web_search"}])),
        ("tools", "tools[0].function.name", json!([{"type": "function", "function": {}}])),
        ("tool_choice", "tool_choice", json!("required")),
        ("tool_choice", "tool_choice", json!("sometimes")),
        ("tool_choice", "tool_choice", json!({"type": "function"})),
        ("parallel_tool_calls", "parallel_tool_calls", json!("no")),
        ("echo", "echo", json!(true)),
        ("logprobs", "logprobs", json!(1)),
        ("logit_bias", "logit_bias.5", json!({"5": 101})),
        ("response_format", "response_format.type", json!({})),
        ("response_format", "response_format.type", json!({"type": "xml"})),
        ("response_format", "response_format.json_schema", json!({"type": "json_schema"})),
        (
            "response_format",
            "response_format.json_schema.schema",
            json!({"type": "json_schema", "json_schema": {"name": "x"}}),
        ),
        (
            "response_format",
            "response_format",
            json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}),
        ),
        ("structured_outputs", "structured_outputs.regex", json!({"regex": 5})),
        ("chat_template_kwargs", "chat_template_kwargs", json!("x")),
        ("chat_template_kwargs", "chat_template_kwargs.enable_thinking", json!({"enable_thinking": "yes"})),
        ("chat_template_kwargs", "chat_template_kwargs.messages", json!({"messages": []})),
        ("reasoning_effort", "reasoning_effort", json!(3)),
    ] {
        let mut body = json!({"messages": user("x")});
        body[field] = value;
        assert_eq!(server.chat(&body).error(400)["param"], path, "{body}");
    }
    for prompt in [
        json!(null),
        json!(5),
        json!([]),
        json!(""),
        json!(["a", ""]),
        json!([[1], []]),
        json!(["a", 1]),
        json!([[1], ["a"]]),
        json!([1, "a"]),
        json!([-1]),
        json!({}),
    ] {
        assert_eq!(server.complete(&json!({"prompt": prompt})).error(400)["param"], "prompt", "{prompt}");
    }
    assert_eq!(server.engine.requests(), 0);
}

#[test]
fn neutral_values_and_nulls_are_taken() {
    let server = TestServer::start((0..2).map(|_| says("ok")));
    let neutral = json!({
        "messages": user("x"), "n": 1, "logprobs": false, "top_logprobs": 0, "echo": false, "logit_bias": {}, "suffix": null,
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "best_of": 1, "response_format": {"type": "text"},
        "parallel_tool_calls": true, "tool_choice": "auto", "tools": [], "stop": null, "seed": null, "user": "someone", "min_tokens": 0,
        "stream_options": null, "max_tokens": null, "stream": false, "metadata": {"a": "b"}, "store": false,
    });
    assert_eq!(server.chat(&neutral).status, 200);
    let body = json!({
        "messages": user("x"), "temperature": 0, "top_p": 0.5, "top_k": 40, "min_p": 0.25, "seed": -1, "stop": ["a", "b"],
        "stop_token_ids": [7], "max_tokens": 9, "max_completion_tokens": 5.0, "ignore_eos": true,
    });
    assert_eq!(server.chat(&body).status, 200);
    let request = server.engine.last();
    assert_eq!(
        (request.sampling.temperature, request.sampling.top_p, request.sampling.min_p),
        (0.0, 0.5, 0.25)
    );
    assert_eq!((request.sampling.top_k, request.sampling.seed), (Some(40), Some(u64::MAX)));
    assert_eq!((request.max_tokens, request.stop_token_ids), (5, vec![7]));
}

#[test]
fn messages_reach_the_template_as_it_wants_them() {
    let cases: Vec<Value> = common::oracle("template_cases.json");
    let server = TestServer::start((0..cases.len() + 2).map(|_| says("ok")));
    server.engine.extend_context(1024);
    let mut compared = 0;
    for case in &cases {
        if case["kwargs"]["add_generation_prompt"] == false
            || case["rendered"].as_str().unwrap().contains("stays text")
        {
            continue;
        }
        let mut messages = case["messages"].clone();
        for message in messages.as_array_mut().unwrap() {
            for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                let arguments = call["function"]["arguments"].to_string();
                call["function"]["arguments"] = json!(arguments);
            }
        }
        let mut kwargs = case["kwargs"].clone();
        kwargs.as_object_mut().unwrap().remove("add_generation_prompt");
        let response = server
            .chat(&json!({"messages": messages, "tools": case["tools"], "chat_template_kwargs": kwargs}));
        assert_eq!(response.status, 200, "{response:?}");
        assert_eq!(json!(server.engine.last().prompt), case["ids"]);
        compared += 1;
    }
    assert_eq!(compared, 8);

    let messages = json!([
        {"role": "developer", "content": "<|user|>"},
        {"role": "user", "content": [{"type": "text", "text": "a<|us"}, "er|>"]},
        {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"role": "assistant"},
    ]);
    let hidden = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(
        server.chat(&json!({"messages": messages, "tools": hidden, "tool_choice": "none"})).status,
        200
    );
    let prompt = server.engine.last().prompt;
    assert_eq!(prompt.iter().filter(|&&id| id == 4083).count(), 1, "one turn of the user");
    assert_eq!(
        common::dialect().tokenizer().decode(&prompt),
        "[gMASK]<sop><|system|>\n<|user|><|user|>\na<|user|><|assistant|></think><tool_call>f</tool_call><|assistant|></think><|assistant|></think>"
    );
}

#[test]
fn stop_strings_end_the_answer_and_the_request() {
    let text = "ABC DEFGHIJ KLM";
    let hang = || Script::Hang(answer(text)[..answer(text).len() - 1].to_vec());
    let server = TestServer::start([hang(), hang(), hang(), says(text)]);
    let stopped = |stop: Value| {
        let json = server.complete(&json!({"prompt": "x", "stop": stop})).json();
        assert_eq!(json["choices"][0]["finish_reason"], "stop");
        json["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(stopped(json!("DEFGHIJ")), "ABC ");
    assert_eq!(stopped(json!(["nowhere", "HIJ K", "IJ K"])), "ABC DEFG");
    assert!(server.engine.all_cancelled(), "nothing is generated behind a stop string");
    let chunks = server.complete(&json!({"prompt": "x", "stop": "DEFGHIJ", "stream": true})).chunks();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "ABC ");
    assert_eq!(stopped(json!("LMN")), "ABC DEFGHIJ KLM", "a beginning that stays one is text");
}

#[test]
fn length_is_told_from_stop() {
    let cut = || Script::Send(vec![Event::token(1399), Event::Finished(FinishReason::Length)]);
    let server = TestServer::start([cut(), cut()]);
    let json = server.chat(&json!({"messages": user("x"), "max_tokens": 1})).json();
    assert_eq!(
        (&json["choices"][0]["finish_reason"], &json["usage"]["completion_tokens"]),
        (&json!("length"), &json!(1))
    );
    assert_eq!(server.engine.last().max_tokens, 1);
    let chunks = server.chat(&json!({"messages": user("x"), "max_tokens": 1, "stream": true})).chunks();
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[test]
fn control_tokens_are_not_part_of_the_text() {
    let tokens = [1399, 4083, 4076, 1513].map(Event::token);
    let end = Event::Finished(FinishReason::Length);
    let server = TestServer::start([Script::Send(tokens.into_iter().chain([end]).collect())]);
    let json = server.complete(&json!({"prompt": "x", "ignore_eos": true, "max_tokens": 4})).json();
    assert_eq!(json["choices"][0]["text"], "Hello world");
    assert_eq!(json["usage"]["completion_tokens"], 4);
    assert_eq!(server.engine.last().stop_token_ids, Vec::<u32>::new());
}

#[test]
fn what_the_engine_refuses_has_its_status() {
    let server = TestServer::start([
        Script::Refuse(Refusal::QueueFull { waiting: 9 }),
        Script::Refuse(Refusal::Vocabulary { id: 5000, vocab_size: 4096 }),
        Script::Refuse(Refusal::Stopped { cause: "GPU 3 fell off the bus".into() }),
    ]);
    let ids = |count: usize| json!({"prompt": vec![5; count], "stream": true});
    let response = server.complete(&ids(1));
    assert_eq!(
        (&response.error(429)["type"], response.head.contains("retry-after: 1")),
        (&json!("rate_limit_error"), true)
    );
    assert_eq!(server.complete(&ids(1)).error(400)["param"], "prompt");
    assert!(server.complete(&ids(1)).error(503)["message"].as_str().unwrap().contains("GPU 3"));

    for (body, both) in [
        (ids(64), ["64", "64"]),
        (ids(70), ["70", "64"]),
        (json!({"prompt": vec![5; 70], "max_tokens": 0}), ["70", "64"]),
        (json!({"prompt": vec![5; 60], "max_tokens": 5}), ["60", "64"]),
    ] {
        let error = server.complete(&body).error(400);
        assert_eq!(error["code"], "context_length_exceeded", "{error}");
        assert!(both.iter().all(|number| error["message"].as_str().unwrap().contains(number)), "{error}");
    }
    let error = server.chat(&json!({"messages": user(&"word ".repeat(100))})).error(400);
    assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("messages")));
}

#[test]
fn a_failure_on_the_way_is_an_event_with_an_error() {
    let failing = || Script::Send(vec![Event::token(1399), Event::Failed("rank 2 has failed".into())]);
    let server = TestServer::start([failing(), failing(), Script::Send(vec![Event::token(1399)])]);
    let chunks = server.chat(&json!({"messages": user("x"), "stream": true})).chunks();
    assert_eq!(texts(&chunks, "content"), "Hello");
    assert_eq!(chunks.last().unwrap()["error"]["message"], "rank 2 has failed");
    let error = server.chat(&json!({"messages": user("x")})).error(500);
    assert_eq!((&error["message"], &error["type"]), (&json!("rank 2 has failed"), &json!("server_error")));
    let chunks = server.chat(&json!({"messages": user("x"), "stream": true})).chunks();
    assert_eq!(chunks.last().unwrap()["error"]["message"], "the engine has stopped");
}

#[test]
fn a_client_that_goes_away_cancels_its_request() {
    let hello = || Script::Hang(vec![Event::token(1399)]);
    let server = TestServer::start([hello(), hello(), Script::Hang(vec![]), hello()]);
    let body = json!({"messages": user("x")}).to_string();
    let streaming = json!({"messages": user("x"), "stream": true}).to_string();
    for (count, body) in [&streaming, &body, &streaming, &body].into_iter().enumerate() {
        let mut stream = server.open("POST", "/v1/chat/completions", body.as_bytes());
        if body == &streaming {
            let mut first = [0; 64];
            stream.read_exact(&mut first).unwrap();
        }
        while server.engine.requests() == count {
            std::thread::sleep(Duration::from_millis(2));
        }
        drop(stream);
        assert!(server.engine.all_cancelled(), "request {count} goes on for nobody");
    }
}

#[test]
fn a_silent_stream_is_kept_open_by_comments() {
    let server =
        TestServer::with_options([Script::Hang(vec![])], |options| options.ping = Duration::from_millis(30));
    let body = json!({"messages": user("x"), "stream": true}).to_string();
    let mut stream = server.open("POST", "/v1/chat/completions", body.as_bytes());
    let mut seen = String::new();
    let mut buffer = [0; 1024];
    while seen.matches(": ping").count() < 3 {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "{seen}");
        seen.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
    }
    server.engine.send(&Event::token(1399));
    server.engine.send(&Event::Finished(FinishReason::Length));
    stream.read_to_string(&mut seen).unwrap();
    let body = http::unchunk(seen.split_once("\r\n\r\n").unwrap().1);
    assert!(
        body.lines().all(|line| line.is_empty() || line.starts_with("data: ") || line.starts_with(':')),
        "{body}"
    );
    assert_eq!(http::events(&body).last().unwrap(), "[DONE]");
}

#[test]
fn tokens_are_sent_as_they_come() {
    let server = TestServer::start([Script::Hang(vec![])]);
    let body = json!({"messages": user("x"), "stream": true}).to_string();
    let mut stream = server.open("POST", "/v1/chat/completions", body.as_bytes());
    let mut seen = String::new();
    let mut buffer = [0; 4096];
    let mut wait_for = |text: &str| {
        while !seen.contains(text) {
            let count = stream.read(&mut buffer).unwrap();
            assert!(count > 0, "{seen}");
            seen.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
        }
    };
    wait_for("assistant");
    server.engine.send(&Event::token(1399));
    wait_for("Hello");
    server.engine.send(&Event::token(1513));
    wait_for(" world");
    server.engine.send(&Event::Finished(FinishReason::Length));
    wait_for("[DONE]");
}

#[test]
fn bodies_that_are_no_requests_are_refused() {
    let server = TestServer::with_options([], |options| options.max_body_bytes = 10_000);
    let post = |body: &str| server.request("POST", "/v1/chat/completions", body.as_bytes());
    for (body, expected) in [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("5", "expected a JSON object"),
        ("{\"messages\": \"\u{1}\"}", "not JSON"),
        (&format!("{{\"messages\": {}", "[".repeat(5000)), "recursion limit"),
    ] {
        let error = post(body).error(400);
        assert!(error["message"].as_str().unwrap().contains(expected), "{error}");
    }
    let invalid = server.request("POST", "/v1/chat/completions", b"{\"user\": \"\xff\"}").error(400);
    assert!(invalid["message"].as_str().unwrap().contains("not JSON"), "{invalid}");
    let large = post(&json!({"messages": user(&"x".repeat(20_000))}).to_string()).error(413);
    assert!(large["message"].as_str().unwrap().contains("10000 bytes"), "{large}");
}

#[test]
fn unknown_places_and_wrong_methods_say_so_in_json() {
    let server = TestServer::start([]);
    for response in
        [server.get("/favicon.ico"), server.get("/v1/nothing"), server.post("/v1/embeddings", &json!({}))]
    {
        assert!(response.error(404)["message"].as_str().unwrap().contains("nothing at /"));
    }
    let wrong: [Response; 3] = [
        server.get("/v1/chat/completions"),
        server.post("/health", &json!({})),
        server.request("DELETE", "/v1/models", b""),
    ];
    for response in wrong {
        assert!(response.error(405)["message"].as_str().unwrap().contains("does not take"));
        assert!(response.head.contains("allow: "), "{}", response.head);
    }
    let error = server.chat(&json!({"model": "gpt-4", "messages": user("x")})).error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    assert!(error["message"].as_str().unwrap().contains("\"tiny\""));
}

#[test]
fn a_stop_lets_answers_end_but_not_for_ever() {
    let hello = || Script::Hang(vec![Event::token(1399)]);
    let body = json!({"messages": user("x"), "stream": true}).to_string();
    let started = |server: &TestServer| {
        let mut stream = server.open("POST", "/v1/chat/completions", body.as_bytes());
        let mut first = [0; 16];
        stream.read_exact(&mut first).unwrap();
        stream
    };

    let mut server = TestServer::start([hello()]);
    let mut stream = started(&server);
    server.begin_stop();
    std::thread::sleep(Duration::from_millis(50));
    assert!(std::net::TcpStream::connect(server.address).is_err(), "no new connections");
    server.engine.send(&Event::Finished(FinishReason::Length));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"), "{rest}");
    server.wait();

    let server =
        TestServer::with_options([hello()], |options| options.shutdown_timeout = Duration::from_millis(100));
    let _stream = started(&server);
    let took = server.stop();
    assert!(took >= Duration::from_millis(100) && took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn many_clients_get_their_own_answers() {
    let server = TestServer::start((0..32).map(|_| says("one two three")));
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..32)
            .map(|at| {
                let server = &server;
                scope.spawn(move || {
                    let stream = at % 2 == 0;
                    let response = server.chat(&json!({"messages": user("x"), "stream": stream}));
                    if stream {
                        let chunks = response.chunks();
                        (chunks[0]["id"].clone(), texts(&chunks, "content"))
                    } else {
                        let json = response.json();
                        let content = json["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
                        (json["id"].clone(), content)
                    }
                })
            })
            .collect();
        let answers: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert!(answers.iter().all(|(_, text)| text == "one two three"));
        let ids: std::collections::HashSet<String> = answers.iter().map(|(id, _)| id.to_string()).collect();
        assert_eq!(ids.len(), 32);
    });
}
