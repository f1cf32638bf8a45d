//! A running `shardrun serve`.

use crate::{bundled, program};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::ops::Deref;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Whether [`Server::on_device`] takes a GPU.
pub fn is_on_gpu() -> bool {
    std::env::var("SHARDRUN_TEST_DEVICE").is_ok_and(|device| device == "cuda")
}

/// A running server, killed when the test ends.
pub struct Server {
    /// The process.
    pub child: Child,
    at: At,
    _checkpoint: Option<TempDir>,
}

/// Where a server listens.
pub struct At {
    /// Its scheme, host and port.
    pub url: String,
}

impl Deref for Server {
    type Target = At;

    fn deref(&self) -> &At {
        &self.at
    }
}

impl Server {
    /// Starts it with the bundled model on 8 ranks and waits until it answers.
    pub fn start(arguments: &[&str]) -> Self {
        let temp = TempDir::new().unwrap();
        let dir = bundled().convert(temp.path(), 8);
        let mut server = Self::of(&dir, arguments, |command| command);
        server._checkpoint = Some(temp);
        server
    }

    /// Starts it with a checkpoint and waits until it answers; `change` may change the command.
    pub fn of(dir: &Path, arguments: &[&str], change: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let mut command = Command::new(program("shardrun"));
        command.args(["serve".as_ref(), dir.as_os_str()]).args(["--port", "0"]).args(arguments);
        let mut child = change(&mut command).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.split_whitespace().find(|word| word.starts_with("http://"));
        let url = url.unwrap_or_else(|| panic!("no URL in {line:?}")).to_owned();
        Self { child, at: At { url }, _checkpoint: None }
    }

    /// The same on the first GPU, which all ranks share, where `SHARDRUN_TEST_DEVICE=cuda` asks for it.
    pub fn on_device(dir: &Path, arguments: &[&str]) -> Self {
        let device: &[&str] = if is_on_gpu() { &["--device", "cuda", "--devices", "0"] } else { &[] };
        Self::of(dir, &[arguments, device].concat(), |command| command)
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl At {
    /// Status and JSON body of a POST.
    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.post_text(path, body);
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    /// Status and body of a POST.
    pub fn post_text(&self, path: &str, body: &Value) -> (u16, String) {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let url = format!("{}{path}", self.url);
        let mut reply = agent
            .post(&url)
            .header("content-type", "application/json")
            .send(body.to_string().as_bytes())
            .unwrap();
        (reply.status().as_u16(), reply.body_mut().read_to_string().unwrap())
    }

    /// The JSON of a GET.
    pub fn get(&self, path: &str) -> Value {
        serde_json::from_str(&self.get_text(path)).unwrap()
    }

    /// The body of a GET.
    pub fn get_text(&self, path: &str) -> String {
        ureq::get(&format!("{}{path}", self.url)).call().unwrap().body_mut().read_to_string().unwrap()
    }

    /// A number of `/metrics` that has no labels but the model's name.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.get_text("/metrics");
        let line =
            page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
        line.unwrap_or_else(|| panic!("no {name} in {page}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Status and JSON body of a GET, whatever the status.
    pub fn status(&self, path: &str) -> (u16, Value) {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut reply = agent.get(format!("{}{path}", self.url)).call().unwrap();
        let text = reply.body_mut().read_to_string().unwrap();
        (reply.status().as_u16(), serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    /// The JSON chunks of a streamed answer; the stream must end with `[DONE]`.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, text) = self.post_text(path, body);
        assert_eq!(status, 200, "{text}");
        let events: Vec<&str> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
        let (last, chunks) = events.split_last().unwrap();
        assert_eq!(*last, "data: [DONE]");
        let json = |event: &&str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        chunks.iter().filter(|event| !event.starts_with(':')).map(json).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
