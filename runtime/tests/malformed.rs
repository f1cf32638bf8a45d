//! Requests that are wrong, made from the server's own OpenAPI document: each gets a 4xx that names the field, none a 5xx,
//! and none disturbs a stream that is open meanwhile. The other way round, what the document allows is taken.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "common/http.rs"]
mod http;

use http::{Script, TestServer};
use runtime::engine::{Event, FinishReason};
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// A request of each kind that is right.
fn right(path: &str, field: &str) -> Value {
    let messages = json!([{"role": "user", "content": "x"}]);
    match path {
        "/v1/chat/completions" => json!({"messages": messages}),
        "/v1/completions" => json!({"prompt": "x"}),
        "/v1/messages" => json!({"messages": messages, "max_tokens": 5}),
        "/v1/messages/count_tokens" => json!({"messages": messages}),
        "/v1/responses" => json!({"input": "x"}),
        "/tokenize" if ["model", "prompt", "add_special_tokens"].contains(&field) => json!({"prompt": "x"}),
        "/tokenize" => json!({"messages": messages}),
        "/detokenize" => json!({"tokens": [5]}),
        "/admin/reload" => json!({}),
        other => panic!("{other} is new: say what a right request is"),
    }
}

/// The types that a schema allows; none where it does not say.
fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().map(|name| name.as_str().unwrap()).collect(),
        _ => Vec::new(),
    }
}

/// Values that a schema does not allow.
fn wrong_values(schema: &Value) -> Vec<Value> {
    let types = types(schema);
    let mut wrong = Vec::new();
    if !types.is_empty() {
        let is = |name: &str| types.contains(&name);
        let numbers = is("number") || is("integer");
        let candidates = [
            (json!(true), is("boolean")),
            (json!(7), numbers),
            (json!(1.5), is("number")),
            (json!("text"), is("string")),
            (json!([{}]), false),
            (json!({"a": 1}), is("object")),
        ];
        wrong.extend(candidates.into_iter().filter(|(_, allowed)| !allowed).map(|(value, _)| value));
        if numbers {
            wrong.extend([json!(1e300), json!(-1e300)]);
        }
    }
    if let Some(least) = schema["minimum"].as_f64() {
        wrong.push(json!(least - 1.0));
    }
    if let Some(least) = schema["exclusiveMinimum"].as_f64() {
        wrong.push(json!(least));
    }
    if let Some(most) = schema["maximum"].as_f64() {
        wrong.push(json!(most + 1.0));
    }
    if schema["minLength"].is_u64() && types.contains(&"string") {
        wrong.push(json!(""));
    }
    if schema["minItems"].is_u64() {
        wrong.push(json!([]));
    }
    if let Some(most) = schema["maxItems"].as_u64() {
        let item = if types_of_items(schema).contains(&"integer") { json!(1) } else { json!("a") };
        wrong.push(Value::from(vec![item; most as usize + 1]));
    }
    if schema["enum"].is_array() || !schema["const"].is_null() {
        wrong.extend([json!("no such"), json!(5)]);
    }
    let items = schema.get("items").map_or_else(Vec::new, wrong_values);
    wrong.extend(items.into_iter().map(|item| json!([item])));
    let good = good_object(schema);
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        for value in wrong_values(property) {
            let mut object = good.clone();
            object.insert(name.clone(), value);
            wrong.push(object.into());
        }
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        let mut object = good.clone();
        object.remove(name.as_str().unwrap());
        wrong.push(object.into());
    }
    wrong
}

fn types_of_items(schema: &Value) -> Vec<&str> {
    types(&schema["items"])
}

/// An object with what a schema requires.
fn good_object(schema: &Value) -> Map<String, Value> {
    let required = schema["required"].as_array().into_iter().flatten().map(|name| name.as_str().unwrap());
    required.map(|name| (name.to_owned(), good_value(&schema["properties"][name]))).collect()
}

fn good_value(schema: &Value) -> Value {
    if let Some(values) = schema["enum"].as_array() {
        return values[0].clone();
    }
    if !schema["const"].is_null() {
        return schema["const"].clone();
    }
    match types(schema).first() {
        Some(&"string") => json!("x"),
        Some(&"integer" | &"number") => json!(1),
        Some(&"array") => json!([good_value(&schema["items"])]),
        Some(&"object") => good_object(schema).into(),
        Some(&"boolean") => json!(true),
        _ => Value::Null,
    }
}

/// Ends of the ranges that a schema allows.
fn border_values(schema: &Value) -> Vec<Value> {
    let mut borders: Vec<Value> =
        ["minimum", "maximum"].iter().filter_map(|name| schema.get(*name).cloned()).collect();
    match types(schema).as_slice() {
        ["boolean", ..] => borders.extend([json!(true), json!(false)]),
        [name, ..] if schema["minLength"].is_null() && *name == "string" => borders.push(json!("x")),
        _ => {}
    }
    if types(schema).contains(&"null") {
        borders.push(Value::Null);
    }
    borders
}

/// Every body of the document: path and schema.
fn bodies(document: &Value) -> Vec<(String, Value)> {
    let paths =
        document["paths"].as_object().unwrap().iter().filter(|(_, methods)| methods.get("post").is_some());
    paths
        .map(|(path, methods)| {
            (path.clone(), methods["post"]["requestBody"]["content"]["application/json"]["schema"].clone())
        })
        .collect()
}

