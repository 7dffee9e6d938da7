//! The version gate: linearizable reads are forwarded while an endpoint's progress notifications cannot be trusted.

use super::mirrors::Mirrors;
use crate::config::OldEtcd;
use crate::upstream::gates;

/// Logs a warning when the version gate closes; stops the process instead if `old_etcd` is [`OldEtcd::Refuse`].
pub(super) async fn run(mirrors: &Mirrors, old_etcd: OldEtcd) {
    let mut changed = mirrors.upstream.version_changes();
    loop {
        if let Some(lowest) = mirrors.upstream.lowest_version()
            && !gates::PROGRESS_NOTIFICATIONS.is_open(lowest)
        {
            match old_etcd {
                OldEtcd::Forward => tracing::warn!(version = %lowest,
                    "this etcd's progress notifications cannot be trusted: linearizable reads are forwarded. \
                     Upgrade etcd to 3.4.31, 3.5.13, 3.6.0 or later"),
                OldEtcd::Refuse => {
                    tracing::error!(version = %lowest,
                        "this etcd is too old and --old-etcd=refuse is set: stopping. \
                         Upgrade etcd to 3.4.31, 3.5.13, 3.6.0 or later, or set --old-etcd=forward");
                    mirrors.stop.cancel();
                }
            }
        }
        if changed.changed().await.is_err() {
            return;
        }
    }
}
