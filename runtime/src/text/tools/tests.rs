use super::*;
use serde_json::json;

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
            "maybe": {"type": ["string", "null"]}, "list": {"type": "array"}}}}}),
        json!({"type": "function", "function": {"name": "now"}}),
    ]
}

/// An answer's content and its calls: id, name, arguments.
type Answer = (String, Vec<(Option<String>, String, String)>);

fn read_pieces<'a>(tools: &Arc<Tools>, pieces: impl IntoIterator<Item = &'a str>) -> Answer {
    let mut parser = ToolCalls::new(Arc::clone(tools));
    let mut found: Vec<Found> = pieces.into_iter().map(|piece| parser.push(piece)).collect();
    found.push(parser.finish());
    let mut calls: Vec<(Option<String>, String, String)> = Vec::new();
    let mut content = String::new();
    for part in found {
        content.push_str(&part.content);
        for delta in part.calls {
            match delta {
                CallDelta::Begin { index, id, name } => {
                    assert_eq!(index, calls.len());
                    calls.push((id, name, String::new()));
                }
                CallDelta::Arguments { index, json } => {
                    assert_eq!(index + 1, calls.len());
                    calls[index].2.push_str(&json);
                }
            }
        }
    }
    (content, calls)
}

/// The same at every pair of splits.
fn check(format: &ToolFormat, text: &str, content: &str, calls: &[(&str, Value)]) {
    let tools = Arc::new(Tools::new(format.clone(), &tools(), Calls::Any));
    let borders: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
    let step = (borders.len() / 60).max(1);
    for &first in &borders {
        for &second in borders.iter().filter(|&&second| second >= first).step_by(step) {
            let (said, called) = read_pieces(&tools, [&text[..first], &text[first..second], &text[second..]]);
            assert_eq!(said, content, "{text:?} at {first}, {second}");
            let called: Vec<(&str, Value)> = called
                .iter()
                .map(|(_, name, json)| {
                    (name.as_str(), serde_json::from_str(json).unwrap_or_else(|_| json!(json)))
                })
                .collect();
            assert_eq!(called, calls, "{text:?} at {first}, {second}");
        }
    }
    let whole = read_pieces(&tools, [text]);
    assert_eq!(read_pieces(&tools, text.split_inclusive(|_| true)), whole, "character by character");
}

fn tag(text: &str, content: &str, calls: &[(&str, Value)]) {
    check(&ToolFormat::ArgTags, text, content, calls);
}

#[test]
fn tagged_arguments_have_the_types_of_the_schema() {
    tag(
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich \"x\" 😀</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        &[("get_weather", json!({"city": "Zürich \"x\" 😀", "days": 3}))],
    );
    // As the larger models write it, on lines.
    tag(
        "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n<arg_key>list</arg_key>\n<arg_value>[1, {\"a\": null}]</arg_value>\n</tool_call>\n<tool_call>now</tool_call>\n",
        "",
        &[("get_weather", json!({"city": "42", "list": [1, {"a": null}]})), ("now", json!({}))],
    );
    let one = |key: &str, value: &str, json: Value| {
        let text = format!(
            "<tool_call>get_weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
        );
        tag(&text, "", &[("get_weather", json!({key: json}))]);
    };
    one("city", " true\n", json!(" true\n"));
    one("city", "", json!(""));
    one("unit", "1", json!("1"));
    one("days", "True", json!(true));
    one("days", "three", json!("three"));
    one("maybe", "null", json!(null));
    one("maybe", "12", json!("12"));
    one("unknown", "12", json!(12));
    one("unknown", "None", json!(null));
    one("unknown", "a < b </arg_valu", json!("a < b </arg_valu"));
    one("unknown", "[1", json!("[1"));
    one("list", "12345678901234567890123", serde_json::from_str("12345678901234567890123").unwrap());
}

#[test]
fn text_around_calls_stays_and_white_space_between_them_goes() {
    tag("I look. <tool_call>now</tool_call>", "I look. ", &[("now", json!({}))]);
    tag("  plain < text <tool_cal", "  plain < text <tool_cal", &[]);
    tag(" \n ", " \n ", &[]);
    tag("\n\n<tool_call>now</tool_call>\n then", "\n then", &[("now", json!({}))]);
    tag("<tool_call>a\nb</tool_call> x", "<tool_call>a\nb</tool_call> x", &[]);
    tag("<tool_call><tool_call>x</tool_call>", "<tool_call><tool_call>x</tool_call>", &[]);
    tag("<tool_call></tool_call>", "<tool_call></tool_call>", &[]);
    let long = format!("<tool_call>{}", "word ".repeat(60));
    tag(&long, &long, &[]);
}

