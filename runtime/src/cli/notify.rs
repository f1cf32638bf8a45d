//! Tells systemd how far the server is, where systemd has started it (`Type=notify`, sd_notify(3)).

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Says `state`, such as `READY=1`. Where nobody listens nothing happens: the server does not need it.
pub(super) fn tell(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let told = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = told {
        tracing::warn!("NOTIFY_SOCKET: {error}");
    }
}
