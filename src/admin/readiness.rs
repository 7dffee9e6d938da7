//! `/readyz`: readiness, and why reads are forwarded; `/servez`: whether new clients are served at all.

use std::fmt::Write;

use super::handles::Handles;
use super::status::certificates::certificates;
use crate::diagnosis::{self, Severity};
use rangecache_base::telemetry::Reason;
use rangecache_mirror::lineage::Auth;

/// Whether every mirror of the start is loaded or disabled (over budget), and the process is not draining.
pub(super) fn is_ready(handles: &Handles) -> bool {
    !handles.draining.is_cancelled()
        && handles
            .mirrors
            .awaited()
            .all(|mirror| !matches!(mirror.view(), Err(reason) if reason != Reason::OverBudget))
}

/// Why new clients should go to another instance: they would get errors from this one. A mirror that is cold is no reason, because its
/// reads are forwarded.
pub(super) fn cannot_serve(handles: &Handles) -> Option<&'static str> {
    if handles.draining.is_cancelled() {
        Some("draining\n")
    } else if handles.upstream.is_silent() && !handles.mirrors.serve_stale() {
        Some("no member of etcd answers\n")
    } else {
        None
    }
}

/// Returns one line per reason to forward reads, and one per mirror.
pub(super) fn describe(handles: &Handles) -> String {
    let mut lines = Vec::new();
    if handles.draining.is_cancelled() {
        lines.push("draining".to_owned());
    }
    let credentials = handles.upstream.credentials();
    if let Some(problem) = credentials.problem() {
        lines.push(diagnosis::user_problem(&problem).text());
    } else if handles.mirrors.cluster_state.auth() == Auth::On && !credentials.name_a_user() {
        lines.push(diagnosis::no_own_user().text());
    }
    if let Some(finding) = diagnosis::different_clusters(&handles.upstream.mixed_clusters()) {
        lines.push(finding.text());
    }
    for certificate in certificates(handles) {
        if certificate.days_left < 0 {
            lines.push(format!("--{} has expired", certificate.flag));
        }
    }
    for (gate, state) in handles.upstream.gates() {
        let finding = diagnosis::gates::finding(gate, state);
        if finding.severity >= Severity::Warning {
            lines.push(finding.title);
        }
    }
    lines.extend(handles.mirrors.all().map(|mirror| match mirror.view() {
        Ok(view) => format!(
            "{}: in service at revision {}, {} keys, {} bytes",
            mirror.name,
            view.revision,
            view.tree.len(),
            mirror.memory_bytes()
        ),
        Err(reason) => format!(
            "{}: out of service ({}), {} keys loaded",
            mirror.name,
            reason.as_str(),
            mirror.metrics.load_keys.get()
        ),
    }));
    lines.iter().fold(String::new(), |mut text, line| {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{line}");
        text
    })
}
