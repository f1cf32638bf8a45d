//! A server on a loopback socket with an engine that says what the test tells it to, and a client that shows every byte.

#![allow(dead_code, reason = "every test program takes what it needs")]

use runtime::engine::{Event, EventStream, GenerationRequest, ModelInfo, Refusal};
use runtime::reload::{How, ReloadError, ReloadReport, ReloadRequest};
use runtime::server::{Backend, Readiness, Server, ServerOptions};
use runtime::status::Status;
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// What the engine does with a request.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// Sends these events.
    Send(Vec<Event>),
    /// Sends these events and then nothing, for as long as the client stays.
    Hang(Vec<Event>),
    /// Does not take it.
    Refuse(Refusal),
}

/// An engine that follows scripts, one for each request, in order.
#[derive(Clone, Default)]
pub(crate) struct Scripted(Arc<Inner>);

#[derive(Default)]
struct Inner {
    scripts: Mutex<VecDeque<Script>>,
    requests: Mutex<Vec<GenerationRequest>>,
    hanging: Mutex<Vec<UnboundedSender<Event>>>,
    reloads: Mutex<Vec<ReloadRequest>>,
    reload_fault: Mutex<Option<ReloadError>>,
    trouble: Mutex<Option<String>>,
    /// Where a test needs more than [`MAX_MODEL_LEN`].
    long_context: OnceLock<usize>,
    /// Where a test needs a short queue.
    max_waiting: OnceLock<usize>,
}

/// The scripted engine's context, unless a test makes it longer.
pub(crate) const MAX_MODEL_LEN: usize = 64;

impl Backend for Scripted {
    fn submit(&self, request: GenerationRequest) -> Result<EventStream, Refusal> {
        let prompt = request.prompt.len();
        self.0.requests.lock().unwrap().push(request);
        let max_model_len = self.model().max_model_len;
        if prompt >= max_model_len {
            return Err(Refusal::ContextLength { prompt, max_model_len });
        }
        let script =
            self.0.scripts.lock().unwrap().pop_front().expect("the test has a script for each request");
        let (sender, stream) = unbounded_channel();
        let (events, hang) = match script {
            Script::Send(events) => (events, false),
            Script::Hang(events) => (events, true),
            Script::Refuse(refusal) => return Err(refusal),
        };
        for event in events {
            sender.send(event).unwrap();
        }
        if hang {
            self.0.hanging.lock().unwrap().push(sender);
        }
        Ok(stream)
    }

    fn model(&self) -> ModelInfo {
        ModelInfo {
            max_model_len: self.0.long_context.get().copied().unwrap_or(MAX_MODEL_LEN),
            vocab_size: 4096,
            ranks: 8,
            max_waiting: self.0.max_waiting.get().copied().unwrap_or(256),
            index_topk: Some(48),
        }
    }

    fn metrics(&self, model: &str) -> String {
        format!("# of {model}\n")
    }

    fn reload(&self, request: &ReloadRequest) -> Result<ReloadReport, ReloadError> {
        self.0.reloads.lock().unwrap().push(request.clone());
        if let Some(error) = self.0.reload_fault.lock().unwrap().clone() {
            return Err(error);
        }
        let (dir, how) = (request.dir.clone().unwrap_or_else(|| "served".into()), How::Nothing);
        let (seconds, seconds_without_weights, ranks) = (0.0, 0.0, Vec::new());
        Ok(ReloadReport {
            dir,
            generation: 1,
            how,
            why_in_place: None,
            seconds,
            seconds_without_weights,
            ranks,
        })
    }

    fn status(&self) -> Option<Status> {
        let (dir, digest) = ("served".into(), "ab".to_owned());
        Some(Status { dir, generation: 1, digest, reloading: false, ranks: Vec::new() })
    }

    fn trouble(&self) -> Option<String> {
        self.0.trouble.lock().unwrap().clone()
    }
}

impl Scripted {
    /// Says what it does with one more request.
    pub(crate) fn add(&self, script: Script) {
        self.0.scripts.lock().unwrap().push_back(script);
    }

    /// Makes the queue shorter.
    pub(crate) fn shorten_queue(&self, max_waiting: usize) {
        self.0.max_waiting.set(max_waiting).unwrap();
    }

    /// The reloads that were asked for.
    pub(crate) fn reloads(&self) -> Vec<ReloadRequest> {
        self.0.reloads.lock().unwrap().clone()
    }

    /// From now on reloads end with this error.
    pub(crate) fn fail_reloads(&self, error: ReloadError) {
        *self.0.reload_fault.lock().unwrap() = Some(error);
    }

    /// From now on there is trouble, or none.
    pub(crate) fn set_trouble(&self, trouble: Option<&str>) {
        *self.0.trouble.lock().unwrap() = trouble.map(str::to_owned);
    }

    /// Makes the context longer.
    pub(crate) fn extend_context(&self, max_model_len: usize) {
        self.0.long_context.set(max_model_len).unwrap();
    }

    /// The last request it got.
    pub(crate) fn last(&self) -> GenerationRequest {
        self.0.requests.lock().unwrap().last().expect("a request came through").clone()
    }

