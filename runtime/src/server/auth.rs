//! API keys.

use super::error::ApiError;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

/// The keys that a server takes; without any it asks for none. Only their digests are kept.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<blake3::Hash>);

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

impl ApiKeys {
    /// These keys.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        Self(keys.into_iter().map(|key| blake3::hash(key.as_bytes())).collect())
    }

    /// Whether a server with these keys asks for one.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Holds a request's key against all of ours. How long that takes says nothing about them: digests are compared, each
    /// in constant time.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.is_empty() {
            return Ok(());
        }
        let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
        let key = bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()));
        let digest = blake3::hash(key.unwrap_or_default().as_bytes());
        // Equality of BLAKE3's hashes is constant-time; all keys are looked at.
        let known = self.0.iter().fold(false, |known, own| known | (*own == digest));
        if known && key.is_some() { Ok(()) } else { Err(ApiError::unauthorized()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(keys: &[&str], header: Option<(&'static str, &str)>) -> bool {
        let mut headers = HeaderMap::new();
        if let Some((name, value)) = header {
            headers.insert(name, value.parse().unwrap());
        }
        ApiKeys::new(keys.iter().copied()).check(&headers).is_ok()
    }

    #[test]
    fn either_header_may_have_any_of_the_keys() {
        assert!(check(&[], None));
        assert!(!check(&["a", "b"], None));
        for key in ["a", "b"] {
            assert!(check(&["a", "b"], Some(("authorization", &format!("Bearer {key}")))));
            assert!(check(&["a", "b"], Some(("authorization", &format!("bearer  {key}")))));
            assert!(check(&["a", "b"], Some(("x-api-key", key))));
        }
        for header in [
            ("authorization", "Bearer c"),
            ("authorization", "a"),
            ("authorization", "Basic a"),
            ("x-api-key", ""),
        ] {
            assert!(!check(&["a", "b"], Some(header)), "{header:?}");
        }
    }
}
