//! Who may ask, and how: keys, origins, slow and too many clients, time limits, TLS.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "common/http.rs"]
mod http;

use http::{Script, TestServer};
use runtime::engine::{Event, FinishReason};
use runtime::reload::{Obstacle, ReloadError, ReloadRequest};
use runtime::server::ApiKeys;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn user() -> Value {
    json!([{"role": "user", "content": "x"}])
}

/// The answer to a request with these header lines.
fn with_headers(server: &TestServer, method: &str, path: &str, headers: &str) -> http::Response {
    let mut stream = TcpStream::connect(server.address).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: 0\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    http::Response::parse(&bytes)
}

#[test]
fn keys_are_asked_for_everywhere_but_where_nothing_is_told() {
    let server = TestServer::with_options([], |options| options.api_keys = ApiKeys::new(["one", "two"]));
    for path in ["/v1/models", "/metrics", "/tokenizer_info"] {
        let error = server.get(path).error(401);
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("invalid_api_key"), &json!("authentication_error"))
        );
        for headers in ["authorization: Bearer one\r\n", "x-api-key: two\r\n"] {
            assert_eq!(with_headers(&server, "GET", path, headers).status, 200);
        }
        assert!(
            with_headers(&server, "GET", path, "authorization: Bearer three\r\n")
                .head
                .contains("www-authenticate: bearer")
        );
    }
    let posts = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"];
    for path in posts {
        server.post(path, &json!({})).error(401);
    }
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let response = server.post(path, &json!({}));
        assert_eq!(
            (response.status, &response.json()["error"]["type"]),
            (401, &json!("authentication_error"))
        );
    }
    for path in ["/health", "/version", "/openapi.json"] {
        assert_eq!(server.get(path).status, 200);
    }
}

#[test]
fn a_body_that_is_called_something_else_than_json_is_refused() {
    let server = TestServer::start([]);
    let post = |path: &str, headers: &str, body: &[u8]| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        http::Response::parse(&bytes)
    };
    let body = br#"{"prompt": "Hello"}"#;
    let form = "content-type: application/x-www-form-urlencoded\r\n";
    for headers in [
        "",
        // What curl says of -d.
        form,
        "content-type: application/json\r\n",
        "content-type: Application/JSON; charset=utf-8\r\norigin: https://a.example\r\n",
        "content-type: application/vnd.api+json\r\n",
        "content-encoding: identity\r\n",
        "content-encoding:\r\n",
    ] {
        let response = post("/tokenize", headers, body);
        assert_eq!(response.status, 200, "{headers}: {response:?}");
    }
    let from_page = "origin: https://a.example\r\n";
    for (headers, named) in [
        ("content-encoding: gzip\r\n", "content-encoding: \"gzip\""),
        ("content-encoding: identity, br\r\n", "content-encoding: \"br\""),
        ("content-encoding: \u{e9}\r\n", "content-encoding: "),
        ("content-type: text/plain\r\n", "content-type: expected application/json, found \"text/plain\""),
        ("content-type: multipart/form-data; boundary=x\r\n", "content-type: "),
        ("content-type: application/jsonp\r\n", "content-type: "),
        ("content-type: application/json\r\ncontent-type: text/plain\r\n", "content-type: "),
        // What a browser sends for any page without asking first.
        (from_page, "content-type: expected application/json, found nothing"),
        (&format!("{form}{from_page}"), "content-type: "),
    ] {
        let error = post("/tokenize", headers, body).error(415);
        assert_eq!((&error["param"], &error["code"]), (&Value::Null, &json!("unsupported_media_type")));
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(named) && message.lines().count() == 1, "{headers}: {message}");
    }
    let response = post("/v1/messages", "content-encoding: gzip\r\n", b"{}");
    assert_eq!((response.status, &response.json()["type"]), (415, &json!("error")));
    // Some programs put a byte order mark before UTF-8.
    assert_eq!(post("/tokenize", "", b"\xef\xbb\xbf{\"prompt\": \"Hello\"}").json()["count"], 1);
    post("/tokenize", "", b"\xef\xbb\xbf\xef\xbb\xbf{\"prompt\": \"Hello\"}").error(400);
}

