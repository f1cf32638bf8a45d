//! What the interfaces make of the same answers: tool calls, log-probabilities, several choices, Anthropic's messages,
//! OpenAI's responses.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "common/http.rs"]
mod http;

use http::{Script, TestServer};
use runtime::constraint::DeadEnd;
use runtime::engine::{Event, FinishReason};
use runtime::logprobs::TokenLogprobs;
use runtime::tokenizer::Specials;
use serde_json::{Value, json};

fn says(text: &str) -> Script {
    let ids = common::dialect().tokenizer().encode(text, Specials::Recognised).unwrap();
    let stop = Event::Finished(FinishReason::Stop(4083));
    Script::Send(ids.into_iter().map(Event::token).chain([stop]).collect())
}

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

const PARAMETERS: &str = r#"{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}"#;

fn tools() -> Value {
    let parameters: Value = serde_json::from_str(PARAMETERS).unwrap();
    json!([{"type": "function", "function": {"name": "get_weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "now"}}])
}

const CALLS: &str = "I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>O\"slo</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>";

/// The events of a stream with names, which must be the types of their data.
fn named(response: &http::Response) -> Vec<Value> {
    assert_eq!(response.status, 200, "{response:?}");
    let blocks = response.body.split("\n\n").filter(|block| !block.is_empty());
    let events = blocks.map(|block| {
        let (name, data) = block.split_once('\n').unwrap_or_else(|| panic!("{block:?}"));
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"].as_str().unwrap());
        data
    });
    events.collect()
}

#[test]
fn tool_calls_have_names_ids_and_typed_arguments() {
    let server = TestServer::start((0..5).map(|_| says(CALLS)));
    server.engine.extend_context(1024);
    let body = json!({"messages": user("x"), "tools": tools()});
    let json = server.chat(&body).json();
    let choice = &json["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{json}");
    assert_eq!(choice["message"]["content"], "I look.");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let arguments = |call: &Value| -> Value {
        serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap()
    };
    assert_eq!(
        (calls[0]["type"].as_str(), calls[0]["function"]["name"].as_str()),
        (Some("function"), Some("get_weather"))
    );
    assert_eq!(arguments(&calls[0]), json!({"city": "O\"slo", "days": 3}));
    assert_eq!((&calls[1]["function"]["name"], arguments(&calls[1])), (&json!("now"), json!({})));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let chunks = server.chat(&json!({"messages": user("x"), "tools": tools(), "stream": true})).chunks();
    let deltas: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    for (index, name) in [(0, "get_weather"), (1, "now")] {
        let own: Vec<&&Value> = deltas.iter().filter(|delta| delta["index"] == index).collect();
        assert_eq!(own[0]["function"]["name"], name);
        assert!(
            own[0]["id"].as_str().unwrap().starts_with("call_")
                && own[1..].iter().all(|delta| delta.get("id").is_none())
        );
        let whole: String =
            own.iter().map(|delta| delta["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(serde_json::from_str::<Value>(&whole).unwrap(), arguments(&calls[index]));
    }
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    let one = json!({"messages": user("x"), "tools": tools(), "parallel_tool_calls": false});
    let json = server.chat(&one).json();
    assert_eq!(json["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    // Without tools, and with tools that must not be called, text is text.
    for body in [
        json!({"messages": user("x")}),
        json!({"messages": user("x"), "tools": tools(), "tool_choice": "none"}),
    ] {
        let json = server.chat(&body).json();
        assert_eq!(json["choices"][0]["message"]["content"], CALLS);
        assert_eq!(json["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn calls_that_must_come_are_held_to_schemas_as_they_are_read() {
    let server = TestServer::start((0..32).map(|_| says("x")));
    server.engine.extend_context(1024);
    let dialect = common::dialect();
    let tokenizer = dialect.tokenizer();
    let city = json!({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]});
    for (schema, value, other) in [
        // References lead to what stands beside all parameters.
        (json!({"$ref": "#/$defs/City"}), r#"{"name": "Oslo"}"#, "7"),
        (json!({"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]}), "null", "7"),
        // What is read as bare text has no quotes.
        (json!({"const": "Oslo"}), "Oslo", "\"Oslo\""),
        (json!({"type": "string", "const": "Oslo"}), "Oslo", "Rome"),
        (json!({"type": "string", "enum": ["Oslo", null]}), "Oslo", "null"),
        (json!({"type": ["string", "null"]}), "\"Oslo\"", "Oslo"),
        // What a schema says of a string holds without quotes too.
        (json!({"type": "string", "maxLength": 3}), "Zü\n", "Oslo"),
        (json!({"type": "string", "minLength": 4}), "Oslo", "Ulm"),
        (json!({"type": "string", "minLength": 2, "maxLength": 2}), "ab", "a"),
        (json!({"type": "string", "pattern": "^[a-z/]+$"}), "a/b", "aB"),
        (json!({"type": "string", "pattern": "l\\d"}), "Osl4o", "Oslo"),
        (json!({"type": "string", "pattern": "^a\\$"}), "a$b", "b$"),
        (json!({"type": "string", "pattern": "^(a|b)$"}), "b", "bb"),
        (json!({"type": "string", "pattern": "[(|^$]+$"}), "x(|", "|x"),
        (json!({"type": "string", "pattern": "^a", "maxLength": 2}), "ab", "abc"),
        (json!({"type": "string", "format": "date"}), "2026-11-30", "2026-11-31"),
        (json!({"type": "string", "format": "date-time"}), "2026-11-30T15:00:01Z", "2026-11-30"),
    ] {
        let parameters = json!({"type": "object", "$defs": {"City": city}, "properties": {"k": schema}, "required": ["k"]});
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
        let response =
            server.chat(&json!({"messages": user("x"), "tools": tools, "tool_choice": "required"}));
        assert_eq!(response.status, 200, "{response:?}");
        let takes = |value: &str| {
            let mut constraint = server.engine.last().constraint.clone().unwrap();
            let text = format!("<tool_call>f<arg_key>k</arg_key><arg_value>{value}</arg_value></tool_call>");
            let ids = tokenizer.encode(&text, Specials::Recognised).unwrap();
            ids.into_iter().all(|id| constraint.accept(id).is_ok())
        };
        assert!(takes(value) && !takes(other), "{schema}");
    }
    for (schema, named) in [
        (json!({"type": "string", "pattern": "^a|b$"}), "pattern"),
        (json!({"type": "string", "pattern": "a\\b"}), "tool_choice"),
        (json!({"type": "string", "pattern": "("}), "tool_choice"),
        (json!({"type": "string", "pattern": 5}), "pattern"),
        (json!({"type": "string", "maxLength": -1}), "maxLength"),
        (json!({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
        (json!({"type": "string", "format": "email"}), "format"),
    ] {
        let parameters = json!({"type": "object", "properties": {"k": schema}, "required": ["k"]});
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
        let error = server
            .chat(&json!({"messages": user("x"), "tools": tools, "tool_choice": "required"}))
            .error(400);
        assert_eq!(error["param"], "tool_choice", "{schema}: {error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(named) && message.lines().count() == 1, "{schema}: {message}");
    }
}

#[test]
fn what_calls_could_not_be_held_to_is_refused_by_name() {
    let server = TestServer::start((0..3).map(|_| says("x")));
    server.engine.extend_context(1024);
    let text = json!({"type": "string"});
    let city = json!({"type": "object", "properties": {"city": text}, "required": ["city"]});
    let post = |parameters: &Value, more: &[(&str, Value)]| {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        let mut body = json!({"messages": user("x"), "tools": [tool], "tool_choice": "required"});
        for (name, value) in more {
            body[name] = value.clone();
        }
        server.chat(&body)
    };
    for (parameters, named) in [
        (json!({"type": "object", "required": ["city"]}), "f: parameters.required: \"city\""),
        (json!({"properties": {"a": text}, "required": "a"}), "f: parameters.required: expected a list"),
        (json!({"properties": {"a": text}, "required": [5]}), "f: parameters.required: 5"),
        (json!({"properties": []}), "f: parameters.properties: expected an object"),
        (json!({"anyOf": [city]}), "f: parameters.anyOf cannot be held to"),
        (json!({"allOf": [city]}), "f: parameters.allOf cannot be held to"),
        (json!({"$ref": "#/$defs/A", "$defs": {"A": city}}), "f: parameters.$ref cannot be held to"),
        (json!({"type": "object", "minProperties": 1}), "f: parameters.minProperties cannot be held to"),
        (json!({"properties": {"x</arg_key>": text}}), "f: \"x</arg_key>\" could not be read"),
        (json!({"properties": {" x": text}}), "f: \" x\" could not be read"),
        (json!({"properties": {"a": {"type": "string", "enum": []}}}), "f: a: enum: there is no string"),
        (json!({"properties": {"a": {"type": "string", "enum": [5]}}}), "f: a: enum: there is no string"),
        // Errors of the library, which counts lines of a grammar that no client knows.
        (json!({"properties": {"a": text, "b": {"type": "nothing"}}}), "f: b: "),
        (json!({"properties": {"a": text, "b": {"type": "string", "pattern": "("}}}), "f: b: "),
    ] {
        let error = post(&parameters, &[]).error(400);
        assert_eq!(error["param"], "tool_choice", "{parameters}: {error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("tool_choice: {named}")), "{parameters}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    // Where the model is free nothing is promised.
    let free = post(&json!({"anyOf": [city]}), &[("tool_choice", json!("auto"))]);
    assert_eq!(free.status, 200, "{free:?}");
    assert_eq!(post(&city, &[("min_tokens", json!(0))]).status, 200);
    let error = post(&city, &[("min_tokens", json!(30))]).error(400);
    assert_eq!(error["param"], "min_tokens", "a call ends where it ends: {error}");
}

#[test]
fn a_grammar_that_leads_nowhere_is_the_fault_of_the_request() {
    let dead_end = DeadEnd { field: "guided_grammar".into(), why: "no token fits".into() };
    let script = Script::Send(vec![Event::token(1399), Event::DeadEnd(dead_end)]);
    let server = TestServer::start((0..4).map(|_| script.clone()));
    let body = json!({"messages": user("x")});
    let error = server.chat(&body).error(400);
    assert_eq!(error["param"], "guided_grammar", "{error}");
    assert!(error["message"].as_str().unwrap().starts_with("guided_grammar: nothing can follow"), "{error}");
    let chunks = server.chat(&json!({"messages": user("x"), "stream": true})).chunks();
    assert_eq!(chunks.last().unwrap()["error"]["type"], "invalid_request_error", "{chunks:?}");
    let json = server.post("/v1/messages", &json!({"messages": user("x"), "max_tokens": 9})).json();
    assert_eq!(json["error"]["type"], "invalid_request_error", "{json}");
    let events = named(&server.post("/v1/responses", &json!({"input": "x", "stream": true})));
    assert_eq!(events.last().unwrap()["response"]["error"]["code"], "invalid_prompt", "{events:?}");
}

#[test]
fn definitions_that_every_parameter_refers_to_do_not_grow_without_bound() {
    let server = TestServer::start([]);
    server.engine.extend_context(1 << 20);
    let properties: Vec<(String, Value)> =
        (0..600).map(|at| (format!("p{at}"), json!({"$ref": "#/$defs/D"}))).collect();
    let parameters = json!({"type": "object", "properties": properties.into_iter().collect::<serde_json::Map<_, _>>(),
        "$defs": {"D": {"type": "string", "description": "d".repeat(8000)}}});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let body = json!({"messages": user("x"), "tools": tools, "tool_choice": "required"});
    let error = server.chat(&body).error(400);
    assert!(error["message"].as_str().unwrap().contains("too large to be held to"), "{error}");
}

#[test]
fn a_tool_whose_calls_could_not_be_read_is_refused() {
    let server = TestServer::start([says("x"), says("x")]);
    server.engine.extend_context(1024);
    let chat = |name: &str| {
        server.chat(
            &json!({"messages": user("x"), "tools": [{"type": "function", "function": {"name": name}}]}),
        )
    };
    for name in ["", "a\nb", "<tool_call>", "a\"b", " a", &"x".repeat(129)] {
        let error = chat(name).error(400);
        assert_eq!(error["param"], "tools[0].function.name", "{error}");
        let tool = json!([{"type": "function", "name": name, "input_schema": {}}]);
        let responses = json!({"input": "x", "tools": tool});
        assert_eq!(server.post("/v1/responses", &responses).error(400)["param"], "tools[0].name");
        let tool = json!([{"name": name, "input_schema": {}}]);
        let messages = json!({"max_tokens": 5, "messages": user("x"), "tools": tool});
        let error = server.post("/v1/messages", &messages).json();
        assert!(
            error["error"]["message"].as_str().unwrap().starts_with("tools[0].name: expected"),
            "{error}"
        );
    }
    for name in ["mcp.files/read-all 2", &"x".repeat(128)] {
        assert_eq!(chat(name).status, 200, "{name}");
    }
}

#[test]
fn a_call_inside_reasoning_is_a_call() {
    let script = "I should look<tool_call>now</tool_call>";
    let server = TestServer::start([says(script)]);
    server.engine.extend_context(1024);
    let body =
        json!({"messages": user("x"), "tools": tools(), "chat_template_kwargs": {"enable_thinking": true}});
    let message = server.chat(&body).json()["choices"][0]["message"].clone();
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("I should look"), &Value::Null));
    assert_eq!(message["tool_calls"][0]["function"]["name"], "now");
}

#[test]
fn choices_have_their_own_seeds_and_indices() {
    let server = TestServer::start([says("one"), says("two"), says("three"), says("one"), says("two")]);
    let json = server.complete(&json!({"prompt": "x", "n": 3, "seed": 7})).json();
    let texts: Vec<&str> =
        json["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["one", "two", "three"]);
    let seeds: Vec<Option<u64>> = server.engine.all().iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [Some(7), Some(8), Some(9)]);
    assert_eq!(json["usage"]["prompt_tokens"], 1, "the prompt is counted once");
    let chunks = server.chat(&json!({"messages": user("x"), "n": 2, "stream": true})).chunks();
    for (index, text) in [(0, "one"), (1, "two")] {
        let own: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        let said: String = own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!((said.as_str(), &own.last().unwrap()["finish_reason"]), (text, &json!("stop")));
    }
}

fn scored(id: u32, logprob: f32, top: &[(u32, f32)]) -> TokenLogprobs {
    TokenLogprobs { token: id, logprob, rank: 2, top: top.to_vec() }
}

#[test]
fn log_probabilities_are_sent_as_each_interface_has_them() {
    let hello = || scored(1399, -0.5, &[(1513, -0.25)]);
    let script = || {
        Script::Send(vec![
            Event::PromptLogprobs(vec![scored(1513, -1.5, &[])]),
            Event::Prompt { reused: 0 },
            Event::Token { id: 1399, logprobs: Some(hello()) },
            Event::Finished(FinishReason::Length),
        ])
    };
    let server = TestServer::start((0..5).map(|_| script()));
    let echoed = json!({"prompt": [1399, 1513], "echo": true, "logprobs": 1, "max_tokens": 1});
    let choice = server.complete(&echoed).json()["choices"][0].clone();
    assert_eq!(choice["text"], "Hello worldHello");
    assert_eq!(
        choice["logprobs"],
        json!({"tokens": ["Hello", " world", "Hello"], "token_logprobs": [null, -1.5, -0.5],
            "top_logprobs": [null, {" world": -1.5}, {" world": -0.25, "Hello": -0.5}], "text_offset": [0, 5, 11]})
    );
    let request = server.engine.last();
    assert_eq!((request.logprobs, request.prompt_logprobs, request.max_tokens), (Some(1), Some(1), 1));

    let choice =
        server.complete(&json!({"prompt": [1399, 1513], "prompt_logprobs": 0})).json()["choices"][0].clone();
    assert_eq!(
        choice["prompt_logprobs"],
        json!([null, {"1513": {"logprob": -1.5, "rank": 2, "decoded_token": " world"}}])
    );
    assert_eq!((&choice["logprobs"], &choice["text"]), (&Value::Null, &json!("Hello")));

    let body = json!({"messages": user("x"), "logprobs": true, "top_logprobs": 1, "stream": true});
    let chunks = server.chat(&body).chunks();
    let scored: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .collect();
    let hello = json!({"token": "Hello", "logprob": -0.5, "bytes": [72, 101, 108, 108, 111],
        "top_logprobs": [{"token": " world", "logprob": -0.25, "bytes": [32, 119, 111, 114, 108, 100]}]});
    assert_eq!(scored, [&hello]);
    assert_eq!(server.engine.last().logprobs, Some(1));
    let whole = server.chat(&json!({"messages": user("x"), "logprobs": true})).json();
    assert_eq!(whole["choices"][0]["logprobs"]["content"][0]["token"], "Hello");

    // Nothing is generated, but the prompt is scored.
    let nothing = json!({"prompt": [1399, 1513], "echo": true, "logprobs": 0, "max_tokens": 0});
    let choice = server.complete(&nothing).json()["choices"][0].clone();
    assert_eq!(choice["logprobs"]["token_logprobs"][1], -1.5);
    assert_eq!(server.engine.last().max_tokens, 0);
}

#[test]
fn anthropics_clients_find_what_they_know() {
    let thinking = "Hm.</think>It is 4.";
    let server = TestServer::start([
        says(thinking),
        says(CALLS),
        says(thinking),
        says(CALLS),
        says("ABC STOP"),
        says("x"),
    ]);
    server.engine.extend_context(1024);
    let think = json!({"max_tokens": 50, "messages": user("x"), "thinking": {"type": "enabled", "budget_tokens": 1024}});
    let parameters: Value = serde_json::from_str(PARAMETERS).unwrap();
    let call = json!({"max_tokens": 50, "system": [{"type": "text", "text": "Be good."}], "messages": user("x"),
        "tools": [{"name": "get_weather", "input_schema": parameters}, {"name": "now", "input_schema": {"type": "object"}}]});
    let post = |body: &Value| server.post("/v1/messages", body);
    let json = post(&think).json();
    assert_eq!(
        (&json["type"], &json["role"], &json["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("end_turn"))
    );
    assert_eq!(
        json["content"],
        json!([{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "It is 4."}])
    );
    let json = post(&call).json();
    assert_eq!(json["stop_reason"], "tool_use", "{json}");
    assert_eq!(
        (&json["content"][1]["name"], &json["content"][1]["input"]),
        (&json!("get_weather"), &json!({"city": "O\"slo", "days": 3}))
    );
    let prompt = common::dialect().tokenizer().decode(&server.engine.last().prompt);
    assert!(prompt.contains("<|system|>\nBe good.") && prompt.contains("get_weather"), "{prompt}");

    for (body, kinds) in [(&think, vec!["thinking", "text"]), (&call, vec!["text", "tool_use", "tool_use"])] {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let events = named(&post(&body));
        let of =
            |kind: &str| -> Vec<&Value> { events.iter().filter(|event| event["type"] == kind).collect() };
        assert_eq!(
            (events[0]["type"].as_str(), events.last().unwrap()["type"].as_str()),
            (Some("message_start"), Some("message_stop"))
        );
        let starts: Vec<&str> = of("content_block_start")
            .iter()
            .map(|event| event["content_block"]["type"].as_str().unwrap())
            .collect();
        assert_eq!(starts, kinds);
        for (index, event) in of("content_block_stop").iter().enumerate() {
            assert_eq!(event["index"], index);
        }
        let json: String = of("content_block_delta")
            .iter()
            .filter(|event| event["index"] == 1)
            .filter_map(|event| event["delta"]["partial_json"].as_str())
            .collect();
        if kinds[1] == "tool_use" {
            assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), json!({"city": "O\"slo", "days": 3}));
        }
        assert!(of("message_delta")[0]["usage"]["output_tokens"].as_u64().unwrap() > 3);
    }
    let json =
        post(&json!({"max_tokens": 9, "messages": user("x"), "stop_sequences": ["no", "STOP"]})).json();
    assert_eq!(
        (&json["stop_reason"], &json["stop_sequence"], &json["content"][0]["text"]),
        (&json!("stop_sequence"), &json!("STOP"), &json!("ABC "))
    );

    // A tool's result is a message of its own in the template, before what the user says.
    let turns = json!([{"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "a", "name": "now", "input": {"k": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "noon"}]}, {"type": "text", "text": "and?"}]}]);
    assert_eq!(post(&json!({"max_tokens": 9, "messages": turns})).status, 200);
    let prompt = common::dialect().tokenizer().decode(&server.engine.last().prompt);
    assert!(prompt.contains("I look<tool_call>now<arg_key>k</arg_key><arg_value>1</arg_value></tool_call><|observation|><tool_response>noon</tool_response><|user|>\nand?"), "{prompt}");
    let counted = server.post("/v1/messages/count_tokens", &json!({"messages": turns})).json();
    assert_eq!(counted["input_tokens"], server.engine.last().prompt.len());

    for (body, named) in [
        (json!({"messages": user("x")}), "max_tokens: missing"),
        (json!({"max_tokens": 5}), "messages: expected"),
        (json!({"max_tokens": 5, "messages": user("x"), "temperature": 1.5}), "temperature: expected"),
        (
            json!({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "messages[0].content[0].type",
        ),
        (json!({"max_tokens": 5, "messages": user("x"), "tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (json!({"max_tokens": 5, "messages": user("x"), "thinking": {}}), "thinking.type"),
        (
            json!({"max_tokens": 5, "messages": [user("x")[0], {"role": "assistant", "content": "It is"}]}),
            "messages[1].role: the last message must be the user's",
        ),
        (
            json!({"max_tokens": 5, "messages": user("x"), "tool_choice": {"type": "any"}}),
            "tool_choice: there are no tools",
        ),
    ] {
        let response = post(&body);
        let json = response.json();
        assert_eq!(
            (response.status, &json["type"], &json["error"]["type"]),
            (400, &json!("error"), &json!("invalid_request_error")),
            "{json}"
        );
        assert!(json["error"]["message"].as_str().unwrap().starts_with(named), "{json}");
    }
}

#[test]
fn responses_are_items() {
    let cut_off = vec![Event::token(1399), Event::Finished(FinishReason::Length)];
    let server = TestServer::start([
        says("Hm.</think>It is 4."),
        says(CALLS),
        says("Hm.</think>It is 4."),
        says(CALLS),
        Script::Send(cut_off.clone()),
        Script::Send(cut_off),
        says("x"),
    ]);
    server.engine.extend_context(1024);
    let parameters: Value = serde_json::from_str(PARAMETERS).unwrap();
    let think = json!({"input": "x", "reasoning": {"effort": "high"}, "instructions": "Be good."});
    let call = json!({"input": user("x"), "tools": [{"type": "function", "name": "get_weather", "parameters": parameters}]});
    let json = server.post("/v1/responses", &think).json();
    let kinds = |output: &Value| -> Vec<String> {
        output.as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        (kinds(&json["output"]), &json["status"]),
        (vec!["reasoning".into(), "message".into()], &json!("completed")),
        "{json}"
    );
    assert_eq!(json["output"][1]["content"][0]["text"], "It is 4.");
    assert_eq!(json["instructions"], "Be good.");
    let json = server.post("/v1/responses", &call).json();
    assert_eq!(kinds(&json["output"]), ["message", "function_call", "function_call"], "{json}");
    let arguments: Value = serde_json::from_str(json["output"][1]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "O\"slo", "days": 3}));

    for body in [&think, &call] {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let events = named(&server.post("/v1/responses", &body));
        for (at, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], at);
        }
        let last = events.last().unwrap();
        assert_eq!(
            (events[0]["type"].as_str(), last["type"].as_str()),
            (Some("response.created"), Some("response.completed"))
        );
        let done: Vec<Value> = events
            .iter()
            .filter(|event| event["type"] == "response.output_item.done")
            .map(|event| event["item"].clone())
            .collect();
        assert_eq!(json!(done), last["response"]["output"]);
        let text: String = events
            .iter()
            .filter(|event| event["type"] == "response.output_text.delta")
            .filter_map(|event| event["delta"].as_str())
            .collect();
        assert!(text == "It is 4." || text == "I look.", "{text}");
    }
    // What was cut off says so.
    let cut = json!({"input": "x", "max_output_tokens": 1});
    let json = server.post("/v1/responses", &cut).json();
    let streamed =
        named(&server.post("/v1/responses", &json!({"input": "x", "max_output_tokens": 1, "stream": true})));
    for response in [&json, &streamed.last().unwrap()["response"]] {
        assert_eq!(
            (&response["status"], &response["output"][0]["status"]),
            (&json!("incomplete"), &json!("incomplete")),
            "{response}"
        );
    }
    let items = json!([{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "noon"}]);
    assert_eq!(server.post("/v1/responses", &json!({"input": items})).status, 200);
    let prompt = common::dialect().tokenizer().decode(&server.engine.last().prompt);
    assert!(
        prompt.contains("<tool_call>now</tool_call><|observation|><tool_response>noon</tool_response>"),
        "{prompt}"
    );
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": "x", "previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"input": "x", "background": true}), "background"),
        (json!({"input": "x", "metadata": 5}), "metadata"),
        (json!({"input": "x", "max_output_tokens": 0}), "max_output_tokens"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": "x", "text": {"format": {"type": "yaml"}}}), "text.format.type"),
    ] {
        assert_eq!(server.post("/v1/responses", &body).error(400)["param"], param, "{body}");
    }
}

#[test]
fn tokens_and_texts_are_turned_into_each_other() {
    let server = TestServer::start([]);
    let json = server.post("/tokenize", &json!({"prompt": "Hello world", "return_token_strs": true})).json();
    assert_eq!(
        json,
        json!({"count": 2, "max_model_len": http::MAX_MODEL_LEN, "tokens": [1399, 1513], "token_strs": ["Hello", " world"]})
    );
    assert_eq!(
        server.post("/detokenize", &json!({"tokens": [1399, 1513]})).json(),
        json!({"prompt": "Hello world"})
    );
    let json = server
        .post(
            "/tokenize",
            &json!({"messages": user("Hello"), "chat_template_kwargs": {"enable_thinking": true}}),
        )
        .json();
    assert_eq!(json["tokens"].as_array().unwrap().last(), Some(&json!(4086)));
    // Texts longer than the context are counted too, up to where that takes long.
    let long = "word ".repeat(200_000);
    let count = server.post("/tokenize", &json!({"prompt": long})).json()["count"].as_u64().unwrap();
    assert!(count > 200_000, "{count}");
    for (path, body, param) in [
        ("/tokenize", json!({"prompt": "x".repeat((1 << 20) + 1)}), "prompt"),
        ("/tokenize", json!({"prompt": "x".repeat((1 << 20) + 1), "add_special_tokens": false}), "prompt"),
        ("/detokenize", json!({"tokens": vec![1399; (1 << 18) + 1]}), "tokens"),
    ] {
        let error = server.post(path, &body).error(400);
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains("expected at most"), "{error}");
    }
    let info = server.get("/tokenizer_info").json();
    assert_eq!(
        (&info["vocab_size"], &info["added_tokens_decoder"]["4083"]["content"]),
        (&json!(4096), &json!("<|user|>"))
    );
    assert!(info["chat_template"].as_str().unwrap().contains("<tool_call>"));
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/tokenize", json!({"prompt": "x", "messages": user("x")}), "messages"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
        ("/detokenize", json!({"tokens": [4096]}), "tokens"),
    ] {
        assert_eq!(server.post(path, &body).error(400)["param"], param, "{body}");
    }
    let metrics = server.get("/metrics");
    assert!(
        metrics.head.contains("content-type: text/plain; version=0.0.4") && metrics.body == "# of tiny\n"
    );
    assert_eq!(server.get("/v1/models/tiny").json()["ranks"], 8);
    assert_eq!(server.get("/v1/models/tiny").json()["dense_attention_exact_up_to"], 48);
    assert_eq!(server.get("/v1/models/other/name").error(404)["code"], "model_not_found");
    assert_eq!(server.get("/v1/models/%ff").error(400)["type"], "invalid_request_error");
}

#[test]
fn a_regular_expression_that_is_none_is_told_why() {
    let server = TestServer::start([]);
    let error = server.chat(&json!({"messages": user("x"), "structured_outputs": {"regex": "("}})).error(400);
    assert!(error["message"].as_str().unwrap().ends_with("regex parse error: unclosed group"), "{error}");
}
