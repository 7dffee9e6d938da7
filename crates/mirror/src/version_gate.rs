//! The version gate: linearizable reads are forwarded while an endpoint's progress notifications cannot be trusted.

use rangecache_upstream::{OldEtcd, Upstream, gates};
use tokio_util::sync::CancellationToken;

/// Logs a warning when the version gate closes; cancels `stop`, which stops the process, instead if `old_etcd` is [`OldEtcd::Refuse`].
pub(super) async fn run(upstream: &Upstream, stop: &CancellationToken, old_etcd: OldEtcd) {
    let gate = &gates::PROGRESS_NOTIFICATIONS;
    let mut changed = upstream.version_changes();
    loop {
        if let Some(lowest) = upstream.lowest_version()
            && !gate.is_open(lowest)
        {
            match old_etcd {
                OldEtcd::Forward => tracing::warn!(version = %lowest,
                    "this etcd's progress notifications cannot be trusted: {}. \
                     Upgrade etcd to {}", gate.without, gate.versions()),
                OldEtcd::Refuse => {
                    tracing::error!(version = %lowest,
                        "this etcd is too old and --old-etcd=refuse is set: stopping. \
                         Upgrade etcd to {}, or set --old-etcd=forward", gate.versions());
                    stop.cancel();
                }
            }
        }
        if changed.changed().await.is_err() {
            return;
        }
    }
}
