//! Messages and tools as templates take them: contents are strings, the arguments of tool calls are objects.

use super::error::ApiError;
use super::fields::{Fields, wrong};
use crate::text::{LONGEST_NAME, is_tool_name};
use serde_json::{Map, Value};

/// Reads `messages`.
pub(super) fn read(messages: &[Value]) -> Result<Vec<Value>, ApiError> {
    let each = messages.iter().enumerate();
    each.map(|(at, message)| read_message(&format!("messages[{at}]"), message)).collect()
}

fn read_message(path: &str, message: &Value) -> Result<Value, ApiError> {
    read_message_of(&Fields::at(path, message)?)
}

/// Reads one message.
pub(super) fn read_message_of(fields: &Fields<'_>) -> Result<Value, ApiError> {
    let role = match fields.string("role")? {
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        Some("developer") => "system",
        _ => {
            let expected = "expected one of \"system\", \"developer\", \"user\", \"assistant\" and \"tool\"";
            return Err(ApiError::field(fields.path("role"), expected));
        }
    };
    for name in ["name", "tool_call_id"] {
        fields.string(name)?;
    }
    let reasoning = fields.string("reasoning_content")?;
    // What else is there is the template's to know.
    let mut read = fields.map().clone();
    // vLLM's newer name for it.
    if let Some(reasoning) = fields.string("reasoning")?.filter(|_| reasoning.is_none()) {
        read.insert("reasoning_content".into(), reasoning.into());
    }
    read.insert("role".into(), role.into());
    read.insert("content".into(), text(fields, "content")?.into());
    if let Some(calls) = fields.array("tool_calls")? {
        let path = fields.path("tool_calls");
        let calls: Result<Vec<Value>, ApiError> = calls
            .iter()
            .enumerate()
            .map(|(at, call)| read_tool_call(&format!("{path}[{at}]"), call))
            .collect();
        read.insert("tool_calls".into(), calls?.into());
    }
    Ok(read.into())
}

/// The text of a field: a string, text parts joined, or nothing.
pub(super) fn text(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    let path = fields.path(name);
    match fields.value(name) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            parts.iter().enumerate().map(|(at, part)| part_text(&format!("{path}[{at}]"), part)).collect()
        }
        Some(other) => Err(wrong(&path, "a string, a list of text parts or null", other)),
    }
}

fn part_text<'a>(path: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    if let Value::String(text) = part {
        return Ok(text);
    }
    let fields = Fields::at(path, part)?;
    match fields.string("type")? {
        // The responses interface has a name for each side.
        Some("text" | "input_text" | "output_text") => (),
        Some(other) => {
            let message = format!("{other:?} is not supported: this model reads text");
            return Err(ApiError::unsupported(fields.path("type"), message));
        }
        None => return Err(ApiError::field(fields.path("type"), "missing: expected \"text\"")),
    }
    fields.string("text")?.ok_or_else(|| ApiError::field(fields.path("text"), "missing: expected a string"))
}

/// A tool call of an earlier answer. OpenAI sends its arguments as JSON in a string; templates want the object.
fn read_tool_call(path: &str, call: &Value) -> Result<Value, ApiError> {
    let fields = Fields::at(path, call)?;
    let Some(function) = fields.fields("function")? else {
        return Err(ApiError::field(fields.path("function"), "missing: expected an object"));
    };
    if function.string("name")?.is_none() {
        return Err(ApiError::field(function.path("name"), "missing: expected a string"));
    }
    let arguments = arguments(&function)?;
    let mut read_function = function.map().clone();
    read_function.insert("arguments".into(), arguments.into());
    let mut read = fields.map().clone();
    read.insert("function".into(), read_function.into());
    Ok(read.into())
}

/// The arguments of a call.
pub(super) fn arguments(call: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let path = call.path("arguments");
    match call.value("arguments") {
        None => Ok(Map::new()),
        Some(Value::Object(arguments)) => Ok(arguments.clone()),
        Some(Value::String(json)) if json.trim().is_empty() => Ok(Map::new()),
        Some(Value::String(json)) => serde_json::from_str(json)
            .map_err(|error| ApiError::field(path, format!("expected a JSON object in a string: {error}"))),
        Some(other) => Err(wrong(&path, "a JSON object in a string", other)),
    }
}

/// The name of a tool: one that is told from text when the model calls it.
pub(super) fn tool_name<'a>(tool: &Fields<'a>) -> Result<&'a str, ApiError> {
    match tool.string("name")? {
        Some(name) if is_tool_name(name) => Ok(name),
        found => {
            let expected = format!(
                "expected a name of 1 to {LONGEST_NAME} bytes without `<`, quotes, line breaks and outer white space"
            );
            let message = if found.is_some() { expected } else { format!("missing: {expected}") };
            Err(ApiError::field(tool.path("name"), message))
        }
    }
}

/// Reads `tools`: functions with a name. They reach the template as they are.
pub(super) fn read_tools(tools: &[Value]) -> Result<Vec<Value>, ApiError> {
    for (at, tool) in tools.iter().enumerate() {
        let fields = Fields::at(&format!("tools[{at}]"), tool)?;
        match fields.string("type")? {
            Some("function") => (),
            Some(other) => {
                let message = format!("{other:?} is not supported: only functions are");
                return Err(ApiError::unsupported(fields.path("type"), message));
            }
            None => return Err(ApiError::field(fields.path("type"), "missing: expected \"function\"")),
        }
        let Some(function) = fields.fields("function")? else {
            return Err(ApiError::field(fields.path("function"), "missing: expected an object"));
        };
        function.fields("parameters")?;
        function.string("description")?;
        tool_name(&function)?;
    }
    Ok(tools.to_vec())
}
