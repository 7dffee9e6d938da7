//! Memory of watches from memory as a whole (`--watch-max-bytes`): what the fan-outs hold counts against the budget, too.

use std::{sync::Arc, time::Duration};

use rangecache_edge::limits::{ByteKind, BytesLedger};
use rangecache_mirror::{Mirrors, fan_out::FanOutBounds};
use tokio::time::MissedTickBehavior;

use super::metrics::WatchMetrics;

/// Interval at which what the fan-outs hold is counted: they determine it as often.
const INTERVAL: Duration = Duration::from_secs(1);

/// Topics whose watchers are gone are kept, for clients that connect again, up to the budget divided by this.
const UNUSED_DIVISOR: u64 = 16;

/// Counts what the fan-outs of `mirrors` hold in `ledger`, and sets the gauges of it, until dropped.
pub(super) async fn account(mirrors: &Mirrors, ledger: &Arc<BytesLedger>, metrics: &WatchMetrics) {
    // All that is not for streams and watchers.
    let max_list_bytes = ledger.max_bytes(ByteKind::Watch) - ledger.max_bytes(ByteKind::WatchStream);
    let mut topics = ledger.own_account().hold(ByteKind::Watch);
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let mut bytes = 0;
        let count = mirrors.all().count().max(1) as u64;
        let bounds = FanOutBounds {
            max_unused_bytes: ledger.max_bytes(ByteKind::Watch) / count / UNUSED_DIVISOR,
            max_list_bytes: max_list_bytes / count,
        };
        for mirror in mirrors.all() {
            let held = mirrors.fan_out(mirror).map(|fan_out| {
                fan_out.set_bounds(bounds);
                fan_out.held()
            });
            let held = held.unwrap_or_default();
            bytes += held.bytes;
            metrics.set_behind(&mirror.name, held.behind_revisions);
        }
        topics.set(bytes);
        let [streams, all] = [ByteKind::WatchStream, ByteKind::Watch].map(|kind| ledger.used_bytes(kind));
        metrics.set_bytes(bytes, streams, all);
    }
}