#[test]
fn wrong_fields_are_named_and_right_ones_taken() {
    let short = || Script::Send(vec![Event::token(1399), Event::Finished(FinishReason::Length)]);
    let server = TestServer::start(std::iter::once(Script::Hang(vec![])).chain((0..1000).map(|_| short())));
    server.engine.extend_context(1024);
    let open = json!({"prompt": "x", "stream": true}).to_string();
    let mut stream = server.open("POST", "/v1/completions", open.as_bytes());
    while server.engine.requests() == 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
    let document = server.get("/openapi.json").json();
    let (mut refused, mut taken) = (0, 0);
    let mut faults = Vec::new();
    for (path, schema) in bodies(&document) {
        for (field, field_schema) in schema["properties"].as_object().unwrap() {
            for value in wrong_values(field_schema) {
                let mut body = right(&path, field);
                body[field] = value;
                let response = server.post(&path, &body);
                let error = response.json()["error"].clone();
                let message = error["message"].as_str().unwrap_or_default();
                let names = |text: &str| {
                    text.strip_prefix(field.as_str())
                        .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
                };
                let anthropic = path.starts_with("/v1/messages");
                let is_named = names(message) && (anthropic || error["param"].as_str().is_some_and(names));
                if !(400..500).contains(&response.status) || !is_named {
                    faults.push(format!("{path} {body}: {} {error}", response.status));
                }
                refused += 1;
            }
            for value in border_values(field_schema) {
                // It means something together with others only.
                let alone = matches!(
                    field.as_str(),
                    "top_logprobs" | "guided_grammar" | "model" | "prompt" | "echo" | "tool_choice"
                );
                let is_required = schema["required"].as_array().unwrap().contains(&json!(field));
                if alone || is_required || (path == "/tokenize" && value.is_null()) {
                    continue;
                }
                let mut body = right(&path, field);
                body[field] = value;
                let response = server.post(&path, &body);
                if response.status != 200 {
                    faults.push(format!("{path} {body}: {response:?}"));
                }
                taken += 1;
            }
        }
        for field in schema["required"].as_array().unwrap() {
            let mut body = right(&path, field.as_str().unwrap());
            body.as_object_mut().unwrap().remove(field.as_str().unwrap());
            let response = server.post(&path, &body);
            assert_eq!(response.status, 400, "{path} without {field}");
            assert!(
                response.json()["error"]["message"].as_str().unwrap().starts_with(field.as_str().unwrap())
            );
            refused += 1;
        }
        for body in [&b"\xff\xfe{}"[..], b"{\"a\": \"\xc3\x28\"}", b"", b"nul", b"[{}]", b"{\"a\": 1e999}"] {
            let response = server.request("POST", &path, body);
            assert_eq!(response.status, 400, "{path} {body:?}");
            refused += 1;
        }
        let deep = format!("{{\"a\": {}", "[".repeat(100_000));
        assert_eq!(server.request("POST", &path, deep.as_bytes()).status, 400);
    }
    eprintln!("{refused} wrong requests were refused by name, {taken} right ones taken");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(refused >= 300 && taken >= 100, "{refused} refused, {taken} taken");
    // The stream that was open all the time goes on and ends as it should.
    server.engine.send(&Event::token(1399));
    server.engine.send(&Event::Finished(FinishReason::Length));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("Hello") && rest.contains("[DONE]"), "{rest}");
}

#[test]
fn bytes_that_are_no_requests_disturb_nobody() {
    let server = TestServer::with_options([Script::Hang(vec![])], |options| {
        options.read_timeout = Duration::from_millis(500);
        options.max_body_bytes = 10_000;
    });
    let open = json!({"prompt": "x", "stream": true}).to_string();
    let mut stream = server.open("POST", "/v1/completions", open.as_bytes());
    while server.engine.requests() == 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
    let raw = |bytes: &[u8]| {
        let mut client = TcpStream::connect(server.address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // The server may have hung up already.
        let _ = client.write_all(bytes);
        let _ = client.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    let long = format!("GET /health HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    let many = format!("GET /health HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(5000));
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 18446744073709551616\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{\"prompt\"",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET",
        b"",
        long.as_bytes(),
        many.as_bytes(),
    ] {
        let answer = raw(bytes);
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).into_owned();
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{shown:?}: {answer}");
    }
    // A chunked body tells its length too late to be believed.
    let mut body = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..20 {
        body.extend_from_slice(format!("3e8\r\n{}\r\n", "x".repeat(1000)).as_bytes());
    }
    body.extend_from_slice(b"0\r\n\r\n");
    assert!(raw(&body).starts_with("HTTP/1.1 413"), "{}", raw(&body));
    server.engine.send(&Event::Finished(FinishReason::Length));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"), "{rest}");
}

#[test]
fn connections_that_say_nothing_give_their_places_up() {
    let server = TestServer::with_options([Script::Hang(vec![])], |options| {
        options.read_timeout = Duration::from_millis(300);
        options.max_connections = 8;
    });
    // An answer that takes longer than that is no idle connection.
    let open = json!({"prompt": "x", "stream": true}).to_string();
    let mut stream = server.open("POST", "/v1/completions", open.as_bytes());
    let idle: Vec<TcpStream> = (0..30).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    assert_eq!(server.get("/health").status, 200, "after those that came first were closed");
    // One that has had its answer is idle too.
    let mut kept = TcpStream::connect(server.address).unwrap();
    kept.write_all(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    kept.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("content-length: "), "{answer}");
    drop(idle);
    server.engine.send(&Event::Finished(FinishReason::Length));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"), "{rest}");
}
