//! Memory of watches from memory as a whole (`--watch-max-bytes`): what the fan-outs hold counts against the budget, too.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use super::metrics::WatchMetrics;
use rangecache_edge::limits::ByteBudget;
use rangecache_mirror::Mirrors;
use rangecache_mirror::fan_out::FanOutBounds;

/// Interval at which what the fan-outs hold is counted: they determine it as often.
const INTERVAL: Duration = Duration::from_secs(1);

/// Streams and watchers are admitted up to the budget less the budget divided by this: the rest is for their events and the
/// fan-outs' lists of events. The events that are on their way keep no stream out: they wait for each other, and leave soon.
const EVENTS_DIVISOR: u64 = 4;

/// Topics whose watchers are gone are kept, for clients that connect again, up to the budget divided by this.
const UNUSED_DIVISOR: u64 = 16;

/// The budget `--watch-max-bytes`.
#[derive(Debug)]
pub(super) struct WatchBudgets {
    pub(super) all: Arc<ByteBudget>,
    /// The part of it for streams and watchers, which count in both.
    pub(super) streams: Arc<ByteBudget>,
}

impl WatchBudgets {
    pub(super) fn new(max_bytes: u64, metrics: &WatchMetrics) -> WatchBudgets {
        let of_streams = max_bytes - max_bytes / EVENTS_DIVISOR;
        WatchBudgets {
            all: ByteBudget::first_come(max_bytes, metrics.budget()),
            streams: ByteBudget::first_come(of_streams, metrics.stream_budget()),
        }
    }
}

/// Counts what the fan-outs of `mirrors` hold against `budgets`, and sets the gauges of it, until dropped.
pub(super) async fn account(mirrors: &Mirrors, budgets: &WatchBudgets, metrics: &WatchMetrics) {
    let mut topics = budgets.all.hold();
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let mut bytes = 0;
        let of_mirror = budgets.all.max_bytes() / mirrors.all().count().max(1) as u64;
        let bounds = FanOutBounds {
            max_unused_bytes: of_mirror / UNUSED_DIVISOR,
            max_list_bytes: of_mirror / EVENTS_DIVISOR,
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
        metrics.set_bytes(bytes, budgets.streams.used_bytes(), budgets.all.used_bytes());
    }
}
