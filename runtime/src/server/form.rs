//! The form of a body: JSON, as it is.

use super::error::ApiError;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName, ORIGIN};
use axum::http::{HeaderMap, Method};

/// Refuses a body that its headers say is no JSON, or is compressed.
///
/// What `curl -d` calls a form is taken for JSON, and so is a body that is called nothing; not from a browser, which sends
/// these two for pages of other origins without asking first.
pub(super) fn check(method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    if method != Method::POST {
        return Ok(());
    }
    let encodings = values(headers, &CONTENT_ENCODING);
    if let Some(encoding) = encodings.iter().find(|encoding| !encoding.eq_ignore_ascii_case("identity")) {
        let message = format!("{encoding:?} is not decoded here: send the body as it is");
        return Err(ApiError::unsupported_body(&CONTENT_ENCODING, message));
    }
    let is_from_browser = headers.contains_key(ORIGIN);
    let types = values(headers, &CONTENT_TYPE);
    let is_taken = match types.as_slice() {
        [] => !is_from_browser,
        [one] => is_json(one) || (is_form(one) && !is_from_browser),
        _ => false,
    };
    if is_taken {
        return Ok(());
    }
    let found = if types.is_empty() { "nothing".to_owned() } else { format!("{:?}", types.join(", ")) };
    Err(ApiError::unsupported_body(&CONTENT_TYPE, format!("expected application/json, found {found}")))
}

/// What a header says, item by item.
fn values(headers: &HeaderMap, name: &HeaderName) -> Vec<String> {
    let lines =
        headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let items = lines.flat_map(|line| line.split(',').map(|item| item.trim().to_owned()).collect::<Vec<_>>());
    items.filter(|item| !item.is_empty()).collect()
}

/// The media type without its parameters.
fn essence(kind: &str) -> String {
    kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

fn is_json(kind: &str) -> bool {
    let essence = essence(kind);
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

fn is_form(kind: &str) -> bool {
    essence(kind) == "application/x-www-form-urlencoded"
}
