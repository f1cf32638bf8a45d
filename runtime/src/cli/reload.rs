//! `shardrun reload`.

use super::serve::read_keys;
use super::{Error, print};
use clap::Args;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Answers of a server are shorter.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// Lets a running server load other weights of the same model, without a pause
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shardrun reload                                what has changed in the folder that is served
  shardrun reload --dir /models/glm-5-new
  shardrun reload --url http://10.0.0.7:8000 --api-key-file key.txt --rank 3
  kill -HUP $(pidof shardrun)                    the same as the first

Requests that have begun end on the weights that they began with. A checkpoint that cannot be served changes nothing: exit code 1.")]
pub(super) struct Reload {
    /// Where the server is
    #[arg(long, env = "SHARDRUN_URL", value_name = "URL", default_value = "http://127.0.0.1:8000")]
    url: String,
    /// Folder of the checkpoint, on the server's machine [default: the one that is served]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Load this rank, also where it is as before; may be given several times [default: those that have changed]
    #[arg(long, value_name = "R")]
    rank: Vec<usize>,
    /// Load bytes without holding them against their digests
    #[arg(long)]
    no_verify: bool,
    /// Take the old weights out of memory first; requests wait meanwhile
    #[arg(long)]
    in_place: bool,
    /// The server's key
    #[arg(long, env = "SHARDRUN_API_KEY", value_name = "KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// File whose first line is the server's key
    #[arg(long, env = "SHARDRUN_API_KEY_FILE", value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Print the server's answer as JSON
    #[arg(long)]
    json: bool,
}

impl Reload {
    pub(super) fn run(self) -> Result<ExitCode, Error> {
        if self.url.starts_with("https:") {
            return Err(Error::Usage(
                "--url: this command speaks plain HTTP; for https: `curl -X POST URL/admin/reload -H 'Authorization: Bearer KEY' -H 'Content-Type: application/json' -d '{}'`".to_owned(),
            ));
        }
        let mut key = self.api_key.clone();
        if let (None, Some(path)) = (&key, &self.api_key_file) {
            key = read_keys(path)?.into_iter().next();
        }
        let url = format!("{}/admin/reload", self.url.trim_end_matches('/'));
        let mut body = json!({"verify": !self.no_verify, "in_place": self.in_place});
        if let Some(dir) = &self.dir {
            // The server may have been started elsewhere.
            let dir = std::path::absolute(dir).map_err(Error::io("--dir"))?;
            let Some(dir) = dir.to_str() else {
                return Err(Error::Usage("--dir: expected a name that is UTF-8, as requests are".to_owned()));
            };
            body["dir"] = dir.into();
        }
        if !self.rank.is_empty() {
            body["ranks"] = self.rank.clone().into();
        }
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut request = agent.post(&url).header("content-type", "application/json");
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let unreachable = |error: ureq::Error| Error::Usage(format!("{url}: {error}; is the server there?"));
        let mut answer = request.send(body.to_string().as_bytes()).map_err(unreachable)?;
        let status = answer.status().as_u16();
        let text = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_string();
        let text = text.map_err(|error| Error::Failed(format!("{url}: the answer broke off: {error}")))?;
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        if status != 200 {
            let message = value["error"]["message"].as_str().unwrap_or("no reason given");
            return Err(Error::Failed(format!("not reloaded (status {status}): {message}")));
        }
        let report = if self.json { format!("{value}\n") } else { table(&value) };
        print(&report)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The server's answer for people.
fn table(report: &Value) -> String {
    let mut text = String::new();
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    for rank in report["ranks"].as_array().into_iter().flatten() {
        let short = |name: &str| rank[name].as_str().unwrap_or("?").chars().take(12).collect::<String>();
        let _ = match rank["loaded"] == true {
            true => {
                let rate = match rank["gb_per_s"].as_f64() {
                    Some(rate) => format!("{rate:.2} GB/s"),
                    None => "mapped, not read".to_owned(),
                };
                writeln!(
                    text,
                    "rank {}: {} bytes in {:.3} s ({rate}), {} -> {}",
                    rank["rank"],
                    rank["bytes"],
                    number(&rank["seconds"]),
                    short("old_digest"),
                    short("new_digest"),
                )
            }
            false => writeln!(text, "rank {}: as before, {}", rank["rank"], short("old_digest")),
        };
    }
    let how = match report["how"].as_str() {
        Some("beside") => "beside the old ones; nothing waited".to_owned(),
        Some("in_place") => {
            let why = report["why_in_place"].as_str().unwrap_or("as asked for");
            format!(
                "in place of the old ones ({why}); requests waited {:.3} s",
                number(&report["seconds_without_weights"])
            )
        }
        _ => "nothing has changed".to_owned(),
    };
    let _ = writeln!(
        text,
        "{}: weights {} in {:.3} s: {how}",
        report["dir"].as_str().unwrap_or("?"),
        report["generation"],
        number(&report["seconds"]),
    );
    text
}
