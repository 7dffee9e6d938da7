//! `/readyz`: readiness, and why reads are forwarded; `/servez`: whether new clients are served at all.

use rangecache_base::telemetry::Reason;
use rangecache_mirror::view::Mirror;

use super::{checks, handles::Handles};
use rangecache_report::FindingId;

/// Whether every mirror of the start is loaded or disabled (over budget), and the process is not draining.
pub(super) fn is_ready(handles: &Handles) -> bool {
    !handles.draining.is_cancelled()
        && handles
            .mirrors
            .awaited()
            .all(|mirror| !matches!(mirror.view(), Err(reason) if reason != Reason::OverBudget))
}

/// Whether memory could answer some reads: a mirror in service has keys, or is of the whole keyspace, and memory is not switched off.
pub(super) fn answers_from_memory(handles: &Handles) -> bool {
    let has_keys = |mirror: &Mirror| {
        let view = mirror.view();
        view.is_ok_and(|view| !view.tree.is_empty() || mirror.scope.is_everything())
    };
    !handles.mirrors.forwards_all() && handles.mirrors.all().any(has_keys)
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
    if is_ready(handles) && !answers_from_memory(handles) {
        lines.push("nothing is answered from memory".to_owned());
    }
    lines.extend(checks::user_finding(handles).map(|finding| finding.text()));
    let clusters = rangecache_report::different_clusters(&handles.upstream.mixed_clusters());
    lines.extend(clusters.map(|finding| finding.text()));
    let certificates = checks::certificates(handles);
    let expired = certificates.iter().filter_map(checks::certificate_finding);
    let expired = expired.filter(|finding| finding.id == FindingId::CertificateExpired);
    let gates = checks::gates(handles);
    let closed = gates.into_iter().filter_map(|gate| gate.finding);
    lines.extend(expired.chain(closed).map(|finding| finding.title));
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
    // Each line ends.
    lines.push(String::new());
    lines.join("\n")
}
