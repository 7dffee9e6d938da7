//! State of a rangecache, read from its `/status`.

use std::io;
use std::time::Duration;

use serde_json::Value;

use crate::running::get;
use rangecache_base::net::Url;

/// A rangecache that responds.
#[derive(Debug)]
pub(super) struct Pod {
    /// Time since its start, in whole seconds.
    pub(super) uptime: Duration,
    pub(super) is_ready: bool,
}

/// Reads the state of the rangecache at `url`. Readiness and uptime are of one response, and therefore of one process.
///
/// # Errors
/// If it does not respond, or something else responds.
pub(super) async fn look(url: &Url) -> io::Result<Pod> {
    let status: Value = serde_json::from_str(&get(url, "/status").await?)?;
    let uptime = status.get("uptime_seconds").and_then(Value::as_u64);
    let is_ready = status.get("ready").and_then(Value::as_bool);
    match (uptime, is_ready) {
        (Some(uptime), Some(is_ready)) => Ok(Pod {
            uptime: Duration::from_secs(uptime),
            is_ready,
        }),
        _ => Err(invalid("/status names no uptime_seconds or ready")),
    }
}

/// The text of `/readyz`, which says why the rangecache at `url` is not ready.
pub(super) async fn reason(url: &Url) -> io::Result<String> {
    Ok(get(url, "/readyz").await?.trim().to_owned())
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
