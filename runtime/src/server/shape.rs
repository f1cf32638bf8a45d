//! `response_format` and vLLM's own ways to say what an answer must be.

use super::error::ApiError;
use super::fields::{Fields, wrong};
use super::known;
use crate::constraint::Shape;
use serde_json::Value;

/// Most alternatives of a choice.
const MAX_CHOICES: usize = 1024;

/// What the answer must be, and the field that says so; `None` where it may be anything.
pub(super) fn read(fields: &Fields<'_>) -> Result<Option<(String, Shape)>, ApiError> {
    let mut all = Vec::new();
    if let Some(format) = fields.fields("response_format")? {
        let shape = response_format(&format)?;
        all.extend(shape.map(|shape| ("response_format".to_owned(), shape)));
    }
    let outer = [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
    ];
    for (name, kind) in outer {
        all.extend(one(fields, name, kind)?.map(|shape| (fields.path(name), shape)));
    }
    if let Some(inner) = fields.fields("structured_outputs")? {
        known::STRUCTURED_OUTPUTS.check(&inner)?;
        for name in ["json", "regex", "choice", "grammar"] {
            all.extend(one(&inner, name, name)?.map(|shape| (inner.path(name), shape)));
        }
        if inner.boolean("json_object")? == Some(true) {
            all.push((inner.path("json_object"), Shape::JsonObject));
        }
    }
    match all.len() {
        0 | 1 => Ok(all.pop()),
        _ => Err(ApiError::field(all.swap_remove(1).0, format!("not together with {}: give one", all[0].0))),
    }
}

/// `{"type": "json_schema", "json_schema": {"name": .., "schema": ..}}`, as chat completions have it.
pub(super) fn response_format(format: &Fields<'_>) -> Result<Option<Shape>, ApiError> {
    let inner = format.fields("json_schema")?;
    if let Some(inner) = &inner {
        inner.string("name")?;
        inner.string("description")?;
        inner.boolean("strict")?;
        if inner.fields("schema")?.is_none() {
            return Err(ApiError::field(inner.path("schema"), "missing: expected a JSON schema"));
        }
    }
    match format.string("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Shape::JsonObject)),
        Some("json_schema") => {
            // The responses interface has it without the inner object.
            let inner = match inner {
                Some(inner) => inner,
                None if format.value("schema").is_some() => format.clone(),
                None => {
                    return Err(ApiError::field(format.path("json_schema"), "missing: expected an object"));
                }
            };
            let schema = inner.value("schema").expect("it was looked for above");
            schema_shape(&inner.path("schema"), schema).map(Some)
        }
        found => {
            let expected = "expected \"text\", \"json_object\" or \"json_schema\"";
            let message = match found {
                Some(other) => format!("{expected}, found {other:?}"),
                None => format!("missing: {expected}"),
            };
            Err(ApiError::field(format.path("type"), message))
        }
    }
}

fn one(fields: &Fields<'_>, name: &str, kind: &str) -> Result<Option<Shape>, ApiError> {
    let path = fields.path(name);
    Ok(match kind {
        "json" => match fields.value(name) {
            None => None,
            Some(Value::String(text)) => {
                let schema = serde_json::from_str(text)
                    .map_err(|error| ApiError::field(&path, format!("expected a JSON schema: {error}")))?;
                Some(schema_shape(&path, &schema)?)
            }
            Some(schema) => Some(schema_shape(&path, schema)?),
        },
        "regex" => fields.string(name)?.map(|regex| Shape::Regex(regex.to_owned())),
        "grammar" => fields.string(name)?.map(|grammar| Shape::Lark(grammar.to_owned())),
        _ => match fields.array(name)? {
            None => None,
            Some(choices) if choices.is_empty() || choices.len() > MAX_CHOICES => {
                return Err(ApiError::field(path, format!("expected 1 to {MAX_CHOICES} strings")));
            }
            Some(choices) => {
                let text = |choice: &Value| match choice.as_str() {
                    Some(text) if !text.is_empty() => Ok(text.to_owned()),
                    _ => Err(wrong(&path, "a list of strings that are not empty", choice)),
                };
                Some(Shape::Choice(choices.iter().map(text).collect::<Result<_, _>>()?))
            }
        },
    })
}

fn schema_shape(path: &str, schema: &Value) -> Result<Shape, ApiError> {
    match schema {
        Value::Object(_) => Ok(Shape::JsonSchema(schema.clone())),
        other => Err(wrong(path, "a JSON schema, which is an object", other)),
    }
}
