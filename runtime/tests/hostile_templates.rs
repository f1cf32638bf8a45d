//! Templates that a file could bring along to take the program down: each ends in an error or a prompt, in bounded memory
//! and time. Every one runs in a process of its own, since what it must not do is end the process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use runtime::dialect::Dialect;
use runtime::template::ChatInput;
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};

/// Name and text.
fn templates() -> Vec<(&'static str, String)> {
    let nested = |open: &str, middle: &str, close: &str, depth: usize| {
        format!("{}{middle}{}", open.repeat(depth), close.repeat(depth))
    };
    vec![
        ("not", format!("{{{{ {} x }}}}", "not ".repeat(16_000))),
        ("minus", format!("{{{{ {}1 }}}}", "- ".repeat(30_000))),
        ("parentheses", format!("{{{{ {} }}}}", nested("(", "1", ")", 30_000))),
        ("lists", format!("{{{{ {} }}}}", nested("[", "", "]", 30_000))),
        ("sum", format!("{{{{ 1{} }}}}", "+x".repeat(30_000))),
        ("concatenation", format!("{{{{ 1{} }}}}", "~x".repeat(30_000))),
        ("attributes", format!("{{{{ a{} }}}}", ".a".repeat(30_000))),
        ("calls", format!("{{{{ a{} }}}}", "()".repeat(30_000))),
        ("filters", format!("{{{{ 1{} }}}}", "|int".repeat(16_000))),
        ("comparisons", format!("{{{{ 1{} }}}}", "<x".repeat(30_000))),
        ("choices", format!("{{{{ {}1 }}}}", "x if y else ".repeat(5_000))),
        ("conditions", nested("{% if 1 %}", "x", "{% endif %}", 2_900)),
        ("alternatives", format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(5_000))),
        ("loops", nested("{% for a in [1] %}", "x", "{% endfor %}", 2_000)),
        ("blocks", nested("{% with %}", "x", "{% endwith %}", 2_800)),
        ("macro", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".to_owned()),
        ("mutual macros", "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned()),
        ("indent", "{{ 'a\\nb' | indent(10000000000) }}".to_owned()),
        ("tojson indent", "{{ [1] | tojson(indent=10000000000) }}".to_owned()),
        ("tojson deep indent", format!("{{% set x = namespace(v=[]) %}}{{% for i in range(20000) %}}{{% set x.v = [x.v] %}}{{% endfor %}}{{{{ x.v | tojson(indent='{}') }}}}", " ".repeat(1000))),
        ("format", "{{ '%10000000000d' | format(1) }}".to_owned()),
        ("format precision", "{{ '%.10000000000f' | format(1.5) }}".to_owned()),
        ("format star", "{{ '%*d' | format(10000000000, 1) }}".to_owned()),
        ("format method by argument", "{{ '{:>{}}'.format(1, 10000000000) }}".to_owned()),
        (
            "deepest value",
            "{% set x = namespace(v=[]) %}{% for i in range(99) %}{% for i in range(99999) %}{% set x.v = [x.v] %}{% endfor %}{% endfor %}"
                .to_owned(),
        ),
        (
            "deepest printed",
            "{% set x = namespace(v=[]) %}{% for i in range(6) %}{% for i in range(99999) %}{% set x.v = [x.v] %}{% endfor %}{% endfor %}{{ x.v }}"
                .to_owned(),
        ),
        ("format method", "{{ '{:>10000000000}'.format(1) }}".to_owned()),
        ("repetition", "{{ 'a' * 10000000000 }}".to_owned()),
        ("repeated list", "{{ ([1] * 10000000000) | list | length }}".to_owned()),
        ("repetition of repetitions", "{% set x = 'a' * 100000 %}{% set x = x * 100000 %}{{ x }}".to_owned()),
        ("doubling", format!("{{% set x = namespace(v='aaaaaaaa') %}}{{% for i in range({}) %}}{{% set x.v = x.v ~ x.v %}}{{% endfor %}}{{{{ x.v | length }}}}", 40)),
        ("replace", "{% set x = namespace(v='aaaaaaaa') %}{% for i in range(12) %}{% set x.v = x.v.replace('a', x.v) %}{% endfor %}{{ x.v | length }}".to_owned()),
        ("join", "{% set x = 'a' * 60000 %}{{ range(60000) | join(x) | length }}".to_owned()),
        ("range", "{% for i in range(10000000000) %}{% endfor %}".to_owned()),
        ("loops in loops", "{% for i in range(9000) %}{% for i in range(9000) %}{% for i in range(9000) %}x{% endfor %}{% endfor %}{% endfor %}".to_owned()),
        ("set block", "{% set x %}{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endset %}{{ x | length }}".to_owned()),
        ("deep value", "{% set x = namespace(v=[]) %}{% for i in range(99999) %}{% set x.v = [x.v] %}{% endfor %}{{ x.v }}".to_owned()),
        ("deep tojson", "{% set x = namespace(v=[]) %}{% for i in range(99999) %}{% set x.v = [x.v] %}{% endfor %}{{ x.v | tojson }}".to_owned()),
        ("deep dropped", "{% set x = namespace(v=[]) %}{% for i in range(99999) %}{% set x.v = [x.v] %}{% endfor %}".to_owned()),
        ("deep compared", "{% set x = namespace(v=[], w=[]) %}{% for i in range(99999) %}{% set x.v = [x.v] %}{% set x.w = [x.w] %}{% endfor %}{{ x.v == x.w }}".to_owned()),
        ("batch", "{{ [1] | batch(10000000000, 0) | list | length }}".to_owned()),
        ("slice", "{{ [1] | slice(10000000000) | list | length }}".to_owned()),
        ("time", format!("{{{{ strftime_now('{}') }}}}", "%10000000000Y".repeat(3))),
        ("large", "x".repeat(3_000_000)),
        ("quotes", format!("{{{{ '{}' }}}}", "'".repeat(9))),
    ]
}

#[test]
fn none_ends_the_process() {
    let mut faults = Vec::new();
    for (at, (name, _)) in templates().iter().enumerate() {
        let begin = Instant::now();
        let limited =
            "ulimit -v 6000000; exec \"$0\" --exact one_template --ignored --nocapture --test-threads 1";
        let output = Command::new("sh")
            .args(["-c", limited])
            .arg(std::env::current_exe().unwrap())
            .env("TEMPLATE", at.to_string())
            .output()
            .unwrap();
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let line = said.lines().find(|line| !line.is_empty()).unwrap_or_default().to_owned();
            faults.push(format!("{name}: {}: {line}", output.status));
        }
        let took = begin.elapsed();
        if took > Duration::from_secs(20) {
            faults.push(format!("{name}: took {took:?}"));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
#[ignore = "one step of the test above, in its own process"]
fn one_template() {
    let Ok(at) = std::env::var("TEMPLATE") else { return };
    let (name, text) = templates().swap_remove(at.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "generation_config.json"] {
        std::fs::copy(common::text_files().join(file), dir.path().join(file)).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), text).unwrap();
    // As large as the stacks of the server's threads.
    let thread = std::thread::Builder::new().stack_size(2 << 20);
    let path = dir.path().to_owned();
    let ended = thread.spawn(move || match Dialect::open(&path) {
        Err(error) => error.to_string(),
        Ok(dialect) => {
            let input =
                ChatInput { messages: vec![json!({"role": "user", "content": "x"})], ..ChatInput::default() };
            match dialect.render(&input, 4096).unwrap() {
                Ok(ids) => format!("{} ids", ids.len()),
                Err(error) => error.to_string(),
            }
        }
    });
    let said = ended.unwrap().join().unwrap();
    assert!(said.lines().count() <= 1 && said.len() < 2000, "{name}: {said}");
    eprintln!("{name}: {said}");
}
