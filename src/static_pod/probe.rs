//! State of a rangecache, read from its `/status`.

use std::io;

use serde_json::Value;

use crate::running::get;
use rangecache_base::net::Url;

/// A rangecache that responds.
#[derive(Debug)]
pub(super) struct Pod {
    /// Name of its pod, which ends with the node's; empty if it does not know it.
    pub(super) name: String,
    /// Why it is not ready; `None` if it is.
    pub(super) unready: Option<String>,
}

/// Reads the state of the rangecache at `url`, of one response and therefore of one process: two may share the port.
///
/// # Errors
/// If it does not respond, or something else responds.
pub(super) async fn look(url: &Url) -> io::Result<Pod> {
    let status: Value = serde_json::from_str(&get(url, "/status").await?)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let Some(is_ready) = status["ready"].as_bool() else {
        let text = "/status does not say whether it is ready";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    };
    let mirrors = status["mirrors"].as_array().map_or(&[][..], Vec::as_slice);
    let waiting = mirrors.iter().filter_map(|mirror| {
        let reason = mirror["out_of_service"].as_str()?;
        Some(format!("{} is out of service: {reason}", text(&mirror["name"])))
    });
    Ok(Pod {
        name: text(&status["pod"]),
        unready: (!is_ready).then(|| waiting.collect::<Vec<_>>().join(", ")),
    })
}
