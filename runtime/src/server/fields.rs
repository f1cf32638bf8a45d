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

/// What some programs write before UTF-8. It says nothing, and JSON's readers may pass over it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads a body.
pub(super) fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body)) {
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
        #[cfg(test)]
        asked::note(self.path(name));
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

/// A whole number, also where it is written with a fraction of nothing.
pub(super) fn whole(value: &Value) -> Option<i64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    value.as_i64().or_else(|| {
        value
            .as_f64()
            .filter(|number| number.fract() == 0.0 && number.abs() <= EXACT)
            .map(|number| number as i64)
    })
}

/// A value in an error message: its kind where it is long.
pub(super) fn brief(value: &Value) -> String {
    const LONGEST: usize = 40;
    match value {
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        Value::String(text) if text.len() > LONGEST => format!("a string of {} bytes", text.len()),
        value => value.to_string(),
    }
}

/// Which fields the readers ask for, so that a test can hold the OpenAPI document against them.
#[cfg(test)]
pub(super) mod asked {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    thread_local! {
        static PATHS: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
    }

    pub(super) fn note(path: String) {
        PATHS.with_borrow_mut(|paths| paths.insert(path));
    }

    /// The paths that were asked for on this thread since the last call.
    pub(in super::super) fn take() -> BTreeSet<String> {
        PATHS.with_borrow_mut(std::mem::take)
    }
}