#[test]
fn what_is_cut_off_is_closed() {
    tag("<tool_call>now", "<tool_call>now", &[]);
    tag("<tool_call>now<arg_key>ci", "", &[("now", json!({}))]);
    tag("<tool_call>now<arg_key>city</arg_key>", "", &[("now", json!({}))]);
    let cut = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Os";
    tag(cut, "", &[("get_weather", json!({"city": "Os"}))]);
    let cut = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>da";
    tag(cut, "", &[("get_weather", json!({"city": "Oslo"}))]);
    let twice = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a</arg_value><arg_key>city</arg_key><arg_value>b</arg_value></tool_call>";
    tag(twice, "", &[("get_weather", json!({"city": "a"}))]);
    let garbage = "<tool_call>get_weather<arg_key>city</arg_key> \n<arg_value>a</arg_value> oh </tool_call>";
    tag(garbage, "", &[("get_weather", json!({"city": "a"}))]);
}

#[test]
fn sections_are_read_in_three_spellings() {
    let pipes = ToolFormat::Sections(PIPES);
    let calls = [("get_weather", json!({"city": "Oslo"})), ("now", json!({}))];
    check(
        &pipes,
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Oslo\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        &calls,
    );
    check(
        &pipes,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Oslo\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        &calls,
    );
    let bars = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Oslo\"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    check(&ToolFormat::Sections(BARS), bars, "", &calls);
    let tools = Arc::new(Tools::new(ToolFormat::Sections(BARS), &tools(), Calls::Any));
    let ids: Vec<Option<String>> = read_pieces(&tools, [bars]).1.into_iter().map(|(id, ..)| id).collect();
    assert_eq!(ids, [Some("functions.get_weather:0".to_owned()), Some("functions.now:1".to_owned())]);
    let cut = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{\"a\": 1";
    check(&pipes, cut, "", &[("now", json!("{\"a\": 1"))]);
}

#[test]
fn attributes_say_which_values_are_strings() {
    check(
        &ToolFormat::Dsml,
        "Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">12 \"</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">12</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Hm.\n\n",
        &[("get_weather", json!({"city": "12 \"", "days": 12})), ("now", json!({}))],
    );
}

#[test]
fn strings_come_as_they_are_written_and_one_call_may_be_all() {
    let tools = Arc::new(Tools::new(ToolFormat::ArgTags, &tools(), Calls::One));
    let mut parser = ToolCalls::new(tools);
    let json = |found: Found| -> String {
        let each = found.calls.into_iter().filter_map(|delta| match delta {
            CallDelta::Arguments { json, .. } => Some(json),
            CallDelta::Begin { .. } => None,
        });
        each.collect()
    };
    parser.push("<tool_call>get_weather<arg_key>city</arg_key><arg_value>");
    assert_eq!(json(parser.push("Os")), "{\"city\": \"Os");
    assert_eq!(json(parser.push("lo <")), "lo ");
    assert_eq!(json(parser.push("3\n")), "<3\\n");
    assert_eq!(json(parser.push("</arg_value></tool_call><tool_call>now</tool_call>")), "\"}");
    assert!(parser.is_done());
    assert_eq!(parser.push(" more"), Found::default());
    assert_eq!(parser.finish(), Found::default());
}

#[test]
fn templates_tell_the_format() {
    for (template, format) in [
        ("<tool_call>{{ f.name }}<arg_key>", Some(ToolFormat::ArgTags)),
        ("{{'<｜tool▁calls▁begin｜>'}}", Some(ToolFormat::Sections(PIPES))),
        ("<|tool_call_begin|>", Some(ToolFormat::Sections(BARS))),
        ("<｜DSML｜function_calls>", Some(ToolFormat::Dsml)),
        ("<tool_call>{\"name\"", None),
        ("", None),
    ] {
        assert_eq!(ToolFormat::of_template(template), format);
    }
}
