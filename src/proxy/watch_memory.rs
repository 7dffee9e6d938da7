//! Memory of watches from memory as a whole (`--watch-max-bytes`): what the hubs hold counts against the budget, too.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use crate::limits::ByteBudget;
use crate::mirror::Mirrors;
use crate::telemetry::metrics::WatchMetrics;

/// Interval at which what the hubs hold is counted: they determine it as often.
const INTERVAL: Duration = Duration::from_secs(1);

/// Counts what the hubs of `mirrors` hold against `budget`, and sets the gauges of it, until dropped.
pub(super) async fn account(mirrors: &Mirrors, budget: &Arc<ByteBudget>, metrics: &WatchMetrics) {
    let mut topics = budget.hold();
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let mut bytes = 0;
        for mirror in mirrors.all() {
            let held = mirrors
                .watch_hub(mirror)
                .map(|hub| hub.held())
                .unwrap_or_default();
            bytes += held.bytes;
            metrics.set_behind(&mirror.name, held.behind_revisions);
        }
        topics.set(bytes);
        metrics.set_bytes(bytes, budget.used_bytes());
    }
}
