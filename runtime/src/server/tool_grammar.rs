//! The grammar of an answer that must call tools.

use crate::constraint::Shape;
use crate::text::{ToolFormat, is_bare_text};
use crate::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::fmt::Write;

/// Longest grammar, in bytes. Each parameter has the definitions that it refers to, so it can be far longer than the request.
const LONGEST: usize = 4 << 20;

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
                    // The reader takes it the same way, or quotes would be read as a part of the text.
                    let typed = match (is_bare_text(schema), texts(schema)) {
                        (true, None) => "TEXT".to_owned(),
                        (true, Some(texts)) => {
                            format!(
                                "({})",
                                texts.iter().map(|text| quote(text)).collect::<Vec<_>>().join(" | ")
                            )
                        }
                        (false, _) => format!("%json {}", with_definitions(schema, tool)),
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
                    if grammar.len() > LONGEST {
                        return Err(
                            "the definitions of the tools' schemas are too large to be held to".to_owned()
                        );
                    }
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

/// The strings that a schema lists.
fn texts(schema: &Value) -> Option<Vec<&str>> {
    match schema["const"].as_str() {
        Some(text) => Some(vec![text]),
        None => Some(schema["enum"].as_array()?.iter().filter_map(Value::as_str).collect()),
    }
}

/// The schema of a parameter with what its references may lead to, which stands beside all parameters.
fn with_definitions(schema: &Value, tool: &Value) -> Value {
    if !schema.to_string().contains("\"$ref\"") {
        return schema.clone();
    }
    let mut schema = schema.clone();
    let Some(own) = schema.as_object_mut() else { return schema };
    for name in ["$defs", "definitions"] {
        if let Some(definitions) = tool["function"]["parameters"].get(name) {
            own.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    schema
}

fn quote(text: &str) -> String {
    Value::from(text).to_string()
}
