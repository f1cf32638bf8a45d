//! A request's fields by name: each is absent, right, or an error that names it. `null` is absent.

use super::error::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// The fields of an object of a request.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// The path of the object, with its dot; empty for the request itself.
    within: String,
}

/// Reads a body.
pub(super) fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => {
            Err(ApiError::bad_request(format!("the body: expected a JSON object, found {}", brief(&other))))
        }
        Err(error) => Err(ApiError::bad_request(format!("the body is not JSON: {error}"))),
    }
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, within: String::new() }
    }

    /// The fields of a value inside the request, which is at `path`.
    pub(super) fn at(path: &str, value: &'a Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, within: format!("{path}.") }),
            other => Err(wrong(path, "an object", other)),
        }
    }

    /// The name of a field with its path.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.within)
    }

    pub(super) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    pub(super) fn value(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub(super) fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub(super) fn array(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    pub(super) fn fields(&self, name: &str) -> Result<Option<Self>, ApiError> {
        self.value(name).map(|value| Self::at(&self.path(name), value)).transpose()
    }

    pub(super) fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.read(name, &expected, |value| value.as_f64().filter(|number| range.contains(number)))
    }

    /// A whole number; 16.0 is one.
    pub(super) fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let expected = match *range.end() {
            i64::MAX => format!("a whole number from {} on", range.start()),
            end => format!("a whole number from {} to {end}", range.start()),
        };
        self.read(name, &expected, |value| whole(value).filter(|number| range.contains(number)))
    }

    /// The field read by a function that knows what it must be.
    pub(super) fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        read(value).map(Some).ok_or_else(|| wrong(&self.path(name), expected, value))
    }
}

/// A field that is not what it must be.
pub(super) fn wrong(path: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::field(path, format!("expected {expected}, found {}", brief(found)))
}

fn whole(value: &Value) -> Option<i64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    value.as_i64().or_else(|| {
        value
            .as_f64()
            .filter(|number| number.fract() == 0.0 && number.abs() <= EXACT)
            .map(|number| number as i64)
    })
}

/// A value in an error message: its kind where it is long.
fn brief(value: &Value) -> String {
    const LONGEST: usize = 40;
    match value {
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        Value::String(text) if text.len() > LONGEST => format!("a string of {} bytes", text.len()),
        value => value.to_string(),
    }
}

/// Fields that change the answer in a way this server does not do, and the values with which they change nothing.
/// They are refused by name: an answer that ignores them would be wrong without a word.
const REFUSED: &[(&str, &[Neutral])] = &[
    ("best_of", &[Neutral::One]),
    ("use_beam_search", &[Neutral::False]),
    ("length_penalty", &[Neutral::One]),
    ("suffix", &[Neutral::Empty]),
    ("bad_words", &[Neutral::Empty]),
    ("allowed_token_ids", &[]),
    ("logits_processors", &[Neutral::Empty]),
    ("functions", &[Neutral::Empty]),
    ("function_call", &[]),
    ("modalities", &[Neutral::TextOnly]),
    ("audio", &[]),
    ("chat_template", &[]),
    ("documents", &[Neutral::Empty]),
    ("add_generation_prompt", &[Neutral::True]),
    ("continue_final_message", &[Neutral::False]),
    ("include_stop_str_in_output", &[Neutral::False]),
    ("skip_special_tokens", &[Neutral::True]),
    ("truncate_prompt_tokens", &[]),
    ("prompt_embeds", &[]),
];

/// A value that asks for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neutral {
    One,
    False,
    True,
    /// An empty string, list or object.
    Empty,
    /// `["text"]`.
    TextOnly,
}

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::One => value.as_f64() == Some(1.0),
            Self::False => value.as_bool() == Some(false),
            Self::True => value.as_bool() == Some(true),
            Self::Empty => match value {
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            },
            Self::TextOnly => value.as_array().is_some_and(|items| items.len() == 1 && items[0] == "text"),
        }
    }

    fn spelling(self) -> &'static str {
        match self {
            Self::One => "1",
            Self::False => "false",
            Self::True => "true",
            Self::Empty => "empty",
            Self::TextOnly => "[\"text\"]",
        }
    }
}

/// Refuses what this server does not do.
pub(super) fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    for (name, neutral) in REFUSED {
        let Some(value) = fields.value(name) else {
            continue;
        };
        if neutral.iter().any(|neutral| neutral.is(value)) {
            continue;
        }
        let message = match neutral {
            [] => "not supported: leave it out".to_owned(),
            [neutral, ..] => format!("only {} is supported, found {}", neutral.spelling(), brief(value)),
        };
        return Err(ApiError::unsupported(fields.path(name), message));
    }
    Ok(())
}
