//! The grammar of an answer that must call tools.

use crate::constraint::Shape;
use crate::text::ToolFormat;
use crate::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::fmt::Write;

/// An answer that is one call of these tools, or one or more. An error is one line.
pub(super) fn shape(
    format: &ToolFormat,
    tools: &[&Value],
    one: bool,
    tokenizer: &Tokenizer,
) -> Result<Shape, String> {
    let token = |marker: &str| match tokenizer.token_id(marker) {
        Some(id) if tokenizer.is_added(id) => Ok(format!("<[{id}]>")),
        _ => {
            Err(format!("{marker} is no token of this model, so calls cannot be made certain: use \"auto\""))
        }
    };
    let many = if one { "" } else { "+" };
    let mut grammar = String::new();
    let calls = (0..tools.len()).map(|at| format!("call_{at}")).collect::<Vec<_>>().join(" | ");
    match format {
        ToolFormat::ArgTags => {
            let [call, call_end, key, key_end, value, value_end] = format.markers()[..] else {
                return Err("the format has other markers".to_owned());
            };
            let _ =
                writeln!(grammar, "start: call{many}\ncall: {} ({calls}) {}", token(call)?, token(call_end)?);
            let _ = writeln!(grammar, "TEXT: /(.|\\n)*/");
            for (at, tool) in tools.iter().enumerate() {
                let mut arguments = String::new();
                for (number, (name, schema, is_required)) in parameters(tool).into_iter().enumerate() {
                    let optional = if is_required { "" } else { "?" };
                    let _ = write!(arguments, " arg_{at}_{number}{optional}");
                    let typed = if schema["type"] == "string" && schema.get("enum").is_none() {
                        "TEXT".to_owned()
                    } else if let Some(texts) = texts(schema) {
                        format!("({})", texts.iter().map(|text| quote(text)).collect::<Vec<_>>().join(" | "))
                    } else {
                        format!("%json {schema}")
                    };
                    let _ = writeln!(
                        grammar,
                        "arg_{at}_{number}: {} {} {} {} {typed} {}",
                        token(key)?,
                        quote(name),
                        token(key_end)?,
                        token(value)?,
                        token(value_end)?
                    );
                }
                let _ = writeln!(grammar, "call_{at}: {}{arguments}", quote(name_of(tool)));
            }
        }
        ToolFormat::Sections(_) => {
            let [begin, call, arguments, call_end, end] = format.markers()[..] else {
                return Err("the format has other markers".to_owned());
            };
            let [begin, call, arguments, call_end, end] =
                [token(begin)?, token(call)?, token(arguments)?, token(call_end)?, token(end)?];
            let _ = writeln!(grammar, "start: {begin} call{many} {end}\ncall: {call} ({calls}) {call_end}");
            for (at, tool) in tools.iter().enumerate() {
                let schema = match &tool["function"]["parameters"] {
                    Value::Object(schema) => Value::from(schema.clone()),
                    _ => json!({"type": "object", "additionalProperties": false}),
                };
                let _ = writeln!(grammar, "call_{at}: {} {arguments} %json {schema}", quote(name_of(tool)));
            }
        }
        ToolFormat::Dsml => return Err("only \"auto\" and \"none\" are supported for this model".to_owned()),
    }
    Ok(Shape::Lark(grammar))
}

fn name_of(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

/// Name, schema and whether it is required, in the schema's order.
fn parameters(tool: &Value) -> Vec<(&str, &Value, bool)> {
    let schema = &tool["function"]["parameters"];
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    let properties = schema["properties"].as_object().into_iter().flatten();
    properties
        .map(|(name, schema)| {
            let is_required = required.iter().any(|required| required == name.as_str());
            (name.as_str(), schema, is_required)
        })
        .collect()
}

/// The values of an enumeration of strings.
fn texts(schema: &Value) -> Option<Vec<&str>> {
    let values = schema.get("enum")?.as_array()?;
    values.iter().map(Value::as_str).collect()
}

fn quote(text: &str) -> String {
    Value::from(text).to_string()
}