#[test]
fn pages_of_allowed_origins_may_ask() {
    let allowed = |server: &TestServer, origin: &str| {
        let headers = format!(
            "origin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: content-type\r\n"
        );
        let response = with_headers(server, "OPTIONS", "/v1/chat/completions", &headers);
        let get = with_headers(server, "GET", "/v1/models", &format!("origin: {origin}\r\n"));
        let allows = |response: &http::Response| response.head.contains("access-control-allow-origin: ");
        assert_eq!(allows(&response), allows(&get));
        allows(&get)
    };
    assert!(!allowed(&TestServer::start([]), "https://a.example"));
    let server = TestServer::with_options([], |options| {
        options.allowed_origins = vec!["https://a.example".parse().unwrap()]
    });
    assert!(allowed(&server, "https://a.example") && !allowed(&server, "https://b.example"));
    let server = TestServer::with_options([], |options| options.allowed_origins = vec!["*".parse().unwrap()]);
    assert!(allowed(&server, "https://b.example"));
}

#[test]
fn slow_clients_are_given_up() {
    let answer = Script::Send(vec![Event::token(1399), Event::Finished(FinishReason::Stop(4083))]);
    let server =
        TestServer::with_options([answer], |options| options.read_timeout = Duration::from_millis(200));
    // The head never ends.
    let begin = Instant::now();
    let mut head = TcpStream::connect(server.address).unwrap();
    head.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n").unwrap();
    let mut rest = Vec::new();
    let _ = head.read_to_end(&mut rest);
    assert!(begin.elapsed() < Duration::from_secs(10));
    // The body never comes.
    let mut body = TcpStream::connect(server.address).unwrap();
    body.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"prompt\"")
        .unwrap();
    let mut answer = vec![0; 4096];
    let count = body.read(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer[..count]);
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("request_timeout"), "{answer}");
    assert_eq!(server.complete(&json!({"prompt": "x"})).status, 200);
}

#[test]
fn answers_that_take_too_long_end() {
    let hang = || Script::Hang(vec![Event::token(1399)]);
    let server = TestServer::with_options([hang(), hang()], |options| {
        options.request_timeout = Some(Duration::from_millis(100))
    });
    let error = server.chat(&json!({"messages": user()})).error(408);
    assert_eq!(error["code"], "request_timeout");
    let chunks = server.chat(&json!({"messages": user(), "stream": true})).chunks();
    assert_eq!(chunks.last().unwrap()["error"]["code"], "request_timeout");
    assert!(server.engine.all_cancelled());
}

#[test]
fn connections_beyond_the_limit_wait_for_a_place() {
    let server = TestServer::with_options([], |options| options.max_connections = 2);
    let idle: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(100));
    let mut third = TcpStream::connect(server.address).unwrap();
    third.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    third.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = [0; 12];
    assert!(third.read(&mut answer).is_err(), "it is not answered yet");
    drop(idle);
    third.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    third.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
}

/// A certificate for localhost and its key, made anew; `None` where openssl is not installed.
fn certificate(dir: &std::path::Path) -> Option<[std::path::PathBuf; 2]> {
    let paths = [dir.join("cert.pem"), dir.join("key.pem")];
    let made = std::process::Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ])
        .args([
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ])
        .args(["-out".as_ref(), paths[0].as_os_str(), "-keyout".as_ref(), paths[1].as_os_str()])
        .output();
    match made {
        Ok(output) if output.status.success() => Some(paths),
        _ => {
            // Straight to the stream: the test harness hides what the print macros write.
            std::io::stderr().write_all(b"NOT RUN: TLS: openssl is not installed\n").unwrap();
            None
        }
    }
}