    /// All requests it got.
    pub(crate) fn all(&self) -> Vec<GenerationRequest> {
        self.0.requests.lock().unwrap().clone()
    }

    /// How many requests it got.
    pub(crate) fn requests(&self) -> usize {
        self.0.requests.lock().unwrap().len()
    }

    /// Whether every hanging request was cancelled, waiting a moment for it.
    pub(crate) fn all_cancelled(&self) -> bool {
        let until = Instant::now() + Duration::from_secs(10);
        while Instant::now() < until {
            if self.0.hanging.lock().unwrap().iter().all(UnboundedSender::is_closed) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// Lets the hanging requests go on.
    pub(crate) fn send(&self, event: &Event) {
        for sender in self.0.hanging.lock().unwrap().iter() {
            sender.send(event.clone()).unwrap();
        }
    }
}

/// A server of a test's own.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Scripted,
    pub(crate) readiness: Readiness,
    stop: Option<oneshot::Sender<()>>,
    ended: Option<tokio::task::JoinHandle<()>>,
}

fn tokio_runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new().unwrap())
}

impl TestServer {
    /// One that is still loading.
    pub(crate) fn loading(change: impl FnOnce(&mut ServerOptions)) -> Self {
        let mut options = ServerOptions::default();
        change(&mut options);
        let runtime = tokio_runtime();
        let server = runtime.block_on(Server::bind("127.0.0.1", 0, options)).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (address, readiness) = (server.local_addr().unwrap(), server.readiness());
        let ended = runtime.spawn(async move {
            let shutdown = async move {
                let _ = stopped.await;
            };
            server.run(shutdown).await.unwrap();
        });
        Self { address, engine: Scripted::default(), readiness, stop: Some(stop), ended: Some(ended) }
    }

    /// One that answers as the scripts say.
    pub(crate) fn start(scripts: impl IntoIterator<Item = Script>) -> Self {
        Self::with_options(scripts, |_| ())
    }

    pub(crate) fn with_options(
        scripts: impl IntoIterator<Item = Script>,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let server = Self::loading(change);
        server.engine.0.scripts.lock().unwrap().extend(scripts);
        server.readiness.ready("tiny", server.engine.clone(), crate::common::dialect());
        server
    }

    /// Tells it to stop; gives the time until it has.
    pub(crate) fn stop(mut self) -> Duration {
        let start = Instant::now();
        self.begin_stop();
        tokio_runtime().block_on(self.ended.take().unwrap()).unwrap();
        start.elapsed()
    }

    /// Tells it to stop.
    pub(crate) fn begin_stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits until it has stopped.
    pub(crate) fn wait(mut self) {
        tokio_runtime().block_on(self.ended.take().unwrap()).unwrap();
    }

    /// Sends a request and leaves the connection open.
    pub(crate) fn open(&self, method: &str, path: &str, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses the body early may have closed its side already.
        let _ = stream.write_all(body);
        stream
    }

    pub(crate) fn request(&self, method: &str, path: &str, body: &[u8]) -> Response {
        let mut stream = self.open(method, path, body);
        let mut bytes = Vec::new();
        // A connection that is reset after the answer has still answered.
        let _ = stream.read_to_end(&mut bytes);
        Response::parse(&bytes)
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.request("GET", path, b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.request("POST", path, body.to_string().as_bytes())
    }

    pub(crate) fn chat(&self, body: &Value) -> Response {
        self.post("/v1/chat/completions", body)
    }

    pub(crate) fn complete(&self, body: &Value) -> Response {
        self.post("/v1/completions", body)
    }
}

/// An answer as it came.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8(bytes.to_vec()).expect("everything is UTF-8");
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let head = head.to_lowercase();
        let body = if head.contains("transfer-encoding: chunked") { unchunk(body) } else { body.to_owned() };
        Self { status, head, body }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error object, with the status that it must have.
    pub(crate) fn error(&self, status: u16) -> Value {
        let json = self.json();
        assert_eq!(self.status, status, "{json}");
        let error = json["error"].clone();
        let names: Vec<&String> = error.as_object().unwrap().keys().collect();
        assert_eq!(names, ["message", "type", "param", "code"], "{json}");
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string());
        error
    }

    /// The data of each event; everything else in the stream fails, except comments.
    pub(crate) fn events(&self) -> Vec<String> {
        assert_eq!(self.status, 200, "{self:?}");
        assert!(self.head.contains("content-type: text/event-stream"), "{}", self.head);
        events(&self.body)
    }

    /// The chunks of a stream that ends as it should.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{self:?}");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

pub(crate) fn events(body: &str) -> Vec<String> {
    let mut events = Vec::new();
    for line in body.lines().filter(|line| !line.is_empty() && !line.starts_with(':')) {
        let data = line.strip_prefix("data: ").unwrap_or_else(|| panic!("not a data line: {line:?}"));
        events.push(data.to_owned());
    }
    events
}

/// Undoes chunked transfer; what is cut off stays away.
pub(crate) fn unchunk(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 || rest.len() < size {
            break;
        }
        whole.push_str(&rest[..size]);
        body = rest[size..].strip_prefix("\r\n").unwrap_or("");
    }
    whole
}
