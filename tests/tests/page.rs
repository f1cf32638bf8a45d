//! The chat page in a real browser: Chromium without a window, driven over WebDriver.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::not_run;
use tests::server::Server;

/// What a found element is called in WebDriver's answers (W3C WebDriver 2, section 12).
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";
const ENTER: &str = "\u{E007}";
const ESCAPE: &str = "\u{E00C}";

/// A browser with one page.
struct Browser {
    driver: Child,
    session: String,
    _profile: TempDir,
}

impl Browser {
    /// `None` where there is none, which is said.
    fn start(dark: bool) -> Option<Self> {
        let Ok(mut driver) = Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).spawn()
        else {
            not_run("the chat page in a browser: chromedriver (Debian: chromium-driver) is not installed");
            return None;
        };
        let lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let started = lines.map_while(Result::ok).find_map(|line| {
            line.split_once("started successfully on port ")
                .map(|(_, port)| port.trim_end_matches('.').to_owned())
        });
        let port = started.expect("chromedriver says its port");
        let profile = TempDir::new().unwrap();
        let mut arguments: Vec<String> = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=900,700",
        ]
        .map(str::to_owned)
        .to_vec();
        arguments.push(format!("--user-data-dir={}", profile.path().display()));
        if dark {
            arguments.push("--blink-settings=preferredColorScheme=0".to_owned());
        }
        let mut browser = Self { driver, session: format!("http://127.0.0.1:{port}"), _profile: profile };
        let capabilities = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}}});
        let made = browser.command("/session", &capabilities);
        browser.session = format!("{}/session/{}", browser.session, made["sessionId"].as_str().unwrap());
        Some(browser)
    }

    /// The value that a command answers with.
    fn command(&self, path: &str, body: &Value) -> Value {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut reply =
            agent.post(&format!("{}{path}", self.session)).send(body.to_string().as_bytes()).unwrap();
        let text = reply.body_mut().read_to_string().unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        assert!(reply.status().is_success(), "{path}: {json}");
        json["value"].clone()
    }

    fn run(&self, script: &str) -> Value {
        self.command("/execute/sync", &json!({"script": script, "args": []}))
    }

    /// Waits until a script gives something that is true.
    fn wait(&self, script: &str) -> Value {
        let begin = Instant::now();
        loop {
            let value = self.run(script);
            if value.as_bool().unwrap_or(!value.is_null()) {
                return value;
            }
            let page = || self.run("return document.body.innerText");
            assert!(begin.elapsed() < Duration::from_secs(60), "{script}: {}", page());
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    fn element(&self, selector: &str) -> String {
        let found = self.command("/element", &json!({"using": "css selector", "value": selector}));
        found[ELEMENT].as_str().unwrap().to_owned()
    }

    fn keys(&self, selector: &str, text: &str) {
        let element = self.element(selector);
        self.command(&format!("/element/{element}/value"), &json!({"text": text}));
    }

    fn click(&self, selector: &str) {
        let element = self.element(selector);
        self.command(&format!("/element/{element}/click"), &json!({}));
    }

    /// What the page complained of.
    fn complaints(&self) -> Vec<String> {
        let log = self.command("/se/log", &json!({"type": "browser"}));
        log.as_array().unwrap().iter().map(|entry| entry["message"].as_str().unwrap().to_owned()).collect()
    }

    /// A picture of the page, as PNG in base64.
    fn picture(&self) -> String {
        let agent: ureq::Agent = ureq::Agent::new_with_defaults();
        let text = agent
            .get(&format!("{}/screenshot", self.session))
            .call()
            .unwrap()
            .body_mut()
            .read_to_string()
            .unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        json["value"].as_str().unwrap().to_owned()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = ureq::delete(&self.session).call();
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

const LAST: &str = "document.querySelector('#talk article:last-child')";

#[test]
fn a_conversation_in_a_browser() {
    let Some(browser) = Browser::start(false) else { return };
    let server = Server::start(&[]);
    browser.command("/url", &json!({"url": server.url}));
    browser.wait("return document.querySelector('#model').textContent.includes('8 ranks')");
    // Greedy, by the settings, with the keyboard alone.
    browser.keys("#text", "\u{E009},");
    browser.wait("return document.querySelector('#settings').open");
    browser.keys("#temperature", "0");
    browser.keys("#temperature", ENTER);
    browser.wait("return !document.querySelector('#settings').open");
    browser.keys("#text", "What is 2+2? Answer briefly.");
    browser.keys("#text", ENTER);
    browser.wait("return !document.querySelector('#send').hidden && document.querySelector('.content')?.textContent === '4'");

    // Reasoning is folded away, and the figures are there.
    browser.click("#settings-open");
    browser.click("#thinking");
    browser.click("#settings button[value=close]");
    browser.keys("#text", "What is 37+48?\u{E008}\u{E007}\u{E008}");
    assert_eq!(
        browser.run("return document.querySelector('#text').value"),
        "What is 37+48?\n",
        "Shift+Enter is a new line"
    );
    browser.keys("#text", ENTER);
    browser.wait(&format!("return {LAST}.querySelector('.content')?.textContent === '37 + 48 = 85.'"));
    let thought = browser.run(&format!("const d = {LAST}.querySelector('details'); return [d.hidden, d.open, d.querySelector('span').textContent]"));
    assert_eq!(thought, json!([false, false, "7 + 8 = 15, carry 1. 3 + 4 + 1 = 8. So 85."]));
    browser.wait(&format!(
        "return /^\\d+ tokens · [\\d.]+ tokens\\/s$/.test({LAST}.querySelector('.facts').textContent)"
    ));
    let picture = browser.picture();
    assert!(picture.len() > 10_000, "an empty page");
    if let Ok(path) = std::env::var("SHARDMILL_SCREENSHOT") {
        std::fs::write(path, picture).unwrap();
    }

    // A long answer is stopped, once with the button and once with a key; the engine notices.
    browser.click("#clear");
    browser.run("document.querySelector('#thinking').checked = false");
    for with_key in [false, true] {
        browser.keys(
            "#text",
            "In the beginning God created the heaven and the earth. And the earth was without form",
        );
        browser.run("window.before = fetch; window.fetch = (url, options) => { if (options.body) { const body = JSON.parse(options.body); body.ignore_eos = true; options.body = JSON.stringify(body); } return window.before(url, options); }");
        browser.keys("#text", ENTER);
        browser.wait(&format!("return ({LAST}.querySelector('.content')?.textContent ?? '').length > 20"));
        if with_key {
            browser.keys("#text", ESCAPE);
        } else {
            browser.click("#stop");
        }
        browser.wait(&format!("return {LAST}.querySelector('.facts').textContent.endsWith('stopped')"));
        browser.run("window.fetch = window.before");
        let begin = Instant::now();
        while server.metric("vllm:num_requests_running") > 0.0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "the answer goes on for nobody");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    // What a model or a user says is text.
    browser.click("#clear");
    browser.keys("#text", "<img src=x onerror=alert(1)>\u{E007}");
    browser.wait("return document.querySelectorAll('#talk article').length === 2 && !document.querySelector('#send').hidden");
    assert_eq!(browser.run("return document.querySelectorAll('#talk img').length"), 0);
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn the_page_asks_for_a_key_and_shows_refusals_in_the_dark() {
    let Some(browser) = Browser::start(true) else { return };
    let server = Server::start(&["--api-key", "secret", "--max-model-len", "32"]);
    browser.command("/url", &json!({"url": server.url}));
    browser.wait("return document.querySelector('#model').textContent.includes('API key')");
    browser.click("#settings-open");
    browser.keys("#key", "secret");
    browser.click("#settings button[value=close]");
    browser.wait("return document.querySelector('#model').textContent.includes('32 tokens')");
    browser.keys("#text", &"word ".repeat(60));
    browser.keys("#text", ENTER);
    browser.wait(&format!(
        "return {LAST}.classList.contains('error') && {LAST}.textContent.includes('context')"
    ));
    let brightness = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)";
    assert!(browser.run(brightness).as_u64().unwrap() < 200, "dark where that is preferred");
    if let Ok(path) = std::env::var("SHARDMILL_SCREENSHOT") {
        std::fs::write(path + ".dark", browser.picture()).unwrap();
    }
}

#[test]
fn the_page_fetches_nothing_from_elsewhere() {
    let server = Server::start(&[]);
    let page = server.get_text("/");
    for elsewhere in ["http://", "https://", "//cdn", "@import", "url("] {
        assert!(!page.contains(elsewhere), "{elsewhere}");
    }
    assert!(!page.contains("innerHTML") && page.contains("textContent"));
}