#[test]
fn tls_is_spoken_with_the_certificate_that_was_given() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    let dir = tempfile::tempdir().unwrap();
    let Some([certificate, key]) = certificate(dir.path()) else { return };
    let tls = runtime::server::Tls::open(&certificate, &key).unwrap();
    let server = TestServer::with_options([], |options| {
        options.tls = Some(tls);
        options.read_timeout = Duration::from_millis(500);
    });
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&certificate).unwrap()).unwrap();
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let threads = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = threads.block_on(async {
        let stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        let mut stream = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
        stream
            .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answer = Vec::new();
        // The server need not say goodbye.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    });
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // Plain text, and silence, end in nothing.
    for bytes in [&b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"[..], b""] {
        let mut plain = TcpStream::connect(server.address).unwrap();
        plain.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        plain.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    }
    // A key that is another certificate's is refused before anything listens.
    let other = tempfile::tempdir().unwrap();
    let [_, wrong] = self::certificate(other.path()).unwrap();
    let error = runtime::server::Tls::open(&certificate, &wrong).unwrap_err();
    assert!(error.contains("key.pem: expected the key of the certificate"), "{error}");
}

#[test]
fn weights_are_exchanged_for_who_may_ask() {
    let server = TestServer::start([]);
    let reload = |server: &TestServer, headers: &str, body: &str| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        let request = format!(
            "POST /admin/reload HTTP/1.1\r\n{headers}content-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        http::Response::parse(&bytes)
    };
    let response =
        reload(&server, "host: localhost\r\n", r#"{"dir": "/new", "ranks": [2, 0], "in_place": true}"#);
    assert_eq!((response.status, &response.json()["dir"]), (200, &json!("/new")));
    let asked =
        ReloadRequest { dir: Some("/new".into()), ranks: Some(vec![2, 0]), verify: true, in_place: true };
    assert_eq!(server.engine.reloads(), [asked]);
    // A page in a browser, whatever its name points to.
    for headers in ["host: localhost\r\norigin: http://localhost\r\n", "host: evil.example\r\n"] {
        assert_eq!(reload(&server, headers, "{}").error(403)["code"], "forbidden");
    }
    assert_eq!(server.get("/admin/ranks").json()["generation"], 1);
    let fault = ReloadError {
        obstacle: Obstacle::Checkpoint,
        rank: Some(3),
        tensor: Some("model.norm.weight".to_owned()),
        cause: "damaged".to_owned(),
    };
    server.engine.fail_reloads(fault.clone());
    let response = reload(&server, "host: localhost\r\n", "{}");
    let error = &response.json()["error"];
    assert_eq!((response.status, &error["message"]), (422, &json!("rank 3: damaged")));
    assert_eq!((&error["rank"], &error["tensor"]), (&json!(3), &json!("model.norm.weight")));
    for (obstacle, status) in
        [(Obstacle::Conflict, 409), (Obstacle::Request("ranks"), 400), (Obstacle::Stopped, 503)]
    {
        server.engine.fail_reloads(ReloadError { obstacle, ..fault.clone() });
        assert_eq!(reload(&server, "host: localhost\r\n", "{}").status, status);
    }
    // With keys they are what counts.
    let server = TestServer::with_options([], |options| options.api_keys = ApiKeys::new(["one"]));
    reload(&server, "host: localhost\r\n", "{}").error(401);
    assert_eq!(reload(&server, "host: far.example\r\nx-api-key: one\r\n", "{}").status, 200);
}

#[test]
fn alive_is_not_ready() {
    let server = TestServer::loading(|_| ());
    assert_eq!([server.get("/health/live").status, server.get("/health/ready").status], [200, 503]);
    server.get("/admin/ranks").error(503);
    let server = TestServer::start([]);
    assert_eq!([server.get("/health/live").status, server.get("/health/ready").status], [200, 200]);
    server.engine.set_trouble(Some("a rank is gone"));
    let ready = server.get("/health/ready");
    assert_eq!((ready.status, &ready.json()["cause"]), (503, &json!("a rank is gone")));
    assert_eq!(server.get("/health").json(), ready.json());
    assert_eq!(server.get("/health/live").status, 200);
    server.engine.set_trouble(None);
    assert_eq!(server.get("/health").status, 200);
}
