//! Requests that change the process: `POST /reload`. Accepted from this host alone, and not if a web page caused them.

use http::{Method, StatusCode};
use serde_json::json;

use super::handles::Handles;
use crate::net::Transport;

/// Status and JSON of a response.
pub(super) type Controlled = (StatusCode, serde_json::Value);

/// Whether the path names something that changes the process.
pub(super) fn is_control(path: &str) -> bool {
    path == "/reload"
}

/// Performs the request.
pub(super) async fn control(
    handles: &Handles,
    method: &Method,
    path: &str,
    transport: Transport,
) -> Controlled {
    if !transport.local {
        let error = "this request is accepted from loopback addresses of rangecache's own host alone";
        return (StatusCode::FORBIDDEN, json!({ "error": error }));
    }
    match (path, method) {
        ("/reload", &Method::POST) => match handles.reload.reload().await {
            Ok(reloaded) => (StatusCode::OK, json!(reloaded)),
            Err(error) => (StatusCode::BAD_REQUEST, json!({ "error": error })),
        },
        _ => {
            let error = "use POST /reload";
            (StatusCode::METHOD_NOT_ALLOWED, json!({ "error": error }))
        }
    }
}
