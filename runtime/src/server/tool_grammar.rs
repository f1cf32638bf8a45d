//! The grammar of an answer that must call tools.

use super::fields::brief;
use crate::constraint::Shape;
use crate::text::{ToolFormat, is_bare_text};
use crate::tokenizer::Tokenizer;
use llguidance::regex_to_lark;
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
                let parameters = parameters(tool, &format.markers())
                    .map_err(|error| format!("{}: {error}", name_of(tool)))?;
                for (number, (name, schema, is_required)) in parameters.into_iter().enumerate() {
                    let optional = if is_required { "" } else { "?" };
                    let _ = write!(arguments, " arg_{at}_{number}{optional}");
                    // The reader takes it the same way, or quotes would be read as a part of the text.
                    let typed = match (is_bare_text(schema), texts(schema)) {
                        (true, None) => match bare_text(schema)
                            .map_err(|error| format!("{}: {name}: {error}", name_of(tool)))?
                        {
                            None => "TEXT".to_owned(),
                            Some(bounds) => {
                                let terminal = format!("TEXT_{at}_{number}");
                                let _ = writeln!(grammar, "{terminal}: {bounds}");
                                terminal
                            }
                        },
                        (true, Some(texts)) if texts.is_empty() => {
                            return Err(format!("{}: {name}: enum: there is no string in it", name_of(tool)));
                        }
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

/// What the schema of all parameters can say and a grammar of one parameter after the other does not hold.
const NOT_HELD: [&str; 14] = [
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "enum",
    "const",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "propertyNames",
    "minProperties",
];

/// Name, schema and whether it is required, in the schema's order.
fn parameters<'a>(tool: &'a Value, markers: &[&str]) -> Result<Vec<(&'a str, &'a Value, bool)>, String> {
    let schema = &tool["function"]["parameters"];
    if let Some(name) = NOT_HELD.iter().find(|name| !schema[**name].is_null()) {
        return Err(format!("parameters.{name} cannot be held to: leave it out, or use \"auto\""));
    }
    let properties = match &schema["properties"] {
        Value::Null => Vec::new(),
        Value::Object(properties) => properties.iter().collect(),
        other => return Err(format!("parameters.properties: expected an object, found {}", brief(other))),
    };
    let required = match &schema["required"] {
        Value::Null => &[][..],
        Value::Array(names) => names,
        other => {
            return Err(format!("parameters.required: expected a list of names, found {}", brief(other)));
        }
    };
    for name in required {
        if !properties.iter().any(|(property, _)| name == property.as_str()) {
            return Err(format!("parameters.required: {} is none of the properties", brief(name)));
        }
    }
    for (name, _) in &properties {
        if name.trim() != name.as_str() || markers.iter().any(|marker| name.contains(marker)) {
            return Err(format!("{name:?} could not be read where the model writes it: give another name"));
        }
    }
    let with_need = |(name, schema): (&'a String, &'a Value)| {
        (name.as_str(), schema, required.iter().any(|one| one == name.as_str()))
    };
    Ok(properties.into_iter().map(with_need).collect())
}

/// An error about a line of the grammar of these tools, with the names of tool and parameter in place of the line.
pub(super) fn with_names(message: &str, shape: &Shape, tools: &[&Value]) -> String {
    let found = || {
        let (before, rest) = message.split_once("at ")?;
        let (line, rest) = rest.split_once('(')?;
        let (_, why) = rest.split_once("): ")?;
        let Shape::Lark(grammar) = shape else { return None };
        let (rule, _) = grammar.lines().nth(line.parse::<usize>().ok()?.checked_sub(1)?)?.split_once(':')?;
        let mut numbers = rule.split('_').skip(1).map(str::parse::<usize>);
        let tool = tools.get(numbers.next()?.ok()?)?;
        let parameter =
            tool["function"]["parameters"]["properties"].as_object()?.keys().nth(numbers.next()?.ok()?)?;
        Some(format!("{before}{}: {parameter}: {why}", name_of(tool)))
    };
    found().unwrap_or_else(|| message.to_owned())
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

const DATE: &str = "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))";
const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";

/// What schemas of dates, times and keys, which client libraries write, say of a text.
const FORMATS: [(&str, &[&str]); 4] = [
    ("date", &[DATE]),
    ("time", &[TIME]),
    ("date-time", &[DATE, "[tT]", TIME]),
    ("uuid", &["[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"]),
];

/// What a schema says of a string that is written without quotes, as the terminal of a grammar; `None` where it says nothing.
fn bare_text(schema: &Value) -> Result<Option<String>, String> {
    let mut all = Vec::new();
    let length = |name: &str| match &schema[name] {
        Value::Null => Ok(None),
        // As the grammars of strings in JSON count them.
        found => match found.as_u64().and_then(|length| u32::try_from(length).ok()) {
            Some(length) => Ok(Some(length)),
            None => Err(format!("{name}: expected a whole number below 2^32, found {found}")),
        },
    };
    match (length("minLength")?, length("maxLength")?) {
        (None | Some(0), None) => {}
        (least, Some(most)) if least > Some(most) => return Err("minLength is above maxLength".to_owned()),
        (least, most) => {
            let most = most.map_or(String::new(), |most| most.to_string());
            all.push(format!("/(?s:.){{{},{most}}}/", least.unwrap_or(0)));
        }
    }
    match &schema["pattern"] {
        Value::Null => {}
        Value::String(pattern) => all.push(format!("/{}/", whole_text(pattern)?)),
        other => return Err(format!("pattern: expected a string, found {other}")),
    }
    if let Some(format) = schema["format"].as_str() {
        let known = FORMATS.iter().find(|(name, _)| *name == format).ok_or_else(|| {
            format!("format: {format:?} cannot be held to: give a pattern, or use \"auto\"")
        })?;
        all.push(format!("/{}/", known.1.concat()));
    }
    Ok((!all.is_empty()).then(|| all.join(" & ")))
}

/// A pattern, which may stand anywhere in a text, as one of the whole text.
fn whole_text(pattern: &str) -> Result<String, String> {
    let (mut escaped, mut in_class, mut depth, mut alternatives, mut last_is_end) =
        (false, false, 0, false, false);
    for c in pattern.chars() {
        last_is_end = c == '$' && !escaped && !in_class;
        if escaped {
            escaped = false;
            continue;
        }
        match c {
            '\\' => escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => depth += 1,
            ')' if !in_class => depth -= 1,
            '|' if !in_class && depth == 0 => alternatives = true,
            _ => {}
        }
    }
    let begin = pattern.starts_with('^');
    if alternatives && (begin || last_is_end) {
        return Err(
            "pattern: ^ and $ beside | are not supported: put the alternatives into parentheses".to_owned()
        );
    }
    let inner = pattern.strip_prefix('^').unwrap_or(pattern);
    let inner = if last_is_end { inner.strip_suffix('$').unwrap_or(inner) } else { inner };
    let any = |is_bound: bool| if is_bound { "" } else { "(?s:.*)" };
    Ok(format!("{}(?:{}){}", any(begin), regex_to_lark(inner, "dw"), any(last_is_end)))
}

fn quote(text: &str) -> String {
    Value::from(text).to_string()
}
