//! Values of arguments as JSON.

use serde_json::Value;

/// What an argument may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A string and nothing else: its text is the value, as it stands.
    Text,
    /// Values of some types, one bit for each.
    Json(u8),
}

const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

impl Kind {
    /// Whatever the model writes.
    pub(super) const ANY: Self = Self::Json(u8::MAX);

    /// What a JSON schema says of a value.
    pub(super) fn of_schema(schema: &Value) -> Self {
        let strings = |values: &Vec<Value>| !values.is_empty() && values.iter().all(Value::is_string);
        let named = |name: &Value| name.as_str().map_or(0, bit);
        let bits = match &schema["type"] {
            name @ Value::String(_) => named(name),
            Value::Array(names) => names.iter().map(named).fold(0, |all, one| all | one),
            _ if schema["enum"].as_array().is_some_and(strings) || schema["const"].is_string() => {
                bit("string")
            }
            _ => u8::MAX,
        };
        match bits {
            0 => Self::ANY,
            bits if bits == bit("string") => Self::Text,
            bits => Self::Json(bits),
        }
    }

    /// The JSON of a value that the model wrote as `text`. JSON that the schema allows stays as it is, digit for digit.
    pub(super) fn json(self, text: &str) -> String {
        let quoted = || format!("\"{}\"", escape(text));
        let Self::Json(bits) = self else { return quoted() };
        let trimmed = text.trim();
        let json = match trimmed {
            // Python's names for them.
            "True" => "true",
            "False" => "false",
            "None" => "null",
            other => other,
        };
        let Ok(value) = serde_json::from_str::<Value>(json) else { return quoted() };
        let is_allowed = bits & type_of(&value) != 0;
        if is_allowed || bits & bit("string") == 0 { json.to_owned() } else { quoted() }
    }
}

/// The bit of a type by JSON schema's name for it; integers are numbers here.
fn bit(name: &str) -> u8 {
    let name = if name == "integer" { "number" } else { name };
    TYPES.iter().position(|known| *known == name).map_or(0, |at| 1 << at)
}

fn type_of(value: &Value) -> u8 {
    bit(match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    })
}

/// Whether a value of this schema is written as its bare text, and read as a string whatever it looks like.
pub fn is_bare_text(schema: &Value) -> bool {
    Kind::of_schema(schema) == Kind::Text
}

/// A text between the quotes of a JSON string.
pub(super) fn escape(text: &str) -> String {
    let quoted = serde_json::to_string(text).expect("every text is a JSON string");
    quoted[1..quoted.len() - 1].to_owned()
}
