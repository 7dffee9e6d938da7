//! Requests that change the process: `POST /reload`, `POST /forward-all` and `DELETE /forward-all`. Accepted from where
//! `--control` says, at most from this host, and not if a web page caused them.

use http::{Method, StatusCode};
use serde_json::json;

use super::handles::Handles;
use rangecache_base::net::Transport;
use rangecache_base::telemetry::state_changes::ChangeKind;

/// Status and JSON of a response.
pub(super) type Controlled = (StatusCode, serde_json::Value);

/// Whether the path names something that changes the process.
pub(super) fn is_control(path: &str) -> bool {
    ["/reload", "/forward-all"].contains(&path)
}

/// Performs the request.
pub(super) async fn control(
    handles: &Handles,
    method: &Method,
    path: &str,
    transport: Transport,
) -> Controlled {
    let from = handles.live.load().listen.control;
    if !from.permits(transport) {
        return (StatusCode::FORBIDDEN, json!({ "error": from.refusal() }));
    }
    match (path, method) {
        ("/reload", &Method::POST) => match handles.reload.reload().await {
            Ok(reloaded) => (StatusCode::OK, json!(reloaded)),
            Err(error) => (StatusCode::BAD_REQUEST, json!({ "error": error })),
        },
        ("/forward-all", &Method::POST) => forward_all(handles, true),
        ("/forward-all", &Method::DELETE) => forward_all(handles, false),
        _ => {
            let error = "use POST /reload, POST /forward-all or DELETE /forward-all";
            (StatusCode::METHOD_NOT_ALLOWED, json!({ "error": error }))
        }
    }
}

/// Switches memory off or on.
fn forward_all(handles: &Handles, is_on: bool) -> Controlled {
    if handles.mirrors.forward_all(is_on) {
        let kind = if is_on {
            ChangeKind::MemoryOff
        } else {
            ChangeKind::MemoryOn
        };
        handles.telemetry.state_changes.record(kind, "", "");
        if is_on {
            tracing::warn!(
                "an operator has switched memory off: etcd answers every read and continues every watch"
            );
        } else {
            tracing::info!("an operator has switched memory on again");
        }
    }
    (StatusCode::OK, json!({ "forward_all": is_on }))
}
