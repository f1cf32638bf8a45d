//! What templates expect of Python: methods, the date, exceptions.

use super::unsupported;
use minijinja::{Error, State, Value};

/// A call of `raise_exception`, told apart from a template's failures by its type.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Methods of Python's `str`, `dict` and `list` that Jinja templates call.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if name == "format" && value.as_str().is_some_and(is_too_wide) {
        return Err(unsupported("format: only widths of up to four digits are supported"));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Whether `str.format` could be made to write any amount of padding: a width of many digits, or one that is an argument.
fn is_too_wide(format: &str) -> bool {
    let many_digits = format.as_bytes().windows(5).any(|digits| digits.iter().all(u8::is_ascii_digit));
    let plain = format.replace("{{", "");
    let by_argument = plain.split('{').skip(1).any(|field| !field.contains('}'));
    many_digits || by_argument
}

/// `raise_exception(message)`: the conversation is not one that the template has a form for.
pub(super) fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(unsupported("raise_exception").with_source(Raised(message.to_owned())))
}

/// `strftime_now(format)`: the local time now.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now())
        .map_err(|error| unsupported(format!("strftime_now({format:?}): {error}")))
}

/// The message of `raise_exception`, if that is what the error is.
pub(super) fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(raised) = error.downcast_ref::<Raised>() {
            return Some(raised.0.clone());
        }
        source = error.source();
    }
    None
}

/// Message and line of a template's error.
pub(super) fn one_line(error: &Error) -> String {
    let message = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    match error.line() {
        Some(line) => format!("{message} (line {line})"),
        None => message,
    }
}
