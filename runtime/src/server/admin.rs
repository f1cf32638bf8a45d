//! `/admin/reload` and `/admin/ranks`: for who runs the server, not for who asks it.

use super::auth::ApiKeys;
use super::error::ApiError;
use super::fields::{self, Fields, wrong};
use super::request::Context;
use crate::reload::ReloadRequest;
use axum::http::header::{FORWARDED, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, Uri};
use formats::manifest::MAX_RANKS;
use serde_json::Value;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// Longest name of a folder, in bytes; no file system has longer ones.
pub(super) const MAX_DIR_BYTES: usize = 4096;

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(pub(super) SocketAddr);

/// Where the server has keys, they are asked for as everywhere. Where it has none, only programs on this machine may ask: no other
/// machine, nobody behind a proxy, and no page that a browser on this machine shows.
pub(super) fn check(
    keys: &ApiKeys,
    peer: Option<&Peer>,
    headers: &HeaderMap,
    uri: &Uri,
) -> Result<(), ApiError> {
    if !keys.is_empty() {
        return keys.check(headers);
    }
    let is_near = peer.is_some_and(|Peer(address)| address.ip().to_canonical().is_loopback());
    let is_forwarded = headers.contains_key(FORWARDED)
        || headers.contains_key(HeaderName::from_static("x-forwarded-for"))
        || headers.contains_key(ORIGIN);
    let mut hosts = headers.get_all(HOST).iter().map(|host| host.to_str().ok()).chain(uri.host().map(Some));
    let is_named = headers.contains_key(HOST) || uri.host().is_some();
    // A page elsewhere may have its name point here.
    if is_near && !is_forwarded && is_named && hosts.all(|host| host.is_some_and(names_loopback)) {
        return Ok(());
    }
    Err(ApiError::forbidden(
        "this server has no API keys, so only programs on its own machine may ask for this, under the name localhost: give it keys (--api-key-file) and send one",
    ))
}

fn names_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// `{dir, ranks, verify, in_place}`
pub(super) fn read(body: &[u8], _context: &Context<'_>) -> Result<ReloadRequest, ApiError> {
    let map = fields::object(body)?;
    let fields = Fields::new(&map);
    let standard = ReloadRequest::default();
    let dir = fields.string("dir")?;
    if dir.is_some_and(|dir| dir.is_empty() || dir.len() > MAX_DIR_BYTES || dir.contains('\0')) {
        let message = format!("expected the name of a folder, 1 to {MAX_DIR_BYTES} bytes");
        return Err(ApiError::field("dir", message));
    }
    let ranks = fields.array("ranks")?.map(|ranks| {
        let rank = |(at, value): (usize, &Value)| {
            let number = value.as_u64().and_then(|rank| usize::try_from(rank).ok());
            number.filter(|&rank| rank < MAX_RANKS).ok_or_else(|| {
                wrong(&format!("ranks[{at}]"), &format!("a whole number from 0 to {}", MAX_RANKS - 1), value)
            })
        };
        if ranks.is_empty() || ranks.len() > MAX_RANKS {
            return Err(ApiError::field("ranks", format!("expected 1 to {MAX_RANKS} numbers of ranks")));
        }
        ranks.iter().enumerate().map(rank).collect()
    });
    Ok(ReloadRequest {
        dir: dir.map(PathBuf::from),
        ranks: ranks.transpose()?,
        verify: fields.boolean("verify")?.unwrap_or(standard.verify),
        in_place: fields.boolean("in_place")?.unwrap_or(standard.in_place),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn without_keys_only_programs_on_this_machine_may_ask() {
        let near: SocketAddr = "127.0.0.1:5".parse().unwrap();
        let asks = |address: SocketAddr, headers: &[(&'static str, &'static str)]| {
            let mut map = HeaderMap::from_iter([(HOST, HeaderValue::from_static("localhost:8000"))]);
            map.extend(
                headers
                    .iter()
                    .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))),
            );
            check(&ApiKeys::default(), Some(&Peer(address)), &map, &Uri::from_static("/admin/ranks")).is_ok()
        };
        assert!(asks(near, &[]));
        assert!(asks("[::1]:5".parse().unwrap(), &[("host", "[::1]:8000")]));
        assert!(asks("[::ffff:127.0.0.1]:5".parse().unwrap(), &[("host", "127.0.0.1")]));
        assert!(!asks("10.0.0.1:5".parse().unwrap(), &[]));
        for header in [
            ("origin", "http://localhost:8000"),
            ("x-forwarded-for", "10.0.0.1"),
            ("forwarded", "for=10.0.0.1"),
            ("host", "evil.example"),
            ("host", "127.0.0.1.evil.example:8000"),
        ] {
            assert!(!asks(near, &[header]), "{header:?}");
        }
        let keys = ApiKeys::new(["k"]);
        let uri = Uri::from_static("/");
        assert!(check(&keys, Some(&Peer(near)), &HeaderMap::new(), &uri).is_err(), "keys are for all");
        let key =
            HeaderMap::from_iter([(HeaderName::from_static("x-api-key"), HeaderValue::from_static("k"))]);
        assert!(check(&keys, None, &key, &uri).is_ok());
    }
}
