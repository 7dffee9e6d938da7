//! What must be so for memory to answer all that it could.

use std::time::Duration;

use serde::Serialize;

use super::findings::Severity;
use crate::mirror::cluster_state::Auth;
use crate::telemetry::Metrics;
use crate::upstream::{EndpointView, NoRangeStream, Version, gates};

/// Something that must be so for memory to answer all that it could.
#[derive(Debug, Serialize)]
pub(super) struct Gate {
    pub(super) name: &'static str,
    pub(super) severity: Severity,
    pub(super) state: String,
    pub(super) meaning: &'static str,
}

/// All of them.
pub(super) fn gates(
    version: Option<Version>,
    auth: Auth,
    has_own_user: bool,
    endpoints: &[EndpointView],
    metrics: &Metrics,
) -> Vec<Gate> {
    let (progress, state) = match version {
        None => (Severity::Note, "not known yet".to_owned()),
        Some(version) if gates::PROGRESS_NOTIFICATIONS.is_open(version) => {
            (Severity::Good, format!("trusted (etcd {version})"))
        }
        Some(version) => (Severity::Warning, format!("not trusted (etcd {version})")),
    };
    let progress = Gate {
        name: "Progress notifications",
        severity: progress,
        state,
        meaning: "Linearizable reads are answered from memory only where etcd's word about a watch's progress can be trusted: \
                  from 3.4.31, 3.5.13 and 3.6.0 on, on every member.",
    };
    let have = endpoints
        .iter()
        .filter(|view| view.no_range_stream.is_none())
        .count();
    let reason = endpoints.iter().find_map(|view| view.no_range_stream);
    let (stream, state) = match reason {
        _ if version.is_none() => (Severity::Note, "not known yet".to_owned()),
        None => (Severity::Good, "used".to_owned()),
        Some(NoRangeStream::Off) => (Severity::Note, "off (--range-stream)".to_owned()),
        Some(_) if have > 0 => (
            Severity::Note,
            format!("used on {have} of {} endpoints", endpoints.len()),
        ),
        Some(NoRangeStream::Version) => (Severity::Note, "etcd has none before 3.7".to_owned()),
        Some(_) => (Severity::Note, "etcd answers that it has none".to_owned()),
    };
    let stream = Gate {
        name: "RangeStream",
        severity: stream,
        state,
        meaning: "With it, loads and large reads that memory cannot answer cost etcd less memory. Clients may ask for it either way.",
    };
    let (severity, state) = match (auth, has_own_user) {
        (Auth::Off, _) => (Severity::Good, "off"),
        (Auth::Unknown, _) => (Severity::Note, "not known yet"),
        (Auth::On, true) => (Severity::Good, "on; rangecache has a user of its own"),
        (Auth::On, false) => (Severity::Warning, "on; rangecache has no user of its own"),
    };
    let auth = Gate {
        name: "etcd's auth",
        severity,
        state: state.to_owned(),
        meaning: "While it is on, memory answers only what etcd lets that very caller read, asked for each read.",
    };
    let interval = metrics.process.limit("verify_interval_seconds").unwrap_or(0.0);
    let (severity, state) = if interval > 0.0 {
        let every = humantime::format_duration(Duration::from_secs_f64(interval));
        (Severity::Good, format!("every {every}"))
    } else {
        (Severity::Note, "off (--verify-interval)".to_owned())
    };
    let verification = Gate {
        name: "Verification",
        severity,
        state,
        meaning: "Every mirror is held against etcd, in the background.",
    };
    vec![progress, stream, auth, verification]
}
