//! Templates that a file could bring along to take the program down: each ends in an error or a prompt, in bounded memory
//! and processor time. Every one runs in a process of its own, since what it must not do is end the process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use runtime::dialect::Dialect;
use runtime::template::ChatInput;
use serde_json::json;
use std::process::Command;

/// Name and text.
fn templates() -> Vec<(&'static str, String)> {
    let nested = |open: &str, middle: &str, close: &str, depth: usize| {
        format!("{}{middle}{}", open.repeat(depth), close.repeat(depth))
    };
    // What `step` makes of `v`, sixty times over, and then `last`.
    let doubled = |step: &str, last: &str| {
        format!(
            "{{% set ns = namespace(v=[1]) %}}{{% for i in range(60) %}}{{% set v = ns.v %}}{{% set ns.v = {step} %}}{{% endfor %}}{{% set v = ns.v %}}{{{{ {last} }}}}"
        )
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
        ("list doubling", doubled("v + v", "v | length")),
        ("list doubling printed", doubled("v + v", "v")),
        ("list doubling in lines", format!("{{% set v = [1] %}}{}{{{{ v }}}}", "{% set v = v + v %}".repeat(60))),
        ("list trebling", doubled("v + v + v", "v | join")),
        ("lists in lists", doubled("[v, v]", "v")),
        ("lists in lists as text", doubled("[v, v]", "v ~ '' | length")),
        ("lists in lists as a string", doubled("[v, v]", "v | string | length")),
        ("lists in lists as JSON", doubled("[v, v]", "v | tojson | length")),
        ("lists in lists joined", doubled("[v, v]", "[v] | join | length")),
        ("lists in lists upper", doubled("[v, v]", "v | upper | length")),
        ("lists in lists in a string", doubled("[v, v]", "v in 'a'")),
        ("lists in lists pretty", doubled("[v, v]", "v | pprint | length")),
        ("lists in lists formatted", doubled("[v, v]", "'%s' | format(v) | length")),
        ("lists in lists by method", doubled("[v, v]", "'{}'.format(v) | length")),
        ("lists in lists compared", doubled("[v, v]", "v == [v[0], v[1]]")),
        ("lists in lists as keys", doubled("[v, v]", "{v: 1}")),
        ("lists in lists unique", doubled("[v, v]", "[v, v, [v]] | unique | list | length")),
        ("tuples in tuples", doubled("(v, v)", "v")),
        ("tuple doubling", doubled("(v if v is iterable and v is not mapping else (1,)) + (1,)", "v")),
        ("maps in maps", doubled("{'a': v, 'b': v}", "v")),
        ("maps by function", doubled("dict(a=v, b=v)", "v")),
        ("chains", doubled("v | chain(v)", "v | list | length")),
        ("zips", doubled("v | zip(v)", "v")),
        ("repetitions", doubled("v * 100", "v")),
        ("repetitions of items", doubled("[v] * 100", "v")),
        ("strings doubled", doubled("v ~ v", "v | length")),
        ("strings added", doubled("'a' if v == [1] else v + v", "v | length")),
        ("strings joined", doubled("[v, v] | join", "v | length")),
        ("strings formatted", doubled("'%s%s' | format(v, v)", "v | length")),
        ("strings formatted by method", doubled("'{}{}'.format(v, v)", "v | length")),
        ("strings replaced", doubled("('a' ~ v).replace('a', 'a' ~ v)", "v | length")),
        ("strings escaped", doubled("v | string | tojson", "v | length")),
        ("strings urlencoded", doubled("('%' ~ v) | urlencode", "v | length")),
        ("strings split", doubled("('a ' ~ v ~ ' ' ~ v).split()", "v | length")),
        ("strings as lists", doubled("(v | string ~ v | string) | list", "v | length")),
        ("strings by macro", "{% macro f(v, n) %}{% if n > 0 %}{{ f(v ~ v, n - 1) }}{{ f(v ~ v, n - 1) }}{% else %}{{ v }}{% endif %}{% endmacro %}{{ f('aaaaaaaa', 40) }}".to_owned()),
        ("strings by set blocks", format!("{{% set v = 'aaaaaaaa' %}}{}{{{{ v | length }}}}", "{% set v %}{{ v }}{{ v }}{% endset %}".repeat(60))),
        ("strings by filter blocks", format!("{}a{}", "{% filter replace('a', 'aaaaaaaaaaaaaaaa') %}".repeat(30), "{% endfilter %}".repeat(30))),
        ("namespaces in namespaces", format!("{}{{{{ n0 }}}}", (0..60).rev().map(|at| format!("{{% set n{at} = namespace() %}}{{% set n{at}.v = [n{0} , n{0}] %}}", at + 1)).collect::<String>())),
        ("namespaces filled late", format!("{}{}{{{{ a59 }}}}", (0..60).map(|at| format!("{{% set n{at} = namespace() %}}{{% set a{at} = [n{at}, n{at}] %}}")).collect::<String>(), (1..60).rev().map(|at| format!("{{% set n{at}.v = a{} %}}", at - 1)).collect::<String>())),
        ("a namespace in itself", "{% set n = namespace() %}{% set n.v = n %}{{ n }}".to_owned()),
        ("a namespace in its list", "{% set n = namespace() %}{% set n.v = [n] %}{{ n }}".to_owned()),
        ("constants added", format!("{{{{ [1] * 100000000{} }}}}", " + [1] * 100000000".repeat(60))),
        ("constants by power", format!("{{{{ [1] * 10 ** 8{} }}}}", " + [1] * 10 ** 8".repeat(60))),
        ("constants compared", format!("{{{{ {} }}}}", "[1] * 99999999 == [1] * 99999999, ".repeat(900))),
        ("constants multiplied", format!("{{{{ [1]{} }}}}", " * 10".repeat(60))),
        ("constants in brackets", format!("{{{{ {}1{} * 9 }}}}", "[".repeat(9000), "] * 9".repeat(9000))),
        ("itself taken in", "{% include 'chat_template.jinja' %}".to_owned()),
        ("itself imported", "{% import 'chat_template.jinja' as x %}{{ x }}".to_owned()),
        ("blocks", "{% set ns = namespace(v=[1]) %}{% block a %}{% for i in range(60) %}{% set ns.v = ns.v + ns.v %}{% endfor %}{{ ns.v }}{% endblock %}".to_owned()),
        ("large", "x".repeat(3_000_000)),
        ("quotes", format!("{{{{ '{}' }}}}", "'".repeat(9))),
    ]
}

#[test]
fn none_ends_the_process() {
    let mut faults = Vec::new();
    for (at, (name, _)) in templates().iter().enumerate() {
        let limited = "ulimit -v 4000000; ulimit -t 60; exec \"$0\" --exact one_template --ignored --nocapture --test-threads 1";
        let output = Command::new("sh")
            .args(["-c", limited])
            .arg(std::env::current_exe().unwrap())
            .env("TEMPLATE", at.to_string())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        eprint!("{said}");
        if !output.status.success() {
            let line = said.lines().find(|line| !line.is_empty()).unwrap_or_default().to_owned();
            faults.push(format!("{name}: {}: {line}", output.status));
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
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("unknown").trim();
    eprintln!("{name}: {most}: {said}");
    let kilobytes: Option<u64> = most.split(' ').next().and_then(|number| number.parse().ok());
    assert!(kilobytes.is_none_or(|kilobytes| kilobytes < 400_000), "{name}: {most}");
}
